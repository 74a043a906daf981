"""dense_tail: as split, but the owners share their sums as a dense tensor.

Each rank owns an equal part of the height. It sums the rows of that part, tells everybody by a
bitmap which of them are there, and shares its part of the dense tensor, rows that are nobody's
included; the rows that are there are taken out at the end, or, if all are there, were received
where they belong. Every message of the second half has a length that is known beforehand, so
nobody waits for anybody's index list to post its receives.

Best when the sums fill nearly all of the tensor though each rank's rows do not: with w bytes of
values and i of index in a row, when U·(w + i) > V·(w + 1/8). Packed index lists leave little of
that (docs/algorithms.md has figures).

"DSAR_Split_allgather" of Renggli et al., "SparCML" (SC'19), section 5.3, here with a bitmap, since
a sum of zero is a row.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from ... import kernels
from ...kernels import meter
from ...rows import Rows
from ...wire.base import peers, typed
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows
from ..registry import algorithm
from ..stream import (
    LISTS,
    SUMS,
    Ring,
    ToOwners,
    list_messages,
    merge_blocks,
    window,
)
from .mask import unite_bytes


def cost(load: Load) -> Cost:
    others, given = load.ranks - 1, load.mean / load.ranks
    height, sums = (load.height or 0) / load.ranks, load.union / load.ranks
    asked = given * load.index_of(load.mean)
    received = others * (given * load.row + asked + height * (load.row + 1 / 8))
    # rows that are brought to their places in the table and out of it, unless all are there
    patched = 0 if load.union >= (load.height or 0) else height + sums + load.union
    return Cost(
        rounds=3 + load.hops(others, height),
        messages=others * (list_messages(asked) + 1 + load.chunks(height, load.row))
        + round(load.parted(given, load.row, others)),
        bytes=received,
        merged=load.merging(load.mean, load.pieces(given, load.ranks, sums))
        + patched * load.row
        + unite_bytes(load, load.height or 0),
        delayed=load.queue * others * (given * load.row + asked) + load.crowded(received),
        # all rows may lie in one rank's range
        memory=(height * load.ranks + load.union) * load.row
        + load.uniting(load.total, load.union)
        + min(load.total * load.row, others * window(load) * load.chunk),
    )


def too_high(load: Load) -> str | None:
    """Why a dense tensor of the load's height is out of the question, or None if it is not."""
    if load.height is None:
        return "the height is unknown"
    if load.height > max(1 << 20, 64 * load.total):
        return "the dense tensor is more than 64 times all rows"
    return None


@algorithm(cost=cost, applies=too_high)
def dense_tail(rows: LocalRows, call: Call) -> Rows:
    wire, me, others, height = call.wire, call.wire.rank, peers(call.wire), call.load.height
    assert height is not None
    order = range(wire.size)
    edges = [min(height, rank * _part(height, wire.size)) for rank in range(wire.size + 1)]
    owned = [slice(a, b) for a, b in pairwise(edges)]
    indices = rows.indices.to(call.wire_index)
    ends = torch.searchsorted(indices, indices.new_tensor(edges[1:-1])).tolist()
    part = [slice(a, b) for a, b in zip([0, *ends], [*ends, len(rows)], strict=True)]

    # rows to their owners
    moving = ToOwners(call, indices, rows.values, part, others, others)
    moving.send_rest()
    runs = [moving.runs[rank] for rank in order]
    union = kernels.union(runs)

    # which of them are there, told to all
    bitmap = torch.zeros(-(-height // 64), dtype=torch.int64)
    bits = [bitmap.view(torch.uint8)[-(-a // 8) : -(-b // 8)] for a, b in pairwise(edges)]
    there = kernels.bitmap(union.indices - edges[me], edges[me + 1] - edges[me])
    bits[me].copy_(there.view(torch.uint8)[: len(bits[me])])
    told = wire.post(
        [(peer, bits[me]) for peer in others], [(peer, bits[peer]) for peer in others], LISTS
    )
    told.wait()
    found = kernels.unite_bitmap(bitmap, union.indices).indices
    result = call.result(found.numel())
    result.indices.copy_(found)

    # sums round the ring, through a dense table unless all rows are there
    full = found.numel() == height
    with (
        wire.lease(0 if full else height * call.load.row) as memory,
        wire.lease(0 if full else union.indices.numel() * call.load.row) as scratch,
    ):
        table = result.values if full else typed(memory, (height, *call.row_shape), call.dtype)
        ring = Ring(call, {rank: table[owned[rank]] for rank in order}, SUMS)
        mine = table[owned[me]]
        shape = (union.indices.numel(), *call.row_shape)
        sums = mine if full else typed(scratch, shape, call.dtype)
        if not full:
            mine.zero_()
            meter.spend(mine.nbytes)
        sources = [moving.source(rank) for rank in order]
        at = (union.indices - edges[me]).long()
        ready = 0  # rows of this rank's part that are sent
        for start, stop in merge_blocks(call, runs, sources, union, sums):
            if not full:
                mine[at[start:stop]] = sums[start:stop]
                meter.spend(sums[start:stop].nbytes)
            done = (int(at[stop - 1]) + 1) // call.chunk_rows * call.chunk_rows
            ring.send(mine[ready:done])
            ready = done
        ring.send(mine[ready:])
        ring.finish()
        if not full:
            kernels.take(table, found, out=result.values)

    moving.finish()
    return result


def _part(height: int, ranks: int) -> int:
    """Rows that a rank owns: whole bytes of the bitmap."""
    return math.ceil(height / (8 * ranks)) * 8
