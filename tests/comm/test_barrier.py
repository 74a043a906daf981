"""`barrier`: nobody passes before all have come, and the late ones are named."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import weft
from weft.base.pace import patient
from weft.group.pending import Telling
from weft.group.worker import Work
from weft.testing import run, spmd


@spmd(1, 2, 4)
def test_all_pass(group):
    for timeout in (None, 15.0):
        weft.barrier(timeout)
    assert weft.all_reduce(torch.ones(1)).item() == group.size


def test_nobody_passes_before_all_have_come():
    came = []

    def program(group):
        time.sleep(0.02 * group.rank)
        came.append(group.rank)
        weft.barrier()
        return len(came)

    assert run(4, program) == [4] * 4


def told_of_the_late(seconds):
    """What a barrier says that runs out after these, once it has had its turn on this rank."""
    until = time.monotonic() + patient(30.0)
    while True:
        with pytest.raises(weft.StillRunning) as caught:
            weft.barrier(timeout=seconds)
        if "waits for its turn" not in str(caught.value):
            return str(caught.value)
        assert time.monotonic() < until


@pytest.mark.parametrize("ranks", [3, 20])
def test_the_late_are_named_and_may_still_come(ranks):
    late, names = ([1, 2], "ranks 1 and 2 have") if ranks == 3 else ([19], "rank 19 has")
    patience = 0.3
    told = []

    def program(group):
        if group.rank in late:
            while len(told) < ranks - len(late):
                time.sleep(0.002)
        else:
            text = f"rank {group.rank}: {names} not come to the barrier after {patience} s"
            until = time.monotonic() + patient(30.0)
            for _ in range(2):
                with pytest.raises(weft.StillRunning) as caught:
                    weft.barrier(timeout=patience)
                while not str(caught.value).startswith(text):  # others come a moment later
                    assert time.monotonic() < until, str(caught.value)
                    with pytest.raises(weft.StillRunning) as caught:
                        weft.barrier(timeout=patience)
            told.append(group.rank)
        weft.barrier()  # the same one
        assert group.worker.calls == 1
        assert weft.all_reduce(torch.ones(1)).item() == ranks

    run(ranks, program)


def test_who_comes_in_the_last_moment_is_not_called_absent():
    """Between the end of the wait and the look at who is late."""
    said = []

    def program(group, awaited):
        if group.rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Telling, "awaited", lambda self: awaited)
                said.append(told_of_the_late(0.05))
        else:
            while not said:
                time.sleep(0.002)
        weft.barrier()

    for awaited, text in (
        ([], "everybody has come to the barrier, the last only after 0.05 s: call"),
        ([1], "rank 1 has not come to the barrier after 0.05 s: call"),
    ):
        run(2, program, awaited)
        assert said.pop().startswith(f"rank 0: {text}")


def test_a_barrier_whose_wait_is_interrupted_may_be_waited_for_again():
    interrupted = threading.Event()

    def interrupt(self, timeout=None):
        raise KeyboardInterrupt

    def program(group):
        if group.rank == 0:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Work, "wait", interrupt)
                weft.barrier(timeout=5)
            interrupted.set()
        else:
            assert interrupted.wait(30)
        weft.barrier()
        assert group.worker.calls == 1
        weft.barrier(timeout=30)
        assert group.worker.calls == 2

    run(2, program)


@spmd(2)
def test_a_rank_may_go_on_to_its_next_call(group, tmp_path):
    """Which waits behind the barrier; a barrier after it is another one."""
    rows, went_on = (torch.tensor([0]), torch.ones(1)), tmp_path / "went on"
    if group.rank == 0:
        assert "rank 1 has not come" in told_of_the_late(0.3)
        work = weft.sparse_all_reduce(rows, async_op=True)
        went_on.touch()
    else:
        until = time.monotonic() + patient(60.0)
        while not went_on.exists():
            assert time.monotonic() < until
            time.sleep(0.002)
        weft.barrier(timeout=10)
        work = weft.sparse_all_reduce(rows, async_op=True)
    assert work.wait()[1].item() == 2
    weft.barrier(timeout=10)
    weft.barrier()


@spmd(3)
def test_one_in_another_call_and_wrong_timeouts_are_told(group):
    errors_are_told(group)


@spmd(20, on=("threads",))
def test_they_are_told_to_many_ranks(group):
    errors_are_told(group)


def errors_are_told(group):
    for others in (lambda: weft.barrier(timeout=60), weft.barrier):
        with pytest.raises(weft.WeftError, match=r"different calls.*barrier"):
            weft.all_reduce(torch.ones(1)) if group.rank == 1 else others()
    for wrong in (-1, float("nan"), "soon", True):
        with pytest.raises(weft.WeftError, match=r"rank 2: timeout is .*: pass a positive number"):
            weft.barrier(wrong if group.rank == 2 else 10)
    weft.barrier()


def test_past_the_deadline_of_the_wire_it_is_broken_and_the_culprit_named():
    raised = threading.Event()

    def program(group):
        if group.rank == 1:
            assert raised.wait(patient(60.0))
            return None
        with pytest.raises(weft.WireError) as caught:
            weft.barrier(timeout=60)
        raised.set()
        return caught.value.culprit

    assert run(2, program, timeout=0.5)[0] == 1
