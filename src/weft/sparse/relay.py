"""Rows round the ring in bounded memory.

`stream.Ring` receives rows where they stay. A `Relay` is for rows that belong elsewhere: it
receives chunks into slots, sends them on, and the caller copies them out before a slot is used
again.

All ranks take the same *steps*, and a chunk moves one rank to the right in each. In step t a rank
sends its own chunk t. Then it receives what its left neighbour sent in step t-1, and sends that on:
chunk t-1 of the neighbour, chunk t-2 of the rank before that, and so on. So its own chunk is on the
wire while it waits for those of others, and no step waits for a message that leaves in it. What a
rank sends in a step, and which slots it uses, depends on earlier steps only. So ranks never wait
for each other in a circle, however few slots there are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Self

from torch import Tensor

from ..base.memory import typed
from ..group.channels import SUMS
from ..group.pending import Pending
from .call import Call
from .sizes import Sizes
from .stream import left_of, right_of, wait_all

_AHEAD = 2  # steps for which receives are posted ahead
_STEPS = _AHEAD + 3  # steps that have slots: two earlier steps may still be sending
_MOST = 24 << 20  # bytes of slots, unless rows are larger


def relay_rows(sizes: Sizes, most: float) -> int:
    """Rows in a chunk, if the rank with most rows has `most`."""
    fair = min(sizes.chunk, _MOST // (_STEPS * sizes.ranks)) // max(1, sizes.row)
    return max(1, math.ceil(min(fair, most)))


def relay_memory(sizes: Sizes, most: float) -> int:
    """Bytes of the slots, if the rank with most rows has `most`."""
    return _STEPS * sizes.ranks * relay_rows(sizes, most) * sizes.row


class Relay:
    """An all-gather of rows, in chunks and in steps.

    Attributes:
        rows: in a chunk.
        steps: how many there are.
    """

    def __init__(self, call: Call, counts: Sequence[int]) -> None:
        """
        Args:
            call: the call this is for; its rows have at least one byte each.
            counts: how many rows each rank sends.
        """
        longest = max(counts)
        self._call = call
        self._group = call.group
        self._counts = counts
        self.rows = relay_rows(call.sizes, longest)
        self._chunks = -(-longest // self.rows)  # of the rank with most
        self.steps = self._chunks + len(counts) - 1 if self._chunks else 0
        # by the step in which they are sent: the receives in their order, and the sends
        self._posted: dict[int, list[tuple[int, Tensor, Pending]]] = {}
        self._sent: dict[int, list[Pending]] = defaultdict(list)

    def start(self) -> Self:
        """Post the receives of the first steps."""
        slots = _STEPS * self._group.size
        self._lease = self._group.lease(slots * self.rows * self._call.sizes.row)
        shape = (slots, self.rows, *self._call.row_shape)
        self._slots = typed(self._lease.tensor, shape, self._call.dtype).unbind()
        for step in range(_AHEAD):
            self._receive(step)
        return self

    def own(self, step: int) -> Tensor | None:
        """The slot where the caller writes this rank's chunk of the step; None: it has no more."""
        return self._slot(step, 0)

    def send(self, step: int, slot: Tensor) -> None:
        """Send the chunk in a slot to the right."""
        self._sent[step].append(self._group.post([(right_of(self._group), slot)], (), SUMS))

    def turn(self, step: int) -> Iterator[tuple[int, int, Tensor]]:
        """Receive what was sent in the step before, and send it on.

        This rank's own chunk must have been sent. The caller must exhaust the iterator.

        Yields:
            (origin, number of the first row, rows); the rows are valid until the next item.
        """
        wait_all(self._sent.pop(step - 2, ()))
        self._receive(step + _AHEAD)
        for distance, slot, pending in self._posted.pop(step - 1, ()):
            pending.wait()
            if distance < self._group.size - 1:
                self.send(step, slot)
            yield self._origin(distance), (step - distance) * self.rows, slot

    def finish(self) -> None:
        """Wait until everything is sent on, and give back the memory."""
        for sent in self._sent.values():
            wait_all(sent)
        self._lease.release()

    def _receive(self, step: int) -> None:
        """Post receives of what the left neighbour sends in a step: the nearest origin first.

        These chunks come from ranks at a distance from `nearest` to `farthest`: nearer ones have no
        more, and chunks of farther ones are not that far yet.
        """
        posted = self._posted[step] = []
        nearest = max(1, step - self._chunks + 2)
        farthest = min(step + 1, self._group.size - 1)
        for distance in range(nearest, farthest + 1):
            slot = self._slot(step, distance)
            if slot is not None:
                pending = self._group.post((), [(left_of(self._group), slot)], SUMS)
                posted.append((distance, slot, pending))

    def _origin(self, distance: int) -> int:
        return (self._group.rank - distance) % self._group.size

    def _slot(self, step: int, distance: int) -> Tensor | None:
        """The slot of a chunk that is sent to here, over this distance, in a step; 0: the own."""
        first = (step - max(0, distance - 1)) * self.rows
        count = min(self.rows, self._counts[self._origin(distance)] - first)
        if count <= 0:
            return None
        return self._slots[step % _STEPS * self._group.size + distance][:count]
