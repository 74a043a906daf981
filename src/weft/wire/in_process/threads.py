"""Ranks that are threads of one process: for tests, and to try things without starting anything.

The wire is strict. What a rank must not read is garbage. A rank that changes a tensor while it is
sent, or bytes that it received by size and may only read, breaks its wire.

Source of the idea: gloo's own tests run their ranks as threads over an in-memory store.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..interface import Failure
from .room import Bytes, End, Room, RoomPending, RoomWire

_GARBAGE = 0xA5  # what undefined bytes hold: not 0 or -1; in floating point small, and no NaN


def thread_wires(size: int) -> list[ThreadWire]:
    """The wires of a group of `size` ranks, to be used by one thread each.

    Raises:
        ValueError: there are no ranks.

    Example:
        >>> import torch
        >>> first, second = thread_wires(2)
        >>> sent = first.post([(1, torch.tensor([1.0, 2.0]))])
        >>> second.post((), [(0, torch.empty(2))]).wait()
        [tensor([1., 2.])]
        >>> sent.wait()
        []
    """
    if size < 1:
        raise ValueError(f"a group has at least one rank, not {size}")
    room = Room(size)
    return [ThreadWire(rank, room) for rank in range(size)]


class ThreadWire(RoomWire):
    """One rank's end of a group that `thread_wires` makes; a `weft.wire.interface.Wire`."""

    def pending(self) -> ThreadPending:
        return ThreadPending(self)


class ThreadPending(RoomPending):
    """The messages of one post, checked for memory that must not change."""

    def __init__(self, wire: RoomWire) -> None:
        super().__init__(wire)
        self._sent: list[tuple[End, Bytes, Bytes]] = []  # the bytes, and a copy of them
        self._views: list[tuple[Bytes, Bytes]] = []  # what came by size, and a copy of it

    def add_receive(self, peer: int, into: Tensor | int) -> End:
        end = super().add_receive(peer, into)
        if end.memory is not None:
            end.memory.fill(_GARBAGE)
        return end

    def add_send(self, peer: int, tensor: Tensor) -> End:
        end = super().add_send(peer, tensor)
        assert end.memory is not None
        self._sent.append((end, end.memory, end.memory.copy()))
        return end

    def finish(self) -> None:
        """Break the wire if a tensor has changed while it was sent. Copy what came by size, to see
        later whether this rank wrote to it."""
        self._check_sent()
        for end in self.receives:
            if end.is_sized:
                assert end.memory is not None
                self._views.append((end.memory, end.memory.copy()))

    def _check_sent(self) -> None:
        for end, memory, before in self._sent:
            if not np.array_equal(memory, before):
                text = (
                    f"a tensor that was being sent to rank {end.peer} was changed, before it was "
                    "waited for"
                )
                self._break(text)
        self._sent.clear()

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

    def _break(self, text: str) -> None:
        """Break the wire, and raise what broke it; with the lock held."""
        self.wire.fail(Failure("broken", self.wire.rank, text))
        self.wire.check()
