"""Calls that queue up are served as one where that is so on every rank, else one by one."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from weft.agree import calls_of
from weft.backend.gloo import sparse_all_reduce
from weft.errors import WeftError
from weft.sparse import queued
from weft.sparse.queued import QueuedCall, _Queue
from weft.sparse.request import Request
from weft.testing import spmd
from weft.wire import worker

EAGER, LARGE = 5, 900  # rows: with and without a second round
SUM = SimpleNamespace(asyncOp=True, reduceOp=torch.distributed.ReduceOp.SUM)
MAX = SimpleNamespace(asyncOp=True, reduceOp=torch.distributed.ReduceOp.MAX)


def table(rank, number, count, height=3000):
    draw = torch.Generator().manual_seed(100 * rank + number)
    indices = torch.randint(height, (1, count), generator=draw)
    values = torch.randint(1, 9, (count, 64), generator=draw).float()
    return torch.sparse_coo_tensor(indices, values, (height, 64), check_invariants=False)


def request():
    return Request.of(table(0, 0, EAGER), "sum", "auto", None, None)


def held(wire):
    """Keep the worker busy until the event is set, so that calls queue up."""
    free = threading.Event()
    wire.worker.submit("hold", lambda: free.wait(10))
    return free


def start(wire, given, options=SUM):
    return sparse_all_reduce(wire, [given], options)


def check(wire, work, number, count):
    work.wait()
    (found,) = work.result()
    assert found.is_coalesced()
    want = sum(table(rank, number, count).to_dense() for rank in range(wire.size))
    assert torch.equal(found.to_dense(), want)


def warmed(wire):
    """After a first call, which measures the link: the openings so far."""
    start(wire, table(wire.rank, 9, LARGE)).wait()
    return calls_of(wire)


@pytest.mark.parametrize("count", [EAGER, LARGE])
@spmd(1, 2, 4)
def test_calls_that_queue_up_everywhere_open_once(wire, count):
    before, free = warmed(wire), held(wire)
    works = [start(wire, table(wire.rank, number, count)) for number in range(3)]
    free.set()
    for number, work in enumerate(works):
        check(wire, work, number, count)
    assert calls_of(wire) - before == (1 if wire.size > 1 else 3)


@pytest.mark.parametrize("count", [EAGER, LARGE])
@spmd(3)
def test_ranks_where_fewer_queue_up_take_part(wire, count):
    """Rank 0 makes its calls one by one, rank 1 two at a time, rank 2 all at once."""
    warmed(wire)
    numbers = range(6)
    step = (1, 2, len(numbers))[wire.rank]
    for first in numbers[::step]:
        free = held(wire)
        now = numbers[first : first + step]
        works = [start(wire, table(wire.rank, number, count)) for number in now]
        free.set()
        for number, work in zip(now, works, strict=True):
            check(wire, work, number, count)


@spmd(3)
def test_a_wrong_call_fails_alone(wire):
    """It differs between ranks, or is wrong in itself; the calls around it are right."""
    warmed(wire)
    taller = table(wire.rank, 1, LARGE, 3000 + (wire.rank == 1))
    wrong = table(wire.rank, 3, LARGE)
    if wire.rank == 2:
        wrong._indices()[0, 0] = -7
    free = held(wire)
    given = [table(wire.rank, 0, LARGE), taller, table(wire.rank, 2, LARGE), wrong]
    works = [start(wire, each) for each in [*given, table(wire.rank, 4, LARGE)]]
    free.set()
    for number in (0, 2, 4):
        check(wire, works[number], number, LARGE)
    with pytest.raises(WeftError, match="ranks 0, 2 have 3000, rank 1 has 3001"):
        works[1].wait()
    with pytest.raises(WeftError, match="rank 2: index -7 is negative"):
        works[3].wait()


@spmd(2)
def test_calls_of_another_kind_keep_their_place(wire):
    """Of another op, another dtype, or with another call on the wire between."""
    before, free = warmed(wire), held(wire)
    order = []
    works = [start(wire, table(wire.rank, 0, LARGE)), start(wire, table(wire.rank, 1, LARGE), MAX)]
    works.append(start(wire, table(wire.rank, 2, LARGE).double(), MAX))
    works.append(start(wire, table(wire.rank, 3, LARGE)))
    wire.worker.submit("between", lambda: order.append(calls_of(wire) - before))
    works.append(start(wire, table(wire.rank, 4, LARGE)))
    free.set()
    for number in (0, 3, 4):
        check(wire, works[number], number, LARGE)
    assert works[1].result()[0].dtype == torch.float32
    assert order == [4] and calls_of(wire) - before == 5


@spmd(2)
def test_a_call_that_usually_has_company_goes_alone(wire):
    free = held(wire)
    works = [start(wire, table(wire.rank, number, LARGE)) for number in range(2)]
    free.set()
    for work in works:
        work.wait()
    check(wire, start(wire, table(wire.rank, 5, LARGE)), 5, LARGE)


@pytest.mark.parametrize(
    ("bursts", "waits"), [((), False), ((2,), True), ((2, 1), False), ((1, 2), False),
                          ((1, 2, 2), True), ((2, 3), True)],
)  # fmt: skip
def test_company_is_waited_for_where_the_last_two_bursts_had_it(bursts, waits):
    queue, found = _Queue(), []
    queue._changed.wait_for = lambda come, timeout: found.append(not come())
    for burst in (*bursts, 1):
        calls = [QueuedCall(request) for _ in range(burst)]
        queue.add(calls)
        queue.behind(calls[0])
        queue.forget(calls)
    assert found[-1] == waits


def test_nothing_more_is_waited_for_once_backward_has_ended():
    queue, found = _Queue(), []
    queue._usual = {queued._kind(request()): (2, 2)}
    queue._changed.wait_for = lambda come, timeout: found.append(not come())
    for ended in (False, True):
        call = QueuedCall(request)
        queue.add([call])
        if ended:
            queue._end(-1, lambda: None)
        queue.behind(call)
        queue._start, queue._calls = None, deque()
    assert found == [True, False]


@pytest.mark.parametrize("left", [False, True])
@spmd(2)
def test_calls_of_a_backward_are_served_at_its_end(wire, left):
    """All of them by the thread that called it, if they are left to it."""
    warmed(wire)
    ends, works, served = queued._queues[wire]._ends, [], []
    given = torch.zeros(1, requires_grad=True)
    twice = given * 2

    def calls(gradient):
        ends.soon = int(left)
        for number in range(2):
            works.append(start(wire, table(wire.rank, number, LARGE)))
            works[-1].get_future().then(lambda _: served.append(threading.get_ident()))

    before = calls_of(wire)
    twice.register_hook(calls)
    with mock.patch.object(worker, "_NAP", 30.0):  # so that nobody else takes them meanwhile
        twice.sum().backward()
    assert all(work.is_completed() for work in works) or not left
    for number, work in enumerate(works):
        check(wire, work, number, LARGE)
    if left:
        assert served == 2 * [threading.get_ident()]
        assert calls_of(wire) - before == 1


@spmd(1)
def test_calls_are_left_to_the_end_of_backward_where_it_came_soon(wire):
    warmed(wire)
    queue = queued._queues[wire]
    given = torch.zeros(1, requires_grad=True)
    found = []
    for moment in (0.0, 60.0, 0.0, 0.0, 0.0):
        twice = given * 2
        twice.register_hook(lambda _: found.append(queue.leave(wire)))
        with mock.patch.object(queued, "_SOON", moment):
            twice.sum().backward()
    assert found == [False, False, True, True, False]
    assert not queue.leave(wire)  # outside of a backward


@spmd(2)
def test_nothing_is_kept_of_calls_that_fail(wire):
    wrong = table(wire.rank, 0, EAGER)
    wrong._indices()[0, 0] = -1
    with pytest.raises(WeftError):
        start(wire, wrong, SimpleNamespace(asyncOp=False, reduceOp=SUM.reduceOp)).wait()
    wire.worker.submit("end", lambda: None).wait()
    assert not queued._queues[wire]._calls
