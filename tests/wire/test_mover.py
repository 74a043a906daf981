"""`weft.wire.mover`: who moves the bytes, and how a wait ends."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time

import pytest
import torch

from weft.wire.mover import Lost, Mover

FRAME = struct.Struct("!QQ")


@pytest.fixture
def pair():
    """The movers of two ranks."""
    bulk, small = socket.socketpair(), socket.socketpair()
    for sock in (*bulk, *small):
        sock.setblocking(False)
    movers = [Mover(rank, {1 - rank: bulk[rank]}, {1 - rank: small[rank]}, {}) for rank in (0, 1)]
    yield movers
    for mover in movers:
        mover.close()


def memory(size):
    return memoryview(bytearray(size))


def send(mover, payload, channel=0):
    (peer,) = mover.lines
    return mover.post(mover.lines, [(peer, memoryview(payload), "")], (), channel)


def receive(mover, size, channel=0):
    (peer,) = mover.lines
    place = memory(size)
    return mover.post(mover.lines, (), [(peer, place, "")], channel), place


def wait(mover, orders, limit=10.0):
    mover.finish(orders, limit, lambda number: None)


def wait_for(condition):
    until = time.monotonic() + 10.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    assert condition()


def threads():
    return [each for each in threading.enumerate() if each.name == "weft mover"]


def test_a_close_waits_a_moment_for_who_moves_something(pair):
    """What that has still to say is what a peer may be waiting for."""
    left, right = pair
    awaited, place = receive(left, 4)
    receive(right, 4)  # so that it looks at what comes
    wait_for(lambda: left.advance() or right.advance() or right.lines[0]._allowed.get(0))
    busy = threading.Event()

    def move():
        with right._turn:
            busy.set()
            time.sleep(0.02)
            send(right, b"late")

    mover = threading.Thread(target=move)
    mover.start()
    assert busy.wait(10.0)
    right.close()
    mover.join()
    wait(left, awaited)
    assert place == b"late"


def test_a_close_that_cannot_read_what_lies_there_closes(pair):
    """An interrupt may have come in the middle of reading."""
    left, _ = pair
    (line,) = left.lines.values()
    line.receive = lambda: (_ for _ in ()).throw(AssertionError("interrupted"))
    with pytest.raises(AssertionError, match="interrupted"):
        left.close()
    assert line.sock.fileno() == -1
    del line.receive


def test_a_mover_that_its_own_thread_closes_ends(pair):
    """As a collection of garbage does, anywhere."""
    left, _ = pair
    left._tend = left.close
    left._rouse()
    wait_for(lambda: left._closed and not left._thread.is_alive())


def test_messages_move_while_nobody_waits(pair):
    left, right = pair
    payload = bytes(range(256)) * 40_000  # more than sockets hold
    orders, (awaited, place) = send(left, payload), receive(right, len(payload))
    order = orders[0][1]
    wait_for(lambda: order.done and awaited[0][1].done)
    assert place == payload
    wait(left, orders)  # which is over at once
    wait(right, awaited)


def test_the_thread_rests_when_nothing_is_under_way(pair):
    left, right = pair
    orders, awaited = send(left, b"x"), receive(right, 1)[0]
    wait_both(pair, orders, awaited)
    wait_for(lambda: not left._stir.is_set() and not right._stir.is_set())
    wait_both(pair, send(left, b"y"), receive(right, 1)[0])  # and it wakes up again


def wait_both(pair, orders, awaited):
    other = threading.Thread(target=wait, args=(pair[0], orders))
    other.start()
    wait(pair[1], awaited)
    other.join()


def test_a_message_that_goes_out_at_the_last_look_is_not_waited_for(pair):
    left, right = pair
    # more than the socket holds
    orders = left.post_small([(1, torch.zeros(1 << 20, dtype=torch.uint8))], ())
    line, theirs, looks = left.small[1], right.small[0].sock, []
    flush = line.flush

    def looked():
        looks.append(line)
        while len(looks) > 1 and line.writes:  # meanwhile the peer has read all of it
            theirs.recv(1 << 16)
            flush()
        flush()

    line.flush = looked
    wait(left, orders, limit=300.0)  # far beyond the timeout of a test
    assert len(looks) == 2


def test_small_messages_start_no_thread(pair):
    left, right = pair
    before = len(threads())
    orders = left.post_small([(1, torch.arange(5, dtype=torch.uint8))], ())
    place = torch.empty(5, dtype=torch.uint8)
    wait(right, right.post_small((), [(0, place)]))
    wait(left, orders)
    assert place.tolist() == [0, 1, 2, 3, 4] and len(threads()) == before


class Looks:
    """Sockets of which one is ready at a certain look; notes how long each look waits, in ms."""

    def __init__(self, ready_at):
        self.ready_at, self.waits = ready_at, []

    def poll(self, wait):
        self.waits.append(wait)
        return [(7, 1)] if len(self.waits) == self.ready_at else []


def test_a_wait_looks_awake_before_it_sleeps(pair, monkeypatch):
    """What comes within moments wakes nobody; what does not is waited for asleep."""
    soon, late = Looks(ready_at=3), Looks(ready_at=2)
    monkeypatch.setattr(pair[0], "_poll", soon)
    assert pair[0]._ready(30.0, 60.0) == [(7, 1)]
    assert soon.waits == [0, 0, 0]
    monkeypatch.setattr(pair[0], "_poll", late)
    assert pair[0]._ready(30.0, 0.0) == [(7, 1)]
    assert late.waits == [0, 30e3]


def test_a_wait_ends_at_its_limit(pair):
    orders, _ = receive(pair[0], 8)
    began = time.monotonic()
    with pytest.raises(Lost, match="it did not come in time"):
        wait(pair[0], orders, 0.2)
    assert time.monotonic() - began < 5.0


def test_a_wait_ends_at_its_limit_though_other_messages_come(pair):
    left, right = pair
    orders, _ = receive(left, 8, channel=1)
    for _ in range(300):
        receive(left, 1)
    stop = threading.Event()

    def chatter():
        for _ in range(300):
            wait(right, send(right, b"x"))
            if stop.wait(0.002):
                return

    other = threading.Thread(target=chatter)
    other.start()
    with pytest.raises(Lost, match="it did not come in time"):
        wait(left, orders, 0.2)
    stop.set()
    other.join()


@pytest.mark.parametrize("how", ["cut", "close"])
def test_another_thread_ends_a_wait_for_the_rest_of_a_message(pair, how):
    """What gloo cannot do."""
    left, right = pair
    orders, place = receive(left, 1000)
    right.lines[0].sock.send(FRAME.pack(0, 1000) + b"x" * 100)
    wait_for(lambda: place[99] == ord("x"))
    threading.Timer(0.2, getattr(left, how)).start()
    began = time.monotonic()
    with pytest.raises(Lost, match=r"the connection (is|was) closed"):
        wait(left, orders)
    assert time.monotonic() - began < 5.0


def test_closing_wakes_a_thread_that_is_about_to_sleep(pair, monkeypatch):
    left, right = pair
    looks, goes = threading.Event(), threading.Event()
    step = left._step

    def slow(seconds):
        step(seconds)
        if threading.current_thread() is left._thread and not left.lines[1].busy:
            looks.set()
            goes.wait(10.0)

    monkeypatch.setattr(left, "_step", slow)
    receive(left, 1)
    send(right, b"x")
    assert looks.wait(10.0)
    closing = threading.Thread(target=left.close, daemon=True)
    closing.start()
    time.sleep(0.2)  # it waits for its turn
    goes.set()
    closing.join(10.0)
    assert not closing.is_alive()


def test_a_failure_of_the_thread_reaches_who_waits(pair, monkeypatch):
    left, _ = pair
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def fail(seconds):
        raise MemoryError("no memory left")

    monkeypatch.setattr(left, "_step", fail)
    orders, _ = receive(left, 8)
    wait_for(lambda: left._failed is not None)
    monkeypatch.undo()
    with pytest.raises(Lost, match="the thread that moves its bytes failed: MemoryError"):
        wait(left, orders)


def test_a_forked_child_waits_for_no_turn_of_its_parent(pair):
    mover = pair[0]
    held, go = threading.Event(), threading.Event()

    def hold():
        with mover._turn:  # as a thread does that waits for a message
            held.set()
            go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            mover.abandon()
            mover.close()
            os._exit(0)
        finally:
            os._exit(1)
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
