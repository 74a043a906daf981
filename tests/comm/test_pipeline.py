"""Reductions of which the next begins before the last ends, in one call and in several."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time

import pytest
import torch

from weft.bootstrap.init import init
from weft.bootstrap.local import launch
from weft.comm import buckets
from weft.comm.pipeline import Pipeline
from weft.errors import WeftError, WireError
from weft.testing import spmd
from weft.wire import dense, process_group, threads

SIZES = [70_000, 5, 200_000, 3000, 70_001, 150_000, 9000, 1]  # elements; some are sent whole


def submitted(wire, gradients, narrow=None):
    """A call that reduces gradients, in place, as a bucket of DistributedDataParallel is."""
    plan = functools.partial(buckets.reductions, wire, gradients, "sum", narrow)
    return Pipeline.of(wire).submit(wire, "sums", plan, lambda reduce: reduce())


def numbers(count, rank, seed):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-9, 9, (count,), generator=generator).float()


def together(count, size, seed):
    return torch.stack([numbers(count, rank, seed) for rank in range(size)]).sum(0)


@spmd(1, 2, 3, 4)
def test_calls_that_come_at_any_time_are_all_right(wire):
    near, wire.near = wire.near, False  # sent, where all could read, too
    pause = random.Random(wire.rank)
    for number in range(6):
        mine = [numbers(count, wire.rank, seed) for seed, count in enumerate(SIZES)]
        works = []
        for seed, each in enumerate(mine):
            time.sleep(pause.choice([0, 0, 0.004]))
            if seed == number:  # of another kind, which none may begin before
                total = torch.tensor([float(wire.rank)])
                wire.worker.submit("other", lambda t=total: dense.all_reduce(wire, t, "max").wait())
            works.append(submitted(wire, [each], torch.bfloat16 if number == 5 else None))
        for work in works:
            work.wait()
        assert total.item() == wire.size - 1
        for seed, each in enumerate(mine):
            assert torch.equal(each, together(len(each), wire.size, seed)), (number, seed)
    wire.near = near  # other tests have the same processes


class Fake:
    """A reduction that notes what is done with it, and takes three steps."""

    def __init__(self, log, name, overlaps=True, fails=""):
        self.log, self.name, self.overlaps, self.fails = log, name, overlaps, fails
        self.left, self.awaited = 3, None

    @property
    def done(self):
        return not self.left

    def begin(self):
        self.note("begin")

    def step(self):
        self.left -= 1
        self.note("end" if self.done else "step")

    def proceed(self):
        if self.fails == "proceed":
            self.note("proceed")

    def note(self, what):
        self.log.append(f"{what} {self.name}")
        if what == self.fails:
            raise WeftError(f"{self.name} failed")


@pytest.fixture
def queued():
    """Queues calls on a wire of one rank, which run once all are; None is another's call."""
    wire = threads.group(1)[0]

    def queue(*calls):
        gate = threading.Event()
        wire.worker.submit("before", lambda: gate.wait(20))
        works = []
        for call in calls:
            if call is None:
                works.append(wire.worker.submit("another", lambda: calls[0][0].note("another")))
            else:
                submit = Pipeline.of(wire).submit
                works.append(submit(wire, "sums", lambda c=call: c, lambda reduce: reduce()))
        gate.set()
        return works

    yield queue
    wire.close()


def test_the_next_begins_before_the_last_ends_and_no_third(queued):
    log: list[str] = []
    a, b, c, d = (Fake(log, name) for name in "abcd")
    for work in queued([a, b], [c], None, [d]):
        work.wait()
    noted = [each for each in log if not each.startswith("step")]
    assert noted == [
        *("begin a", "begin b", "end a", "begin c", "end b", "end c"),
        *("another a", "begin d", "end d"),
    ]


