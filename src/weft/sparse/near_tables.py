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

from ..wire.base import Wire, as_bytes
from ..wire.memory import fresh
from .call import Call
from .header import NO_LIMIT, Header
from .mixed import Extents, Merge, Stacked, widened
from .near import lent_of, read_all, say_read, told
from .owners import cuts
from .space import Space
from .tables import HIGHEST, ROWS, Longs, Tables

__all__ = ["CHUNK", "NAME", "lends", "pause", "split"]

NAME = "split"
"""What it is in records: the same owners, messages and sums, described by another opening."""

_MOST = 16 << 20  # bytes of a rank's rows; for more a header, by which to choose, costs little
_PAUSE = 64  # openings of all calls until ranks that could not all lend try it again
_POINTS = 128  # of each rank
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
    lists = [_List.of(wire, rank, keys, said, space) for rank, said in enumerate(everyone)]
    header = _header(lists, space)
    edges = [0, *cuts(header, wire.size, _sizes(header, space)), space.end]
    if everyone[me].lent is not None:  # what the owners of its rows read here
        ends = list(map(lists[me].bytes_before, lists[me].find(edges)))
        wire.count([(peer, keys) for peer in peers])
        wire.count([(peer, values[ends[peer] : ends[peer + 1]]) for peer in peers])
    runs, spans = [], []
    for each in lists:
        first, last = each.find(edges[me : me + 2])
        runs.append(each.part(first, last))
        spans.append((each.bytes_before(first), each.bytes_before(last)))
    extents = [Extents(run, stacks) for run in runs]
    given = [values if rank == me else everyone[rank].values for rank in order]
    sizes = [0 if given[rank] is not None else extents[rank].bytes[-1] for rank in order]
    starts = [0, *accumulate(-(-size // 8) * 8 for size in sizes)]
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
            stream = memory[starts[rank] : starts[rank] + sizes[rank]]
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
        found = Extents(result, stacks)
        out = fresh((found.bytes[-1],), torch.uint8)
        for rank, (low, high) in enumerate(pairwise(map(found.at, places))):
            if rank == me:
                out[low:high] = sums
            else:
                read_all(wire, rank, summed[rank].values, out[low:high])
        say_read(wire)
    return widened(Stacked(result, out), stacks)


class _List:
    """The keys of one rank's rows, sorted, as that rank numbers them: in a space of its own."""

    def __init__(self, keys: Longs, rows: Longs, heights: Longs, space: Space) -> None:
        self.keys, self._space = keys, space
        self._ends = np.cumsum(rows)  # of each table's rows
        self._starts = np.cumsum(heights) - heights  # of each table's keys
        self._heights = heights
        self._shift = space.starts[:-1] - self._starts

    @classmethod
    def of(cls, wire: Wire, rank: int, own: Tensor, said: Tables, space: Space) -> _List:
        """That of a rank: read, if it did not come along."""
        numbers = said.numbers[space.tables]
        rows, heights = numbers[:, ROWS], numbers[:, HIGHEST] + 1
        if said.lent is None:
            starts = np.cumsum(heights) - heights
            keys = said.own_indices().numpy() + np.repeat(starts, rows)
        elif rank == wire.rank:
            keys = own.numpy()
        else:
            into = torch.empty(int(rows.sum()), dtype=torch.int64)
            read_all(wire, rank, said.lent[0], as_bytes(into))
            keys = into.numpy()
        return cls(keys, rows, heights, space)

    def points(self) -> tuple[Longs, Longs]:
        """Keys in the space of all that cut these in equal shares, and those."""
        count = len(self.keys)
        parts = min(_POINTS, count)
        shares = np.arange(parts + 1, dtype=np.int64) * count // max(parts, 1)
        at = shares[:-1]
        return self.keys[at] + self._shift[self._ends.searchsorted(at, "right")], np.diff(shares)

    def find(self, edges: Sequence[int]) -> list[int]:
        """How many of these lie below each key of the space of all."""
        starts = self._space.starts[:-1]
        tables = starts.searchsorted(edges, "right") - 1
        into = np.minimum(edges - starts[tables], self._heights[tables])
        found: list[int] = self.keys.searchsorted(self._starts[tables] + into).tolist()
        return found

    def part(self, first: int, last: int) -> Tensor:
        """Some of these in the space of all."""
        moved = self.keys[first:last] + np.repeat(self._shift, self._rows(first, last))
        return torch.from_numpy(moved).to(self._space.index)

    def bytes_before(self, row: int) -> int:
        """Bytes of the rows before this one."""
        if len(self._space.stacks) == 1:
            return row * self._space.stacks[0].row
        return int((self._rows(0, row) * self._space.row[self._space.tables]).sum())

    def _rows(self, first: int, last: int) -> Longs:
        """Of each table the rows that are among these."""
        ends = self._ends.clip(first, last)
        rows = ends.copy()
        rows[1:] -= ends[:-1]
        rows[0] -= first
        return rows


def _header(lists: Sequence[_List], space: Space) -> Header:
    """As much of a header of all ranks' rows as cuts are computed from."""
    counts = [len(each.keys) for each in lists]
    points, weights = map(np.concatenate, zip(*(each.points() for each in lists), strict=True))
    order = np.argsort(points, kind="stable")
    return Header(
        *(sum(counts), max(counts), min(counts), space.end - 1, NO_LIMIT, 0, False, False),
        sketch=np.empty(0, np.int64),
        points=points[order],
        weights=weights[order],
    )


def _sizes(header: Header, space: Space) -> Longs | None:
    """Bytes of the row at each point; None where all are alike."""
    if len(space.stacks) == 1:
        return None
    ends = [stack.end for stack in space.stacks]
    rows = np.array([stack.row for stack in space.stacks], np.int64)
    return rows[np.searchsorted(ends, header.points, side="right")]
