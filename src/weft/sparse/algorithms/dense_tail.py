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
from ...rows import Rows
from ...wire.memory import typed
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows
from ..owners import ToOwners
from ..registry import algorithm
from ..stream import LISTS, SUMS, Ring, list_messages, window
from .mask import unite_bytes


def cost(load: Load) -> Cost:
    others, given = load.ranks - 1, load.mean / load.ranks
    height = (load.height or 0) / load.ranks
    asked = load.list_of(given, 1 / load.ranks)
    received = others * (given * load.given + asked + height * (load.row + 1 / 8))
    # rows that are taken out of the table, unless all are there
    taken = 0 if load.union >= (load.height or 0) else load.union
    return Cost(
        rounds=2 + load.hops_of_shared(height),
        messages=others * (list_messages(asked) + 1 + load.chunks(height, load.row))
        + round(load.parted(given, load.given, others)),
        bytes=received,
        merged=load.merging(load.mean, load.pieces(given, load.ranks, height))
        + taken * load.row
        + unite_bytes(load, load.height or 0),
        delayed=load.queue * others * (given * load.given + asked + height / 8)
        + load.shared(others * height * load.row)
        + load.crowded(received),
        # all rows may lie in one rank's range
        memory=(height * load.ranks + load.union) * load.row
        + load.uniting(load.total, load.union)
        + min(load.total * load.given, others * window(load) * load.chunk),
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
    group, me, others, height = call.group, call.group.rank, call.group.peers, call.load.height
    assert height is not None
    edges = [min(height, rank * _part(height, group.size)) for rank in range(group.size + 1)]
    moving = ToOwners(call, rows, edges)
    moving.send_rest()
    low, high = edges[me : me + 2]

    # which rows are there, told to all
    bitmap = torch.zeros(-(-height // 64), dtype=torch.int64)
    bits = [bitmap.view(torch.uint8)[-(-a // 8) : -(-b // 8)] for a, b in pairwise(edges)]
    there = kernels.bitmap(moving.union.indices - low, high - low)
    bits[me].copy_(there.view(torch.uint8)[: len(bits[me])])
    group.post(
        [(peer, bits[me]) for peer in others], [(peer, bits[peer]) for peer in others], LISTS
    ).wait()
    for peer, (low_end, end) in enumerate(pairwise(edges)):  # the last byte may not be used up
        if end % 8 and low_end < end and int(bits[peer][-1]) >> end % 8:
            name = group.rank_in_errors(peer)
            raise group.fail(peer, f"rank {name} sent rows beyond the height of {height}")
    found = kernels.unite_bitmap(bitmap, moving.union.indices).indices
    result = call.result_at(found)

    # sums go round the ring through a dense table, which is the result if all rows are there; what
    # it holds in other places is taken by nobody
    full = found.numel() == height
    with group.lease(0 if full else height * call.load.row) as memory:
        table = result.values if full else typed(memory, (height, *call.row_shape), call.dtype)
        owned = [table[a:b] for a, b in pairwise(edges)]
        ring = Ring(call, owned, SUMS)
        for start, stop in moving.sums(call, _spread(moving.union, low, high), owned[me]):
            ring.send(owned[me][start:stop])
        ring.finish()
        if not full:
            kernels.take(table, found, out=result.values)
    moving.finish()
    return result


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
