"""The worker: calls take their turn, in the order they were made, and no peer waits for nothing."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from cases import in_case
from weft.base.arguments import LONGEST
from weft.base.errors import Error, StillRunning, WeftError, WireError
from weft.base.pace import patient
from weft.group import callbacks as group_callbacks
from weft.group.callbacks import Callbacks
from weft.group.joining import connect
from weft.group.server import Server
from weft.group.turns import Turn, Turns
from weft.group.worker import Work
from weft.schedules import dense_all_reduce
from weft.testing import run, spmd, threads


@pytest.fixture
def group():
    only = threads.group(1)[0]
    yield only
    only.close()


def test_a_call_runs_in_the_callers_thread_and_starts_none(group, nothing_left):
    with nothing_left():
        assert group.worker.call("ident", threading.get_ident) == threading.get_ident()


def test_calls_run_in_the_order_they_were_made(group):
    order, gate = [], threading.Event()
    works = [group.worker.submit("wait", gate.wait)]
    works += [group.worker.submit("note", lambda i=i: order.append(i)) for i in range(3)]
    threading.Timer(0.1, gate.set).start()
    group.worker.call("note", lambda: order.append("call"))
    works.append(group.worker.submit("note", lambda: order.append("last")))
    for work in works:
        work.wait()
    assert order == [0, 1, 2, "call", "last"]


def no_thread(thread):
    raise RuntimeError("can't start new thread")


def begin_a_call(worker):
    worker.submit("early", lambda: 0)


def ask_for_a_future(worker):
    worker.submit("early", lambda: 0).get_future()


@pytest.mark.parametrize(
    ("ask", "kept_from", "text"),
    [
        (begin_a_call, "weft worker", r"could not be queued \(RuntimeError: can't start"),
        (ask_for_a_future, "weft callbacks", r"can have no Future \(RuntimeError: can't start"),
    ],
)
def test_a_call_for_which_no_thread_can_be_started_breaks_the_group(
    monkeypatch, ask, kept_from, text
):
    """The next call of this rank would meet the one that the others are in."""
    first, second = threads.group(2, timeout=60.0)
    start = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread,
        "start",
        lambda thread: (no_thread if thread.name.startswith(kept_from) else start)(thread),
    )
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ask(first.worker)
    for group in (second, first):
        with pytest.raises(WireError, match=f"rank 0 gave up: early {text}"):
            group.worker.call("next", group.post((), [(1 - group.rank, 4)]).wait)
    first.close()
    second.close()


def test_errors_of_weft_leave_the_wire_as_it_is(group):
    def job():
        raise WeftError("rank 0: wrong")

    for _ in range(2):
        with pytest.raises(WeftError, match="rank 0: wrong"):
            group.worker.call("job", job)
        work = group.worker.submit("job", job)
        with pytest.raises(WeftError, match="rank 0: wrong"):
            work.wait()
        assert isinstance(work.exception(), WeftError)
    assert group.worker.call("job", lambda: 5) == 5
    group.post()


@pytest.mark.parametrize("error", [MemoryError("8 GiB"), KeyboardInterrupt()])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_any_other_error_frees_the_peers(error, asynchronous):
    def job():
        raise error

    def body(group):
        if group.rank == 1:
            with pytest.raises(type(error)):
                if asynchronous:
                    group.worker.submit("job", job).wait()
                else:
                    group.worker.call("job", job)
        else:
            with pytest.raises(WireError, match=f"rank 1 gave up: {type(error).__name__}"):
                group.worker.call("job", group.post((), [(1, 4)]).wait)

    run(2, body)


def test_a_call_from_inside_a_call_is_refused(group):
    def nested():
        return group.worker.call("inner", lambda: None)

    for use in (group.worker.call, lambda *a: group.worker.submit(*a).wait()):
        with pytest.raises(WeftError, match="rank 0: inner was called from inside outer"):
            use("outer", nested)
    with pytest.raises(WeftError, match="inner was called from inside outer"):
        group.worker.call("outer", lambda: group.worker.submit("inner", lambda: None))
    group.post()


def test_a_job_of_several_calls_has_one_turn(group):
    worker, order = group.worker, []

    def several():
        for number in range(2):
            order.append(worker.call("part", lambda n=number: (worker.doing, n)))
        with pytest.raises(WeftError, match="inner was called from inside part, which"):
            worker.call("part", lambda: worker.call("inner", lambda: None))
        with pytest.raises(WeftError, match="later was called from inside several"):
            worker.submit("later", lambda: None)
        return worker.doing

    gate = threading.Event()
    first = worker.submit("gate", gate.wait)
    work = worker.submit("several", several, several=True)
    last = worker.submit("last", lambda: order.append("last"))
    gate.set()
    assert [each.wait() for each in (first, work, last)] == [True, "several", None]
    assert order == [("part", 0), ("part", 1), "last"]
    assert worker.doing == ""


def test_who_leaves_says_what_it_had_come_to_also_where_it_dropped_the_group():
    def body(group):
        weft.barrier(group=group)
        return tuple(group.worker.history)

    groups = threads.group(3)
    with ThreadPoolExecutor(3) as pool:
        histories = list(pool.map(body, groups))
    groups.pop().close()
    groups.pop()
    gc.collect()
    leavers = groups[0].session.detector.leavers
    late = time.monotonic() + patient(20.0)
    while len(leavers) < 2 and time.monotonic() < late:
        time.sleep(0.01)
    assert [leavers[rank].history for rank in (1, 2)] == histories[1:]
    assert len(histories[0]) == 1
    groups[0].close()


def test_ranks_come_to_calls_that_are_made_inside_others_and_to_those_of_some_ranks():
    """By what means the same on all of them, however many calls each has started."""

    def body(group):
        worker = group.worker

        def several():
            weft.barrier(group=group)
            return worker.doing, worker.entered

        around = worker.submit("several", several, several=True).wait()
        if group.rank < 2:
            weft.barrier(group=group.subset([1, 0]))
        weft.attempt(lambda: None, group, name="load")
        assert worker.entered is None
        return around, tuple(worker.history)

    (around, *others), histories = zip(*run(3, body), strict=True)
    assert around == ("several", None) and others == [around] * 2
    everyones = [[each for each in history if each.name == "load"] for history in histories]
    assert everyones[0] == everyones[1] == everyones[2]
    assert [(each.number, each.name) for each in histories[2]] == [(1, "barrier"), (2, "load")]
    first, of_some, second = histories[0]
    assert histories[1] == histories[0] and histories[2] == (first, second)
    assert of_some == (of_some.ranks, 1, "barrier") and of_some.ranks != first.ranks


def test_waiting_for_work_behind_oneself_is_refused(group):
    work = []

    def outer():
        started.wait()
        return work[0].wait()

    started = threading.Event()
    first = group.worker.submit("outer", outer)
    work.append(group.worker.submit("inner", lambda: None))
    started.set()
    with pytest.raises(WeftError, match="inner waits for its turn behind outer"):
        first.wait()
    work[0].wait()


def test_the_context_goes_along(group):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("mine")
    assert group.worker.submit("job", variable.get).wait() == "mine"
    with torch.no_grad():
        assert group.worker.submit("job", torch.is_grad_enabled).wait() is False
    assert group.worker.submit("job", torch.is_grad_enabled).wait() is True
    with torch.inference_mode():
        assert group.worker.submit("job", torch.is_inference_mode_enabled).wait() is True


def test_a_wait_that_times_out_breaks_nothing(group):
    gate = threading.Event()
    work = group.worker.submit("slow", lambda: gate.wait() and 7)
    for timeout in (0.05, timedelta(milliseconds=50), 0):
        with pytest.raises(StillRunning, match="rank 0: slow is still under way") as caught:
            work.wait(timeout)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, Error)
    assert not work.is_completed()
    assert work.exception() is None
    with pytest.raises(WeftError, match="wait\\(\\) for it first"):
        work.result()
    assert "under way" in repr(work)
    gate.set()
    assert work.wait(timedelta(seconds=10)) == work.wait() == work.result() == 7
    assert work.is_completed()
    assert repr(work) == "<Work slow: done>"


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_a_future_gets_the_result(group, early):
    gate = threading.Event()
    work = group.worker.submit("job", lambda: gate.wait() and torch.ones(3))
    if not early:
        gate.set()
        work.wait()
    future = work.get_future()
    doubled = future.then(lambda done: done.value() * 2)
    gate.set()
    assert doubled.wait().tolist() == [2, 2, 2]
    assert future.done()


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_a_future_of_a_failure_carries_its_text(group, early):
    gate = threading.Event()

    def job():
        gate.wait()
        raise WeftError("rank 0: wrong rows")

    work = group.worker.submit("job", job)
    if not early:
        gate.set()
        with pytest.raises(WeftError):
            work.wait()
    future = work.get_future()
    gate.set()
    # the error is native: what C++ reads is no tensor made of an exception
    with pytest.raises(RuntimeError, match="WeftError: rank 0: wrong rows"):
        future.wait()
    with pytest.raises(WeftError, match="wrong rows"):
        work.wait()


def test_a_future_of_a_failure_keeps_nothing_of_the_call(group):
    error = WeftError("rank 0: wrong rows")
    gone = threading.Event()
    weakref.finalize(error, gone.set)

    def job(error=error):
        raise error

    work = group.worker.submit("job", job)

    def callback(_, work=work):
        with pytest.raises(WeftError, match="wrong rows"):
            work.wait()  # from here on the error holds the frames of this thread

    work.get_future().then(callback).wait()
    del error, job, work, callback
    limit = time.monotonic() + patient(10)
    while not gone.wait(0.01) and time.monotonic() < limit:  # the thread of callbacks may hold it
        gc.collect()
    assert gone.is_set()


def test_an_exit_in_a_callback_is_an_error_of_its_future(group):
    exiting = group.worker.submit("job", lambda: 1).get_future().then(lambda done: sys.exit(3))
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        exiting.wait()
    assert group.worker.submit("next", lambda: 2).get_future().wait() == 2


def test_callbacks_may_wait_for_the_worker(group):
    gate, seen = threading.Event(), []
    work = group.worker.submit("first", gate.wait)
    other = group.worker.submit("second", threading.current_thread)

    def callback(done):
        seen.append((threading.current_thread(), other.wait(10)))
        seen.append(group.worker.call("third", lambda: 3))
        return done.value()

    chained = work.get_future().then(callback)
    gate.set()
    assert chained.wait() is True
    assert seen[0][0] is not seen[0][1]
    assert seen[1] == 3


def test_callbacks_may_wait_for_futures_whose_callbacks_wait_for_others(group):
    """As deep as they like: torch's PowerSGD hook waits for two."""

    def submitted(depth):
        future = group.worker.submit("job", lambda: depth).get_future()
        return future.then(
            lambda done: done.value() + (submitted(depth - 1).wait() if depth else 0)
        )

    gate = threading.Event()
    group.worker.submit("held", gate.wait)
    later = group.worker.submit("later", lambda: 1)
    ahead = group.worker.submit("ahead", lambda: 2).get_future()
    waiting = later.get_future().then(lambda done: done.value() + ahead.wait())
    gate.set()
    assert submitted(5).wait() == 15
    assert waiting.wait() == 3
    for _ in range(500):
        last = group.worker.submit("job", lambda: 1).get_future().then(lambda done: done.value())
    assert last.wait() == 1
    names = [each.name for each in threading.enumerate()]
    assert names.count(f"weft callbacks {group.rank}") < 10


