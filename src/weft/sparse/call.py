"""One call under way: what a schedule needs to know besides its rows, and where its result goes.

A caller's function or allocator may raise while other ranks are in the middle of the schedule. The
schedule does not see the exception: `Call.trouble` keeps it, the schedule ends with harmless
values, and then the ranks tell each other (`run.settle`).

A schedule does not know of `wire_dtype`. It gets rows of that dtype, and writes a result of that
dtype to the last bytes of the result's memory. `Call.widened` then converts it in place.

So a schedule knows two dtypes of values, which are often the same: that of rows and complete sums,
and that of partial sums, which are not rounded yet. Which one travels depends on what travels:

    what                                  call by which it goes    dtype            bytes a row
    complete sums                         call                     Call.dtype       Sizes.row
    partial sums                          call.of_partials()       Call.partial     Sizes.partial
    rows on the way to who sums them      call.incoming            one of these     Sizes.incoming

The rows are partial sums themselves (`Sizes.summed`) if the schedule is a later stage of another
one; else they are rows as `Call.dtype` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from .. import kernels
from ..base.errors import WeftError
from ..base.memory import fresh, typed
from ..base.tensors import as_bytes, has_elements, lacking, overlapping
from ..group.group import Group
from ..kernels.ops import OPS, Op
from .header import Header
from .out import Out, Pair, checked
from .rows import Rows
from .sizes import Sizes

_TAIL = 1 << 12  # at most so many numbers are widened through a copy, not in place


class Onward(Protocol):
    """What becomes of the result of a schedule that is one stage of another schedule."""

    def result_at(self, indices: Tensor) -> Rows:
        """Memory for a result with these indices, which are there already.

        The ranks that get the result tell each other where it has rows, and wait for that.
        """

    def ready(self, stop: int, rank: int | None) -> None:
        """Take what does not change any more.

        Args:
            stop: up to which row: of the part of the result that a rank sums, or of all of it.
            rank: whose part; None: the rows are those of all.
        """


@dataclass(slots=True)
class Trouble:
    """The exception that a caller's function raised first, or None.

    It is apart from the call, which holds the function: that must not hold the call, or the memory
    of each call would be kept until the garbage collector runs.
    """

    error: BaseException | None = None


@dataclass
class Call:
    """What every rank knows of a call when its schedule starts.

    Attributes:
        group: the ranks that take part.
        op: the reduction; never raises.
        row_shape: shape of a row.
        index: dtype of the result's indices.
        dtype: dtype of the values that a schedule gets, and of the values that it makes.
        wide: the dtype of the caller's values, if they are rounded to `dtype`; else None.
        half: the dtype of the caller's values, if they were widened to `dtype`; else None.
        height: rows of the dense tensor, or None if unknown.
        out: where the caller wants the result.
        given: the caller's rows; the schedule may read them until it ends.
        marks: ascending indices, for rows on an accelerator.
        below: for each mark the number of result rows with a smaller index. A schedule that finds
            these numbers anyway puts them here, which saves the host a wait; else it is empty.
        trouble: what a caller's function raised.
        target: memory of the caller's that the result must be copied to at the end.
        onward: takes the result, if the schedule is one stage of another one.
        divisor: what the result is divided by.
        counts: how many rows each rank has, where the opening tells; else it is empty.
        header: the combined headers of all ranks; set once the ranks have agreed.
        sizes: of the call; set once the ranks have agreed.
    """

    group: Group
    op: Op
    row_shape: tuple[int, ...] = ()
    index: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float32
    height: int | None = None
    wide: torch.dtype | None = None
    half: torch.dtype | None = None
    out: Out = None
    given: Rows | None = None
    marks: Sequence[int] = ()
    below: Sequence[int] = ()
    trouble: Trouble = field(default_factory=Trouble)
    target: Rows | None = None
    onward: Onward | None = None
    counts: Sequence[int] = ()
    header: Header = field(init=False)
    sizes: Sizes = field(init=False)
    divisor: int = field(init=False)
    _widened: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.divisor = self.group.size if self.op.mean else 1
        if not self.op.builtin:
            self.op = replace(self.op, function=_guarded(self.op.function, self.trouble))

    @property
    def device(self) -> torch.device:
        """The device of the rows and of the result."""
        return torch.device("cpu") if self.given is None else self.given.values.device

    @property
    def wire_index(self) -> torch.dtype:
        """The dtype of indices on the wire: int32 when all fit."""
        return torch.int32 if self.sizes.index == 4 else torch.int64

    @property
    def partial(self) -> torch.dtype:
        """The dtype of partial sums."""
        return partial_dtype(self.op, self.dtype, self.wide)

    @property
    def incoming(self) -> Call:
        """The call as far as rows go to those who sum them: they may be sums of some ranks."""
        return self.of_partials() if self.sizes.summed else self

    def among(self, group: Group, sizes: Sizes) -> Call:
        """The call of a stage, whose ranks have not told how many rows they bring.

        Args:
            group: of these ranks.
            sizes: that they have.
        """
        stage = copy(self)
        stage.group = group
        stage.sizes = sizes
        stage.counts = ()
        return stage

    @property
    def chunk_rows(self) -> int:
        """Rows of values in a chunk."""
        return max(1, self.sizes.chunk // max(self.sizes.row, 1))

    def result(self, count: int) -> Rows:
        """Memory for a result of `count` rows: the caller's `out` if it can be used, else new."""
        shape = count, *self.row_shape
        dtype = self.wide or self.dtype
        callers = self.index, self.half or dtype
        place: Pair | None = None
        if callable(self.out):
            try:
                made = self.out(count, self.row_shape, callers)
                place = checked(made, callers, self.row_shape, " returned")
                if place[0].numel() != count:
                    raise WeftError(f"out returned {place[0].numel()} rows for {count}")
            except BaseException as error:
                self.trouble.error = self.trouble.error or error
                place = None
        elif self.out is not None and count <= self.out[0].numel():
            place = self.out[0][:count], self.out[1][:count]
        if place is not None and not self._can_write_to(place):
            self.target = Rows(*place, self.height)
            place = None
        if place is None:
            place = fresh((count,), self.index, self.device), fresh(shape, dtype, self.device)
        indices, values = place
        result = Rows(indices, values, self.height)
        if self.wide is None:
            return result
        self._widened = result
        memory = as_bytes(values)
        start = memory.numel() // self.wide.itemsize * (self.wide.itemsize - self.dtype.itemsize)
        return Rows(indices, typed(memory, shape, self.dtype, start), self.height)

    def result_at(self, *lists: Tensor) -> Rows:
        """Memory for a result with these indices, one list after the other, which are copied.

        Nothing is sent, unless the schedule is one stage of another one: see `Onward.result_at`.
        """
        if self.onward is not None:
            return self.onward.result_at(torch.cat(lists))
        result = self.result(sum(map(len, lists)))
        torch.cat(lists, out=result.indices)
        return result

    def ready(self, stop: int, rank: int | None = None) -> None:
        """Say that some of the result is as it will be; a schedule need not. See `Onward.ready`."""
        if self.onward is not None:
            self.onward.ready(stop, rank)

    def widened(self, result: Rows) -> Rows:
        """A schedule's result, converted in place to the dtype of the caller's values; call once.

        The narrow values are the last bytes of the memory of the wide values. Each step converts
        as many of them as fit in front of the values that are not converted yet.
        """
        if self.wide is None:
            return result
        narrow = result.values.view(-1)
        wide = self._widened.values.view(-1)
        total = wide.numel()
        ratio = self.wide.itemsize // self.dtype.itemsize
        first = 0
        while total - first > _TAIL:
            last = ((ratio - 1) * total + first) // ratio
            wide[first:last] = narrow[first:last]
            first = last
        wide[first:] = narrow[first:].clone()
        return self._widened

    def of_partials(self) -> Call:
        """The same for partial sums: they are neither divided nor rounded at the end."""
        op = OPS["sum"] if self.op.mean else self.op
        call = Call(self.group, op, self.row_shape, self.index, self.partial, self.height)
        call.given = self.given
        call.header = self.header
        call.sizes = self.sizes.of_partials()
        return call

    def finish(self, partial: Tensor, values: Tensor) -> None:
        """Write complete sums to the result: divide them, and round them once."""
        if partial is not values or self.divisor != 1:
            kernels.finish(partial, values, self.divisor)

    def _can_write_to(self, place: Pair) -> bool:
        """Whether a schedule can write its result to memory of the caller's."""
        is_there = place[1].device == self.device
        return is_there and self.half is None and not self._is_read(place)

    def _is_read(self, place: Pair) -> bool:
        """Whether a result in this memory would overwrite the caller's rows."""
        rows = () if self.given is None else (self.given.indices, self.given.values)
        return any(overlapping(one, other) for one in rows for other in place)


