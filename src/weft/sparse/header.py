"""The header: what a rank says of its rows when a sparse all-reduce opens.

A header is the body of the statement that `agree` carries. Headers combine, so one made of all
ranks' headers says everything that the choice of an algorithm depends on, whether it came in one
round or in log2 P. A rank with few rows sends the rows themselves instead of saying where they lie;
when all ranks did, the call needs no second round.

A header describes the distribution of a rank's indices by *points*: quantiles, each of which stands
for an equal share of the rank's rows. `owners` cuts index ranges from the points of all ranks.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..agree import BODY
from ..kernels import Survey
from ..rows import Rows
from ..schedules.hosts import Hosts
from ..wire.memory import memory_of, typed
from . import sketch

POINTS = 128
"""Points of one rank."""

DIGESTED = 1 << 20
"""Bytes of a rank's indices up to which they are digested: more would take too long."""

_KEPT = 1024  # points of a combined header
# the first fields of a header, in their order; then the lengths of the sketch and of the points or,
# if rows follow, -1 and the bytes of an index; then the bytes of a number of the sketch, of the
# points and of the weights, or three zeros. 96 bytes, so that rows that follow are aligned
_FIXED = struct.Struct("<6q2?6x16s2q3B5x")
_FIELDS = 9
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes
_GRAIN = 16  # bytes: values begin at a multiple
_NONE = bytes(16)  # no digest: ranks have different index sets, or too large ones
NO_LIMIT = 1 << 62
_MOST = 1 << 44  # rows that all ranks together may have: more than fit in any memory

Longs = NDArray[np.int64]
_NOTHING: Longs = np.empty(0, np.int64)


