"""`weft.testing.check_algorithm`: weft's algorithms pass, and each clause finds what breaks it."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import kernels
from weft.sparse import ALGORITHMS, Traffic, unregister
from weft.testing import check_algorithm

CLAUSES = 14
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
        group.lease(1 << 10)
    if fault == "leases more than it says":
        group.lease(1 << 26).release()

    everyone = exchanged(group, indices, values)
    if fault == "forgets a rank":
        everyone.pop()
    order = list(range(len(everyone)))
    if fault == "adds its own rows first":
        order.sort(key=lambda rank: rank != group.rank)
    if fault == "adds in falling order":
        order.reverse()

    union = kernels.union([every[0] for every in everyone])
    if fault == "allocates twice":
        call.result(len(union.indices))
    result = call.result_at(union.indices)
    if fault == "raises in the middle" and call.trouble.error is not None:
        raise call.trouble.error
    rounds_each = fault == "rounds each partial sum"
    sums = torch.empty(result.values.shape, dtype=call.dtype if rounds_each else call.partial)
    for rank in order:
        kernels.combine(sums, union.slots[rank], everyone[rank][1], call.op)
    call.finish(sums, result.values)

    if fault == "does not divide":
        result.values.copy_(sums)
    if fault == "takes what is rounded for half" and call.given.values.dtype != call.dtype:
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


def traffic(sizes, union):
    others = sizes.ranks - 1
    return Traffic(2, 3 * others, others * sizes.mean * (sizes.row + sizes.index))


def workspace(sizes):
    return 0  # its tensors are not leased


@pytest.fixture
def registered():
    """Registers an algorithm for one test: `registered(schedule)`."""
    names = []

    def register(schedule, traffic=traffic):
        weft.algorithm(traffic=traffic, workspace=workspace)(schedule)
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
    registered(direct)
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
    "allocates twice": 10,
    "raises in the middle": 11,
    "keeps a lease": 14,
    "leases more than it says": 14,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_clause_finds_a_schedule_that(registered, fault):
    def broken(rows, call):
        return direct(rows, call, fault)

    registered(broken)
    breaks(broken, FAULTS[fault], sizes=[5] if "five" in fault else [3])


def test_a_clause_finds_a_schedule_that_hides_who_gave_up(registered):
    def secretive(rows, call):
        call.result(0)  # where rank 1 aborts
        try:
            return direct(rows, call)
        except weft.WireError:
            raise OSError("the network failed") from None

    registered(secretive)
    breaks(secretive, 12)


@pytest.mark.parametrize("number", [1, 2])  # the messages, and the bytes
def test_a_clause_finds_what_sends_more_than_it_says(registered, number):
    def half(sizes, union):
        said = [*traffic(sizes, union)]
        said[number] /= 2
        return Traffic(*said)

    registered(direct, half)
    breaks(direct, 13)


def test_what_an_author_does_not_say_is_not_held():
    weft.algorithm()(direct)
    try:
        assert len(check_algorithm(direct, sizes=[3], clauses=[13, 14])) == 2
    finally:
        unregister("direct")


def test_an_algorithm_that_serves_nothing_does_not_pass():
    weft.algorithm(applies=lambda sizes: "never")(direct)
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
    known = "doubling, gather, "
    with pytest.raises(
        weft.WeftError, match=rf"<function workspace .* is not registered: .*; there are {known}"
    ):
        check_algorithm(workspace)
    told = rf"'splt' is unknown \(did you mean 'split'\?\): use auto or one of {known}"
    with pytest.raises(weft.WeftError, match=told):
        check_algorithm("splt")
    with pytest.raises(weft.WeftError, match=r"sizes are \[1\]: .* two ranks or more"):
        check_algorithm("split", sizes=[1])
    with pytest.raises(weft.WeftError, match=r"clauses have numbers from 1 to \d+, not 99"):
        check_algorithm("split", clauses=[99])
