"""The header: what a rank says of its rows when a sparse all-reduce opens.

A header is the body of a rank's statement. `run` finds the sizes of the call in those of all ranks
(`Header.of_all`). A rank with few rows sends the rows themselves instead of saying where they lie;
when all ranks did, the call needs no second round.

A header describes the distribution of a rank's indices by *points*: quantiles, each of which stands
for an equal share of the rank's rows. `owners` cuts index ranges from the points of all ranks. So
of many ranks each states fewer points, and each other ones.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..base.memory import memory_of, numbers_of
from ..call.statement import room
from .rows import Rows

POINTS = 128
"""Points of one rank."""

_STATED = 2048  # points of all ranks together
_GOLDEN = 40503  # of 65,536: multiples of it, modulo that, lie evenly
# the first fields of a header, in their order; then the number of points, and the bytes of one or,
# if rows follow, -1 and the bytes of an index. 48 bytes, so that rows are aligned
_FIXED = struct.Struct("<2q2B6xqB15x")
_FIELDS = 4
_GRAIN = 16  # bytes: values begin at a multiple
_MOST = 1 << 44  # rows that all ranks together may have: more than fit in any memory

Longs = NDArray[np.int64]
_NOTHING: Longs = np.empty(0, np.int64)


class Header(NamedTuple):
    """The header of one rank, or of all ranks together.

    Attributes:
        total: rows, summed over ranks (after each rank removed its duplicates).
        highest: the largest index, -1 if there are no rows.
        rate: the least that ranks have stated, see `rate`.
        compiled: 1 if all ranks have machine code (`kernels.is_compiled`), else 0.
        points, weights: indices, ascending, and how many rows lie from each to the next.
        rows: of one rank, sent in place of points.
    """

    total: int
    highest: int
    rate: int
    compiled: int
    points: Longs = _NOTHING
    weights: Longs = _NOTHING
    rows: Rows | None = None

    def with_points(self, indices: Tensor, ranks: int = 1, rank: int = 0) -> Header:
        """This header of one rank, with points of its indices (sorted, unique) instead of rows.

        Of many ranks each states fewer points, and takes another one of each share.
        """
        most = _STATED // ranks
        begins = shares(indices.numel(), max(1, most))
        places = begins[:-1]
        weights = begins[1:] - places
        if most < POINTS:
            phase = rank * _GOLDEN % 65536  # of 65,536: from the first to the last
            places = places + (weights * phase >> 16)
        return self._replace(
            points=numbers_of(indices)[places].astype(np.int64),
            weights=weights,
            rows=None,
        )

    def within(self, low: int, high: int) -> Header:
        """This header of all ranks, as far as indices from `low` up to, not including, `high` go.

        Its figures stay those of all indices: how many rows there are in the range nobody knows.
        """
        inside = (self.points >= low) & (self.points < high)
        return self._replace(
            highest=high - 1, points=self.points[inside], weights=self.weights[inside]
        )

    @staticmethod
    def fits(count: int, index_bytes: int, row_bytes: int, ranks: int) -> bool:
        """Whether so many rows may travel in the header of each of so many ranks."""
        return _FIXED.size + count * (index_bytes + row_bytes) + _GRAIN <= room(ranks)

    def pack(self) -> bytearray:
        """The header as bytes."""
        parts: Sequence[Any]
        if self.rows is not None:
            indices = self.rows.indices.contiguous()
            values = self.rows.values.contiguous()
            sizes = -1, indices.itemsize
            gap = bytes(-indices.nbytes % _GRAIN)
            parts = memory_of(indices), gap, memory_of(values)
        else:
            # points ascend: what lies between two of them takes fewer bytes than they do
            gaps = self.points.copy()
            gaps[1:] -= self.points[:-1]
            narrow = gaps.astype(np.min_scalar_type(int(gaps.max(initial=0))))
            sizes = len(narrow), narrow.itemsize
            parts = (narrow,)
        return bytearray().join((_FIXED.pack(*self[:_FIELDS], *sizes), *parts))

    @classmethod
    def unpack(
        cls,
        body: memoryview,
        row_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        *,
        moves: bool = False,
    ) -> Header:
        """Read a header. Rows in it, of that shape and dtype, are views of `body`.

        Args:
            body: what `pack` made, on another rank.
            row_shape, dtype: of the rows, if the header has rows.
            moves: whether the rows' indices may be in any order.

        Raises:
            Exception: the bytes are no header.
        """
        total, highest, rate, compiled, points, width = _FIXED.unpack_from(body)
        if not 0 <= total < _MOST:
            raise ValueError(f"no rank can have {total} rows")
        if points < 0:
            index = torch.int32 if width == 4 else torch.int64
            rows = _rows_in(body, total, index, row_shape, dtype)
            header = cls(total, highest, rate, compiled, rows=rows)
            is_valid = moves or kernels.ascends(rows.indices, highest)
        else:
            gaps = np.frombuffer(body[_FIXED.size :], f"u{width}").astype(np.int64)
            begins = shares(total, points)
            weights = begins[1:] - begins[:-1]
            header = cls(total, highest, rate, compiled, gaps.cumsum(), weights)
            # points ascend to the largest index; not, if a sum of gaps overflowed
            ends = np.concatenate([[0], header.points, [highest]])
            ascends = not points or bool((ends[1:] >= ends[:-1]).all())
            is_valid = gaps.size == points == weights.size and ascends
        if not is_valid:
            raise ValueError("no rank can have such rows")
        return header

    @classmethod
    def of_all(cls, headers: Sequence[Header]) -> Header:
        """The header of all ranks, from those of each in rank order; without points."""
        totals, highest, rates, compiled, *_ = zip(*headers, strict=True)
        return cls(sum(totals), max(highest), min(rates), min(compiled))

    def with_points_of(self, headers: Sequence[Header]) -> Header:
        """This header of all ranks, with the points of each rank's header, all of sorted rows.

        Those that carry the rows say instead where they lie.
        """
        stated = [one if one.rows is None else one.with_points(one.rows.indices) for one in headers]
        points = np.concatenate([one.points for one in stated])
        weights = np.concatenate([one.weights for one in stated])
        order = np.argsort(points, kind="stable")
        return self._replace(points=points[order], weights=weights[order])


def _rows_in(
    body: memoryview, count: int, index: torch.dtype, row_shape: tuple[int, ...], dtype: torch.dtype
) -> Rows:
    """The rows that follow the figures, as views of `body`.

    Raises:
        ValueError: there are not so many.
    """
    start = _FIXED.size + -(-count * index.itemsize // _GRAIN) * _GRAIN  # of the values
    if start + count * math.prod(row_shape) * dtype.itemsize != body.nbytes:
        raise ValueError(f"{count} rows in {body.nbytes} bytes")
    memory = torch.frombuffer(body, dtype=torch.uint8)
    indices = memory[_FIXED.size : _FIXED.size + count * index.itemsize].view(index)
    return Rows(indices, memory[start:].view(dtype).view(count, *row_shape))


def shares(count: int, points: int) -> Longs:
    """The first row of each point's share among `count` rows, and the end of the last share.

    Args:
        count: rows of a rank.
        points: how many it states, at most; never more than `POINTS`.
    """
    parts = min(POINTS, count, points)
    return np.arange(parts + 1, dtype=np.int64) * count // (parts or 1)
