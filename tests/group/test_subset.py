"""Some of a group's ranks, as a group."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import weft
from cases import exchange
from weft.base.pace import patient
from weft.schedules import dense_all_reduce
from weft.testing import run, spmd

CPU = torch.device("cpu")


@spmd(5, on=("threads",))
def test_the_wire_counts_what_its_parts_send(group):
    before = group.traffic.messages, group.traffic.bytes
    if group.rank in (2, 4):
        part = group.subset([4, 2])
        peer = 1 - part.rank
        part.post([(peer, torch.zeros(4))], [(peer, 16)]).wait()
        part.post([(peer, torch.zeros(2))], [(peer, 8)], 1).wait()
        assert part.traffic is group.traffic
        assert group.traffic.messages == before[0] + 2
        assert group.traffic.bytes == before[1] + 24
        assert group.traffic.to[6 - group.rank] == 24
    else:
        assert (group.traffic.messages, group.traffic.bytes) == before


@spmd(4, on=("threads",))
def test_a_failure_in_a_part_is_everybodys(group):
    if group.rank == 3:
        group.subset([3, 1]).abort("out of memory")
        return
    with pytest.raises(weft.WireError, match="rank 3 gave up: out of memory") as caught:
        if group.rank == 1:
            group.subset([3, 1]).post((), [(0, 8)]).wait()
        else:
            group.post((), [(2 - group.rank, 8)]).wait()
    assert caught.value.culprit == 3


@spmd(5, on=("threads",))
def test_a_part_of_a_part(group):
    if group.rank == 0:
        with pytest.raises(weft.WeftError, match=r"rank 0 is none of the ranks \[4, 2\]"):
            group.subset([4, 2])
        for wrong in ([0, 0], [0, 5]):
            with pytest.raises(weft.WeftError, match="are not distinct ranks of 5"):
                group.subset(wrong)
        return
    inner = group.subset([4, 3, 2, 1]).split([2, 0])
    assert (inner is None) == (group.rank in (1, 3))
    if inner is not None:
        assert inner.rank == (2, 4).index(group.rank)
        exchange(inner)


@spmd(2, on=("threads",))
def test_a_split_that_one_rank_got_wrong_leaves_the_next_ones_right(group):
    if group.rank == 1:
        with pytest.raises(weft.WeftError, match=r"rank 1: \[0, 5\] are not distinct ranks of 2"):
            group.split([0, 5])
    else:
        group.split([0, 1]).close()
    part = group.split([1, 0])
    assert part.rank == 1 - group.rank
    exchange(part)


def test_errors_of_a_call_of_some_ranks_name_them_by_their_numbers_among_all():
    has_left = threading.Event()  # rank 1, the barrier

    def program(group):
        if group.rank == 0:
            return
        some = group.subset([1, 2])
        model = torch.nn.Linear(2, 1 + group.rank)
        with pytest.raises(weft.WeftError, match=r"\(2,\) on rank 1, and .* \(3,\) on rank 2"):
            weft.sync_params(model, group=some)

        inputs = [torch.ones(2, requires_grad=True)] * 2
        with (
            torch.set_grad_enabled(group.rank == 1),
            pytest.raises(weft.WeftError, match=r"rank 1 records gradients .*, rank 2 is under"),
        ):
            weft.all_to_all(inputs, group=some)

        with pytest.raises(weft.WeftError, match=rf"^rank {group.rank}: "):
            dense_all_reduce(some, torch.ones(2), "no such op")

        if group.rank == 2:
            has_left.wait(30)
        else:
            said = ""
            until = time.monotonic() + patient(30.0)
            while not said.startswith("rank 1: rank 2 has not come to the barrier"):
                assert time.monotonic() < until, said  # the worker has its turn a moment later
                with pytest.raises(weft.StillRunning) as caught:
                    weft.barrier(timeout=0.01, group=some)
                said = str(caught.value)
            has_left.set()
        weft.barrier(group=some)

    run(3, program)


def few_rows(group):
    return weft.sparse_all_reduce(weft.Rows(torch.arange(3), torch.ones(3, 2)), group=group)


def many_rows(group):
    rows = weft.Rows(torch.arange(20_000), torch.ones(20_000, 4))
    return weft.sparse_all_reduce([rows, rows], group=group)


VERBS = {
    "all_reduce": lambda group: weft.all_reduce(torch.ones(4), group=group),
    "all_to_all": lambda group: weft.all_to_all([torch.ones(2)] * group.size, group),
    "barrier": lambda group: weft.barrier(group=group),
    "barrier, not for long": lambda group: weft.barrier(30.0, group),
    "broadcast": lambda group: weft.sparse_broadcast(
        (torch.ones(1).int(), torch.ones(1)), 0, group
    ),
    "gather": lambda group: weft.sparse_all_gather((torch.ones(1).int(), torch.ones(1)), group),
    "few rows": few_rows,
    "lists of many rows": many_rows,
    "modules": lambda group: weft.sync_params(torch.nn.Linear(2, 2), group=group),
    "layer": lambda group: weft.nn.AllGather(weft.Partition(group.size, group=group), 0)(
        torch.ones(2)
    ),
    "attempt": lambda group: weft.attempt(int, group),
}


def called(calls):
    """What rank makes of these calls: the text of the error, or ""."""
    try:
        for verb, group in calls:
            VERBS[verb](group)
    except weft.WireError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [3, 18])
def test_calls_on_a_group_and_on_its_subset_in_crossed_orders_are_told_to_all(size, verb):
    """In time, also to the ranks that are in none of the subset's; whatever the other call is."""

    def program(group):
        calls = [(verb, group)]
        if group.rank < 2:
            calls.insert(group.rank, (verb, group.subset([1, 0])))
        return called(calls)

    for rank, text in enumerate(run(size, program, timeout=20)):
        assert text.startswith(f"rank {rank}: rank 0 is in call 1 (")
        assert "of ranks 1, 0, but rank 1 is in call 1 (" in text
        assert f") of all {size} ranks: all ranks must make the calls of a group and of its" in text


