"""`weft.wire.tcp.listener`: every two ranks are joined, and nobody else."""

from __future__ import annotations

import errno
import select
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from weft.base.errors import AbsentError
from weft.wire.tcp.listener import (
    CONTROL,
    MESSAGES,
    Endpoint,
    Listener,
    is_transient,
    round_trip,
    suit_distance,
)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="options of Linux's TCP")


def joined(listeners, deadline, stack):
    """The sockets of each rank, by peer, made at the same time; the stack closes them."""
    endpoints = [each.endpoint for each in listeners]

    def make(rank):
        peers = {peer: each for peer, each in enumerate(endpoints) if peer != rank}
        made = listeners[rank].connect(rank, peers, MESSAGES, deadline)
        for sock in made.values():
            stack.callback(sock.close)
        return made

    with ThreadPoolExecutor(len(listeners)) as pool:
        return list(pool.map(make, range(len(listeners))))


@pytest.fixture
def listeners():
    with ExitStack() as stack:
        yield [stack.enter_context(Listener("127.0.0.1", 8)) for _ in range(3)]


def test_every_two_ranks_are_joined_whoever_else_connects(listeners):
    endpoint = listeners[0].endpoint
    with ExitStack() as stack:
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(60), bytes(3) + b"\1" + bytes(60)):
            stranger = socket.create_connection((endpoint.address, endpoint.port))
            stack.callback(stranger.close)
            stranger.sendall(words)  # nothing, something else, a rank without the token
        made = joined(listeners, time.monotonic() + 10.0, stack)
        assert [sorted(sockets) for sockets in made] == [[1, 2], [0, 2], [0, 1]]
        for rank, sockets in enumerate(made):
            for peer, sock in sockets.items():
                sock.setblocking(True)
                sock.sendall(bytes([rank, peer]))
        for rank, sockets in enumerate(made):
            for peer, sock in sockets.items():
                assert sock.recv(2) == bytes([peer, rank])


def test_who_comes_for_another_purpose_is_refused(listeners):
    """A control link is not taken for the socket of messages."""
    ends = [each.endpoint for each in listeners[:2]]
    until = time.monotonic() + 1.0
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(listeners[0].connect, 0, {1: ends[1]}, MESSAGES, until)
        comes = pool.submit(listeners[1].connect, 1, {0: ends[0]}, CONTROL, until)
        for each in (waits, comes):
            with pytest.raises(AbsentError):
                each.result()


def test_a_rank_that_comes_early_has_to_come_again_and_no_warning_is_logged(listeners, caplog):
    first, second, third = listeners
    until = time.monotonic() + 20.0
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(
            first.connect, 0, {1: second.endpoint}, MESSAGES, until, lambda: None, {2}
        )
        early = third.attempt(2, 0, first.endpoint, MESSAGES)
        with early.sock, pytest.raises(ConnectionResetError) as caught:
            while not early.advance():
                early.sleep(0.1)
        assert is_transient(caught.value)
        comes = pool.submit(second.connect, 1, {0: first.endpoint}, MESSAGES, until)
        for each in (waits, comes):
            for sock in each.result().values():
                sock.close()
    assert caplog.messages == []


def test_a_rank_that_comes_as_this_one_leaves_is_not_called_a_stranger(listeners, caplog):
    first, second, _ = listeners
    acceptor = first.acceptor(0, 1)
    attempt = second.attempt(1, 0, first.endpoint, MESSAGES)
    with attempt.sock:
        assert not list(acceptor.proven(10.0))  # the nonce is sent
        attempt.sleep(10.0)
        attempt.advance()  # the hello and the proof are sent
        select.select([acceptor], [], [], 10.0)
        acceptor.close()
    assert caplog.messages == []


