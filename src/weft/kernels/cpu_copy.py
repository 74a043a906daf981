"""Copies of what is too large for the cache, with stores that leave it out; see `cpu`.

An ordinary store reads a cache line before it replaces it, so a copy moves three bytes for each
one that is copied; a streaming store moves two. Where the memory is the limit, as it is for a few
ranks of one host that copy at once, that is a quarter of the time.
"""

from __future__ import annotations

from torch import Tensor

from . import pool
from .compile import Key, compiler

__all__ = ["KEY", "LEAST", "Span", "copy", "spans", "whole_lines"]

KEY: Key = ("copy",)
"""The one set of loops for all dtypes."""

LEAST = 8 << 20
"""Bytes from which on a copy leaves the cache out: what reads a smaller one may find it there."""

_LINE = 64  # bytes of a line of the cache
_NARROW = 256  # bytes of a row up to which its ends would cost more than is gained


def copy(out: Tensor, values: Tensor) -> bool:
    """See `weft.kernels.copy`."""
    alike = out.dtype == values.dtype and out.shape == values.shape
    if not alike or out.is_neg() != values.is_neg() or out.is_conj() != values.is_conj():
        return False
    found = spans(out, values)
    loops = compiler.loops(KEY) if found is not None and found[0] > _NARROW else None
    if found is None or loops is None:
        return False
    width, (height, out_row, row), (planes, out_plane, plane) = found
    loop, to, source, count = loops["rows"], out.data_ptr(), values.data_ptr(), planes * height

    def part(first: int, last: int) -> None:
        loop(to, out_plane, out_row, source, plane, row, height, width, first, last)

    def stretch(first: int, last: int) -> None:
        loop(to + first, 0, 0, source + first, 0, 0, 1, last - first, 0, 1)

    parts = pool.share(2 * values.nbytes)
    if count == 1:
        pool.run(stretch, pool.ranges(0, width, parts))
    else:
        pool.run(part, pool.ranges(0, count, parts))
    return True


def whole_lines(address: int, row: int) -> bool:
    """Whether rows of so many bytes, one behind the other from there, each are whole cache lines.

    A row that comes by itself may then leave the cache out: the rest of a line takes longer.
    """
    return (address | row) % _LINE == 0


Span = tuple[int, int, int]
"""How many, and how many bytes apart in the one tensor and in the other."""


def spans(out: Tensor, values: Tensor) -> tuple[int, Span, Span] | None:
    """Two tensors of one shape and dtype as planes of rows: (bytes of a row, rows, planes).

    None: they are not such.
    """
    size = values.element_size()
    steps: list[Span] = [(size, 1, 1)]  # innermost first
    for count, to, source in zip(
        reversed(values.shape), reversed(out.stride()), reversed(values.stride()), strict=True
    ):
        inner, *apart = steps[-1]
        if [to * size, source * size] == [inner * step for step in apart]:
            steps[-1] = inner * count, apart[0], apart[1]
        elif count > 1:
            steps.append((count, to * size, source * size))
    width, *outer = steps[0][0], *steps[1:], (1, 0, 0), (1, 0, 0)
    return (width, outer[0], outer[1]) if len(steps) <= 3 else None
