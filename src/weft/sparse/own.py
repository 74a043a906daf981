"""This rank's rows as they were given: duplicates are combined when somebody wants the sums.

Most schedules want all of a rank's rows at once. One that sends each row to one place, in parts,
can combine the duplicates of a part while it puts the part together: no row is copied twice, and
what goes out first is ready that much earlier (`Algorithm.uncombined`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Distinct
from ..kernels.ops import OPS, Op
from ..rows import Rows
from ..wire.memory import Lease, Pool, typed

if TYPE_CHECKING:
    from .request import Request

__all__ = ["OwnRows"]


class OwnRows:
    """Some rows: canonical indices, and values that are combined and rounded on the way out.

    Attributes:
        indices: sorted, unique.
    """

    def __init__(
        self, values: Tensor, distinct: Distinct, op: Op, dtype: torch.dtype, memory: Pool | None
    ) -> None:
        """`values` belong to what `distinct` was made of; rows come out in `dtype`."""
        self.indices = distinct.indices
        self._given, self._distinct, self._op, self._dtype = values, distinct, op, dtype
        self._memory = memory
        self._lease: Lease | None = None
        self._values: Tensor | None = None

    @classmethod
    def of(cls, rows: Rows) -> OwnRows:
        """Rows that are canonical already."""
        distinct = Distinct(rows.indices, None, None)
        return cls(rows.values, distinct, OPS["sum"], rows.values.dtype, None)

    @classmethod
    def asked(cls, request: Request, op: Op, memory: Pool) -> OwnRows:
        """Those of a call; none, where something is wrong with them."""
        values = request.rows.values
        if request.error is not None:
            values = values[:0]
        return cls(values, request.distinct, op, request.dtype, memory)

    @property
    def values(self) -> Tensor:
        """Those of all rows, in the order of the indices; computed once, good until `release()`."""
        if self._values is None:
            given, distinct = self._given, self._distinct
            if self._ready or self._memory is None or not len(given):
                self._values = given.contiguous()
            else:
                shape = (len(distinct.indices), *given.shape[1:])
                size = given[:1].numel() * self._dtype.itemsize
                self._lease = self._memory.lease(shape[0] * size)
                space = typed(self._lease.tensor, shape, self._dtype)
                self._values = kernels.reduce(given, distinct, self._op, out=space)
        return self._values

    @property
    def _ready(self) -> bool:
        """Whether the rows were given as they are wanted."""
        distinct = self._distinct
        unique = distinct.order is None and distinct.starts is None
        return unique and self._given.dtype == self._dtype

    def piece(self, rows: slice, out: Tensor) -> Tensor:
        """A range of the rows: written to `out`, or where they lie ready, a view of them."""
        if self._values is None and not self._ready and self._given.is_contiguous():
            return kernels.reduce(self._given, self._distinct, self._op, out=out, rows=rows)
        return self.values[rows]

    def take(self, positions: Tensor, out: Tensor) -> None:
        """Write the rows at some positions (int32) among the indices to `out`."""
        if not positions.numel():
            return  # who has no rows may not know their shape
        if self._values is None and self._given.is_contiguous():
            kernels.reduce(self._given, self._distinct, self._op, out=out, rows=positions)
        else:
            kernels.take(self.values, positions, out=out)

    def release(self) -> None:
        """Give back the memory of `values`."""
        self._values = None
        if self._lease is not None:
            self._lease.release()