class Header(NamedTuple):
    """The header of one rank, or the combined header of some ranks.

    Attributes:
        total: rows, summed over ranks (after each rank removed its duplicates).
        most, fewest: rows of the rank with most and of that with fewest.
        highest: the largest index, -1 if there are no rows.
        capacity, tightest: rows that the smallest caller's `out` holds, and whose it is: the
            rank's number in errors.
        alike: all ranks have the same index set, as far as sketches tell, or digests.
        fallible: somebody passed a function, which may raise.
        digest: of the index set that all ranks have, if digests tell; else zeros.
        sketch: sample of the union of the index sets, see `sketch`; empty where nobody needs it.
        points, weights: indices, ascending, and how many rows lie from each to the next.
        rows: of one rank, sent in place of sketch and points.
    """

    total: int
    most: int
    fewest: int
    highest: int
    capacity: int
    tightest: int
    alike: bool
    fallible: bool
    digest: bytes = _NONE
    sketch: Longs = _NOTHING
    points: Longs = _NOTHING
    weights: Longs = _NOTHING
    rows: Rows | None = None

    @classmethod
    def of(
        cls,
        indices: Tensor,
        rank: int,
        *,
        capacity: int | None = None,
        fallible: bool = False,
        highest: int | None = None,
        values: Tensor | None = None,
        survey: Survey | None = None,
        sampled: bool = True,
    ) -> Header:
        """The header of one rank.

        Args:
            indices: sorted and unique, unless `highest` is given.
            rank: whose they are, by its number in errors.
            capacity: rows that fit in the caller's `out`; None: no limit.
            fallible: whether the caller passed a function.
            highest: the largest index, for unsorted indices: the header then has no sketch and no
                points.
            values: rows' values: the header then carries the rows themselves.
            survey: of indices on an accelerator; it replaces their sketch, points and digest.
            sampled: whether it has a sketch, which says how large the union is.
        """
        count = indices.numel()
        limit = NO_LIMIT if capacity is None else capacity
        if survey is not None:
            highest = survey.highest
        top = _last(indices) if highest is None else highest
        header = cls(count, count, count, top, limit, rank, True, fallible)
        if values is not None:
            return header._replace(rows=Rows(indices, values))
        if survey is None:
            return header._described(indices, sampled=sampled) if highest is None else header
        return header._replace(
            digest=survey.digest,
            sketch=np.array(survey.sample, np.int64) if sampled else _NOTHING,
            points=np.array(survey.points, np.int64),
            weights=np.diff(shares(count)),
        )

    def _described(self, indices: Tensor, *, sampled: bool) -> Header:
        """This header of one rank, with sketch, points and digest instead of rows."""
        count = indices.numel()
        begins = shares(count)
        return self._replace(
            digest=_digest(indices),
            sketch=kernels.sketch(indices, sketch.SIZE).numpy() if sampled else _NOTHING,
            points=indices.numpy()[begins[:-1]].astype(np.int64),
            weights=np.diff(begins),
            rows=None,
        )

    @staticmethod
    def fits(count: int, index_bytes: int, row_bytes: int) -> bool:
        """Whether so many rows may travel in a header."""
        return _FIXED.size + count * (index_bytes + row_bytes) + _GRAIN <= BODY

    def pack(self) -> Tensor:
        """The header as bytes."""
        parts: Sequence[Any]
        if self.rows is not None:
            indices = self.rows.indices.contiguous()
            values = self.rows.values.contiguous()
            sizes = -1, indices.itemsize, 0, 0, 0
            gap = bytes(-indices.nbytes % _GRAIN)
            parts = memory_of(indices), gap, memory_of(values)
        else:
            # points ascend: what lies between two of them takes fewer bytes than they do
            gaps = np.diff(self.points, prepend=0)
            parts = [_narrow(numbers) for numbers in (self.sketch, gaps, self.weights)]
            widths = [numbers.itemsize for numbers in parts]
            sizes = len(self.sketch), len(self.points), *widths
        raw = bytearray().join((_FIXED.pack(*self[:_FIELDS], *sizes), *parts))
        return torch.frombuffer(raw, dtype=torch.uint8)

    @classmethod
    def unpack(
        cls,
        body: memoryview,
        row_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        *,
        moves: bool = False,
        height: int | None = None,
        counted: Header | None = None,
        of_one: bool = False,
        sampled: bool = True,
    ) -> Header:
        """Read and check a header. Rows in it, of that shape and dtype, are views of `body`.

        Args:
            body: what `pack` made, on another rank.
            row_shape, dtype: of the rows, if the header has rows.
            moves: whether the rows' indices may be in any order.
            height: that all indices are below; None: it is unknown.
            counted: one of those that a combined header is made of, if that is known.
            of_one: whether it is the header of one rank, and not a combined one.
            sampled: whether the headers of one rank have sketches.

        Raises:
            ValueError, struct.error: the bytes are no valid header.
        """
        *figures, ids, points, sketch_width, point_width, weight_width = _FIXED.unpack_from(body)
        header = cls(*figures)
        header._check_figures(moves=moves, height=height, counted=counted, of_one=of_one)
        if ids < 0:
            if sketch_width or point_width or weight_width:
                raise ValueError("it has rows, and says how wide numbers of a sketch are")
            index = torch.int32 if points == 4 else torch.int64
            rows = header._rows_in(body, index, row_shape, dtype, ascending=not moves)
            return header._replace(rows=rows)
        if not 0 <= points <= _KEPT:
            raise ValueError(f"it has {points} points")
        lengths = (ids, sketch_width), (points, point_width), (points, weight_width)
        sample, gaps, weights = _longs_in(body[_FIXED.size :], lengths)
        header = header._replace(sketch=sample, points=gaps.cumsum(), weights=weights)
        header._check_points()
        if of_one and not moves and not header._describes_one_rank(sampled=sampled):
            raise ValueError(f"its {ids} and {points} numbers are not those of {header.total} rows")
        return header

    def _check_figures(
        self, *, moves: bool, height: int | None, counted: Header | None, of_one: bool
    ) -> None:
        """Raise ValueError if a header that `unpack` is asked for cannot have these figures."""
        figures = [*self[:_FIELDS]]
        counts_fit = 0 <= self.fewest <= self.most <= self.total < _MOST
        if not counts_fit or self.highest < -1 or self.capacity < 0 or self.tightest < 0:
            raise ValueError(f"it says {figures}")
        if height is not None and self.highest >= height:
            raise ValueError(f"it says that an index is {self.highest}, of {height} rows")
        if counted is not None and not self._counts(counted):
            raise ValueError(f"it says {figures}, and leaves out this rank's rows")
        if of_one and not self._fits_one_rank(moves=moves):
            raise ValueError(f"it says {figures}, which no rank has alone")

    def _rows_in(
        self,
        body: memoryview,
        index: torch.dtype,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        ascending: bool,
    ) -> Rows:
        """The rows that follow the figures, as views of `body`.

        Raises:
            ValueError: there are not so many, or their indices are not what the figures say.
        """
        start = _FIXED.size + -(-self.total * index.itemsize // _GRAIN) * _GRAIN  # of the values
        if start + self.total * math.prod(row_shape) * dtype.itemsize != len(body):
            raise ValueError(f"{self.total} rows in {len(body)} bytes")
        memory = torch.frombuffer(body, dtype=torch.uint8)
        indices = typed(memory, (self.total,), index, _FIXED.size)
        if not kernels.lie_within(indices, 0, self.highest, ascending=ascending):
            raise ValueError(f"its indices do not ascend from 0 to {self.highest}")
        return Rows(indices, typed(memory, (self.total, *row_shape), dtype, start))

    def _check_points(self) -> None:
        """Raise ValueError if points do not ascend, or do not stand for all rows."""
        points = self.points  # a sum of gaps that overflowed does not ascend
        if not len(points):
            return
        ascend = points[0] >= 0 and points[-1] <= self.highest
        if not ascend or not (points[1:] >= points[:-1]).all():
            raise ValueError(f"its points do not ascend from 0 to {self.highest}")
        count = self.weights.sum(dtype=np.float64)  # which cannot overflow
        if self.weights.min() < 1 or count != self.total:
            raise ValueError(f"its points do not stand for {self.total} rows")

    @classmethod
    def together(cls, headers: Sequence[Header]) -> Header:
        """Combine headers, in the order of their ranks.

        The result has no sketch and no points if a header carries rows, or has unsorted rows: then
        nobody needs them, or the headers have to be `described` before.
        """
        tightest = min(headers, key=lambda one: one.capacity)
        header = cls(
            sum(one.total for one in headers),
            max(one.most for one in headers),
            min(one.fewest for one in headers),
            max(one.highest for one in headers),
            tightest.capacity,
            tightest.tightest,
            False,
            any(one.fallible for one in headers),
        )
        if any(one.rows is not None or (one.total and not len(one.points)) for one in headers):
            return header
        points = np.concatenate([one.points for one in headers])
        weights = np.concatenate([one.weights for one in headers])
        order = np.argsort(points, kind="stable")
        points, weights = _thinned(points[order], weights[order])
        return header._replace(
            alike=_are_alike(headers),
            digest=_digest_of_all(headers),
            sketch=sketch.merge([one.sketch for one in headers]),
            points=points,
            weights=weights,
        )

    def _fits_one_rank(self, *, moves: bool) -> bool:
        """Whether one rank may have these figures; with `moves` it may have an index twice."""
        if not (self.total == self.most == self.fewest and self.alike):
            return False
        if not self.total:
            return self.highest == -1
        return self.highest >= (0 if moves else self.total - 1)

    def _describes_one_rank(self, *, sampled: bool) -> bool:
        """Whether sketch and points may be those of one rank's rows, as `_described` makes them."""
        shares_of_points = np.diff(shares(self.total))
        if len(self.sketch) != (min(sketch.SIZE, self.total) if sampled else 0):
            return False
        if not np.array_equal(self.weights, shares_of_points):
            return False
        if not self.total:
            return True
        # indices are distinct: so many fit between a point and the next, and behind the last one
        steps = np.diff(self.points)
        behind = self.highest - int(self.points[-1])
        return bool((steps >= self.weights[:-1]).all()) and behind >= self.weights[-1] - 1

    def _counts(self, one: Header) -> bool:
        """Whether `one` may be among those that this header is combined of."""
        rows = self.most >= one.most and self.fewest <= one.fewest and self.total >= one.total
        return rows and self.highest >= one.highest and self.capacity <= one.capacity

    @property
    def identical(self) -> bool:
        """Whether all ranks certainly have the same index set."""
        return self.digest != _NONE

    @property
    def limited(self) -> bool:
        """Whether some rank passed memory of a certain size."""
        return self.capacity < NO_LIMIT

    def union(self, height: int | None) -> int:
        """Rows that the result will have: an estimate, the same on every rank."""
        if self.alike:
            return self.most
        guess = sketch.union_size(self.sketch)
        return max(self.most, min(guess, self.total, self.total if height is None else height))


def described(headers: Sequence[Header], *, sampled: bool = True) -> list[Header]:
    """The headers, all of sorted rows; those that carry the rows say instead where they lie."""
    return [
        one if one.rows is None else one._described(one.rows.indices, sampled=sampled)
        for one in headers
    ]


def rows_of_hosts(
    headers: Sequence[Header], hosts: Hosts, union: int
) -> tuple[tuple[int, int], ...]:
    """For each host the rows in the union of its ranks, and those in the union of all other ranks.

    The first is an estimate from samples, as `Header.union`. The second is the least that it can
    be by these: all ranks' rows but the host's, or those of another host.

    Args:
        headers: of each rank, in the order of ranks, `described`.
        hosts: of these ranks.
        union: rows in the union of all ranks.
    """
    united = [_united([headers[rank] for rank in ranks], union) for ranks in hosts.ranks]
    found = []
    for host, own in enumerate(united):
        of_others = max(united[:host] + united[host + 1 :], default=0)
        found.append((own, max(of_others, union - own)))
    return tuple(found)


def _united(headers: Sequence[Header], most: int) -> int:
    """Rows in the union of some ranks, at most so many: an estimate from their sketches."""
    together = headers[0]._replace(
        total=sum(one.total for one in headers),
        most=max(one.most for one in headers),
        alike=_are_alike(headers),
        sketch=sketch.merge([one.sketch for one in headers]),
    )
    return together.union(most)


def _are_alike(headers: Sequence[Header]) -> bool:
    """Whether all have as many rows, and the same sample of their indices, or the same digest."""
    first = headers[0]
    if first.total and not len(first.sketch):
        return _digest_of_all(headers) != _NONE
    return all(
        one.alike and one.most == first.most and np.array_equal(one.sketch, first.sketch)
        for one in headers
    )


def _digest_of_all(headers: Sequence[Header]) -> bytes:
    """The digest that all have, or none."""
    first = headers[0].digest
    return first if all(one.digest == first for one in headers) else _NONE


def combined(lower: Tensor, upper: Tensor) -> Tensor:
    """`Header.together` of two headers as bytes, for `agree`."""
    return Header.together([Header.unpack(each.numpy().data) for each in (lower, upper)]).pack()


def shares(count: int) -> Longs:
    """The first row of each point's share among `count` rows, and the end of the last share."""
    parts = min(POINTS, count)
    return np.arange(parts + 1, dtype=np.int64) * count // max(parts, 1)


def _narrow(numbers: Longs) -> NDArray[Any]:
    """Numbers that are not negative, in as few bytes each as the largest of them needs."""
    largest = int(numbers.max(initial=0))
    return numbers.astype(np.min_scalar_type(largest))


def _longs_in(body: memoryview, lengths: Sequence[tuple[int, int]]) -> list[Longs]:
    """Arrays that `_narrow` made, one after the other.

    Args:
        body: their bytes, and nothing else.
        lengths: of each array, how many numbers it has, and of how many bytes.

    Raises:
        ValueError: the bytes are not such arrays.
    """
    if any(width not in _WIDTHS for _, width in lengths):
        raise ValueError(f"numbers of {[width for _, width in lengths]} bytes")
    if sum(count * width for count, width in lengths) != len(body):
        raise ValueError(f"{[count for count, _ in lengths]} numbers in {len(body)} bytes")
    found = []
    start = 0
    for count, width in lengths:
        numbers = np.frombuffer(body, _WIDTHS[width], count, start)
        found.append(numbers.astype(np.int64))
        start += count * width
    return found


def _digest(indices: Tensor) -> bytes:
    """The digest of sorted, unique indices, as int32 if all fit: equal sets have equal digests."""
    raw = memory_of(indices.int() if _last(indices) < 2**31 else indices)
    if len(raw) > DIGESTED:
        return _NONE
    return hashlib.sha256(raw).digest()[:16]  # processors have instructions for it


def _last(indices: Tensor) -> int:
    """The largest of sorted indices, -1 if there are none."""
    return int(indices[-1]) if indices.numel() else -1


def _thinned(points: Longs, weights: Longs) -> tuple[Longs, Longs]:
    """Merge neighbouring points until at most `_KEPT` are left; the sum of weights stays."""
    if len(points) <= _KEPT:
        return points, weights
    starts = np.arange(_KEPT, dtype=np.int64) * len(points) // _KEPT
    return points[starts], np.add.reduceat(weights, starts)
