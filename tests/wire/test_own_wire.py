"""A wire that a program registers: groups run over it, and who gets what wrong is named by all."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import weft
from weft.testing import RankFailure, processes
from weft.wire.registry import register_wire
from weft.wire.tcp import wire as tcp

BROKEN = 1
"""The rank whose factory does something wrong."""


class Mine:
    """A wire of a program's own, which passes everything on to another."""

    def __init__(self, inside):
        self.inside = inside
        self.rank = inside.rank
        self.size = inside.size
        self.device = inside.device
        self.features = inside.features
        for name in ("post", "abort", "failure", "close"):
            setattr(self, name, getattr(inside, name))

    def lease(self, nbytes):
        return None


def make_mine(start):
    assert start.host and start.timeout > 0 and start.process_group is not None
    assert start.exchange(bytes([start.rank])) == [bytes([rank]) for rank in range(start.size)]
    return Mine(tcp.make(start))


def raising(start):
    if start.rank == BROKEN:
        raise OSError("there is no such network here")
    return make_mine(start)


def nothing(start):
    return None if start.rank == BROKEN else make_mine(start)


def killed(start):
    if start.rank == BROKEN:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_mine(start)


def silent(start):
    if start.rank == BROKEN:
        time.sleep(4.0)
    return make_mine(start)


def summed(**options):
    with weft.init(**options) as group:
        rows = torch.tensor([group.rank, 9]), torch.ones(2, 3)
        indices, values = weft.sparse_all_reduce(rows)
        large = weft.all_reduce(torch.full((300_000,), float(group.rank + 1)))
        return indices.tolist(), values[-1].tolist(), large[0].item(), large.unique().numel()


def over_mine():
    register_wire("mine", make_mine)
    return summed(timeout=30, wire="mine")


def expected(size):
    return [*range(size), 9], [float(size)] * 3, size * (size + 1) / 2, 1


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_group_runs_over_a_registered_wire(size):
    assert processes(size, over_mine) == [expected(size)] * size


def after_a_broken(factory):
    register_wire("mine", factory)
    with pytest.raises(weft.Error) as caught:
        weft.init(timeout=30, wire="mine")
    return str(caught.value), summed(timeout=30)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (raising, "on rank 1 its factory raised OSError: there is no such network here"),
        (nothing, "on rank 1 its factory returned NoneType, which is no Wire"),
    ],
)
def test_what_goes_wrong_in_a_factory_raises_on_all_and_the_next_init_works(factory, text):
    for said, result in processes(3, after_a_broken, factory):
        assert said == f"wire 'mine' cannot be used: {text}"
        assert result == expected(3)


def during_a_death(factory):
    register_wire("mine", factory)
    began = time.monotonic()
    with pytest.raises(weft.WireError) as caught:
        weft.init(timeout=2 if factory is silent else 30, wire="mine")
    return caught.value.culprit, str(caught.value), time.monotonic() - began < 20.0


def test_who_dies_in_a_factory_is_named_by_the_others():
    with pytest.raises(RankFailure) as caught:
        processes(3, during_a_death, killed)
    assert "rank 1" in str(caught.value) and "SIGKILL" in str(caught.value)


def test_who_says_nothing_in_a_factory_is_named_by_all():
    results = processes(3, during_a_death, silent)
    for rank in (0, 2):
        culprit, text, in_time = results[rank]
        assert culprit == BROKEN and in_time
        assert f"rank {rank}: rank 1 did not come to make the wire within 2 s" in text


def differing():
    register_wire("mine", make_mine)
    with pytest.raises(weft.WeftError) as caught:
        weft.init(timeout=30, wire="mine" if os.environ["RANK"] == "2" else "tcp")
    return str(caught.value), summed(timeout=30)


def test_ranks_that_ask_for_different_wires_are_told_alike():
    for text, result in processes(3, differing):
        assert text.startswith("rank 0 was asked for wire 'tcp', and rank 2 for 'mine': give all")
        assert result == expected(3)


def unknown():
    register_wire("mine", make_mine)
    with pytest.raises(weft.WeftError) as caught:
        weft.init(timeout=30, wire="yours")
    return str(caught.value)


def test_an_unknown_name_lists_the_names_there_are():
    for text in processes(2, unknown):
        assert "wire 'yours' is unknown: use one of 'mine', 'mpi', 'tcp', 'torch'" in text
