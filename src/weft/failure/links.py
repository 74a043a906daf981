"""Control links: a byte pipe between the failure detectors of every two ranks, beside all wires.

What is sent on a link comes in order, or the link ends. `SocketLinks` has a socket to each peer.
`links_of_threads` joins ranks that are threads of one process: there a queue takes all bytes.

A thread sleeps on the links and calls the detector, its *reader*: when something has come, and when
the reader's time has come.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..rendezvous.address import NO_SIGNAL

LONGEST = 1 << 16
"""Bytes that are read at once, and of a message between detectors at most."""
PATIENCE = 5.0  # seconds that a close waits for the thread, which lets go itself if it is later
# how a link ends where the network is at fault; in any other way it ends because the peer does
_NETWORK_FAULTS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}


class News(NamedTuple):
    """What came on a link.

    Attributes:
        peer: the rank at its other end.
        data: the bytes; b"": the link has ended, and nothing comes after this.
        error: of an end: what is wrong with the network, if that is why it ended.
    """

    peer: int
    data: bytes
    error: str = ""


# of one rank, for its thread, which None wakes. A collection of garbage may bring a thread to `put`
# in the middle of another
Inbox = queue.SimpleQueue[News | None]


class Reader(Protocol):
    """Who is told what comes on the links of one rank, by their thread alone."""

    def due(self) -> float:
        """When to be called at the latest, by `time.monotonic`. An earlier time than before counts
        from the next call on, or from the next `wake`. `start` may ask, too."""

    def handle(self, news: Sequence[News], late: float) -> None:
        """Take what came.

        Args:
            news: in order for each peer; empty: the time has come, or somebody called `wake`.
            late: how many seconds ago it was due.
        """

    def fail(self, error: Exception) -> None:
        """Nobody calls `handle` any more: that, or the links themselves, raised this."""


class SocketLinks:
    """The links of one rank to all its peers, over sockets, with a thread of their own.

    Any thread may call what is here.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        """
        Args:
            sockets: one to each peer, non-blocking.
        """
        self._sockets = dict(sockets)
        self._lock = threading.RLock()  # of the sockets, while they are written to or closed
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for peer, sock in self._sockets.items():
            self._selector.register(sock, selectors.EVENT_READ, peer)

    def peers(self) -> list[int]:
        """The peers whose links have not ended, ascending."""
        return sorted(self._sockets)

    def start(self, reader: Reader) -> None:
        """Begin to call the reader."""
        thread = threading.Thread(
            target=self._run, args=[reader], name="weft detector", daemon=True
        )
        thread.start()
        self._thread = thread

    def send(self, peer: int, data: bytes) -> None:
        """Send without waiting. Where the link takes only a part, nothing can follow it; where it
        has ended, or takes nothing, nothing is sent."""
        with self._lock:
            sock = self._sockets.get(peer)
            try:
                if sock is not None and sock.send(data, NO_SIGNAL) < len(data):
                    sock.shutdown(socket.SHUT_WR)  # half a message: nothing may follow it
            except OSError:
                return  # the reading side will tell

    def wake(self) -> None:
        """Have the reader called soon."""
        with contextlib.suppress(OSError):  # it has enough to read as it is, or is gone
            self._waker.send(b"\0", NO_SIGNAL)

    def close(self) -> None:
        """End the links and the calls of the reader. Twice is fine.

        A collection of garbage may bring a thread here in the middle of anything: even of what the
        reader does, or waits for. Then the links end when the reader returns.
        """
        with self._lock:
            self._is_closed = True
            self.wake()  # before the thread, which may be awake, has closed what that takes
        if self._thread is threading.current_thread():
            return  # which lets go as it ends
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                return
        self._let_go()

    def abandon(self) -> None:
        """In a forked child: close this copy of the links, which stay whole in the parent."""
        self._is_closed = True
        self._lock = threading.RLock()  # the thread may have had that one
        self._let_go()

    def _let_go(self) -> None:
        """Close everything. Twice is fine: a close and the end of the thread may both come here."""
        self._selector.close()
        for sock in (*self._sockets.values(), self._woken, self._waker):
            sock.close()
        self._sockets.clear()

    def _run(self, reader: Reader) -> None:
        """The thread."""
        try:
            while not self._is_closed:
                due = reader.due()
                # until something comes, somebody calls `wake`, or the reader's time has come
                ready = self._selector.select(max(0.0, due - time.monotonic()))
                late = time.monotonic() - due
                if late >= 0:  # with what came while this thread, or its process, stood still
                    ready = self._selector.select(0)
                reader.handle(self._read(key.data for key, _ in ready), late)
        except Exception as error:
            reader.fail(error)
        with self._lock:
            if self._is_closed:
                self._let_go()

    def _read(self, ready: Iterable[int | None]) -> list[News]:
        """What came on the links of these peers; None: the thread was woken."""
        news = []
        for peer in ready:
            with contextlib.suppress(BlockingIOError):
                if peer is None:
                    self._woken.recv(256)
                else:
                    news.append(self._read_from(peer))
        return news

    def _read_from(self, peer: int) -> News:
        """What came from one peer; BlockingIOError: nothing did."""
        sock = self._sockets[peer]
        fault = ""
        try:
            data = sock.recv(LONGEST)
        except BlockingIOError:
            raise
        except OSError as error:
            data = b""
            if error.errno in _NETWORK_FAULTS:
                fault = str(error)
        if not data:
            self._selector.unregister(sock)
            with self._lock:
                del self._sockets[peer]
            sock.close()
        return News(peer, data, fault)


