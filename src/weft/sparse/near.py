"""split among ranks of one host: rows are read where they lie, and so are the sums.

Ranks that can read each other's memory (`Wire.lends`) need not send rows. Each tells every owner
where its part of them is, an owner tells everybody where its sums are, and all tell each other once
they have read them: three small messages a peer, in place of a stream of chunks with what announces
and answers it. Sums are made in leased memory that peers map (`weft.wire.arena`), so a rank that is
done may do as it likes with the result while a peer still reads.

A large result is not even read: owners write their sums where all have them (`weft.wire.common`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..rows import Rows
from ..wire import routine
from ..wire.base import Wire, as_bytes
from ..wire.common import Common, begun
from ..wire.memory import typed
from .call import Call
from .owners import parts
from .stream import Own, Source, merge_blocks

__all__ = ["Lent", "lent_of", "say_read", "split_near", "staying", "told"]

_SAID = struct.Struct("<3?5x3q")
_NOTHING = torch.empty(0, dtype=torch.uint8)
_KEPT = "near"  # the exchange in which ranks say what they lend
_MOST = 48 << 20  # bytes of sums at a rank, of which there is a copy for a moment


class Lent(NamedTuple):
    """What a rank says of rows that a peer may read.

    Attributes:
        able: every peer can read its memory.
        rows: how many.
        indices, values: where those lie.
        stays: they stay as they are and can be read until all have spoken in the next call.
        sees: the rank that says it can read so what stays of whom it says it to.
    """

    able: bool
    stays: bool
    sees: bool
    rows: int
    indices: int
    values: int


class _There:
    """A peer's rows, as a source: read block by block, each in the place of the one before."""

    def __init__(self, call: Call, peer: int, lent: Lent, memory: Tensor) -> None:
        self._call, self._peer, self._lent, self._memory = call, peer, lent, memory

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        call, row = self._call, self._call.load.row
        for first in range(start, stop, call.chunk_rows):
            count = min(call.chunk_rows, stop - first)
            piece = self._memory[: count * row]
            call.wire.read_all([(self._peer, self._lent.values + first * row, piece)])
            yield typed(piece, (count, *call.row_shape), call.dtype)


def split_near(rows: Rows, call: Call) -> Rows | None:
    """`split`, where all ranks can read each other's memory.

    Returns:
        The result, or None on every rank: not all can, or it is not worth asking.
    """
    wire, me, peers = call.wire, call.wire.rank, call.wire.peers
    load, row = call.load, call.load.row
    if not (wire.near and row and load.on_one_host):
        return None
    if load.union * row > wire.size * _MOST:
        return None

    # where each owner's part is
    indices = rows.indices.to(call.wire_index)
    part = parts(indices, call.header, wire.size)
    able = all(map(wire.lends, peers))
    mine = {peer: (indices[part[peer]], rows.values[part[peer]]) for peer in peers}
    lent = told(wire, {peer: lent_of(able, *mine[peer]) for peer in peers})
    if not (able and all(each.able for each in lent.values())):
        wire.near = False
        return None
    wire.count([(peer, each.nbytes) for peer in peers for each in mine[peer]])

    # the sums of what is owned here
    order = range(wire.size)
    runs = [
        indices[part[me]] if rank == me else _read_indices(call, rank, lent[rank]) for rank in order
    ]
    union = kernels.union(runs)
    piece = min(call.chunk_rows, max(map(len, runs))) * row
    with wire.lease(piece) as memory:
        sources: list[Source] = [
            Own(rows.values[part[me]]) if rank == me else _There(call, rank, lent[rank], memory)
            for rank in order
        ]
        adds = _Adds(call, runs, sources, union)
        most = load.total * (row + union.indices.itemsize)
        common = begun(wire, most, (as_bytes(union.indices).numel(), union.indices.numel() * row))
        return _read(adds) if common is None else _made(adds, common)


