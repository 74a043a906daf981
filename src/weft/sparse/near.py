"""split among ranks of one host: rows are read where they lie, and so are the sums.

Ranks that can read each other's memory (`Wire.lends`) need not send rows. Each tells every owner
where its part of them is, an owner tells everybody where its sums are, and all tell each other once
they have read them: three small messages a peer, in place of a stream of chunks with what announces
and answers it. Sums are made in leased memory, so a rank that is done may do as it likes with the
result while a peer still reads.
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
from ..wire.base import Wire, as_bytes
from ..wire.memory import typed
from .call import Call
from .owners import parts
from .stream import Own, merge_blocks

__all__ = ["Lent", "lent_of", "read_all", "say_read", "split_near", "told"]

_SAID = struct.Struct("<?7x3q")
_MOST = 48 << 20  # bytes of sums at a rank, of which there is a copy for a moment


class Lent(NamedTuple):
    """What a rank says of rows that a peer may read.

    Attributes:
        able: every peer can read its memory.
        rows: how many.
        indices, values: where those lie.
    """

    able: bool
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
            read_all(call.wire, self._peer, self._lent.values + first * row, piece)
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
    wire.count([(peer, each) for peer in peers for each in mine[peer]])

    # the sums of what is owned here
    order = range(wire.size)
    runs = [
        indices[part[me]] if rank == me else _read_indices(call, rank, lent[rank]) for rank in order
    ]
    union = kernels.union(runs)
    count = union.indices.numel()
    piece = min(call.chunk_rows, max(map(len, runs))) * row
    with wire.lease(piece) as memory, wire.lease(count * row) as space:
        sums = typed(space, (count, *call.row_shape), call.dtype)
        sources = [
            Own(rows.values[part[me]]) if rank == me else _There(call, rank, lent[rank], memory)
            for rank in order
        ]
        for _ in merge_blocks(call, runs, sources, union, sums):
            pass

        # the result, from the sums of all
        summed = told(wire, dict.fromkeys(peers, lent_of(able, union.indices, sums)))
        wire.count([(peer, each) for peer in peers for each in (union.indices, sums)])
        counts = [count if rank == me else summed[rank].rows for rank in order]
        result = call.result(sum(counts))
        for rank, (low, high) in enumerate(pairwise([0, *accumulate(counts)])):
            if rank == me:
                result.indices[low:high] = union.indices
                result.values[low:high] = sums
            else:
                result.indices[low:high] = _read_indices(call, rank, summed[rank])
                read_all(wire, rank, summed[rank].values, as_bytes(result.values[low:high]))
        say_read(wire)
    return result


_NOTHING = torch.empty(0, dtype=torch.uint8)


def say_read(wire: Wire) -> None:
    """Tell all that this rank has read what they lent, and hear that they have."""
    peers = wire.peers
    wire.post_small([(peer, _NOTHING) for peer in peers], [(peer, 0) for peer in peers]).wait()


def lent_of(able: bool, indices: Tensor, values: Tensor) -> Lent:
    """What to say of rows that are lent."""
    return Lent(able, len(indices), indices.data_ptr(), values.data_ptr())


def read_all(wire: Wire, peer: int, address: int, into: Tensor) -> None:
    """Fill `into` from what a peer lends, or raise."""
    if into.numel() and not wire.read(peer, address, into):
        wire.unread(peer, into)


def told(wire: Wire, said: Mapping[int, Lent]) -> dict[int, Lent]:
    """What each peer tells this rank, which tells it what is `said`."""
    messages = [
        (peer, torch.frombuffer(bytearray(_SAID.pack(*lent)), dtype=torch.uint8))
        for peer, lent in said.items()
    ]
    pending = wire.post_small(messages, [(peer, _SAID.size) for peer in said])
    heard = {
        peer: Lent(*_SAID.unpack_from(message.numpy().data))
        for peer, message in zip(said, pending.wait(), strict=True)
    }
    pending.release()
    return heard


def _read_indices(call: Call, peer: int, lent: Lent) -> Tensor:
    indices = torch.empty(lent.rows, dtype=call.wire_index)
    read_all(call.wire, peer, lent.indices, as_bytes(indices))
    return indices