def _guarded(
    function: Callable[[Tensor, Tensor], Tensor], trouble: Trouble
) -> Callable[[Tensor, Tensor], Tensor]:
    """A caller's function of two operands, which never raises: it returns the left one instead."""

    def combine(left: Tensor, right: Tensor) -> Tensor:
        if trouble.error is not None:
            return left
        try:
            both = function(left, right)
            if not isinstance(both, Tensor):
                raise TypeError(f"op returned a {type(both).__name__}, not a tensor")
            if not has_elements(both):
                raise ValueError(f"op returned a tensor that is {lacking(both)}")
            if _kind(both) != _kind(left):
                result, operands = map(_described, (both, left))
                raise ValueError(f"op returned {result} for two operands of {operands}")
        except BaseException as error:
            trouble.error = error
            return left
        return both.detach()

    return combine


def _kind(values: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return values.shape, values.dtype, values.device


def _described(values: Tensor) -> str:
    return f"{tuple(values.shape)} of {values.dtype} on {values.device}"


def partial_dtype(op: Op, dtype: torch.dtype, wide: torch.dtype | None) -> torch.dtype:
    """The dtype of partial sums of rows that are sent as `dtype`, and were given as `wide`."""
    if wide is None:
        return op.accumulator(dtype)
    is_exact = op.builtin and not op.rounds  # min and max of rounded values
    return dtype if is_exact else wide


def row_bytes(row_shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a row's values."""
    return math.prod(row_shape) * dtype.itemsize
