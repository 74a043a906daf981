"""Rows round the ring in bounded memory: what comes is used, sent on, and its place used again.

`stream.Ring` receives rows where they stay. A `Relay` is for rows that belong elsewhere: chunks
come into slots, wait there until they are sent on, and the caller copies them out.

Every rank takes the same *steps*. In step t it sends its own chunk t; what it received from the
left in the step before, it has sent on already: chunk t-1 of its left neighbour, chunk t-2 of the
one before that, and so on. So a chunk moves one rank to the right in each step. Whatever is sent in
a step depends on steps before it alone, and so do the slots, which is why no rank waits in a
circle, however few slots there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ..wire.base import Pending, as_bytes
from ..wire.memory import Lease, typed
from .call import Call
from .cost import Load

__all__ = ["LEADS", "Relay", "relay_memory", "relay_rows"]

_AHEAD = 2  # steps whose receives are posted before they are waited for
_STEPS = _AHEAD + 3  # that have slots: chunks of the two behind may still be going out
_MOST = 24 << 20  # bytes of slots, unless rows are larger

LEADS = 4
"""Chunks of a rank that may go ahead: fewer than steps that have slots."""

_Coming = tuple[int, int, Tensor, Pending]
"""Origin, number of the first row, and where rows come to."""


def relay_rows(load: Load, most: float) -> int:
    """Rows in a chunk, if no rank has more than so many."""
    fair = min(load.chunk, _MOST // (_STEPS * load.ranks)) // max(1, load.row)
    return max(1, math.ceil(min(fair, most)))


def relay_memory(load: Load, most: float) -> int:
    """Bytes of slots, if no rank has more rows than so many."""
    return _STEPS * load.ranks * relay_rows(load, most) * load.row


class Relay:
    """Everybody's rows on their way to everybody, in chunks, in steps.

    Who has whole chunks ready before it is known how many rows come from each rank may send those
    first (`lead`); `start` comes before all else.

    Attributes:
        rows: in a chunk; known once there was a lead, or a start.
        steps: how many there are; known once started.
    """

    rows: int
    steps: int

    def __init__(self, call: Call, channel: int, ahead: int) -> None:
        """For a call whose rows have bytes, on two channels; on the second go chunks that lead."""
        wire = call.wire
        self._call, self._wire, self._channel, self._ahead = call, wire, channel, ahead
        self._left, self._right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
        self._lease: Lease | None = None
        self._leading = 0  # own chunks that went ahead
        self._led: list[_Coming] = []  # the first chunks of the left neighbour, if ahead
        # of each of the last steps: what comes, in its order, and what goes
        self._coming: list[list[_Coming]] = [[] for _ in range(_STEPS)]
        self._going: list[list[Pending]] = [[] for _ in range(_STEPS)]

    def lead(self, own: int, write: Callable[[int, Tensor], object], lefts: int) -> None:
        """Have the first chunks written, whole ones, and send them.

        Args:
            own: how many of this rank's go ahead, at most `LEADS`; the right neighbour knows.
            write: writes the chunk of that number.
            lefts: how many of the left neighbour's do.
        """
        self._take_memory(relay_rows(self._call.load, math.inf))
        for step in range(lefts):
            slot = self._slots[step * self._wire.size + 1]
            pending = self._wire.post((), [(self._left, as_bytes(slot))], self._ahead)
            self._led.append((self._left, step * self.rows, slot, pending))
        self._wire.advance()  # the neighbour hears that there is a place for them
        self._leading = own
        for step in range(own):
            slot = self._slots[step * self._wire.size]
            write(step, slot)
            pending = self._wire.post([(self._right, as_bytes(slot))], (), self._ahead)
            self._going[step].append(pending)
            self._wire.advance()

    def start(self, counts: Sequence[int]) -> None:
        """Post the first receives: so many rows come from each rank."""
        if self._lease is None:
            self._take_memory(relay_rows(self._call.load, max(counts)))
        self._counts = counts
        self._chunks = -(-max(counts) // self.rows)  # of the rank with most
        self.steps = self._chunks + self._wire.size - 2 if self._chunks else 0
        for step in range(_AHEAD):
            self._receive(step)

    def own(self, step: int) -> Tensor | None:
        """Where this rank's rows of this step are to be written; None if it has no more."""
        return self._slot(step, self._wire.rank, 0)

    def led(self, step: int) -> bool:
        """Whether the own chunk is written, and sent."""
        return step < self._leading

    def send(self, step: int) -> None:
        """Send the own chunk, written by then."""
        own = self.own(step)
        if own is not None:
            self._send(step, own)

    def turn(self, step: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yields (origin, number of the first row, rows) of what comes, sending it on.

        The own chunk must have been sent. The rows are valid until the next is asked for. To be
        exhausted.
        """
        if step >= 2:  # before that there is nothing but what went ahead
            for pending in self._going[(step - 2) % _STEPS]:
                pending.wait()
            self._going[(step - 2) % _STEPS].clear()
        self._receive(step + _AHEAD)
        for origin, first, slot, pending in self._coming[step % _STEPS]:
            pending.wait()
            if origin != self._right:
                self._send(step + 1, slot)
            yield origin, first, slot

    def finish(self) -> None:
        """Wait until everything is sent on, and give back the memory."""
        for going in self._going:
            for pending in going:
                pending.wait()
        if self._lease is not None:
            self._lease.release()

    def _take_memory(self, rows: int) -> None:
        """Get slots for chunks of so many rows."""
        self.rows, slots = rows, _STEPS * self._wire.size
        self._lease = self._wire.lease(slots * rows * self._call.load.row)
        shape = (slots, rows, *self._call.row_shape)
        self._slots = typed(self._lease.tensor, shape, self._call.dtype)

    def _receive(self, step: int) -> None:
        coming = self._coming[step % _STEPS]
        coming.clear()
        if step >= self.steps:
            return
        # as the left neighbour sends; of nearer ranks all is here, and of others nothing comes yet
        nearest = max(1, step - self._chunks + 2)
        for distance in range(min(step + 1, self._wire.size - 1), nearest - 1, -1):
            if distance == 1 and step < len(self._led):
                coming.append(self._led[step])
                continue
            origin = (self._wire.rank - distance) % self._wire.size
            slot = self._slot(step, origin, distance)
            if slot is not None:
                pending = self._wire.post((), [(self._left, as_bytes(slot))], self._channel)
                coming.append((origin, (step - distance + 1) * self.rows, slot, pending))

    def _send(self, step: int, slot: Tensor) -> None:
        pending = self._wire.post([(self._right, as_bytes(slot))], (), self._channel)
        self._going[step % _STEPS].append(pending)

    def _slot(self, step: int, origin: int, distance: int) -> Tensor | None:
        """The memory of what comes over that distance in a step; distance 0 is the own chunk."""
        first = (step - max(0, distance - 1)) * self.rows
        count = min(self.rows, self._counts[origin] - first)
        if first < 0 or count <= 0:
            return None
        return self._slots[step % _STEPS * self._wire.size + distance][:count]
