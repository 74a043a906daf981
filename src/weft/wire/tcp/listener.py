"""Sockets between every two ranks, each of which has proved who it is.

Each rank listens on a port of its own, and the others read its address at the store. It connects to
all ranks below it at once, and accepts those above, for each of two lanes: messages, and control
links. Between ranks of one host these are Unix sockets if possible: a rank also listens under an
abstract name (no file) that is made of its token; if a peer finds nobody under that name, it
connects by TCP. Once all are connected, nobody listens any more.

Each listener has a random token, known to its ranks from the store. Both ends of a connection prove
that they know it, without sending it, in three messages:

* the listener sends a nonce: random bytes, new for each connection;
* the other end sends its hello, which is its rank, the lane and a nonce of its own, and an HMAC
  with the token as key: of the words "weft connects", the listener's nonce, and the hello;
* the listener sends one of the words "weft listens", and of the same nonce and hello.

So strangers are refused, and a recorded handshake cannot be replayed. What follows on the
connection is not signed.

Source of the HMAC: RFC 2104, with SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import resource
import secrets
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from hmac import compare_digest, digest
from typing import Any

import psutil

from ...base.errors import AbsentError
from ...rendezvous.address import NO_SIGNAL

MESSAGES = 0
CONTROL = 1
LANES = (MESSAGES, CONTROL)
"""What a socket is for."""

STRANGERS = 128
"""Open connections, beyond the ranks', that have not proved who they are."""

_AGAIN = 0.1  # seconds after which to try again where what failed may pass
_TOKEN = 16  # bytes
_NONCE = 16  # bytes
_PROOF = 32  # bytes of an HMAC
# The first two pass when a link has just come up. The next two come of a listener that had too many
# candidates, and took this one for a stranger; the last of a Unix socket whose queue is full.
_TRANSIENT = {
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ECONNRESET,
    errno.EPIPE,
    errno.EAGAIN,
}
_WITHOUT_FILES = {errno.EMFILE, errno.ENFILE}  # of this process, of the system
_HAS_ABSTRACT_NAMES = sys.platform.startswith("linux")  # of Unix sockets
_HELLO = struct.Struct(f"!II{_NONCE}s")  # rank, lane, and nonce of the end that connects
_DISTANT = 5_000  # microseconds of a round trip: no network within a building takes as long
_CONTROL = b"bbr"  # the congestion control of connections between distant hosts
_ROUND_TRIP = 148  # where Linux's `struct tcp_info` has the shortest round trip, in microseconds
_CONNECTS = b"weft connects"  # prefixes of what the HMACs are of: which end sends it
_LISTENS = b"weft listens"
_UNPROVEN = "it did not prove that it knows the token"
_OWN_FILES = 16  # that a group opens besides its connections: listener, selectors, wake-up
_ASSUMED_FILES = 32  # that are open, where their number cannot be found
_SPARE_FILES = 128  # for the rest of the program, if the hard limit allows

_log = logging.getLogger("weft")

Sockets = dict[int, socket.socket]
"""By peer."""

_Way = tuple[int, int]  # a peer and a lane


def check_nothing() -> None:
    """What `check` is where nobody watches the ranks."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank listens: its numeric address, its port, its token, and its host's name."""

    address: str
    port: int
    token: str
    host: str = ""


