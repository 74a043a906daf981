"""Dense gradients in buckets: many small ones are reduced as one, in the dtype they travel in.

What travels as it is and is large is reduced where it is. All else is copied into workspace of the
host, which is where it is rounded if it travels in another dtype than its own, and the sums are
copied back, both in the chunks in which it travels: so links do not wait for that. Of what is
larger than a bucket, each bucket takes a piece: so workspace is that of two buckets.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training" (VLDB 2020),
section 3.2, has buckets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from .._torch import copy_each
from ..wire import dense, near
from ..wire.arithmetic import arithmetic
from ..wire.base import Pending, Wire, flattened, is_plain, plain
from ..wire.memory import Lease, typed
from .movement import on_host
from .pipeline import Pipeline, Reducing
from .rounding import narrow, travelling

__all__ = ["NEAR", "Prepared", "reduce_dense", "reductions"]

_ALONE, _FAR = 1 << 18, 32 << 20
# = bytes of a gradient that is reduced where it is, and of gradients that are reduced together
_NEAR_ALONE, NEAR = 1 << 20, 32 << 20  # the same where all can read each other's memory
_AHEAD = 1 << 20  # bytes that are copied before ranks have agreed; more would keep links waiting


def reduce_dense(
    wire: Wire, gradients: Sequence[Tensor], op: str, wire_dtype: torch.dtype | None
) -> None:
    """Reduce gradients over all ranks, in place; collective.

    Args:
        wire: among whom.
        gradients: of the same shapes and dtypes on every rank; they can be written.
        op: "sum" or "avg".
        wire_dtype: what wider floating-point numbers are rounded to, this rank's and the result.
    """
    Pipeline.of(wire).run(wire, reductions(wire, gradients, op, wire_dtype))


def reductions(
    wire: Wire, gradients: Sequence[Tensor], op: str, wire_dtype: torch.dtype | None
) -> list[Reducing]:
    """What `reduce_dense` does, in its order."""
    return [_Reduction(wire, each, op) for each in _planned(wire, gradients, wire_dtype)]


class Prepared:
    """Reductions of gradients, prepared before it is known whether all ranks do the same.

    What is copied into workspace is there already of the first bucket, if that is not much or peers
    can read it there: so where it lies may be told in a statement that goes out in any case, which
    saves the round in which ranks would tell each other. The gradients are left as they are.
    """

    def __init__(
        self,
        wire: Wire,
        gradients: Sequence[Tensor],
        op: str,
        wire_dtype: torch.dtype | None,
        *,
        most: int = _AHEAD,
    ) -> None:
        """Plan as `reduce_dense`, and copy a first bucket of at most so many bytes."""
        self._wire, self._op = wire, op
        self._buckets = _planned(wire, gradients, wire_dtype)
        first = self._buckets[0] if self._buckets else _Bucket(torch.uint8)
        self.is_loaded = not first.in_place and dense.SMALL < first.nbytes <= most
        self._lease = wire.lease(first.nbytes if self.is_loaded else 0)
        if self.is_loaded:
            self._flat = first.in_workspace(self._lease.tensor)
            self._stage = _Staged(self._flat, first.pieces)
            self._stage.load(0, len(self._flat))
            self._stage.is_loaded = True

    def reduce(self) -> None:
        """Reduce the gradients, in place; collective, though not all need have prepared it."""
        made = (self._lease, self._stage) if self.is_loaded else None
        first = [_Reduction(self._wire, each, self._op, made) for each in self._buckets[:1]]
        Pipeline.of(self._wire).run(self._wire, first + self._rest())

    def _rest(self) -> list[_Reduction]:
        return [_Reduction(self._wire, each, self._op) for each in self._buckets[1:]]

    @property
    def told(self) -> bytes:
        """What to tell each peer of the first bucket, if it is loaded."""
        return near.places_of(self._flat, self._flat)

    def take(self, heard: Mapping[int, bytes]) -> None:
        """Reduce the gradients, in place; collective, and all ranks told of the same buckets.

        Args:
            heard: what each peer told.
        """
        combine, flat = arithmetic(self._op, self._flat)
        places = {peer: near.places_in(each) for peer, each in heard.items()}
        near.all_reduce(self._wire, flat, combine, flat, places)
        self._stage.store(0, len(self._flat))
        Pipeline.of(self._wire).run(self._wire, self._rest())

    def release(self) -> None:
        """Give back the workspace, if that was not done."""
        self._lease.release()


def _planned(
    wire: Wire, gradients: Sequence[Tensor], wire_dtype: torch.dtype | None
) -> list[_Bucket]:
    """What is reduced together."""
    # what is cut where may not depend on where and how a gradient lies in this rank's memory
    alone, most = (_NEAR_ALONE, NEAR) if wire.near else (_ALONE, _FAR)
    buckets: list[_Bucket] = []
    filling: dict[torch.dtype, _Bucket] = {}
    travels: dict[torch.dtype, torch.dtype] = {}
    for gradient in map(_Gradient, gradients):
        own, count = gradient.dtype, gradient.count
        dtype = travels.get(own)
        if dtype is None:
            dtype = travels[own] = travelling(own, wire_dtype)
        if own == dtype and count * own.itemsize >= alone:
            buckets.append(_Bucket(dtype))
            buckets[-1].add(gradient, 0, count)
            continue
        step = most // dtype.itemsize
        for first in range(0, count, step):
            last = min(first + step, count)
            nbytes = (last - first) * dtype.itemsize
            bucket = filling.get(dtype)
            if bucket is None or bucket.nbytes + nbytes > most:
                bucket = filling[dtype] = _Bucket(dtype)
                buckets.append(bucket)
            bucket.add(gradient, first, last)
    return buckets


class _Gradient:
    """A gradient as numbers one after the other; if it does not lie so, in a copy meanwhile."""

    __slots__ = ("_copied", "_flat", "_missing", "_tensor", "count", "dtype")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.dtype, self.count = tensor, tensor.dtype, tensor.numel()
        self._flat: Tensor | None = None
        self._copied, self._missing = False, self.count

    @property
    def on_host(self) -> bool:
        return on_host(self._tensor)

    def flat(self, first: int, last: int) -> Tensor:
        """Some of its elements, 1-D."""
        flat = self._flat
        if flat is None:
            self._copied = not is_plain(self._tensor)
            self._flat = flat = flattened(plain(self._tensor) if self._copied else self._tensor)
        return flat if last - first == self.count else flat[first:last]

    def stored(self, count: int) -> None:
        """So many elements more are as they shall be."""
        self._missing -= count
        if self._copied and not self._missing:
            assert self._flat is not None
            self._tensor.copy_(self._flat.view(self._tensor.shape))


_Piece = tuple[_Gradient, int, int]
"""Some elements of a gradient: the first, and their end."""


@dataclass(slots=True)
class _Bucket:
    """Pieces of gradients that travel in one dtype, and are reduced as one.

    Attributes:
        dtype: that they travel in.
        pieces: in order.
        count: how many elements they have.
    """

    dtype: torch.dtype
    pieces: list[_Piece] = field(default_factory=list)
    count: int = 0

    def add(self, gradient: _Gradient, first: int, last: int) -> None:
        """Take some elements of a gradient in, behind the others."""
        self.pieces.append((gradient, first, last))
        self.count += last - first

    @property
    def nbytes(self) -> int:
        """Bytes that travel: of its workspace, if it is not reduced where it is."""
        return self.count * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether it is reduced where it is, which only this rank knows."""
        gradient = self.pieces[0][0] if len(self.pieces) == 1 else None
        return gradient is not None and gradient.dtype == self.dtype and gradient.on_host

    def in_workspace(self, memory: Tensor) -> Tensor:
        """Room for its numbers."""
        return typed(memory, (self.count,), self.dtype)


