"""The kernels on the CPU, as machine code made by Numba.

Here tensors become addresses, and large work is cut for several threads; the loops are in
`index_loops` and `value_loops`, what they make of indices in `cpu_indices`. Every function says
None or False where its loops are not compiled (yet), having done nothing: the reference serves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import pool
from .compile import KINDS, Key, Loops, compiler
from .ops import OPS, Op
from .reference import Distinct

__all__ = ["combine", "reduce", "reduce_parts", "value_key"]

_HALVES = (torch.float16, torch.bfloat16)
_CONVERTED = {
    *itertools.product([torch.float32], _HALVES),  # to be sent
    *itertools.product(_HALVES, [torch.float32, torch.float64]),  # received, to be added
}
"""Pairs of dtypes beside those that an operation has by itself."""


def value_key(src: torch.dtype, dst: torch.dtype, op: Op) -> Key | None:
    """The set of loops that reduce values of `src` into `dst`; None: there can be none."""
    return _value_key(src, dst, op.name) if op.builtin else None


@functools.cache
def _value_key(src: torch.dtype, dst: torch.dtype, name: str) -> Key | None:
    op = OPS[name]
    if op.refuses(src) is not None or not (
        dst in (src, op.accumulator(src)) or (src, dst) in _CONVERTED
    ):
        return None
    if name in ("band", "bor", "bxor"):  # bits do not care how they are grouped
        return ("value", "u8", "u8", name, "u8")
    total = dst if dst.itemsize > 2 else op.accumulator(dst)
    return ("value", KINDS[src], KINDS[dst], "sum" if op.mean else name, KINDS[total])


def reduce(
    values: Tensor,
    distinct: Distinct,
    op: Op,
    out: Tensor,
    first: int,
    last: int,
    which: Tensor | None = None,
) -> bool:
    """See `weft.kernels.reduce`; `out` has room for the distinct rows `first` to `last`.

    With `which` (int32, contiguous) for the distinct rows `which[first]` to `which[last - 1]`.
    """
    key, loops = _loops(values, out, op)
    if loops is None:
        return False
    values, stride, width = _rows(values, key)
    row = out.stride(0) * out.element_size()
    cuts = pool.ranges(first, last, pool.share(2 * (last - first) * row))
    order = starts = 0
    if distinct.order is not None:
        order = distinct.order.data_ptr()
    if distinct.starts is not None:
        starts = distinct.starts.data_ptr()
        if len(cuts) > 1 and which is None:
            cuts = _balanced(distinct.starts, first, last, len(cuts))
    wider = key[4] != key[2]
    from_, to = values.data_ptr(), out.data_ptr()
    loop = loops["reduce" if which is None else "reduce_some"]
    chosen, many = 0 if which is None else which.data_ptr(), distinct.indices.numel()

    def part(start: int, stop: int) -> int:
        sums = torch.empty(width if wider else 0, dtype=torch.float32)
        target = to + (start - first) * row
        outside: int = loop(
            *(from_, stride, order, starts, chosen, many, start, stop, target, width),
            sums.data_ptr(),
        )
        return outside

    if outside := sum(pool.run(part, cuts)):
        raise IndexError(f"{outside} of {last - first} rows are not among the {many} distinct ones")
    return True


def reduce_parts(
    parts: Sequence[Tensor],
    distinct: Distinct,
    op: Op,
    out: Tensor,
    rows: Sequence[int],
    begins: Sequence[int],
) -> bool:
    """See `weft.kernels.reduce_parts`; for what one thread does at once."""
    key, loops = _loops(parts[0], out, op)
    if loops is None:
        return False
    row = out.stride(0) * out.element_size()
    if pool.share(2 * (rows[-1] - rows[0]) * row) > 1:
        return False
    order = 0 if distinct.order is None else distinct.order.data_ptr()
    starts = 0 if distinct.starts is None else distinct.starts.data_ptr()
    to, loop, wider = out.data_ptr(), loops["reduce"], key[4] != key[2]
    sums = torch.empty(out[:1].numel() if wider else 0, dtype=torch.float32)
    plain, width = 0, 0
    for given, begin, (first, last) in zip(parts, begins, itertools.pairwise(rows), strict=True):
        if first == last:
            continue
        values, stride = given, plain
        if not (plain and given.is_contiguous() and not given.is_neg()):
            values, stride, width = _rows(given, key)
            plain = out[:1].numel() * given.element_size()  # from row to row
        # as if this part's rows came behind those of all parts before
        from_ = values.data_ptr() - begin * stride
        target = to + (first - rows[0]) * row
        loop(from_, stride, order, starts, 0, last, first, last, target, width, sums.data_ptr())
    return True


def _balanced(starts: Tensor, first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of segments with about as many rows of the input each."""
    begin, end = int(starts[first]), int(starts[last])
    goals = [start for start, _ in pool.ranges(begin, end, parts)][1:]
    inner = torch.searchsorted(starts[first : last + 1], torch.tensor(goals)) + first
    return list(itertools.pairwise([first, *inner.tolist(), last]))


def combine(out: Tensor, slots: Tensor, values: Tensor, op: Op, base: int) -> bool:
    """See `weft.kernels.combine`."""
    key, loops = _loops(values, out, op)
    if loops is None:
        return False
    values, stride, width = _rows(values, key)
    count, height = slots.numel(), out.shape[0]
    to, which, from_, loop = out.data_ptr(), slots.data_ptr(), values.data_ptr(), loops["combine"]

    def part(start: int, stop: int) -> int:
        outside: int = loop(to, height, base, which, from_, stride, start, stop, width)
        return outside

    parts = pool.share(3 * count * stride)
    outside = part(0, count) if parts == 1 else sum(pool.run(part, pool.ranges(0, count, parts)))
    if outside:
        raise IndexError(
            f"{outside} of {count} rows belong outside of places {base} to {base + height - 1}: "
            "pass the slots of those places only"
        )
    return True


def _loops(values: Tensor, out: Tensor, op: Op) -> tuple[Key, Loops | None]:
    key = value_key(values.dtype, out.dtype, op)
    if key is None or not out.is_contiguous():
        return (), None
    return key, compiler.loops(key)


def _rows(values: Tensor, key: Key) -> tuple[Tensor, int, int]:
    """The values with rows that are contiguous each; bytes from row to row; numbers in a row."""
    if values.is_neg() or not (values.is_contiguous() or _rows_are_contiguous(values)):
        values = values.resolve_neg().contiguous()
    size = values.element_size()
    width = math.prod(values.shape[1:])
    stride = size * (values.stride(0) if values.shape[0] > 1 else width)
    return values, stride, width * size if key[1] == "u8" else width


def _rows_are_contiguous(values: Tensor) -> bool:
    expected = 1
    for length, stride in zip(values.shape[:0:-1], values.stride()[:0:-1], strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
