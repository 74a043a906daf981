"""Tensors in buckets: many small tensors are sent as one.

A large tensor that is sent in its own dtype is sent from its own memory, and received there. All
others are copied into workspace, which rounds those that are sent in another dtype, and the result
is copied back. A bucket is filled while the one before it is on the wire. A tensor larger than a
bucket is cut. So the workspace is two buckets.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (VLDB 2020),
section 3.2, has buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..base.memory import typed
from ..base.tensors import flattened, is_plain, plain, write
from ..group.group import Group
from ..group.pending import Pending
from ..schedules import dense_all_reduce
from ..sparse.request import travelling
from ..verbs.carrier import carried_by, verbs_of
from ..wire.interface import Lease

ALONE = 1 << 20  # bytes of a tensor that is sent from its own memory
BUCKET = 8 << 20  # bytes of a bucket
_UNDER_WAY = 2  # buckets at once: the next begins while the last chunks of one are on the wire


def reduce_dense(
    group: Group, tensors: Iterable[Tensor], op: str, wire_dtype: torch.dtype | None = None
) -> None:
    """Reduce tensors over all ranks, in place; collective.

    Args:
        group: the ranks that take part.
        tensors: of the same shapes and dtypes on every rank; they are written.
        op: one of `weft.kernels.OPS`, which there is for their dtypes.
        wire_dtype: the dtype that wider floating-point numbers, and their sums, are rounded to.
    """
    in_buckets(group, tensors, lambda flat: dense_all_reduce(group, flat, op), wire_dtype)


def carriers_of(group: Group, tensors: Iterable[Tensor]) -> str:
    """Who carries tensors, for the opening of a call.

    Raises:
        WeftError: nobody carries one of them.
    """
    devices = {each.device for each in tensors}
    names = {carried_by(verbs_of(group, device)) for device in devices}
    return ", ".join(sorted(names))


def in_buckets(
    group: Group,
    tensors: Iterable[Tensor],
    start: Callable[[Tensor], Pending | None],
    wire_dtype: torch.dtype | None = None,
    *,
    reads: bool = True,
    writes: bool = True,
) -> None:
    """Run a collective on tensors, in place, bucket by bucket; collective.

    Args:
        group: the ranks that take part.
        tensors: of the same shapes and dtypes on every rank; they are written.
        start: starts the collective, given the 1-D memory of a bucket; None: it is through.
        wire_dtype: the dtype that wider floating-point numbers are rounded to.
        reads: whether the collective reads this rank's tensors.
        writes: whether the result is copied to this rank's tensors.
    """
    under_way: deque[_Bucket] = deque()
    for bucket in _planned(tensors, wire_dtype):
        bucket.start(group, start, reads)
        under_way.append(bucket)
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().end(writes)
    for bucket in under_way:
        bucket.end(writes)


class _Bucket:
    """Pieces of tensors that are sent together: of one dtype, and on one kind of device.

    It is filled by `add`, on the wire from `start` on, and through at `end`.

    Attributes:
        dtype: in which they are sent.
        pieces: 1-D, in order.
        copies: the tensors that are not plain and whose last piece is here, each with its plain
            copy, which the pieces are cut from.
        count: elements of all pieces.
    """

    _lease: Lease | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.pieces: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.count = 0

    def add(self, piece: Tensor) -> None:
        """Add a piece."""
        self.pieces.append(piece)
        self.count += len(piece)

    def start(self, group: Group, start: Callable[[Tensor], Pending | None], reads: bool) -> None:
        """Start the collective on the bucket, and on what its tensors have if it `reads` them."""
        first = self.pieces[0]
        if len(self.pieces) == 1 and first.dtype == self.dtype:
            self._flat = first
        else:
            self._flat = self._workspace(group, first.device)
            for place, piece in self._places() if reads else ():
                place.copy_(piece)
        self._pending = start(self._flat)

    def _workspace(self, group: Group, device: torch.device) -> Tensor:
        """Memory of the bucket's own, on the device of its tensors."""
        shape = (self.count,)
        if device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=device)
        self._lease = group.lease(self.count * self.dtype.itemsize)
        return typed(self._lease.tensor, shape, self.dtype)

    def _places(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces, each with its place in the workspace before it."""
        places = self._flat.split_with_sizes([*map(len, self.pieces)])
        return zip(places, self.pieces, strict=True)

    def end(self, writes: bool) -> None:
        """Wait for the result and, if it `writes`, copy it to the tensors."""
        if self._pending is not None:
            self._pending.wait()
        if self._flat is not self.pieces[0]:
            for place, piece in self._places() if writes else ():
                write(piece, place)
        if self._lease is not None:
            self._lease.release()
        for tensor, copy in self.copies if writes else ():
            write(tensor, copy)


def _planned(tensors: Iterable[Tensor], wire_dtype: torch.dtype | None) -> Iterator[_Bucket]:
    """The buckets; they depend only on shapes, dtypes and kinds of devices, alike on all ranks."""
    filling: dict[tuple[torch.dtype, str], _Bucket] = {}
    for tensor in (each for each in tensors if each.numel()):
        dtype = travelling(tensor.dtype, wire_dtype)
        flat = flattened(plain(tensor))
        copies = [] if is_plain(tensor) else [(tensor, flat.view(tensor.shape))]
        if dtype == tensor.dtype and tensor.nbytes >= ALONE:
            alone = _Bucket(dtype)
            alone.add(flat)
            alone.copies = copies
            yield alone
            continue
        kind, most = (dtype, tensor.device.type), BUCKET // dtype.itemsize
        bucket = filling.setdefault(kind, _Bucket(dtype))
        for first in range(0, len(flat), most):
            piece = flat[first : first + most]
            if bucket.pieces and bucket.count + len(piece) > most:
                yield bucket
                bucket = filling[kind] = _Bucket(dtype)
            bucket.add(piece)
        bucket.copies += copies
    yield from filling.values()