def test_what_is_sent_whole_is_beside_those_of_its_own_call_only(queued):
    log: list[str] = []
    a, b, c, d = (Fake(log, name, overlaps=name not in "bd") for name in "abcd")
    for work in queued([a], [b, c], [d]):
        work.wait()
    noted = [each for each in log if not each.startswith("step")]
    assert noted == [
        *("begin a", "end a", "begin b", "begin c"),
        *("end b", "end c", "begin d", "end d"),
    ]


@pytest.mark.parametrize("fails", ["begin", "proceed", "step"])
def test_what_fails_before_its_turn_fails_at_its_turn(queued, fails):
    log: list[str] = []
    a, b, c = (Fake(log, name, fails=fails if name == "b" else "") for name in "abc")
    first, second, third = queued([a], [b], [c])
    assert first.wait() is None
    with pytest.raises(WeftError, match="b failed"):
        second.wait()
    assert third.wait() is None and "end c" in log and "end b" not in log


def on_three(how, timeout=20.0):
    """What came of two calls on each rank, during the second of which something happens to 2."""
    return launch(3, two_calls, (how, timeout), env={"OMP_NUM_THREADS": "1"}, timeout=60)


def two_calls(how, timeout):
    found = []
    with init(timeout=timeout):
        wire = process_group.of_group(None)
        wire.near = False
        begin, begun = buckets._Reduction.begin, []

        def happens(self):
            begun.append(self)
            if len(begun) == 2 and (wire.rank == 2 or how == "refused"):
                assert not begun[0].done  # it is under way
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "refused":
                    raise WeftError("only once")
                if how == "failed":
                    raise MemoryError("no room")
                time.sleep({"late": 1.0, "too late": 8.0}[how])
            begin(self)

        buckets._Reduction.begin = happens
        gate = threading.Event()
        wire.worker.submit("before", lambda: gate.wait(20))
        mine = [numbers(300_000, wire.rank, seed) for seed in range(3)]
        works = [submitted(wire, [each]) for each in mine[:2]]
        gate.set()
        for work in (*works, None):
            work = work or submitted(wire, [mine[2]])  # the next call
            try:
                work.wait()
                found.append("")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        right = [torch.equal(each, together(300_000, 3, seed)) for seed, each in enumerate(mine)]
    return found, right


def test_one_that_is_late_changes_nothing():
    assert on_three("late") == [(["", "", ""], [True] * 3)] * 3


def test_one_that_is_too_late_is_named_by_all():
    for found, right in on_three("too late", timeout=2.0):
        for text in (error for error, fine in zip(found, right, strict=True) if not fine):
            assert "WireError" in text and "rank 2 keeps the others waiting" in text, found
        assert not right[1] and not right[2]


def test_one_that_is_killed_is_named_by_all():
    with pytest.raises(WireError, match="rank 2 of 3 was killed by SIGKILL") as caught:
        launch(3, survive, ("killed", 20.0), env={"OMP_NUM_THREADS": "1"}, timeout=60)
    notes = "\n".join(caught.value.__notes__)
    for rank in (0, 1):
        assert f"rank {rank} of 3 raised WireError: rank {rank}: rank 2 died" in notes


def survive(how, timeout):
    found, _ = two_calls(how, timeout)
    raise WireError(next(filter(None, found)).removeprefix("WireError: "), rank=0)


def test_one_that_fails_finishes_the_call_before_and_is_named_by_all():
    for rank, (found, right) in enumerate(on_three("failed")):
        reason = "rank 2 gave up: MemoryError: no room"
        if rank == 2:
            assert found[:2] == ["", "MemoryError: no room"] and right[0]
        else:  # it may hear of it before its first call is quite over
            assert (found[0] == "" and right[0]) or reason in found[0]
            assert reason in found[1]
        assert reason in found[2]


def test_what_all_refuse_leaves_the_others_as_they_are():
    wanted = ["", "WeftError: only once", ""]
    assert on_three("refused") == [(wanted, [True, False, True])] * 3
