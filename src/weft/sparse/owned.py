"""Rows on their way to their owners: the sum of every index at the rank that owns its range.

The first half of `split`, and all of `sparse_reduce_scatter`. Index sets go first, with as many
values behind them as keep the link busy; an owner merges chunk by chunk while later ones are on
the wire. Workspace is bounded, whatever P is. Ranks that own nothing are sent nothing.

The reduce-scatter of "SSAR_Split_allgather" in Renggli et al., "SparCML" (SC'19), section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .. import kernels
from ..rows import Rows
from ..wire.base import peers
from .call import Call
from .cost import Cost, Load
from .local_rows import LocalRows
from .stream import ToOwners, list_messages, merge_blocks

__all__ = ["owned", "to_one"]


def owned(
    rows: LocalRows, call: Call, bounds: Sequence[int], place: Callable[[int], Rows] | None = None
) -> Rows:
    """The sums of the indices that this rank owns.

    Args:
        rows: this rank's, canonical.
        call: the call this is for.
        bounds: size + 1 integers, ascending, the same on every rank: rank r owns the indices from
            `bounds[r]` up to, not including, `bounds[r + 1]`.
        place: memory for a result of so many rows; by default where the caller wants it.
    """
    wire, me = call.wire, call.wire.rank
    highest = call.header.highest
    owners = [
        rank for rank, (low, high) in enumerate(pairwise(bounds)) if low < high and low <= highest
    ]
    indices = rows.indices.to(call.wire_index)
    ends = [_first(indices, bound, highest) for bound in bounds]
    part = [slice(low, high) for low, high in pairwise(ends)]
    others = [peer for peer in peers(wire) if peer in owners]
    sources = peers(wire) if me in owners else []

    moving = ToOwners(call, indices, rows.values, part, others, sources)
    order = sorted(moving.runs)
    runs = [moving.runs[rank] for rank in order]
    union = kernels.union(runs)
    moving.send_rest()

    result = (place or call.result)(union.indices.numel())
    result.indices.copy_(union.indices)
    streams = [moving.source(rank) for rank in order]
    for _ in merge_blocks(call, runs, streams, union, result.values):
        pass
    moving.finish()
    return result


def _first(indices: Tensor, bound: int, highest: int) -> int:
    """How many indices are below a bound, which may be too large for their dtype."""
    if bound > highest:
        return indices.numel()
    return int(torch.searchsorted(indices, bound))


def to_one(load: Load) -> Cost:
    """What it costs that one rank owns everything: there, where it is most."""
    others, index = load.ranks - 1, load.index_of(load.mean)
    return Cost(
        rounds=2,
        messages=others * (list_messages(load.mean * index) + load.chunks(load.mean, load.row)),
        bytes=others * load.mean * (load.row + index),
        merged=load.merging(load.total, load.pieces(load.mean, load.ranks, load.union)),
    )
