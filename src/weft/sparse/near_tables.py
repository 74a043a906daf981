"""split of a list of tables among ranks of one host, by reading alone: two rounds and no header.

Ranks that can read each other's memory need not describe their rows. Each says in its statement
where its keys and its rows lie. Everybody reads everybody's keys, from which all compute the same
cuts, and the rows of what it owns; then tells where its sums are and reads the others'. So nothing
is sampled, estimated or chosen, and the opening is followed by one small exchange where `split`
otherwise needs three (`near`).

Rows and sums are leased from the arena of the wire (`weft.wire.arena`). Who maps that adds rows
where they lie, and need not say that it has read the sums: they stay until all have spoken in
a later call. Others say so in a second exchange. A large result is made in common, in two exchanges
and without reading sums (`weft.wire.common`).

Rows that are few came in the statement itself, and are taken from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels import lent
from ..kernels.lists import List, cut, moved
from ..wire.base import Wire, as_bytes
from ..wire.common import Common, begun
from ..wire.memory import fresh, typed
from .call import Call, partial_dtype
from .mixed import Extents, Merge, Stacked, widened
from .near import say_read, staying, told
from .space import Space
from .tables import HIGHEST, ROWS, Tables

__all__ = ["NAME", "lends", "pause", "split"]

NAME = "split"
"""What it is in records: the same owners, messages and sums, described by another opening."""

_MOST = 16 << 20  # bytes of a rank's rows; for more a header, by which to choose, costs little
_PAUSE = 64  # openings of all calls until ranks that could not all lend try it again
_PIECE = 1 << 18  # bytes of rows that are read at once, to be added while they are in the cache

_Source = Tensor | int
"""The bytes of a rank's rows, or where they lie in its memory."""

_resting: WeakKeyDictionary[Wire, int] = WeakKeyDictionary()


def lends(wire: Wire, nbytes: int) -> bool:
    """Whether this rank can lend rows of so many bytes to all others."""
    return (
        wire.size > 1
        and wire.near
        and nbytes <= _MOST
        and wire.sequence >= _resting.get(wire, 0)
        and all(map(wire.lends, wire.peers))
    )


def pause(wire: Wire) -> None:
    """Not all ranks lend, which all of them know: open the next calls with headers."""
    _resting[wire] = wire.sequence + _PAUSE


def split(
    values: Tensor, keys: Tensor, everyone: Sequence[Tables], call: Call, space: Space
) -> Stacked:
    """The sums of all ranks' rows.

    Args:
        values: the bytes of this rank's rows, as they travel.
        keys: where they belong, in the space of keys of this rank alone.
        everyone: what each rank said.
        call: what every rank knows of it.
        space: the keys of all ranks.
    """
    wire, me, peers, stacks = call.wire, call.wire.rank, call.wire.peers, space.stacks
    lists = _lists(wire, keys, everyone, space)
    sizes = None if len(stacks) == 1 else space.row[space.tables]
    ranges = cut(lists, space.starts, sizes)
    if everyone[me].lent is not None:  # what the owners of its rows read here
        ends = _bytes_before(lists[me], space, ranges[me])
        wire.count([(peer, keys) for peer in peers])
        wire.count([(peer, values[ends[peer] : ends[peer + 1]]) for peer in peers])
    runs, spans = [], []
    for one, ends in zip(lists, ranges, strict=True):
        first, last = ends[me : me + 2]
        runs.append(moved(one, space.starts, first, last, space.index))
        spans.append(_bytes_before(one, space, (first, last)))
    extents = [Extents(run, stacks) for run in runs]
    merge = Merge(call, stacks, runs, extents)
    sources: list[_Source] = []
    for rank, (low, high) in enumerate(spans):
        here = values if rank == me else everyone[rank].values
        address = (everyone[rank].lent or (0, 0))[1] + low
        sources.append(address if here is None else here[low:high])
    adds = _Adds(call, merge, sources, extents)
    wire.memory.reclaim()  # all have spoken since they read what was lent in a call before
    most = sum(int((said.numbers[:, ROWS] * (space.row + 8)).sum()) for said in everyone)
    common = begun(wire, most, (as_bytes(merge.keys).numel(), merge.extents.bytes[-1]))
    found = _read(adds, space) if common is None else _made(adds, space, common)
    return widened(found, stacks)


def _made(adds: _Adds, space: Space, common: Common) -> Stacked:
    """The sums of all, which each owner writes where all ranks have them."""
    with common:
        keys, sums = common.mine
        keys.copy_(as_bytes(adds.merge.keys))
        adds.write(sums)
        adds.count(sums)
        common.finish()
        return Stacked(common.whole(0).view(space.index).clone(), common.own(1))


