"""Sockets between ranks, each of which has proved who it is.

Each rank listens on a port of its own and tells the others its address. It connects to the ranks
below it, and accepts those above. The lane says what a socket is for: messages, or a control link;
each has a listener of its own. Between ranks of one host these are Unix sockets if possible: a rank
also listens under an abstract name (no file) that is made of its token; if a peer finds nobody
under that name, it connects by TCP.

Each listener has a random token, known to its ranks from the store or from the control links. Both
ends of a connection prove that they know it, without sending it, in three messages:

* the listener sends a nonce: random bytes, new for each connection;
* the other end sends its hello, which is its rank, the lane and a nonce of its own, and an HMAC
  with the token as key: of the words "weft connects", the listener's nonce, and the hello;
* the listener sends one of the words "weft listens", and of the same nonce and hello.

`Attempt` is the end that connects, `Candidate` a connection at the listener's end, and `Acceptor`
has all candidates of a listener. A wire polls them while it moves messages; `Listener.connect`
waits for them.

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
import select
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest, digest
from typing import Any

import psutil

from ...base.errors import AbsentError, WireError
from ...rendezvous.address import NO_SIGNAL
from ..start import check_nothing

MESSAGES = 0
CONTROL = 1
LANES = (MESSAGES, CONTROL)
"""What a socket is for."""

AGAIN = 0.1
"""Seconds after which to try again where what failed may pass."""

STRANGERS = 128
"""Open connections, beyond the ranks', that have not proved who they are."""

_TOKEN = 16  # bytes
_NONCE = 16  # bytes
_PROOF = 32  # bytes of an HMAC
# The first two pass when a link has just come up. The others come of a listener that had too many
# candidates, and took this one for a stranger.
_TRANSIENT = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET, errno.EPIPE}
_WITHOUT_FILES = {errno.EMFILE, errno.ENFILE}  # of this process, of the system
_UNIX_TIMEOUT = 1.0  # seconds that a listener on this host has to accept
_HAS_ABSTRACT_NAMES = sys.platform.startswith("linux")  # of Unix sockets
_HELLO = struct.Struct(f"!II{_NONCE}s")  # rank, lane, and nonce of the end that connects
_DISTANT = 5_000  # microseconds of a round trip: no network within a building takes as long
_CONTROL = b"bbr"  # the congestion control of connections between distant hosts
_ROUND_TRIP = 148  # where Linux's `struct tcp_info` has the shortest round trip, in microseconds
_CONNECTS = b"weft connects"  # prefixes of what the HMACs are of: which end sends it
_LISTENS = b"weft listens"
_OWN_FILES = 16  # that a group opens besides its connections: listener, selectors, wake-up
_ASSUMED_FILES = 32  # that are open, where their number cannot be found
_SPARE_FILES = 128  # for the rest of the program, if the hard limit allows

