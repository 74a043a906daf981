"""`weft.wire.side`: finding a transport's connections, cutting them, and the mesh."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import ExitStack, closing

import pytest

from weft.wire import side
from weft.wire.side import Address, Listener, cut, with_listener


def listening(host="127.0.0.1", family=socket.AF_INET):
    sock = socket.socket(family)
    sock.bind((host, 0))
    sock.listen()
    return sock


def test_a_listener_is_found_by_its_address():
    with listening():  # one that was there before
        made, name, family = with_listener(listening)
        with made:
            assert name == made.getsockname() and family == socket.AF_INET


def test_what_listens_nowhere_is_not_found():
    with pytest.raises(OSError, match="was not found"):
        with_listener(lambda: None)


def connected(listener):
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    return near, far


def closed(sock):
    """Whether the other end, or this one, was shut down."""
    sock.settimeout(0.2)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False


def test_only_the_connections_of_the_transport_are_cut():
    with ExitStack() as stack:
        keep = stack.enter_context
        ours, theirs, other = (keep(listening()) for _ in range(3))
        accepted = [keep(sock) for sock in connected(ours)]
        led_there = [keep(sock) for sock in connected(theirs)]
        strangers = [keep(sock) for sock in connected(other)]
        cut(Address.of(ours.getsockname()), frozenset({Address.of(theirs.getsockname())}))
        assert all(map(closed, accepted)) and all(map(closed, led_there))
        assert not any(map(closed, strangers))
        for listener in (ours, theirs):  # they live on: gloo aborts the process without
            near, far = connected(listener)
            near.close()
            far.close()


def meshes(listeners, deadline):
    """The mesh of each rank, made at the same time."""
    doors = [(Address("127.0.0.1", each.port), each.token) for each in listeners]
    made = [None] * len(listeners)

    def make(rank):
        peers = {peer: door for peer, door in enumerate(doors) if peer != rank}
        try:
            made[rank] = listeners[rank].mesh(rank, peers, deadline)
        except OSError as error:
            made[rank] = error

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(len(listeners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.fixture
def listeners():
    with ExitStack() as stack:
        yield [stack.enter_context(Listener(("127.0.0.1", 0), socket.AF_INET, 4)) for _ in range(3)]


def test_every_two_ranks_are_joined_whoever_else_knocks(listeners):
    with ExitStack() as stack:
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(20), bytes(16) + struct.pack("!I", 1)):
            stranger = socket.create_connection(("127.0.0.1", listeners[0].port))
            stack.callback(stranger.close)
            stranger.sendall(words)  # nothing, something else, a rank without the token
        made = meshes(listeners, time.monotonic() + 10.0)
        for mesh in made:
            for sock in mesh.values():
                stack.callback(sock.close)
        assert [sorted(mesh) for mesh in made] == [[1, 2], [0, 2], [0, 1]]
        for rank, mesh in enumerate(made):
            for peer, sock in mesh.items():
                sock.setblocking(True)
                sock.sendall(bytes([rank, peer]))
        for rank, mesh in enumerate(made):
            for peer, sock in mesh.items():
                assert sock.recv(2) == bytes([peer, rank])


def test_who_does_not_come_is_named(listeners):
    listener, *others = listeners
    doors = {
        rank: (Address("127.0.0.1", each.port), each.token)
        for rank, each in enumerate(others, start=1)
    }
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="ranks 1 and 2 did not connect"):
        listener.mesh(0, doors, time.monotonic() + 0.3)
    assert time.monotonic() - began < 5.0


def test_no_time_left_is_said(listeners):
    doors = {0: (Address("127.0.0.1", listeners[0].port), listeners[0].token)}
    with pytest.raises(TimeoutError, match="no time was left"):
        listeners[1].mesh(1, doors, time.monotonic() - 1.0)


def test_an_address_has_no_scope():
    assert Address.of(("fe80::1%eth0", 5, 0, 2)) == Address("fe80::1", 5)


def test_what_is_no_tcp_socket_is_passed_over():
    left, right = socket.socketpair()
    with (
        closing(left),
        closing(right),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram,
    ):
        inodes = {side.os.fstat(sock.fileno()).st_ino for sock in side._sockets()}
        for sock in (left, right, datagram):
            assert side.os.fstat(sock.fileno()).st_ino not in inodes
