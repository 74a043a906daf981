"""`weft.testing` itself: what a failing body looks like; nothing hangs or is left behind."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.base.errors import WeftError, WireError
from weft.base.pace import MOST, patient
from weft.bootstrap import local
from weft.bootstrap.outcome import Outcome
from weft.group import default
from weft.schedules import dense_all_reduce
from weft.testing import RankFailure, expected, gloo_of_one_thread, pool, processes, run, spmd
from weft.testing.spmd import LIMIT
from weft.testing.threads import on_threads

both = pytest.mark.parametrize("on", ["threads", "processes"])


@pytest.mark.parametrize("factor", [2, 3])
@spmd(1, 3, 8)
def test_a_body_is_one_ranks_program(group, factor, tmp_path):
    assert default.current() is group
    assert tmp_path.is_dir()  # a fixture, the same on every rank
    mine = torch.tensor([group.rank * factor])
    dense_all_reduce(group, mine, "sum").wait()
    assert mine.item() == factor * sum(range(group.size))


def rank_and_base(group, base, *, step=1):
    return base + step * group.rank, torch.full((2,), group.rank)


@both
def test_results_come_in_rank_order(on):
    got = run(3, rank_and_base, 10, step=2, on=on)
    assert [number for number, _ in got] == [10, 12, 14]
    assert [values.tolist() for _, values in got] == [[0, 0], [1, 1], [2, 2]]


def process_ids(group):
    return os.getpid(), threading.current_thread().name


def test_ranks_are_threads_or_processes():
    threads, others = run(3, process_ids), run(3, process_ids, on="processes")
    assert threads == [(os.getpid(), f"rank {rank}") for rank in range(3)]
    assert len({pid for pid, _ in others} | {os.getpid()}) == 4


def test_a_call_without_a_group_is_not_told_of_bodies_that_ran_before():
    """The ranks had groups of their own; this thread never had one."""
    default.clear("call weft.init() first")
    run(2, rank_and_base, 0)
    with pytest.raises(WeftError, match=r"call weft\.init\(\) first"):
        default.resolve(None)


def test_processes_are_kept():
    assert run(2, process_ids, on="processes") == run(4, process_ids, on="processes")[:2]


def wire_id(group):
    return id(group)


def break_the_wire(group):
    if group.rank == 0:
        group.abort("on purpose")


def test_a_broken_wire_is_replaced_and_a_sound_one_kept():
    first = run(2, wire_id, on="processes")
    assert run(2, wire_id, on="processes") == first
    run(2, break_the_wire, on="processes")
    run(2, reduce_after, on="processes")


_USES = weakref.WeakKeyDictionary()


def uses(group, most=math.inf):
    """How often the group was used, and threads of groups, once there are no more than so many."""
    _USES[group] = _USES.get(group, 0) + 1
    until = time.monotonic() + patient(20.0)
    while (threads := detectors()) > most and time.monotonic() < until:
        time.sleep(0.01)  # those of a group that was closed end by themselves
    return _USES[group], threads


def detectors():
    return sum(each.name == "weft detector" for each in threading.enumerate())


def test_of_groups_the_three_that_were_used_last_are_kept():
    pool.end_pool()  # and with it the groups of other tests
    limits = [20.0, 21.0, 22.0, 20.0, 23.0, 22.0]
    said = [run(2, uses, on="processes", timeout=limit)[0] for limit in limits]
    threads = [number for _, number in said]
    said += run(2, uses, threads[2], on="processes", timeout=21.0)[:1]
    assert [count for count, _ in said] == [1, 1, 1, 2, 1, 2, 1]  # 23.0 is in place of 21.0
    assert said[-1][1] == threads[2] > threads[0] > 0
    run(2, reduce_after, on="processes", timeout=20.0)


def reduce_after(group):
    mine = torch.ones(1)
    dense_all_reduce(group, mine, "sum").wait()
    assert mine.item() == group.size


def wrong_on_rank_1(group):
    if group.rank == 1:
        raise KeyError("the cause")
    dense_all_reduce(group, torch.ones(1), "sum").wait()


@both
def test_the_causing_rank_is_raised(on):
    with pytest.raises(KeyError, match="the cause") as caught:
        run(3, wrong_on_rank_1, on=on)
    said, *others = caught.value.__notes__
    assert said == f"on rank 1 of 3 ({on})"
    assert [each[:28] for each in others] == [f"rank {r} of 3 raised WireError" for r in (0, 2)]
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise KeyError("the cause")' in shown  # where, also if that was in another process
    run(3, reduce_after, on=on)


def test_the_other_ranks_are_told_why():
    told = []

    def body(group):
        try:
            wrong_on_rank_1(group)
        except WireError as error:
            told.append(str(error))
            raise

    with pytest.raises(KeyError):
        run(2, body)
    (text,) = told
    assert text.startswith("rank 0: rank 1 gave up: KeyError: 'the cause'"), text


def return_unpicklable(group):
    return threading.Lock()


def test_what_cannot_be_pickled_is_reported():
    with pytest.raises(WeftError, match=r"lock .* cannot be pickled"):
        run(2, return_unpicklable, on="processes")


def warn(group):
    warnings.warn("something is old", DeprecationWarning, stacklevel=1)


@both
def test_warnings_are_what_they_are_here(on):
    with pytest.raises(DeprecationWarning):
        run(2, warn, on=on)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(2, warn, on=on)


def environment(group, name):
    return os.environ.get(name)


SCRIPT = """
from weft.testing import run