class Listener:
    """Where one rank listens; use it as a context manager.

    Attributes:
        endpoint: what the other ranks must know to connect.
        sockets: that listen.
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
        self.sockets = [socket.create_server(name, family=family, backlog=backlog)]
        port = self.sockets[0].getsockname()[1]
        self.endpoint = Endpoint(address.partition("%")[0], port, secrets.token_hex(_TOKEN), host)
        if host and _HAS_ABSTRACT_NAMES:
            # without it the ranks of this host come by TCP, as all others
            with contextlib.suppress(OSError):
                self.sockets.append(_listening_near(self.endpoint.token, backlog))
        for sock in self.sockets:
            sock.setblocking(False)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self.sockets:
            sock.close()

    def connect(
        self,
        rank: int,
        peers: Mapping[int, Endpoint],
        deadline: float,
        check: Callable[[], None] = check_nothing,
    ) -> tuple[Sockets, Sockets]:
        """Connect to lower ranks, and accept higher ones.

        Args:
            rank: this rank.
            peers: where each other rank listens.
            deadline: as `time.monotonic` tells it.
            check: called about ten times a second; raises if somebody will not come.

        Returns:
            The sockets for messages, and those for control links; non-blocking.

        Raises:
            AbsentError: somebody could not be reached, or did not come in time.
            OSError: no file may be opened any more.
        """
        try:
            with contextlib.closing(_Mesh(self, rank, peers)) as mesh:
                mesh.complete(deadline, check)
        except OSError as error:
            if error.errno in _WITHOUT_FILES:
                raise OSError(error.errno, _without_files(error)) from error
            raise
        return mesh.sockets

    def connecting(self, endpoint: Endpoint) -> socket.socket:
        """A socket that has begun to connect to a peer.

        Raises:
            OSError: there is no file left, or the address cannot be reached.
        """
        if _HAS_ABSTRACT_NAMES and endpoint.host == self.endpoint.host != "":
            try:
                return _begun(socket.AF_UNIX, _name_near(endpoint.token))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    raise
        address = endpoint.address
        if ":" in address:
            address += self._scope
        family, *_, name = socket.getaddrinfo(
            address, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        return _begun(family, name)


def _listening_near(token: str, backlog: int) -> socket.socket:
    """A Unix socket that listens under the name for a token."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name_near(token))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def _name_near(token: str) -> str:
    """The name of a Unix socket: a hash of the token, since every user can read it."""
    return f"\0weft-{hashlib.blake2b(token.encode(), digest_size=16).hexdigest()}"


