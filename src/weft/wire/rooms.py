"""Ranks that are threads of one process: the wires of a group share a room, where messages meet.

Of a message's two ends, the one that is posted last copies the bytes, so a message is one copy, and
a send is complete only when it was received: the latest that `Wire.post` allows.

The wire is strict, for tests. What a rank must not read is garbage. A rank that changes a tensor
while it is sent, or bytes that it received by size and may only read, breaks its wire. If all ranks
wait without a limit, nothing will ever come: all of them fail as stuck, at once.

Source of the idea: gloo's own tests run their ranks as threads over an in-memory store.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import WeftError
from .interface import Failure, Features, Recv, Send, WireFailed

_GARBAGE = 0xA5  # what undefined bytes hold: not 0 or -1; in floating point small, and no NaN

Key = tuple[int, int, int]
"""(from, to, channel): the messages between two ranks on a channel, in their order."""


def room(size: int) -> list[ThreadWire]:
    """The wires of a group of `size` ranks, to be used by one thread each.

    Raises:
        WeftError: there are no ranks.

    Example:
        >>> first, second = room(2)
        >>> sent = first.post([(1, torch.tensor([1.0, 2.0]))])
        >>> second.post((), [(0, torch.empty(2))]).wait()
        [tensor([1., 2.])]
        >>> sent.wait()
        []
    """
    if size < 1:
        raise WeftError(f"a group has at least one rank, not {size}")
    shared = Room(size)
    return [ThreadWire(rank, shared) for rank in range(size)]


@dataclass(eq=False)
class _End:
    """One end of a message.

    Attributes:
        pending: whose post it is of.
        peer: the rank at the other end.
        memory: the bytes of the tensor to send or to fill; they hold its storage. None: a receive
            by size.
        limit: the most bytes that a receive takes.
        before: of a send, a copy of the bytes as they were posted.
        received: of a receive, what `wait` returns.
        is_sized: of a receive, whether it was posted by size.
    """

    pending: ThreadPending
    peer: int
    memory: Tensor | None
    limit: int = 0
    before: Tensor | None = None
    received: Tensor | None = None
    is_sized: bool = False


@dataclass(eq=False)
class _Line:
    """The ends of messages of one key that have not met: all of sends, or all of receives."""

    are_sends: bool = True
    ends: deque[_End] = field(default_factory=deque)


class Room:
    """What the ranks of a group share. Everything here is read and written with the lock held.

    Attributes:
        size: how many ranks there are.
        changed: of each rank, notified when its wait may be over; all have one lock.
        waiting: the posts that ranks wait for without a limit.
        gone: the ranks that have closed their wires.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        lock = threading.RLock()
        self.changed = [threading.Condition(lock) for _ in range(size)]
        self.waiting: dict[int, ThreadPending] = {}
        self.gone: set[int] = set()
        self._lines: dict[Key, _Line] = {}

    def add(self, end: _End, key: Key, *, is_send: bool) -> None:
        """Copy the message if its other end is here, else leave this end for the other to find."""
        line = self._lines.setdefault(key, _Line())
        if not line.ends:
            line.are_sends = is_send
        if line.are_sends == is_send:
            line.ends.append(end)
            return
        other = line.ends.popleft()
        if is_send:
            self._copy(end, other)
        else:
            self._copy(other, end)

    def _copy(self, source: _End, target: _End) -> None:
        assert source.memory is not None
        length = source.memory.numel()
        fits = length <= target.limit if target.memory is None else length == target.limit
        if not fits:
            sender, receiver = target.peer, source.peer
            takes = "at most" if target.memory is None else "exactly"
            text = (
                f"rank {sender} sent {length} bytes to rank {receiver}, whose receive takes "
                f"{takes} {target.limit}"
            )
            target.pending.wire.fail(Failure("garbled", sender, text))
            return
        if target.memory is None:
            target.memory = torch.empty(length, dtype=torch.uint8)
            target.received = target.memory
        target.memory.copy_(source.memory)
        for end in (source, target):
            end.pending.complete(end)

    def forget(self, wire: ThreadWire) -> None:
        """Copy no more from or to the memory of a rank."""
        for line in self._lines.values():
            line.ends = deque(end for end in line.ends if end.pending.wire is not wire)

    def look_for_circle(self) -> None:
        """Fail all ranks if each of them waits without a limit, and for one that waits."""
        stuck = [
            pending
            for pending in self.waiting.values()
            if not pending.is_over() and pending.wire.rank not in self.gone
        ]
        if len(stuck) < self.size - len(self.gone) or not stuck:
            return
        story = ", ".join(pending.story() for pending in stuck)
        failure = Failure("stuck", None, f"all ranks wait for each other: {story}")
        for pending in stuck:
            pending.wire.fail(failure)