@pytest.mark.parametrize("leaves", [False, True], ids=["goes on", "leaves"])
def test_an_attempt_that_a_rank_ends_is_not_called_a_stranger(listeners, caplog, leaves):
    """As one of two ranks that connect to each other does, once the other came through."""
    first, second, _ = listeners
    acceptor = first.acceptor(0, 1)
    attempts = [second.attempt(1, 0, first.endpoint, MESSAGES) for _ in range(2)]
    for _ in attempts:
        assert not list(acceptor.proven(10.0))  # the nonce is sent
    attempts[0].sleep(10.0)
    attempts[0].sock.recv(1)  # else to close it is a reset
    attempts[0].sock.shutdown(socket.SHUT_WR)
    attempts[1].sock.close()
    if not leaves:
        while select.select([acceptor], [], [], 0.5)[0]:
            assert not list(acceptor.proven(10.0))
    acceptor.close()
    attempts[0].sock.close()
    assert caplog.messages == []


@pytest.mark.parametrize("words", [b"", b"GET /"])
def test_who_stays_or_says_something_else_is_a_stranger(listeners, caplog, words):
    endpoint = listeners[0].endpoint
    acceptor = listeners[0].acceptor(0, 1)
    with socket.create_connection((endpoint.address, endpoint.port)) as stranger:
        assert not list(acceptor.proven(10.0))
        if words:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        acceptor.close()
    assert caplog.messages == [
        "rank 0 refused a connection from 127.0.0.1: it did not prove that it knows the token"
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_no_file_is_left_no_other_rank_is_to_blame(listeners, no_file_left, rank):
    """Rank 0 accepts, and rank 1 connects."""
    peer = 1 - rank
    with (
        no_file_left(),
        pytest.raises(OSError, match=r"no file descriptor .* \(ulimit -n, or"),
    ):
        listeners[rank].connect(
            rank, {peer: listeners[peer].endpoint}, MESSAGES, time.monotonic() + 20.0
        )


class Gone(Exception):
    """What a test's `check` raises."""


def test_who_will_not_come_is_not_waited_for(listeners):
    """Neither for a rank that is to connect, nor for one that listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = Endpoint("127.0.0.1", silent.getsockname()[1], "0" * 32)
        for rank, peer, endpoint in ((0, 1, listeners[1].endpoint), (1, 0, mute)):
            looks = iter(range(3))

            def check(looks=looks):
                if next(looks, None) is None:
                    raise Gone

            with pytest.raises(Gone):
                listeners[rank].connect(
                    rank, {peer: endpoint}, MESSAGES, time.monotonic() + 300.0, check
                )


def test_who_reads_along_cannot_come_in_a_rank_s_place(listeners):
    """It hears all that two ranks say, and says it itself before it lets it pass."""
    listener, other, _ = listeners
    at = listener.endpoint.address, listener.endpoint.port
    said, answers = [], []

    def between():
        with server:
            server.accept()[0].close()  # as with too many connections: the rank connects again
            near, _ = server.accept()
            far = socket.create_connection(at)
            own = socket.create_connection(at)
            with near, far, own:
                near.sendall(nonce := far.recv(16))
                said.append(near.recv(56))
                own.recv(16)
                own.sendall(said[-1])
                answers.append(own.recv(32))
                far.sendall(said[-1])
                near.sendall(proof := far.recv(32))
                said.extend((nonce, proof))

    with ExitStack() as stack:
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(10.0)
        thread = threading.Thread(target=between)
        thread.start()
        listener.endpoint = replace(listener.endpoint, port=server.getsockname()[1])
        made = joined([listener, other], time.monotonic() + 10.0, stack)
        thread.join()
    assert sorted(made[1]) == [0]
    assert answers == [b""] and len(set(said)) == 3
    token = listener.endpoint.token
    assert token.encode() not in b"".join(said) and bytes.fromhex(token) not in b"".join(said)


def test_who_listens_in_a_rank_s_place_is_found_out(listeners):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1], "0" * 32)

        def listen():
            with server.accept()[0] as sock:
                sock.sendall(bytes(48))
                sock.recv(56)

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(AbsentError, match=r"rank 0 cannot .* does not know the token of that"):
            listeners[1].connect(1, {0: endpoint}, MESSAGES, time.monotonic() + 10.0)
        thread.join()


def test_ranks_of_one_host_have_unix_sockets():
    with ExitStack() as stack:
        hosts = ["red", "blue", "blue"]
        listeners = [stack.enter_context(Listener("127.0.0.1", 8, host)) for host in hosts]
        made = joined(listeners, time.monotonic() + 10.0, stack)
        unix = {
            (rank, peer)
            for rank, sockets in enumerate(made)
            for peer, sock in sockets.items()
            if sock.family == socket.AF_UNIX
        }
    assert unix == {(1, 2), (2, 1)}


def test_who_does_not_come_is_named(listeners):
    listener, *others = listeners
    endpoints = {rank: each.endpoint for rank, each in enumerate(others, start=1)}
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="ranks 1 and 2 did not connect"):
        listener.connect(0, endpoints, MESSAGES, time.monotonic() + 0.3)
    assert time.monotonic() - began < 5.0


def test_who_cannot_be_reached_is_named(listeners):
    _, other = listeners[:2]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = Endpoint("127.0.0.1", closed.getsockname()[1], "0" * 32)
    with pytest.raises(AbsentError, match=r"^rank 0 cannot be reached at 127.0.0.1 port .*refused"):
        other.connect(1, {0: endpoint}, MESSAGES, time.monotonic() + 5.0)


def test_no_time_left_is_said(listeners):
    endpoints = {0: listeners[0].endpoint}
    with pytest.raises(TimeoutError, match="no time was left"):
        listeners[1].connect(1, endpoints, MESSAGES, time.monotonic() - 1.0)


def test_an_endpoint_that_is_shut_leaves_nothing_open(listeners, nothing_left):
    with Listener("127.0.0.1", 1) as gone:
        shut = gone.endpoint
    endpoints = {0: listeners[0].endpoint, 1: replace(shut, token="0" * 32)}
    with nothing_left(), pytest.raises(AbsentError):
        listeners[2].connect(2, endpoints, MESSAGES, time.monotonic() + 0.5)


def test_a_link_that_is_not_up_yet_is_waited_for(listeners, monkeypatch):
    failures = [errno.EHOSTUNREACH, errno.ENETUNREACH]
    connect = socket.socket.connect_ex

    def failing(*args):
        return failures.pop() if failures else connect(*args)

    monkeypatch.setattr(socket.socket, "connect_ex", failing)
    with ExitStack() as stack:
        made = joined(listeners[:2], time.monotonic() + 10.0, stack)
        assert not failures and [sorted(sockets) for sockets in made] == [[1], [0]]


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="Cannot assign"):
        Listener("192.0.2.1", 1)


class Distant:
    """A socket of a connection whose shortest round trip takes so long, as Linux would say it."""

    family = socket.AF_INET

    def __init__(self, microseconds, refuses=False):
        self._info = bytes(148) + microseconds.to_bytes(4, sys.byteorder)
        self._refuses = refuses
        self.control = b"cubic"

    def getsockopt(self, level, option, length):
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self._info[:length]

    def setsockopt(self, level, option, value):
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if self._refuses:
            raise PermissionError(errno.EPERM, "only for administrators")
        self.control = value


@linux
@pytest.mark.parametrize(
    ("microseconds", "refuses", "control"),
    [(50_000, False, b"bbr"), (500, False, b"cubic"), (50_000, True, b"cubic")],
)
def test_only_connections_between_distant_hosts_change_their_congestion_control(
    microseconds, refuses, control
):
    sock = Distant(microseconds, refuses)
    suit_distance(sock)
    assert sock.control == control


@linux
def test_the_round_trip_of_a_connection_is_read_where_linux_has_it():
    """A connection within this machine has one, of less than a second, and keeps its control."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sock = stack.enter_context(socket.create_connection(server.getsockname()))
        other = stack.enter_context(server.accept()[0])
        before = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        sock.sendall(b"x")
        other.recv(1)
        other.sendall(b"x")
        sock.recv(1)
        assert 0 < round_trip(sock) < 1_000_000
        suit_distance(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == before