@pytest.mark.parametrize("verb", VERBS)
def test_calls_on_a_group_and_on_its_subset_in_one_order_are_right(verb):
    def program(group):
        calls = [(verb, group)]
        if group.rank != 1:
            calls.insert(0, (verb, group.subset([2, 0])))
        return called(calls)

    assert run(3, program) == [""] * 3


@pytest.mark.parametrize("part", [[1, 0], [0, 1], [1, 0, *range(2, 18)]])
@pytest.mark.parametrize("leader", [0, 1])
def test_calls_in_crossed_orders_are_told_to_ranks_of_which_one_speaks_for_the_other(part, leader):
    """Of more than 16 ranks. Whichever of the first two comes to the call of all."""

    def program(group):
        calls = [("barrier", group)]
        if group.rank == leader:
            calls.append(("barrier", group.subset(part)))
        elif group.rank in part:
            calls.insert(0, ("barrier", group.subset(part)))
        return called(calls)

    for text in run(18, program, timeout=20):
        assert text.count(" is in call 1 (barrier) of ") == 2 and " of all 18 ranks" in text, text
        assert "all ranks must make the calls of a group and of its subsets" in text


def in_a_circle(group, before):
    """Ranks 0 to 2 are; a rank 3 is waited for by rank 0, too, and comes late."""
    for _ in range(before):
        weft.barrier(group=group)
    if group.rank == 3:
        time.sleep(1.0)
        return called([("all_reduce", group.subset([3, 0, 1]))])
    late = [3] if group.rank == 0 and group.size == 4 else []
    first = group.subset([group.rank, (group.rank + 1) % 3, *late])
    second = group.subset([(group.rank + 2) % 3, group.rank])
    return called([("all_reduce", first), ("all_reduce", second)])


@pytest.mark.parametrize(
    ("size", "before", "first"),
    [(3, 0, "0, 1"), (4, 9, "0, 1, 3")],  # more than a rank remembers
    ids=["three", "one is late"],
)
def test_a_circle_of_calls_on_subsets_is_told_before_the_deadline(size, before, first):
    """No two ranks meet: each waits for one that is in another call."""
    second = f"rank 1 is in call {before + 1} (all_reduce) and has"
    for text in run(size, in_a_circle, before, on="processes", timeout=30.0):
        assert f"(a call of ranks {first}), but {second}" in text
        assert "(a call of ranks 1, 2): all ranks must make the calls of a group and of" in text
        assert "past the timeout" not in text


@pytest.mark.parametrize("count", [4, 5000])
def test_messages_outside_of_calls_do_not_meet_those_of_another_group(count):
    """Dense reductions open no call. In crossed orders they would take each other's messages."""

    def program(group):
        part = group.subset([0, 1]) if group.rank < 2 else None
        sums = {}

        def start(of):
            tensor = torch.full((count,), of.size * 10.0**group.rank)
            sums[of] = dense_all_reduce(of, tensor, "sum"), tensor

        started = [group] if part is None else [group, part][:: 1 - 2 * group.rank]
        for each in started:
            start(each)
        for each in (group, part):
            if each is not None:
                sums[each][0].wait()
        return [
            {*tensor.tolist()} for _, tensor in (sums[each] for each in sorted(sums, key=len_of))
        ]

    def len_of(group):
        return -group.size

    assert run(3, program) == [[{333.0}, {22.0}], [{333.0}, {22.0}], [{333.0}]]


@spmd(3)
def test_the_same_ranks_are_the_same_group(group):
    part = group.subset([2, 0, 1])
    assert part is group.subset((2, 0, 1))
    assert part is group.subset([1, 2, 0]).subset([1, 2, 0])
    assert part is not group.subset([0, 1, 2])


@spmd(2, on=("threads",))
def test_what_is_kept_from_call_to_call_is_kept_for_the_ranks(group):
    """Whether a rank holds the group, the subset of all, or makes the subset in each call."""
    kept = group.subset([0, 1])
    rows = weft.Rows(torch.randperm(40_000)[:20_000], torch.ones(20_000, 4), 40_000)
    for step in range(4):
        members = (group, kept, group.subset([0, 1]))[(step + group.rank) % 3]
        weft.sparse_all_reduce(rows, group=members)
        for each in (group, kept, group.subset([0, 1])):
            assert weft.sparse.last_call(each) is weft.sparse.last_call(members) is not None


def test_a_barrier_that_ran_out_is_waited_for_on_the_subset_made_anew():
    ran_out = threading.Event()

    def program(group):
        if group.rank == 1:
            with pytest.raises(weft.StillRunning):
                weft.barrier(0.01, group.subset([1, 0]))
            ran_out.set()
        else:
            assert ran_out.wait(30)
        weft.barrier(group=group.subset([1, 0]))
        weft.barrier()  # a second barrier on one rank would be in the way

    run(2, program)