def test_callbacks_keep_their_order(group):
    gate, seen = threading.Event(), []
    group.worker.submit("held", gate.wait)
    for number in range(300):
        future = group.worker.submit("job", lambda: 1).get_future()
        last = future.then(lambda _, number=number: seen.append(number))
    gate.set()
    last.wait()
    assert sorted(seen) == list(range(300))
    # but where this machine stops the thread for longer than others wait for it
    assert sum(before > after for before, after in itertools.pairwise(seen)) < 30


@pytest.mark.parametrize("log_raises", [False, True])
def test_a_function_that_raises_ends_no_thread_of_callbacks(monkeypatch, log_raises):
    told = []

    def handle(record):
        told.append(record.getMessage())
        if log_raises:
            raise OSError("no space left on device")

    monkeypatch.setattr(logging.getLogger("weft"), "handle", handle)
    callbacks, done = Callbacks("of this test"), threading.Event()
    callbacks.prepare()
    callbacks.run(lambda: [][1])
    callbacks.run(done.set)
    assert done.wait(patient(10))
    assert callbacks.end(patient(10))
    assert told[0] == "a callback of a call failed"


def test_who_comes_to_serve_as_the_last_callback_is_taken_leaves_the_next_to_others(monkeypatch):
    """As on a busy machine, where the thread that watches is stopped before it takes over."""
    callbacks, looks = Callbacks("of this test"), itertools.count()
    waits, looked, released, ran = [threading.Event() for _ in range(4)]

    def monotonic():
        if next(looks) == 0:
            return time.monotonic()
        looked.set()
        released.wait(patient(10))
        return math.inf  # it has waited for long enough to serve in the other's place

    clock = types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(group_callbacks, "time", clock)
    callbacks.prepare()
    callbacks.run(waits.wait)
    callbacks.run(released.set)
    assert looked.wait(patient(10))
    waits.set()
    watchers = [each for each in threading.enumerate() if each.name == "of this test"][1:]
    for each in watchers:
        each.join(patient(10))
    callbacks.run(ran.set)
    assert ran.wait(patient(10))
    assert callbacks.end(patient(10))