class _Reduction:
    """The reduction of a bucket, as a `Pipeline` takes it."""

    def __init__(
        self,
        wire: Wire,
        bucket: _Bucket,
        op: str,
        made: tuple[Lease, _Staged] | None = None,
    ) -> None:
        """Of a bucket, for which there may be workspace already."""
        self._wire, self._bucket, self._op, self._made = wire, bucket, op, made
        self._in_place = bucket.in_place
        self._begun: tuple[dense.Reduction, Lease] | None = None
        self.done = False

    @property
    def overlaps(self) -> bool:
        return dense.in_parts(self._wire, self._bucket.nbytes)

    def begin(self) -> None:
        wire, bucket = self._wire, self._bucket
        if self._made is not None:
            lease, stage = self._made
        else:
            lease = wire.lease(0 if self._in_place else bucket.nbytes)
        # not `wire.dense_all_reduce`: whether it is in place, only this rank knows
        if self._in_place:
            gradient, start, end = bucket.pieces[0]
            begun = dense.all_reduce(wire, gradient.flat(start, end), self._op, beside=True)
        else:
            flat = bucket.in_workspace(lease.tensor)
            if self._made is None:
                stage = _Staged(flat, bucket.pieces)
            begun = dense.all_reduce(wire, flat, self._op, stage=stage, beside=True)
        self._begun = begun, lease
        self._see()

    @property
    def awaited(self) -> Pending | None:
        return self._begun[0].awaited if self._begun is not None else None

    def step(self) -> None:
        assert self._begun is not None
        self._begun[0].step()
        self._see()

    def proceed(self) -> None:
        if not self.done:
            assert self._begun is not None
            self._begun[0].proceed()
            self._see()

    def _see(self) -> None:
        """Whether that is the end of it."""
        assert self._begun is not None
        begun, lease = self._begun
        if begun.done and not self.done:
            begun.release()
            lease.release()
            if self._in_place:
                gradient, first, last = self._bucket.pieces[0]
                gradient.stored(last - first)
            self.done = True


