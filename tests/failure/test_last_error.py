"""What one rank raises for itself alone, as the others hear of it.

The ranks are processes that somebody started by hand: what is told belongs to a process, and some
of it is told as it ends.
"""

from __future__ import annotations

import inspect
import os
import time

import pytest
import torch

import weft
from weft.failure import last_error

RANK = """
import os, signal, sys, threading, time
import torch, weft

place, how, timeout = sys.argv[1:]

def until_the_other_waits():
    while True:
        there = group.session.detector.ask_all().get(0)
        if there is not None and there.doing == "all_reduce" and there.awaits is not None:
            return
        time.sleep(0.01)

def interrupt_a_wait():
    while group.session.detector.waiting is None:
        time.sleep(0.001)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # which ends no sleep

group = weft.init(rendezvous=f"file://{place}", timeout=60.0)
weft.barrier()
group.set_timeout(float(timeout))
one = torch.ones(2)
if group.rank == 0:
    if how == "interrupted wait":
        while not os.path.exists(f"{place} interrupted"):
            group.check()
            time.sleep(0.01)
        sys.exit(weft.all_reduce(one).tolist() != [2.0, 2.0])
    elif how == "caught":
        while not os.path.exists(f"{place} caught"):
            time.sleep(0.01)
    elif how == "killed":  # and this one does not expect it
        work = group.worker.submit("barrier", weft.barrier, several=True)
        slow = work.get_future().then(lambda done: time.sleep(1000.0))  # in a thread of weft's
        open(f"{place} waits", "x").close()
        work.wait()
    try:
        weft.all_reduce(one)
    except weft.Error as error:
        print(getattr(error, "culprit", 1), error)
elif how == "killed":
    while not os.path.exists(f"{place} waits"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "exit":
    weft.attempt(lambda: sys.exit(3))
elif how == "interrupt":
    until_the_other_waits()
    threading.Thread(target=interrupt_a_wait, daemon=True).start()
    group.post((), [(0, 4)]).wait()
elif how == "interrupted wait":
    work = group.worker.submit("all_reduce", lambda: weft.all_reduce(one), several=True)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        work.wait()
    except KeyboardInterrupt:
        open(f"{place} interrupted", "x").close()
        sys.exit(4 if work.wait().tolist() == [2.0, 2.0] else 5)
elif how == "group":
    weft.all_reduce(one, group="world")
elif how == "caught":
    try:
        weft.all_reduce(one, group="world")
    except weft.WeftError:
        open(f"{place} caught", "x").close()
        try:
            while True:  # until the others have given up
                group.check()
                time.sleep(0.02)
        except weft.WireError:
            pass
elif how == "late":  # as above, and used since
    try:
        weft.all_reduce(one, group="world")
    except weft.WeftError:
        weft.all_reduce(one)
elif how == "block":
    with group:
        raise KeyError("what the program meant to look up")
elif how == "program":
    one.view(3)
else:
    sys.exit(0)
"""
LONG = 60.0  # seconds that must not pass


