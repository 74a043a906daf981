"""One call under way: what every rank knows of it once it is open.

A schedule, one rank's program of a call, gets this rank's rows and the call. It knows two dtypes of
values, which are often the same: that of rows and complete sums, and that of partial sums, which
are not rounded yet. Which one travels depends on what travels:

    what                              call by which it goes   dtype                bytes a row
    complete sums                     call                    Call.dtype           Sizes.row
    partial sums                      call.of_partials()      Call.partial_dtype   Sizes.partial_row
    rows on the way to who sums them  call.incoming           one of these         Sizes.incoming

The rows are partial sums themselves (`Sizes.summed`) if the schedule is a step of another one; else
they are rows as `Call.dtype` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..base.memory import fresh
from ..group.group import Group
from ..kernels.ops import OPS, Op
from ..verbs.interface import Verbs
from .header import Header
from .rows import Rows
from .sizes import Sizes


def _ignore(stop: int) -> None:
    """The caller of a schedule need not know what is ready."""


@dataclass(frozen=True)
class Call:
    """What every rank knows of a call when its schedule starts.

    Attributes:
        group: the ranks that take part.
        op: the reduction.
        given: the caller's rows; the schedule may read them until it ends. On a rank without rows
            they have the dtypes, the row shape and the height of the others'.
        dtype: dtype of the values that a schedule gets, and of the values that it makes.
        partial_dtype: that of partial sums.
        divisor: what the result is divided by.
        header: of all ranks together; with points in a step of another schedule.
        sizes: of the call.
        fields: the fingerprint that all agreed on.
        headers: of each rank; none in a step of another schedule.
        rows_of_all: of each rank, if the opening exchange carried all of them.
        verbs: that carry the rows where no algorithm of the wire does (`plain`); else None.
        allocate: gives the memory of a result with these indices, if the schedule is one step of
            another one. The ranks that get the result then tell each other where it has rows, and
            wait for that.
        ready: is told before which row the result does not change any more; a schedule need not
            say so.
    """

    group: Group
    op: Op
    given: Rows
    dtype: torch.dtype
    partial_dtype: torch.dtype
    divisor: int
    header: Header
    sizes: Sizes
    fields: Mapping[str, str]
    headers: Sequence[Header] = ()
    rows_of_all: Sequence[Rows] | None = None
    verbs: Verbs | None = None
    allocate: Callable[[Tensor], Rows] | None = None
    ready: Callable[[int], object] = _ignore

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.given.row_shape

    @property
    def height(self) -> int | None:
        """Rows of the dense tensor, or None if unknown."""
        return self.given.height

    @property
    def wire_index(self) -> torch.dtype:
        """The dtype of indices on the wire: int32 when all fit."""
        return torch.int32 if self.sizes.index == 4 else torch.int64

    @property
    def counts(self) -> list[int]:
        """How many rows each rank has; empty in a step of another schedule."""
        return [one.total for one in self.headers]

    @property
    def distribution(self) -> Header:
        """The header with points, which say where all rows lie. Of rows that are combined."""
        return self.header.with_points_of(self.headers) if self.headers else self.header

    @property
    def chunk_rows(self) -> int:
        """Rows of values in a chunk."""
        return max(1, self.sizes.chunk // max(self.sizes.row, 1))

    @property
    def incoming(self) -> Call:
        """The call as far as rows go to those who sum them: they may be sums of some ranks."""
        return self.of_partials() if self.sizes.summed else self

    def of_partials(self) -> Call:
        """The same for partial sums: they are neither divided nor rounded at the end."""
        return replace(
            self,
            op=OPS["sum"] if self.op.mean else self.op,
            dtype=self.partial_dtype,
            divisor=1,
            sizes=self.sizes.but(row=self.sizes.partial_row),
        )

    def result(self, count: int) -> Rows:
        """New memory for a result of `count` rows, in the dtype in which it travels."""
        given = self.given
        indices = fresh((count,), given.indices.dtype)
        values = fresh((count, *self.row_shape), self.dtype)
        return Rows(indices, values, given.height)

    def delivered(self, result: Rows) -> Rows:
        """A result in the caller's dtype."""
        dtype = self.given.values.dtype
        if result.values.dtype == dtype:
            return result
        values = fresh(result.values.shape, dtype, result.values.device)
        return replace(result, values=values.copy_(result.values))

    def result_at(self, *lists: Tensor) -> Rows:
        """Memory for a result with these indices, one list after the other, which are copied.

        Nothing is sent, unless the schedule is one step of another one: see `allocate`.
        """
        if self.allocate is not None:
            return self.allocate(torch.cat(lists))
        result = self.result(sum([indices.numel() for indices in lists]))
        torch.cat(lists, out=result.indices)
        return result

    def finish(self, partial: Tensor, values: Tensor) -> None:
        """Write complete sums to the result: divide them, and round them once."""
        kernels.finish(partial, values, self.divisor)


def dtype_of_partials(op: Op, dtype: torch.dtype, own: torch.dtype) -> torch.dtype:
    """The dtype of partial sums of rows that are sent as `dtype`, and were given as `own`."""
    if own == dtype:
        return op.accumulator(dtype)
    is_exact = op.builtin and not op.rounds  # min and max of rounded values
    return dtype if is_exact else own


def row_bytes(row_shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a row's values."""
    return math.prod(row_shape) * dtype.itemsize
