"""Where the result of a call goes: memory of the caller's, or new.

A schedule does not know of `wire_dtype`. It gets rows of the dtype in which they travel, and writes
a result of that dtype to the last bytes of the result's memory. Delivery converts it in place.
"""

from __future__ import annotations

import torch

from ..base.errors import WeftError
from ..base.memory import fresh, typed
from ..base.tensors import as_bytes, mark_overwritten, overlapping
from .out import Out, Pair, checked
from .rows import Rows
from .trouble import Trouble

_TAIL = 1 << 12  # at most so many numbers are widened through a copy, not in place


class Destination:
    """Where the result of one call goes.

    A schedule takes memory for its result from `allocate`, once, and writes to it. After it has
    ended, `deliver` makes of this what the caller gets. If the caller's allocator raises, or its
    memory is not what it must be, that is kept as the call's trouble, and the memory is new.

    Attributes:
        callers: the caller's memory of the result; None: there is none, or it is not there yet.
    """

    def __init__(
        self,
        out: Out,
        given: Rows,
        dtype: torch.dtype,
        half: torch.dtype | None,
        trouble: Trouble,
    ) -> None:
        """
        Args:
            out: where the caller wants the result.
            given: the caller's rows, which a result must not overwrite; it is of their kind.
            dtype: of the values that the schedule makes.
            half: the dtype of the caller's values, if they were widened; else None.
            trouble: of the call.
        """
        self._out = out
        self._given = given
        self._dtype = dtype
        self._half = half
        self._trouble = trouble
        self.callers: Pair | None = None
        self._result: Rows | None = None  # as the caller gets it, unless it is copied
        self._target: Rows | None = None  # the caller's memory, if a schedule cannot write there

    def allocate(self, count: int) -> Rows:
        """Memory for a schedule's result of `count` rows: the caller's if possible, else new."""
        given = self._given
        shape = count, *given.row_shape
        wide = given.values.dtype
        place = self.callers = self._of_caller(count)
        if place is not None and not self._can_be_written(place):
            self._target = Rows(*place, given.height)
            place = None
        if place is None:
            device = given.values.device
            place = fresh((count,), given.indices.dtype, device), fresh(shape, wide, device)
        indices, values = place
        self._result = Rows(indices, values, given.height)
        if wide == self._dtype:
            return self._result
        memory = as_bytes(values)
        start = memory.numel() // wide.itemsize * (wide.itemsize - self._dtype.itemsize)
        return Rows(indices, typed(memory, shape, self._dtype, start), given.height)

    def deliver(self, result: Rows) -> Rows:
        """A schedule's result as the caller gets it; call once.

        Raises:
            WeftError: the schedule made its result elsewhere.
        """
        made = self._result
        has_bytes = result.values.numel() > 0
        if made is None or (has_bytes and not overlapping(result.values, made.values)):
            raise WeftError("the algorithm made its result elsewhere than in `call.result`")
        if result.values.dtype != made.values.dtype:
            _widen(result.values.view(-1), made.values.view(-1))
            result = made
        if self._target is not None:
            self._target.indices.copy_(result.indices)
            self._target.values.copy_(result.values)
            result = self._target
        if self.callers is not None:
            mark_overwritten(self.callers)
        return result

    def _of_caller(self, count: int) -> Pair | None:
        """The caller's memory for so many rows; None: there is none, or not enough."""
        out = self._out
        if out is None:
            return None
        if not callable(out):
            indices, values = out
            return (indices[:count], values[:count]) if count <= indices.numel() else None
        shape = tuple(self._given.row_shape)
        dtypes = self._given.indices.dtype, self._half or self._given.values.dtype
        try:
            made = checked(out(count, shape, dtypes), dtypes, shape, " returned")
            if made[0].numel() != count:
                raise WeftError(f"out returned {made[0].numel()} rows for {count}")
        except BaseException as error:
            self._trouble.error = self._trouble.error or error
            return None
        return made

    def _can_be_written(self, place: Pair) -> bool:
        """Whether a schedule can write its result to memory of the caller's."""
        given = self._given
        is_there = place[1].device == given.values.device
        if not is_there or self._half is not None:
            return False
        return not any(
            overlapping(read, written)
            for read in (given.indices, given.values)
            for written in place
        )


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
