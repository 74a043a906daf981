"""split of a list of tables among ranks of one host, by reading alone: two rounds and no header.

Ranks that can read each other's memory need not describe their rows. Each says in its statement
where its keys and its rows lie. Everybody reads everybody's keys, from which all compute the same
cuts, and the rows of what it owns; then tells where its sums are, reads the others', and says that
it has. So nothing is sampled, estimated or chosen, and the opening is followed by two small
exchanges where `split` otherwise needs three (`near`).

Rows that are few came in the statement itself, and are taken from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..kernels.lists import List, cut, moved
from ..wire.base import Wire, as_bytes
from ..wire.memory import fresh
from .call import Call
from .mixed import Extents, Merge, Stacked, widened
from .near import lent_of, read_all, say_read, told
from .space import Space
from .tables import HIGHEST, ROWS, Tables

__all__ = ["CHUNK", "NAME", "lends", "pause", "split"]

NAME = "split"
"""What it is in records: the same owners, messages and sums, described by another opening."""

_MOST = 16 << 20  # bytes of a rank's rows; for more a header, by which to choose, costs little
_PAUSE = 64  # openings of all calls until ranks that could not all lend try it again
CHUNK = 1 << 22
"""Bytes of rows that are merged at once."""

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


class _There:
    """A part of a peer's rows, read as far as it is asked for."""

    def __init__(self, wire: Wire, peer: int, address: int, memory: Tensor) -> None:
        self._wire, self._peer, self._address, self._memory = wire, peer, address, memory
        self._here = 0

    def come(self, nbytes: int) -> None:
        """Read so many bytes, less those that were read before."""
        if nbytes > self._here:
            piece = self._memory[self._here : nbytes]
            read_all(self._wire, self._peer, self._address + self._here, piece)
            self._here = nbytes


def split(
    values: Tensor, keys: Tensor, everyone: Sequence[Tables], call: Call, space: Space
) -> Stacked:
    """The sums of all ranks' rows.

    Args:
        values: the bytes of this rank's rows, as they travel.
        keys: where they belong, in the space of keys of this rank alone.
        everyone: what each rank said.
        call: with a load, of which the size of chunks matters.
        space: the keys of all ranks.
    """
    wire, me, peers, stacks = call.wire, call.wire.rank, call.wire.peers, space.stacks
    order = range(wire.size)
    lists = [_list_of(wire, rank, keys, said, space) for rank, said in enumerate(everyone)]
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
    given = [values if rank == me else everyone[rank].values for rank in order]
    come = [0 if given[rank] is not None else extents[rank].bytes[-1] for rank in order]
    starts = [0, *accumulate(-(-size // 8) * 8 for size in come)]
    merge = Merge(call, stacks, runs, extents)
    with wire.lease(starts[-1]) as memory, wire.lease(merge.extents.bytes[-1]) as sums:
        streams: list[Tensor] = []
        comes: list[Callable[[int], None] | None] = []
        for rank, (low, high) in enumerate(spans):
            own, lent = given[rank], everyone[rank].lent
            if own is not None:
                streams.append(own[low:high])
                comes.append(None)
                continue
            assert lent is not None
            stream = memory[starts[rank] : starts[rank] + come[rank]]
            streams.append(stream)
            comes.append(_There(wire, rank, lent[1] + low, stream).come)
        for _ in merge.into(sums, streams, comes):
            pass

        summed = told(wire, dict.fromkeys(peers, lent_of(True, merge.keys, sums)))
        wire.count([(peer, each) for peer in peers for each in (merge.keys, sums)])
        counts = [merge.keys.numel() if rank == me else summed[rank].rows for rank in order]
        places = [0, *accumulate(counts)]
        result = torch.empty(places[-1], dtype=space.index)
        for rank, (low, high) in enumerate(pairwise(places)):
            if rank == me:
                result[low:high] = merge.keys
            else:
                read_all(wire, rank, summed[rank].indices, as_bytes(result[low:high]))
        whole = Extents(result, stacks)
        out = fresh((whole.bytes[-1],), torch.uint8)
        for rank, (low, high) in enumerate(pairwise(map(whole.at, places))):
            if rank == me:
                out[low:high] = sums
            else:
                read_all(wire, rank, summed[rank].values, out[low:high])
        say_read(wire)
    return widened(Stacked(result, out), stacks)


def _list_of(wire: Wire, rank: int, own: Tensor, said: Tables, space: Space) -> List:
    """The keys of a rank's rows: read, if they did not come along."""
    numbers = said.numbers[space.tables]
    rows, heights = numbers[:, ROWS], numbers[:, HIGHEST] + 1
    if said.lent is None:
        shift = np.repeat(np.cumsum(heights) - heights, rows)
        keys = said.own_indices() + torch.from_numpy(shift)
    elif rank == wire.rank:
        keys = own
    else:
        keys = torch.empty(int(rows.sum()), dtype=torch.int64)
        read_all(wire, rank, said.lent[0], as_bytes(keys))
    return List(keys, rows, heights)


def _bytes_before(one: List, space: Space, rows: Sequence[int]) -> list[int]:
    """Bytes of a list's rows before each of these."""
    if len(space.stacks) == 1:
        return [row * space.stacks[0].row for row in rows]
    ends, sizes = np.cumsum(one.rows), space.row[space.tables]
    return [int((np.diff(ends.clip(max=row), prepend=0) * sizes).sum()) for row in rows]