def body(group):
    return group.rank

if __name__ == "__main__":
    print(run(2, body, on="processes"))
"""


def test_a_script_runs_its_own_functions_on_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=patient(300.0)
    )
    assert (done.stdout, done.returncode) == ("[0, 1]\n", 0), done.stderr


@both
def test_the_environment_is_what_it_is_here(on, monkeypatch):
    assert run(2, environment, "WEFT_SOMETHING", on=on) == [None, None]
    monkeypatch.setenv("WEFT_SOMETHING", "new")
    assert run(2, environment, "WEFT_SOMETHING", on=on) == ["new", "new"]
    with pytest.raises(WeftError, match=r"arguments of environment cannot travel .* on threads"):
        run(2, environment, threading.Lock(), on="processes")


over = threading.Event()  # since a thread cannot be ended


def hang_on_rank_2(group):
    if group.rank == 2:
        over.wait(300)
    dense_all_reduce(group, torch.ones(1), "sum").wait()


@both
def test_a_rank_that_hangs_is_reported_with_the_place(on):
    run(3, reduce_after, on=on, timeout=30.0)  # connects, which is not to be timed
    over.clear()
    began = time.monotonic()
    try:
        with pytest.raises(RankFailure) as caught:
            run(3, hang_on_rank_2, on=on, limit=patient(3.0), timeout=30.0)
    finally:
        over.set()
    assert "rank 2" in str(caught.value)
    assert "over.wait(300)" in str(caught.value)
    assert time.monotonic() - began < patient(25.0)
    run(3, reduce_after, on=on)


def test_a_rank_that_ends_late_is_still_reported_as_hanging(monkeypatch):
    """Here while the next one is awaited, which is late, too."""
    given_up, may_end, over = threading.Event(), threading.Event(), threading.Event()
    joined = {}
    plain_join = threading.Thread.join

    def join(thread, timeout=None):
        if thread.name == "rank 1" and given_up.is_set():
            may_end.set()
            plain_join(joined["rank 0"])
        joined[thread.name] = thread
        plain_join(thread, timeout)

    def program(rank):
        (over if rank else may_end).wait()
        return Outcome(rank, error=WireError("the others gave up"))

    monkeypatch.setattr(threading.Thread, "join", join)
    outcomes = on_threads(2, program, 0.01, given_up.set)
    over.set()
    plain_join(joined["rank 1"])
    assert may_end.is_set()
    assert [(each.rank, each.error) for each in outcomes] == [(0, None), (1, None)]
    assert all(each.hangs for each in outcomes)


def die_on_rank_1(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dense_all_reduce(group, torch.ones(1), "sum").wait()


def test_a_rank_that_dies_is_reported():
    with pytest.raises(RankFailure, match=r"rank 1 of 3 was killed by SIGKILL .*\(processes\)"):
        run(3, die_on_rank_1, on="processes")
    run(3, reduce_after, on="processes")


def test_a_body_that_other_processes_cannot_find_is_refused():
    with pytest.raises(WeftError, match="make it a function at the top of a module"):
        run(2, lambda group: None, on="processes")
    with pytest.raises(WeftError, match=r"processes or .*, not on 'mpi'"):
        run(2, process_ids, on="mpi")


def test_a_body_takes_a_wire_first():
    with pytest.raises(WeftError, match=r"takes \(values, group\)"):

        @spmd(2)
        def body(values, group):
            pass


def variable(name):
    return os.environ[name]


def test_processes_are_started_as_by_a_launcher():
    assert processes(3, variable, "RANK") == ["0", "1", "2"]
    assert processes(2, variable, "WORLD_SIZE") == ["2", "2"]
    assert processes(1, variable, "WEFT_X", env={"WEFT_X": "y"}) == ["y"]


def test_the_processes_end_when_they_are_not_wanted_any_more(gone):
    pids = [pid for pid, _ in run(3, process_ids, on="processes")]
    pool.end_pool()
    assert gone(pids)
    assert not {pid for pid, _ in run(3, process_ids, on="processes")} & set(pids)


def length(group, data):
    return len(data)


def test_a_member_that_is_stopped_holds_nobody_up_though_it_is_to_be_told_much(monkeypatch):
    pool.end_pool()
    socket.setdefaulttimeout(5.0)  # of a program's own sockets
    try:
        assert run(2, length, bytes(8 << 20), on="processes", limit=patient(20.0)) == [8 << 20] * 2
    finally:
        socket.setdefaulttimeout(None)
    pool.end_pool()
    with monkeypatch.context() as patched:  # for members that are started here, and no others
        patched.setattr(local, "PATIENCE", round(patient(1.0)))
        pids = [pid for pid, _ in run(2, process_ids, on="processes")]
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(RankFailure, match="rank 1 of 2 gave no answer, not even where it is"):
        run(2, length, bytes(8 << 20), on="processes", limit=1.0)
    assert run(2, length, bytes(8 << 20), on="processes") == [8 << 20] * 2


def test_the_processes_end_when_the_caller_dies(tmp_path, gone, programs):
    program = """