def _begun(family: int, name: Any) -> socket.socket:
    """A non-blocking socket that has begun to connect."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex(name)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


@dataclass(eq=False, slots=True)
class _Handshake:
    """A connection whose ends have not both proved who they are.

    Attributes:
        sock: non-blocking. It is readable where the next step can be taken: the listener sends
            first, and where it cannot be connected, to read says why.
        steps: of this end: each waits for bytes; at last the peer and the lane.
        way: the peer and the lane that this rank connects; None: it was accepted.
        origin: of one that was accepted the address of the other end, for the log.
    """

    sock: socket.socket
    steps: Generator[None, None, _Way]
    way: _Way | None = None
    origin: str = ""


class _Mesh:
    """The sockets of one rank to all others, as far as they are made; see `Listener.connect`.

    A rank sends its proof as soon as it has the nonce. So if too many connections were accepted, or
    no file descriptor is left, the oldest one is taken for a stranger and closed. If it was a rank
    after all, that rank connects again.

    Attributes:
        sockets: by lane, whose both ends have proved who they are.
    """

    def __init__(self, listener: Listener, rank: int, peers: Mapping[int, Endpoint]) -> None:
        self.sockets: tuple[Sockets, Sockets] = ({}, {})
        self._listener = listener
        self._rank = rank
        self._peers = peers
        self._missing = {(peer, lane) for peer in peers for lane in LANES}
        # when to connect to lower ranks, for each lane
        self._due = {way: 0.0 for way in sorted(self._missing) if way[0] < rank}
        self._accepted: list[_Handshake] = []  # in the order in which they came
        self._refused: Counter[tuple[str, str]] = Counter()  # by where from, and why
        self._selector = selectors.DefaultSelector()
        for sock in listener.sockets:
            self._selector.register(sock, selectors.EVENT_READ)

    def complete(self, deadline: float, check: Callable[[], None]) -> None:
        """Make all sockets that are missing; arguments and errors are those of `connect`."""
        while self._missing:
            check()
            left = deadline - time.monotonic()
            if left <= 0:  # also where strangers never stop coming
                raise self._absent()
            self._connect_those_due()
            for key, _ in self._selector.select(min(left, _AGAIN)):
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept(key.fileobj)
                elif key.data.sock.fileno() >= 0:  # else it was refused a moment ago
                    self._advance(key.data)
        for handshake in self._accepted.copy():
            self._refuse(handshake, _UNPROVEN)

    def close(self) -> None:
        """Close what is no rank's, and all where some are missing; log what was refused."""
        if self._missing:
            for sockets in self.sockets:
                for sock in sockets.values():
                    sock.close()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.sock.close()
        self._selector.close()
        for (origin, why), times in self._refused.items():
            what = "a connection" if times == 1 else f"{times} connections"
            _log.warning("rank %d refused %s from %s: %s", self._rank, what, origin, why)

    def _absent(self) -> AbsentError:
        """Who has not come by the deadline."""
        missing = sorted({peer for peer, _ in self._missing})
        if missing[0] < self._rank:
            silence = TimeoutError("no time was left to connect")
            return AbsentError(missing[:1], _unreachable(self._peers[missing[0]], silence))
        return AbsentError(missing, "did not connect")

    # to lower ranks

    def _connect_those_due(self) -> None:
        now = time.monotonic()
        for way, when in list(self._due.items()):
            if when > now:
                continue
            del self._due[way]
            peer = way[0]
            try:
                sock = self._listener.connecting(self._peers[peer])
            except OSError as error:
                self._on_failure(way, error)
            else:
                self._begin(_Handshake(sock, self._knock(sock, way), way))

    def _knock(self, sock: socket.socket, way: _Way) -> Generator[None, None, _Way]:
        """The steps of the end that connects.

        Raises:
            OSError: the connection failed, or who listens does not know the token.
        """
        peer, lane = way
        token = self._peers[peer].token
        hello = _HELLO.pack(self._rank, lane, secrets.token_bytes(_NONCE))
        signed = (yield from _read(sock, _NONCE)) + hello
        sock.send(hello + _proof(token, _CONNECTS, signed), NO_SIGNAL)
        proof = yield from _read(sock, _PROOF)
        if not compare_digest(proof, _proof(token, _LISTENS, signed)):
            raise OSError("who listens there does not know the token of that rank")
        return way

    def _on_failure(self, way: _Way, error: OSError) -> None:
        """Have a lower rank connected to later if that may help.

        Raises:
            AbsentError: it cannot be reached.
            OSError: no file is left.
        """
        if error.errno in _WITHOUT_FILES:
            raise error
        peer = way[0]
        if error.errno not in _TRANSIENT:
            raise AbsentError([peer], _unreachable(self._peers[peer], error)) from error
        self._due[way] = time.monotonic() + _AGAIN

    # from higher ranks

    def _accept(self, listening: socket.socket) -> None:
        if len(self._accepted) >= len(self._missing) + STRANGERS:
            self._refuse(self._accepted[0], _UNPROVEN)
        try:
            sock, name = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # who came is gone again
            return
        except OSError:  # no file is left
            if not self._accepted:
                raise
            self._refuse(self._accepted[0], _UNPROVEN)
            return
        sock.setblocking(False)
        origin = "this host" if sock.family == socket.AF_UNIX else name[0]
        handshake = _Handshake(sock, self._open(sock), origin=origin)
        self._accepted.append(handshake)
        self._begin(handshake)

    def _open(self, sock: socket.socket) -> Generator[None, None, _Way]:
        """The steps of the end that listens.

        Raises:
            OSError: the other end is gone, or no rank that is to come.
        """
        token = self._listener.endpoint.token
        nonce = secrets.token_bytes(_NONCE)
        sock.send(nonce, NO_SIGNAL)
        answer = yield from _read(sock, _HELLO.size + _PROOF)
        signed = nonce + answer[: _HELLO.size]
        if not compare_digest(answer[_HELLO.size :], _proof(token, _CONNECTS, signed)):
            raise OSError(_UNPROVEN)
        peer, lane, _ = _HELLO.unpack_from(answer)
        if (peer, lane) not in self._missing:
            raise OSError(f"it knows the token, but rank {peer} is not awaited")
        sock.send(_proof(token, _LISTENS, signed), NO_SIGNAL)
        return peer, lane

    def _refuse(self, handshake: _Handshake, why: str) -> None:
        """Close a connection that is no rank's, and count it for the log."""
        self._end(handshake)
        handshake.sock.close()
        self._refused[handshake.origin, why] += 1

    # both

    def _begin(self, handshake: _Handshake) -> None:
        self._selector.register(handshake.sock, selectors.EVENT_READ, handshake)
        self._advance(handshake)

    def _advance(self, handshake: _Handshake) -> None:
        """Take the next step of a handshake."""
        try:
            next(handshake.steps)
        except StopIteration as proven:
            self._end(handshake)
            self._keep(handshake.sock, *proven.value)
        except OSError as error:
            if handshake.way is None and not isinstance(error, ConnectionError):
                self._refuse(handshake, str(error))
                return
            self._end(handshake)
            handshake.sock.close()
            if handshake.way is not None:  # else it has hung up: ranks do that where they give up
                self._on_failure(handshake.way, error)

    def _keep(self, sock: socket.socket, peer: int, lane: int) -> None:
        """Keep a socket, both of whose ends have proved who they are."""
        if sock.family != socket.AF_UNIX:  # it sends what it gets, without waiting for more
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._missing.remove((peer, lane))
        self.sockets[lane][peer] = sock

    def _end(self, handshake: _Handshake) -> None:
        """Wait for no step of a handshake any more."""
        self._selector.unregister(handshake.sock)
        if handshake.way is None:
            self._accepted.remove(handshake)