def _read(adds: _Adds, space: Space) -> Stacked:
    """The sums of all, each owner's read where they lie."""
    call, merge = adds.call, adds.merge
    wire, me, peers, stacks = call.wire, call.wire.rank, call.wire.peers, space.stacks
    size = merge.extents.bytes[-1]
    keys_at = -(-size // 8) * 8
    lease = wire.lease(keys_at + as_bytes(merge.keys).numel(), lent=True)
    try:
        memory = lease.tensor
        sums, keys = memory[:size], typed(memory, tuple(merge.keys.shape), space.index, keys_at)
        keys.copy_(merge.keys)
        adds.write(sums)
        adds.count(sums)
        said = staying(wire, keys, sums)
        summed = told(wire, said)
        counts = [
            merge.keys.numel() if rank == me else summed[rank].rows for rank in range(wire.size)
        ]
        places = [0, *accumulate(counts)]
        result = torch.empty(places[-1], dtype=space.index)
        spots = [result[low:high] for low, high in pairwise(places)]
        spots[me].copy_(keys)
        reads = [(peer, summed[peer].indices, spots[peer]) for peer in peers]
        if len(stacks) > 1:  # whose extents depend on what these are
            wire.read_all(reads)
            reads = []
        whole = Extents(result, stacks)
        out = fresh((whole.bytes[-1],), torch.uint8)
        parts = [out[low:high] for low, high in pairwise(map(whole.at, places))]
        reads += [(peer, summed[peer].values, parts[peer]) for peer in peers]
        wire.read_all([*reads, (me, sums.data_ptr(), parts[me])])
        say_read(wire, said, summed)
    finally:
        lease.release(later=True)
    return Stacked(result, out)


def _lists(wire: Wire, own: Tensor, everyone: Sequence[Tables], space: Space) -> list[List]:
    """The keys of all ranks' rows: read, where they did not come along."""
    found: list[List] = []
    reads: list[tuple[int, int, Tensor]] = []
    for rank, said in enumerate(everyone):
        numbers = said.numbers[space.tables]
        rows, heights = numbers[:, ROWS], numbers[:, HIGHEST] + 1
        if said.lent is None:
            shift = np.repeat(np.cumsum(heights) - heights, rows)
            keys = said.own_indices() + torch.from_numpy(shift)
        elif rank == wire.rank:
            keys = own
        else:
            keys = torch.empty(int(rows.sum()), dtype=torch.int64)
            reads.append((rank, said.lent[0], keys))
        found.append(List(keys, rows, heights))
    wire.read_all(reads)
    return found


class _Adds:
    """What is to be added up at an owner.

    Attributes:
        call: what every rank knows of it.
        merge: where rows of ranks belong among the sums.
    """

    def __init__(
        self, call: Call, merge: Merge, sources: Sequence[_Source], extents: Sequence[Extents]
    ) -> None:
        self.call, self.merge = call, merge
        self._sources, self._extents = sources, extents

    def write(self, sums: Tensor) -> None:
        """The sums of all stacks."""
        for number in range(len(self.merge.stacks)):
            self._stack(number, sums)

    def count(self, sums: Tensor) -> None:
        """Count them as sent: the peers read them."""
        wire = self.call.wire
        wire.count([(peer, each) for peer in wire.peers for each in (self.merge.keys, sums)])

    def _stack(self, number: int, sums: Tensor) -> None:
        """Add up the rows of one stack, in the order of ranks, in its part of `sums`."""
        call, merge = self.call, self.merge
        wire, stack, union = call.wire, merge.stacks[number], merge.unions[number]
        total = stack.typed(sums, union.indices.numel(), merge.extents.bytes[number])
        partial = partial_dtype(call.op, stack.dtype, stack.wide)
        wider = total.numel() * partial.itemsize if partial != stack.dtype else 0
        with wire.lease(max(_PIECE, stack.row)) as scratch, wire.lease(wider) as memory:
            into = typed(memory, tuple(total.shape), partial) if wider else total
            for rank, (source, extent) in enumerate(zip(self._sources, self._extents, strict=True)):
                slots, start = union.slots[rank], extent.bytes[number]
                count = slots.numel() if stack.row else 0
                if isinstance(source, Tensor):
                    rows = stack.typed(source, slots.numel(), start)
                    kernels.combine(into, slots, rows, call.op)
                    continue
                at, done = source + start, None
                lender = wire.lender(rank) if into is total and count else None
                if lender is not None:
                    done = lent.combine(into, slots, lender, at, call.op, scratch)
                if done is False:
                    wire.unread(rank, scratch)
                step = scratch.numel() // max(1, stack.row)
                for first in range(0, count, step) if done is None else ():
                    rows = stack.typed(scratch, min(step, count - first), 0)
                    wire.read_all([(rank, at + first * stack.row, rows)])
                    kernels.combine(into, slots[first : first + step], rows, call.op)
            if into is not total or call.divisor != 1:
                kernels.finish(into, total, call.divisor)


def _bytes_before(one: List, space: Space, rows: Sequence[int]) -> list[int]:
    """Bytes of a list's rows before each of these."""
    if len(space.stacks) == 1:
        return [row * space.stacks[0].row for row in rows]
    ends, sizes = np.cumsum(one.rows), space.row[space.tables]
    return [int((np.diff(ends.clip(max=row), prepend=0) * sizes).sum()) for row in rows]
