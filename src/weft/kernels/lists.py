"""Keys of lists of tables: made, cut in ranges of equal work, and taken apart again.

A *list* is one rank's rows of several tables: their keys, sorted, one table behind the other. Each
rank numbers its keys by itself, a table beginning where the one before ends; in the *space* of all
ranks, tables begin where that says. Here is the definition, in NumPy, and what hands the work to
machine code (`list_loops`), which gives the same numbers: a list of some thousand rows costs more
in calls than in work.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .compile import Key, compiler

__all__ = ["KEY", "List", "cut", "even_cuts", "joined", "moved", "parted"]

KEY: Key = ("list",)
"""The one set of loops."""

_BINS = 64
_POINTS = 128  # of each list

Longs = NDArray[np.int64]


class List:
    """One rank's keys.

    Attributes:
        keys: int64, sorted.
        rows: of each table how many of them are its.
        heights: of each table how many keys it spans; at least one.
    """

    __slots__ = ("heights", "keys", "rows")

    def __init__(self, keys: Tensor, rows: Longs, heights: Longs) -> None:
        self.keys = keys
        self.rows, self.heights = np.ascontiguousarray(rows), np.ascontiguousarray(heights)

    def row(self) -> tuple[int, int, int, int]:
        """What machine code is told of it."""
        where = self.rows.ctypes.data, self.heights.ctypes.data
        return (self.keys.data_ptr(), self.keys.numel(), *where)

    def shifts(self, starts: Longs) -> Longs:
        """What is added to the keys of each table in the space of all."""
        return starts[:-1] - np.cumsum(self.heights) + self.heights


def joined(parts: Sequence[Tensor]) -> tuple[Tensor, Longs, Longs]:
    """The keys of some tables' indices (int32 or int64, not empty), in the order they have.

    Returns:
        Those, int64; and of each table the least and the greatest index. Where one is negative, or
        they are too large for a list, keys may be anything.

    Example:
        >>> joined([torch.tensor([3, 0]), torch.tensor([1])])
        (tensor([3, 0, 5]), array([0, 1]), array([3, 1]))
    """
    parts = [part.contiguous() for part in parts]
    counts = [part.numel() for part in parts]
    loops = compiler.loops(KEY)
    if loops is None:
        indices = torch.cat(parts).long().numpy()
        begins = np.cumsum([0, *counts[:-1]])
        lows, highs = (f.reduceat(indices, begins) for f in (np.minimum, np.maximum))
        keys = indices + np.repeat(np.cumsum(highs + 1) - highs - 1, counts)
        return torch.from_numpy(keys), lows, highs
    given = array("q")
    for part, count in zip(parts, counts, strict=True):
        given.extend((part.data_ptr(), count, part.element_size()))
    keys, ends = torch.empty(sum(counts), dtype=torch.int64), np.empty((2, len(parts)), np.int64)
    at = ends.ctypes.data
    loops["joined"](given.buffer_info()[0], len(parts), at, at + 8 * len(parts), keys.data_ptr())
    return keys, ends[0], ends[1]


def cut(lists: Sequence[List], starts: Longs, sizes: Longs | None = None) -> list[list[int]]:
    """Cut the space in as many ranges of equal work as there are lists.

    Args:
        lists: of all ranks.
        starts: where tables begin in the space of all, and its end.
        sizes: bytes of a row of each table; None: all are alike.

    Returns:
        Of each list, how many of its keys lie below each range, and how many there are.

    Example:
        >>> one = List(torch.arange(8), np.array([8]), np.array([8]))
        >>> cut([one, one], np.array([0, 8]))
        [[0, 4, 8], [0, 4, 8]]
    """
    size, tables = len(lists), len(starts) - 1
    loops = compiler.loops(KEY)
    if loops is not None and tables:
        told = array("q")
        for one in lists:
            told.extend(one.row())
        space = np.empty((2 * _POINTS + 2) * size + 3 * (_BINS + 1), np.int64)
        found = np.empty((size, size + 1), np.int64)
        at, begins = space.ctypes.data, np.ascontiguousarray(starts)
        heavy = None if sizes is None else np.ascontiguousarray(sizes)
        if not loops["cut"](
            *(told.buffer_info()[0], size, begins.ctypes.data),
            *(0 if heavy is None else heavy.ctypes.data, tables, _POINTS, _BINS),
            *(at, at + 8 * (2 * _POINTS + 2) * size, found.ctypes.data),
        ):
            edges: list[list[int]] = found.tolist()
            return edges
    points, weights = map(
        np.concatenate, zip(*(_points(one, starts) for one in lists), strict=True)
    )
    order = np.argsort(points, kind="stable")
    points, weights = points[order], weights[order]
    heights = None
    if sizes is not None:
        heights = sizes[starts[1:-1].searchsorted(points, "right")]
    end = int(starts[-1])
    cuts = [0, *even_cuts(points, weights, end, size, heights), end]
    return [_below(one, starts, cuts) for one in lists]


def _points(one: List, starts: Longs) -> tuple[Longs, Longs]:
    """Keys in the space of all that cut these in equal shares, and those."""
    count = one.keys.numel()
    parts = min(_POINTS, count)
    shares = np.arange(parts + 1, dtype=np.int64) * count // max(parts, 1)
    at = shares[:-1]
    tables = np.cumsum(one.rows).searchsorted(at, "right")
    return one.keys.numpy()[at] + one.shifts(starts)[tables], np.diff(shares)


def _below(one: List, starts: Longs, edges: Sequence[int]) -> list[int]:
    """How many of these lie below each key of the space of all."""
    if not len(one.heights):
        return [0] * len(edges)
    tables = starts[1:-1].searchsorted(edges, "right")
    inside = np.minimum(edges - starts[tables], one.heights[tables])
    begins = (np.cumsum(one.heights) - one.heights)[tables]
    below: list[int] = one.keys.numpy().searchsorted(begins + inside).tolist()
    return below


def even_cuts(
    points: Longs, weights: Longs, end: int, ranks: int, sizes: Longs | None = None
) -> list[int]:
    """Where to cut keys, so that all ranges have equal work.

    What an owner of a range does grows with the rows it receives for it and with the sums it sends,
    one to each other rank; both are estimated from points, bin by bin, in integers or in operations
    that every machine rounds alike.

    Args:
        points: keys, ascending.
        weights: how many rows lie from each to the next.
        end: all keys lie below this.
        ranks: how many ranges.
        sizes: bytes of the rows at each point; None: all are alike.

    Returns:
        `ranks - 1` keys, ascending.
    """
    count = len(points)
    if not count:
        return [0] * (ranks - 1)
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
    if sizes is not None:
        work = work * np.maximum(np.add.reduceat(weights * sizes, starts) // rows, 1)

    done = np.concatenate([[0], np.cumsum(work)])
    result = []
    for rank in range(1, ranks):
        goal = int(done[-1]) * rank // ranks
        bin_ = int(np.searchsorted(done, goal, side="right")) - 1
        into = (goal - int(done[bin_])) * int(edges[bin_ + 1] - edges[bin_]) // int(work[bin_])
        result.append(int(edges[bin_]) + into)
    return result


def moved(one: List, starts: Longs, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Keys `first` to `last` of a list, in the space of all.

    Example:
        >>> one = List(torch.tensor([0, 4, 5]), np.array([1, 2]), np.array([4, 2]))
        >>> moved(one, np.array([0, 10, 20]), 0, 3, torch.int32)
        tensor([ 0, 10, 11], dtype=torch.int32)
    """
    loops = compiler.loops(KEY)
    if loops is None:
        ends = np.cumsum(one.rows).clip(first, last)
        counts = np.diff(ends, prepend=first)
        keys = one.keys[first:last].numpy() + np.repeat(one.shifts(starts), counts)
        return torch.from_numpy(keys).to(dtype)
    out, begins = torch.empty(last - first, dtype=dtype), np.ascontiguousarray(starts)
    row = array("q", one.row())
    loops["moved"](
        *(row.buffer_info()[0], begins.ctypes.data, first, last),
        *(int(dtype is torch.int64), out.data_ptr()),
    )
    return out