class _Staged:
    """Pieces one after the other in workspace, rounded if its dtype is narrower.

    Attributes:
        is_loaded: whether all of them are there, and need not be loaded any more.
    """

    def __init__(self, flat: Tensor, pieces: Sequence[_Piece]) -> None:
        self._flat, self._pieces, self.is_loaded = flat, pieces, False
        sizes = [last - first for _, first, last in pieces]
        self._starts = [*accumulate(sizes, initial=0)]
        self._places = flat.split_with_sizes(sizes)
        # torch would round these twice
        self._twice = flat.dtype.itemsize == 2 and any(
            gradient.dtype is torch.float64 for gradient, _, _ in pieces
        )

    def _of(self, first: int, last: int) -> tuple[list[_Piece], list[Tensor]]:
        """The pieces that these elements are of, cut to them, and their places in workspace."""
        starts = self._starts
        begin, end = bisect_right(starts, first) - 1, bisect_left(starts, last)
        pieces, places = list(self._pieces[begin:end]), list(self._places[begin:end])
        for number in {begin, end - 1}:  # of all others all elements are among these
            low, high = max(first, starts[number]), min(last, starts[number + 1])
            gradient, start, _ = pieces[number - begin]
            start -= starts[number]
            pieces[number - begin] = gradient, start + low, start + high
            places[number - begin] = self._flat[low:high]
        return pieces, places

    def load(self, first: int, last: int) -> None:
        if first < last and not self.is_loaded:
            pieces, places = self._of(first, last)
            here = [gradient.flat(start, end) for gradient, start, end in pieces]
            if all(values.dtype == self._flat.dtype and values.is_cpu for values in here):
                torch.cat(here, out=self._flat[first:last])  # a third of the time of many copies
            elif self._twice:
                for values, place in zip(here, places, strict=True):
                    narrow(values, place)
            else:  # as copy_ of each, in one call
                copy_each(places, here)

    def store(self, first: int, last: int) -> None:
        if first < last:
            pieces, places = self._of(first, last)
            copy_each([each.flat(start, end) for each, start, end in pieces], places)
            for gradient, start, end in pieces:
                gradient.stored(end - start)
