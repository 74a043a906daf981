"""This rank's rows, as a schedule gets them: canonical, their duplicates combined when asked for.

Most schedules want all of a rank's rows at once: `values`. One that sends each row to one place, in
parts, combines the duplicates of a part while it puts the part together (`take`): no row
is copied twice, and what goes out first is ready that much earlier.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Distinct
from ..kernels.ops import OPS, Op
from ..rows import Rows
from ..wire.base import Lease, Pool, typed


class LocalRows:
    """Some rows: canonical indices, and values that are combined and rounded on the way out.

    Attributes:
        indices: sorted, unique.
        row_shape: shape of a row; a rank without rows learns it when the call opens.
    """

    def __init__(
        self, rows: Rows, distinct: Distinct, op: Op, dtype: torch.dtype, memory: Pool
    ) -> None:
        """`distinct` was made of the indices of `rows`; values come out in `dtype`."""
        self.indices = distinct.indices
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
