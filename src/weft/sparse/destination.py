"""Memory of a call's result, and how a result that travelled in fewer bits is made in it.

A schedule does not know of `wire_dtype`. It gets rows of the dtype in which they travel, and writes
a result of that dtype to the last bytes of the result's memory. Delivery converts it in place.
"""

from __future__ import annotations

import torch

from ..base.memory import fresh, typed
from ..base.tensors import as_bytes
from .rows import Rows

_TAIL = 1 << 12  # at most so many numbers are widened through a copy, not in place


class Destination:
    """New memory for the result of one call.

    A schedule takes memory for its result from `allocate`, once, and writes to it. After it has
    ended, `deliver` makes of this what the caller gets.
    """

    def __init__(self, given: Rows, dtype: torch.dtype) -> None:
        """
        Args:
            given: the caller's rows; the result is of their kind.
            dtype: of the values that the schedule makes.
        """
        self._given = given
        self._dtype = dtype

    def allocate(self, count: int) -> Rows:
        """Memory for a schedule's result of `count` rows."""
        given = self._given
        shape = count, *given.row_shape
        wide = given.values.dtype
        device = given.values.device
        indices = fresh((count,), given.indices.dtype, device)
        values = fresh(shape, wide, device)
        self._result = Rows(indices, values, given.height)
        if wide == self._dtype:
            return self._result
        memory = as_bytes(values)
        start = memory.numel() // wide.itemsize * (wide.itemsize - self._dtype.itemsize)
        return Rows(indices, typed(memory, shape, self._dtype, start), given.height)

    def deliver(self, result: Rows) -> Rows:
        """A schedule's result as the caller gets it; call once."""
        made = self._result
        if result.values.dtype != made.values.dtype:
            _widen(result.values.view(-1), made.values.view(-1))
        return made


def _widen(narrow: torch.Tensor, wide: torch.Tensor) -> None:
    """Convert numbers in place.

    The narrow ones are the last bytes of the memory of the wide ones. Each step converts as many of
    them as fit in front of those that are not converted yet.
    """
    total = wide.numel()
    ratio = wide.itemsize // narrow.itemsize
    first = 0
    while total - first > _TAIL:
        last = ((ratio - 1) * total + first) // ratio
        wide[first:last] = narrow[first:last]
        first = last
    wide[first:] = narrow[first:].clone()
