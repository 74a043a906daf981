"""Launching ranks on this machine: what they are given, what comes back, and what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from weft.base.cores import cores_of_process
from weft.base.errors import WeftError, WireError
from weft.base.latch import NAP
from weft.base.pace import patient
from weft.bootstrap import local
from weft.bootstrap.init import init


@pytest.fixture
def impatient(monkeypatch):
    """Do not spend the test's time waiting for ranks that will not end by themselves."""
    monkeypatch.setattr(local, "GRACE", 0.3)


@pytest.fixture
def unhurried(monkeypatch):
    """Wait for ranks that end by themselves, however busy the machine is."""
    monkeypatch.setattr(local, "GRACE", 60.0)


# The programs of a rank.


def sleep(seconds):
    """In pieces: a signal that comes right before one does not end it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(NAP)


def environment():
    return dict(os.environ) | {"threads": str(torch.get_num_threads()), "cwd": os.getcwd()}


def rank():
    return int(os.environ["RANK"])


def identity(thing):
    return thing


def summed():
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def counting(count):
    for number in range(count):
        local.send(number)


def failing(who, folder):
    """The others have come far enough by then to say where they were."""
    if rank() == who:
        until = time.monotonic() + patient(60.0)
        while len([*folder.iterdir()]) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        raise LookupError("there is no such thing")
    local.send(os.getpid())
    (folder / f"{rank()}").touch()
    sleep(300)


def failing_everywhere():
    if rank() == 1:
        time.sleep(0.3)
        raise LookupError("the cause")
    raise WireError("an echo", rank=rank(), culprit=1)


def dying(number, in_gloo):
    if in_gloo:
        dist.init_process_group("gloo")
    if rank() == 1:
        os.kill(os.getpid(), number)
    if in_gloo:
        dist.barrier()
    raise WireError("rank 1 died", rank=rank(), culprit=1)


def leaving():
    if rank() == 0:
        os._exit(3)


class Stubborn(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raising_what_cannot_be_pickled():
    raise Stubborn(1, 2)


def late():
    if rank() > 0:
        with contextlib.suppress(KeyboardInterrupt):
            sleep(60)
        sleep(60)  # deaf to the first request


def returning_much():
    local.send(os.getpid())
    return bytes(64 << 20)


def writes_of_a_message():
    writes = []
    write = os.write

    def counted(file, data):
        writes.append(file)
        return write(file, data)

    os.write = counted
    local.send("short")
    os.write = write
    return len(writes)


def leaving_a_child():
    child = os.fork()
    if child == 0:
        time.sleep(300)  # longer than anybody waits for its end
        os._exit(0)
    return child


def with_a_child():
    local.send(leaving_a_child())
    time.sleep(300)


def with_a_child_and_deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with_a_child()


def returning_but_not_ending():
    threading.Thread(target=time.sleep, args=(60,)).start()
    return rank()


def interrupted():
    times = 0
    try:
        local.send(("pid", os.getpid()))  # from here on it may be interrupted
        sleep(60)
    except KeyboardInterrupt:
        times += 1
    try:
        sleep(0.5)  # a second one would come now
    except KeyboardInterrupt:
        times += 1
    local.send(("interrupted", times))


# The tests.


def test_results_come_by_rank():
    assert local.launch(3, rank) == [0, 1, 2]
    assert local.launch(1, identity, ["x"]) == ["x"]
    ones = torch.ones(1 << 20)
    for back in local.launch(2, identity, [ones]):
        assert isinstance(back, torch.Tensor)
        assert back.equal(ones)


def test_a_rank_sees_what_torchrun_would_set(monkeypatch):
    monkeypatch.setenv("MY_OWN", "kept")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of an outer launcher")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for number, env in enumerate(local.launch(2, environment, env={"EXTRA": "1"})):
        share = str(max(1, cores_of_process() // 2))
        wanted = {
            "RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": share,
            "threads": share,
            "MY_OWN": "kept",
            "EXTRA": "1",
            "cwd": os.getcwd(),
        }
        assert {name: env.get(name) for name in wanted} == wanted
        assert "TORCHELASTIC_RUN_ID" not in env


def test_threads_that_are_set_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [env["threads"] for env in local.launch(2, environment)] == ["3", "3"]


def test_the_ranks_meet():
    assert local.launch(3, summed) == [3.0, 3.0, 3.0]


def test_launches_at_once_do_not_meet_each_other():
    with ThreadPoolExecutor(2) as pool:
        sums = pool.map(lambda size: local.launch(size, summed), (2, 3))
        assert list(sums) == [[1.0, 1.0], [3.0, 3.0, 3.0]]


def test_messages_come_in_order():
    heard = {0: [], 1: []}

    def listen(number, thing):
        if thing == 0:
            time.sleep(0.3)  # by then the ranks have said all, and are gone
        heard[number].append(thing)

    local.launch(2, counting, [50], on_message=listen)
    assert heard == {0: list(range(50)), 1: list(range(50))}


def test_a_short_message_goes_at_once_so_no_handler_of_a_signal_leaves_half_of_it():
    assert local.launch(1, writes_of_a_message, on_message=lambda *_: None) == [1]


def test_sending_is_for_ranks():
    with pytest.raises(WeftError, match="not started by"):
        local.send("anything")


def test_a_launch_needs_a_rank():
    with pytest.raises(WeftError, match="at least 1 rank, not 0"):
        local.launch(0, rank)


@pytest.mark.usefixtures("impatient")
def test_an_error_keeps_its_type_and_says_where_it_comes_from(gone, monkeypatch, tmp_path):
    monkeypatch.setattr(local, "LADDER", ((signal.SIGINT, 60.0), (signal.SIGKILL, 10.0)))
    pids = []
    with pytest.raises(LookupError, match="no such thing") as caught:
        local.launch(3, failing, [1, tmp_path], on_message=lambda number, pid: pids.append(pid))
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1 of 3" in notes
    assert "in failing" in str(caught.value.__cause__)  # the remote traceback
    for other in (0, 2):  # how the others ended
        assert f"rank {other} of 3 had not finished and was ended; it was here:" in notes
    assert gone(pids)


@pytest.mark.usefixtures("unhurried")
def test_the_cause_is_raised_and_not_its_echoes():
    with pytest.raises(LookupError, match="the cause") as caught:
        local.launch(3, failing_everywhere)
    assert "rank 2 of 3 raised WireError: an echo" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("number", "in_gloo"),
    [(signal.SIGKILL, True), (signal.SIGSEGV, False), (signal.SIGTERM, True)],
)
@pytest.mark.usefixtures("unhurried")
def test_a_killed_rank_is_named_with_its_signal(number, in_gloo):
    with pytest.raises(WireError, match=f"rank 1 of 3 was killed by {number.name}") as caught:
        local.launch(3, dying, [number, in_gloo])
    assert caught.value.culprit == 1
    echo = "RuntimeError: " if in_gloo else "WireError: rank 1 died"
    assert f"rank 0 of 3 raised {echo}" in "\n".join(caught.value.__notes__)


def test_a_rank_that_exits_without_a_result_is_named():
    with pytest.raises(WireError, match="rank 0 of 2 exited with status 3"):
        local.launch(2, leaving)


def test_an_error_that_cannot_be_pickled_still_says_what_it_was():
    with pytest.raises(WeftError, match="Stubborn 1 and 2 cannot be pickled"):
        local.launch(1, raising_what_cannot_be_pickled)


def test_a_timeout_names_the_late_ranks(monkeypatch):
    """The time is over once rank 0 is through, however long that takes."""
    bury, passed = local.Rank.bury, [0.0]

    def buried(ended, listen):
        bury(ended, listen)
        if ended.number == 0:
            passed.append(500.0)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[-1])
    monkeypatch.setattr(local.Rank, "bury", buried)
    monkeypatch.setattr(local, "time", clock)
    with pytest.raises(WireError, match=r"rank 1 of 3 had not finished and was") as caught:
        local.launch(3, late, timeout=400.0)
    assert "rank 2 of 3 had not" in str(caught.value) and "rank 0" not in str(caught.value)


def test_a_timeout_ends_a_rank_that_was_stopped_in_the_middle_of_its_result(monkeypatch):
    monkeypatch.setattr(local, "LADDER", ((signal.SIGKILL, 10.0),))

    stopped = []

    def stop(_, pid):
        time.sleep(1.0)  # the result is under way then, as far as this process takes it
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    local.launch(1, rank)  # what ranks are started from is there
    with pytest.raises(WireError, match="rank 0 of 1 had not finished and was ended"):
        local.launch(1, returning_much, on_message=stop, timeout=patient(5.0))
    assert stopped


def test_a_result_may_be_large():
    assert local.launch(2, returning_much, on_message=lambda *_: None) == [bytes(64 << 20)] * 2


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_has_its_result_need_not_end_by_itself():
    assert local.launch(2, returning_but_not_ending) == [0, 1]


def test_what_a_rank_started_ends_with_it(gone):
    assert gone(local.launch(2, leaving_a_child))


def test_an_error_of_the_listener_ends_the_ranks_and_what_they_started_though_both_are_deaf(
    gone,
    monkeypatch,
):
    ladder = ((signal.SIGINT, 0.2), (signal.SIGTERM, 0.2), (signal.SIGKILL, 10.0))
    monkeypatch.setattr(local, "LADDER", ladder)
    pids = []

    def listen(_, pid):
        pids.append(pid)
        raise KeyError(pid)  # as soon as there is something to end

    with pytest.raises(KeyError):
        local.launch(1, with_a_child_and_deaf, on_message=listen)
    assert len(pids) == 1
    assert gone(pids)


@pytest.mark.usefixtures("unhurried")
def test_an_open_init_is_shut_down_for_a_rank():
    told = []
    local.launch(2, initialised, on_message=lambda *message: told.append(message))
    assert sorted(told) == [(0, "closed"), (1, "closed")]


def initialised():
    group = init(timeout=60)  # and never shut down
    close = group.close
    group.close = lambda: (close(), local.send("closed"))


LAUNCHER = """
import sys
sys.path.insert(0, {folder!r})
import test_local
from weft.bootstrap import local

