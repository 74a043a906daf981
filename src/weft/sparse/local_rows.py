"""This rank's rows, as a schedule gets them: canonical; duplicates are combined on demand.

Most schedules want all of a rank's rows at once: `values`. A schedule that sends each row to one
rank, in parts, calls `take` for each part, which combines duplicates while it copies. So no row is
copied twice, and the first part can be sent earlier.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .. import kernels
from ..base.memory import Pool, typed
from ..kernels import Distinct
from ..kernels.ops import OPS, Op
from ..wire.interface import Lease
from .header import shares
from .rows import Rows


class LocalRows:
    """Some rows: canonical indices, and values that are combined and rounded when they are read.

    Attributes:
        indices: sorted, unique.
        row_shape: shape of a row; a rank without rows learns it when the call opens.
        at_hand: whether the rows are there, and need not be awaited.
    """

    at_hand = True

    def __init__(
        self,
        rows: Rows,
        distinct: Distinct,
        op: Op,
        dtype: torch.dtype,
        memory: Pool,
        points: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            rows: as they were given.
            distinct: made of their indices.
            op: combines duplicates.
            dtype: of `values`.
            memory: pool of the workspace.
            points: quantiles of the indices, if these are on an accelerator (`Survey`).
        """
        self.indices = distinct.indices
        self.row_shape = tuple(rows.row_shape)
        self._given = rows.values
        self._distinct = distinct
        self._op = op
        self._dtype = dtype
        self._memory = memory
        self._points = points
        self._lease: Lease | None = None
        self._values: Tensor | None = None

    def __len__(self) -> int:
        return self.indices.numel()

    @property
    def values(self) -> Tensor:
        """`[k, *row_shape]`, in the order of the indices; good until `release()`."""
        if self._values is None:
            given = self._given
            distinct = self._distinct
            is_canonical = distinct.order is None and distinct.starts is None
            if (is_canonical and given.dtype == self._dtype) or not len(self):
                self._values = given.contiguous()
            else:
                size = given[:1].numel() * self._dtype.itemsize
                self._lease = self._memory.lease(len(self) * size)
                space = typed(self._lease.tensor, (len(self), *given.shape[1:]), self._dtype)
                self._values = kernels.reduce(given, distinct, self._op, out=space)
        return self._values.view(len(self), *self.row_shape)

    def parts(self, indices: Tensor, bounds: Sequence[int], highest: int) -> list[slice]:
        """The rows between each bound and the next.

        On an accelerator the host knows the indices by quantiles only: a part then has some more
        rows on both sides, up to the next quantile.

        Args:
            indices: of the rows, in the dtype in which they are sent.
            bounds: ascending; may be too large for that dtype.
            highest: the largest index.
        """
        if self._points is None:
            return slices_between(indices, bounds, highest)
        points = self._points
        places = shares(len(self)).tolist()  # of the points among the rows
        parts = []
        for low, high in pairwise(bounds):
            before = bisect_left(points, low)
            start = places[before - 1] + 1 if before else 0
            stop = places[bisect_left(points, high)]
            parts.append(slice(start, max(start, stop)))
        return parts

    def pieces(self, step: int, start: int, stop: int) -> Iterator[Tensor]:
        """The values of the rows from `start` up to `stop`, in order, as they are there.

        Args:
            step: every piece but the last is a multiple of so many rows.
            start, stop: which rows.
        """
        yield self.values[start:stop]

    def source(self, part: slice) -> Callable[[int, int], Iterator[Tensor]]:
        """The values of a part of the rows, to be asked for between two numbers in the part."""

        def values(start: int, stop: int) -> Iterator[Tensor]:
            return self.pieces(max(1, stop - start), part.start + start, part.start + stop)

        return values

    def take(self, positions: Tensor, out: Tensor) -> None:
        """Write the rows at some positions (int32) among the indices to `out`."""
        if not positions.numel():
            return
        rows = self._given, self._distinct, self._op
        in_parts = self._values is None and self._given.is_contiguous()
        if in_parts and kernels.reduces_some(*rows):
            kernels.reduce(*rows, out=out, rows=positions)
        else:
            torch.index_select(self.values, 0, positions, out=out)

    def release(self) -> None:
        """Give back the memory of `values`."""
        self._values = None
        if self._lease is not None:
            self._lease.release()


class SummedRows(LocalRows):
    """Sums of an earlier stage, as rows of the next one."""

    def __init__(self, rows: Rows) -> None:
        distinct = Distinct(rows.indices, None, None)
        super().__init__(rows, distinct, OPS["sum"], rows.values.dtype, Pool())


def slices_between(indices: Tensor, bounds: Sequence[int], highest: int) -> list[slice]:
    """The part of sorted indices between each bound and the next.

    Args:
        indices: sorted, unique; none is above `highest`.
        bounds: ascending; may be too large for the dtype of the indices, and for int64.
        highest: fits in the dtype of the indices.
    """
    keys = indices.new_tensor([max(0, min(bound, highest)) for bound in bounds])
    before = torch.searchsorted(indices, keys).tolist()  # how many indices
    ends = [
        indices.numel() if bound > highest else count
        for bound, count in zip(bounds, before, strict=True)
    ]
    return [slice(low, high) for low, high in pairwise(ends)]
