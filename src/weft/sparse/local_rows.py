"""This rank's rows, as a schedule gets them: canonical, their duplicates combined when asked for.

Most schedules want all of a rank's rows at once: `values`. One that sends each row to one place, in
parts, combines the duplicates of a part while it puts the part together (`take`): no row
is copied twice, and what goes out first is ready that much earlier.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Distinct
from ..kernels.ops import OPS, Op
from ..rows import Rows
from ..wire.base import Lease, Pool, typed
from .header import shares


class LocalRows:
    """Some rows: canonical indices, and values that are combined and rounded on the way out.

    Attributes:
        indices: sorted, unique.
        row_shape: shape of a row; a rank without rows learns it when the call opens.
    """

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
            distinct: was made of their indices.
            op: combines duplicates.
            dtype: of the values that come out.
            memory: workspace.
            points: quantiles of the indices, where these are on an accelerator (`Survey`).
        """
        self.indices, self._points = distinct.indices, points
        self.row_shape = tuple(rows.row_shape)
        self._given, self._distinct, self._op, self._dtype = rows.values, distinct, op, dtype
        self._memory = memory
        self._lease: Lease | None = None
        self._values: Tensor | None = None

    @classmethod
    def of(cls, rows: Rows) -> LocalRows:
        """Rows that are canonical already."""
        distinct = Distinct(rows.indices, None, None)
        return cls(rows, distinct, OPS["sum"], rows.values.dtype, Pool())

    def __len__(self) -> int:
        return self.indices.numel()

    @property
    def values(self) -> Tensor:
        """`[k, *row_shape]`, in the order of the indices; good until `release()`."""
        if self._values is None:
            given, distinct = self._given, self._distinct
            ready = distinct.order is None and distinct.starts is None
            if (ready and given.dtype == self._dtype) or not len(self):
                self._values = given.contiguous()
            else:
                size = given[:1].numel() * self._dtype.itemsize
                self._lease = self._memory.lease(len(self) * size)
                space = typed(self._lease.tensor, (len(self), *given.shape[1:]), self._dtype)
                self._values = kernels.reduce(given, distinct, self._op, out=space)
        return self._values.view(len(self), *self.row_shape)

    def parts(self, indices: Tensor, bounds: Sequence[int], highest: int) -> list[slice]:
        """The rows from each bound up to the next; where they stay on an accelerator some more on
        both sides, as many as are between two quantiles, since the host knows no better.

        Args:
            indices: those of the rows, as they travel.
            bounds: ascending; may be too large for the dtype of the indices.
            highest: no index is above.
        """
        if self._points is None:
            return within(indices, bounds, highest)
        points, places = self._points, shares(len(self)).tolist()
        found = []
        for low, high in pairwise(bounds):
            before = bisect_left(points, low)
            start = places[before - 1] + 1 if before else 0
            found.append(slice(start, max(start, places[bisect_left(points, high)])))
        return found

    def take(self, positions: Tensor, out: Tensor) -> None:
        """Write the rows at some positions (int32) among the indices to `out`."""
        if not positions.numel():
            return
        rows = self._given, self._distinct, self._op
        if self._values is None and rows[0].is_contiguous() and kernels.reduces_some(*rows):
            kernels.reduce(*rows, out=out, rows=positions)
        else:
            kernels.take(self.values, positions, out=out)

    def release(self) -> None:
        """Give back the memory of `values`."""
        self._values = None
        if self._lease is not None:
            self._lease.release()


def within(indices: Tensor, bounds: Sequence[int], highest: int) -> list[slice]:
    """Of sorted indices, those from each bound up to the next; bounds may be too large for int64.

    Args:
        indices: sorted, unique; none is above `highest`.
        bounds: ascending.
        highest: what fits in the dtype of the indices.
    """
    keys = indices.new_tensor([max(0, min(bound, highest)) for bound in bounds])
    found = torch.searchsorted(indices, keys).tolist()
    ends = [
        indices.numel() if bound > highest else end
        for bound, end in zip(bounds, found, strict=True)
    ]
    return [slice(low, high) for low, high in pairwise(ends)]
