"""How a rank is joined to all others: it listens, tells where at a store, and connects.

A rank listens on a port that it opens for this, connects to the ranks below it and accepts those
above. Two ranks have two sockets: one for messages, one for the failure detector. Between ranks of
one host these are Unix sockets, if they can be: a rank listens on one, too, under a name made of
its token, which is no file; where nobody is found under that name, the connection is TCP. Over a
Unix socket ranks show each other their segments (`wire.shm`).

Both ends of a connection know a token of the listener's, made for this wire alone, and each proves
that to the other without sending it, in three messages:

* the listener sends a nonce: random bytes, new for each connection;
* who connects sends its rank, the lane, a nonce of its own, and the HMAC of all that and of the
  listener's nonce, whose key is the token;
* the listener sends another HMAC of the same.

So strangers are turned away, and so is who says again what it heard. Nothing that follows on the
connection is signed.

Source of the HMAC: RFC 2104, with SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import resource
import secrets
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from hmac import compare_digest, digest
from typing import Any

import psutil
import torch.distributed as dist

from ...errors import WeftError
from .. import shm
from ..hosts import digest_of, host_name
from ..interface import own_address
from ..store import AbsentError, told
from .engine import Engine

_LANES = 2  # for messages, and for the detector
_TOKEN = _NONCE = 16  # bytes
_PROOF = 32  # bytes of an HMAC
# a link that just came up is like the first two; the listener hangs up where there is a crowd
_PASSING = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET, errno.EPIPE}
_AGAIN = 0.1  # seconds after which to try again
_PATIENCE = 5.0  # seconds that others get to read at the store why no wire is made
_NAMES = sys.platform.startswith("linux")  # sockets may have names that are no files
_WHO = struct.Struct(f"!II{_NONCE}s")  # rank, lane, nonce of who connects
_CONNECTS, _LISTENS = b"weft connects", b"weft listens"  # which end proves that it knows the token
_BUFFER = 4 << 20  # bytes of a Unix socket's buffers, whose default is small: 4 times slower
_STRANGERS = 128  # connections, beside the ranks', that may be open and have not said who they are
_OWN = 16  # files that a wire opens besides its connections: listener, selectors, wake-up
_UNKNOWN = 32  # open ones, where nobody says
_SPARE = 128  # that the rest of the program may want, where the hard limit allows

_log = logging.getLogger("weft")


def connect(store: dist.Store, rank: int, size: int, timeout: float) -> Engine:
    """Connect to all; collective.

    Raises:
        WeftError: some rank may not open as many files, or cannot listen; the same on every rank.
        RuntimeError: from the store.
        OSError: from the sockets.
    """
    deadline = time.monotonic() + timeout
    trouble = make_room(size - 1)
    host, endpoint = digest_of(host_name()).hex(), Endpoint("", 0, "")
    with contextlib.ExitStack() as stack:
        try:
            listener = Listener(own_address(store), _LANES * size + _STRANGERS, host)
            endpoint = stack.enter_context(listener).endpoint
        except OSError as error:
            trouble = trouble or f"it cannot listen: {error}"
        said = [trouble, *astuple(endpoint)]
        where = "did not say where to connect"
        met = told(store, "endpoint", said, rank, size, deadline - time.monotonic(), where)
        _check(met, store, rank)
        peers = {peer: Endpoint(*said) for peer, (_, *said) in enumerate(met) if peer != rank}
        sockets, side = listener.connect(rank, peers, deadline)
    near = {peer: sock for peer, sock in sockets.items() if sock.family == socket.AF_UNIX}
    segment = shm.Segment.make() if near else None
    try:
        for sock in near.values():
            sock.settimeout(max(deadline - time.monotonic(), _AGAIN))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        seen = shm.exchange(segment, near)
    except BaseException:
        for sock in (*sockets.values(), *side.values()):
            sock.close()
        raise
    for sock in side.values():
        sock.setblocking(False)
    return Engine(sockets, side, segment, *seen)


def _check(met: Sequence[Sequence[Any]], store: dist.Store, rank: int) -> None:
    """Raise what is in the way of the first rank of which anything is, on every rank."""
    for one, (trouble, *_) in enumerate(met):
        if trouble:
            # the store may end with the program that is about to be told: not before all have read
            with contextlib.suppress(RuntimeError):
                told(store, "read", None, rank, len(met), _PATIENCE, "")
            raise WeftError(f"rank {one}: {trouble}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank listens: its numeric address, its port, its token, and its host's name."""

    address: str
    port: int
    token: str
    host: str = ""