def _read(sock: socket.socket, count: int) -> Generator[None, None, bytes]:
    """Read a message of so many bytes, and not a byte more: what follows is for others.

    It is shorter where the other end hangs up behind a part of it.
    """
    message = b""
    while len(message) < count:
        yield
        with contextlib.suppress(BlockingIOError):
            more = sock.recv(count - len(message))
            if not more and not message:
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
            if not more:
                break
            message += more
    return message


def _proof(token: str, side: bytes, signed: bytes) -> bytes:
    """The HMAC by which one end of a connection, `side`, proves that it knows the token."""
    return digest(token.encode(), side + signed, "sha256")


def suit_distance(sock: socket.socket) -> None:
    """Have a connection to a distant host fill its link, where the system lets this process choose.

    Cubic, the usual congestion control, takes each lost packet for a full link, and needs many
    round trips to reach the link's rate again, also after each pause. BBR sends at the rate that it
    measures. Near hosts need neither.

    Source: Cardwell et al., "BBR: Congestion-Based Congestion Control" (ACM Queue 2016).
    """
    if sock.family == socket.AF_UNIX or not sys.platform.startswith("linux"):
        return
    # a system without BBR refuses, as do those that allow it to administrators alone
    with contextlib.suppress(OSError):
        if round_trip(sock) >= _DISTANT:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONTROL)


def round_trip(sock: socket.socket) -> int:
    """Microseconds of the shortest round trip of a connection; 0 where Linux does not say."""
    width = 4
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP + width)
    if len(info) < _ROUND_TRIP + width:
        return 0
    return int.from_bytes(info[_ROUND_TRIP:], sys.byteorder)


def _without_files(error: OSError) -> str:
    """That there is no file descriptor for a connection, as a clause, and what helps."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = (
        f"this process may open {soft}; raise that (ulimit -n, or LimitNOFILE of the service that "
        "starts the ranks), or close some"
    )
    if error.errno == errno.ENFILE:
        remedy = "the processes of this machine have opened all that it allows; raise fs.file-max"
    what = "the connections to other ranks"
    return f"no file descriptor is left for {what} ({error.strerror}): {remedy}"


def _unreachable(endpoint: Endpoint, error: OSError) -> str:
    """That a peer cannot be reached, as the end of a clause."""
    why = error.strerror or str(error)
    return f"cannot be reached at {endpoint.address} port {endpoint.port} ({why})"


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
        opened = _ASSUMED_FILES
    needed = opened + (len(LANES) + 1) * peers + _OWN_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    wanted = needed + _SPARE_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        if needed > limit:
            raise ValueError(f"the hard limit is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError) as error:  # macOS has a limit above the hard one's infinity
        return (
            f"{len(LANES) * peers} connections need {needed} open files with the {opened} that "
            f"are open, and {error}: raise it (ulimit -Hn {wanted}, or LimitNOFILE of the service "
            "that starts the ranks)"
        )
    _log.info("the limit of open files is %d now, it was %d", limit, soft)
    return None
