"""One host's part in the fault tests: `test_faults` runs it on every host of a netlab.

    fault_ranks.py '[["kill", 2, 20.0], ["stop", 0, 2.0]]'

For each scenario (what happens, to which rank, the group's timeout) the host forks a process that
is one rank, sees to it from outside where that is needed, and prints how it ended. Everything it
prints is a line of JSON, with times on the clock that all hosts of a netlab share.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import weft
import weft.bootstrap.preload  # once, and not in each rank
from weft import WireError
from weft.base.pace import patient
from weft.failure import detector
from weft.group.group import Group
from weft.group.joining import connect
from weft.schedules import dense_all_reduce
from weft.verbs.carrier import verbs_of

START = 120.0  # seconds that hosts of a busy machine may take to start
PAUSE = 1.0  # seconds that a paused rank is stopped
STEPS = 40
FAULT = 20  # the step in which it happens
BYTES = 4096
LARGE = 4 << 20

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def say(scenario, what, **more):
    line = {"scenario": scenario, "rank": RANK, "what": what, "at": time.monotonic(), **more}
    os.write(1, f"{json.dumps(line)}\n".encode())  # whole, though others write at the same time


def ring(group):
    """Most ranks await an innocent when one fails."""
    message = torch.zeros(BYTES, dtype=torch.uint8)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    pending = group.post([(after, message)], [(before, BYTES)])
    pending.wait()
    pending.release()


def dense(group):
    dense_all_reduce(group, torch.ones(300_000), "sum").wait()


def stream(group):
    """Large messages all the time: whoever fails does so in the middle of some."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    own, other = (torch.zeros(LARGE, dtype=torch.uint8) for _ in range(2))
    step = LARGE // 8
    posted = [
        group.post([(after, own[at : at + step])], [(before, other[at : at + step])])
        for at in range(0, LARGE, step)
    ]
    for pending in posted:
        pending.wait()


def gather(group):
    """A verb of gloo's process group."""
    verbs_of(group, torch.device("cpu")).all_gather(torch.zeros(LARGE, dtype=torch.uint8))


def idle(group):
    """The last rank takes no part, and the one before it keeps the others waiting."""
    if group.rank < group.size - 2:
        group.post((), [(group.rank + 1, BYTES)]).wait()
    else:
        for _ in range(2000):  # till it hears of the death, which may take a while
            time.sleep(0.01)
            group.check()