_log = logging.getLogger("weft")


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
        # without it the ranks of this host come by TCP, as all others
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
        check: Callable[[], None] = check_nothing,
        later: Container[int] = (),
    ) -> dict[int, socket.socket]:
        """Connect to lower ranks, and accept higher ones.

        Args:
            rank: this rank.
            peers: where each other rank listens.
            lane: what the sockets are for.
            deadline: as `time.monotonic` tells it.
            check: called again and again; raises a WireError, or no OSError, if somebody will not
                come.
            later: ranks that are to connect some time. One that does so now has to come again.

        Returns:
            The sockets, by peer.

        Raises:
            AbsentError: somebody could not be reached, or did not come in time.
            OSError: the connection to somebody broke, or no file may be opened any more.
        """
        sockets: dict[int, socket.socket] = {}
        higher = {peer for peer in peers if peer > rank}
        try:
            for peer, endpoint in peers.items():
                if peer < rank:
                    sockets[peer] = self._connect(rank, peer, endpoint, lane, deadline, check)
            self._accept(rank, sockets, higher, lane, deadline, check, later)
        except BaseException as error:
            for sock in sockets.values():
                sock.close()
            if isinstance(error, OSError) and is_without_files(error):
                text = without_files("the connections to other ranks", error)
                raise OSError(error.errno, text) from error
            raise
        for sock in sockets.values():
            send_at_once(sock)
        return sockets

    def attempt(self, rank: int, peer: int, endpoint: Endpoint, lane: int) -> Attempt:
        """Begin to connect to a peer.

        It waits only where the backlog of a listener of this host is full, for at most a second.

        Raises:
            OSError: there is no file left, or the address cannot be reached.
        """
        hello = _HELLO.pack(rank, lane, secrets.token_bytes(_NONCE))
        is_near = endpoint.host == self.endpoint.host != ""
        near = _unix(endpoint.token, timeout=_UNIX_TIMEOUT) if is_near else None
        if near is not None:
            near.setblocking(False)
            return Attempt(peer, hello, endpoint.token, near)
        address = endpoint.address
        if ":" in address:
            address += self._scope
        return Attempt(peer, hello, endpoint.token, _connecting(address, endpoint.port))

    def acceptor(self, rank: int, awaited: int) -> Acceptor:
        """What accepts so many ranks that are to come, at this rank."""
        listening = [self._sock]
        if self._unix is not None:
            listening.append(self._unix)
        return Acceptor(rank, listening, self.endpoint.token, awaited + STRANGERS)

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
                attempt = self.attempt(rank, peer, endpoint, lane)
                _finish(attempt, deadline, check)
                return attempt.sock
            except WireError:  # of `check`
                raise
            except OSError as error:
                if is_without_files(error):
                    raise
                if not is_transient(error):
                    raise AbsentError([peer], unreachable(endpoint, error)) from error
                time.sleep(AGAIN)

    def _accept(
        self,
        rank: int,
        sockets: dict[int, socket.socket],
        missing: set[int],
        lane: int,
        deadline: float,
        check: Callable[[], None],
        later: Container[int],
    ) -> None:
        """Accept missing ranks, and put them into `sockets`.

        Strangers are refused, and delay nobody.
        """
        with contextlib.closing(self.acceptor(rank, len(missing))) as acceptor:
            while missing:
                check()
                left = deadline - time.monotonic()
                proven = acceptor.proven(max(0.0, min(left, AGAIN)))
                for candidate, peer, its_lane in proven:
                    if its_lane == lane and peer in missing:
                        sockets[peer] = acceptor.confirm(candidate)
                        missing.discard(peer)
                    elif its_lane == lane and peer in later:
                        candidate.sock.close()
                    else:
                        acceptor.refuse(candidate, not_awaited(peer))
                if missing and left <= 0:  # also where strangers never stop coming
                    raise AbsentError(sorted(missing), "did not connect")


def _finish(attempt: Attempt, deadline: float, check: Callable[[], None]) -> None:
    """Wait until both ends have proved who they are; what is raised closes the socket.

    Raises:
        OSError: the connection failed, or the deadline passed.
    """
    try:
        while not attempt.advance():
            attempt.sleep(min(_remaining(deadline), AGAIN))
            check()
    except BaseException:
        attempt.sock.close()
        raise


class Attempt:
    """An attempt to connect to a peer's listener, until both ends have proved who they are.

    Attributes:
        peer: the rank that listens.
        sock: non-blocking. It is readable where `advance` can do something: its listener sends
            first, and where it cannot be connected, to read says why.
    """

    def __init__(self, peer: int, hello: bytes, token: str, sock: socket.socket) -> None:
        """
        Args:
            peer: the rank that listens.
            hello: of this rank, for one connection.
            token: of the peer's listener.
            sock: non-blocking, connected or being connected; its owner is the attempt.
        """
        self.peer = peer
        self.sock = sock
        self._hello = hello
        self._token = token
        self._signed = b""  # what the proofs are HMACs of; b"" until the listener's nonce is there
        self._received = b""  # of the message that the listener sends next

    @property
    def has_said_hello(self) -> bool:
        """Whether who listens may take it from now on."""
        return self._signed != b""

    def sleep(self, seconds: float) -> None:
        """Wait until `advance` can do something."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.poll(seconds * 1e3)

    def advance(self) -> bool:
        """Do what can be done now; whether both ends have proved who they are.

        Raises:
            OSError: the connection failed, or who listens does not know the token.
        """
        if not self._signed:
            if not self._read(_NONCE):
                return False
            self._signed = self._received + self._hello
            self._received = b""
            hello = self._hello + _proof(self._token, _CONNECTS, self._signed)
            self.sock.send(hello, NO_SIGNAL)
        if not self._read(_PROOF):
            return False
        if not compare_digest(self._received, _proof(self._token, _LISTENS, self._signed)):
            raise OSError("who listens there does not know the token of that rank")
        return True

    def _read(self, count: int) -> bool:
        """Read a message of `count` bytes, as far as it is there; whether all of it is.

        Not a byte more: what follows the listener's proof is for others.
        """
        while len(self._received) < count:
            try:
                more = self.sock.recv(count - len(self._received))
            except BlockingIOError:
                return False
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
            self._received += more
        return True


def send_at_once(sock: socket.socket) -> None:
    """Have a socket send what it gets, without waiting for more."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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


