"""Sockets between ranks, each of which has proved who it is.

Each rank listens on a port of its own and tells the others its address. It connects to the ranks
below it, and accepts those above. There is a socket for each lane: one for messages, one for the
control link. Between ranks of one host these are Unix sockets if possible: a rank also listens
under an abstract name (no file) that is made of its token; if a peer finds nobody under that name,
it connects by TCP.

Each listener has a random token, known to its ranks from the store or from the control links. Both
ends of a connection prove that they know it, without sending it, in three messages:

* the listener sends a nonce: random bytes, new for each connection;
* the other end sends its rank, the lane, a nonce of its own, and an HMAC, with the token as key, of
  all that and of the listener's nonce;
* the listener sends another HMAC of the same.

So strangers are refused, and a recorded handshake cannot be replayed. What follows on the
connection is not signed.

Source of the HMAC: RFC 2104, with SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
import resource
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest, digest
from typing import Any

import psutil

from ..store import AbsentError

MESSAGES, CONTROL = LANES = range(2)
"""What a socket is for."""

AGAIN = 0.1
"""Seconds after which to try again where what failed may pass."""

STRANGERS = 128
"""Open connections, beyond the ranks', that have not proved who they are."""

_TOKEN = _NONCE = 16  # bytes
_PROOF = 32  # bytes of an HMAC
# the first two pass when a link has just come up; the others, if the listener had too many guests
_PASSING = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET, errno.EPIPE}
_UNIX = 1.0  # seconds that a listener on this host has to accept
_NAMES = sys.platform.startswith("linux")  # abstract names of Unix sockets exist
_WHO = struct.Struct(f"!II{_NONCE}s")  # rank, lane, and nonce of the end that connects
_CONNECTS, _LISTENS = b"weft connects", b"weft listens"  # prefixes: which end sends the HMAC
_OWN = 16  # files that a group opens besides its connections: listener, selectors, wake-up
_UNKNOWN = 32  # assumed number of open files, if it cannot be found
_SPARE = 128  # files for the rest of the program, if the hard limit allows

_log = logging.getLogger("weft")


def _all_is_well() -> None:
    """What is checked while sockets are made where nobody watches the ranks."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank listens: its numeric address, its port, its token, and its host's name."""

    address: str
    port: int
    token: str
    host: str = ""


