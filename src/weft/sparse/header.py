"""The header: what a rank says of its rows when a sparse all-reduce opens.

A header is the body of the statement that `agree` carries. Headers combine, so one made of all
ranks' headers says everything that the choice of an algorithm depends on, whether it came in one
round or in log2 P. A rank with few rows sends the rows themselves instead of describing them; when
all ranks did, the call needs no second round.

Where rows lie is told by *points*: quantiles of a rank's indices, each standing for its share of
the rank's rows. Owners of index ranges are cut from all ranks' points (`owners`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..agree import BODY
from ..wire.base import as_bytes, typed
from . import sketch

_POINTS = 128  # points of one rank
_KEPT = 1024  # points of a combined header
_FIXED = struct.Struct("<9q2?6x16s")  # 96 bytes: what follows stays aligned
_GRAIN = 16  # bytes: values begin at a multiple
_DIGESTED = 1 << 20  # bytes of indices; digesting more would take longer than it may save
_NONE = bytes(16)  # the digest of ranks that have different index sets, or too large ones
NO_LIMIT = 1 << 62

Longs = NDArray[np.int64]


@dataclass(slots=True)
class Header:
    """What one rank, or some ranks together, said.

    Attributes:
        total: rows, summed over ranks (after each rank removed its duplicates).
        most, fewest: rows of the rank with most and of that with fewest.
        highest: the largest index, -1 if there are no rows.
        capacity, tightest: rows that the smallest caller's `out` holds, and whose it is.
        alike: all ranks have the same index set, as far as sketches tell.
        fallible: somebody passed a function, which may raise.
        sketch: sample of the union of the index sets, see `sketch`.
        points, weights: indices, ascending, and how many rows lie from each to the next.
        digest: of the index set that all ranks have, if digests tell; else zeros.
    """

    total: int
    most: int
    fewest: int
    highest: int
    capacity: int
    tightest: int
    alike: bool
    fallible: bool
    sketch: Longs
    points: Longs
    weights: Longs
    digest: bytes = _NONE

    @classmethod
    def of(
        cls,
        indices: Tensor,
        rank: int,
        *,
        capacity: int | None = None,
        fallible: bool = False,
        highest: int | None = None,
    ) -> Header:
        """The header of one rank, from its sorted, unique indices; of those in any order, whose
        `highest` is told, without a sample."""
        total, indices = indices.numel(), indices if highest is None else indices[:0]
        count = indices.numel()
        parts = min(_POINTS, count)
        shares = np.arange(parts + 1, dtype=np.int64) * count // max(parts, 1)
        return cls(
            total,
            total,
            total,
            last(indices) if highest is None else highest,
            NO_LIMIT if capacity is None else capacity,
            rank,
            True,
            fallible,
            kernels.sketch(indices, sketch.SIZE).numpy(),
            kernels.quantiles(indices, max(parts, 1)).numpy()[:parts],
            np.diff(shares),
            _digest(indices),
        )

    def pack(self) -> Tensor:
        """The header as bytes."""
        fixed = _FIXED.pack(
            self.total,
            self.most,
            self.fewest,
            self.highest,
            self.capacity,
            self.tightest,
            len(self.sketch),
            len(self.points),
            0,
            self.alike,
            self.fallible,
            self.digest,
        )
        parts = [np.frombuffer(fixed, np.uint8)]
        parts += [part.view(np.uint8) for part in (self.sketch, self.points, self.weights)]
        return torch.from_numpy(np.concatenate(parts))

    @classmethod
    def unpack(cls, body: Tensor) -> Header:
        """A header from bytes, which may be reused afterwards."""
        raw = body.numpy()
        fixed = _FIXED.unpack_from(raw.data)
        total, most, fewest, highest, capacity, tightest, sampled, points, _, *said = fixed
        alike, fallible, digest = said
        longs = raw[_FIXED.size :].view(np.int64).copy()
        return cls(
            total,
            most,
            fewest,
            highest,
            capacity,
            tightest,
            alike,
            fallible,
            sketch=longs[:sampled],
            points=longs[sampled : sampled + points],
            weights=longs[sampled + points :],
            digest=digest,
        )

    def combine(self, other: Header) -> Header:
        """The header of this one's ranks and of the other's, which are higher."""
        return Header.together([self, other])

    @classmethod
    def together(cls, headers: Sequence[Header]) -> Header:
        """One header of several, in the order of their ranks."""
        first = headers[0]
        alike = all(
            one.alike and one.most == first.most and np.array_equal(one.sketch, first.sketch)
            for one in headers
        )
        tightest = min(headers, key=lambda one: one.capacity)
        points = np.concatenate([one.points for one in headers])
        weights = np.concatenate([one.weights for one in headers])
        order = np.argsort(points, kind="stable")
        return cls(
            sum(one.total for one in headers),
            max(one.most for one in headers),
            min(one.fewest for one in headers),
            max(one.highest for one in headers),
            tightest.capacity,
            tightest.tightest,
            alike,
            any(one.fallible for one in headers),
            sketch.merge([one.sketch for one in headers]),
            *_thinned(points[order], weights[order]),
            first.digest if all(one.digest == first.digest for one in headers) else _NONE,
        )

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


def combined(lower: Tensor, upper: Tensor) -> Tensor:
    """`Header.combine` of headers as bytes, for `agree`."""
    return Header.unpack(lower).combine(Header.unpack(upper)).pack()


def _digest(indices: Tensor) -> bytes:
    """Of sorted, unique indices; that two sets have the same is out of the question."""
    raw = as_bytes(_narrow(indices))  # half of the bytes; where some do not fit, it is no such set
    if len(raw) > _DIGESTED:
        return _NONE
    return hashlib.sha256(raw.numpy().data).digest()[:16]  # processors know it


def last(indices: Tensor) -> int:
    """The largest of sorted indices, -1 if there are none."""
    return int(indices[-1]) if indices.numel() else -1


def _narrow(indices: Tensor) -> Tensor:
    """Sorted indices, as int32 where they fit."""
    return indices.int() if last(indices) < 2**31 else indices


def _thinned(points: Longs, weights: Longs) -> tuple[Longs, Longs]:
    """At most `_KEPT` points, neighbours brought together; the weights' sum stays."""
    if len(points) <= _KEPT:
        return points, weights
    starts = np.arange(_KEPT, dtype=np.int64) * len(points) // _KEPT
    return points[starts], np.add.reduceat(weights, starts)