class Listener:
    """Where the sockets of one rank are made; use it as a context manager.

    Attributes:
        endpoint: where the others connect, and what they must know.
    """

    def __init__(self, address: str, backlog: int, host: str = "") -> None:
        """Listen on a numeric address, on a port of one's own.

        Args:
            address: of this machine.
            backlog: connections that may wait to be accepted.
            host: the name of this host; ranks with equal names try Unix sockets.

        Raises:
            OSError: the address is not this machine's.
        """
        name: Any
        family, *_, name = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        self._scope = f"%{name[3]}" if name[3:] and name[3] else ""  # of IPv6: an interface here
        self._sock = socket.create_server(name, family=family, backlog=backlog)
        port = self._sock.getsockname()[1]
        self.endpoint = Endpoint(address.partition("%")[0], port, secrets.token_hex(_TOKEN), host)
        # where there is none, they come by TCP, as all others
        self._unix = _unix(self.endpoint.token, backlog=backlog) if host else None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        if self._unix is not None:
            self._unix.close()

    def connect(
        self, rank: int, peers: Mapping[int, Endpoint], deadline: float
    ) -> list[dict[int, socket.socket]]:
        """A socket to each peer on each lane: to lower ranks made here, from higher ones accepted.

        Args:
            rank: this rank.
            peers: where each other rank listens.
            deadline: as `time.monotonic` tells it.

        Returns:
            The sockets of each lane, by peer: for messages, and for the failure detector.

        Raises:
            AbsentError: somebody could not be reached, or did not come in time.
            OSError: the connection to somebody broke.
        """
        made: dict[tuple[int, int], socket.socket] = {}
        try:
            for peer, endpoint in peers.items():
                for lane in range(_LANES if peer < rank else 0):
                    who = _WHO.pack(rank, lane, secrets.token_bytes(_NONCE))
                    made[peer, lane] = self._connect(who, peer, endpoint, deadline)
            above = {(peer, lane) for peer in peers if peer > rank for lane in range(_LANES)}
            self._accept(rank, made, above, deadline)
        except BaseException:
            for sock in made.values():
                sock.close()
            raise
        for sock in made.values():
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return [{peer: made[peer, lane] for peer in peers} for lane in range(_LANES)]

    def _connect(self, who: bytes, peer: int, endpoint: Endpoint, deadline: float) -> socket.socket:
        """A connection to a peer that has let this rank in, and has proved that it is the peer."""
        where = endpoint.address + (self._scope if ":" in endpoint.address else "")
        while True:
            sock = None
            try:
                if endpoint.host == self.endpoint.host != "":
                    sock = _unix(endpoint.token, timeout=_remaining(deadline))
                sock = sock or socket.create_connection(
                    (where, endpoint.port), _remaining(deadline)
                )
                asked = _heard(sock, _NONCE, deadline) + who
                sock.sendall(who + _proof(endpoint.token, _CONNECTS, asked))
                proof = _heard(sock, _PROOF, deadline)
                if not compare_digest(proof, _proof(endpoint.token, _LISTENS, asked)):
                    raise OSError("who listens there does not know the token of that rank")
                return sock
            except OSError as error:
                if sock is not None:
                    sock.close()
                if error.errno not in _PASSING:
                    why = error.strerror or str(error)
                    what = f"cannot be reached at {endpoint.address} port {endpoint.port} ({why})"
                    raise AbsentError([peer], what) from error
                time.sleep(_AGAIN)

    def _accept(
        self,
        rank: int,
        made: dict[tuple[int, int], socket.socket],
        missing: set[tuple[int, int]],
        deadline: float,
    ) -> None:
        """Take in those that know the token; strangers are turned away and hold nobody up."""
        listening = [self._sock] if self._unix is None else [self._sock, self._unix]
        door = _Door(rank, listening, self.endpoint.token, len(missing) + _STRANGERS)
        with contextlib.closing(door):
            while missing:
                left = deadline - time.monotonic()
                for guest, who in door.introduced(max(0.0, left)):
                    if who in missing:
                        made[who] = guest.sock
                        missing.discard(who)
                        with contextlib.suppress(OSError):  # the other end is gone
                            guest.sock.send(_proof(self.endpoint.token, _LISTENS, guest.asked))
                    else:
                        door.refuse(guest, f"it knows the token, but rank {who[0]} is not awaited")
                if missing and left <= 0:  # also where strangers never stop coming
                    raise AbsentError(sorted({peer for peer, _ in missing}), "did not connect")


@dataclass(slots=True, eq=False)
class _Guest:
    """Who has connected: from where, the nonce that it was sent, and what it has said so far."""

    sock: socket.socket
    origin: str
    nonce: bytes
    said: bytes = b""

    @property
    def asked(self) -> bytes:
        """What is to be proved: the nonce, and who it says that it is."""
        return self.nonce + self.said[: _WHO.size]