class ThreadWire:
    """One rank's end of a group that `room` makes; a `weft.wire.interface.Wire`."""

    def __init__(self, rank: int, shared: Room) -> None:
        self.rank = rank
        self.size = shared.size
        self.device = torch.device("cpu")
        self.features = Features()
        self.room = shared
        self.changed = shared.changed[rank]
        self._failure: Failure | None = None
        self._is_closed = False

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> ThreadPending:
        pending = ThreadPending(self)
        with self.changed:
            self.check()
            for peer, into in recvs:
                end = pending.add_receive(peer, into)
                self.room.add(end, (peer, self.rank, channel), is_send=False)
            for peer, tensor in sends:
                end = pending.add_send(peer, tensor)
                self.room.add(end, (self.rank, peer, channel), is_send=True)
        return pending

    def lease(self, nbytes: int) -> None:
        """Any memory is as good: None."""
        return None

    def abort(self, failure: Failure) -> None:
        with self.changed:
            self.fail(failure)

    def failure(self) -> Failure | None:
        return self._failure

    def close(self) -> None:
        with self.changed:
            if self._is_closed:
                return
            self._is_closed = True
            # what was sent and waited for has been copied already
            self.fail(Failure("aborted", None, f"rank {self.rank} has closed its wire"))
            self.room.gone.add(self.rank)
            for condition in self.room.changed:
                condition.notify_all()
            self.room.look_for_circle()

    def fail(self, failure: Failure) -> None:
        """Fail with this, unless the wire has failed already; with the lock held."""
        if self._failure is None:
            self._failure = failure
            self.room.forget(self)
        self.changed.notify_all()

    def check(self) -> None:
        """Raise WireFailed if the wire has failed; with the lock held."""
        if self._failure is not None:
            raise WireFailed(self._failure)


class ThreadPending:
    """The messages of one post; a `weft.wire.interface.Pending`.

    Attributes:
        wire: whose post it is.
    """

    def __init__(self, wire: ThreadWire) -> None:
        self.wire = wire
        self._open: list[_End] = []
        self._receives: list[_End] = []
        self._sends: list[_End] = []
        self._views: list[tuple[Tensor, Tensor]] = []  # what came by size, and a copy of it

    def add_receive(self, peer: int, into: Tensor | int) -> _End:
        """An end that takes a message from a peer."""
        if isinstance(into, int):
            end = _End(self, peer, None, into, is_sized=True)
        else:
            memory = _bytes_of(into)
            memory.fill_(_GARBAGE)
            end = _End(self, peer, memory, memory.numel(), received=into)
        self._receives.append(end)
        self._open.append(end)
        return end

    def add_send(self, peer: int, tensor: Tensor) -> _End:
        """An end that gives a message to a peer."""
        memory = _bytes_of(tensor)
        end = _End(self, peer, memory, before=memory.clone())
        self._sends.append(end)
        self._open.append(end)
        return end

    def complete(self, end: _End) -> None:
        """One message of the post has been copied; with the lock held."""
        self._open.remove(end)
        if not self._open:
            self.wire.changed.notify_all()

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        wire = self.wire
        with wire.changed:
            # a lost peer, and a circle of waits, end it, too
            if not self._is_over_within(timeout):
                raise TimeoutError
            if self._open:
                self._fail_if_lost()
                wire.check()
            self._check_sent()
            self._keep_copies()
        received = [end.received for end in self._receives]
        return [tensor for tensor in received if tensor is not None]

    def wait_stream(self) -> list[Tensor]:
        return self.wait()

    def done(self) -> bool:
        with self.wire.changed:
            return self.is_over()

    def waiting_for(self) -> list[int]:
        with self.wire.changed:
            return sorted({end.peer for end in self._open})

    def release(self) -> None:
        wire = self.wire
        with wire.changed:
            for view, before in self._views:
                if not torch.equal(view, before):
                    text = (
                        f"rank {wire.rank} wrote to bytes that it had received, which may be the "
                        "sender's own"
                    )
                    wire.fail(Failure("broken", wire.rank, text))
                view.fill_(_GARBAGE)
            self._views.clear()

    def is_over(self) -> bool:
        """Whether a wait would return or raise at once; with the lock held."""
        gone = self.wire.room.gone
        is_failed = self.wire.failure() is not None
        return not self._open or is_failed or any(end.peer in gone for end in self._open)

    def story(self) -> str:
        """What this rank waits for."""
        peers = " and ".join(f"rank {peer}" for peer in sorted({end.peer for end in self._open}))
        return f"rank {self.wire.rank} awaits {peers}"

    def _is_over_within(self, timeout: float | None) -> bool:
        """Wait until it is over, or for `timeout` seconds."""
        wire = self.wire
        if timeout is not None:
            return wire.changed.wait_for(self.is_over, timeout)
        wire.room.waiting[wire.rank] = self
        try:
            while not self.is_over():
                wire.room.look_for_circle()
                if not self.is_over():
                    wire.changed.wait()
        finally:
            del wire.room.waiting[wire.rank]
        return True

    def _fail_if_lost(self) -> None:
        lost = next((end.peer for end in self._open if end.peer in self.wire.room.gone), None)
        if lost is not None:
            self.wire.fail(Failure("lost", lost, f"rank {lost} has closed its wire"))

    def _check_sent(self) -> None:
        """Break the wire if a tensor has changed while it was sent."""
        rank = self.wire.rank
        for end in self._sends:
            assert end.memory is not None and end.before is not None
            if not torch.equal(end.memory, end.before):
                text = (
                    f"rank {rank} changed a tensor that it was sending to rank {end.peer}, before "
                    "it had waited for it"
                )
                self.wire.fail(Failure("broken", rank, text))
                self.wire.check()
        self._sends.clear()

    def _keep_copies(self) -> None:
        """Copy what came by size, to see later whether this rank wrote to it."""
        if not self._views:
            views = [end.received for end in self._receives if end.is_sized]
            self._views = [(view, view.clone()) for view in views if view is not None]


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor; they hold its storage, whatever becomes of the tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)
