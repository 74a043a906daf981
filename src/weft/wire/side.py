"""Side sockets: one idle TCP connection between every two ranks, beside those that carry data.

They tell what the data connections cannot: whose end closed, and that at once, even when a forked
child keeps the data connections open. Here are the sockets alone; `watch` listens to them.

Also here: finding the sockets of a transport that does not hand them out, by the address of its
listener. A connection is the transport's if it was accepted there, or leads to a peer's listener;
unlike the number of a file descriptor, that cannot come to mean another connection.
"""

from __future__ import annotations

import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, TypeVar

from .verdict import names

__all__ = ["Address", "Listener", "cut", "with_listener"]

T = TypeVar("T")

_FDS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_TOKEN = 16  # bytes
_lock = threading.Lock()  # one at a time makes a transport and looks for its listener


@dataclass(frozen=True, slots=True)
class Address:
    """One end of a TCP connection; the host is numeric, without an IPv6 scope."""

    host: str
    port: int

    @classmethod
    def of(cls, name: Sequence[Any]) -> Address:
        """What `getsockname` or `getpeername` returned."""
        return cls(name[0].partition("%")[0], name[1])


def with_listener(make: Callable[[], T]) -> tuple[T, tuple[Any, ...], socket.AddressFamily]:
    """Make something that listens on a TCP port; it, the listener's `getsockname()`, its family.

    Raises:
        OSError: it listens nowhere, or the process opens ports so fast that none stands out.
    """
    with _lock:
        for _ in range(20):
            before = {inode for inode, *_ in _listeners()}
            made = make()
            new = [(at, family) for inode, at, family in _listeners() if inode not in before]
            if len(new) == 1:
                return made, *new[0]
    raise OSError("the port on which gloo listens was not found")


def cut(ours: Address, theirs: Set[Address]) -> None:
    """Shut down, for both sides, the connections accepted at `ours` or leading to `theirs`.

    Whoever waits for them, here or there, gets an error at once. Listeners stay.
    """
    for sock in _sockets():
        try:
            there = Address.of(sock.getpeername())  # a listener has no peer; gloo aborts without it
            if there in theirs or Address.of(sock.getsockname()) == ours:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # a listener, or closed by now


def _sockets() -> Iterator[socket.socket]:
    """The process's TCP sockets, each open as a duplicate while it is looked at."""
    for name in os.listdir(_FDS):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue  # closed since it was listed
        try:
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
            sock = socket.socket(fileno=fd) if is_socket else None
        except OSError:
            sock = None
        if sock is None:
            os.close(fd)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _listeners() -> Iterator[tuple[int, tuple[Any, ...], socket.AddressFamily]]:
    for sock in _sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            inode = os.fstat(sock.fileno()).st_ino
            yield inode, sock.getsockname(), socket.AddressFamily(sock.family)


class Listener:
    """Where the side sockets of one rank are made; use it as a context manager.

    Attributes:
        port: the others connect there.
        token: whoever connects must know it.
    """

    def __init__(self, name: tuple[Any, ...], family: socket.AddressFamily, backlog: int) -> None:
        """Listen beside the socket of that name, on a port of its own."""
        self._family = family
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.bind((name[0], 0, *name[2:]))
        self._sock.listen(backlog)
        self.port: int = self._sock.getsockname()[1]
        self.token = os.urandom(_TOKEN)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def mesh(
        self, rank: int, peers: dict[int, tuple[Address, bytes]], deadline: float
    ) -> dict[int, socket.socket]:
        """A socket to each peer: to lower ranks they are made here, from higher ones accepted.

        Args:
            rank: this rank.
            peers: for each other rank, where its listener is and its token.
            deadline: as `time.monotonic` tells it.

        Raises:
            OSError: somebody could not be reached, or did not come in time.
        """
        mesh: dict[int, socket.socket] = {}
        try:
            for peer, (address, token) in peers.items():
                if peer < rank:
                    mesh[peer] = self._connect(address, _remaining(deadline))
                    mesh[peer].sendall(token + struct.pack("!I", rank))
            self._accept(mesh, {peer for peer in peers if peer > rank}, deadline)
        except BaseException:
            for sock in mesh.values():
                sock.close()
            raise
        for sock in mesh.values():
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return mesh

    def _connect(self, address: Address, timeout: float) -> socket.socket:
        own = self._sock.getsockname()
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            # an IPv6 scope is the number of an interface on this machine
            sock.connect((address.host, address.port, *own[2:]))
        except BaseException:
            sock.close()
            raise
        return sock

    def _accept(self, mesh: dict[int, socket.socket], missing: set[int], deadline: float) -> None:
        """Take in those that know the token; strangers are turned away and hold nobody up."""
        said: dict[socket.socket, bytes] = {}
        self._sock.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            try:
                while missing:
                    ready = selector.select(max(0.0, deadline - time.monotonic()))
                    if not ready:
                        raise TimeoutError(f"{names(sorted(missing))} did not connect")
                    for sock in [key.fileobj for key, _ in ready]:
                        assert isinstance(sock, socket.socket)
                        if sock is self._sock:
                            new, _ = sock.accept()
                            new.setblocking(False)
                            said[new] = b""
                            selector.register(new, selectors.EVENT_READ)
                            continue
                        chunk = _heard(sock, _TOKEN + 4 - len(said[sock]))
                        said[sock] += chunk
                        if chunk and len(said[sock]) < _TOKEN + 4:
                            continue
                        selector.unregister(sock)
                        peer = self._who(said.pop(sock))
                        if peer in missing:
                            mesh[peer] = sock
                            missing.discard(peer)
                        else:
                            sock.close()
            finally:
                for sock in said:
                    sock.close()

    def _who(self, said: bytes) -> int:
        """The rank that introduced itself, or -1."""
        if len(said) < _TOKEN + 4 or not compare_digest(said[:_TOKEN], self.token):
            return -1
        return int(struct.unpack("!I", said[_TOKEN:])[0])


def _heard(sock: socket.socket, most: int) -> bytes:
    """What came in, nothing if the other end is gone."""
    try:
        return sock.recv(most)
    except OSError:
        return b""


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("no time was left to connect")
    return remaining
