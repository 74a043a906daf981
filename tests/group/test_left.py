"""A group that is closed, or that nobody has any more, gives back threads, sockets and memory.

By its own doing: a collection of garbage may come late, or never.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import weft
from weft.base.errors import WeftError, WireError
from weft.base.pace import patient
from weft.group.joining import connect


@pytest.fixture(autouse=True)
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held():
    """The threads and sockets of this process."""
    found = set(threading.enumerate())
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(("socket", "/memfd:weft")):
                found.add((number, target))
    return found


def rows(group):
    return torch.tensor([group.rank]), torch.ones(1, 2)


def barrier(group):
    weft.barrier(group=group)


def late(group):
    if group.rank:
        time.sleep(0.2)
    weft.barrier(group=group)


def sparse(group):
    weft.sparse_all_reduce(rows(group), group=group)


def asynchronous(group):
    weft.sparse_all_reduce(rows(group), group=group, async_op=True).wait()


def future(group):
    weft.sparse_all_reduce(rows(group), group=group, async_op=True).get_future().wait()


def failing(group):
    with contextlib.suppress(WeftError):
        weft.all_reduce(torch.ones(2 + group.rank), group=group)


def failing_attempt(group):
    with pytest.raises(WeftError, match="ZeroDivisionError"):
        weft.attempt(lambda: 1 // group.rank, group=group)


def interrupted(group):
    def program():
        if group.rank:
            raise KeyboardInterrupt

    with pytest.raises((WeftError, KeyboardInterrupt)):
        weft.attempt(program, group=group)


def failing_op(group):
    def op(left, right):
        raise ValueError("it has none")

    with pytest.raises(WeftError, match="it has none"):
        weft.sparse_all_reduce((torch.zeros(2, dtype=torch.long), torch.ones(2, 2)), op, group)


def broken(group):
    group.session.abort("it was told to")
    with contextlib.suppress(WireError):
        weft.barrier(group=group)


def of_some(group):
    weft.barrier(group=group.subset([1, 0]))


def split(group):
    weft.barrier(group=group.split([0, 1]))


def backward(group):
    x = torch.ones(2, requires_grad=True)
    weft.all_reduce(x, group=group).sum().backward()


USES = [
    barrier,
    late,
    sparse,
    asynchronous,
    future,
    failing,
    failing_attempt,
    interrupted,
    failing_op,
    broken,
    of_some,
    split,
    backward,
]


@pytest.mark.parametrize("ending", ["closed", "dropped"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_nothing_is_left_of_a_group(use, ending):
    def program(rank):
        group = connect(store, rank, 2, patient(20.0), name=use.__name__)
        session = weakref.ref(group.session)
        use(group)
        if ending == "closed":
            group.close()
            kept.append(group)
        return session

    kept = []
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        meeting = threading.Barrier(2)
        list(pool.map(lambda _: meeting.wait(), range(2)))  # both threads of the pool are here
        before = held()
        sessions = list(pool.map(program, range(2)))
        until = time.monotonic() + patient(20.0)
        while (left := held() - before) and time.monotonic() < until:
            time.sleep(0.01)
        assert left == set()
        if ending == "dropped":
            assert [session() for session in sessions] == [None, None]