def test_a_call_whose_submit_ends_as_somebody_looks_is_queued():
    class Frame:
        """Of a thread that is stopped by nobody: it ends between two looks."""

        def clear(self):
            turn.thread = None

    turn = Turn("of this test", Frame())
    assert turn.is_alive()


def test_a_server_that_two_threads_start_is_waited_for(monkeypatch):
    """The thread that one of them starts finds that of the other, and ends."""
    server, gate, done = Server("of this test"), threading.Event(), []
    start = threading.Thread.start

    def start_twice(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        server.start()  # of another thread, which comes in between
        server.put(lambda: done.append(gate.wait(patient(10))))
        start(thread)
        thread.join(0.5)

    monkeypatch.setattr(threading.Thread, "start", start_twice)
    server.start()
    assert not server.end(0.1)
    gate.set()
    assert server.end(patient(10)) and done == [True]


def test_a_callback_that_has_begun_is_waited_for_at_the_end(group):
    held, gate, seen = threading.Event(), threading.Event(), []
    work = group.worker.submit("job", held.wait)
    work.get_future().then(lambda _: (gate.wait(10), seen.append("first")))
    work.get_future().then(lambda _: (gate.set(), time.sleep(0.1), seen.append("second")))
    held.set()
    work.wait()
    group.worker.stop()
    assert sorted(seen) == ["first", "second"]


def test_after_stop_calls_are_refused(group):
    group.worker.stop()
    for use in (group.worker.call, group.worker.submit):
        with pytest.raises(WeftError, match="rank 0: late was called after the group was closed"):
            use("late", lambda: None)
    group.worker.stop()


def test_closing_ends_what_is_under_way():
    groups = threads.group(2, timeout=30.0)
    work = groups[0].worker.submit("job", lambda: groups[0].post((), [(1, 4)]).wait())
    began = time.monotonic()
    groups[0].close()
    with pytest.raises(WireError, match=r"rank 0: this group (is|was) closed"):
        work.wait()
    assert time.monotonic() - began < 15
    groups[1].close()


def test_a_job_may_close_its_own_wire(group):
    group.worker.submit("shutdown", group.close).wait()
    with pytest.raises(WireError):
        group.post()


def test_an_interrupted_caller_gives_up_its_turn_and_frees_the_peers():
    def body(group):
        if group.rank == 1:
            with pytest.raises(WireError, match="rank 0 gave up: KeyboardInterrupt"):
                group.post((), [(0, 4)]).wait()
            return
        gate, failed, ident = threading.Event(), [], []

        def caller():
            ident.append(threading.get_ident())
            try:
                group.worker.call("second", lambda: failed.append("it ran"))
            except KeyboardInterrupt:
                failed.append("interrupted")

        first = group.worker.submit("first", gate.wait)
        thread = threading.Thread(target=caller)
        thread.start()
        while group.worker.made < 2:
            time.sleep(0.001)
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(ident[0]), ctypes.py_object(KeyboardInterrupt))
        gate.set()  # it wakes up to find that it was interrupted
        thread.join()
        first.wait()
        assert failed == ["interrupted"]
        assert group.worker.submit("third", lambda: 3).wait() == 3

    run(2, body)


