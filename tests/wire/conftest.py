"""What tests of several lines share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket

import pytest

from weft.wire import pipe
from weft.wire.line import Order


@contextlib.contextmanager
def _connection(line, buffer=None, *, tcp=False):
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(sock) for sock in (_tcp() if tcp else socket.socketpair())]
        for sock in socks:
            sock.setblocking(False)
            if buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            if tcp:  # as weft's own; else parts of messages wait for what comes back
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if line is not pipe.PipeLine:
            yield [line(1 - rank, sock) for rank, sock in enumerate(socks)]
            return
        if not pipe.WORKS:
            pytest.skip("needs Linux on x86-64, where alone there are pipes")
        yield [
            line(1 - rank, sock, shared, first=rank == 0)
            for rank, (sock, shared) in enumerate(zip(socks, _shared(), strict=True))
        ]


def _tcp():
    """As between hosts: the kernel tells what it holds, which it does not of Unix sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def _shared():
    """Memory for pipes, as each of two ranks sees it."""
    fd = pipe.memory()
    try:
        return [pipe.mapped(fd) for _ in range(2)]
    finally:
        os.close(fd)


@pytest.fixture(scope="session")
def connection():
    """`with connection(line, buffer) as (left, right)`: both ends, of that class of lines.

    buffer: bytes that a socket takes before it has to be read, about.
    tcp: over TCP, not a Unix socket.
    """
    return _connection


def _sent(line, payload):
    order = Order(memoryview(payload))
    line.send(order)
    return order


def _awaited(line, size):
    order = Order(memoryview(bytearray(size)))
    line.asked.append(order)
    return order


@pytest.fixture(scope="session")
def sent():
    """`sent(line, payload)`: the order of a message that a line for small ones sends."""
    return _sent


@pytest.fixture(scope="session")
def awaited():
    """`awaited(line, size)`: the order of one that it is asked for, of so many bytes at most."""
    return _awaited


@pytest.fixture
def survivors(tmp_path):
    """`survivors(program, ranks, victim)`: what all others say if it is killed, and if it freezes.

    `program(path, rank, how, timeout)` is run in processes of their own that meet by a file there.
    """

    def said(program, ranks, victim):
        cases = {signal.SIGKILL: 20.0, signal.SIGSTOP: 2.0}  # at once: most of it is waiting
        pipes, children = {}, {}
        for how, timeout in cases.items():
            for rank in range(ranks):
                pipes[how, rank], end = os.pipe()
                child = children[how, rank] = os.fork()
                if child == 0:
                    try:
                        signal.alarm(60)
                        words = program(str(tmp_path / how.name), rank, how, timeout)
                        os.write(end, json.dumps(words).encode())
                    finally:
                        os._exit(0)
                os.close(end)
        try:
            heard = {}
            for (how, rank), pipe_ in pipes.items():
                with os.fdopen(pipe_) as file:
                    words = file.read() if rank != victim else ""
                if rank != victim:
                    heard[how.name, rank] = json.loads(words) if words else None
            return heard
        finally:
            for child in children.values():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    return said
