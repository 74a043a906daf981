"""The compiled loops about the keys of lists of tables; see `lists`.

Made and called like `value_loops`: all arguments are int64, addresses and counts. A *list* is one
rank's keys: sorted int64, its tables one behind the other, each from where the one before ends. A
row of `ranks` describes one: the address of its keys, how many they are, the address of the
rows of its tables, that of their heights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import load, store

LOOPS = ("cut", "joined", "moved", "parted")

__all__ = ["LOOPS", *LOOPS]

float64: Any = np.float64  # casts, in machine code
int32: Any = np.int32
int64: Any = np.int64

_LARGE = 1 << 30  # more than any product of two such numbers has room beside in int64


def joined() -> Callable[..., None]:
    """Make the list of some tables' indices, in the order they have, with what they span.

    A row of `given` has an address, a count (not 0), and bytes of an index; `lows` and `highs` get
    its ends.
    """

    def loop(given: int, tables: int, lows: int, highs: int, keys: int) -> None:
        start, at = int64(0), int64(0)
        for table in range(tables):
            indices, count = load("i64", given, 3 * table), load("i64", given, 3 * table + 1)
            if load("i64", given, 3 * table + 2) == 4:
                low = high = int64(load("i32", indices, 0))
                for i in range(count):
                    index = int64(load("i32", indices, i))
                    low, high = min(low, index), max(high, index)
                    store("i64", keys, at + i, index + start)
            else:
                low = high = load("i64", indices, 0)
                for i in range(count):
                    index = load("i64", indices, i)
                    low, high = min(low, index), max(high, index)
                    store("i64", keys, at + i, index + start)
            store("i64", lows, table, low)
            store("i64", highs, table, high)
            at += count
            start += high + 1

    return loop


def cut() -> Callable[..., int]:
    """Cut the space of all lists' keys in ranges of equal work, and each list with it.

    `points` is scratch, 2 words for each of `most` points of every list, and 3 for each list. Of
    the space, `starts` has where its tables begin, and its end; `sizes` (or 0) has the bytes of
    their rows. `found` gets a row for each list: where the ranges begin, and the end of the last.
    Returns 0, or 1 where a number might not fit, and nothing was found.
    """

    def loop(
        ranks: int, size: int, starts: int, sizes: int, tables: int, most: int, bins: int,
        points: int, scratch: int, found: int,
    ) -> int:  # fmt: skip
        # points of each list
        weights, heads = points + 8 * most * size, points + 16 * most * size
        total = int64(0)
        for rank in range(size):
            row = ranks + 32 * rank
            keys, count = load("i64", row, 0), load("i64", row, 1)
            rows, heights = load("i64", row, 2), load("i64", row, 3)
            parts = min(most, count)
            table, end, start = int64(0), int64(0), int64(0)
            if tables:
                end = load("i64", rows, 0)
            for part in range(parts):
                at = part * count // parts
                while end <= at:
                    start += load("i64", heights, table)
                    table += 1
                    end += load("i64", rows, table)
                point = load("i64", keys, at) - start + load("i64", starts, table)
                store("i64", points, rank * most + part, point)
                store("i64", weights, rank * most + part, (part + 1) * count // parts - at)
            store("i64", heads, rank, int64(0))
            store("i64", heads, size + rank, parts)
            total += parts

        # bins of as many points each, merged in the order of ranks, and the work in each
        bins = min(bins, total)
        edges, rows_of, weight_of = scratch, scratch + 8 * (bins + 1), scratch + 16 * (bins + 1)
        end = load("i64", starts, tables)
        if end >= _LARGE:
            return 1
        bin = int64(-1)
        for number in range(total):
            least, who = int64(0), int64(-1)
            for rank in range(size):
                head = load("i64", heads, rank)
                if head < load("i64", heads, size + rank):
                    point = load("i64", points, rank * most + head)
                    if who < 0 or point < least:
                        least, who = point, int64(rank)
            head = load("i64", heads, who)
            store("i64", heads, who, head + 1)
            weight = load("i64", weights, who * most + head)
            if bin + 1 < bins and number == (bin + 1) * total // bins:
                bin += 1
                store("i64", edges, bin, least)
                store("i64", rows_of, bin, int64(0))
                store("i64", weight_of, bin, int64(0))
            store("i64", rows_of, bin, load("i64", rows_of, bin) + weight)
            if sizes:
                table = int64(0)
                while table + 1 < tables and load("i64", starts, table + 1) <= least:
                    table += 1
                heavy = load("i64", weight_of, bin) + weight * load("i64", sizes, table)
                store("i64", weight_of, bin, heavy)
        store("i64", edges, bins, end)
        done = int64(0)
        for bin in range(bins):
            rows = load("i64", rows_of, bin)
            wide = max(load("i64", edges, bin + 1) - load("i64", edges, bin), int64(1))
            missing = max(1.0 - float64(rows) / (float64(wide) * float64(size)), 0.0)
            nobody = 1.0
            power = size
            while power:
                if power & 1:
                    nobody = nobody * missing
                missing = missing * missing
                power >>= 1
            union = min(int64(np.rint(float64(wide) * (1.0 - nobody))), rows)
            work = rows + (size - 1) * max(union, int64(1))
            if sizes:
                work *= max(load("i64", weight_of, bin) // rows, int64(1))
            if work >= _LARGE:
                return 1
            store("i64", rows_of, bin, work)
            done += work
        if done >= _LARGE:
            return 1

        # where the ranges begin, in the space of all and in each list
        for edge in range(size + 1):
            at = int64(0) if edge == 0 else end
            if 0 < edge < size and total:
                goal, bin, before = done * edge // size, int64(0), int64(0)
                while bin < bins - 1 and before + load("i64", rows_of, bin) <= goal:
                    before += load("i64", rows_of, bin)
                    bin += 1
                span = load("i64", edges, bin + 1) - load("i64", edges, bin)
                at = load("i64", edges, bin) + (goal - before) * span // load("i64", rows_of, bin)
            table = int64(0)
            while table + 1 < tables and load("i64", starts, table + 1) <= at:
                table += 1
            for rank in range(size):
                row = ranks + 32 * rank
                keys, high = load("i64", row, 0), load("i64", row, 1)
                start = int64(0)
                for before in range(table):
                    start += load("i64", load("i64", row, 3), before)
                inside = min(
                    at - load("i64", starts, table), load("i64", load("i64", row, 3), table)
                )
                key, low = start + inside, int64(0)
                while low < high:
                    middle = (low + high) >> 1
                    if load("i64", keys, middle) < key:
                        low = middle + 1
                    else:
                        high = middle
                store("i64", found, rank * (size + 1) + edge, low)
        return 0

    return loop


def moved() -> Callable[..., None]:
    """Keys `first` to `last` of a list (a row of them), in the space of all; as int64 if `wide`."""

    def loop(row: int, starts: int, first: int, last: int, wide: int, out: int) -> None:
        keys, rows, heights = load("i64", row, 0), load("i64", row, 2), load("i64", row, 3)
        table, start, end, at = int64(0), int64(0), int64(0), int64(first)
        while at < last:
            end += load("i64", rows, table)
            shift = load("i64", starts, table) - start
            stop = min(end, int64(last))
            if wide:
                for i in range(at, stop):
                    store("i64", out, i - first, load("i64", keys, i) + shift)
            else:
                for i in range(at, stop):
                    store("i32", out, i - first, int32(load("i64", keys, i) + shift))
            at = max(at, stop)
            start += load("i64", heights, table)
            table += 1

    return loop


def parted() -> Callable[..., None]:
    """Indices of sorted keys in their tables, which begin at `starts`, and where each table ends.

    `kinds` has the bytes of a key and of an index, in that order: 4 or 8, as 16 times the first and
    the second.
    """

    def loop(
        keys: int, count: int, kinds: int, starts: int, tables: int, out: int, ends: int
    ) -> None:
        at = int64(0)
        for table in range(tables):
            start, stop = load("i64", starts, table), load("i64", starts, table + 1)
            if kinds == 16 * 4 + 8:
                while at < count and int64(load("i32", keys, at)) < stop:
                    store("i64", out, at, int64(load("i32", keys, at)) - start)
                    at += 1
            elif kinds == 16 * 4 + 4:
                while at < count and int64(load("i32", keys, at)) < stop:
                    store("i32", out, at, int32(int64(load("i32", keys, at)) - start))
                    at += 1
            elif kinds == 16 * 8 + 8:
                while at < count and load("i64", keys, at) < stop:
                    store("i64", out, at, load("i64", keys, at) - start)
                    at += 1
            else:
                while at < count and load("i64", keys, at) < stop:
                    store("i32", out, at, int32(load("i64", keys, at) - start))
                    at += 1
            store("i64", ends, table, at)

    return loop