@pytest.fixture
def told(programs, tmp_path):
    """What rank 0 says of rank 1, which fails in that way; they end with these statuses.

    `told.begin(how)` starts both, for a test that looks at several ways at the same time.
    """

    def begin(how, timeout=LONG, whole=False):
        right = {**os.environ, "WORLD_SIZE": "2", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        given = str(tmp_path / f"place of {how}"), how, str(timeout)
        envs = [{**right, "RANK": str(rank)} for rank in range(2)]
        return [programs(RANK, *given, env=env, whole=whole) for env in envs]

    def told(how, timeout=LONG, ends=None, ranks=None):
        ranks = ranks or begin(how, timeout)
        said = [rank.communicate(LONG - 5.0) for rank in ranks]
        statuses = [rank.returncode for rank in ranks]
        assert statuses == ends or (ends is None and not statuses[0]), said
        return said[0][0] or said[0][1]

    told.begin = begin
    return told


WHY = {
    "group": ", after it raised (WeftError: rank 1: str is no group: pass None, a weft.Group",
    "block": ", after it raised (KeyError: 'what the program meant to look up')",
    "program": ", after it raised (RuntimeError: shape '[3]' is invalid",
    "nothing": " while rank 0 awaited",
}


def test_who_leaves_says_what_it_raised(told):
    started = {how: told.begin(how) for how in WHY}
    for how, ranks in started.items():
        said = told(how, ranks=ranks)
        assert said.startswith(f"1 rank 0: rank 1 left{WHY[how]}"), said


def test_who_is_late_says_what_it_raised(told):
    said = told("caught", timeout=1.0)
    assert "rank 1 has not entered call 2 (all_reduce): it has been outside weft for" in said
    assert " s, after it raised (WeftError: rank 1: str is no group: pass None, a weft" in said


ENDS = [
    ("exit", [0, 3], "1 rank 1: SystemExit: 3"),
    ("interrupt", [0, -2], "1 rank 0: rank 1 was interrupted (SIGINT) while rank 0 awaited"),
    ("interrupted wait", [0, 4], ""),
    ("killed", [1, -9], "weft.WireError: rank 0: rank 1 died"),  # at once
]


def test_how_a_rank_ends_is_its_own_and_the_others_are_told(told):
    started = [told.begin(how, whole=True) for how, _, _ in ENDS]
    for (how, ends, why), ranks in zip(ENDS, started, strict=True):
        assert why in told(how, ends=ends, ranks=ranks)


def test_who_mends_its_call_is_answered(told):
    assert told("late") == ""


# which calls raise so


def rows():
    return torch.tensor([1]), torch.ones(1)


CALLS = {
    "Partition": lambda **group: weft.Partition((1,), **group),
    "all_gather_v": lambda **group: weft.all_gather_v(torch.ones(1), [1], **group),
    "reduce_scatter_v": lambda **group: weft.reduce_scatter_v(torch.ones(1), [1], **group),
    "all_reduce": lambda **group: weft.all_reduce(torch.ones(1), **group),
    "all_to_all": lambda **group: weft.all_to_all([torch.ones(1)], **group),
    "attempt": lambda **group: weft.attempt(int, **group),
    "barrier": lambda **group: weft.barrier(**group),
    "exchange": lambda **group: weft.exchange(torch.ones(1), [None], **group),
    "explain": lambda **group: weft.explain(rows(), **group),
    "remote_rows": lambda **group: weft.remote_rows(torch.tensor([0]), 1, **group),
    "sparse_all_gather": lambda **group: weft.sparse_all_gather(rows(), **group),
    "sparse_all_reduce": lambda **group: weft.sparse_all_reduce(rows(), **group),
    "sparse_broadcast": lambda **group: weft.sparse_broadcast(rows(), **group),
    "sparse_reduce": lambda **group: weft.sparse_reduce(rows(), **group),
    "sparse_reduce_scatter": lambda **group: weft.sparse_reduce_scatter(rows(), **group),
    "sync_grads": lambda **group: weft.sync_grads(torch.nn.Linear(1, 1), **group),
    "sync_params": lambda **group: weft.sync_params(torch.nn.Linear(1, 1), **group),
}


def test_all_calls_that_take_a_group_are_here():
    public = {name: getattr(weft, name) for name in weft.__all__}
    takes = {
        name
        for name, each in public.items()
        if callable(each) and not (isinstance(each, type) and issubclass(each, BaseException))
        if "group" in inspect.signature(each).parameters
    }
    assert set(CALLS) == takes - {"CallStats"}  # a record, which has the name of its group


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_group_is_raised_and_kept_for_who_waits(call):
    with weft.init():
        before = time.monotonic()
        assert last_error.since(before) == ""
        with pytest.raises(weft.WeftError, match="rank 0: int is no group: pass None, a weft"):
            CALLS[call](group=3)
        assert last_error.since(before).startswith("WeftError: rank 0: int is no group")
        assert last_error.since(time.monotonic()) == ""


def test_what_is_kept_is_one_short_line():
    before = time.monotonic()
    last_error.note(ValueError("two\n  lines " + 1000 * "x"))
    assert last_error.since(before).startswith("ValueError: two lines xxx")
    assert len(last_error.since(before)) == 500
    last_error.note(SystemExit(0))
    assert last_error.since(before).startswith("ValueError")
    try:
        raise OSError("in the way")
    except OSError:
        assert last_error.since(before).startswith("ValueError")
        assert last_error.since(before, handled=True) == "OSError: in the way"
