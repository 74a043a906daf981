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
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ..wire.base import Lease, Pending, typed
from .call import Call
from .cost import Load

LEADS = 5
"""Chunks of a rank that may lead: on their way while the rows are shared out."""

HOPS = 2
"""Ranks that they pass on a channel of their own: the first of these sends them on before it knows
what else comes, and when."""

_AHEAD = 2  # steps whose receives are posted before they are waited for
# That have slots: chunks of the two behind may still be going out, and what leads is in the first.
_STEPS = max(_AHEAD + 3, LEADS + HOPS - 1)
_MOST = 24 << 20  # bytes of slots, unless rows are larger


class _Coming(NamedTuple):
    """Rows that come.

    Attributes:
        distance: to their rank, to the left.
        first: number of the first of them.
        slot: where they come to.
        pending: the receive.
        leads: whether they come on the channel of those that do.
    """

    distance: int
    first: int
    slot: Tensor
    pending: Pending
    leads: bool


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
    first (`lead`), and send on what its neighbour did (`pass_on`); `start` comes before all else.

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
        self._led: list[list[_Coming]] = []  # those of others that did, the nearest rank's first
        self._passed = 0  # of the nearest rank's, how many were sent on
        # of each of the last steps: what comes, in its order, and what goes
        self._coming: list[list[_Coming]] = [[] for _ in range(_STEPS)]
        self._going: list[list[Pending]] = [[] for _ in range(_STEPS)]

    def lead(self, own: int, write: Callable[[int, Tensor], object], others: Sequence[int]) -> None:
        """Have the first chunks written, whole ones, and send them.

        Args:
            own: how many of this rank's lead, at most `LEADS`; the next `HOPS` ranks know.
            write: writes the chunk of that number.
            others: how many of the last `HOPS` ranks' do, the nearest rank's first.
        """
        self._take_memory(relay_rows(self._call.load, math.inf))
        self._led = [[] for _ in others]
        coming = [(after, chunk) for after, some in enumerate(others) for chunk in range(some)]
        self._expect(coming[:1])
        self._leading = own
        for step in range(own):
            slot = self._slots[step * self._wire.size]
            write(step, slot)
            self._send(step, slot, self._ahead)
            if step == 0:
                self._expect(coming[1:])
            if step < 2:
                os.sched_yield()  # who shares this core may have sent nothing yet
        if not own:
            self._expect(coming[1:])

    def pass_on(self, count: int) -> None:
        """Send so many of the left neighbour's first chunks on, if they lead: they come at once."""
        for step, coming in enumerate(self._led[0][:count] if self._led else ()):
            if step >= self._passed and self._wire.size > 2:
                coming.pending.wait()
                self._send(step + 1, coming.slot, self._ahead)
        self._passed = max(self._passed, count)

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
            self._send(step, own, self._channel)

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
        self.pass_on(step + 1)
        for distance, first, slot, pending, leads in self._coming[step % _STEPS]:
            pending.wait()
            if distance < self._wire.size - 1 and not (leads and distance < HOPS):
                self._send(step + 1, slot, self._channel)
            yield (self._wire.rank - distance) % self._wire.size, first, slot

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
        self._slots = typed(self._lease.tensor, shape, self._call.dtype).unbind()

    def _receive(self, step: int) -> None:
        coming = self._coming[step % _STEPS]
        coming.clear()
        if step >= self.steps:
            return
        # as the left neighbour sends; of nearer ranks all is here, and of others nothing comes yet
        nearest = max(1, step - self._chunks + 2)
        for distance in range(min(step + 1, self._wire.size - 1), nearest - 1, -1):
            chunk = step - distance + 1
            led = self._led[distance - 1] if distance <= len(self._led) else ()
            if chunk < len(led):
                coming.append(led[chunk])
                continue
            slot = self._slot(step, (self._wire.rank - distance) % self._wire.size, distance)
            if slot is not None:
                coming.append(self._coming_to(slot, distance, chunk, leads=False))

    def _expect(self, some: Sequence[tuple[int, int]]) -> None:
        """Post the receives of some that lead: ranks between, and the chunk's number."""
        for after, chunk in some:
            slot = self._slots[(chunk + after) * self._wire.size + after + 1]
            self._led[after].append(self._coming_to(slot, after + 1, chunk, leads=True))

    def _coming_to(self, slot: Tensor, distance: int, chunk: int, *, leads: bool) -> _Coming:
        channel = self._ahead if leads else self._channel
        pending = self._wire.post((), [(self._left, slot)], channel)
        return _Coming(distance, chunk * self.rows, slot, pending, leads)

    def _send(self, step: int, slot: Tensor, channel: int) -> None:
        pending = self._wire.post([(self._right, slot)], (), channel)
        self._going[step % _STEPS].append(pending)

    def _slot(self, step: int, origin: int, distance: int) -> Tensor | None:
        """The memory of what comes over that distance in a step; distance 0 is the own chunk."""
        first = (step - max(0, distance - 1)) * self.rows
        count = min(self.rows, self._counts[origin] - first)
        if first < 0 or count <= 0:
            return None
        slot = self._slots[step % _STEPS * self._wire.size + distance]
        return slot if count == self.rows else slot[:count]
