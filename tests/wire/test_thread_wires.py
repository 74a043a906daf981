"""Ranks that are threads: what their wire finds beside the contract of every wire."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from wire_ranks import on_threads

from weft.wire.interface import Failure, WireFailed
from weft.wire.threads import thread_wires


def failure_of(use):
    with pytest.raises(WireFailed) as caught:
        use()
    return caught.value.failure


def test_who_waits_with_a_limit_is_not_stuck():
    def waits(wire):
        pending = wire.post((), [(1 - wire.rank, 8)])
        if wire.rank == 0:
            with pytest.raises(TimeoutError):
                pending.wait(0.1)
            wire.post([(1, torch.ones(1))]).wait()
        else:
            pending.wait()

    on_threads(2, waits)


def test_what_nobody_may_read_is_garbage():
    first, second = thread_wires(2)
    place = torch.zeros(2, dtype=torch.uint8)
    pending = second.post((), [(0, place), (0, 2)])
    assert place.tolist() == [0xA5, 0xA5]  # until the message has come
    first.post([(1, torch.tensor([1, 2], dtype=torch.uint8))] * 2)
    filled, view = pending.wait()
    assert filled.tolist() == view.tolist() == [1, 2]
    pending.release()
    assert view.tolist() == [0xA5, 0xA5]  # since it was given back
    assert filled.tolist() == [1, 2]


def test_nobody_is_stuck_once_a_wire_has_failed():
    """Those that wait are about to be told why."""
    given = Failure("aborted", 2, "rank 2 gave up")

    def waits_for_the_other(wire):
        if wire.rank == 2:
            wire.abort(given)
            return given
        pending = wire.post((), [(1 - wire.rank, 8)])
        threading.Timer(0.3, wire.abort, [given]).start()
        return failure_of(pending.wait)

    assert "stuck" not in {failure.kind for failure in on_threads(3, waits_for_the_other)}


def test_a_post_of_which_a_part_fails_leaves_memory_alone():
    first, second = thread_wires(2)
    first.post([(1, torch.ones(3))])
    place = torch.zeros(3)
    second.post((), [(0, torch.zeros(2)), (0, place)])  # the message is too long
    assert failure_of(second.post).kind == "garbled"
    place.fill_(7)
    first.post([(1, torch.ones(3))])
    assert place.tolist() == [7, 7, 7]


def test_after_an_abort_nobody_writes_to_memory():
    first, second = thread_wires(2)
    place = torch.zeros(3)
    second.post((), [(0, place)])
    second.abort(Failure("aborted", 0, "rank 0 died"))
    place.fill_(7)
    first.post([(1, torch.ones(3))])
    assert place.tolist() == [7, 7, 7]


def test_memory_is_freed_with_its_last_reference():
    first, second = thread_wires(2)
    gc.disable()
    try:
        memory = [np.zeros(3, np.float32) for _ in range(2)]
        alive = [weakref.ref(each) for each in memory]
        source, place = [torch.from_numpy(each) for each in memory]
        sent = first.post([(1, source)])
        second.post((), [(0, place)]).wait()
        sent.wait()
        del sent, source, place, memory
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


FORKS = """
import os, threading
from weft.wire.threads import thread_wires
wire = thread_wires(2)[0]
held, ends = threading.Event(), threading.Event()
def hold():
    with wire.lock:
        held.set()
        ends.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    wire.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ends.set()
"""


def test_a_forked_child_waits_for_no_lock_of_a_thread_that_it_has_not(programs):
    assert programs(FORKS).communicate(20.0)[0] == "7\n"
