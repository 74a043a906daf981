"""Owners: the index range that each rank sums, cut so that all ranks have equal work.

What an owner of a range does grows with the rows it receives for it, one from each rank that has
the index, and with the sums it sends, one to each other rank. The second is the larger part, so
equal numbers of input rows are not equal work: at the head of a Zipf distribution every rank has
the same few rows. Both numbers are estimated from the points in the combined header, bin by bin, in
integers or in operations that every machine rounds alike.

`reduce_to_owners` brings all rows to their owners, each of which sums its range: the reduce-scatter
of "SSAR_Split_allgather" in Renggli et al., "SparCML" (SC'19), section 5.3. Index sets go first,
with as many values behind them as keep the link busy; an owner merges chunk by chunk while later
ones are on the wire. Workspace is bounded, whatever P is. Ranks that own nothing are sent nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, searchsorted

from .. import kernels
from ..rows import Rows
from ..wire.base import peers
from .call import Call
from .header import Header
from .local_rows import LocalRows
from .stream import ToOwners, merge_blocks

_BINS = 64
_LAST = (2**31 - 1, 2**63 - 1)  # no index of that dtype is above: cuts are such indices too


def cuts(header: Header, ranks: int) -> list[int]:
    """`ranks - 1` indices, ascending: owner r sums from cut r-1 up to, not including, cut r.

    Args:
        header: of all ranks together.
        ranks: owners.
    """
    points, weights, count = header.points, header.weights, len(header.points)
    if not count:
        return [0] * (ranks - 1)
    end = header.highest + (header.highest not in _LAST)
    bins = min(_BINS, count)
    starts = np.arange(bins, dtype=np.int64) * count // bins
    edges = np.append(points[starts], end)
    rows = np.add.reduceat(weights, starts)
    width = np.maximum(np.diff(edges), 1)

    # rows of `ranks` ranks, thrown into `width` places independently, meet in so many of them
    missing = np.maximum(1.0 - rows / (width * float(ranks)), 0.0)
    nobody = np.ones_like(missing)
    power = ranks
    while power:  # by multiplications alone: pow() is not the same everywhere
        if power & 1:
            nobody = nobody * missing
        missing = missing * missing
        power >>= 1
    union = np.minimum(np.rint(width * (1.0 - nobody)).astype(np.int64), rows)
    work = rows + (ranks - 1) * np.maximum(union, 1)

    done = np.concatenate([[0], np.cumsum(work)])
    result = []
    for rank in range(1, ranks):
        goal = int(done[-1]) * rank // ranks
        at = int(np.searchsorted(done, goal, side="right")) - 1
        into = (goal - int(done[at])) * int(edges[at + 1] - edges[at]) // int(work[at])
        result.append(int(edges[at]) + into)
    return result


def parts(indices: Tensor, header: Header, ranks: int) -> list[slice]:
    """Of sorted indices, for each owner those that lie in its range."""
    ends = searchsorted(indices, indices.new_tensor(cuts(header, ranks))).tolist()
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, len(indices)], strict=True)]


def reduce_to_owners(
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