def parted(keys: Tensor, starts: Longs, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """The indices in their tables of sorted keys in the space of all, and where each table ends.

    Args:
        keys: int32 or int64, sorted, in the space.
        starts: where tables begin there, and its end.
        dtype: of the indices, int32 or int64.

    Example:
        >>> parted(torch.tensor([0, 10, 11]), np.array([0, 10, 20]), torch.int32)
        (tensor([0, 0, 1], dtype=torch.int32), [1, 3])
    """
    loops = compiler.loops(KEY)
    if loops is None:
        ends = torch.searchsorted(keys, keys.new_tensor(starts[1:] - 1), right=True).tolist()
        counts = [high - low for low, high in pairwise([0, *ends])]
        shift = torch.from_numpy(np.repeat(starts[:-1], counts)).to(keys.dtype)
        return (keys - shift).to(dtype), ends
    out, begins = torch.empty(keys.shape, dtype=dtype), np.ascontiguousarray(starts)
    ends_, kinds = np.empty(len(starts) - 1, np.int64), 16 * keys.itemsize + dtype.itemsize
    loops["parted"](
        *(keys.data_ptr(), keys.numel(), kinds, begins.ctypes.data, len(ends_)),
        *(out.data_ptr(), ends_.ctypes.data),
    )
    return out, ends_.tolist()
