"""Dense gradients in buckets: many small ones are reduced as one, in the dtype they travel in.

What is large and travels as it is, is reduced where it is. All else is copied into workspace, which
is where it is rounded if it travels in another dtype than its own, and the sums are copied back. A
bucket is filled while the one before it is under way. What is larger than a bucket is cut: so
workspace is that of two buckets.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (VLDB 2020),
section 3.2, has buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..wire.base import Lease, Pending, Wire, flattened, is_plain, plain, typed
from .rounding import narrow, travelling
from .staging import on_host

_ALONE = 1 << 20  # bytes of a gradient that is reduced where it is
_BUCKET = 8 << 20  # bytes of gradients that are reduced together
_UNDER_WAY = 2  # buckets: while the last chunks of one travel, the first of the next do


def reduce_dense(
    wire: Wire, gradients: Iterable[Tensor], op: str, wire_dtype: torch.dtype | None
) -> None:
    """Reduce gradients over all ranks, in place; collective.

    Args:
        wire: among whom.
        gradients: of the same shapes and dtypes on every rank; they can be written.
        op: "sum" or "avg".
        wire_dtype: what wider floating-point numbers are rounded to, this rank's and the result.
    """
    under_way: deque[_UnderWay] = deque()
    for bucket in _planned(gradients, wire_dtype):
        under_way.append(_UnderWay(wire, bucket, op))
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().end()
    for each in under_way:
        each.end()


@dataclass(slots=True)
class _Bucket:
    """Pieces of gradients that travel in one dtype, and are reduced as one.

    Attributes:
        dtype: that they travel in.
        pieces: 1-D, in order.
        copies: gradients whose elements do not lie one after the other, of which the last piece is
            in here, and the copies that the pieces are of.
        count: how many elements the pieces have.
    """

    dtype: torch.dtype
    pieces: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    count: int = 0

    def add(self, piece: Tensor) -> None:
        """Take in a piece."""
        self.pieces.append(piece)
        self.count += len(piece)


def _planned(gradients: Iterable[Tensor], wire_dtype: torch.dtype | None) -> Iterator[_Bucket]:
    """What is reduced together. That depends on nothing but shapes and dtypes."""
    filling: dict[torch.dtype, _Bucket] = {}
    for gradient in (each for each in gradients if each.numel()):
        dtype = travelling(gradient.dtype, wire_dtype)
        flat = flattened(plain(gradient))
        copies = [] if is_plain(gradient) else [(gradient, flat.view(gradient.shape))]
        if dtype == gradient.dtype and gradient.nbytes >= _ALONE:
            yield _Bucket(dtype, [flat], copies, len(flat))
            continue
        bucket, most = filling.setdefault(dtype, _Bucket(dtype)), _BUCKET // dtype.itemsize
        for first in range(0, len(flat), most):
            piece = flat[first : first + most]
            if bucket.pieces and bucket.count + len(piece) > most:
                yield bucket
                bucket = filling[dtype] = _Bucket(dtype)
            bucket.add(piece)
        bucket.copies += copies
    yield from filling.values()


class _UnderWay:
    """The reduction of a bucket."""

    _lease: Lease | None = None

    def __init__(self, wire: Wire, bucket: _Bucket, op: str) -> None:
        """Fill it, and send what there is to send."""
        self._bucket, first = bucket, bucket.pieces[0]
        if len(bucket.pieces) == 1 and first.dtype == bucket.dtype and on_host(first):
            self._flat = first
        else:
            self._lease = wire.lease(bucket.count * bucket.dtype.itemsize)
            self._flat = typed(self._lease.tensor, (bucket.count,), bucket.dtype)
            for place, piece in zip(self._places(), bucket.pieces, strict=True):
                narrow(piece, place)
        self._pending: Pending = wire.dense_all_reduce(self._flat, op)

    def _places(self) -> Sequence[Tensor]:
        """Where the pieces are in workspace."""
        return self._flat.split_with_sizes([len(piece) for piece in self._bucket.pieces])

    def end(self) -> None:
        """Wait for the sums, and bring them to where they belong."""
        self._pending.wait()
        self._pending.release()
        if self._lease is not None:
            for place, piece in zip(self._places(), self._bucket.pieces, strict=True):
                piece.copy_(place)
            self._lease.release()
        for gradient, copy in self._bucket.copies:
            gradient.copy_(copy)
