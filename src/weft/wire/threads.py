"""Ranks that are threads of one process: for tests, and to try things without starting anything.

The wires of a group share a room. The rank that posts the second end of a message copies it, so a
message is one copy, and a send is complete only when it was received: the latest that `Wire.post`
allows. If all ranks wait without a limit, nothing will ever come: all of them fail as stuck, at
once. They have no meetings: calls open in messages, as between hosts.

The wire is strict. What a rank must not read is garbage. A rank that changes a tensor while it is
sent, or bytes that it received by size and may only read, breaks its wire.

Source of the idea: gloo's own tests run their ranks as threads over an in-memory store.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.latch import NAP
from ..base.memory import fault_of, memory_of
from .interface import Failure, Recv, Send, WireFailed

_GARBAGE = 0xA5  # what undefined bytes hold: not 0 or -1; in floating point small, and no NaN

Bytes = NDArray[np.uint8]

Key = tuple[int, int, int]
"""(from, to, channel): the messages between two ranks on a channel, in their order."""


@dataclass(eq=False, slots=True)
class End:
    """One end of a message.

    Attributes:
        pending: whose post it is of.
        peer: the rank at the other end.
        is_send: whether it gives the message.
        nbytes: of the message to send, or of the tensor to fill, or the most that may come.
        is_sized: of a receive, whether it was posted by size.
        memory: of the tensor, whose storage it holds; of a receive by size, of what came.
        received: of a receive, what `wait` returns.
        has_met: whether the other end was posted, too, and the bytes were copied.
    """

    pending: ThreadPending
    peer: int
    is_send: bool
    nbytes: int
    is_sized: bool = False
    memory: Bytes | None = None
    received: Tensor | None = None
    has_met: bool = False

    def __str__(self) -> str:
        if self.is_send:
            return f"rank {self.peer} to take {self.nbytes} bytes"
        most = "up to " if self.is_sized else ""
        return f"{most}{self.nbytes} bytes from rank {self.peer}"


class Room:
    """What the ranks of a group share. Everything here is read and written with the lock held.

    Attributes:
        size: how many ranks there are.
        lock: entered by itself: that of a condition is Python, and may stay held by an interrupt.
        changed: of each rank, notified when its wait may be over; all have that lock.
        waiting: the posts that ranks wait for, those that are complete left out.
        gone: the ranks that have closed their wires.
        has_failed: whether a wire failed before it was closed.
        unmet: the ends of messages whose other ends are not here: for a key, all of sends or all of
            receives.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.changed = [threading.Condition(self.lock) for _ in range(size)]
        self.waiting: dict[int, ThreadPending] = {}
        self.gone: set[int] = set()
        self.has_failed = False
        self.unmet: dict[Key, deque[End]] = {}

    def add(self, end: End, key: Key) -> None:
        """Copy the message if its other end is here, else leave this end for the other to find."""
        if end.pending.wire.failure() is not None:
            return  # an end before it in this post failed: nobody may write to memory any more
        ends = self.unmet.get(key)
        if ends is None:
            self.unmet[key] = deque([end])
            return
        if ends[0].is_send == end.is_send:
            ends.append(end)
            return
        other = ends.popleft()
        if not ends:
            del self.unmet[key]
        if end.is_send:
            self.copy(end, other)
        else:
            self.copy(other, end)

    def copy(self, source: End, target: End) -> None:
        """Copy a message, whose length has to fit its receive."""
        length = source.nbytes
        fault = fault_of(length, target.nbytes, is_sized=target.is_sized)
        if fault:
            text = f"rank {target.peer} sent {fault}"
            target.pending.wire.fail(Failure("garbled", target.peer, text))
            return
        if target.is_sized:
            target.received = torch.empty(length, dtype=torch.uint8)
            target.memory = target.received.numpy()
        assert source.memory is not None and target.memory is not None
        target.memory[:] = source.memory
        for end in (source, target):
            end.has_met = True
            end.pending.complete()

    def forget(self, wire: ThreadWire) -> None:
        """Copy no more from or to the memory of a rank."""
        for key, ends in list(self.unmet.items()):
            others = deque(end for end in ends if end.pending.wire is not wire)
            if others:
                self.unmet[key] = others
            else:
                del self.unmet[key]

    def fail_if_all_wait(self) -> None:
        """Fail those that wait if nobody else is left, and none of their waits will end.

        It is called when a rank begins to wait, and when one has left.
        """
        if len(self.waiting) < self.size - len(self.gone) or self._may_go_on():
            return
        stuck = [self.waiting[rank] for rank in sorted(self.waiting)]
        story = ", ".join(pending.story() for pending in stuck)
        failure = Failure("stuck", None, f"all ranks wait for each other: {story}")
        for pending in stuck:
            pending.wire.fail(failure)

    def _may_go_on(self) -> bool:
        """Whether one of the waits will end.

        Once a wire has failed that is so: the others are told by their group or, as that wire is
        closed, it is lost for those that wait for it, and so on.
        """
        if self.has_failed:
            return True
        return any(pending.has_limit or pending.is_over() for pending in self.waiting.values())


