"""Tensors in buckets: many small ones travel as one, in the dtype they travel in.

What is large and travels as it is, goes out and comes in where it lies. All else is copied into
workspace, which is where it is rounded if it travels in another dtype than its own, and what comes
of it is copied back. A bucket is filled while the one before it is under way. What is larger than a
bucket is cut: so workspace is that of two buckets.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (VLDB 2020),
section 3.2, has buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..sparse.request import travelling
from ..wire.base import Lease, Pending, Wire, flattened, is_plain, plain, typed, wire_for
from .rounding import narrow

_ALONE = 1 << 20  # bytes of a tensor that travels from where it is
_BUCKET = 8 << 20  # bytes of tensors that travel together
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
    in_buckets(wire, gradients, lambda over, flat: over.dense_all_reduce(flat, op), wire_dtype)


def in_buckets(
    wire: Wire,
    tensors: Iterable[Tensor],
    start: Callable[[Wire, Tensor], Pending],
    wire_dtype: torch.dtype | None = None,
    *,
    given: bool = True,
    taken: bool = True,
) -> None:
    """Do something with tensors, in place, that all ranks do; collective.

    Args:
        wire: among whom.
        tensors: of the same shapes and dtypes on every rank; they can be written.
        start: starts it, for 1-D memory of several of them, and the wire for that.
        wire_dtype: what wider floating-point numbers are rounded to.
        given: whether it needs what the tensors are on this rank.
        taken: whether they are to be what comes of it.
    """
    under_way: deque[_UnderWay] = deque()
    for bucket in _planned(tensors, wire_dtype):
        under_way.append(_UnderWay(wire, bucket, start, given))
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().end(taken)
    for each in under_way:
        each.end(taken)


@dataclass(slots=True)
class _Bucket:
    """Pieces of tensors of one kind of device that travel in one dtype, as one.

    Attributes:
        dtype: that they travel in.
        pieces: 1-D, in order.
        copies: tensors whose elements do not lie one after the other, of which the last piece is
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


def _planned(tensors: Iterable[Tensor], wire_dtype: torch.dtype | None) -> Iterator[_Bucket]:
    """What travels together. That depends on nothing but shapes, dtypes and kinds of devices."""
    filling: dict[tuple[torch.dtype, str], _Bucket] = {}
    for tensor in (each for each in tensors if each.numel()):
        dtype = travelling(tensor.dtype, wire_dtype)
        flat = flattened(plain(tensor))
        copies = [] if is_plain(tensor) else [(tensor, flat.view(tensor.shape))]
        if dtype == tensor.dtype and tensor.nbytes >= _ALONE:
            yield _Bucket(dtype, [flat], copies, len(flat))
            continue
        kind, most = (dtype, tensor.device.type), _BUCKET // dtype.itemsize
        bucket = filling.setdefault(kind, _Bucket(dtype))
        for first in range(0, len(flat), most):
            piece = flat[first : first + most]
            if bucket.pieces and bucket.count + len(piece) > most:
                yield bucket
                bucket = filling[kind] = _Bucket(dtype)
            bucket.add(piece)
        bucket.copies += copies
    yield from filling.values()


class _UnderWay:
    """A bucket, with which something is done."""

    _lease: Lease | None = None

    def __init__(
        self, wire: Wire, bucket: _Bucket, start: Callable[[Wire, Tensor], Pending], given: bool
    ) -> None:
        self._bucket, first = bucket, bucket.pieces[0]
        over = wire_for(wire, first)
        if len(bucket.pieces) == 1 and first.dtype == bucket.dtype:
            self._flat = first
        else:
            self._lease = over.lease(bucket.count * bucket.dtype.itemsize)
            self._flat = typed(self._lease.tensor, (bucket.count,), bucket.dtype)
            for place, piece in self._places() if given else ():
                narrow(piece, place)
        self._pending = start(over, self._flat)

    def _places(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Where the pieces are in workspace, and the pieces."""
        pieces = self._bucket.pieces
        return zip(self._flat.split_with_sizes([*map(len, pieces)]), pieces, strict=True)

    def end(self, taken: bool) -> None:
        """Wait for what comes of it, and bring that to where it belongs."""
        self._pending.wait()
        if self._lease is not None:
            for place, piece in self._places() if taken else ():
                piece.copy_(place)
            self._lease.release()
        for tensor, copy in self._bucket.copies if taken else ():
            tensor.copy_(copy)
