"""Moves the messages of one rank to all others, over its sockets and pipes.

Whoever waits for a message moves all that can be moved meanwhile, so nothing is handed from thread
to thread. While nobody waits and large messages are under way, such as in the arithmetic between
two waits, a thread looks in every few milliseconds; what comes in between stays in the kernel's
buffers. It sleeps otherwise, and exists only once it was needed.

A wait can be ended at any time, by shutting the sockets down: that is why weft moves its bytes
itself. gloo never fails a receive that has got a part of its message, whatever happens to the
socket; a message of its is also announced, answered and handed on between threads, which costs
about 50 system calls and a millisecond of a core for a small exchange of four ranks on two cores,
where this takes three.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ..kernels.cpu_talk import Came, Lender, Talk
from . import pieces
from .arena import Arena
from .lent import Guard
from .line import Line, Order
from .pipe import PipeLine, TensorOrder, put_all, take_all
from .small import SmallLine, SocketLine

__all__ = ["Lost", "Mover", "Order"]

_TICK, _TICKS = 0.004, 4  # seconds between two looks of the thread; how many it may leave out
_PATIENCE = 1.0  # seconds that peers get to say whether they can read here
_LEFT = 0.1  # seconds that a close waits for whoever moves something
_AWAKE = 50e-6  # seconds that a wait looks by itself before it sleeps until it is woken
_LOOKS = 500_000  # nanoseconds that machine code does so, where peers come soon
_FEW_LOOKS = 50_000  # = where they do not, and for messages of any length

Message = tuple[int, memoryview, str]
"""(peer, memory to send or to fill, the kind of numbers there if they may be packed, or "")."""

Posted = tuple[Line | SmallLine, Order]
"""A message and the line that it is on."""


class Lost(OSError):
    """A message will not come through: its connection ended, or nothing moved in time."""


class Mover:
    """The sockets of one rank to all others, two to each: for small messages, and for all others.

    Attributes:
        lines, small: the connections by rank.
        arena: what peers on this host map, where there are pipes to them.
    """

    def __init__(
        self,
        rank: int,
        bulk: Mapping[int, socket.socket],
        small: Mapping[int, socket.socket],
        shared: Mapping[int, Tensor],
    ) -> None:
        """Take over connected, non-blocking sockets, by rank, and memory for pipes to some."""
        pace = pieces.Pace()
        self.lines = {peer: Line(peer, sock, pace) for peer, sock in bulk.items()}
        self.small: dict[int, SmallLine] = {
            peer: PipeLine(peer, sock, shared[peer], first=rank < peer)
            if peer in shared
            else SocketLine(peer, sock)
            for peer, sock in small.items()
        }
        self._all: list[Line | SmallLine] = [*self.lines.values(), *self.small.values()]
        self._by_fd = {line.fd: line for line in self._all}
        self._pipes = {line.fd: line for line in self._all if isinstance(line, PipeLine)}
        self._polled: dict[int, int] = {}
        self._changed: dict[int, Line | SmallLine] = {}  # to be seen to before somebody waits
        self._more: dict[int, Line] = {}  # those with something that was read and not looked at
        self.arena = Arena.made() if shared else None
        self._guard = Guard(self.arena)
        self._poll = select.poll()
        # reentrant: a collection of garbage may close a wire in the middle of anything
        self._turn = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stir = threading.Event()
        self._readable = pieces.Readable()
        self._failed: BaseException | None = None
        self._closed = False

    def introduce(self, host: bytes) -> None:
        """Let peers on this host read long messages where they lie; all ranks do, or some.

        Args:
            host: the 16-byte name of this host and its network.
        """
        with self._turn:
            for line in self.lines.values():
                line.introduce(host, self._guard)
                line.flush()
                self._watch(line)

    def meet(self) -> None:
        """Hear from all peers whether they can read here; for a moment at most, while they come."""
        until = time.monotonic() + _PATIENCE
        with self._turn:
            while any(line.lends is None and not line.lost for line in self.lines.values()):
                remaining = until - time.monotonic()
                if self._closed or remaining <= 0:
                    return
                self._step(remaining)

    def lends(self, peer: int) -> bool:
        """Whether a peer can read what lies here, as far as it has said so."""
        return bool(self.lines[peer].lends)

    def read(self, peer: int, address: int, into: memoryview) -> bool:
        """Fill memory from that of a peer; False if that is not what it lends, or not allowed."""
        reach = self.lines[peer].reach
        return reach is not None and reach.read(address, into)

    def lender(self, peer: int) -> Lender | None:
        """The record of a peer whose memory can be read."""
        reach = self.lines[peer].reach
        return None if reach is None else reach.record

    def post(
        self,
        lines: Mapping[int, Line],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        at: int,
    ) -> list[Posted]:
        """Start sending messages and receiving others, on channel `at` of these lines.

        Returns:
            What `finish` wants: each message with its line, receives first.
        """
        orders: list[Posted] = []
        with self._turn:
            for _, _, kind in (*sends, *recvs):
                if kind not in self._readable.told:
                    for line in self._readable.tell(kind, self.lines.values()):
                        line.flush()
                        self._watch(line)
            for peer, buffer, _ in recvs:
                order, line = Order(buffer), lines[peer]
                line.expect(at, order)
                orders.append((line, order))
                self._changed[line.fd] = line
            for peer, message, kind in sends:
                order, line = Order(message, kind), lines[peer]
                line.send(at, order)
                orders.append((line, order))
                line.flush()
                self._watch(line)
        if orders and not self._stir.is_set():
            self._rouse()
        return orders

    def post_small(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> list[Posted]:
        """`post` on the lane for small messages, which has no channels.

        Messages are tensors: uint8, 1-D, contiguous.
        """
        small, changed = self.small, self._changed
        asked: list[tuple[SmallLine, Order]] = []
        told: list[tuple[SmallLine, Order]] = []
        swift: list[tuple[PipeLine, TensorOrder]] = []
        with self._turn:
            for peer, tensor in recvs:
                order, line = TensorOrder(tensor), small[peer]
                line.asked.append(order)
                changed[line.fd] = line
                asked.append((line, order))
            for peer, tensor in sends:
                order, line = TensorOrder(tensor), small[peer]
                idle = not (line.unsent or line.lost or any(line is busy for busy, _ in told))
                told.append((line, order))
                if idle and isinstance(line, PipeLine):
                    swift.append((line, order))
            put_all(swift)
            for line, left in told:
                if not left.done:
                    line.send(left)
                    changed[line.fd] = line
        return [*asked, *told]

    def talk(
        self,
        talk: Talk,
        lines: Sequence[SmallLine],
        number: int,
        at: tuple[int, int, int],
        meanwhile: Callable[[], object] | None,
        *,
        soon: bool = True,
    ) -> Came | None:
        """`Talk.run` over these lines; None: nothing was done, since that is not possible now.

        Where peers come not `soon` but when they have done their work, it looks for moments only.
        """
        with self._turn:
            if self._closed:
                return None
            ahead = False
            for line in lines:
                if line.asked or line.unsent or line.lost:
                    return None
                ahead |= line.end > 0
            if not (talk.bound or talk.bind([line.path for line in lines])):
                return None
            for row, line in enumerate(lines if ahead else ()):
                if line.end and talk.places[row]:
                    talk.came(row, line.give(talk.places[row]))
            return talk.run(number, _LOOKS if soon else _FEW_LOOKS, at, meanwhile)

    def resume(
        self, talk: Talk, lines: Sequence[SmallLine], into: Sequence[memoryview | None]
    ) -> list[Posted]:
        """Leave to the lines what was not said or heard by then; as `post` returns it.

        Args:
            talk: what was not as expected.
            lines: of its peers.
            into: where to put what each says, if it says something.
        """
        asked: list[Posted] = []
        told: list[Posted] = []
        with self._turn:
            for line, buffer, frame, place, (sent, got) in zip(
                lines, into, talk.frames, talk.places, talk.left(), strict=True
            ):
                if frame:
                    told.append((line, Order(memoryview(frame))))
                    line.go_on(told[-1][1], sent)
                if buffer is not None:
                    asked.append((line, Order(buffer)))
                    line.take_up(asked[-1][1], place[:got])
                self._changed[line.fd] = line
        return asked + told

    def finish(self, orders: Iterable[Posted], limit: float, at: Callable[[int], None]) -> None:
        """Move messages until all of these are through.

        Args:
            orders: what `post` returned.
            limit: seconds after which to give up.
            at: told the number of the message that is waited for.

        Raises:
            Lost: a peer closed its end, the sockets were shut down here, or the limit passed.
        """
        until = time.monotonic() + limit
        orders = list(orders)
        with self._turn:
            swift = [
                (line, order)
                for line, order in orders
                if isinstance(order, TensorOrder)
                and isinstance(line, PipeLine)
                and line.takes(order)
            ]
            # a long message from another host takes longer than it takes to be woken
            far = all(isinstance(line, Line) and line.lends is False for line, _ in orders)
            awake = 0.0 if far or take_all(swift, _FEW_LOOKS) else _AWAKE
            for number, (line, order) in enumerate(orders):
                if not order.done:
                    self._move(line)  # it may be there already
                if not order.done:
                    at(number)
                while not order.done:
                    self._go_on((line,), until, awake)

    def finish_any(
        self, posted: Sequence[Sequence[Posted]], limit: float, at: Callable[[int], None]
    ) -> None:
        """Move messages until all that were posted together at one time are through.

        Args:
            posted: what `post` returned, each time.
            limit: seconds after which to give up.
            at: told the number of the message of the first time that is waited for.

        Raises:
            Lost: as `finish`.
        """
        until = time.monotonic() + limit
        with self._turn:
            while True:
                left = [[line for line, order in orders if not order.done] for orders in posted]
                if not all(left):
                    return
                at(next(number for number, (_, order) in enumerate(posted[0]) if not order.done))
                self._go_on(itertools.chain(*left), until, _AWAKE)

    def _go_on(self, lines: Iterable[Line | SmallLine], until: float, awake: float) -> None:
        """Move something that can be moved, or wait for it, while these lines are waited for.

        Raises:
            Lost: one of them is lost, or the time has come.
        """
        remaining = until - time.monotonic()
        for line in lines:
            if self._closed or line.lost or remaining <= 0:
                raise Lost(self._why(line))
        if self._changed:
            self._tend()  # after which nothing may be left to wait for
        else:
            self._step(remaining, awake)

    def advance(self) -> None:
        """Move what can be moved now; nothing, if another thread is about that."""
        if self._turn.acquire(blocking=False):
            try:
                if not self._closed:
                    self._tend()
                    self._step(0.0)
            finally:
                self._turn.release()

    def over(self, orders: Iterable[Posted]) -> bool:
        """Whether `finish` has nothing to do."""
        return all(order.done for _, order in orders)

    def arrived(self, orders: Iterable[Posted]) -> list[bool]:
        """Which of these are through, as far as is known while somebody waits."""
        return [order.done for _, order in orders]

    def _why(self, line: Line | SmallLine) -> str:
        """Why a wait for a message on that line is over."""
        if self._failed is not None:
            return f"the thread that moves its bytes failed: {self._failed!r}"
        if line.lost:
            return line.lost
        return "the connection is closed" if self._closed else "it did not come in time"

    def _tend(self) -> None:
        """See to the lines that changed: all that they can send now is sent."""
        while self._changed:
            line = self._changed.popitem()[1]
            line.flush()
            self._watch(line)

    def _step(self, seconds: float, awake: float = _AWAKE) -> None:
        """Wait until something can be moved, for so long at most, and move it."""
        more = list(self._more.values())
        for fd, event in self._look() if more else self._ready(seconds, awake):
            ready = self._by_fd[fd]
            if event and fd in self._pipes:
                self._pipes[fd].hear()
            self._move(ready)
        for line in more:
            if line.fd in self._more:
                self._move(line)

    def _look(self, seconds: float = 0.0) -> list[tuple[int, int]]:
        """What something can be moved on, or a socket has news of; waits so long for the latter."""
        stirs = [(fd, 0) for fd, line in self._pipes.items() if line.stirs]
        return stirs or self._poll.poll(seconds * 1e3)

    def _ready(self, seconds: float, awake: float) -> list[tuple[int, int]]:
        """Wait until something can be moved on a line: awake at first, then asleep.

        The peers of a collective call come within moments of each other, and waking a process costs
        more than many looks. Between two of these whoever else wants the core has it.
        """
        now = time.monotonic()
        until = now + min(seconds, awake)
        ready = self._look()
        while not ready and now < until:
            os.sched_yield()
            ready = self._look()
            now = time.monotonic()
        if ready or seconds <= 0:
            return ready
        for line in self._pipes.values():
            line.sleep()
        try:
            return self._look(seconds)
        finally:
            for line in self._pipes.values():
                line.wake()

    def _move(self, line: Line | SmallLine) -> None:
        """Move what can be moved on a line. What it reads may allow it to write.

        Small messages come and go in a moment, so what their lines wait for is only looked at when
        somebody is about to wait.
        """
        if isinstance(line, SmallLine):
            line.receive()
            if line.unsent:
                line.flush()
            self._changed[line.fd] = line
            return
        line.receive()
        if line.more:
            self._more[line.fd] = line
        else:
            self._more.pop(line.fd, None)
        line.flush()
        self._watch(line)

    def _watch(self, line: Line | SmallLine) -> None:
        """Wait for what the line waits for; a socket that is lost would never rest."""
        fd, wanted = line.fd, line.wanted
        if wanted == self._polled.get(fd, 0):
            return
        if wanted:
            self._poll.register(fd, wanted)
        else:
            self._poll.unregister(fd)
        self._polled[fd] = wanted

    def _rouse(self) -> None:
        """Have the thread look in."""
        self._stir.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_in, name="weft mover", daemon=True)
            self._thread.start()

    def _look_in(self) -> None:
        ticks = 1
        try:
            while True:
                self._stir.wait()
                if self._closed:
                    return
                time.sleep(ticks * _TICK)
                if not self._turn.acquire(blocking=False):
                    ticks = min(2 * ticks, _TICKS)  # somebody waits, and moves everything
                    continue
                ticks = 1
                try:
                    if not self._closed:
                        self._tend()
                        self._step(0.0)
                        # a collection of garbage may have closed it, here in this very thread
                        if not (self._closed or any(line.busy for line in self.lines.values())):
                            self._stir.clear()
                finally:
                    self._turn.release()
        except BaseException as error:  # whoever waits next shall hear of it
            self._failed = error
            self.cut()
            raise

    def cut(self) -> None:
        """End all waits, here and at the peers'; any thread may call it."""
        self._guard.wipe()
        self._shut()

    def _shut(self) -> None:
        for line in self._all:
            with contextlib.suppress(OSError):  # its other end is gone already, or it is closed
                line.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets, which ends all waits. What was sent still arrives. Twice is fine."""
        if not self._turn.acquire(timeout=_LEFT):
            self._guard.wipe(arena=False)
            self._shut()  # somebody waits, or is about to
            self._turn.acquire()
        try:
            for line in () if self._closed else self._all:
                line.receive()  # what lies there unread would undo what is on its way to the peer
            for pipe in self._pipes.values():
                pipe.hear()
        finally:
            self._let_go()
            self._stir.set()  # with the turn, in which alone the thread goes to sleep again
            self._turn.release()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """Close the sockets in a forked child, which has no thread; one may have had the turn."""
        self._turn, self._thread, self._stir = threading.RLock(), None, threading.Event()
        self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        if self.arena is not None:
            self.arena.close()
        self._guard.wipe(arena=False)
        for bulk in self.lines.values():
            if bulk.reach is not None:
                bulk.reach.forget()
        for line in self._all:
            line.sock.close()
