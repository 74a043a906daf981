"""`weft.wire.tcp.wire`: two ends in this process, and what happens to them in the middle."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import psutil
import pytest
import torch
from wire_ranks import far, make, make_wires, status_of

from weft.base.pace import patient
from weft.kernels import jit
from weft.wire.interface import Failure, WireFailed
from weft.wire.tcp import connection, shm
from weft.wire.tcp import wire as tcp
from weft.wire.tcp.wire import TcpWire


@pytest.fixture
def ends():
    """Two wires of two ranks."""
    sockets = socket.socketpair()
    wires = [TcpWire(rank, 2, {1 - rank: sockets[rank]}) for rank in range(2)]
    yield wires
    for wire in wires:
        wire.close()


@pytest.fixture
def far_ends():
    """Two wires that are joined as those of two hosts are."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    wires = [TcpWire(rank, 2, {1 - rank: each}) for rank, each in enumerate((near, far))]
    yield wires
    for wire in wires:
        wire.close()


@pytest.fixture
def lender(segment):
    """A wire of rank 0, whose segment rank 1 has mapped; and the socket of that one."""
    near, far = socket.socketpair()
    shared = {1: shm.Peer(segment.fd, segment.nbytes)}
    with far, contextlib.closing(TcpWire(0, 2, {1: near}, segment, shared)) as wire:
        yield wire, far


@pytest.mark.parametrize(("nbytes", "polls"), [(8, True), (4 * connection.EAGER, False)])
def test_between_hosts_a_wait_polls_for_a_short_message_and_sleeps_for_a_long_one(
    far_ends, monkeypatch, nbytes, polls
):
    first, second = far_ends
    yields = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(threading.get_ident()))
    received = second.post((), [(0, nbytes)])
    message = torch.zeros(nbytes, dtype=torch.uint8)

    def send():
        late = time.monotonic() + (patient(20.0) if polls else 0.05)
        while not yields and time.monotonic() < late:
            time.sleep(0.001)
        first.post([(1, message)])  # its wire's thread moves it

    sends = threading.Thread(target=send)
    sends.start()
    received.wait(patient(30.0))
    sends.join()
    assert bool(yields) == polls


def test_a_message_of_a_wrong_length_is_garbled_also_if_it_came_before_its_receive(ends):
    first, second = ends
    for nbytes in (8, 1):
        first.post([(1, torch.zeros(nbytes, dtype=torch.uint8))], channel=nbytes).wait(10.0)
    second.post((), [(0, 1)], channel=1).wait(10.0)  # now both are there
    with pytest.raises(WireFailed) as caught:
        second.post((), [(0, torch.zeros(9, dtype=torch.uint8))], channel=8).wait(10.0)
    failure = caught.value.failure
    assert (failure.kind, failure.peer) == ("garbled", 0)
    assert "8 bytes for a receive of exactly 9" in failure.text


