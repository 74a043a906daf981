"""Who sums a row: how often each rank is to be chosen among the holders of a row.

Chosen equally often, ranks with about as many rows receive and send about as many: the ring brings
a rank every row of the result but those it sums itself, and each row it sums costs it what the
other holders send. With unequal ranks that is not so. A rank that sums no rows is sent all of
them, and its left neighbour sends all of them; one that sums a row of many holders receives many.
So the ranks get weights, found on a sample of the rows: those with too much to receive are chosen
less often, and those that send too much, or whose left neighbour does, more often.

The weights decide what is sent where. All ranks find them from the same index sets, in integers or
in floating-point operations that every machine rounds alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels

__all__ = ["busiest", "weights"]

_SAMPLE = (512, 1024)  # places looked at: for many ranks, for few
_ONE = 1 << 12  # the greatest weight, and what a place counts for
_ROUNDS = 12
_EVEN = 1.03  # the busiest rank, as a multiple of the average, that is good enough

Longs = NDArray[np.int64]


def weights(slots: Sequence[Tensor], union: int) -> list[int]:
    """For each rank a weight from 1 to 2**12, the same on every rank.

    Args:
        slots: of each rank's rows in the union, as `kernels.union` gives them.
        union: U, the rows of the result.
    """
    ranks = len(slots)
    equal = [_ONE] * ranks
    held = _sample(slots, union)
    received, sent = _loads(held, np.array(equal))
    goal = int(received.sum()) / ranks
    best = first = max(int(received.max()), int(sent.max()))
    if first <= _EVEN * goal:
        return equal
    chosen, weight = equal, np.array(equal, dtype=np.float64)
    for _ in range(_ROUNDS):
        too_much, too_long = _power(received / best), _power(sent / best)
        change = 1.0 + 0.4 * (too_long + np.roll(too_long, 1) - too_much)
        weight = weight * np.maximum(change, 0.25)
        weight = np.maximum(weight * (_ONE / weight.max()), 1.0)
        whole = np.rint(weight).astype(np.int64)
        received, sent = _loads(held, whole)
        busy = max(int(received.max()), int(sent.max()))
        if busy < best:
            best, chosen = busy, whole.tolist()
    return chosen if best < 0.99 * first else equal


def busiest(slots: Sequence[Tensor], union: int, weight: Sequence[int]) -> float:
    """What the busiest rank receives or sends of values, as a multiple of the average rank's."""
    received, sent = _loads(_sample(slots, union), np.array(weight))
    return max(int(received.max()), int(sent.max())) * len(slots) / max(1, int(received.sum()))


def _sample(slots: Sequence[Tensor], union: int) -> Longs:
    """Which ranks (columns, 0 or 1) hold some places of the union (rows)."""
    few, many = _SAMPLE
    count = min(union, max(few, min(many, (1 << 15) // len(slots))))
    edges = np.arange(count + 1, dtype=np.int64) * union // max(1, count)
    # not at equal distances, since rows may lie so
    apart = np.arange(count, dtype=np.int64) * 2654435769 % (1 << 32) * np.diff(edges) >> 32
    held: Longs = kernels.held(slots, torch.from_numpy(edges[:-1] + apart)).numpy()
    return held


def _loads(held: Longs, weight: Longs) -> tuple[Longs, Longs]:
    """Rows that each rank receives and sends if the sampled places were all, times `_ONE`."""
    weighed = held * weight
    share = weighed * _ONE // np.maximum(weighed.sum(axis=1, keepdims=True), 1)
    holders = held.sum(axis=1, keepdims=True)
    everything, summed = len(held) * _ONE, share.sum(axis=0)
    received = everything + (share * (holders - 2)).sum(axis=0)
    sent = held.sum(axis=0) * _ONE - summed + everything - np.roll(summed, -1)
    return received, sent


def _power(part: NDArray[np.float64]) -> NDArray[np.float64]:
    """To the 16th, by multiplications alone: pow() is not the same everywhere."""
    for _ in range(4):
        part = part * part
    return part
