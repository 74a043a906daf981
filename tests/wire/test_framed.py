"""`weft.wire.framed`: two ends over queues of this process, of which one is held up."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from weft.base.pace import patient
from weft.wire.framed import FramedWire
from weft.wire.interface import Failure, WireFailed

SOON = 10.0
LONG = 3 << 20  # bytes of a message of several pieces


def until(condition):
    """Wait until something is so."""
    late = time.monotonic() + patient(SOON)
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.001)


class Net:
    """Where two carriers meet; while `is_open` is cleared, it takes nothing long."""

    def __init__(self):
        self.parts = defaultdict(queue.SimpleQueue)
        self.is_open = threading.Event()
        self.is_open.set()
        self.held = threading.Event()  # that something long waits


class Carrier:
    """As a process group of gloo's: a send reads its tensor until the peer has taken it."""

    def __init__(self, net, rank):
        self.net, self.rank = net, rank

    def send(self, tensors, peer, tag):
        def wait(timeout):
            if len(tensors[0]) > 1024 and not self.net.is_open.is_set():
                self.net.held.set()
                assert self.net.is_open.wait(SOON)
            self.net.parts[self.rank, peer].put(tensors[0].clone())

        return SimpleNamespace(wait=wait)

    def recv(self, tensors, peer, tag):
        def wait(timeout):
            part = self.net.parts[peer, self.rank].get()
            if part is None:
                raise RuntimeError("the carrier has ended")
            tensors[0].copy_(part)

        return SimpleNamespace(wait=wait)

    def end_waits(self, peers):
        for peer in peers:
            self.net.parts[peer, self.rank].put(None)


@pytest.fixture
def ends():
    net = Net()
    wires = [FramedWire(Carrier(net, rank), rank, 2) for rank in range(2)]
    for wire in wires:
        wire.start()
    yield net, *wires
    closes = [threading.Thread(target=wire.close) for wire in wires]
    for close in closes:
        close.start()
    for close in closes:
        close.join()


@pytest.mark.parametrize("length", [LONG, 9 << 10])
def test_what_a_failed_wait_gave_back_is_not_in_what_a_peer_gets(ends, length):
    """A peer that was held up takes the message as it was, or does not get it."""
    net, first, second = ends
    net.is_open.clear()
    message = torch.ones(length, dtype=torch.uint8)
    place = torch.zeros_like(message)
    sent = first.post([(1, message)])
    unsent = first.post([(1, message)], channel=1)
    received = second.post((), [(0, place)])
    assert net.held.wait(SOON)
    first.abort(Failure("aborted", None, "rank 2 died"))
    for pending in (sent, unsent):
        with pytest.raises(WireFailed):
            pending.wait(SOON)
    message.zero_()  # its memory is the caller's again
    net.is_open.set()
    if length < LONG:  # all of it was on its way
        received.wait(SOON)
        assert place.all()
    first.close()
    net.parts[0, 1].put(None)  # its connection is closed with it
    with pytest.raises(WireFailed):
        second.post((), [(0, place)], channel=1).wait(SOON)
    assert received.done()


def test_what_was_posted_before_a_close_arrives(ends):
    net, first, second = ends
    net.is_open.clear()
    place = torch.zeros(LONG, dtype=torch.uint8)
    received = second.post((), [(0, place)])
    for channel in (0, 1):
        first.post([(1, torch.ones(LONG, dtype=torch.uint8))], channel=channel)
    assert net.held.wait(SOON)
    close = threading.Thread(target=first.close)
    close.start()
    until(lambda: first.failure() is not None)
    net.is_open.set()
    assert received.wait(SOON) == [place] and place.all()
    assert second.post((), [(0, place.zero_())], channel=1).wait(SOON) == [place] and place.all()
    second.close()
    close.join(SOON)
    assert not close.is_alive()


@pytest.mark.parametrize("length", [LONG, 9 << 10])
def test_no_thread_and_no_closed_wire_keeps_what_has_not_gone(ends, length):
    net, first, _ = ends
    net.is_open.clear()
    messages = [torch.ones(each, dtype=torch.uint8).numpy() for each in (length, LONG, LONG)]
    kept = [weakref.ref(each) for each in messages]
    posted = [first.post([(1, torch.from_numpy(each))]) for each in messages]
    assert net.held.wait(SOON)
    first.abort(Failure("aborted", None, "rank 2 died"))
    del posted, messages
    net.is_open.set()
    if length == LONG:  # else the thread of the sends goes on, and has nothing to do
        first.close()
    until(lambda: not any(each() is not None for each in kept))
