"""A rank that keeps others waiting, as they tell of it."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.base import frames, watch
from weft.base.pace import patient
from weft.rendezvous import store
from weft.testing import processes, run

RANK = """
import os, pathlib, signal, sys, time, torch, weft
place, how = sys.argv[1:]
loads = pathlib.Path(place + ".loads")
def load_batch(file):
    while loads.touch() or not os.path.exists(file): time.sleep(0.02)
def wait_for(*files):
    while not all(map(os.path.exists, files)): time.sleep(0.02)
kill = lambda name: os.kill(os.getpid(), signal.Signals[name])
with weft.init(rendezvous=f"file://{place}", timeout=300.0, watch=0.5) as group:
    weft.barrier()
    open(f"{place}.{group.rank}", "w")
    sleep = lambda: load_batch(place + ".go")
    does = sleep if how == "sleep" else lambda: kill(how)
    try:
        if group.rank == 2:
            wait_for(place + ".0", place + ".1"); does()  # the others are out of the barrier
        if group.rank < 2:
            wait_for(place + ".late")  # which the test says, once rank 2 is
        print(weft.all_reduce(torch.ones(2)).tolist())
    except weft.Error as error:
        print(type(error).__name__)
"""
HERE = f"at <string>:{RANK[: RANK.index('while')].count(chr(10)) + 1} in load_batch"


def soon(look):
    """What is found once there is something."""
    until = time.monotonic() + patient(30.0)
    while not (found := look()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


class Job:
    """Three ranks, of which the last does something else."""

    def __init__(self, programs, place, how, **env):
        env = {**os.environ, "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1", **env}
        self.place, given = place, (RANK, str(place / "place"), how)
        self.ranks = [programs(*given, env={**env, "RANK": str(rank)}) for rank in range(3)]

    def are_late(self, seen):
        """Let the others go on to the call in which they wait, once that of the last is seen."""
        assert soon(seen)
        Path(f"{self.place}/place.late").touch()

    def line(self, rank, said):
        """The line on a rank's standard error that says this.

        There may be others before: on a busy machine ranks wait for each other at the start.
        """
        path = Path(f"/proc/{self.ranks[rank].pid}/fd/2")
        return soon(
            lambda: next((line for line in path.read_text().splitlines() if said in line), "")
        )

    def ends(self):
        return [rank.communicate()[0].strip() for rank in self.ranks]


@pytest.fixture
def job(programs, tmp_path):
    return lambda how, **env: Job(programs, tmp_path, how, **env)


@pytest.mark.parametrize(
    ("late", "place", "said"),
    [
        (2, "file://{0}/place", "rank 2 did not come to file://{0}/place so far (2 of 3 came"),
        (0, "file://{0}/place", "rank 0 did not come to file://{0}/place so far"),
        (0, "tcp://127.0.0.1:{1}", "rank 0 is not there at tcp://127.0.0.1:{1} so far"),
    ],
)
def test_a_rank_that_has_not_come_is_told_of_once(programs, tmp_path, port, late, place, said):
    place, said = place.format(tmp_path, port), said.format(tmp_path, port)
    seconds = str(patient(2.0))  # in which both begin to wait
    env = {**os.environ, "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1", "WEFT_WATCH": seconds}
    source = textwrap.dedent(
        """
        import os, pathlib, sys, time, weft
        from weft import kernels
        kernels.prepare()
        here = pathlib.Path(sys.argv[2])
        (here / os.environ["RANK"]).touch()
        while not (here / "go").exists():
            time.sleep(0.01)
        weft.init(rendezvous=sys.argv[1], timeout=60.0)
        """
    )
    start = tmp_path / "start"
    start.mkdir()
    here = [rank for rank in range(3) if rank != late]
    ranks = [
        programs(source, place, str(start), env={**env, "RANK": str(rank)}, whole=True)
        for rank in here
    ]
    assert soon(lambda: all((start / str(rank)).exists() for rank in here))
    (start / "go").touch()
    for rank, program in zip(here, ranks, strict=True):
        line = soon(Path(f"/proc/{program.pid}/fd/2").read_text)
        assert line.startswith(f"weft: rank {rank} has waited for ") and said in line
    env["RANK"] = str(late)
    ranks.append(programs(source, place, str(start), env=env, whole=True))
    told = [program.communicate()[1].count(said) for program in ranks]
    assert told == [1, 1, 0] and [program.returncode for program in ranks] == [0, 0, 0]


def test_a_slow_rank_is_told_of_once_with_its_line(job):
    three = job("sleep")
    three.are_late(Path(f"{three.place}/place.loads").exists)
    late = "rank 2 has not entered call 2 (all_reduce)"
    for rank in (0, 1):
        line = three.line(rank, late)
        assert line.startswith(f"weft: rank {rank} has waited for ") and line.endswith(HERE)
    time.sleep(1.5)  # in which it would be told of again
    Path(f"{three.place}/place.go").touch()
    assert three.ends() == ["[3.0, 3.0]"] * 3
    assert [rank.communicate()[1].count(late) for rank in three.ranks] == [1, 1, 0]


def test_a_frozen_rank_is_told_of_as_silent(job):
    three = job("SIGSTOP")
    state = Path(f"/proc/{three.ranks[2].pid}/stat")
    three.are_late(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    for rank in (0, 1):
        assert three.line(rank, "in call 2 (all_reduce): rank 2 does not answer (stopped, cut off")
    os.kill(three.ranks[2].pid, signal.SIGCONT)
    assert three.ends() == ["[3.0, 3.0]"] * 3


def test_a_wait_of_threads_is_told_of_with_the_line_of_the_other(monkeypatch):
    monkeypatch.setenv("WEFT_WATCH", "0.2")
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    late = "rank 1 has not entered call 2 (barrier)"
    is_outside = threading.Event()

    def program(group):
        weft.barrier()
        if group.rank == 1:
            is_outside.set()
        assert is_outside.wait(patient(30.0))
        until = time.monotonic() + patient(30.0)
        while group.rank == 1 and late not in errors.getvalue() and time.monotonic() < until:
            time.sleep(0.05)
        weft.barrier()

    run(2, program)
    (line,) = (each for each in errors.getvalue().splitlines() if late in each)
    assert re.match(r"weft: rank 0 has waited for \d+\.\d s: ", line), line
    assert f"{late}: it has been outside weft for" in line
    assert f", at {__file__}:" in line and line.endswith("program")


def test_who_was_killed_is_named_by_the_others(job):
    three = job("sleep")
    three.are_late(Path(f"{three.place}/place.loads").exists)
    for rank in (0, 1):
        assert three.line(rank, "rank 2 has not entered call 2")  # which this rank has
    os.kill(three.ranks[2].pid, signal.SIGKILL)
    assert three.ends() == ["WireError", "WireError", ""]


def test_seconds_that_are_none_are_refused(monkeypatch):
    for wrong in (0, -1.0, "soon"):
        with pytest.raises(weft.WeftError, match="pass a number of seconds above 0"):
            weft.init(watch=wrong)
    monkeypatch.setenv("WEFT_WATCH", "soon")
    with pytest.raises(weft.WeftError, match="WEFT_WATCH"):
        weft.init()


def refused_by_all():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.environ["WEFT_WATCH"] = "soon"
    with pytest.raises(weft.WeftError, match=r"^rank 1: watch .or WEFT_WATCH. is 'soon': pass"):
        weft.all_reduce(torch.ones(1), group=dist.group.WORLD)
    os.environ.pop("WEFT_WATCH", None)
    total = weft.all_reduce(torch.ones(1), group=dist.group.WORLD)
    dist.destroy_process_group()
    return total.item()


def test_seconds_of_one_rank_that_are_none_are_told_to_all_of_a_group_of_torch():
    assert processes(2, refused_by_all) == [2.0] * 2


def test_who_pauses_in_a_library_is_named_by_the_line_that_waits(monkeypatch):
    """The frame of a generator that has yielded does not say who called it: `pauses` is one."""
    paused = store.pauses(deadline=0.0)
    next(paused)
    frames = iter([paused.gi_frame, sys._getframe()])
    monkeypatch.setattr(watch, "frame_of", lambda thread: next(frames))
    assert f"{Path(__file__).name}:" in watch.program_line()


LOOKS = """
import gc, os, sys, threading
from weft.base import frames, watch
frames, is_enabled, is_over = sys._current_frames, gc.isenabled, threading.Event()
in_child = []
def asks():
    answer = is_enabled()
    if threading.current_thread() is not threading.main_thread():
        is_over.wait(60)  # the other look is over before this one does what follows
    return answer