def thread_wires(size: int) -> list[ThreadWire]:
    """The wires of a group of `size` ranks, to be used by one thread each.

    Example:
        >>> import torch
        >>> first, second = thread_wires(2)
        >>> sent = first.post([(1, torch.tensor([1.0, 2.0]))])
        >>> second.post((), [(0, torch.empty(2))]).wait()
        [tensor([1., 2.])]
        >>> sent.wait()
        []
    """
    room = Room(size)
    return [ThreadWire(rank, room) for rank in range(size)]


class ThreadWire:
    """One rank's end of a group that `thread_wires` makes; a `weft.wire.interface.Wire`.

    Attributes:
        room: the group's.
        lock: the room's.
        changed: notified when a wait may be over.
        thread: the one that posted last; None: nothing was posted.
    """

    def __init__(self, rank: int, room: Room) -> None:
        self.rank = rank
        self.size = room.size
        self.room = room
        self.lock = room.lock
        self.changed = room.changed[rank]
        self.thread: int | None = None
        self._process = os.getpid()
        self._failure: Failure | None = None
        self._is_closed = False
        self._parts: list[tuple[ThreadWire, Sequence[int]]] = []  # each with the ranks it is among

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> ThreadPending:
        pending = ThreadPending(self)
        self.thread = threading.get_ident()
        with self.lock:
            self.check()
            for peer, into in recvs:
                end = pending.add_receive(peer, into)
                self.room.add(end, (peer, self.rank, channel))
            for peer, tensor in sends:
                end = pending.add_send(peer, tensor)
                self.room.add(end, (self.rank, peer, channel))
        return pending

    def lease(self, nbytes: int) -> None:
        """Any memory is as good: None."""
        return None

    def abort(self, failure: Failure) -> None:
        with self.lock:
            self.fail(failure)
        for part, ranks in self._parts:
            culprit = ranks.index(failure.peer) if failure.peer in ranks else None
            text = f"the group that it is a part of broke: {failure.text}"
            part.abort(Failure("aborted", culprit, text))

    def add_part(self, part: ThreadWire, ranks: Sequence[int]) -> None:
        """Have a wire among some of the ranks be aborted with this one."""
        self._parts.append((part, ranks))

    def failure(self) -> Failure | None:
        return self._failure

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # in a forked child, where a thread that is not there may hold the lock
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            # what was sent and waited for has been copied already
            self._end(Failure("aborted", None, f"rank {self.rank} has closed its wire"))
            self.room.gone.add(self.rank)
            for rank in self.room.waiting:
                self.room.changed[rank].notify_all()
            self.room.fail_if_all_wait()

    def fail(self, failure: Failure) -> None:
        """Fail with this, unless the wire has failed already; with the lock held."""
        if self._failure is None:
            self.room.has_failed = True
        self._end(failure)

    def _end(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self.room.forget(self)
        self.room.waiting.pop(self.rank, None)
        self.changed.notify_all()

    def check(self) -> None:
        """Raise WireFailed if the wire has failed; with the lock held."""
        if self._failure is not None:
            raise WireFailed(self._failure)


class ThreadPending:
    """The messages of one post, checked for memory that must not change; a
    `weft.wire.interface.Pending`.

    Attributes:
        wire: whose post it is.
        receives: this rank's ends of the messages that it receives, in the order asked for.
        has_limit: whether the wait for it has one.
    """

    def __init__(self, wire: ThreadWire) -> None:
        self.wire = wire
        self.receives: list[End] = []
        self.has_limit = False
        self._ends: list[End] = []  # of all messages, until they are complete
        self._incomplete = 0  # messages
        self._received: list[Tensor] | None = None  # what `wait` has returned
        self._sent: list[tuple[End, Bytes, Bytes]] = []  # the bytes, and a copy of them
        self._views: list[tuple[Bytes, Bytes]] = []  # what came by size, and a copy of it

    def add_receive(self, peer: int, into: Tensor | int) -> End:
        """An end that takes a message from a peer."""
        if isinstance(into, int):
            end = End(self, peer, False, into, is_sized=True)
        else:
            memory = bytes_of(into)
            memory.fill(_GARBAGE)
            end = End(self, peer, False, len(memory), memory=memory, received=into)
        self.receives.append(end)
        self._ends.append(end)
        self._incomplete += 1
        return end

    def add_send(self, peer: int, tensor: Tensor) -> End:
        """An end that gives a message to a peer."""
        memory = bytes_of(tensor)
        end = End(self, peer, True, len(memory), memory=memory)
        self._sent.append((end, memory, memory.copy()))
        self._ends.append(end)
        self._incomplete += 1
        return end

    def complete(self) -> None:
        """One message of the post is complete; with the lock held."""
        self._incomplete -= 1
        if not self._incomplete:
            self._ends = []  # which have the memory of tensors
            wire = self.wire
            if wire.room.waiting.get(wire.rank) is self:
                del wire.room.waiting[wire.rank]
            wire.changed.notify_all()

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        if self._received is None:
            with self.wire.lock:
                if self._incomplete:
                    self._wait(timeout)
                self._check_sent()
                self._keep_what_came()
            received = [end.received for end in self.receives]
            self._received = [tensor for tensor in received if tensor is not None]
            self.receives = []  # they lead back here
        return list(self._received)

    def waiting_for(self) -> list[int]:
        with self.wire.lock:
            return sorted({end.peer for end in self._ends if not end.has_met})

    def release(self) -> None:
        """As `Pending.release`, and see whether this rank wrote to what it may only read.

        Raises:
            WireFailed: it did.
        """
        with self.wire.lock:
            while self._views:
                view, before = self._views.pop()
                was_written_to = not np.array_equal(view, before)
                view.fill(_GARBAGE)
                if was_written_to:
                    self._break("received bytes were written to, which may be the sender's own")

    def is_over(self) -> bool:
        """Whether a wait would return or raise at once; with the lock held."""
        return not self._incomplete or self.wire.failure() is not None or self._lost() is not None

    def story(self) -> str:
        """What this rank waits for, first."""
        end = next((end for end in self._ends if not end.has_met), None)
        what = "messages under way" if end is None else str(end)
        return f"rank {self.wire.rank} awaits {what}"

    def _wait(self, timeout: float | None) -> None:
        """Wait until all messages are complete; with the lock held."""
        if not self._is_over_within(timeout):
            raise TimeoutError("the messages of a post are not complete")
        lost = self._lost()
        if lost is not None:
            self.wire.fail(Failure("lost", lost, f"rank {lost} has closed its wire"))
        if self._incomplete:
            self.wire.check()

    def _lost(self) -> int | None:
        """A peer that has gone before it posted its end of a message."""
        gone = self.wire.room.gone
        if not gone:
            return None
        return next((end.peer for end in self._ends if end.peer in gone and not end.has_met), None)

    def _is_over_within(self, timeout: float | None) -> bool:
        """Wait until it is over, or for `timeout` seconds."""
        wire = self.wire
        waiting = wire.room.waiting
        until = None if timeout is None else time.monotonic() + timeout
        self.has_limit = until is not None
        waiting[wire.rank] = self
        try:
            while not self.is_over():
                wire.room.fail_if_all_wait()
                if self.is_over():
                    return True
                seconds = math.inf if until is None else until - time.monotonic()
                if seconds <= 0:
                    return self.is_over()
                # ended by a peer that posts the other end, by a failure of this wire (a close, an
                # abort, a peer that is gone, all that wait), or by the time
                wire.changed.wait(min(seconds, NAP))
        finally:
            if waiting.get(wire.rank) is self:
                del waiting[wire.rank]
        return True

    def _check_sent(self) -> None:
        """Break the wire if a tensor has changed while it was sent; with the lock held."""
        for end, memory, before in self._sent:
            if not np.array_equal(memory, before):
                text = (
                    f"a tensor that was being sent to rank {end.peer} was changed, before it was "
                    "waited for"
                )
                self._break(text)
        self._sent.clear()

    def _keep_what_came(self) -> None:
        """Copy what came by size, to see later whether this rank wrote to it."""
        for end in self.receives:
            if end.is_sized:
                assert end.memory is not None
                self._views.append((end.memory, end.memory.copy()))

    def _break(self, text: str) -> None:
        """Break the wire, and raise what broke it; with the lock held."""
        self.wire.fail(Failure("broken", self.wire.rank, text))
        self.wire.check()


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a contiguous tensor; they hold its storage, whatever becomes of the tensor."""
    return np.asarray(memory_of(tensor))