if __name__ == "__main__":
    local.GRACE = 60.0  # ranks that Ctrl-C reaches end by themselves, however busy the machine is
    local.launch(2, test_local.{body}, on_message=lambda *what: print(*what, flush=True))
"""


def launched(programs, body):
    """A program under way that launches two ranks, and the processes that these tell of."""
    program = programs(LAUNCHER.format(folder=str(Path(__file__).parent), body=body.__name__))
    until = time.monotonic() + patient(60.0)
    while program.text().count("\n") < 2:
        assert time.monotonic() < until, program.text()
        time.sleep(0.01)
    return program, [int(line.split()[-1].rstrip(")")) for line in program.text().splitlines()]


def test_ctrl_c_reaches_every_rank_once_and_ends_all(gone, programs):
    program, pids = launched(programs, interrupted)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the whole foreground
    out, err = program.communicate()
    assert sorted(out.splitlines()[2:]) == ["0 ('interrupted', 1)", "1 ('interrupted', 1)"]
    assert program.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert gone(pids)


@pytest.mark.parametrize(
    ("number", "body"),
    [(signal.SIGKILL, interrupted), (signal.SIGTERM, with_a_child_and_deaf)],
)
def test_neither_ranks_nor_what_they_started_outlive_a_launcher_that_was_ended(
    gone, programs, number, body
):
    program, pids = launched(programs, body)
    os.kill(program.pid, number)
    program.communicate()
    assert gone(pids)
