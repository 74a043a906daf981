"""Calls that ranks make again: what was heard before is only compared, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.comm.habit import Habit, known
from weft.kernels import cpu_talk, talk_table
from weft.kernels.compile import compiler
from weft.kernels.cpu_talk import Came
from weft.testing import spmd
from weft.wire.mover import Mover

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
    return [each for each in known(wire).values() if isinstance(each, Habit)]


@pytest.mark.parametrize("name", SIZES)
@spmd(2, 3, 4)
def test_later_calls_give_what_the_first_does(wire, name):
    known(wire).clear()  # a group serves several tests
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
        assert len(heard) >= 6 and Came.OTHER not in heard


@pytest.mark.parametrize("name", SIZES)
@spmd(3)
def test_a_rank_that_brings_something_else(wire, name):
    for call in range(12):
        changed = call in (3, 6, 7)

        def sizes(source, to, changed=changed):
            return SIZES[name](source, to) + (17 if changed and source == 1 else 0)

        called(wire, sizes, call)
        if call == 9 and wire.rank == 2:
            known(wire).clear()  # what the others expect does not depend on it


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


@pytest.mark.parametrize("how", ["steps", "some steps", "torch"])
@pytest.mark.parametrize("name", ["large", "mixed"])
@spmd(3, 4, on=("processes",))
def test_what_cannot_be_read_is_sent(wire, name, how):
    """By machine code, by Python, or in neither way; by every rank, or by some."""
    compiler.make(cpu_talk.KEY)
    known(wire).clear()
    lender, read, tried = type(wire).lender, type(wire).read, []

    def record(self, peer):
        if how == "torch":
            return None
        found = lender(self, peer).copy()
        found[talk_table.GUARD + 1] += how == "steps" or self.rank == 1
        return found

    def may(self, peer, address, into):
        tried.append(peer)
        return (peer + self.rank) % 2 == 1 and read(self, peer, address, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(wire), "lender", record)
        patch.setattr(type(wire), "read", may)
        for call in range(6):
            if call == 2:
                tried.clear()  # from here on by habit
            called(wire, SIZES[name], call)
    refused = how != "some steps" or wire.rank == 1
    lent = name == "large" or any(SIZES[name](peer, wire.rank) == LARGE for peer in wire.peers)
    assert bool(tried) == (refused and lent)
    for call in range(3):
        called(wire, SIZES[name], call)


@pytest.mark.parametrize("name", SIZES)
@spmd(3, on=("processes",))
def test_machine_code_carries_them_out(wire, name):
    compiler.make(cpu_talk.KEY)
    known(wire).clear()
    came, real = [], cpu_talk.Talk.run

    def run(self, *arguments):
        came.append(real(self, *arguments))
        return came[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_talk.Talk, "run", run)
        for call in range(6):
            if call == 2:
                came.clear()
            called(wire, SIZES[name], call)
    # these four are habits; a rank that lends or borrows says in each when it has done so
    others = [pair for peer in wire.peers for pair in ((peer, wire.rank), (wire.rank, peer))]
    closes = any(SIZES[name](*pair) >= LARGE for pair in others)
    assert len(came) == 4 * (1 + closes)
    assert Came.UNREAD not in came


@pytest.mark.parametrize("when", ["opens", "closes"])
@spmd(3, on=("processes",))
def test_a_call_in_which_machine_code_can_do_nothing(wire, when):
    """As while other small messages are under way."""
    compiler.make(cpu_talk.KEY)
    known(wire).clear()
    for call in range(3):
        called(wire, SIZES["large"], call)
    real, calls = Mover.talk, []

    def talk(self, talk, lines, number, *rest, **named):
        calls.append(number)
        if (number == 0) == (when == "closes"):
            talk.bound = False
            return None
        return real(self, talk, lines, number, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mover, "talk", talk)
        for call in range(3):
            called(wire, SIZES["large"], call)
    assert len(calls) >= 6
    for call in range(3):
        called(wire, SIZES["large"], call)


REDUCED = {"eager": 7, "read whole": 20_000, "read in parts": 700_001}


@pytest.mark.parametrize("name", REDUCED)
@spmd(2, 4)
def test_all_reduce_again(wire, name):
    """Every way a tensor may go, in the first call and in later ones, with the same bits."""
    known(wire).clear()
    wire.together, count, kept = False, REDUCED[name], []
    terms = [
        torch.randn(count, generator=torch.Generator().manual_seed(rank))
        for rank in range(wire.size)
    ]
    for call in range(5):
        for op, dtype in (("sum", torch.float32), ("avg", torch.bfloat16), ("max", torch.uint16)):
            parts = [(term * 9 + call).abs().to(dtype) for term in terms]
            mine = parts[wire.rank].clone()
            found = weft.all_reduce(mine, op)
            assert torch.equal(mine, parts[wire.rank])
            mine.zero_()  # nobody reads it any more
            if op == "max":
                right = torch.stack([part.long() for part in parts]).amax(0).to(dtype)
            else:
                wide = [part.div(wire.size) if op == "avg" else part for part in parts]
                right = wide[0].float()
                for part in wide[1:]:
                    right = right + part.float()
            assert torch.equal(found, right.to(dtype)), (op, call)
            kept.append((found, found.clone()))
    for found, copy in kept:
        assert torch.equal(found, copy)
    lends = all(map(wire.lends, wire.peers))
    if type(wire).__name__ == "ProcessGroupWire":
        assert wire.near == lends and wire.together == (lends and name != "eager")
        assert len(habits(wire)) == (3 if lends or name == "eager" else 0)


@spmd(3)
def test_an_all_reduce_that_differs_is_told_and_the_next_works(wire):
    for count in (5, 50_000):
        for call in range(6):
            found = weft.all_reduce(torch.full((count,), float(wire.rank + call)))
            assert found.eq(3 + 3 * call).all()
            if call == 3:
                with pytest.raises(weft.WeftError, match=r"shape: .* rank 1 has"):
                    weft.all_reduce(torch.ones(count + (wire.rank == 1)))
                with pytest.raises(weft.WeftError, match="rank 2: op 'mean' is unknown"):
                    weft.all_reduce(torch.ones(count), "mean" if wire.rank == 2 else "sum")


@spmd(3, on=("processes",))
def test_ranks_that_cannot_all_be_read_find_out_together(wire):
    known(wire).clear()
    lends, wire.together = wire.lends, False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(wire), "lends", lambda self, peer: self.rank != 1 and lends(peer))
        for call in range(5):
            mine = torch.full((50_000,), float(wire.rank + call))
            assert weft.all_reduce(mine).eq(3 + 3 * call).all()
            wire.dense_all_reduce(mine, "sum").wait()
            assert mine.eq(3 + 3 * call).all()
            assert not wire.near and not wire.together
            if call == 2:
                wire.near = True  # as if nobody had asked
                wire.dense_all_reduce(mine, "max").wait()
                assert mine.eq(9).all() and not wire.near
    wire.near = True
