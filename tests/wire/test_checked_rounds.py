"""Rounds that are checked: what would hang on a device, or be read as another message, fails."""

from __future__ import annotations

import torch
from wire_ranks import on_threads

from checked_rounds import CheckedRounds
from weft.wire.interface import WireFailed


def on_rounds(size, body):
    """What a body returns on each of so many ranks, or how its wire failed."""

    def program(wire):
        try:
            return body(CheckedRounds(wire))
        except WireFailed as error:
            return error.failure.kind

    return on_threads(size, program)


def test_a_message_of_another_round_is_not_received():
    def body(wire):
        peer = 1 - wire.rank
        sends = [(peer, torch.ones(2))]
        first = wire.post(sends if wire.rank == 0 else [])
        if wire.rank == 1:
            first.wait()
        second = wire.post((), [(peer, 8)] if wire.rank == 1 else [])
        return (first if wire.rank == 0 else second).wait()

    assert "stuck" in on_rounds(2, body)


def test_some_ranks_have_rounds_of_their_own():
    def body(wire):
        if wire.rank == 1:
            return None
        some = wire.among([2, 0])
        other = 1 - some.rank
        got = some.post([(other, torch.tensor([wire.rank]))], [(other, 8)])
        assert got.waiting_for() == [other]
        (part,) = got.wait()
        return part.view(torch.int64).item()

    assert on_rounds(3, body) == [2, None, 0]