import os, sys, weft.testing
sys.path.insert(0, sys.argv[1])
import body
print(*weft.testing.run(2, body.pid, on="processes"), flush=True)
os._exit(3)
"""
    body = """
        import os, signal, time

        def pid(group):
            # rank 0 leaves last: a signal to rank 1 on its way would look like its death
            signal.signal(signal.SIGTERM, signal.SIG_IGN if group.rank == 0 else signal.SIG_DFL)
            close = group.close
            group.close = lambda: (time.sleep(1.0 if group.rank == 0 else 0.3), close())
            return os.getpid()
    """
    (tmp_path / "body.py").write_text(textwrap.dedent(body))
    done = programs(program, str(tmp_path), strict=True)
    out, err = done.communicate(timeout=patient(110.0))
    assert err == ""
    assert done.returncode == 3
    assert len(out.split()) == 2
    assert gone(map(int, out.split()))
    assert done.communicate()[1] == ""  # nor did they write anything as they ended


def test_whoever_hangs_is_heard_before_the_process_ends(pytestconfig):
    """First the ranks, then the threads: a worker of pytest-xdist ends without a word."""
    heard = [float(pytestconfig.getini(name)) for name in ("faulthandler_timeout", "timeout")]
    assert LIMIT * MOST < heard[0] < heard[1]


def test_gloo_of_one_thread_sums_sparse_gradients_one_after_the_other():
    for total, threads in processes(2, sums_at_once):
        assert total == [[3.0, 0.0], [0.0, 3.0]]
        assert threads == 2 + 1  # those of torch's own group, and this one


def sums_at_once():
    dist.init_process_group("gloo")
    group = dist.new_group(backend=gloo_of_one_thread())
    parts = [torch.eye(2).mul(dist.get_rank() + 1).to_sparse() for _ in range(20)]
    works = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
    for work in works:
        work.wait()
    late = time.monotonic() + patient(20.0)
    while (threads := threads_named("pt_gloo_runloop")) < 3 and time.monotonic() < late:
        time.sleep(0.01)  # a thread names itself when it first runs
    dist.destroy_process_group()
    return parts[-1].to_dense().tolist(), threads


def threads_named(name):
    """How many threads of this process have a name of C++'s."""
    count = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            count += task.read_text() == f"{name}\n"
    return count


def test_a_result_of_no_ranks_is_refused():
    with pytest.raises(WeftError, match="parts is empty: pass the rows"):
        expected([])