@pytest.mark.parametrize("is_sized", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_long_message_for_a_short_receive_is_garbled_and_waits_for_no_credit(
    ends, is_early, is_sized
):
    first, second = ends
    message = torch.zeros(connection.EAGER + 1, dtype=torch.uint8)
    short = 9 if is_sized else torch.zeros(9, dtype=torch.uint8)
    before = torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(WireFailed) as caught:
        if is_early:
            pending = second.post((), [(0, 5), (0, short)])
        first.post([(1, before), (1, message)])
        if not is_early:
            with contextlib.suppress(TimeoutError):  # what says that it waits is here before
                second.post((), [(0, 1)], 1).wait(0.1)
            pending = second.post((), [(0, 5), (0, short)])
        pending.wait(10.0)
    assert (caught.value.failure.kind, caught.value.failure.peer) == ("garbled", 0)
    assert str(connection.EAGER + 1) in caught.value.failure.text


@pytest.mark.parametrize("gone", [False, True])
def test_that_also_holds_if_the_sender_has_closed_meanwhile(ends, gone):
    first, second = ends
    first.post([(1, torch.zeros(8, dtype=torch.uint8))]).wait(10.0)
    first.close()
    second.post((), [(0, 1)], channel=1)
    link = second.connections[0]
    while gone and not link.lost:
        link.receive()
    with pytest.raises(WireFailed) as caught:
        second.post((), [(0, 7)]).wait(10.0)
    assert caught.value.failure.kind == "garbled"


class Interrupted:
    """A socket, in the middle of whose `sendmsg` a handler of a signal runs."""

    def __init__(self, sock, handler):
        self._sock, self._handler = sock, handler

    def sendmsg(self, *given):
        sent = self._sock.sendmsg(*given)
        handler, self._handler = self._handler, lambda: None
        handler()
        return sent

    def __getattr__(self, name):
        return getattr(self._sock, name)


def test_a_close_in_the_middle_of_a_send_sends_nothing_twice(ends):
    """As where a handler of a signal ends the program's group."""
    first, second = ends
    message = torch.arange(1 << 20)
    place = torch.zeros_like(message)
    received = second.post((), [(0, place)])

    def handler():
        with contextlib.suppress(TimeoutError):
            received.wait(0)  # so that the socket takes more
        first.close()

    pending = first.post([(1, message)])
    while not first.connections[1].parts:
        with pytest.raises(TimeoutError):
            pending.wait(0)
    link = first.connections[1]
    link.sock = Interrupted(link.sock, handler)
    with pytest.raises(WireFailed):
        pending.wait(10.0)
    with pytest.raises(WireFailed) as caught:
        received.wait(10.0)
    assert caught.value.failure.kind == "lost"
    came = int(place.count_nonzero()) + 1
    assert torch.equal(place[:came], message[:came])


class PollOfHandler:
    """A `select.poll`, at the end of the first sleep of which a handler of a signal runs."""

    def __init__(self, poll, handlers):
        self._poll, self._handlers = poll, handlers

    def poll(self, milliseconds):
        if not (milliseconds and self._handlers):
            return self._poll.poll(milliseconds)
        before, after = self._handlers.pop()
        before()
        events = self._poll.poll(milliseconds)
        after()
        return events

    def __getattr__(self, name):
        return getattr(self._poll, name)


def test_a_close_by_a_handler_during_a_sleep_ends_the_wait_as_any_other(monkeypatch):
    """What the sleep says is ready is closed by then: sockets, and what woke it."""
    handlers = []
    poll = select.poll
    monkeypatch.setattr(select, "poll", lambda: PollOfHandler(poll(), handlers))
    near, far = socket.socketpair()
    wire = TcpWire(0, 2, {1: near})
    other = threading.Thread(target=wire.close)  # which wakes who sleeps

    def make_ready():
        far.sendall(b"a part of a frame")
        other.start()
        time.sleep(0.1)

    pending = wire.post((), [(1, 8)])
    handlers.append((make_ready, wire.close))
    with far, pytest.raises(WireFailed, match="this end was closed"):
        pending.wait(10.0)
    other.join(20.0)
    assert not (handlers or other.is_alive())


def test_what_comes_as_the_wire_fails_is_not_written(monkeypatch):
    """Memory is the caller's again once a wait has raised."""
    handlers = []
    poll = select.poll
    monkeypatch.setattr(select, "poll", lambda: PollOfHandler(poll(), handlers))
    sockets = socket.socketpair()
    first, second = [TcpWire(rank, 2, {1 - rank: sockets[rank]}) for rank in range(2)]
    place = torch.full((4,), 7, dtype=torch.uint8)
    pending = first.post((), [(1, place)])
    given = Failure("aborted", 1, "rank 1 died")
    come = torch.ones(4, dtype=torch.uint8)
    handlers.append((lambda: second.post([(0, come)]), lambda: first.abort(given)))
    with contextlib.closing(first), contextlib.closing(second):
        with pytest.raises(WireFailed):
            pending.wait(10.0)
        assert not handlers and place.tolist() == [7] * 4


def test_between_hosts_messages_move_while_nobody_waits(far_ends):
    first, second = far_ends
    message = torch.arange(1 << 19)
    place = torch.zeros_like(message)
    pending = [second.post((), [(0, place)]), first.post([(1, message)])]
    until = time.monotonic() + patient(20.0)
    while any(each.waiting_for() for each in pending):  # which moves nothing
        assert time.monotonic() < until
        time.sleep(0.01)
    assert torch.equal(place, message)


def test_a_close_by_a_handler_during_a_sleep_sends_what_was_posted_before(ends):
    """A handler runs in the middle of the poll, which nothing may begin again meanwhile."""
    first, second = ends
    messages = [torch.full((1 << 16,), number, dtype=torch.uint8) for number in range(64)]
    pending = first.post([(1, message) for message in messages], [(1, 1)])
    before = signal.signal(signal.SIGALRM, lambda *_: first.close())
    received = []

    def read():
        time.sleep(0.5)  # until the handler is in the close
        for _ in messages:
            [message] = second.post((), [(0, 1 << 16)]).wait(10.0)
            received.append(int(message[0]))

    reader = threading.Thread(target=read)
    reader.start()
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(WireFailed) as caught:
            pending.wait(10.0)
    finally:
        signal.signal(signal.SIGALRM, before)
        reader.join()
    assert caught.value.failure.kind == "aborted"
    assert received == list(range(64))


@pytest.mark.skipif(jit.loops() is None, reason="there is no machine code here")
def test_who_fails_just_before_it_sleeps_while_ranks_meet_does_not_sleep(monkeypatch):
    first, second = make_wires(make, 2)
    given = Failure("aborted", 1, "rank 1 died")

    def fail():
        first.abort(given)
        time.sleep(0.001)  # longer than a wait polls

    with contextlib.closing(first), contextlib.closing(second):
        first.meet(b"", [0, 1])
        monkeypatch.setattr(os, "sched_yield", fail)
        with pytest.raises(WireFailed) as caught:
            first.post((), [(1, 8)]).wait(patient(20.0))
        assert caught.value.failure is given


@contextlib.contextmanager
def waits_in_a_thread(pending):
    """Another thread waits in vain, until the end of the block; what it raises is in the list."""
    failures = []

    def wait():
        with pytest.raises(WireFailed) as caught:
            pending.wait(30.0)
        failures.append(caught.value.failure.kind)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)  # until it is in the wait
    yield failures
    thread.join(30.0)


