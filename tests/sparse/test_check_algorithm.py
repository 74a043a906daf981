"""`weft.testing.check_algorithm`: weft's algorithms pass, and each clause finds what breaks it."""

from __future__ import annotations

import math
import random

import pytest
import torch

import weft
from weft import kernels
from weft.schedules import dense_all_reduce
from weft.sparse import ALGORITHMS, Cost, unregister
from weft.testing import check_algorithm

CLAUSES = 16
TRIED_BESIDE = {3, 6}  # of each algorithm by test_algorithms.py, on more kinds of rows and of ranks


def direct(rows, call, fault=""):
    """Every rank sends its rows to every other, and all merge them in rank order."""
    group = call.group
    indices, values = rows.indices.to(call.wire_index), rows.values
    if fault == "cuts indices to 32 bits":
        indices = (rows.indices.long() % (1 << 31)).to(torch.int32)
    if fault == "ignores wire_dtype":
        values = combined(call.given, rows.indices)
    if fault == "is wrong on five ranks" and group.size == 5:
        values = values * 2
    if fault == "loses long lists":
        indices, values = indices[:4096], values[:4096]
    if fault == "has no answer to rows without elements" and 0 in call.row_shape:
        raise ValueError("no elements")
    if fault == "needs a height":
        torch.empty(call.height)
    if fault == "keeps a lease":
        group.lease(1 << 26)

    everyone = exchanged(group, indices, values)
    if fault == "forgets a rank":
        everyone.pop()
    order = list(range(len(everyone)))
    if fault == "adds its own rows first":
        order.sort(key=lambda rank: rank != group.rank)
    if fault == "adds in falling order":
        order.reverse()

    union = kernels.union([every[0] for every in everyone])
    if fault == "calls the allocator itself" and callable(call.out):
        call.out(len(union.indices), call.row_shape, (call.index, call.dtype))
    result = call.result_at(union.indices)
    rounds_each = fault == "rounds each partial sum"
    sums = torch.empty(result.values.shape, dtype=call.dtype if rounds_each else call.partial)
    for rank in order:
        kernels.combine(sums, union.slots[rank], everyone[rank][1], call.op)
    call.finish(sums, result.values)

    if fault == "does not divide":
        result.values.copy_(sums)
    if fault == "takes what is rounded for half" and call.wide is not None:
        result.values.mul_(0.5)
    if fault == "writes to the caller's rows":
        call.given.values.zero_()
    if fault == "has its result elsewhere":
        return weft.Rows(result.indices.clone(), result.values.clone(), result.height)
    return result


def combined(given, indices):
    """The sums of a rank's rows, unrounded, at sorted indices."""
    slots = torch.searchsorted(indices, given.indices.to(indices.dtype))
    sums = torch.zeros(len(indices), *given.values.shape[1:], dtype=given.values.dtype)
    return sums.index_add_(0, slots, given.values)


def exchanged(group, indices, values):
    """The rows of all ranks, in rank order."""
    counts = [torch.tensor([len(indices)]) for _ in range(group.size)]
    others = group.peers
    count = torch.tensor([len(indices)])
    group.post([(p, count) for p in others], [(p, counts[p]) for p in others]).wait()
    everyone = []
    for rank, length in enumerate(counts):
        room = int(length)
        there = (
            torch.empty(room, dtype=indices.dtype),
            torch.empty((room, *values.shape[1:]), dtype=values.dtype),
        )
        everyone.append((indices, values) if rank == group.rank else there)
    sends = [(p, each) for p in others for each in (indices, values)]
    recvs = [(p, each) for p in others for each in everyone[p]]
    group.post(sends, recvs).wait()
    return everyone


def rooted(rows, call):
    """Every rank sends its rows to rank 0, which sends the result to all."""
    group = call.group
    own = rows.indices.to(call.wire_index), rows.values
    counts = torch.zeros(group.size, dtype=torch.int64)
    counts[group.rank] = len(rows)
    dense_all_reduce(group, counts, "sum").wait()
    if group.rank:
        group.post([(0, each) for each in own]).wait()
        length = torch.zeros(1, dtype=torch.int64)
        group.post((), [(0, length)]).wait()
        result = call.result(int(length))
        indices = torch.empty(int(length), dtype=call.wire_index)
        group.post((), [(0, indices), (0, result.values)]).wait()
        result.indices.copy_(indices)
        return result
    everyone = [own]
    for length in counts[1:].tolist():
        indices = torch.empty(length, dtype=call.wire_index)
        everyone.append((indices, torch.empty((length, *call.row_shape), dtype=call.dtype)))
    recvs = [(rank, each) for rank in range(1, group.size) for each in everyone[rank]]
    group.post((), recvs).wait()
    union = kernels.union([every[0] for every in everyone])
    result = call.result_at(union.indices)
    sums = torch.empty(result.values.shape, dtype=call.partial)
    for slots, (_, values) in zip(union.slots, everyone, strict=True):
        kernels.combine(sums, slots, values, call.op)
    call.finish(sums, result.values)
    for peer in group.peers:
        sizes = torch.tensor([len(result)])
        group.post([(peer, sizes)]).wait()
        group.post([(peer, result.indices.to(call.wire_index)), (peer, result.values)]).wait()
    return result


