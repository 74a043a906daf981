"""The thread wire is strict: what a real transport would take silently, or die of, it reports."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from wire_ranks import on_threads

from weft.base.errors import WeftError, WireError
from weft.base.pace import patient
from weft.schedules import dense_all_reduce
from weft.testing import run, threads
from weft.wire.interface import Failure, WireFailed
from weft.wire.threads import thread_wires


@pytest.fixture
def pair():
    groups = threads.group(2, timeout=60.0)
    yield groups
    for group in groups:
        group.close()


def test_a_send_that_changes_under_way_is_noticed(pair):
    first, second = pair
    message = torch.zeros(100)
    sent = first.post([(1, message)])
    message[50] = 1
    second.post((), [(0, 400)]).wait()
    with pytest.raises(WireError, match="rank 0: a tensor that was being sent to rank 1 was chang"):
        sent.wait()
    with pytest.raises(WireError, match="rank 1: rank 0: a tensor that was being sent") as caught:
        second.post((), [(0, 400)]).wait()
    assert caught.value.culprit == 0


def test_a_send_longer_than_its_receive_breaks_the_wire(pair):
    first, second = pair
    received, sent = second.post((), [(0, 8)]), first.post([(1, torch.zeros(3))])
    for pending in (received, sent):
        with pytest.raises(WireError, match="rank 0 sent 12 bytes for a receive of 8") as caught:
            pending.wait()
        assert caught.value.culprit == 0


def ring_of_receives(group):
    began = time.monotonic()
    with pytest.raises(WireError) as caught:
        group.post((), [((group.rank + 1) % group.size, 4)]).wait()
    return caught.value.culprit, str(caught.value), time.monotonic() - began


def test_ranks_that_all_wait_for_each_other_are_told_at_once():
    for culprit, text, took in run(3, ring_of_receives, timeout=30.0):
        assert culprit is None
        assert "rank 2 awaits up to 4 bytes from rank 0" in text
        assert took < 15


def sends_nobody_takes(group):
    with pytest.raises(WireError, match="rank 1 left while rank 0 was sending 12 bytes"):
        group.post([(1 - group.rank, torch.zeros(3))]).wait()


def test_a_send_waits_for_its_receive():
    def body(group):
        if group.rank == 0:
            sends_nobody_takes(group)

    run(2, body)


def test_the_chain_of_waits_leads_to_the_one_who_is_late():
    def body(group):
        if group.rank == 2:
            group.worker.doing = "thinking"
            groups[2] = group
            raised.wait(patient(60.0))
            return ""
        groups[group.rank] = group
        if group.rank == 0:  # whose time is up first, when rank 1 waits and rank 2 is in its call
            group.set_timeout(0.5)
            until = time.monotonic() + patient(20.0)
            while len(groups) < 3 or groups[1].session.detector.waiting is None:
                assert time.monotonic() < until
                time.sleep(0.001)
        with pytest.raises(WireError) as caught:
            group.post((), [(group.rank + 1, 4)]).wait()
        assert caught.value.culprit == 2
        raised.wait(patient(60.0))
        return str(caught.value)

    raised = threading.Barrier(3)
    groups = {}
    texts = run(3, body)
    for text in texts[:2]:
        assert "rank 2 keeps the others waiting: it is in call 0 (thinking)" in text


def test_reductions_that_differ_are_told_apart():
    def body(group):
        values = torch.zeros(3 + group.rank)
        with pytest.raises(WireError, match="rank 1 sent 16 bytes for a receive of 12"):
            dense_all_reduce(group, values, "sum").wait()

    run(2, body)


def test_hosts_have_names():
    groups = threads.group(3, hosts=["a", "b", "a"])
    assert {group.hosts for group in groups} == {("a", "b", "a")}
    with pytest.raises(WeftError, match="2 hosts for 3 ranks"):
        threads.group(3, hosts=["a", "b"])
    with pytest.raises(WeftError, match="at least one rank, not 0"):
        threads.group(0)


def test_parts_have_the_hosts_of_their_ranks():
    groups = threads.group(3, hosts=["a", "b", "c"])
    parts = [group.split([2, 0]) for group in groups]
    assert parts[1] is None
    assert (parts[2].rank, parts[0].rank) == (0, 1)
    assert parts[0].hosts == parts[2].hosts == groups[1].hosts[::-2] == ("c", "a")


def test_parts_that_differ_are_noticed():
    groups = threads.group(3)
    groups[0].split([0, 1])
    with pytest.raises(WireError, match=r"rank 1 makes a part of ranks \[1, 2\]") as caught:
        groups[1].split([1, 2])
    assert caught.value.culprit == 1
    with pytest.raises(WeftError, match=r"\[0, 0\] are not distinct ranks of 3"):
        threads.group(3)[0].split([0, 0])


def test_a_group_breaks_with_all_its_parts():
    groups = threads.group(3)
    parts = [group.split([2, 0]) for group in groups]
    groups[2].abort("no memory")
    with pytest.raises(WireError, match=r"rank 1: the group .* broke: rank 2 gave up") as caught:
        parts[0].post((), [(0, 4)]).wait()
    assert caught.value.culprit == 0  # rank 2 of the whole


def test_a_part_that_breaks_leaves_the_whole():
    groups = threads.group(2)
    parts = [group.split([1, 0]) for group in groups]
    parts[0].abort("on purpose")
    with pytest.raises(WireError, match="on purpose"):
        parts[1].post((), [(1, 4)]).wait()
    for group in groups:
        group.post()


def test_a_closed_wire_lets_go_of_its_memory(monkeypatch):
    before = set(threading.enumerate())  # some of which may end meanwhile
    group = threads.group(1)[0]
    group.lease(10_000).release()
    group.worker.submit("nothing", lambda: None).wait()
    assert len(set(threading.enumerate()) - before) == 1
    drained = []
    monkeypatch.setattr(group.memory, "drain", lambda: drained.append(True))
    group.close()
    assert set(threading.enumerate()) - before == set()
    assert drained == [True]


def scribbles(group, has_received):
    peer = 1 - group.rank
    pending = group.post([(peer, torch.zeros(4))], [(peer, 16)])
    view = pending.wait()[0]
    if group.rank == 0:
        has_received.set()
        return
    assert has_received.wait(10.0)  # what follows would end a wait of rank 0
    view.fill_(1)
    with pytest.raises(WireError, match="rank 1: received bytes were written to") as caught:
        pending.release()
    assert caught.value.culprit == 1


def test_who_writes_to_what_it_received_is_told():
    run(2, scribbles, threading.Event())


# the wire by itself


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
