"""Control links: a byte pipe between the failure detectors of every two ranks, beside all wires.

What is sent on a link comes in order, or the link ends. `SocketLinks` has a socket to each peer.
`links_of_threads` joins ranks that are threads of one process: there a queue takes all bytes.

A thread sleeps on the links and calls the detector, its *reader*: when something has come, and when
the reader's time has come. Ranks that are threads share one such thread.
"""

from __future__ import annotations

import contextlib
import errno
import math
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
_AT_ONCE = 1000  # messages of threads that are taken from the queue before readers are called
GOODBYES = 0.1  # seconds in which goodbyes of threads are collected, as whole groups say them
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


class Reader(Protocol):
    """Who is told what comes on the links of one rank, by their thread alone."""

    def due(self) -> float:
        """When to be called at the latest, by `time.monotonic`. An earlier time than before counts
        from the next call on, or from the next `wake`. `SocketLinks.start` may ask, too."""

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

    def close(self, goodbye: bytes = b"") -> None:
        """End the links and the calls of the reader. Twice is fine.

        A collection of garbage may bring a thread here in the middle of anything: even of what the
        reader does, or waits for. Then the links end when the reader returns.

        Args:
            goodbye: what all peers are sent before.
        """
        if goodbye:
            for peer in self.peers():
                self.send(peer, goodbye)
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
            if peer is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(256)
                continue
            with contextlib.suppress(BlockingIOError):
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
    shared = _Shared(size)
    return [QueueLinks(rank, shared) for rank in range(size)]


class QueueLinks:
    """The links of a rank that is a thread of this process; what it has is as in `SocketLinks`.

    Such a rank does not die alone, so a link has no end: who closes it has said so before.
    """

    def __init__(self, rank: int, shared: _Shared) -> None:
        self._rank = rank
        self._shared = shared

    def peers(self) -> list[int]:
        return sorted(self._shared.open - {self._rank})

    def start(self, reader: Reader) -> None:
        self._shared.add(self._rank, reader)

    def send(self, peer: int, data: bytes) -> None:
        ranks = self._shared.open
        if peer in ranks and self._rank in ranks:
            self._shared.queue.put((peer, News(self._rank, data)))

    def wake(self) -> None:
        self._shared.queue.put((self._rank, None))

    def close(self, goodbye: bytes = b"") -> None:
        self._shared.remove(self._rank, goodbye)

    def abandon(self) -> None:
        """Do nothing: the thread is the parent's, and a queue is no descriptor."""


ControlLinks = SocketLinks | QueueLinks


class _Shared:
    """What the links of threads share: a queue, and the thread that calls all readers.

    Attributes:
        queue: whose reader is called, and what came for it; None: nothing, it was woken.
        open: the ranks that have not closed their links.
    """

    def __init__(self, size: int) -> None:
        # its `put` may be called in the middle of another, by a collection of garbage
        self.queue: queue.SimpleQueue[tuple[int, News | None]] = queue.SimpleQueue()
        self.open = set(range(size))
        self._lock = threading.RLock()
        self._readers: dict[int, Reader] = {}
        self._has_thread = False
        self._due = math.inf  # the earliest time of a reader, or some time before that
        # What ranks said as they closed, for all who are there when it is handed out. Ranks close
        # together: told one by one, each of n would hear of n others that it waits for no more.
        self._goodbyes: list[News] = []
        self._handed_out = math.inf  # when these are handed out

    def add(self, rank: int, reader: Reader) -> None:
        due = reader.due()
        with self._lock:
            self._readers[rank] = reader
            is_earlier = due < self._due
            self._due = min(due, self._due)
            if not self._has_thread:
                threading.Thread(target=self._run, name="weft detectors", daemon=True).start()
                self._has_thread = True
            elif is_earlier:
                self.queue.put((rank, None))

    def remove(self, rank: int, goodbye: bytes = b"") -> None:
        with self._lock:
            if goodbye and rank in self.open:
                self._goodbyes.append(News(rank, goodbye))
            self.open.discard(rank)
            self._readers.pop(rank, None)
            is_last = not self._readers
            is_first = bool(self._goodbyes) and self._handed_out == math.inf
            if is_first:
                self._handed_out = time.monotonic() + GOODBYES
        if is_first or is_last:
            self.queue.put((rank, None))  # the thread hears of a time, or ends

    def _run(self) -> None:
        """The thread: it ends where no reader is left."""
        while True:
            news = self._next(min(self._due, self._handed_out))
            with self._lock:
                if not self._readers:
                    self._has_thread = False
                    return
                readers = dict(self._readers)
                for each in self._goodbyes_to_hand_out():
                    for rank in readers:
                        news.setdefault(rank, []).append(each)
                late = time.monotonic() - self._due
                if late < 0:  # nobody's time has come: those alone for whom something came
                    readers = {rank: readers[rank] for rank in news if rank in readers}
                else:  # all are called, and asked when they are due
                    self._due = math.inf
            for rank, reader in readers.items():
                try:
                    reader.handle(news.get(rank, []), late)
                    due = reader.due()
                except Exception as error:
                    self.remove(rank)
                    reader.fail(error)
                    continue
                with self._lock:
                    self._due = min(self._due, due)

    def _goodbyes_to_hand_out(self) -> list[News]:
        """Those that were said, if it is time; with the lock held."""
        if time.monotonic() < self._handed_out:
            return []
        # in this order, as a collection of garbage may bring this thread to `remove` in between
        self._handed_out = math.inf
        goodbyes, self._goodbyes = self._goodbyes, []
        return goodbyes

    def _next(self, due: float) -> dict[int, list[News]]:
        """Sleep until something comes, or until a time; what came, by the rank that it is for."""
        news: dict[int, list[News]] = {}
        seconds = min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)
        with contextlib.suppress(queue.Empty):
            rank, first = self.queue.get(timeout=seconds)
            news[rank] = [] if first is None else [first]
            for _ in range(_AT_ONCE):
                rank, more = self.queue.get_nowait()
                mine = news.setdefault(rank, [])
                if more is not None:
                    mine.append(more)
        return news
