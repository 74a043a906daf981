"""The thread wire is strict: what a real transport would take silently, or die of, it reports."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from weft.base.errors import WeftError, WireError
from weft.base.pace import patient
from weft.schedules import dense_all_reduce
from weft.testing import run, threads


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


def test_a_closed_wire_lets_go_of_its_memory():
    before = set(threading.enumerate())  # some of which may end meanwhile
    group = threads.group(1)[0]
    group.lease(10_000).release()
    group.worker.submit("nothing", lambda: None).wait()
    assert len(set(threading.enumerate()) - before) == 1
    assert group.memory.kept >= 10_000
    group.close()
    assert set(threading.enumerate()) - before == set()
    assert group.memory.kept == 0


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
