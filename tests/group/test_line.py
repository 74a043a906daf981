"""The line of a group: the same ranks, with connections and a worker of its own."""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager

import pytest
import torch

import weft
from cases import exchange
from weft.base.pace import patient
from weft.testing import spmd


@contextmanager
def with_line(group):
    """A group that no other test has, and its line."""
    with group.split(range(group.size)) as own:
        own.add_line()
        yield own, own.line


@spmd(1, 2, 3)
def test_calls_on_the_line_have_an_order_of_their_own(group):
    with with_line(group) as (own, line):
        own.add_line()
        assert line is own.line and (line is own) == (group.size == 1)
        assert (line.rank, line.size, line.hosts) == (own.rank, own.size, own.hosts)
        rows = torch.tensor([3]), torch.ones(1)
        order = [own, line] if group.rank else [line, own]
        works = [weft.sparse_all_reduce(rows, group=each, async_op=True) for each in order]
        assert [work.wait()[1].tolist() for work in works] == [[group.size]] * 2
        exchange(line)


@spmd(3)
def test_some_of_the_ranks_have_the_line_of_all(group):
    with group.split(range(3)) as own:
        if group.rank < 2:
            pair = own.subset([1, 0])
            pair.add_line()  # the third rank is not here
            assert pair.line is pair
        own.add_line()
        if group.rank < 2:
            assert pair.line is not pair
            assert (pair.line.rank, pair.line.members) == (pair.rank, pair.members)
            exchange(pair.line)


@pytest.mark.parametrize("given_up", ["the line", "the group"])
@spmd(2)
def test_one_breaks_with_the_other(group, given_up):
    with with_line(group) as (own, line):
        broken, other = (line, own) if given_up == "the line" else (own, line)
        if group.rank == 0:
            other.post((), [(1, 8)]).wait()  # then the other rank has both
            broken.abort("it has no more")
        else:
            other.post([(0, torch.zeros(2))])
        for use in (
            lambda: other.post((), [(1 - group.rank, 8)]).wait(),
            other.check,
            lambda: check_until_broken(broken),  # a moment after it has broken the other
        ):
            with pytest.raises(weft.WireError, match="rank 0 gave up: it has no more"):
                use()


def check_until_broken(group):
    until = time.monotonic() + patient(20.0)
    while time.monotonic() < until:
        group.check()
        time.sleep(0.005)


@spmd(2)
def test_it_has_the_deadline_of_the_group_and_ends_with_it(group):
    with with_line(group) as (own, line):
        own.set_timeout(77.0)
        assert line.timeout == 77.0
        weft.barrier(group=line)
    assert line.closed


@spmd(2)
def test_a_group_is_left_where_its_line_s_closing_is_interrupted(group):
    session = group.split(range(group.size)).session
    session.add_line()
    line = session.line
    close, line.close = line.close, interrupted
    with pytest.raises(KeyboardInterrupt):
        session.close()
    weft.barrier(group=group)
    assert session.detector.links.peers() == []  # who has left is nobody's peer
    close()


def interrupted():
    raise KeyboardInterrupt


@spmd(2)
def test_it_is_gone_with_a_group_that_nobody_closes(group):
    own = group.split([0, 1])
    own.add_line()
    weft.barrier(group=own.line)
    weft.barrier(group=group)  # else who leaves first is missed
    sessions = weakref.ref(own.session), weakref.ref(own.line.session)
    del own
    assert [session() for session in sessions] == [None, None]
