"""Owners: the index range that each rank sums, cut so that all ranks have equal work.

What an owner of a range does grows with the rows it receives for it, one from each rank that has
the index, and with the sums it sends, one to each other rank. The second is the larger part, so
equal numbers of input rows are not equal work: at the head of a Zipf distribution every rank has
the same few rows. Both numbers are estimated from the points in the combined header, bin by bin, in
integers or in operations that every machine rounds alike.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, searchsorted

from .header import Header

__all__ = ["cuts", "parts"]

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