def is_transient(error: OSError) -> bool:
    """Whether it may pass: a link that has just come up, or a listener with many connections."""
    return error.errno in _TRANSIENT


def is_without_files(error: OSError) -> bool:
    """Whether this process, or its system, has no file descriptor left: no peer is to blame."""
    return error.errno in _WITHOUT_FILES


def without_files(what: str, error: OSError) -> str:
    """That there is no file descriptor for something, as a clause, and what helps."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = (
        f"this process may open {soft}; raise that (ulimit -n, or LimitNOFILE of the service that "
        "starts the ranks), or close some"
    )
    if error.errno == errno.ENFILE:
        remedy = "the processes of this machine have opened all that it allows; raise fs.file-max"
    return f"no file descriptor is left for {what} ({error.strerror}): {remedy}"


def unreachable(endpoint: Endpoint, error: OSError) -> str:
    """That a peer cannot be reached, as the end of a clause."""
    why = error.strerror or str(error)
    return f"cannot be reached at {endpoint.address} port {endpoint.port} ({why})"


def not_awaited(peer: int) -> str:
    """Why a candidate is refused that has proved that it is a rank, and not one that is to come."""
    return f"it knows the token, but rank {peer} is not awaited"


@dataclass(slots=True, eq=False)
class Candidate:
    """A connection that a listener has accepted, and which may be a rank's.

    Attributes:
        sock: non-blocking.
        origin: the address of the other end, for the log.
        nonce: what was sent to it.
        received: what came of its hello and its proof.
        is_gone: whether the other end has hung up.
    """

    sock: socket.socket
    origin: str
    nonce: bytes
    received: bytes = b""
    is_gone: bool = False

    @property
    def signed(self) -> bytes:
        """The bytes that the proofs are HMACs of: the nonce, and the hello of the other end."""
        return self.nonce + self.received[: _HELLO.size]


class Acceptor:
    """Accepts the connections at a listener, until each has proved which rank it is.

    A rank sends its proof as soon as it has the nonce. So if there are too many candidates, or no
    file descriptor is left, the oldest one is taken for a stranger and closed. If it was a rank
    after all, that rank connects again.
    """

    def __init__(
        self, rank: int, listening: Sequence[socket.socket], token: str, limit: int
    ) -> None:
        """
        Args:
            rank: this rank, for the log.
            listening: the sockets to accept at.
            token: of the listener.
            limit: how many candidates there may be at a time.
        """
        self._rank = rank
        self._token = token
        self._limit = limit
        self._candidates: list[Candidate] = []  # in the order in which they came
        self._refused: Counter[tuple[str, str]] = Counter()  # by where from, and why
        self._selector = selectors.DefaultSelector()
        for sock in listening:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)

    def fileno(self) -> int:
        """A descriptor to wait at: it is readable where `proven` has something to do."""
        return self._selector.fileno()

    def proven(self, seconds: float) -> Iterator[tuple[Candidate, int, int]]:
        """Yield connections with a valid proof, with rank and lane; wait at most so many seconds.

        Who gets one calls `confirm` or `refuse`, or closes its socket.
        """
        for key, _ in self._selector.select(seconds):
            candidate = key.data
            if candidate is None:
                assert isinstance(key.fileobj, socket.socket)
                self._accept(key.fileobj)
            elif candidate in self._candidates:  # else it was refused a moment ago
                more = self._read(candidate)
                if more and len(candidate.received) < _HELLO.size + _PROOF:
                    continue
                if self._is_proven(candidate):
                    self._forget(candidate)
                    peer, lane, _ = _HELLO.unpack_from(candidate.received)
                    yield candidate, peer, lane
                else:
                    self._drop(candidate)

    def confirm(self, candidate: Candidate) -> socket.socket:
        """Send the listener's proof to one that `proven` gave; its socket."""
        with contextlib.suppress(OSError):  # the other end is gone
            proof = _proof(self._token, _LISTENS, candidate.signed)
            candidate.sock.send(proof, NO_SIGNAL)
        return candidate.sock

    def refuse(self, candidate: Candidate, why: str) -> None:
        """Close a connection that `proven` gave, and count it for the log."""
        self._refused[candidate.origin, why] += 1
        candidate.sock.close()

    def close(self) -> None:
        """Close the connections that are left, and log those that were refused.

        A rank that comes as this one leaves is not refused.
        """
        for candidate in list(self._candidates):
            self._read(candidate)
            if self._is_proven(candidate):
                self._forget(candidate)
                candidate.sock.close()
            else:
                self._drop(candidate)
        self._selector.close()
        self._log_refused()

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the selector is the parent's, too."""
        self._selector.close()
        for candidate in self._candidates:
            candidate.sock.close()

    def _log_refused(self) -> None:
        for (origin, why), times in self._refused.items():
            what = "a connection" if times == 1 else f"{times} connections"
            _log.warning("rank %d refused %s from %s: %s", self._rank, what, origin, why)

    def _accept(self, listening: socket.socket) -> None:
        """Accept a connection, and send it its nonce."""
        if len(self._candidates) >= self._limit:
            self._refuse_unproven(self._candidates[0])
        try:
            sock, name = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # who came is gone again
            return
        except OSError:  # no file is left
            if not self._candidates:
                raise
            self._refuse_unproven(self._candidates[0])
            return
        sock.setblocking(False)
        origin = "this host" if sock.family == socket.AF_UNIX else name[0]
        candidate = Candidate(sock, origin, secrets.token_bytes(_NONCE))
        with contextlib.suppress(OSError):  # the other end is gone, which is read soon
            sock.send(candidate.nonce, NO_SIGNAL)
        self._candidates.append(candidate)
        self._selector.register(sock, selectors.EVENT_READ, candidate)

    def _read(self, candidate: Candidate) -> bytes:
        """Read what is there of its hello and its proof; what was read."""
        try:
            more = candidate.sock.recv(_HELLO.size + _PROOF - len(candidate.received))
        except BlockingIOError:
            return b""
        except OSError:
            more = b""
        candidate.is_gone = not more
        candidate.received += more
        return more

    def _is_proven(self, candidate: Candidate) -> bool:
        """Whether all of its hello and its proof has come, and the proof is right."""
        proof = candidate.received[_HELLO.size :]
        return compare_digest(proof, _proof(self._token, _CONNECTS, candidate.signed))

    def _drop(self, candidate: Candidate) -> None:
        """Close a connection that has no valid proof.

        One whose other end hung up and never said a word was not refused. Ranks do that: of two
        that connect to each other, one ends its attempt as soon as that of the other is through.
        """
        if candidate.is_gone and not candidate.received:
            self._forget(candidate)
            candidate.sock.close()
        else:
            self._refuse_unproven(candidate)

    def _refuse_unproven(self, candidate: Candidate) -> None:
        self._forget(candidate)
        self.refuse(candidate, "it did not prove that it knows the token")

    def _forget(self, candidate: Candidate) -> None:
        # the handler of a signal may close all this between any two lines, or find it so
        with contextlib.suppress(ValueError):
            self._candidates.remove(candidate)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(candidate.sock)


def _proof(token: str, side: bytes, signed: bytes) -> bytes:
    """The HMAC by which one end of a connection, `side`, proves that it knows the token."""
    return digest(token.encode(), side + signed, "sha256")


def _unix(token: str, *, backlog: int = 0, timeout: float | None = None) -> socket.socket | None:
    """A Unix socket under the name for a token: listening or, without a backlog, connected.

    None if that fails. The name is a hash of the token, since every user can read it.
    """
    if not _HAS_ABSTRACT_NAMES:
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


def _connecting(address: str, port: int) -> socket.socket:
    """A non-blocking TCP socket that has begun to connect.

    Raises:
        OSError: there is no file left, or the address cannot be reached.
    """
    family, _, _, _, name = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex(name)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


def _remaining(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError: there are none."""
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
