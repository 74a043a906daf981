"""`examples/wire_ucx`: a wire over UCX, over each of the transports that every machine has."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import weft
from weft.base.pace import patient
from weft.testing import check_wire, ranks_as_processes
from weft.testing.wires import NUMBERS
from weft.wire import Failure, WireFailed

pytest.importorskip("libucx", reason="UCX is not installed: pip install libucx-cu12")

sys.path.append(str(Path(__file__).parents[2] / "examples/wire_ucx"))

import weft_ucx  # of the folder above

LONG = 256 << 20  # bytes that come in many pieces, for a tenth of a second
TRIES = 20


@pytest.fixture(params=["memory", "tcp"])
def run(request, monkeypatch):
    """Ranks as processes, joined by shared memory or by TCP."""
    monkeypatch.setenv("UCX_TLS", {"memory": "sm", "tcp": "tcp"}[request.param])
    return ranks_as_processes(weft_ucx.make_wire)


@pytest.mark.parametrize("clause", NUMBERS)
def test_it_keeps_the_contract(clause):
    check_wire(ranks_as_processes(weft_ucx.make_wire), clauses=[NUMBERS[clause]])


@pytest.mark.parametrize("clause", ["large", "memory", "leaves", "rounds", "dies", "strangers"])
def test_it_keeps_the_contract_over_tcp(monkeypatch, clause):
    monkeypatch.setenv("UCX_TLS", "tcp")
    check_wire(ranks_as_processes(weft_ucx.make_wire), clauses=[NUMBERS[clause]])


def freezes_in_the_middle(wire):
    """Rank 0 freezes rank 1 in the middle of a message, and aborts."""
    if wire.rank == 1:
        data = torch.ones(LONG, dtype=torch.uint8)
        wire.post([(0, torch.tensor([os.getpid()]))])
        for _ in range(TRIES):
            wire.post([(0, data)])
        with contextlib.suppress(WireFailed):
            wire.post([], [(0, 8)]).wait(patient(60))  # until rank 0 has left
        return None
    sender = int(wire.post([], [(1, 8)]).wait(patient(10))[0].view(torch.int64))
    place = torch.empty(LONG, dtype=torch.uint8)
    for _ in range(TRIES):
        place.zero_()
        pending = wire.post([], [(1, place)])
        until = time.monotonic() + patient(10)
        while place[0] == 0:
            assert time.monotonic() < until, "nothing came"
        os.kill(sender, signal.SIGSTOP)
        time.sleep(0.1)  # in which comes what the sender has written
        is_partial = not pending.done()
        if is_partial:
            wire.abort(Failure("aborted", None, "enough"))
            with pytest.raises(WireFailed, match="enough"):
                pending.wait(patient(5))
            place.fill_(7)
        os.kill(sender, signal.SIGCONT)
        if is_partial:
            time.sleep(0.5)  # in which the rest would come
            return bool((place == 7).all())
    raise AssertionError("each message came whole before its sender was frozen")


def test_nothing_is_written_after_an_abort_though_the_sender_was_frozen(run):
    assert run(2, freezes_in_the_middle)[0] is True


def dies_and_leaves_a_child(wire):
    """Rank 1 is killed; a process that it has forked lives on, in a session of its own."""
    wire.post([(1 - wire.rank, torch.ones(1))], [(1 - wire.rank, 8)]).wait(patient(10))
    if wire.rank == 0:
        wire.post([(1, torch.ones(1))])
    else:
        wire.post((), [(0, 8)]).wait(patient(10))  # rank 0 has its message
        reads, writes = os.pipe()
        if os.fork() == 0:
            os.setsid()  # else the launcher ends it with its parent
            wire.close()
            os.write(writes, b"closed")
            time.sleep(patient(10))
            os._exit(0)
        assert os.read(reads, 6) == b"closed"
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(WireFailed) as caught:
        wire.post([], [(1, 8)]).wait(patient(5))
    return caught.value.failure.kind, caught.value.failure.peer


def test_a_death_is_seen_though_a_forked_child_lives(run):
    assert run(2, dies_and_leaves_a_child, dies=(1,)) == [("lost", 1), None]


def test_settings_of_the_environment_stay(monkeypatch):
    """A transport that no machine has is asked for, and the error of that is UCX's."""
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    with pytest.raises(weft.WeftError, match="on rank 0 its factory raised UcxError: UCX: "):
        ranks_as_processes(weft_ucx.make_wire)(2, dies_and_leaves_a_child)
