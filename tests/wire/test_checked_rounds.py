"""Rounds that are checked, on ranks that are threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from wire_clauses import in_rounds
from wire_ranks import on_threads

from checked_rounds import CheckedRounds
from weft.wire.interface import WireFailed
from weft.wire.threads import thread_wires


class Both(CheckedRounds):
    """Closes the wire below, too, which a group closes itself."""

    def close(self):
        super().close()
        self.below.close()


def wires_of(size):
    return [Both(wire) for wire in thread_wires(size)]


RUN = partial(on_threads, make=wires_of)


def failure_of(use):
    with pytest.raises(WireFailed) as caught:
        use()
    return caught.value.failure


@in_rounds
def test_it_does_what_every_wire_does(size, body):
    RUN(size, body)


def test_ranks_that_expect_other_bytes_than_come_all_fail():
    def body(wire):
        sends = [(1, torch.ones(8))] if wire.rank == 0 else []
        recvs = [(0, 48)] if wire.rank == 1 else []
        failure = failure_of(wire.post(sends, recvs).wait)
        return failure.kind, failure.peer, failure.text

    text = "in a round rank 0 sends rank 1 32 bytes, which awaits 48"
    assert RUN(3, body) == [("garbled", 0, text)] * 3


def test_ranks_whose_messages_are_others_fail_though_their_bytes_are_as_many():
    def body(wire):
        if wire.rank == 0:
            failure_of(wire.post([(1, torch.ones(2)), (1, torch.ones(4))]).wait)
            return None
        failure = failure_of(wire.post((), [(0, 16), (0, 8)]).wait)
        return failure.kind, failure.peer

    assert RUN(2, body) == [None, ("garbled", 0)]


def test_a_rank_that_is_in_no_round_is_told_of():
    def body(wire):
        if wire.rank == 1:
            return None
        return failure_of(wire.post((), [(1, 8)]).wait).peer

    assert RUN(2, body) == [1, None]


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

    assert RUN(3, body) == [2, None, 0]