class Listener:
    """Makes the sockets of one rank for one lane; use it as a context manager.

    Attributes:
        endpoint: what the other ranks must know to connect.
    """

    def __init__(self, address: str, backlog: int, host: str = "") -> None:
        """Listen on a numeric address, on a port that the system chooses.

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
        self.close()

    def connect(
        self,
        rank: int,
        peers: Mapping[int, Endpoint],
        lane: int,
        deadline: float,
        check: Callable[[], None] = _all_is_well,
    ) -> dict[int, socket.socket]:
        """Connect to lower ranks, and accept higher ones.

        Args:
            rank: this rank.
            peers: where each other rank listens.
            lane: what the sockets are for.
            deadline: as `time.monotonic` tells it.
            check: called again and again; raises what is no OSError if somebody will not come.

        Returns:
            The sockets, by peer.

        Raises:
            AbsentError: somebody could not be reached, or did not come in time.
            OSError: the connection to somebody broke.
        """
        made: dict[int, socket.socket] = {}
        higher = {peer for peer in peers if peer > rank}
        try:
            for peer, endpoint in peers.items():
                if peer < rank:
                    made[peer] = self._connect(rank, peer, endpoint, lane, deadline, check)
            self._accept(rank, made, higher, lane, deadline, check)
        except BaseException:
            for sock in made.values():
                sock.close()
            raise
        for sock in made.values():
            send_at_once(sock)
        return made

    def knock(self, rank: int, peer: int, endpoint: Endpoint, lane: int) -> Knock:
        """Begin to connect to a peer.

        It waits only where a listener of this host has many guests, for at most a second.

        Raises:
            OSError: there is no file left.
        """
        where = endpoint.address + (self._scope if ":" in endpoint.address else "")
        is_near = endpoint.host == self.endpoint.host != ""
        who = _WHO.pack(rank, lane, secrets.token_bytes(_NONCE))
        return Knock(peer, who, endpoint, where, is_near=is_near)

    def door(self, rank: int, awaited: int) -> Door:
        """The door for so many ranks that are to come."""
        listening = [self._sock] if self._unix is None else [self._sock, self._unix]
        return Door(rank, listening, self.endpoint.token, awaited + STRANGERS)

    def close(self) -> None:
        self._sock.close()
        if self._unix is not None:
            self._unix.close()

    def _connect(
        self,
        rank: int,
        peer: int,
        endpoint: Endpoint,
        lane: int,
        deadline: float,
        check: Callable[[], None],
    ) -> socket.socket:
        """Connect to a peer, and check its proof; again, if what fails may pass."""
        while True:
            check()
            try:
                _remaining(deadline)  # raises if there is none
                knock = self.knock(rank, peer, endpoint, lane)
                try:
                    while not knock.advance():
                        knock.sleep(min(_remaining(deadline), AGAIN))
                        check()
                except BaseException:
                    knock.sock.close()
                    raise
                return knock.sock
            except OSError as error:
                if not is_passing(error):
                    raise AbsentError([peer], unreachable(endpoint, error)) from error
                time.sleep(AGAIN)

    def _accept(
        self,
        rank: int,
        made: dict[int, socket.socket],
        missing: set[int],
        lane: int,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """Accept connections with a valid proof; strangers are refused, and delay nobody."""
        with contextlib.closing(self.door(rank, len(missing))) as door:
            while missing:
                check()
                left = deadline - time.monotonic()
                for guest, (peer, its_lane) in door.introduced(max(0.0, min(left, AGAIN))):
                    if peer in missing and its_lane == lane:
                        made[peer] = door.admit(guest)
                        missing.discard(peer)
                    else:
                        door.refuse(guest, f"it knows the token, but rank {peer} is not awaited")
                if missing and left <= 0:  # also where strangers never stop coming
                    raise AbsentError(sorted(missing), "did not connect")


class Knock:
    """A connection to a peer's listener, until both ends have proved who they are.

    Attributes:
        peer: the rank that listens.
        sock: non-blocking.
    """

    def __init__(
        self, peer: int, who: bytes, endpoint: Endpoint, where: str, *, is_near: bool
    ) -> None:
        """`where` is the address to connect to, if it is not this host (`is_near`)."""
        self.peer = peer
        self._who = who
        self._token = endpoint.token
        self._asked = b""  # the listener's nonce, and who this is: what proofs are HMACs of
        self._heard = b""
        self._is_connected = False
        unix = _unix(endpoint.token, timeout=_UNIX) if is_near else None
        if unix is not None:
            self.sock = unix
            self._is_connected = True
            unix.setblocking(False)
            return
        address = socket.getaddrinfo(
            where, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        self.sock = socket.socket(address[0], socket.SOCK_STREAM)
        self.sock.setblocking(False)
        code = self.sock.connect_ex(address[4])
        if code not in (0, errno.EINPROGRESS):
            self.sock.close()
            raise OSError(code, os.strerror(code))

    @property
    def wanted(self) -> int:
        """The events of the socket to wait for, as `select.poll` has them."""
        return select.POLLIN if self._is_connected else select.POLLOUT

    def sleep(self, seconds: float) -> None:
        """Wait until `advance` can do something."""
        poll = select.poll()
        poll.register(self.sock, self.wanted)
        poll.poll(seconds * 1e3)

    def advance(self) -> bool:
        """Do what can be done now; whether both ends have proved who they are.

        Raises:
            OSError: the connection failed, or who listens does not know the token.
        """
        if not self._is_connected:
            poll = select.poll()
            poll.register(self.sock, select.POLLOUT)
            if not poll.poll(0):
                return False
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._is_connected = True
        if not self._asked:
            if not self._hear(_NONCE):
                return False
            self._asked = self._heard + self._who
            self._heard = b""
            self.sock.send(self._who + _proof(self._token, _CONNECTS, self._asked))
        if not self._hear(_PROOF):
            return False
        if not compare_digest(self._heard, _proof(self._token, _LISTENS, self._asked)):
            raise OSError("who listens there does not know the token of that rank")
        return True

    def _hear(self, count: int) -> bool:
        """Read up to `count` bytes and no more; whether all are there."""
        while len(self._heard) < count:
            try:
                more = self.sock.recv(count - len(self._heard))
            except BlockingIOError:
                return False
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
            self._heard += more
        return True


def send_at_once(sock: socket.socket) -> None:
    """Have a socket send what it gets, without waiting for more."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_passing(error: OSError) -> bool:
    """Whether it may pass: a link that has just come up, or a crowd at the listener."""
    return error.errno in _PASSING


