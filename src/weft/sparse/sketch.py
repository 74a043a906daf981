"""Bottom-k sketches: how many rows the union of all ranks' rows has, from small samples.

Every id has one hash, the same everywhere; a rank's sketch is its ids with the smallest hashes.
Since all ranks hash alike, the smallest hashes of the union are found among the sketches alone,
and their density tells the size of the union. Below `SIZE` ids the size is exact; else it is an
estimate, whose relative standard deviation is 1/sqrt(k): 6 % with 256 ids. The ids themselves are
sent, since each rank can compute their hashes.

Bar-Yossef et al., "Counting distinct elements in a data stream" (RANDOM 2002), algorithm 2; Cohen
and Kaplan, "Summarizing data using bottom-k sketches" (PODC 2007).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .. import kernels

SIZE = 256
"""Ids in a sketch."""

Ids = NDArray[np.int64]


def merge(sketches: list[Ids]) -> Ids:
    """The sketch of the union of the sets that were sketched, in ascending order of hash."""
    ids = np.concatenate(sketches)
    hashes = kernels.hashed(torch.from_numpy(ids)).numpy()
    order = np.argsort(hashes)
    hashes = hashes[order]
    kept = np.ones(len(ids), bool)
    np.not_equal(hashes[1:], hashes[:-1], out=kept[1:])  # equal hashes are of equal ids: one stays
    merged: Ids = ids[order[kept][:SIZE]]
    return merged


def union_size(sketch: Ids) -> int:
    """How many ids the sketched set has: exact below `SIZE`, else estimated."""
    if len(sketch) < SIZE:
        return len(sketch)
    kth = int(kernels.hashed(torch.from_numpy(sketch[-1:]))) + 2**63
    return ((SIZE - 1) << 64) // max(kth, 1)  # integers: every machine computes the same