class _Door:
    """Those who have connected and not yet said who they are.

    A rank says so as soon as it has its nonce. So where there are too many, or no file is left for
    the next, who came first is a stranger; if it was a rank after all, that comes again.
    """

    def __init__(
        self, rank: int, listening: Sequence[socket.socket], token: str, room: int
    ) -> None:
        self._rank, self._token, self._room = rank, token, room
        self._guests: list[_Guest] = []  # in the order in which they came
        self._refused: Counter[tuple[str, str]] = Counter()  # by where from, and why
        self._selector = selectors.DefaultSelector()
        for sock in listening:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)

    def close(self) -> None:
        """Turn away who is left, and log who was refused."""
        while self._guests:
            self._dismiss()
        self._selector.close()
        for (origin, why), times in self._refused.items():
            what = "a connection" if times == 1 else f"{times} connections"
            _log.warning("rank %d refused %s from %s: %s", self._rank, what, origin, why)

    def introduced(self, seconds: float) -> Iterator[tuple[_Guest, tuple[int, int]]]:
        """Those that know the token, with rank and lane, after so many seconds at most."""
        for key, _ in self._selector.select(seconds):
            sock, guest = key.fileobj, key.data
            assert isinstance(sock, socket.socket)
            if guest is None:
                self._let_in(sock)
            elif guest in self._guests:  # else it was sent away a moment ago
                more = b""
                with contextlib.suppress(OSError):  # the other end is gone
                    more = sock.recv(_WHO.size + _PROOF - len(guest.said))
                guest.said += more
                if more and len(guest.said) < _WHO.size + _PROOF:
                    continue
                right = _proof(self._token, _CONNECTS, guest.asked)
                if compare_digest(guest.said[_WHO.size :], right):
                    self._forget(guest)
                    yield guest, _WHO.unpack_from(guest.said)[:2]
                else:
                    self._dismiss(guest)

    def refuse(self, guest: _Guest, why: str = "it did not prove that it knows the token") -> None:
        """Turn away who is a guest no more."""
        self._refused[guest.origin, why] += 1
        guest.sock.close()

    def _let_in(self, listening: socket.socket) -> None:
        if len(self._guests) >= self._room:
            self._dismiss()
        try:
            sock, name = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # who came is gone again
            return
        except OSError:  # no file is left
            if not self._guests:
                raise
            self._dismiss()
            return
        sock.setblocking(False)
        origin = "this host" if sock.family == socket.AF_UNIX else name[0]
        guest = _Guest(sock, origin, secrets.token_bytes(_NONCE))
        with contextlib.suppress(OSError):  # the other end is gone, which is read soon
            sock.send(guest.nonce)
        self._guests.append(guest)
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _dismiss(self, guest: _Guest | None = None) -> None:
        """Turn away one, or the one who came first."""
        guest = guest or self._guests[0]
        self._forget(guest)
        self.refuse(guest)

    def _forget(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.sock)


def _proof(token: str, side: bytes, asked: bytes) -> bytes:
    """That one end of a connection knows the token."""
    return digest(token.encode(), side + asked, "sha256")


def _heard(sock: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes that the other end says.

    Raises:
        OSError: it hung up, or did not say them in time.
    """
    said = b""
    while len(said) < count:
        sock.settimeout(_remaining(deadline))
        more = sock.recv(count - len(said))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        said += more
    return said


def _unix(token: str, *, backlog: int = 0, timeout: float | None = None) -> socket.socket | None:
    """A Unix socket that listens for those that know a token or, without a backlog, has found who
    does; None if there is none. Everybody may see its name."""
    if not _NAMES:
        return None
    name = f"\0weft-{hashlib.blake2b(token.encode(), digest_size=16).hexdigest()}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if backlog:
            sock.bind(name)
            sock.listen(backlog)
        else:
            sock.settimeout(timeout)
            sock.connect(name)
    except OSError:
        sock.close()
        return None
    return sock


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("no time was left to connect")
    return remaining


def make_room(peers: int) -> str | None:
    """See that so many may be connected to; what is in the way, or None.

    A process may have only so many files open: 1,024 on most machines, which is about 330 peers,
    each with two sockets and, on this host, a segment.
    That is the soft limit, which a process may raise by itself up to its hard limit. It is raised
    for the whole process and stays so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = psutil.Process().num_fds()
    except psutil.Error:  # /proc is hidden from this process
        opened = _UNKNOWN
    needed = opened + (_LANES + 1) * peers + _OWN
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    wanted, most = needed + _SPARE, math.inf if hard == resource.RLIM_INFINITY else hard
    try:
        if needed > most:
            raise ValueError(f"the hard limit is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(wanted, most)), hard))
    except (OSError, ValueError) as error:  # macOS has a limit above the hard one's infinity
        return (
            f"{_LANES * peers} connections need {needed} open files with the {opened} that "
            f"are open, and {error}: raise it (ulimit -Hn {wanted}, or LimitNOFILE of the service "
            "that starts the ranks)"
        )
    _log.info("the limit of open files is %d now, it was %d", min(wanted, most), soft)
    return None
