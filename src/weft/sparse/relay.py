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
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..wire.base import Pending, typed
from .call import Call
from .cost import Load
from .stream import SUMS, wait_all

_AHEAD = 2  # steps whose receives are posted before they are waited for
_STEPS = _AHEAD + 3  # that have slots: chunks of the two behind may still be going out
_MOST = 24 << 20  # bytes of slots, unless rows are larger


def relay_rows(load: Load, most: float) -> int:
    """Rows in a chunk, if no rank has more than so many."""
    fair = min(load.chunk, _MOST // (_STEPS * load.ranks)) // max(1, load.row)
    return max(1, math.ceil(min(fair, most)))


def relay_memory(load: Load, most: float) -> int:
    """Bytes of slots, if no rank has more rows than so many."""
    return _STEPS * load.ranks * relay_rows(load, most) * load.row


class Relay:
    """Everybody's rows on their way to everybody, in chunks, in steps.

    Attributes:
        rows: in a chunk.
        steps: how many there are.
    """

    def __init__(self, call: Call, counts: Sequence[int]) -> None:
        """Post the first receives: so many rows, which have bytes, come from each rank."""
        self._wire, self._counts, ranks = call.wire, counts, len(counts)
        self._left, self._right = (call.wire.rank - 1) % ranks, (call.wire.rank + 1) % ranks
        self.rows = relay_rows(call.load, max(counts))
        self._chunks = -(-max(counts) // self.rows)  # of the rank with most
        self.steps = self._chunks + ranks - 2 if self._chunks else 0
        slots = _STEPS * ranks
        self._lease = call.wire.lease(slots * self.rows * call.load.row)
        shape = (slots, self.rows, *call.row_shape)
        self._slots = typed(self._lease.tensor, shape, call.dtype).unbind()
        # of each step: what comes, in its order, and what goes
        self._coming: dict[int, list[tuple[int, Tensor, Pending]]] = {}
        self._going: dict[int, list[Pending]] = defaultdict(list)
        for step in range(_AHEAD):
            self._receive(step)

    def own(self, step: int) -> Tensor | None:
        """Where this rank's rows of this step are to be written; None if it has no more."""
        return self._slot(step, 0)

    def send(self, step: int, slot: Tensor) -> None:
        """Send the own chunk, written by then, or another."""
        self._going[step].append(self._wire.post([(self._right, slot)], (), SUMS))

    def turn(self, step: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yields (origin, number of the first row, rows) of what comes, sending it on.

        The own chunk must have been sent. The rows are valid until the next is asked for. To be
        exhausted.
        """
        wait_all(self._going.pop(step - 2, ()))
        self._receive(step + _AHEAD)
        for distance, slot, pending in self._coming.pop(step):
            pending.wait()
            if distance < self._wire.size - 1:
                self.send(step + 1, slot)
            yield self._origin(distance), (step - distance + 1) * self.rows, slot

    def finish(self) -> None:
        """Wait until everything is sent on, and give back the memory."""
        for going in self._going.values():
            wait_all(going)
        self._lease.release()

    def _receive(self, step: int) -> None:
        """Post receives as the left neighbour sends: what comes from farthest first."""
        coming = self._coming[step] = []
        # of nearer ranks all is here, and of others nothing comes yet
        nearest = max(1, step - self._chunks + 2)
        for distance in range(min(step + 1, self._wire.size - 1), nearest - 1, -1):
            slot = self._slot(step, distance)
            if slot is not None:
                pending = self._wire.post((), [(self._left, slot)], SUMS)
                coming.append((distance, slot, pending))

    def _origin(self, distance: int) -> int:
        return (self._wire.rank - distance) % self._wire.size

    def _slot(self, step: int, distance: int) -> Tensor | None:
        """The memory of what comes over that distance in a step; distance 0 is the own chunk."""
        first = (step - max(0, distance - 1)) * self.rows
        count = min(self.rows, self._counts[self._origin(distance)] - first)
        if count <= 0:
            return None
        return self._slots[step % _STEPS * self._wire.size + distance][:count]
