"""Owners: the index range that each rank sums, cut so that all ranks have equal work.

What an owner of a range does grows with the rows it receives for it, one from each rank that has
the index, and with the sums it sends, one to each other rank. The second is the larger part, so
equal numbers of input rows are not equal work: at the head of a Zipf distribution every rank has
the same few rows. Both numbers are estimated from the points in the combined header
(`kernels.lists.even_cuts`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, searchsorted

from ..kernels.lists import even_cuts
from .header import Header

__all__ = ["cuts", "parts"]

_LAST = (2**31 - 1, 2**63 - 1)  # no index of that dtype is above: cuts are such indices too


def cuts(header: Header, ranks: int, sizes: NDArray[np.int64] | None = None) -> list[int]:
    """`ranks - 1` indices, ascending: owner r sums from cut r-1 up to, not including, cut r.

    Args:
        header: of all ranks together.
        ranks: owners.
        sizes: bytes of the rows at each of the header's points; None: all rows are alike.
    """
    if header.total == 0:
        return [0] * (ranks - 1)
    end = header.highest + (header.highest not in _LAST)
    return even_cuts(header.points, header.weights, end, ranks, sizes)


def parts(indices: Tensor, header: Header, ranks: int) -> list[slice]:
    """Of sorted indices, for each owner those that lie in its range."""
    ends = searchsorted(indices, indices.new_tensor(cuts(header, ranks))).tolist()
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, len(indices)], strict=True)]
