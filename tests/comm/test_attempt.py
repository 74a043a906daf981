"""What fails on one rank is told to all, in `attempt` and in what the others call meanwhile."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.testing import spmd


@spmd(1, 3)
def test_a_function_is_called_on_every_rank(wire):
    assert weft.attempt(lambda: wire.rank) == wire.rank
    assert weft.attempt(lambda: None, wire, name="nothing") is None


def failing(error):
    def function():
        raise error

    return function


@spmd(1, 3, 18, on=("threads",))  # above 16 ranks statements are combined
def test_what_one_rank_raises_all_raise(wire):
    last = wire.size - 1
    for error, text in (
        (KeyError("lost"), f"rank {last}: KeyError: 'lost'"),
        (weft.WeftError("x is 3: pass 4"), f"rank {last}: x is 3: pass 4"),
        (weft.WeftError(f"rank {last}: x is 3"), f"rank {last}: x is 3"),
    ):
        with pytest.raises(weft.WeftError) as caught:
            weft.attempt(failing(error) if wire.rank == last else lambda: 0)
        assert str(caught.value) == text
        assert caught.value.__cause__ is (error if wire.rank == last else None)
        assert weft.attempt(lambda: 1) == 1


CALLS = {
    "sparse_all_reduce": lambda wire: weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1))),
    "a list": lambda wire: weft.sparse_all_reduce([(torch.tensor([1]), torch.ones(1))]),
    "sparse_all_gather": lambda wire: weft.sparse_all_gather((torch.tensor([1]), torch.ones(1))),
    "all_to_all": lambda wire: weft.all_to_all([torch.ones(2)] * wire.size),
    "exchange": lambda wire: weft.exchange(torch.ones(2), [torch.tensor([1])] * wire.size),
    "all_reduce": lambda wire: weft.all_reduce(torch.ones(2)),
    "a large all_reduce": lambda wire: weft.all_reduce(torch.ones(50_000)),
}


@pytest.mark.parametrize("name", CALLS)
@spmd(3, 18, on=("threads",))
def test_a_rank_that_cannot_join_a_call_tells_those_that_are_in_it(wire, name):
    with pytest.raises(weft.WeftError, match=r"^rank 1: OSError: no such file$"):
        if wire.rank == 1:
            weft.attempt(failing(OSError("no such file")))
        else:
            CALLS[name](wire)
    assert CALLS[name](wire) is not None


@spmd(2, on=("threads",))
def test_names_are_compared_and_may_be_long(wire):
    with pytest.raises(weft.WeftError, match=r"different calls: rank 0 has load 0 .* rank 1 has"):
        weft.attempt(lambda: None, name=f"load {wire.rank}")
    assert weft.attempt(lambda: 5, name="ö" * 900) == 5


@spmd(2, on=("threads",))
def test_the_function_must_not_call_the_group(wire):
    with pytest.raises(weft.WeftError, match=r"rank 0: all_reduce was called from inside attempt"):
        weft.attempt(lambda: weft.all_reduce(torch.ones(1)))