def forks():
    if pid := os.fork():
        in_child.append(os.waitpid(pid, 0)[1] == 0)
    else:
        os._exit(0 if is_enabled() else 1)
others = [threading.Thread(target=each) for each in (lambda: watch.frame_of(1), forks)]
def while_others_look_and_fork():
    if threading.current_thread() is threading.main_thread():
        for each in others:
            each.start()
            each.join(0.2)  # it has begun, or waits until this look is over
    return frames()
gc.isenabled, sys._current_frames = asks, while_others_look_and_fork
watch.frame_of(1)
is_over.set()
for each in others:
    each.join()
print(in_child, is_enabled())
"""


def test_threads_that_look_at_once_leave_the_garbage_collector_on():
    """Who looks meanwhile would take it that the program had turned it off; so would a fork."""
    line = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LOOKS]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[True] True", done.stderr


def test_a_program_in_a_folder_of_a_library_s_name_is_no_library(tmp_path):
    beside = Path(weft.__path__[0]).parent  # site-packages, where weft is installed
    for folder in (tmp_path / "weft", tmp_path / "torch", beside / "mine"):
        source = "at = program_line(get_ident())"
        names = {"program_line": watch.program_line, "get_ident": threading.get_ident}
        exec(compile(source, folder / "train.py", "exec"), names)
        assert names["at"] == f"{folder / 'train.py'}:1 in <module>"
    for module in (weft, torch, threading):
        assert frames.is_library(module.__file__)
