"""`weft.wire.mesh`: every two ranks are joined, and nobody else."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from weft.wire import pipe
from weft.wire.mesh import AbsentError, Door, Listener

LANES = ("data", "small", "side")


def meshes(listeners, deadline):
    """The mesh of each rank, made at the same time."""
    doors = [each.door for each in listeners]
    made = [None] * len(listeners)

    def make(rank):
        peers = {peer: door for peer, door in enumerate(doors) if peer != rank}
        try:
            made[rank] = listeners[rank].mesh(rank, peers, LANES, deadline, small="small")
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
        yield [stack.enter_context(Listener("127.0.0.1", 8)) for _ in range(3)]


def test_every_two_ranks_are_joined_whoever_else_knocks(listeners):
    door = listeners[0].door
    with ExitStack() as stack:
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(20), bytes(16) + bytes(7) + b"\1"):
            stranger = socket.create_connection((door.host, door.port))
            stack.callback(stranger.close)
            stranger.sendall(words)  # nothing, something else, a rank without the token
        for rank, lane in ((1, 3), (0, 0)):  # it knows the token, but is nobody awaited
            stranger = socket.create_connection((door.host, door.port))
            stack.callback(stranger.close)
            stranger.sendall(door.token + struct.pack("!II", rank, lane))
        made = meshes(listeners, time.monotonic() + 10.0)
        for mesh in made:
            for lane in mesh.lanes.values():
                for sock in lane.values():
                    stack.callback(sock.close)
        for number, lane in enumerate(LANES):
            assert [sorted(mesh.lanes[lane]) for mesh in made] == [[1, 2], [0, 2], [0, 1]]
            for rank, mesh in enumerate(made):
                for peer, sock in mesh.lanes[lane].items():
                    sock.setblocking(True)
                    sock.sendall(bytes([rank, peer, number]))
        for number, lane in enumerate(LANES):
            for rank, mesh in enumerate(made):
                for peer, sock in mesh.lanes[lane].items():
                    assert sock.recv(3) == bytes([peer, rank, number])


def test_small_messages_take_unix_sockets_to_those_who_are_found_here(listeners):
    far = listeners[0]
    far._near.close()
    far._near = None  # as if it were on another host, or might not listen so
    with ExitStack() as stack:
        made = meshes(listeners, time.monotonic() + 10.0)
        for mesh in made:
            for lane in mesh.lanes.values():
                for sock in lane.values():
                    stack.callback(sock.close)
        near = {
            (rank, peer, name)
            for rank, mesh in enumerate(made)
            for name, lane in mesh.lanes.items()
            for peer, sock in lane.items()
            if sock.family == socket.AF_UNIX
        }
    assert near == {(1, 2, "small"), (2, 1, "small")}


def shared_by(made):
    """The pairs of ranks that share memory, each as (rank, peer); closes all sockets."""
    for mesh in made:
        for lane in mesh.lanes.values():
            for sock in lane.values():
                sock.close()
    return {(rank, peer) for rank, mesh in enumerate(made) for peer in mesh.shared}


needs_pipes = pytest.mark.skipif(not pipe.WORKS, reason="needs Linux on x86-64 for pipes")
ALL = {(rank, peer) for rank in range(3) for peer in range(3) if rank != peer}


@needs_pipes
def test_who_is_found_here_shares_memory(listeners, nothing_left):
    with nothing_left():
        made = meshes(listeners, time.monotonic() + 10.0)
        for rank, peer in ALL:
            made[rank].shared[peer][16 * rank + peer] = 1
        for rank, peer in ALL:
            both = {16 * rank + peer, 16 * peer + rank}
            assert set(made[rank].shared[peer].nonzero().flatten().tolist()) == both
        assert shared_by(made) == ALL


@needs_pipes
def test_memory_that_a_peer_cannot_map_is_used_by_neither(listeners, monkeypatch):
    real, turn = pipe.mapped, threading.local()

    def mapped(fd):
        turn.count = getattr(turn, "count", 0) + 1
        return None if turn.count == 2 else real(fd)  # of what it offers, or is offered

    monkeypatch.setattr(pipe, "mapped", mapped)
    made = meshes(listeners, time.monotonic() + 10.0)
    # 0 is offered two, of which it has no second; 1 offers one, 2 offers two
    assert shared_by(made) in ({(0, 2), (2, 0)}, {(0, 1), (1, 0)})


def test_without_memory_there_are_sockets(listeners, monkeypatch):
    monkeypatch.setattr(pipe, "memory", lambda: None)
    assert shared_by(meshes(listeners, time.monotonic() + 10.0)) == set()


@needs_pipes
def test_of_many_ranks_of_a_host_the_lowest_share_memory(listeners, monkeypatch):
    monkeypatch.setattr(pipe, "MOST", 2)
    assert shared_by(meshes(listeners, time.monotonic() + 10.0)) == {(0, 1), (1, 0)}


@needs_pipes
def test_what_strangers_send_along_is_closed(listeners, nothing_left):
    with nothing_left():
        strangers = []
        for words in (b"?", b"?" * 24):
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].connect(listeners[0]._near.getsockname())
            fd = pipe.memory()
            socket.send_fds(strangers[-1], [words], [fd])
            os.close(fd)
        assert shared_by(meshes(listeners, time.monotonic() + 10.0)) == ALL
        for stranger in strangers:
            stranger.close()


def test_who_does_not_come_is_named(listeners):
    listener, *others = listeners
    doors = {rank: each.door for rank, each in enumerate(others, start=1)}
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="ranks 1 and 2 did not connect"):
        listener.mesh(0, doors, LANES, time.monotonic() + 0.3)
    assert time.monotonic() - began < 5.0


def test_who_cannot_be_reached_is_named(listeners):
    _, other = listeners[:2]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        door = Door("127.0.0.1", closed.getsockname()[1], bytes(16))
    with pytest.raises(AbsentError, match=r"^rank 0 cannot be reached at 127.0.0.1 port .*refused"):
        other.mesh(1, {0: door}, LANES, time.monotonic() + 5.0)


def test_no_time_left_is_said(listeners):
    doors = {0: listeners[0].door}
    with pytest.raises(TimeoutError, match="no time was left"):
        listeners[1].mesh(1, doors, LANES, time.monotonic() - 1.0)


def test_a_door_that_is_shut_leaves_nothing_open(listeners, nothing_left):
    with Listener("127.0.0.1", 1) as gone:
        shut = gone.door
    doors = {0: listeners[0].door, 1: replace(shut, token=bytes(16))}
    with nothing_left(), pytest.raises(AbsentError):
        listeners[2].mesh(2, doors, LANES, time.monotonic() + 5.0)


def test_a_link_that_is_not_up_yet_is_waited_for(listeners, monkeypatch):
    failures = [errno.EHOSTUNREACH, errno.ENETUNREACH]
    once = Listener._connect_once

    def connect(self, door, timeout):
        if failures:
            raise OSError(failures.pop(), "no route")
        return once(self, door, timeout)

    monkeypatch.setattr(Listener, "_connect_once", connect)
    made = meshes(listeners[:2], time.monotonic() + 10.0)
    assert not failures and [sorted(mesh.lanes["data"]) for mesh in made] == [[1], [0]]
    for mesh in made:
        for lane in mesh.lanes.values():
            for sock in lane.values():
                sock.close()


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="Cannot assign"):
        Listener("192.0.2.1", 1)