@spmd(1, 2, 3)
def test_ranks_meet_in_the_same_calls(group):
    """Synchronous and asynchronous calls mixed: all ranks run them in the same order."""
    totals, works = [torch.full((4,), float(group.rank + i)) for i in range(8)], []
    for i, total in enumerate(totals):

        def job(total=total):
            return dense_all_reduce(group, total, "sum").wait()[0]

        if i % 3 == 2:
            group.worker.call("reduce", job)
        else:
            works.append(group.worker.submit("reduce", job))
    for work in works:
        work.wait()
    expected = sum(range(group.size))
    for i, total in enumerate(totals):
        assert total.tolist() == [expected + i * group.size] * 4


ENDINGS = {
    "a job under way": "worker.submit('job', lambda: groups[0].post((), [(1, 4)]).wait())",
    "jobs queued": "[worker.submit('job', lambda: time.sleep(0.05)) for _ in range(4)]",
    "a future waited for": """
        future = worker.submit('job', lambda: time.sleep(0.3)).get_future()
        chained = future.then(lambda done: done.value())
    """,
    "a failed future": """
        def job():
            time.sleep(0.1)
            raise ValueError("wrong")
        future = worker.submit('job', job).get_future()
    """,
    "a job that never ends": "worker.submit('job', threading.Event().wait)",
}


