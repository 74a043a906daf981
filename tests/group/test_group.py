"""Views of a session: subsets."""

from __future__ import annotations

import pytest

import weft
from weft.bootstrap.outcome import results
from weft.group.group import Group
from weft.testing import spmd, threads
from weft.testing.threads import on_groups


@spmd(1, 3)
def test_what_a_group_is(group):
    assert (group.session.rank, group.session.size) == (group.rank, group.size)
    assert len(group.hosts) == group.size and group.hosts.count(group.hosts[0]) == group.size


@spmd(4, on=("threads",))
def test_a_failure_of_one_view_is_one_of_all(group):
    part = group.subset([3, 1, 2]) if group.rank else group
    if group.rank == 3:
        part.abort("out of memory")
    else:
        with pytest.raises(weft.WireError, match="rank 3 gave up: out of memory"):
            while True:
                group.all_gather_bytes(b"1", len)
    for view in (group, part):
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
    return Group(group.session).global_ranks


def test_ranks_have_their_numbers_in_the_job():
    found = results(on_groups(threads.group(3), ranks_of_the_job), "threads")
    assert found == [(7, 3, 5)] * 3
