"""TCP connections between every two ranks, on several lanes.

A rank listens on a port that it opens for this, connects to the ranks below it and accepts those
above; both ends know a token of the listener's, so strangers are turned away.

Lanes for small messages are Unix sockets between ranks that share a machine and its network: they
cost a third of the time. A rank listens on one, too, under a name made of its token; where nobody
is found under that name, the connection is TCP. Who connects sends memory for pipes along, and is
told whether the other could map it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

from torch import Tensor

from . import pipe
from .verdict import names

__all__ = ["AbsentError", "Door", "Listener", "Mesh"]

_TOKEN = 16  # bytes
_PASSING = {errno.EHOSTUNREACH, errno.ENETUNREACH}  # a link that just came up is like that
_AGAIN = 0.1  # seconds after which to try again
_NAMES = sys.platform.startswith("linux")  # sockets may have names that are no files
_WHO = struct.Struct("!II")  # rank, lane


class AbsentError(TimeoutError):
    """Some ranks were not there when others connected.

    Attributes:
        ranks: those, in order.
    """

    def __init__(self, ranks: Sequence[int], what: str) -> None:
        super().__init__(f"{names(ranks)} {what}")
        self.ranks = list(ranks)


@dataclass(frozen=True, slots=True)
class Door:
    """Where a rank listens: its numeric host, its port and its token."""

    host: str
    port: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Mesh:
    """What joins a rank to the others: sockets by lane and peer, and memory for pipes to some."""

    lanes: dict[str, dict[int, socket.socket]]
    shared: dict[int, Tensor]


class Listener:
    """Where the sockets of one rank are made; use it as a context manager.

    Attributes:
        door: where the others connect, and what they must know.
    """

    def __init__(self, host: str, backlog: int) -> None:
        """Listen on a numeric host, on a port of one's own.

        Raises:
            OSError: the host is not this machine's.
        """
        family, *_, name = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        self._scope: tuple[Any, ...] = name[2:]  # of IPv6: an interface of this machine
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._sock.bind(name)
            self._sock.listen(backlog)
        except BaseException:
            self._sock.close()
            raise
        port = self._sock.getsockname()[1]
        self.door = Door(host.partition("%")[0], port, os.urandom(_TOKEN))
        self._near = _listening_near(self.door.token, backlog)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        if self._near is not None:
            self._near.close()

    def mesh(
        self,
        rank: int,
        doors: Mapping[int, Door],
        lanes: Sequence[str],
        deadline: float,
        small: str = "",
    ) -> Mesh:
        """A socket to each peer on each lane: to lower ranks made here, from higher ones accepted.

        Args:
            rank: this rank.
            doors: of each other rank.
            lanes: their names, the same on every rank.
            deadline: as `time.monotonic` tells it.
            small: the lane that may be Unix sockets, with pipes beside them.

        Raises:
            AbsentError: somebody could not be reached, or did not come in time.
            OSError: the connection to somebody broke.
        """
        made: dict[tuple[int, int], socket.socket] = {}
        shared: dict[int, Tensor] = {}
        try:
            for peer, door in doors.items():
                for lane in range(len(lanes) if peer < rank else 0):
                    near = _connected_near(door, deadline) if lanes[lane] == small else None
                    made[peer, lane] = near or self._connect(peer, door, deadline)
            piped = sum(map(_is_near, made.values())) < pipe.MOST
            for (peer, lane), sock in made.items():
                words = doors[peer].token + _WHO.pack(rank, lane)
                memory = _offered(sock, words) if piped and _is_near(sock) else None
                if memory is None:
                    sock.sendall(words)
                else:
                    shared[peer] = memory
            above = {(peer, lane) for peer in doors if peer > rank for lane in range(len(lanes))}
            self._accept(made, shared, above, deadline)
            for peer in [peer for peer in shared if peer < rank]:
                if not _taken(made[peer, lanes.index(small)], deadline):
                    del shared[peer]
        except BaseException:
            for sock in made.values():
                sock.close()
            raise
        for sock in made.values():
            sock.setblocking(False)
            if not _is_near(sock):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        by_lane = enumerate(lanes)
        sockets = {name: {peer: made[peer, lane] for peer in doors} for lane, name in by_lane}
        return Mesh(sockets, shared)

    def _connect(self, peer: int, door: Door, deadline: float) -> socket.socket:
        while True:
            try:
                return self._connect_once(door, _remaining(deadline))
            except OSError as error:
                if error.errno not in _PASSING:
                    why = error.strerror or str(error)
                    raise AbsentError(
                        [peer], f"cannot be reached at {door.host} port {door.port} ({why})"
                    ) from error
                time.sleep(_AGAIN)

    def _connect_once(self, door: Door, timeout: float) -> socket.socket:
        family, *_, name = socket.getaddrinfo(
            door.host, door.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        if family == socket.AF_INET6 and self._scope:
            name = (*name[:2], *self._scope)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(name)
        except BaseException:
            sock.close()
            raise
        return sock

    def _accept(
        self,
        made: dict[tuple[int, int], socket.socket],
        shared: dict[int, Tensor],
        missing: set[tuple[int, int]],
        deadline: float,
    ) -> None:
        """Take in those that know the token; strangers are turned away and hold nobody up."""
        guests: dict[socket.socket, _Guest] = {}
        listening = [self._sock] if self._near is None else [self._sock, self._near]
        with selectors.DefaultSelector() as selector:
            for each in listening:
                each.setblocking(False)
                selector.register(each, selectors.EVENT_READ)
            try:
                while missing:
                    ready = selector.select(max(0.0, deadline - time.monotonic()))
                    if not ready:
                        late = sorted({peer for peer, _ in missing})
                        raise AbsentError(late, "did not connect")
                    for sock in [key.fileobj for key, _ in ready]:
                        assert isinstance(sock, socket.socket)
                        if sock in listening:
                            new, _ = sock.accept()
                            new.setblocking(False)
                            guests[new] = _Guest(new)
                            selector.register(new, selectors.EVENT_READ)
                            continue
                        if not guests[sock].heard():
                            continue
                        selector.unregister(sock)
                        guest = guests.pop(sock)
                        who = guest.who(self.door.token)
                        if who not in missing:
                            guest.turn_away()
                            continue
                        made[who] = sock
                        missing.discard(who)
                        memory = guest.memory()
                        if memory is not None:
                            shared[who[0]] = memory
            finally:
                for guest in guests.values():
                    guest.turn_away()


class _Guest:
    """Who was let in, as long as it is not known who it is."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._said = sock, b""
        self._fds: list[int] = []

    def heard(self) -> bool:
        """Listen; whether there is no more to be heard."""
        missing = _TOKEN + _WHO.size - len(self._said)
        try:
            if _is_near(self._sock):
                said, fds, _, _ = socket.recv_fds(self._sock, missing, 1, socket.MSG_CMSG_CLOEXEC)
                self._fds += fds
            else:
                said = self._sock.recv(missing)
        except OSError:  # the other end is gone
            return True
        self._said += said
        return not said or len(said) == missing

    def who(self, token: bytes) -> tuple[int, int]:
        """The rank that introduced itself and its lane, or what is nobody."""
        said = self._said
        if len(said) < _TOKEN + _WHO.size or not compare_digest(said[:_TOKEN], token):
            return -1, -1
        rank, lane = _WHO.unpack(said[_TOKEN:])
        return rank, lane

    def memory(self) -> Tensor | None:
        """What it sent for pipes, if it did, and it could be mapped here; it is told so."""
        if not self._fds:
            return None
        memory = pipe.mapped(self._fds[0])
        self._forget()
        self._sock.send(b"\0" if memory is None else b"\1")
        return memory

    def turn_away(self) -> None:
        """Nobody is awaited who is like that."""
        self._forget()
        self._sock.close()

    def _forget(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _offered(sock: socket.socket, words: bytes) -> Tensor | None:
    """Memory for pipes, sent along with these words; None: nothing was sent."""
    fd = pipe.memory()
    if fd is None:
        return None
    try:
        memory = pipe.mapped(fd)
        if memory is not None:
            socket.send_fds(sock, [words], [fd])
        return memory
    finally:
        os.close(fd)


def _taken(sock: socket.socket, deadline: float) -> bool:
    """Whether a peer has mapped the memory that it was sent."""
    sock.settimeout(_remaining(deadline))
    answer = sock.recv(1)
    if not answer:
        raise ConnectionError("a peer went away while it was connected to")
    return answer == b"\1"


def _listening_near(token: bytes, backlog: int) -> socket.socket | None:
    """A Unix socket for those beside this rank, which must know the token; None: there is none."""

    def listen(sock: socket.socket) -> None:
        sock.bind(_name_of(token))
        sock.listen(backlog)

    return _near(listen)  # where it is not allowed they come by TCP, as all others


def _connected_near(door: Door, deadline: float) -> socket.socket | None:
    """A Unix socket to a rank that is found here; None if it is not."""

    def connect(sock: socket.socket) -> None:
        sock.settimeout(_remaining(deadline))
        sock.connect(_name_of(door.token))

    return _near(connect)


def _near(begin: Callable[[socket.socket], None]) -> socket.socket | None:
    """A Unix socket that could begin so; None if it could not, or there are none with names."""
    if not _NAMES:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        begin(sock)
    except OSError:
        sock.close()
        return None
    return sock


def _is_near(sock: socket.socket) -> bool:
    return sock.family == socket.AF_UNIX


def _name_of(token: bytes) -> str:
    """Where the rank with that token listens for those beside it; everybody may see the name."""
    return f"\0weft-{hashlib.blake2b(token, digest_size=16).hexdigest()}"


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("no time was left to connect")
    return remaining
