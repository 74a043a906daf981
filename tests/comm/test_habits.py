"""Calls that ranks make again: what was heard before is only compared, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.comm.habit import Habit
from weft.testing import spmd

SMALL, LARGE = 5, 70_000
SIZES = {
    "small": lambda source, to: SMALL + source,
    "none": lambda source, to: 0,
    "large": lambda source, to: LARGE + to,
    "mixed": lambda source, to: (0, SMALL, LARGE)[(source + to) % 3],
}


def sent(source, to, count, call, dtype=torch.float32):
    """What one rank sends another in a call."""
    return (torch.arange(count) + 100 * source + 10 * to + call).remainder(50).to(dtype)


def called(wire, sizes, call, dtype=torch.float32, **options):
    """`all_to_all`, checked."""
    inputs = [sent(wire.rank, to, sizes(wire.rank, to), call, dtype) for to in range(wire.size)]
    results = weft.all_to_all(inputs, **options)
    for tensor in inputs:
        tensor.zero_()  # nobody reads it any more
    for source, result in enumerate(results):
        assert torch.equal(result, sent(source, wire.rank, sizes(source, wire.rank), call, dtype))
    return results


def habits(wire):
    return [each for each in wire.habits.values() if isinstance(each, Habit)]


@pytest.mark.parametrize("name", SIZES)
@spmd(2, 3, 4)
def test_later_calls_give_what_the_first_does(wire, name):
    wire.habits.clear()  # a group serves several tests
    kept = []
    for call in range(5):
        for dtype in (torch.float32, torch.complex128, torch.bool):
            results = called(wire, SIZES[name], call, dtype)
            kept.append((results, [result.clone() for result in results]))
    for results, copies in kept:  # memory of their own, which no later call writes to
        assert all(map(torch.equal, results, copies))
    told_at_once = name in ("small", "none") or all(map(wire.lends, wire.peers))
    assert len(habits(wire)) == (3 if told_at_once else 0)


@spmd(3)
def test_what_is_expected_is_what_is_heard(wire):
    heard, exchange = [], Habit.exchange

    def watched(habit, *given):
        heard.append(exchange(habit, *given))
        return heard[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Habit, "exchange", watched)
        for call in range(5):
            called(wire, SIZES["small"], call)
            weft.exchange(torch.ones(3, 2), [torch.tensor([0, 2])] * 3)
    if wire.rank == 0:  # ranks that are threads share the class
        assert len(heard) >= 6 and all(heard)


@pytest.mark.parametrize("name", SIZES)
@spmd(3)
def test_a_rank_that_brings_something_else(wire, name):
    for call in range(12):
        changed = call in (3, 6, 7)

        def sizes(source, to, changed=changed):
            return SIZES[name](source, to) + (17 if changed and source == 1 else 0)

        called(wire, sizes, call)
        if call == 9 and wire.rank == 2:
            wire.habits.clear()  # what the others expect does not depend on it


@spmd(3)
def test_a_rank_that_sends_another_kind_of_tensor(wire):
    inputs = [torch.ones(2, 3)] * 3
    for call in range(5):
        for shape in ((2, 3), (3, 2), (6,)):
            given = [torch.ones(shape)] * 3 if wire.rank == call % 3 else inputs
            shapes = [result.shape for result in weft.all_to_all(given)]
            assert shapes[call % 3] == shape


@spmd(3)
def test_a_rank_that_wants_rounds_when_the_others_have_lent(wire):
    for call in range(6):
        most = 100_000 if wire.rank == 1 and call in (3, 4) else None
        called(wire, SIZES["large"], call, round_bytes=most)


@spmd(3)
def test_a_rank_that_errs_is_told_and_the_next_call_works(wire):
    inputs = [sent(wire.rank, to, SMALL + wire.rank, 0) for to in range(3)]
    for call in range(8):
        called(wire, SIZES["small"], call)
        if call == 3:
            with pytest.raises(weft.WeftError, match=r"dtype: .*float32, rank 1 has torch.float64"):
                weft.all_to_all([t.double() for t in inputs] if wire.rank == 1 else inputs)
        if call == 4:
            with pytest.raises(weft.WeftError, match="rank 1: inputs is a NoneType"):
                weft.all_to_all(None if wire.rank == 1 else inputs)
        if call == 5:
            with pytest.raises(weft.WeftError, match=r"different calls: .*all_to_all.*exchange"):
                weft.exchange(inputs[0], [None] * 3) if wire.rank == 2 else weft.all_to_all(inputs)


@spmd(2)
def test_whether_gradients_are_recorded_is_decided_by_all(wire):
    for call in range(8):
        inputs = [torch.ones(4, requires_grad=call > 3 and wire.rank == 1)] * 2
        results = weft.all_to_all(inputs)
        assert all(result.requires_grad for result in results) == (call > 3)
        if call > 3:
            sum(result.sum() for result in results).backward()
            assert inputs[0].grad is None or inputs[0].grad.eq(2).all()
    with (
        torch.set_grad_enabled(wire.rank == 1),
        pytest.raises(weft.WeftError, match=r"rank 1 records gradients .* rank 0 is under"),
    ):
        weft.all_to_all([torch.ones(4, requires_grad=True)] * 2)
