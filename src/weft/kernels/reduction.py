"""Reducing the rows of each distinct index: those of one tensor, or of several at once.

Sums are made in the accumulation type and rounded once; the loops are in `value_loops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from . import cpu, meter, reference
from .ops import Op
from .reference import Distinct

__all__ = ["detached", "on_cpu", "reduce", "reduce_parts"]

_ALL = slice(None)
_PIECE = 1 << 15  # numbers


def reduce(
    values: Tensor,
    distinct: Distinct,
    op: Op,
    out: Tensor | None = None,
    rows: slice | Tensor = _ALL,
) -> Tensor:
    """Combine the rows of each distinct index, in input order, rounding once.

    Args:
        values: `[k, *row_shape]`, the rows of the indices that `distinct` was made from.
        distinct: their distinct indices.
        op: how to combine; a callable is given the j-th duplicates of all indices at once.
        out: `[n, *row_shape]` of `values.dtype`, of `op.accumulator(values.dtype)`, or for floating
            point of half precision, to be filled; by default a new tensor of `values.dtype`.
        rows: which n of the distinct indices: a range, or their numbers (int32 `[n]`, any order).

    Returns:
        `out`. Without an `out`, where the indices were sorted and unique, `values` itself, or
        the view of a range of its rows.

    Raises:
        IndexError: a number is not that of a distinct index.

    Example:
        >>> from weft.kernels import OPS, distinct
        >>> values = torch.tensor([[1.0], [2.0], [4.0]])
        >>> reduce(values, distinct(torch.tensor([7, 2, 7])), OPS["sum"])
        tensor([[2.],
                [5.]])
    """
    # `numel` and `shape`: `len` of a tensor is Python's, which is much for a few rows
    which, many, count = None, distinct.indices.numel(), values.shape[0]
    if isinstance(rows, Tensor):
        which, first, last = rows.contiguous(), 0, rows.numel()
    else:
        first, last, _ = rows.indices(many)
        last = max(first, last)
    given = many if distinct.order is None else distinct.order.numel()
    if distinct.starts is not None and distinct.order is None:
        given = int(distinct.starts[-1])
    if count != given:
        raise ValueError(f"there are {given} indices and {count} rows: give one row for each")
    if out is None:
        if distinct.order is None and distinct.starts is None and which is None:
            return values if last - first == count else values[first:last]
        out = values.new_empty((last - first, *values.shape[1:]))
    elif out.shape != (last - first, *values.shape[1:]):
        raise ValueError(
            f"out is {tuple(out.shape)}, the result {(last - first, *values.shape[1:])}: "
            "make them equal"
        )
    if out.numel() == 0:
        return out
    meter.spend(values.nbytes if which is None else values.nbytes * last / many)
    values = detached(values)
    if values.dtype is torch.float64 and out.dtype.itemsize == 2:
        _reduce_and_round(values, distinct, op, out, first, which)
    else:
        _reduce(values, distinct, op, out, first, last, which)
    return out


def _reduce(
    values: Tensor,
    distinct: Distinct,
    op: Op,
    out: Tensor,
    first: int,
    last: int,
    which: Tensor | None,
) -> None:
    """By machine code where there is some and something to add."""
    unique = distinct.order is None and distinct.starts is None
    if unique or not (on_cpu(values) and cpu.reduce(values, distinct, op, out, first, last, which)):
        if which is not None:
            distinct, first, last = distinct.at(which[first:last]), 0, last - first
        reference.reduce(values, distinct, op, out, first, last)


def reduce_parts(
    parts: Sequence[Tensor],
    distinct: Distinct,
    op: Op,
    out: Tensor,
    rows: Sequence[int],
    begins: Sequence[int],
) -> None:
    """Reduce the rows of several tensors, whose indices were sorted together.

    Args:
        parts: of one row shape and dtype.
        distinct: of the indices of all of them, and maybe of others; no two parts have an index in
            common, and those of one part are neighbours.
        op: how to combine; a callable is given the j-th duplicates of a part's indices at once.
        out: `[rows[-1] - rows[0], *row_shape]`, of a dtype as for `reduce`, to be filled.
        rows: of each part its first distinct index, and the end of the last one's.
        begins: of each part the position of its first index among those that were sorted.

    Example:
        >>> from weft.kernels import OPS, distinct
        >>> parts = [torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0]])]
        >>> both = distinct(torch.tensor([3, 3, 5]))
        >>> out = torch.empty(2, 1)
        >>> reduce_parts(parts, both, OPS["sum"], out, [0, 1, 2], [0, 2])
        >>> out
        tensor([[3.],
                [4.]])
    """
    if out.numel() == 0:
        return
    parts = [detached(values) for values in parts]
    alike = parts[0].dtype is not torch.float64 or out.dtype.itemsize > 2
    if alike and on_cpu(out) and cpu.reduce_parts(parts, distinct, op, out, rows, begins):
        meter.spend(sum(values.nbytes for values in parts))
        return
    for values, begin, (first, last) in zip(parts, begins, pairwise(rows), strict=True):
        of_part = distinct.part(first, last, begin, begin + len(values))
        reduce(values, of_part, op, out[first - rows[0] : last - rows[0]])


def _reduce_and_round(
    values: Tensor, distinct: Distinct, op: Op, out: Tensor, first: int, which: Tensor | None
) -> None:
    """Through torch.float64, in pieces that stay in the cache."""
    meter.spend(out.numel() * values.element_size())
    step = max(1, _PIECE // max(1, out[:1].numel()))
    for start in range(0, len(out), step):
        piece, begin = out[start : start + step], first + start
        space = values.new_empty(piece.shape)
        _reduce(values, distinct, op, space, begin, begin + len(piece), which)
        reference.finish(space, piece, 1)


def on_cpu(tensor: Tensor) -> bool:
    """Whether machine code may read it."""
    return tensor.device.type == "cpu"


def detached(values: Tensor) -> Tensor:
    """Values that gradients do not follow."""
    return values.detach() if values.requires_grad else values
