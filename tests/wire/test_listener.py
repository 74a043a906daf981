"""`weft.wire.tcp.listener`: every two ranks are joined, and nobody else."""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from weft.base.errors import AbsentError
from weft.wire.tcp import listener
from weft.wire.tcp.listener import LANES, Endpoint, Listener, round_trip, suit_distance

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="options of Linux's TCP")


def joined(listeners, deadline, stack):
    """The sockets of each rank, by lane and peer, made at once; the stack closes them."""
    endpoints = [each.endpoint for each in listeners]

    def make(rank):
        peers = {peer: each for peer, each in enumerate(endpoints) if peer != rank}
        made = listeners[rank].connect(rank, peers, deadline)
        for sockets in made:
            for sock in sockets.values():
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
        assert [[sorted(each) for each in lanes] for lanes in made] == [
            [[1, 2]] * 2,
            [[0, 2]] * 2,
            [[0, 1]] * 2,
        ]
        ways = [
            (rank, peer, lane) for rank in range(3) for lane in LANES for peer in made[rank][lane]
        ]
        for rank, peer, lane in ways:
            made[rank][lane][peer].setblocking(True)
            made[rank][lane][peer].sendall(bytes([rank, peer, lane]))
        for rank, peer, lane in ways:
            assert made[rank][lane][peer].recv(3) == bytes([peer, rank, lane])


def test_a_rank_that_gives_up_is_not_called_a_stranger(listeners, caplog):
    first, second, _ = listeners
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.connect, 0, {1: second.endpoint}, time.monotonic() + 1.0)
        gone = first.endpoint
        with socket.create_connection((gone.address, gone.port)) as early:
            early.recv(16)
        with pytest.raises(AbsentError, match="rank 1 did not connect"):
            waits.result()
    assert caplog.messages == []


@pytest.mark.parametrize("words", [b"", b"GET /"])
def test_who_stays_or_says_something_else_is_a_stranger(listeners, caplog, words):
    endpoint = listeners[0].endpoint
    with ExitStack() as stack:
        stranger = stack.enter_context(socket.create_connection((endpoint.address, endpoint.port)))
        if words:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        joined(listeners[:2], time.monotonic() + 20.0, stack)
    assert caplog.messages == [
        "rank 0 refused a connection from 127.0.0.1: it did not prove that it knows the token"
    ]


def test_more_strangers_than_there_is_room_for_keep_nobody_out(listeners, monkeypatch):
    """Also where a rank was taken for one of them: it comes again."""
    monkeypatch.setattr(listener, "STRANGERS", 2)
    endpoint = listeners[0].endpoint
    ended = threading.Event()

    def pester():
        with ExitStack() as stack, suppress(OSError):  # once nobody listens any more
            while not ended.is_set():
                at = endpoint.address, endpoint.port
                stack.enter_context(socket.create_connection(at))

    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        pool.submit(pester)
        stack.callback(ended.set)
        made = joined(listeners, time.monotonic() + 20.0, stack)
        for each in listeners:
            each.__exit__()
    assert [sorted(messages) for messages, _ in made] == [[1, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_no_file_is_left_no_other_rank_is_to_blame(listeners, no_file_left, rank):
    """Rank 0 accepts, and rank 1 connects."""
    peer = 1 - rank
    with (
        no_file_left(),
        pytest.raises(OSError, match=r"no file descriptor .* \(ulimit -n, or"),
    ):
        listeners[rank].connect(rank, {peer: listeners[peer].endpoint}, time.monotonic() + 20.0)


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
                listeners[rank].connect(rank, {peer: endpoint}, time.monotonic() + 300.0, check)


def test_who_reads_along_cannot_come_in_a_rank_s_place(listeners):
    """It hears all that two ranks say, and says it itself before it lets it pass."""
    first, other, _ = listeners
    at = first.endpoint.address, first.endpoint.port
    said, answers = [], []

    def between():
        with server:
            server.accept()[0].close()  # as with too many connections: the rank connects again
            for _ in LANES:
                near, _ = server.accept()
                far = socket.create_connection(at)
                own = socket.create_connection(at)
                with near, far, own:
                    near.sendall(nonce := far.recv(16))
                    hello = near.recv(56)
                    own.recv(16)
                    own.sendall(hello)
                    answers.append(own.recv(32))
                    far.sendall(hello)
                    near.sendall(proof := far.recv(32))
                    said.extend((hello, nonce, proof))

    with ExitStack() as stack:
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(10.0)
        thread = threading.Thread(target=between)
        thread.start()
        first.endpoint = replace(first.endpoint, port=server.getsockname()[1])
        made = joined([first, other], time.monotonic() + 10.0, stack)
        thread.join()
    assert [sorted(sockets) for sockets in made[1]] == [[0], [0]]
    assert answers == [b"", b""] and len(set(said)) == 6
    token = first.endpoint.token
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
            listeners[1].connect(1, {0: endpoint}, time.monotonic() + 10.0)
        thread.join()


def test_ranks_of_one_host_have_unix_sockets():
    with ExitStack() as stack:
        hosts = ["red", "blue", "blue"]
        listeners = [stack.enter_context(Listener("127.0.0.1", 8, host)) for host in hosts]
        made = joined(listeners, time.monotonic() + 10.0, stack)
        unix = {
            (rank, peer)
            for rank, lanes in enumerate(made)
            for sockets in lanes
            for peer, sock in sockets.items()
            if sock.family == socket.AF_UNIX
        }
    assert unix == {(1, 2), (2, 1)}


def test_who_does_not_come_is_named(listeners):
    listener, *others = listeners
    endpoints = {rank: each.endpoint for rank, each in enumerate(others, start=1)}
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="ranks 1 and 2 did not connect"):
        listener.connect(0, endpoints, time.monotonic() + 0.3)
    assert time.monotonic() - began < 5.0


def test_who_cannot_be_reached_is_named(listeners):
    _, other = listeners[:2]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = Endpoint("127.0.0.1", closed.getsockname()[1], "0" * 32)
    with pytest.raises(AbsentError, match=r"^rank 0 cannot be reached at 127.0.0.1 port .*refused"):
        other.connect(1, {0: endpoint}, time.monotonic() + 5.0)


def test_no_time_left_is_said(listeners):
    endpoints = {0: listeners[0].endpoint}
    with pytest.raises(TimeoutError, match="no time was left"):
        listeners[1].connect(1, endpoints, time.monotonic() - 1.0)


def test_an_endpoint_that_is_shut_leaves_nothing_open(listeners, nothing_left):
    with Listener("127.0.0.1", 1) as gone:
        shut = gone.endpoint
    endpoints = {0: listeners[0].endpoint, 1: replace(shut, token="0" * 32)}
    with nothing_left(), pytest.raises(AbsentError):
        listeners[2].connect(2, endpoints, time.monotonic() + 0.5)


def test_a_link_that_is_not_up_yet_is_waited_for(listeners, monkeypatch):
    failures = [errno.EHOSTUNREACH, errno.ENETUNREACH]
    connect = socket.socket.connect_ex

    def failing(*args):
        return failures.pop() if failures else connect(*args)

    monkeypatch.setattr(socket.socket, "connect_ex", failing)
    with ExitStack() as stack:
        made = joined(listeners[:2], time.monotonic() + 10.0, stack)
        assert not failures and [sorted(messages) for messages, _ in made] == [[1], [0]]


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