class _Adds(NamedTuple):
    """What is to be added up at an owner: of each rank its indices, and where its rows are."""

    call: Call
    runs: list[Tensor]
    sources: list[Source]
    union: kernels.Union

    def write(self, sums: Tensor) -> None:
        """Add it up, and count the sums as sent: the peers read them."""
        wire = self.call.wire
        for _ in merge_blocks(self.call, self.runs, self.sources, self.union, sums):
            pass
        sizes = self.union.indices.nbytes, sums.nbytes
        wire.count([(peer, nbytes) for peer in wire.peers for nbytes in sizes])


def _made(adds: _Adds, common: Common) -> Rows:
    """The sums of all, which each owner writes where all ranks have them."""
    call, indices = adds.call, adds.union.indices
    with common:
        keys, sums = common.mine
        keys.copy_(as_bytes(indices))
        adds.write(typed(sums, (len(indices), *call.row_shape), call.dtype))
        common.finish()
        keys = common.whole(0).view(call.wire_index)
        shape = (len(keys), *call.row_shape)
        if call.out is None and call.wide is None:
            indices = keys.to(call.index, copy=True)
            return Rows(indices, typed(common.own(1), shape, call.dtype), call.height)
        result = call.result(len(keys))
        result.indices.copy_(keys)
        result.values.copy_(typed(common.whole(1), shape, call.dtype))
    return result


def _read(adds: _Adds) -> Rows:
    """The sums of all, each owner's read where they lie."""
    call, union = adds.call, adds.union
    wire, me, peers, row = call.wire, call.wire.rank, call.wire.peers, call.load.row
    count = union.indices.numel()
    with wire.lease(count * row, lent=True) as space:
        sums = typed(space, (count, *call.row_shape), call.dtype)
        adds.write(sums)
        said = dict.fromkeys(peers, lent_of(True, union.indices, sums))
        summed = told(wire, said)
        counts = [count if rank == me else summed[rank].rows for rank in range(wire.size)]
        result = call.result(sum(counts))
        for rank, (low, high) in enumerate(pairwise([0, *accumulate(counts)])):
            if rank == me:
                result.indices[low:high] = union.indices
                result.values[low:high] = sums
            else:
                result.indices[low:high] = _read_indices(call, rank, summed[rank])
                wire.read_all([(rank, summed[rank].values, result.values[low:high])])
        say_read(wire, said, summed)
    return result


def say_read(wire: Wire, mine: Mapping[int, Lent], theirs: Mapping[int, Lent]) -> None:
    """Tell peers that this rank has read what they lent, and hear it from those that need to say.

    None needs to whose peer lends what stays and which sees it: this rank's next statement in an
    exchange says as much, and what was lent is not written to before (`Lease.release`).
    """
    tell = [peer for peer in theirs if not (theirs[peer].stays and mine[peer].sees)]
    hear = [peer for peer in mine if not (mine[peer].stays and theirs[peer].sees)]
    if tell or hear:
        wire.post_small([(peer, _NOTHING) for peer in tell], [(peer, 0) for peer in hear]).wait()


def lent_of(able: bool, indices: Tensor, values: Tensor) -> Lent:
    """What to say of rows that are lent, and may change once all have said that they read them."""
    return Lent(able, False, False, len(indices), indices.data_ptr(), values.data_ptr())


def staying(wire: Wire, indices: Tensor, values: Tensor) -> dict[int, Lent]:
    """What to say to each peer of rows in leased memory, which is going to be released later."""
    stays = wire.stays(indices) and wire.stays(values)
    where = indices.numel(), indices.data_ptr(), values.data_ptr()
    return {peer: Lent(True, stays, wire.sees(peer), *where) for peer in wire.peers}


def told(wire: Wire, said: Mapping[int, Lent]) -> dict[int, Lent]:
    """What each peer tells this rank, which tells it what is `said`."""
    packed = {peer: _SAID.pack(*lent) for peer, lent in said.items()}
    heard = routine.told(wire, _KEPT, packed, _SAID.size)
    return {peer: Lent(*_SAID.unpack(text)) for peer, text in heard.items()}


def _read_indices(call: Call, peer: int, lent: Lent) -> Tensor:
    indices = torch.empty(lent.rows, dtype=call.wire_index)
    call.wire.read_all([(peer, lent.indices, indices)])
    return indices
