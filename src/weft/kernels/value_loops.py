"""The compiled loops over values: sum segments, add a run.

Each function here makes one loop for kinds and an operation that are constants in it (see
`machine`); `compile` turns it into machine code. All arguments of a loop are int64: addresses,
strides in bytes, counts. `out` is contiguous; rows of `values` lie `stride` bytes apart and are
contiguous in themselves. Ranges `first, last` let several threads share one call. The inner loop
runs over the numbers of a row, in order, so it vectorises and never reorders additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import SIZES, apply, load, prefetch_row, store

__all__ = ["combine", "reduce", "reduce_some"]

_AHEAD = 4096  # bytes of rows that are asked for before they are read

int64: Any = np.int64  # a cast, in machine code


def reduce(src: str, dst: str, op: str, total: str) -> Callable[..., int]:
    """Reduce segment s = order[starts[s] : starts[s + 1]] of `values` to `out[s - first]`.

    `order` or `starts` may be 0: the identity, and segments of one row. Where sums are kept in a
    wider kind than they end in (`total` is not `dst`), `scratch` holds one row of them. `which` and
    `many` are those of `reduce_some`; returns 0.
    """
    return _reduce(src, dst, op, total, False)


def reduce_some(src: str, dst: str, op: str, total: str) -> Callable[..., int]:
    """`reduce` for the segments which[first], ..., which[last - 1].

    Those that are not from 0 to `many` - 1 are left out: returns how many.
    """
    return _reduce(src, dst, op, total, True)


def _reduce(src: str, dst: str, op: str, total: str, some: bool) -> Callable[..., int]:
    size, wider = SIZES[dst], total != dst

    def loop(
        values: int,
        stride: int,
        order: int,
        starts: int,
        which: int,
        many: int,
        first: int,
        last: int,
        out: int,
        width: int,
        scratch: int,
    ) -> int:
        stop = load("i64", starts, last) if starts and not some else last
        ahead = max(1, _AHEAD // max(1, stride))
        nearest = min(stride, _AHEAD)
        outside = 0
        for at in range(first, last):
            segment = at
            if some:
                segment = int64(load("i32", which, at))
                if segment < 0 or segment >= many:
                    outside += 1
                    continue
            begin, end = segment, segment + 1
            if starts:
                begin, end = load("i64", starts, segment), load("i64", starts, segment + 1)
            row = values + stride * (load("i64", order, begin) if order else begin)
            target = out + (at - first) * width * size
            if width == 1:
                number = load(src, row, 0)
                for place in range(begin + 1, end):
                    other = values + stride * (load("i64", order, place) if order else place)
                    number = apply(op, number, load(src, other, 0))
                store(dst, target, 0, number)
                continue
            if order and (at if some else begin) + ahead < stop:
                later = begin + ahead
                if some:
                    later = min(max(int64(load("i32", which, at + ahead)), 0), many - 1)
                    later = load("i64", starts, later) if starts else later
                soon = values + stride * load("i64", order, later)
                prefetch_row(soon, nearest)
            if end == begin + 1:
                for j in range(width):
                    store(dst, target, j, load(src, row, j))
                continue
            sums = scratch if wider else target
            known = end if some else stop  # up to there rows are read in this order
            if order and begin + 1 + ahead < known:
                prefetch_row(values + stride * load("i64", order, begin + 1 + ahead), nearest)
            other = values + stride * (load("i64", order, begin + 1) if order else begin + 1)
            for j in range(width):
                store(total, sums, j, apply(op, load(src, row, j), load(src, other, j)))
            for place in range(begin + 2, end):
                if order and place + ahead < known:
                    prefetch_row(values + stride * load("i64", order, place + ahead), nearest)
                other = values + stride * (load("i64", order, place) if order else place)
                for j in range(width):
                    store(total, sums, j, apply(op, load(total, sums, j), load(src, other, j)))
            if wider:
                for j in range(width):
                    store(dst, target, j, load(total, sums, j))
        return outside

    return loop


def combine(src: str, dst: str, op: str) -> Callable[..., int]:
    """Copy or add rows `first` to `last` of `values` to the places that `slots` says.

    Returns how many rows were left out, because their place is not one of `height` rows.
    """
    size = SIZES[dst]

    def loop(
        out: int,
        height: int,
        base: int,
        slots: int,
        values: int,
        stride: int,
        first: int,
        last: int,
        width: int,
    ) -> int:
        outside = 0
        for i in range(first, last):
            slot = int64(load("i32", slots, i))
            place = (~slot if slot < 0 else slot) - base
            if place < 0 or place >= height:
                outside += 1
                continue
            target, row = out + place * width * size, values + i * stride
            if width == 1:  # without a branch: who is first is anybody's guess
                number = load(src, row, 0)
                both = apply(op, load(dst, target, 0), number)
                store(dst, target, 0, number if slot < 0 else both)
            elif slot < 0:
                for j in range(width):
                    store(dst, target, j, load(src, row, j))
            else:
                for j in range(width):
                    store(dst, target, j, apply(op, load(dst, target, j), load(src, row, j)))
        return outside

    return loop
