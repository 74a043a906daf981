"""Views of a session: subsets, and groups for tensors of a device."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.devices import as_device
from weft.bootstrap.outcome import results
from weft.group.group import Group
from weft.testing import spmd, threads
from weft.testing.threads import on_groups

CPU = torch.device("cpu")


@spmd(1, 3)
def test_what_a_group_is(group):
    assert (group.session.rank, group.session.size) == (group.rank, group.size)
    assert group.route == "cpu"
    assert len(group.hosts) == group.size and group.hosts.count(group.hosts[0]) == group.size
    assert not group.features.lockstep
    assert group.on(CPU) is group  # which carries them itself
    assert group.on(CPU, [group.rank]) is group


@spmd(3, on=("device",))
def test_a_group_for_a_device_is_made_once(group):
    over = group.on(CPU)
    assert over is not group and over is group.on(CPU) is over.on(CPU)
    assert (over.rank, over.size, over.route) == (group.rank, 3, "cpu (checked)")
    assert over.worker is group.worker and over.traffic is group.traffic
    assert over.memory is not group.memory
    over.close()
    assert not group.closed and not over.closed
    over.wire.post = None  # what is of the CPU takes the CPU's wire
    assert over.all_gather_bytes(bytes([group.rank]), ord) == [0, 1, 2]


@spmd(4, on=("device",))
def test_what_the_same_ranks_post_lies_in_the_same_rounds(group):
    """Whichever view it is posted on, also while a post on another one is under way."""
    if group.rank == 3:
        return
    peers = [rank for rank in (0, 1, 2) if rank != group.rank]
    orders = ([0, 1, 2], [2, 0, 1])
    first, second = (group.subset(order).on(CPU) for order in orders)
    assert first is not second and first.wire is second.wire
    whole = group.on(CPU, [0, 1, 2])  # where ranks have the numbers that they have in the group
    assert whole.wire is first.wire and (whole.rank, whole.size) == (group.rank, 4)

    def posted(over, number):
        places = [torch.zeros(2) for _ in peers]
        of = {over.rank_in_errors(rank): rank for rank in range(over.size)}
        sends = [(of[peer], torch.full((2,), 10.0 * number + group.rank)) for peer in peers]
        pending = over.post(sends, [(of[p], place) for p, place in zip(peers, places, strict=True)])
        return pending, [10.0 * number + peer for peer in peers]

    posts = [posted(view, number) for number, view in enumerate((first, second, whole))]
    for pending, wanted in posts:
        assert [each.tolist() for each in pending.wait()] == [[one, one] for one in wanted]


@spmd(4, on=("threads", "device"))
def test_a_failure_of_one_view_is_one_of_all(group):
    part = group.subset([3, 1, 2]) if group.rank else group
    if group.rank == 3:
        part.on(CPU).abort("out of memory")
    else:
        with pytest.raises(weft.WireError, match="rank 3 gave up: out of memory"):
            while True:
                group.all_gather_bytes(b"1", len)
    for view in (group, part, group.on(CPU), part.on(CPU)):
        error = view.diagnose("another library's call")
        assert error.culprit == 3 and "out of memory" in str(error)
        with pytest.raises(weft.WireError, match="rank 3 gave up"):
            view.post()


def test_a_view_stands_for_no_process_group_but_the_whole_does():
    group = threads.group(1)[0]
    there = object()
    group.session.process_group = lambda: there
    assert group.process_group() is there
    pair = threads.group(2)
    pair[0].session.process_group = lambda: there
    assert pair[0].process_group() is there and pair[0].subset([1, 0]).process_group() is None
    assert pair[0].subset([0]).process_group() is None
    for each in (group, *pair):
        each.close()


def ranks_of_the_job(group):
    group.session.global_ranks = (7, 3, 5)
    if group.rank:
        assert group.subset([2, 1]).global_ranks == (5, 3)
    with as_device():
        assert group.on(CPU).global_ranks == (7, 3, 5)
    return Group(group.session).global_ranks


def test_ranks_have_their_numbers_in_the_job():
    found = results(on_groups(threads.group(3), ranks_of_the_job), "threads")
    assert found == [(7, 3, 5)] * 3
