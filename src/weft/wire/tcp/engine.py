"""The progress engine: moves the messages between one rank and all others, over its connections.

The thread that waits for a message moves all messages meanwhile, so no message passes from thread
to thread. A wait sleeps in `poll` until a socket has something. While nobody waits and long
messages are under way, as in the arithmetic between two waits, a thread moves them every few
milliseconds; in between the kernel buffers what comes. Otherwise that thread sleeps. It is started
when it is needed first; messages in a segment do not need it.

Shutting the sockets down ends any wait at once. That is why weft moves its bytes itself: gloo never
fails a receive that has got a part of its message, whatever happens to the socket. gloo also
announces and answers each message, and passes it between threads, which costs about 50 system calls
and a millisecond of a core for a small exchange of four ranks on two cores. Here it takes three
system calls.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from torch import Tensor

from .. import base, processes, shm
from ..base import Recv
from ..memory import Pool
from ..processes import Lost
from .connection import Block, Connection, Receive, Send

INLINE = 1 << 16
"""Bytes of a message up to which it goes through the socket, also to whoever maps the segment."""

_TICK = 0.004  # seconds between two looks of the thread
_LEFT = 0.1  # seconds that a close waits for whoever moves something
_AWAKE = 50e-6  # seconds that a wait looks by itself before it sleeps until it is woken

Message = tuple[Connection, Send | Receive]
"""A message and the connection that it is on."""


class Engine(processes.Engine):
    """The connections of one rank to all others: an engine as `processes` describes it.

    Attributes:
        connections: by rank.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        side: Mapping[int, socket.socket],
        segment: shm.Segment | None = None,
        seen: Mapping[int, shm.Peer] | None = None,
        seen_by: Set[int] = frozenset(),
    ) -> None:
        """
        Args:
            sockets: connected, by peer; the engine closes them.
            side: the failure detector's.
            segment: of this rank.
            seen: the segments of peers, mapped here.
            seen_by: the peers that have mapped this rank's segment.
        """
        super().__init__(side, segment)
        self.connections: dict[int, Connection] = {}
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        self._by_fd: dict[int, Connection] = {}
        for peer, sock in sockets.items():
            sock.setblocking(False)
            connection = Connection(peer, sock, (seen or {}).get(peer), mapped=peer in seen_by)
            self.connections[peer] = self._by_fd[connection.fd] = connection
            self._watch(connection)
        # reentrant: a collection of garbage may close a wire in the middle of anything
        self._turn = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stir = threading.Event()
        self._closed = False

    def post(
        self, sends: Sequence[base.Send], recvs: Sequence[Recv], channel: int, pool: Pool
    ) -> list[Message]:
        messages: list[Message] = []
        places: dict[int, tuple[int, Block | None]] = {}  # in the segment, by id of the tensor
        rouse = False
        with self._turn:
            for peer, want in recvs:
                connection, receive = self.connections[peer], Receive(want, pool)
                connection.expect(channel, receive)
                rouse |= connection.segment is None and receive.limit > INLINE
                messages.append((connection, receive))
            for peer, tensor in sends:
                connection = self.connections[peer]
                if connection.mapped and tensor.nbytes > INLINE:
                    send = self._shared(tensor, places)
                else:
                    send = Send(tensor)
                    rouse |= send.nbytes > INLINE
                connection.send(channel, send)
                messages.append((connection, send))
            for connection, _ in messages:
                if connection.due:
                    connection.flush()
                    self._watch(connection)
            if rouse:
                self._rouse()
        return messages

    def _shared(self, tensor: Tensor, places: dict[int, tuple[int, Block | None]]) -> Send:
        """A message that the peer reads in the segment, if there is room for it."""
        if id(tensor) not in places:
            assert self.segment is not None
            offset, block = self.segment.offset_of(tensor), None
            if offset is None:
                offset = self.segment.stage(tensor)
                block = None if offset is None else Block(self.segment, offset)
            places[id(tensor)] = -1 if offset is None else offset, block
        offset, block = places[id(tensor)]
        if block is not None:
            block.readers += 1
        return Send(tensor, offset, block)

    def finish(self, messages: Iterable[Message], limit: float, at: Callable[[int], None]) -> None:
        until = time.monotonic() + limit
        with self._turn:
            for number, (connection, message) in enumerate(messages):
                if not message.done:
                    at(number)
                while not message.done:
                    remaining = until - time.monotonic()
                    if self._closed or connection.lost or remaining <= 0:
                        closed = "the connection is closed" if self._closed else ""
                        raise Lost(connection.lost or closed or "it did not come in time")
                    self._step(remaining)

    def release(self, receives: Sequence[Message]) -> None:
        with self._turn:
            super().release(receives)
            for connection, _ in receives:
                if connection.due and not self._closed:
                    connection.flush()
                    self._watch(connection)

    def _step(self, seconds: float) -> None:
        """Wait until something can be moved, at most so many seconds, and move it."""
        for fd, event in self._ready(seconds):
            connection = self._by_fd[fd]
            if event & ~select.POLLOUT:
                connection.receive()
            if connection.due or event & select.POLLOUT:
                connection.flush()
            self._watch(connection)

    def _ready(self, seconds: float) -> list[tuple[int, int]]:
        """Wait until something can be moved: by polling at first, then asleep.

        The ranks of a collective call arrive at nearly the same time, and waking a process costs
        more than many polls. Between two polls other processes may have the core.
        """
        now = time.monotonic()
        until = now + min(seconds, _AWAKE)
        ready = self._poll.poll(0)
        while not ready and now < until:
            os.sched_yield()
            ready = self._poll.poll(0)
            now = time.monotonic()
        return ready if ready or seconds <= 0 else self._poll.poll(seconds * 1e3)

    def _watch(self, connection: Connection) -> None:
        """Poll for what the connection wants now; nothing, if it is lost."""
        fd, wanted = connection.fd, connection.wanted
        if wanted == self._polled.get(fd, 0):
            return
        if connection.garbled:
            self.accuse(connection.peer, connection.garbled)
        if wanted:
            self._poll.register(fd, wanted)
        else:
            self._poll.unregister(fd)
        self._polled[fd] = wanted
        if wanted & select.POLLOUT:
            self._rouse()

    def _rouse(self) -> None:
        """Wake the thread up, or start it; with `_turn` held."""
        if not self._stir.is_set():
            self._stir.set()
            if self._thread is None:
                name = "weft engine"
                self._thread = threading.Thread(target=self._look_in, name=name, daemon=True)
                self._thread.start()

    def _look_in(self) -> None:
        try:
            while True:
                self._stir.wait()
                if self._closed:
                    return
                time.sleep(_TICK)
                if not self._turn.acquire(blocking=False):
                    continue  # another thread waits, and moves everything
                try:
                    if not self._closed:
                        self._step(0.0)
                        # the garbage collector may have closed this engine, in this very thread
                        busy = any(each.busy for each in self.connections.values())
                        if not (self._closed or busy):
                            self._stir.clear()
                finally:
                    self._turn.release()
        except BaseException as error:  # the next wait raises it
            for connection in self.connections.values():
                connection.lose(f"the thread that moves its bytes failed: {error!r}")
            self.cut()
            raise

    def cut(self) -> None:
        """End all waits, here and at the peers'; any thread may call it."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # its other end is gone already, or it is closed
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets, which ends all waits. What was sent still arrives. Twice is fine."""
        if not self._turn.acquire(timeout=_LEFT):
            self.cut()  # somebody waits, or is about to
            self._turn.acquire()
        try:
            for connection in () if self._closed else self.connections.values():
                connection.receive()  # closing with unread bytes would reset the connection
        finally:
            self._let_go()
            self._stir.set()  # with `_turn` held: the thread clears it only with `_turn` held
            self._turn.release()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def stop(self) -> None:
        self.close()

    def abandon(self) -> None:
        """Close the sockets in a forked child, which has no thread; one may have had the turn."""
        self._turn, self._thread, self._stir = threading.RLock(), None, threading.Event()
        self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        if self.segment is not None:
            self.segment.close()
        for connection in self.connections.values():
            connection.close()