def cost(load):
    others = load.ranks - 1
    received = others * load.mean * (load.row + load.index)
    return Cost(2, 3 * others, received, merged=load.merging(load.total), memory=received)


def cost_of_root(load):
    """Right for the average rank, silent about the root."""
    others = load.ranks - 1
    moved = (load.mean + load.union) * (load.row + load.index)
    return Cost(4, 7, others / load.ranks * moved, memory=load.total * load.row)


@pytest.fixture
def registered():
    """Registers an algorithm for one test: `registered(schedule, cost)`."""
    names = []

    def register(schedule, cost):
        weft.algorithm(cost=cost)(schedule)
        names.append(schedule.__name__)
        return schedule

    yield register
    for name in names:
        unregister(name)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_of_weft_passes(name):
    clauses = sorted({*range(1, CLAUSES + 1)} - TRIED_BESIDE)
    outcomes = check_algorithm(name, sizes=[3], clauses=clauses)
    assert [outcome.number for outcome in outcomes] == clauses


def test_one_of_a_program_passes_by_name_and_as_a_function(registered):
    registered(direct, cost)
    assert len(check_algorithm("direct", sizes=[2])) == CLAUSES
    assert len(check_algorithm(direct, clauses=[1])) == 1


FAULTS = {
    "forgets a rank": 1,
    "adds its own rows first": 2,
    "is wrong on five ranks": 1,
    "loses long lists": 3,
    "cuts indices to 32 bits": 3,
    "does not divide": 4,
    "rounds each partial sum": 4,
    "adds in falling order": 5,
    "has no answer to rows without elements": 6,
    "needs a height": 7,
    "takes what is rounded for half": 8,
    "ignores wire_dtype": 8,
    "writes to the caller's rows": 9,
    "has its result elsewhere": 10,
    "calls the allocator itself": 11,
    "keeps a lease": 15,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_clause_finds_a_schedule_that(registered, fault):
    def broken(rows, call):
        return direct(rows, call, fault)

    registered(broken, cost)
    breaks(broken, FAULTS[fault], sizes=[5] if "five" in fault else [3])


def test_a_clause_finds_a_schedule_that_hides_who_gave_up(registered):
    def secretive(rows, call):
        call.result(0)  # where rank 1 aborts
        try:
            return direct(rows, call)
        except weft.WireError:
            raise OSError("the network failed") from None

    registered(secretive, cost)
    breaks(secretive, 12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda load: Cost(2, 3 * (load.ranks - 1), cost(load).bytes / 2, memory=cost(load).memory),
        lambda load: Cost(2, 30 * (load.ranks - 1), cost(load).bytes, memory=cost(load).memory),
    ],
)
def test_a_clause_finds_a_cost_that_is_not_what_is_sent(registered, wrong):
    registered(direct, wrong)
    breaks(direct, 13)


def test_a_clause_finds_a_root_that_the_cost_is_silent_about(registered):
    registered(rooted, cost_of_root)
    check_algorithm(rooted, sizes=[4], clauses=[1, 13])  # right otherwise
    breaks(rooted, 14, sizes=[4])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda load: Cost(1, load.ranks, math.inf),
        lambda load: Cost(1, load.ranks, load.mean - 1),
        lambda load: Cost(1, load.ranks, random.random()),
    ],
)
def test_a_clause_finds_a_cost_that_is_no_number_or_another_each_time(registered, wrong):
    registered(direct, wrong)
    breaks(direct, 16)


def test_an_algorithm_that_serves_nothing_does_not_pass():
    weft.algorithm(cost=cost, applies=lambda load: "never")(direct)
    try:
        with pytest.raises(AssertionError, match="refuses every call"):
            check_algorithm(direct, clauses=[1])
    finally:
        unregister("direct")


def breaks(algorithm, clause, sizes=(3,)):
    """A clause fails, and says which it is."""
    with pytest.raises(AssertionError, match=rf"(?m)^ *{clause}  .*FAILED: .") as caught:
        check_algorithm(algorithm, sizes=sizes, clauses=[clause])
    assert f"algorithm {algorithm.__name__!r} breaks 1 of 1 clauses" in str(caught.value)


def test_what_cannot_be_checked_is_refused():
    known = "dense_tail, doubling, gather, "
    with pytest.raises(
        weft.WeftError, match=rf"<function cost .* is not registered: .*; there are {known}"
    ):
        check_algorithm(cost)
    told = rf"'splt' is unknown \(did you mean 'split'\?\): use auto or one of {known}"
    with pytest.raises(weft.WeftError, match=told):
        check_algorithm("splt")
    with pytest.raises(weft.WeftError, match=r"sizes are \[1\]: .* two ranks or more"):
        check_algorithm("split", sizes=[1])
    with pytest.raises(weft.WeftError, match=r"clauses have numbers from 1 to \d+, not 99"):
        check_algorithm("split", clauses=[99])
