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
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ... import kernels
from ...rows import Rows
from ...wire.memory import typed
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows
from ..owners import SparseReduceScatter
from ..registry import algorithm
from ..stream import LISTS, SUMS, Ring, list_messages, window


def cost(load: Load) -> Cost:
    others = load.ranks - 1
    rows = load.mean / load.ranks  # that a rank has of the part of one owner
    height = (load.height or 0) / load.ranks  # of the part of one owner
    list_of_rows = load.list_of(rows, 1 / load.ranks)
    received = others * (rows * load.incoming + list_of_rows + height * (load.row + 1 / 8))
    # rows that are taken out of the table, unless all are there
    taken = 0 if load.union >= (load.height or 0) else load.union
    return Cost(
        rounds=2 + load.hops_of_shared(height),
        messages=others * (list_messages(list_of_rows) + 1 + load.chunks(height, load.row))
        + round(load.parted(rows, load.incoming, others)),
        bytes=received,
        merged=load.merging(load.mean, load.pieces(rows, load.ranks, height))
        + taken * load.row
        + load.uniting_by_bitmap(load.height or 0),
        delayed=load.queue * others * (rows * load.incoming + list_of_rows + height / 8)
        + load.shared(height)
        + load.crowded(received),
        # all rows may lie in one rank's range
        memory=(height * load.ranks + load.union) * load.row
        + load.uniting_memory(load.total, load.union)
        + min(load.total * load.incoming, others * window(load) * load.chunk),
        recovering=load.recovering(others * rows * load.incoming, height),
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
    size = call.group.size
    height = call.load.height
    assert height is not None
    edges = [min(height, rank * _part(height, size)) for rank in range(size + 1)]
    scatter = SparseReduceScatter(call, rows, edges)

    # to the owners: index lists, and all values
    scatter.start()
    scatter.receive_lists()
    scatter.send_rest()

    # to all: which rows are there
    bitmap = _gather_bitmaps(call, scatter.union.indices, edges)
    indices = kernels.unite_bitmap(bitmap, scatter.union.indices).indices
    result = call.result_at(indices)

    # to all: the sums, through a dense table, which is the result if all rows are there; what it
    # holds in other places is taken by nobody
    is_full = len(indices) == height
    with call.group.lease(0 if is_full else height * call.load.row) as memory:
        table = result.values
        if not is_full:
            table = typed(memory, (height, *call.row_shape), call.dtype)
        _gather_sums(call, scatter, table, edges)
        if not is_full:
            kernels.take(table, indices, out=result.values)
    scatter.finish()
    return result


def _gather_bitmaps(call: Call, own: Tensor, edges: Sequence[int]) -> Tensor:
    """Send the bitmap of this rank's sums to all, and wait for theirs; a bit for each place.

    Args:
        call: the call this is for.
        own: the indices that this rank sums.
        edges: the parts of the height, see `SparseReduceScatter`.
    """
    group = call.group
    me = group.rank
    height = edges[-1]
    bitmap = torch.zeros(-(-height // 64), dtype=torch.int64)
    octets = bitmap.view(torch.uint8)
    of_ranks = [octets[-(-low // 8) : -(-high // 8)] for low, high in pairwise(edges)]
    mine = kernels.bitmap(own - edges[me], edges[me + 1] - edges[me])
    of_ranks[me].copy_(mine.view(torch.uint8)[: len(of_ranks[me])])
    sends = [(peer, of_ranks[me]) for peer in group.peers]
    recvs = [(peer, of_ranks[peer]) for peer in group.peers]
    group.post(sends, recvs, LISTS).wait()
    for peer, (low, high) in enumerate(pairwise(edges)):  # the last byte may not be used up
        if high % 8 and low < high and int(of_ranks[peer][-1]) >> high % 8:
            name = group.rank_in_errors(peer)
            raise group.fail(peer, f"rank {name} sent rows beyond the height of {height}")
    return bitmap


def _gather_sums(
    call: Call, scatter: SparseReduceScatter, table: Tensor, edges: Sequence[int]
) -> None:
    """Sum the part of the table that this rank owns, and send it to all, chunk by chunk."""
    me = call.group.rank
    parts = [table[low:high] for low, high in pairwise(edges)]
    ring = Ring(call, parts, SUMS, table.nbytes / len(parts)).start()
    union = _spread(scatter.union, edges[me], edges[me + 1])
    for start, stop in scatter.sums(call, union, parts[me]):
        ring.send(parts[me][start:stop])
    ring.finish()


def _part(height: int, ranks: int) -> int:
    """Rows that a rank owns: whole bytes of the bitmap."""
    return math.ceil(height / (8 * ranks)) * 8


def _spread(union: kernels.Union, low: int, high: int) -> kernels.Union:
    """All places from `low` up to `high` as a union; the slots are of those that it has."""
    places = (union.indices - low).int()
    slots = []
    for each in union.slots:
        flipped = each >> 31  # all bits, where a run is the first to bring an index
        slots.append(places[each ^ flipped] ^ flipped)
    return kernels.Union(torch.arange(low, high, dtype=union.indices.dtype), slots)