def links_of_threads(size: int) -> list[QueueLinks]:
    """The links of ranks that are threads of this process.

    Example:
        >>> [links.peers() for links in links_of_threads(3)]
        [[1, 2], [0, 2], [0, 1]]
    """
    inboxes: dict[int, Inbox] = {rank: queue.SimpleQueue() for rank in range(size)}
    return [QueueLinks(rank, inboxes) for rank in range(size)]


class QueueLinks:
    """The links of a rank that is a thread of this process; what it has is as in `SocketLinks`.

    Such a rank does not die alone, so a link has no end: who closes it has said so before.
    """

    def __init__(self, rank: int, inboxes: dict[int, Inbox]) -> None:
        """
        Args:
            rank: this rank.
            inboxes: of the ranks that have not closed their links; all of them share it.
        """
        self._rank = rank
        self._inboxes = inboxes
        self._inbox = inboxes[rank]

    def peers(self) -> list[int]:
        return sorted(self._inboxes.keys() - {self._rank})

    def start(self, reader: Reader) -> None:
        threading.Thread(target=self._run, args=[reader], name="weft detector", daemon=True).start()

    def send(self, peer: int, data: bytes) -> None:
        inbox = self._inboxes.get(peer)
        if inbox is not None and self._rank in self._inboxes:
            inbox.put(News(self._rank, data))

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self._inboxes.pop(self._rank, None)
        self.wake()  # the thread ends

    def abandon(self) -> None:
        """Do nothing: the thread is the parent's, and a queue is no descriptor."""

    def _run(self, reader: Reader) -> None:
        """The thread."""
        try:
            while True:
                due = reader.due()
                news = self._next(due)
                if self._rank not in self._inboxes:
                    return
                reader.handle(news, time.monotonic() - due)
        except Exception as error:
            reader.fail(error)

    def _next(self, due: float) -> list[News]:
        """Sleep until something comes, or until a time; what came."""
        news = []
        seconds = min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)
        with contextlib.suppress(queue.Empty):
            each = self._inbox.get(timeout=seconds)
            while True:
                if each is not None:
                    news.append(each)
                each = self._inbox.get_nowait()
        return news


ControlLinks = SocketLinks | QueueLinks