def until_the_socket_is_full(wire):
    """Post short messages to rank 1 until something waits for the socket; how many."""
    count = 0
    while not wire.connections[1].unsent:
        wire.post([(1, torch.full((1 << 12,), count % 256, dtype=torch.uint8))])
        count += 1
    return count


def test_a_close_while_another_thread_waits_sends_what_was_sent_before(segment):
    """It is complete, since it was copied; who waits sends it meanwhile."""
    sockets = socket.socketpair()
    shared = shm.Peer(segment.fd, segment.nbytes)
    first = TcpWire(0, 2, {1: sockets[0]}, segment, {1: shared})
    second = TcpWire(1, 2, {0: sockets[1]}, segments={0: shared})
    count = until_the_socket_is_full(first)
    message = torch.arange(1 << 15)
    first.post([(1, message)]).wait(10.0)
    place = torch.zeros_like(message)

    def read():
        time.sleep(0.5)  # until the other end is in the close
        for number in range(count):
            [short] = second.post((), [(0, 1 << 12)]).wait(10.0)
            assert int(short[0]) == number % 256
        second.post((), [(0, place)]).wait(10.0)

    with ThreadPoolExecutor(1) as pool, waits_in_a_thread(first.post((), [(1, 1)])) as failures:
        reading = pool.submit(read)
        first.close()
        reading.result(30.0)
    second.close()
    assert torch.equal(place, message)
    assert failures == ["aborted"]


def test_what_was_sent_to_another_host_arrives_though_its_reader_sends_meanwhile(
    far_ends, monkeypatch
):
    """A receive of many bytes offers room: to a closed socket, that would reset the connection."""
    monkeypatch.setattr(tcp, "LINGER", 60.0)  # this machine may be busy
    first, second = far_ends
    short = 3 * connection.EAGER // 4
    messages = [torch.full((short,), number, dtype=torch.uint8) for number in range(12)]
    first.post([(1, each) for each in messages]).wait(10.0)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(first.close)
        wait([closing], 0.5)  # it could be through, since the system has taken all
        for number in range(12):
            received = second.post((), [(0, 2 * connection.EAGER)])
            [message] = received.wait(patient(10.0))
            assert len(message) == short and int(message[0]) == number
            received.release()
        closing.result(60.0)


def test_a_close_does_not_wait_for_a_peer_of_another_host_that_has_gone(monkeypatch, far_ends):
    """What is sent to it resets the connection, and is never acknowledged."""
    monkeypatch.setattr(tcp, "LINGER", 600.0)
    first, second = far_ends
    second.close()
    first.post([(1, torch.ones(10))])
    first.close()


def test_a_close_ends_though_a_peer_of_another_host_takes_nothing(monkeypatch, far_ends):
    monkeypatch.setattr(tcp, "LINGER", 0.3)
    first, _ = far_ends
    until_the_socket_is_full(first)
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < patient(5.0)


def test_a_close_while_another_thread_waits_ends_though_the_peer_takes_nothing(monkeypatch):
    monkeypatch.setattr(tcp, "LINGER", 0.3)
    near, far = socket.socketpair()
    wire = TcpWire(0, 2, {1: near})
    until_the_socket_is_full(wire)
    with far, waits_in_a_thread(wire.post((), [(1, 1)])) as failures:
        wire.close()
    assert failures == ["aborted"]


def test_a_post_that_awaits_two_ranks_fails_as_the_second_is_lost():
    to_live, live = socket.socketpair()
    to_dead, dead = socket.socketpair()
    with contextlib.closing(TcpWire(0, 3, {1: to_live, 2: to_dead})) as wire:
        pending = wire.post((), [(1, 1), (2, 1)])
        dead.close()
        with pytest.raises(WireFailed) as caught:
            pending.wait(10.0)
    live.close()
    assert (caught.value.failure.kind, caught.value.failure.peer) == ("lost", 2)


