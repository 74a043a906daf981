"""What tests of several lines share."""

from __future__ import annotations

import contextlib
import socket

import pytest


@contextlib.contextmanager
def _connection(line, buffer=None):
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(sock) for sock in socket.socketpair()]
        for sock in socks:
            sock.setblocking(False)
            if buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        yield [line(1 - rank, sock) for rank, sock in enumerate(socks)]


@pytest.fixture(scope="session")
def connection():
    """`with connection(line, buffer) as (left, right)`: both ends, of that class of lines.

    buffer: bytes that a socket takes before it has to be read, about.
    """
    return _connection