def kill(group):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_parent(group):
    """A child, such as a loader of data, outlives its parent and keeps its sockets open."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.write(writes, b"x")
        time.sleep(4.0)
        os._exit(0)
    os.read(reads, 1)  # the child has closed what it shall close
    kill(group)


def kill_soon(group):
    threading.Timer(0.02, kill, (group,)).start()


def stop(group):
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_soon(group):
    threading.Timer(0.02, stop, (group,)).start()


def sleep(group):
    for _ in range(2000):  # till the others have waited in vain
        if group.session.detector.verdict is not None:
            return
        time.sleep(0.01)


def abort(group):
    group.abort("no memory left")


def fail(group):
    raise MemoryError("no memory left")


def leave(group):
    sys.exit(0)


def interrupt(group):
    """Ctrl-C in a wait that would last to the deadline."""

    def send():
        while group.session.detector.waiting is None:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    group.post((), [((group.rank + 1) % group.size, BYTES)]).wait()


def cut(group):
    link(group.rank, "down")


def link(rank, state):
    """Set the other end of a host's link, in the namespace of netlab's switch."""
    host = subprocess.run(
        ["ip", "netns", "identify"], capture_output=True, text=True, check=True
    ).stdout.strip()
    switch = host.rpartition("h")[0] + "sw"
    subprocess.run(["ip", "-n", switch, "link", "set", f"p{rank}", state], check=True)


# what the ranks do, what happens to one of them, and whether it happens inside a call
FAULTS: dict[str, tuple[Callable[[Group], None], Callable[[Group], None], bool]] = {
    "kill": (ring, kill, True),
    "kill parent": (ring, kill_parent, True),
    "kill idle": (idle, kill, False),
    "kill in dense": (dense, kill, True),
    "kill in stream": (stream, kill_soon, True),
    "stop": (ring, stop, True),
    "stop in stream": (stream, stop_soon, True),
    "pause": (ring, stop, True),
    "cut": (ring, cut, True),
    "sleep": (ring, sleep, False),
    "abort": (ring, abort, True),
    "fail": (ring, fail, True),
    "leave": (ring, leave, False),
    "interrupt": (ring, interrupt, True),
    "kill in a verb": (gather, kill_soon, True),
    "stop in a verb": (gather, stop_soon, True),
    "cut in a verb": (gather, cut, True),
}

# what runs at the same time, since nearly all of its time is spent in waiting; the others alone
BATCHES = [
    {"stop", "stop in stream", "stop in a verb", "sleep", "pause", "interrupt", "kill idle"},
    {"kill", "kill parent", "kill in dense", "kill in a verb", "abort", "fail", "leave"},
]


def rank(scenario, fault, victim, timeout):
    """One rank's program."""
    torch.set_num_threads(1)
    logging.basicConfig(
        stream=sys.stdout, format=f'{{"scenario": {scenario}, "log": "%(message)s"}}'
    )
    body, happen, inside = FAULTS[fault]
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + scenario,
        SIZE,
        is_master=RANK == 0,
        timeout=timedelta(seconds=START),
    )
    group = by_verbs(store) if body is gather else connect(store, RANK, SIZE, START)

    def call(number):
        group.worker.enter(group.global_ranks, group.members, (("call", "sparse_all_reduce"),))
        if inside and number == FAULT and victim == RANK:
            say(scenario, "fault")
            happen(group)
        body(group)

    try:
        # nothing happens while some still join
        dense_all_reduce(group, torch.ones(1), "sum").wait()
        group.set_timeout(timeout)
        for number in range(STEPS):
            if not inside and number == FAULT and victim == RANK:
                say(scenario, "fault")
                happen(group)
            if body is not idle or number == FAULT:
                group.worker.call("sparse_all_reduce", functools.partial(call, number))
    except (WireError, MemoryError, KeyboardInterrupt) as error:
        say(
            scenario,
            "error",
            kind=type(error).__name__,
            text=str(error),
            culprit=getattr(error, "culprit", None),
        )
        try:
            group.post()
        except WireError as again:
            say(scenario, "again", text=str(again))
        if dist.is_initialized():
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as torchs:
                say(scenario, "torch", text=str(torchs))
    group.close()
    say(scenario, "end", open=len(os.listdir("/proc/self/fd")))


def by_verbs(store):
    """A group whose tensors a process group of gloo's carries."""
    place = dist.PrefixStore("gloo", store)
    dist.init_process_group("gloo", store=place, rank=RANK, world_size=SIZE)
    return weft.init(wire="group", timeout=START)


def tend(pid, fault, timeout):
    """Wait for the process of a rank; what stopped itself is continued or, later, killed."""
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        time.sleep(PAUSE if fault == "pause" else timeout + patient(detector.ANSWER) + 3.0)
        os.kill(pid, signal.SIGCONT if fault == "pause" else signal.SIGKILL)


def run_together(batch):
    """Scenarios at the same time, each with a process of its own on every host."""
    pids = []
    for scenario, fault, victim, timeout in batch:
        pid = os.fork()
        if pid == 0:
            try:
                rank(scenario, fault, victim, timeout)
            except Exception:
                say(scenario, "broken", text=traceback.format_exc())
            os._exit(0)  # torch takes its time to be torn down
        pids.append(pid)

    def see_to(pid, scenario, fault, victim, timeout):
        say(scenario, "status", status=tend(pid, fault, timeout))

    threads = [
        threading.Thread(target=see_to, args=(pid, *each))
        for pid, each in zip(pids, batch, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main():
    scenarios = [(number, *each) for number, each in enumerate(json.loads(sys.argv[1]))]
    for batch in BATCHES:
        if together := [each for each in scenarios if each[1] in batch]:
            run_together(together)
    for each in scenarios:
        if not any(each[1] in batch for batch in BATCHES):
            run_together([each])
        if each[1].startswith("cut") and each[2] == RANK:
            link(RANK, "up")


if __name__ == "__main__":
    main()