def test_what_is_sent_to_a_rank_that_left_takes_no_memory(lender):
    """Such sends are complete, since they are copied; nobody will ever say that they were read."""
    wire, far = lender
    far.close()
    for _ in range(3):
        wire.post([(1, torch.zeros(1 << 18, dtype=torch.uint8))]).wait(10.0)
    assert wire.connections[1].lost
    assert wire.segment.allocate(1 << 20) == 0


def test_a_copy_for_two_ranks_is_kept_for_the_second_though_the_first_has_left(segment):
    near, far = socket.socketpair()
    other, its = socket.socketpair()
    shared = shm.Peer(segment.fd, segment.nbytes)
    wire = TcpWire(0, 3, {1: near, 2: other}, segment, {1: shared, 2: shared})
    far.close()
    while not wire.connections[1].lost:
        wire.post([(1, torch.zeros(1))])
    tensor = torch.zeros(1 << 18, dtype=torch.uint8)
    wire.post([(1, tensor), (2, tensor)]).wait(10.0)
    assert segment.allocate(1 << 20) is None  # the second has yet to read it
    wire.close()
    its.close()


def test_what_had_not_gone_to_a_rank_that_left_takes_no_memory(lender):
    wire, far = lender
    until_the_socket_is_full(wire)
    wire.post([(1, torch.zeros(1 << 18, dtype=torch.uint8))]).wait(10.0)
    assert wire.segment.allocate(1 << 20) is None
    far.close()
    while not wire.connections[1].lost:
        wire.post([(1, torch.zeros(1))])
    assert wire.segment.allocate(1 << 20) == 0


def test_what_a_failed_wait_gave_back_is_not_leased_again(lender):
    """A peer may have been told where a message is, and read it later."""
    wire, _ = lender
    lease = wire.lease(1 << 18)
    pending = wire.post([(1, lease.tensor)])
    wire.abort(Failure("aborted", None, "rank 2 died"))
    with pytest.raises(WireFailed):
        pending.wait(10.0)
    lease.release()
    assert wire.lease(1 << 18) is None


def test_segments_are_exchanged_by_one_deadline_and_an_end_is_told_from_a_refusal(segment):
    sockets, others = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    for sock in others:
        sock.send(struct.pack("<Q", 0))  # and nothing after that
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        shm.exchange(segment, dict(enumerate(sockets)), start + 0.5)
    for sock in others:
        sock.send(struct.pack("<Q", 0))
    others[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="rank 0 went away"):
        shm.exchange(segment, dict(enumerate(sockets)), time.monotonic() + 10.0)
    for sock in (*sockets, *others):
        sock.close()


def test_a_factory_that_fails_leaves_no_descriptor(monkeypatch, nothing_left):
    """A peer that dies while segments are passed is a failure of the factory."""

    def dying(segment, sockets, deadline):
        raise ConnectionError("rank 1 went away while it was connected to")

    monkeypatch.setattr(shm, "exchange", dying)
    with nothing_left(), pytest.raises(ConnectionError, match="went away"):
        make_wires(make, 2)


@pytest.mark.parametrize("making", [make, far])
def test_ranks_are_connected_from_the_start_and_nobody_listens_then(making):
    before = listening()
    wires = make_wires(making, 3)
    connected = [sorted(wire.connections) for wire in wires]
    left = listening() - before
    for wire in wires:
        wire.close()
    assert connected == [[1, 2], [0, 2], [0, 1]]
    assert not left


def listening():
    sockets = psutil.Process().net_connections("tcp")
    return {each.laddr for each in sockets if each.status == "LISTEN"}


@contextlib.contextmanager
def held_elsewhere(lock):
    """Another thread has the lock."""
    taken, let_go = threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            let_go.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10.0)
    yield
    let_go.set()
    thread.join()


def test_a_fork_while_another_thread_takes_memory_of_the_segment():
    mine, theirs = socket.socketpair()
    wire = TcpWire(0, 2, {1: mine}, shm.Segment.make())
    with theirs, held_elsewhere(wire.segment.lock):
        child = os.fork()
        if child == 0:
            wire.close()
            wire.abort(Failure("aborted", None, "enough"))
            os._exit(0)
        assert status_of(child) == 0
    wire.close()


def test_a_wire_closes_though_its_thread_could_not_start(ends, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    first, _ = ends
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="start new thread"):
        first.post((), [(1, torch.zeros(1 << 17, dtype=torch.uint8))])
    first.close()
    assert first.failure().kind == "broken"