@dataclass(frozen=True, slots=True)
class RowsInHeader:
    """A rank's rows, sent in place of its header: indices, the largest of them, and values."""

    indices: Tensor
    values: Tensor
    highest: int
    capacity: int | None
    fallible: bool

    @property
    def total(self) -> int:
        """How many rows there are."""
        return self.indices.numel()

    @staticmethod
    def fit(count: int, index_bytes: int, row_bytes: int) -> bool:
        """Whether so many rows may travel so."""
        return _FIXED.size + count * (index_bytes + row_bytes) + _GRAIN <= BODY

    def pack(self) -> Tensor:
        """The rows as bytes."""
        count, wide = self.indices.numel(), self.indices.dtype is torch.int64
        limit = NO_LIMIT if self.capacity is None else self.capacity
        # -1 in place of the sketch's length is what tells rows from a header
        head = _FIXED.pack(
            count, 0, 0, self.highest, limit, 0, -1, 0, 0, wide, self.fallible, _NONE
        )
        parts = (np.frombuffer(head, np.uint8), *map(_numpy_bytes, (self.indices, self.values)))
        start = _FIXED.size + -(-parts[1].size // _GRAIN) * _GRAIN
        body = np.empty(start + parts[2].size, np.uint8)
        body[: _FIXED.size] = parts[0]
        body[_FIXED.size : _FIXED.size + parts[1].size] = parts[1]
        body[start:] = parts[2]
        return torch.from_numpy(body)

    @staticmethod
    def are_in(body: Tensor) -> bool:
        """Whether a statement's body holds rows rather than a header."""
        return bool(_FIXED.unpack_from(body.numpy().data)[6] == -1)

    @classmethod
    def unpack(cls, body: Tensor, row_shape: tuple[int, ...], dtype: torch.dtype) -> RowsInHeader:
        """Rows from bytes, as views of them."""
        count, _, _, highest, limit, *_, wide, fallible, _ = _FIXED.unpack_from(body.numpy().data)
        index = torch.int64 if wide else torch.int32
        start = _FIXED.size + -(-count * index.itemsize // _GRAIN) * _GRAIN
        return cls(
            typed(body, (count,), index, _FIXED.size),
            typed(body, (count, *row_shape), dtype, start),
            highest,
            None if limit == NO_LIMIT else limit,
            fallible,
        )

    def described(self, rank: int) -> Header:
        """The header of these rows."""
        return Header.of(self.indices, rank, capacity=self.capacity, fallible=self.fallible)


def of_all(everyone: Sequence[RowsInHeader]) -> Header:
    """The header of ranks that all sent their indices: without a sample, since nobody needs it."""
    counts = [said.total for said in everyone]
    limits = [NO_LIMIT if said.capacity is None else said.capacity for said in everyone]
    nothing = np.empty(0, np.int64)
    return Header(
        sum(counts),
        max(counts),
        min(counts),
        max(said.highest for said in everyone),
        min(limits),
        limits.index(min(limits)),
        False,
        any(said.fallible for said in everyone),
        nothing,
        nothing,
        nothing,
    )


def _numpy_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = as_bytes(tensor.contiguous()).numpy()
    return array