def ending(name):
    """A program that ends so."""
    return f"""
import threading, time
from weft.testing import threads
from weft.group import worker as module
groups = threads.group(2, timeout=300.0)
worker = groups[0].worker
if {"never" in name}:  # what cannot be ended is left behind, soon
    module._LAST = 0.2
{textwrap.dedent(ENDINGS[name])}
"""


def test_the_interpreter_exits_cleanly(programs):
    started = {name: programs(ending(name), strict=True, whole=True) for name in ENDINGS}
    for name, done in started.items():
        with in_case(name):
            assert (done.communicate(), done.returncode) == (("", ""), 0)


def test_peers_are_told_of_a_process_that_ends_with_a_call_under_way():
    program = """
        import atexit, multiprocessing.util, time
        def tell():  # after weft has told, before multiprocessing has rank 1 leave, too
            try:
                groups[1].post((), [(0, 4)]).wait()
            except Exception as error:
                print(error, end="")
        atexit.register(tell)
        from weft.testing import threads
        groups = threads.group(2, timeout=300.0)
        groups[0].worker.submit("reduce", lambda: groups[0].post((), [(1, 4)]).wait())
        while not groups[0].worker.doing:
            time.sleep(0.001)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=patient(50.0),
    )
    assert done.stdout.startswith("rank 1: rank 0 gave up: its process ends while reduce runs")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_forked_in_the_middle_of_calls_is_told_so(group):
    calls, entered, go = group.worker, threading.Event(), threading.Event()
    work = calls.submit("held", lambda: (entered.set(), go.wait(30)))
    assert entered.wait(10)
    if (child := os.fork()) == 0:
        signal.alarm(10)  # it would wait for a turn that nobody gives
        try:
            for wait in (work.wait, work.get_future):
                with pytest.raises(WeftError, match=r"forked: wait for it in the parent"):
                    wait()
            calls.submit("first", lambda: 0)
            os._exit(calls.call("next", lambda: 0))
        finally:
            os._exit(1)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_calls_in_the_workers_thread_are_ranges_of_the_profiler():
    """Which records the thread that it was started in: so a range begins there."""

    def program(group):
        with torch.profiler.profile() as profile:
            first = group.worker.submit("first", lambda: torch.ones(1))
            failing = group.worker.submit("failing", lambda: [][1])
            with pytest.raises(IndexError):
                failing.wait()
            first.wait()
        events = {event.name: event for event in profile.events()}
        assert events["weft::first"].is_async
        return sorted(name for name in events if name.startswith("weft::"))

    assert run(1, program) == [["weft::failing", "weft::first"]]


def test_listeners_are_told_what_each_call_did():
    seen = []

    def program(group):
        weft.all_reduce(torch.ones(3))
        weft.sparse_all_reduce((torch.tensor([group.rank]), torch.ones(1)), async_op=True).wait()
        with pytest.raises(WeftError):
            weft.all_reduce(torch.ones(2 + group.rank))

    with weft.on_call(seen.append) as handle:
        run(2, program)
    run(2, program)  # of which nobody is told
    handle.remove()
    assert len(seen) == 6
    first, second, third = sorted((each for each in seen if each.rank == 1), key=lambda s: s.number)
    assert [each.name for each in (first, second, third)] == [
        "all_reduce",
        "sparse_all_reduce",
        "all_reduce",
    ]
    assert first.messages == 1 and first.sent_bytes > 12 and first.error == ""
    assert second.sparse.algorithm == "eager" and second.sparse.sent_bytes == second.sent_bytes
    assert "the ranks differ in shape" in third.error
    assert all(0 <= each.waited <= each.seconds for each in seen)


@spmd(2, on=("threads", "processes"))
def test_a_wait_for_a_late_rank_is_counted(group):
    seen = []
    has_waited = torch.zeros(1)
    pause = 0.25
    with weft.on_call(lambda stats: seen.append(stats) if stats.rank == group.rank else None):
        while not has_waited and pause < patient(8.0):
            if group.rank == 1:
                time.sleep(pause)
            weft.barrier()
            assert seen[-1].name == "barrier"
            # rank 0 may be held up itself, by what else this machine does
            is_counted = group.rank == 0 and seen[-1].waited >= 0.2
            has_waited = weft.all_reduce(torch.tensor([is_counted]), "max")
            pause *= 2
    assert has_waited


def test_a_listener_that_fails_is_removed_and_harms_no_call(caplog):
    def program(group):
        return [weft.all_reduce(torch.ones(1)).item() for _ in range(2)]

    told = []

    def failing(stats):
        told.append(stats)
        raise ValueError("no disk")

    weft.on_call(failing)
    assert run(1, program) == [[1, 1]]
    assert len(told) == 1
    (record,) = caplog.records
    assert "a listener of weft.on_call failed" in record.message and "no disk" in caplog.text


def test_a_call_within_a_call_is_counted_there():
    seen = []

    def program(group):
        def several():
            group.worker.call("inner", lambda: None)

        group.worker.submit("outer", several, several=True).wait()

    with weft.on_call(seen.append):
        run(1, program)
    assert [each.name for each in seen] == ["outer"]


def test_a_call_from_a_listener_is_told_which_call_it_is_in(caplog):
    def listener(stats):
        weft.all_reduce(torch.ones(1))

    with weft.on_call(listener):
        run(1, lambda group: weft.all_reduce(torch.ones(1)))
    assert "all_reduce was called from inside all_reduce, which still has the group" in caplog.text


def test_a_call_of_a_handler_is_refused_while_its_thread_waits_for_a_turn(monkeypatch, group):
    """It would wait for the call that it interrupts."""
    gate = threading.Event()
    wait_for = Turns.wait_for

    def handle(*_):
        try:
            group.worker.call("inner", lambda: None)
        finally:
            gate.set()

    def interrupted(turns, turn, check):
        if turn.name == "second":
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        wait_for(turns, turn, check)

    monkeypatch.setattr(Turns, "wait_for", interrupted)
    group.worker.submit("first", gate.wait)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(WeftError, match="inner was called from inside"):
            group.worker.call("second", lambda: None)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_call_behind_one_that_never_ends_raises_what_broke_the_group():
    first, second = threads.group(2, timeout=60.0)
    gate = threading.Event()
    work = first.worker.submit("stuck", gate.wait)
    queued = first.worker.submit("queued", lambda: None)
    second.session.abort("it was told to")
    with pytest.raises(WireError, match="rank 1 gave up: it was told to"):
        first.worker.call("behind", lambda: None)
    with pytest.raises(WireError, match="rank 1 gave up: it was told to"):
        queued.wait(patient(20.0))
    gate.set()
    work.wait()
    first.close()
    second.close()


class TestAnErrorThatNobodyWaitsFor:
    """The log says it, once."""

    @staticmethod
    def fail(group, error=None):
        def job():
            raise error or WeftError("rank 0: wrong rows")

        work = group.worker.submit("sparse_all_reduce", job)
        group.worker.call("next", lambda: None)
        late = time.monotonic() + patient(10.0)
        while not work.is_completed() and time.monotonic() < late:
            time.sleep(0.001)  # its turn is over a moment before
        return work

    text = (
        "rank 0: sparse_all_reduce failed, and nobody waited for it: WeftError: rank 0: wrong rows"
    )

    def test_is_told_when_the_work_is_collected(self, group, caplog):
        self.fail(group)
        group.worker.submit("last", lambda: None).wait()  # the thread is done with the first
        assert caplog.messages == [self.text]

    def test_is_told_when_the_group_is_closed(self, group, caplog):
        work = self.fail(group)
        assert caplog.messages == []
        group.close()
        assert caplog.messages == [self.text]
        del work
        assert caplog.messages == [self.text]

    def test_is_not_told_where_somebody_asked(self, group, caplog):
        for ask in (Work.wait, Work.result, lambda work: work.get_future().wait()):
            with pytest.raises((WeftError, RuntimeError)):
                ask(self.fail(group))
        assert isinstance(self.fail(group).exception(), WeftError)
        group.close()
        assert caplog.messages == []

    def test_is_not_told_where_a_future_is_about_to_have_it(self, group, caplog, monkeypatch):
        held = []
        monkeypatch.setattr(Callbacks, "run", lambda _, do: held.append(do))
        work = self.fail(group)
        future = work.get_future()
        group.close()
        assert caplog.messages == []
        held.pop()()
        with pytest.raises(RuntimeError, match="wrong rows"):
            future.wait()

    def test_is_told_once_of_a_broken_group(self, group, caplog):
        error = WireError("rank 0: rank 1 died", rank=0, culprit=1)
        for _ in range(3):
            self.fail(group, error)
        group.close()
        assert len(caplog.messages) == 1 and "rank 1 died" in caplog.text

    def test_of_a_group_that_broke_is_told_when_it_is_closed(self, group, caplog):
        error = WireError("rank 0: rank 1 died", rank=0, culprit=1)
        works = [self.fail(group, error) for _ in range(3)]
        group.close()
        del works
        assert len(caplog.messages) == 1 and "rank 1 died" in caplog.text

    def test_is_told_at_exit(self, programs):
        program = """
            import torch, weft
            weft.init()
            work = weft.sparse_all_reduce((torch.tensor([-1]), torch.ones(1)), async_op=True)
            while not work.is_completed():
                pass
        """
        done = programs(textwrap.dedent(program))
        _, err = done.communicate()
        assert "sparse_all_reduce failed, and nobody waited for it: WeftError: rank 0: " in err


@pytest.mark.parametrize("seconds", [2.2e6, 1e11, 1e300, timedelta.max])
def test_a_wait_may_last_for_any_time(group, seconds):
    assert group.worker.submit("job", lambda: 7).wait(seconds) == 7
    gate = threading.Event()
    work = group.worker.submit("job", lambda: gate.wait() and 7)
    threading.Timer(0.01, gate.set).start()
    assert work.wait(seconds) == 7


NO_TIMEOUTS = [math.inf, math.nan, 10**400, -1.0, "3", True, timedelta(seconds=-1)]


@pytest.mark.parametrize("seconds", NO_TIMEOUTS)
def test_a_timeout_that_is_none_is_an_error_of_the_wait_alone(group, seconds):
    gate = threading.Event()
    work = group.worker.submit("job", lambda: gate.wait() and 7)
    try:
        with pytest.raises(WeftError, match=r"timeout is .*: pass a positive number of seconds"):
            work.wait(seconds)
        with pytest.raises(StillRunning, match="after 0"):
            work.wait(0)
    finally:
        gate.set()
    assert work.wait() == 7


@pytest.mark.parametrize("seconds", [2.2e6, 1e11, 1e300])
def test_a_group_whose_timeout_is_longer_than_some_weeks_has_none(seconds):
    def program(rank):
        group = connect(store, rank, 2, seconds)
        for _ in range(2):
            group.set_timeout(seconds)
            weft.barrier(timeout=seconds, group=group)
        assert group.timeout == LONGEST
        group.close()

    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(program, range(2)))


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 10**400, 0, -1.0, "3", True])
def test_a_timeout_that_is_none_is_not_set_and_is_an_error_of_the_call(group, seconds):
    before = group.timeout
    for use in (group.set_timeout, lambda timeout: weft.barrier(timeout, group)):
        with pytest.raises(WeftError, match=r"timeout is .*: pass a positive number of seconds"):
            use(seconds)
    assert group.timeout == before
    weft.barrier(group=group)


@pytest.mark.parametrize("given", [3, None])
def test_a_listener_that_cannot_be_called_is_refused(given):
    with pytest.raises(weft.WeftError, match=f"listener is {given}: pass a function"):
        weft.on_call(given)
