"""Kernels over values: rows of the same index are reduced, and combined in the order of the ranks.

Machine code (`loops`) serves built-in operations on the CPU, for the kinds of numbers in `_SUMS`;
else `reference`. Tensors become addresses, and large work goes to threads: what is given is checked
here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import jit, pool, reference
from .indices import INDICES, union
from .ops import Op
from .reference import Distinct

_BLOCK = 1 << 17  # numbers that are divided at once
KINDS = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    **INDICES,
}
"""Numbers, as instances of loops name them."""
_SUMS = {
    "f32": ("f32", "f16", "bf16"),  # also as they are sent
    "f16": ("f16", "f32", "f64"),
    "bf16": ("bf16", "f32", "f64"),
    "f64": ("f64",),
    "i32": ("i32",),
    "i64": ("i64",),
}
"""Of which kinds rows are summed by machine code, into which; `reference` serves all others."""


def reduce(values: Tensor, distinct: Distinct, op: Op, out: Tensor | None = None) -> Tensor:
    """Combine the rows of each distinct index, in input order, rounding once.

    Args:
        values: `[k, *row_shape]`, the rows of the indices that `distinct` was made from.
        distinct: their distinct indices.
        op: how to combine; a callable is given neighbours of all indices at once.
        out: `[u, *row_shape]` of `values.dtype`, of `op.accumulator(values.dtype)`, or for floating
            point of half precision, to be filled; by default a new tensor of `values.dtype`.

    Returns:
        `out`. Without `out`, where the indices were sorted and unique, `values` itself.

    Raises:
        ValueError: there is not one row for each index, or `out` has another shape.

    Example:
        >>> from weft.kernels import OPS, distinct
        >>> values = torch.tensor([[1.0], [2.0], [4.0]])
        >>> reduce(values, distinct(torch.tensor([7, 2, 7])), OPS["sum"])
        tensor([[2.],
                [5.]])
    """
    _check_count(values, distinct)
    if out is None:
        if distinct.order is None and distinct.starts is None:
            return values
        out = values.new_empty((distinct.indices.numel(), *values.shape[1:]))
    else:
        _check_shape(out, distinct.indices, values)
    if out.numel() == 0:
        return out
    total = out
    if values.dtype is torch.float64 and out.dtype.itemsize == 2:  # for which there is no loop
        total = torch.empty_like(out, dtype=values.dtype)
    if not _reduced(values, distinct, op, total):
        reference.reduce(values.detach(), distinct, op, total)
    if total is not out:
        finish(total, out)
    return out


def reduce_some(values: Tensor, distinct: Distinct, op: Op, rows: Tensor, out: Tensor) -> bool:
    """Combine the rows of some of the distinct indices, as `reduce` does those of all.

    Args:
        values: as for `reduce`.
        distinct: their distinct indices.
        op: how to combine.
        rows: the numbers of some of the distinct indices, int32 `[n]`, in any order.
        out: `[n, *row_shape]`, to be filled.

    Returns:
        False, and nothing was done, where only `reduce` of all serves: there is no loop for these.

    Raises:
        IndexError: a number in `rows` is not that of a distinct index.
        ValueError: as `reduce`.

    Example:
        >>> from weft.kernels import OPS, distinct
        >>> values, out = torch.tensor([[1.0], [2.0], [4.0]]), torch.empty(1, 1)
        >>> found = distinct(torch.tensor([7, 2, 7]))
        >>> reduce_some(values, found, OPS["sum"], torch.tensor([1], dtype=torch.int32), out)
        True
        >>> out
        tensor([[5.]])
    """
    _check_count(values, distinct)
    _check_shape(out, rows, values)
    return _reduced(values, distinct, op, out, rows)


def _check_count(values: Tensor, distinct: Distinct) -> None:
    count, order, starts = values.shape[0], distinct.order, distinct.starts
    given = distinct.indices.numel() if order is None else order.numel()
    if starts is not None and order is None:
        given = int(starts[-1]) if starts.is_cpu else count
    if count != given:
        raise ValueError(f"there are {given} indices and {count} rows: give one row for each")


def _check_shape(out: Tensor, indices: Tensor, values: Tensor) -> None:
    shape = indices.numel(), *values.shape[1:]
    if out.shape != shape:
        raise ValueError(f"out is {tuple(out.shape)}, the result {shape}: make them equal")


def _reduced(
    values: Tensor, distinct: Distinct, op: Op, out: Tensor, rows: Tensor | None = None
) -> bool:
    """Reduce to all distinct indices, or to some, by machine code; False: there is none for it."""
    order, starts = distinct.order, distinct.starts
    if order is None and starts is None:
        return False
    width, loop = _loop("take" if starts is None else "reduce", values, out, op)
    if loop is None:
        return False
    if order is None:
        order = torch.arange(len(values))
    if starts is None:
        order = order if rows is None else order.index_select(0, rows)
    else:
        begins, ends = starts[:-1], starts[1:]
        if rows is not None:
            begins, ends = begins.index_select(0, rows), ends.index_select(0, rows)
        begins_at, ends_at = begins.data_ptr(), ends.data_ptr()
    values, stride = _rows(values)
    given = values.data_ptr(), stride
    order_at, last, size = order.data_ptr(), order.numel(), width * out.itemsize
    out_at = out.data_ptr()

    def take(first: int, stop: int) -> None:
        loop(*given, order_at + 8 * first, stop - first, width, out_at + size * first)

    def add(first: int, stop: int) -> None:
        target = out_at + size * first
        sums = target, size
        if out.itemsize == 2:  # in one row, which is rounded when all is added
            scratch = torch.empty(width, dtype=torch.float32)
            sums = scratch.data_ptr(), 0
        segments = begins_at + 8 * first, ends_at + 8 * first, stop - first
        loop(*given, order_at, last, *segments, width, target, *sums)

    part = take if starts is None else add
    pool.run(part, out.shape[0], 2 * out.nbytes)
    return True


def combine(out: Tensor, slots: Tensor, values: Tensor, op: Op, base: int = 0) -> None:
    """Bring one run's rows to their places in a union: the first copies, the others add.

    `out[place - base]` becomes `values[i]` where slot i is `~place`, and `op(out[place - base],
    values[i])` where it is `place`.

    Args:
        out: `[n, *row_shape]` of `values.dtype` or its accumulator, the places from `base` on.
        slots: int32 `[k]`, ascending in their places.
        values: `[k, *row_shape]`.
        op: how to combine, `out` on the left.
        base: the place of the first row of `out`.

    Raises:
        ValueError: there is not one slot for each row, or rows of `out` have another shape.
        IndexError: a place is not one of a row of `out`.

    Example:
        >>> from weft.kernels import OPS
        >>> slots = union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots
        >>> out = torch.empty(3)
        >>> combine(out, slots[0], torch.tensor([1.0, 2.0]), OPS["sum"])
        >>> combine(out, slots[1], torch.tensor([4.0, 8.0]), OPS["sum"])
        >>> out
        tensor([ 4.,  1., 10.])
    """
    count, height = values.shape[0], out.shape[0]
    if slots.shape != (count,) or values.shape[1:] != out.shape[1:]:
        raise ValueError(
            f"{len(slots)} slots, values {tuple(values.shape)} and out {tuple(out.shape)} do not "
            f"fit together: give a slot for each row, and rows of one shape"
        )
    width, loop = _loop("combine", values, out, op)
    if loop is None:
        if values.numel():
            reference.combine(out, slots, values.detach(), op, base)
        return
    slots = slots.contiguous()
    values, stride = _rows(values)
    to, slots_at, values_at = out.data_ptr(), slots.data_ptr(), values.data_ptr()

    def part(first: int, stop: int) -> int:
        some = slots_at + 4 * first, values_at + stride * first, stride, stop - first
        outside: int = loop(to, height, base, *some, width)
        return outside

    outside = sum(pool.run(part, count, 3 * count * stride))
    if outside:
        raise IndexError(
            f"{outside} of {count} rows belong outside of places {base} to "
            f"{base + height - 1}: pass the slots of those places only"
        )


def _loop(which: str, values: Tensor, out: Tensor, op: Op) -> tuple[int, Any]:
    """The width of such rows, and the loop that serves them; None: `reference` does."""
    if jit.loops() is None or not (op.builtin and out.is_cpu and out.is_contiguous()):
        return 0, None
    return _instance(which, values.dtype, out.dtype, op.name, out.shape[1:])


@functools.cache
def _instance(
    which: str, src: torch.dtype, dst: torch.dtype, op: str, row_shape: torch.Size
) -> tuple[int, Any]:
    kind, goal = KINDS.get(src, ""), KINDS.get(dst, "")
    name = "sum" if op == "avg" else op
    is_sum = name == "sum" and goal in _SUMS.get(kind, ())
    is_extremum = name in ("min", "max") and kind == goal and kind in ("f32", "f64")
    if not is_sum and not is_extremum:
        return 0, None
    total = "f32" if dst.itemsize == 2 else goal
    constants = {"take": (), "reduce": (total, name), "combine": (name,)}
    width = math.prod(row_shape)
    rows = "numbers" if width == 1 else "rows"
    return width, jit.machine_code()[".".join([which, rows, kind, goal, *constants[which]])]


def _rows(values: Tensor) -> tuple[Tensor, int]:
    """The values with rows that are contiguous each, and bytes from row to row."""
    values = values.resolve_neg()
    if not values.is_contiguous() and not values[:1].is_contiguous():
        values = values.contiguous()
    return values, values.stride(0) * values.itemsize


def finish(values: Tensor, out: Tensor, divisor: int = 1) -> None:
    """Make results of accumulated rows: divide, and round once to the dtype of `out`.

    Args:
        values: accumulated rows.
        out: of the same shape; may be `values` itself.
        divisor: what to divide by; only 1 for integers.

    Example:
        >>> out = torch.empty(2, dtype=torch.bfloat16)
        >>> finish(torch.tensor([1.0, 2.0]), out, divisor=4)
        >>> out
        tensor([0.2500, 0.5000], dtype=torch.bfloat16)
    """
    if divisor == 1:
        if out is not values:
            out.copy_(values.detach())
        return
    values = values.detach()
    # a tensor on the device: by a Python number CUDA multiplies with the rounded reciprocal
    wide = torch.promote_types(values.dtype, torch.float32)
    by = torch.full((), divisor, dtype=wide, device=out.device)
    if out.dtype.itemsize > 2:
        torch.div(values, by, out=out)
        return
    for some, target in zip(_blocks(values), _blocks(out), strict=True):
        target.copy_(some.to(wide) / by)


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of a tensor of whole rows, so that what is made of one stays in a processor's cache."""
    if not tensor.is_cpu:
        return (tensor,)
    row = max(1, tensor[:1].numel())
    return torch.split(tensor, max(1, _BLOCK // row))


def merge(runs: Sequence[tuple[Tensor, Tensor]], op: Op) -> tuple[Tensor, Tensor]:
    """Add up whole runs of rows, in their order.

    Args:
        runs: at least one `(indices, values)`, the indices sorted and unique.
        op: how to combine.

    Returns:
        The union of the indices, and the values, in the dtype of the accumulator.

    Example:
        >>> from weft.kernels import OPS
        >>> a = torch.tensor([2, 5]), torch.tensor([1.0, 2.0])
        >>> b = torch.tensor([1, 5]), torch.tensor([4.0, 8.0])
        >>> merge([a, b], OPS["sum"])
        (tensor([1, 2, 5]), tensor([ 4.,  1., 10.]))
    """
    indices, slots = union([run for run, _ in runs])
    first = runs[0][1]
    total = first.new_empty((len(indices), *first.shape[1:]), dtype=op.accumulator(first.dtype))
    for some, (_, values) in zip(slots, runs, strict=True):
        combine(total, some, values, op)
    return indices, total