def unreachable(endpoint: Endpoint, error: OSError) -> str:
    """That a peer cannot be reached, as the end of a clause."""
    why = error.strerror or str(error)
    return f"cannot be reached at {endpoint.address} port {endpoint.port} ({why})"


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection without a valid proof so far: its origin, our nonce, and the bytes read."""

    sock: socket.socket
    origin: str
    nonce: bytes
    said: bytes = b""

    @property
    def asked(self) -> bytes:
        """The bytes that the proofs are HMACs of: our nonce, and what the guest says it is."""
        return self.nonce + self.said[: _WHO.size]


class Door:
    """The connections that have not proved yet which rank they are.

    A rank sends its proof as soon as it has the nonce. So if there are too many connections, or no
    file descriptor is left, the oldest one is taken for a stranger and closed. If it was a rank
    after all, that rank connects again.
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

    def fileno(self) -> int:
        """A descriptor to wait at: it is readable where `introduced` has something to do."""
        return self._selector.fileno()

    def admit(self, guest: _Guest) -> socket.socket:
        """The connection of a guest with a valid proof, which is told so."""
        with contextlib.suppress(OSError):  # the other end is gone
            guest.sock.send(_proof(self._token, _LISTENS, guest.asked))
        return guest.sock

    def close(self) -> None:
        """Close the connections that are left, and log those that were refused."""
        while self._guests:
            self._dismiss()
        self._selector.close()
        self._log_refused()

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the selector is the parent's, too."""
        self._selector.close()
        for guest in self._guests:
            guest.sock.close()

    def _log_refused(self) -> None:
        for (origin, why), times in self._refused.items():
            what = "a connection" if times == 1 else f"{times} connections"
            _log.warning("rank %d refused %s from %s: %s", self._rank, what, origin, why)

    def introduced(self, seconds: float) -> Iterator[tuple[_Guest, tuple[int, int]]]:
        """Yield guests with a valid proof, with rank and lane; wait at most so many seconds."""
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
        """Close a connection that is no guest any more, and remember why."""
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
        """Refuse a guest, by default the oldest."""
        guest = guest or self._guests[0]
        self._forget(guest)
        self.refuse(guest)

    def _forget(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.sock)


def _proof(token: str, side: bytes, asked: bytes) -> bytes:
    """The HMAC by which one end of a connection proves that it knows the token."""
    return digest(token.encode(), side + asked, "sha256")


def _unix(token: str, *, backlog: int = 0, timeout: float | None = None) -> socket.socket | None:
    """A Unix socket under the name for a token: listening or, without a backlog, connected.

    None if that fails. The name is a hash of the token, since every user can read it.
    """
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
    """Raise the limit of open files so that this many peers can connect; why not, or None.

    The soft limit is 1,024 files on most machines. That is enough for about 330 peers, each with
    two sockets and, on this host, a segment. A process may raise it up to its hard limit; it stays
    raised, for the whole process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = psutil.Process().num_fds()
    except psutil.Error:  # /proc is hidden from this process
        opened = _UNKNOWN
    needed = opened + (len(LANES) + 1) * peers + _OWN
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    wanted, most = needed + _SPARE, math.inf if hard == resource.RLIM_INFINITY else hard
    try:
        if needed > most:
            raise ValueError(f"the hard limit is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(wanted, most)), hard))
    except (OSError, ValueError) as error:  # macOS has a limit above the hard one's infinity
        return (
            f"{len(LANES) * peers} connections need {needed} open files with the {opened} that "
            f"are open, and {error}: raise it (ulimit -Hn {wanted}, or LimitNOFILE of the service "
            "that starts the ranks)"
        )
    _log.info("the limit of open files is %d now, it was %d", min(wanted, most), soft)
    return None
