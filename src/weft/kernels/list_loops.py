"""The compiled loops about the keys of lists of tables; see `lists`.

Made and called like `value_loops`: all arguments are int64, addresses and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import load, memset, store

LOOPS = ("distinct", "joined", "parted", "sorted_keys", "spans")

__all__ = ["LOOPS", *LOOPS]

int32: Any = np.int32  # casts, in machine code
int64: Any = np.int64


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


def spans() -> Callable[..., None]:
    """Where the rows of some tables begin, of each rank and of all of them together.

    A rank's numbers in `told` are `columns` of each of its `known` tables: how many rows, then the
    greatest index. A row of `which` has the number of a table, and the bytes of a row. Writes to
    `out` for each rank how many rows each table has; then of each rank and of all where they begin,
    in rows, and where the last ones end; the same in bytes; and the greatest index of each rank.
    """

    def loop(
        told: int, ranks: int, known: int, columns: int, which: int, tables: int, out: int
    ) -> None:
        rows = out + 8 * ranks * tables
        sizes = rows + 8 * (ranks + 1) * (tables + 1)
        highs = sizes + 8 * (ranks + 1) * (tables + 1)
        all_rows, all_sizes = rows + 8 * ranks * (tables + 1), sizes + 8 * ranks * (tables + 1)
        memset(all_rows, 0, 8 * (tables + 1))
        memset(all_sizes, 0, 8 * (tables + 1))
        for rank in range(ranks):
            row, size, high = int64(0), int64(0), int64(-1)
            for table in range(tables):
                numbers = told + 8 * columns * load("i64", which, 2 * table)
                count = load("i64", numbers, 0)
                high = max(high, load("i64", numbers, 1))
                store("i64", out, table, count)
                store("i64", rows, table, row)
                store("i64", sizes, table, size)
                row += count
                size += count * load("i64", which, 2 * table + 1)
                store("i64", all_rows, table + 1, load("i64", all_rows, table + 1) + row)
                store("i64", all_sizes, table + 1, load("i64", all_sizes, table + 1) + size)
            store("i64", rows, tables, row)
            store("i64", sizes, tables, size)
            store("i64", highs, rank, high)
            told += 8 * known * columns
            out += 8 * tables
            rows += 8 * (tables + 1)
            sizes += 8 * (tables + 1)

    return loop


def sorted_keys() -> Callable[..., int]:
    """Sort the keys of some tables of all ranks that lie in a range, with where they come from.

    Leaves words `key << bits | rank << position_bits | position` in `words`, then a word of -1:
    keys count from `low` and are below `span`; positions count the rows of the tables of a rank. A
    row of `sources` has the address of a rank's first index and the bytes of an index, then how
    many rows each table has. `starts` has where the tables begin in the space of all. `spare` is as
    long as `words`, which has room for all rows and one more; `bins` is scratch, int32 for each of
    `1 << digit_bits`. Returns how many words there are.
    """

    def loop(
        sources: int, ranks: int, tables: int, starts: int, low: int, span: int,
        position_bits: int, bits: int, digit_bits: int, passes: int,
        words: int, spare: int, bins: int,
    ) -> int:  # fmt: skip
        source, goal = (words, spare) if passes & 1 == 0 else (spare, words)
        found = int64(0)
        for rank in range(ranks):
            row = sources + 8 * (tables + 2) * rank
            indices, narrow = load("i64", row, 0), load("i64", row, 1) == 4
            word, at = int64(rank) << position_bits, int64(0)
            for table in range(tables):
                start = load("i64", starts, table) - low
                end = at + load("i64", row, table + 2)
                # what is out of range is overwritten by the next that is not
                if narrow:
                    for i in range(at, end):
                        key = start + int64(load("i32", indices, i))
                        store("i64", source, found, (key << bits) | word | i)
                        found += key >= 0 and key < span
                else:
                    for i in range(at, end):
                        key = start + load("i64", indices, i)
                        store("i64", source, found, (key << bits) | word | i)
                        found += key >= 0 and key < span
                at = end
        mask = (1 << digit_bits) - 1
        for digit in range(passes):
            shift = bits + digit * digit_bits
            memset(bins, 0, 4 << digit_bits)
            for i in range(found):
                bin = (load("i64", source, i) >> shift) & mask
                store("i32", bins, bin, load("i32", bins, bin) + 1)
            before = int32(0)
            for bin in range(mask + 1):
                here = load("i32", bins, bin)
                store("i32", bins, bin, before)
                before += here
            for i in range(found):
                word = load("i64", source, i)
                bin = (word >> shift) & mask
                at = int64(load("i32", bins, bin))
                store("i32", bins, bin, at + 1)
                store("i64", goal, at, word)
            source, goal = goal, source
        store("i64", words, found, int64(-1))
        return int(found)

    return loop


def distinct() -> Callable[..., int]:
    """How many keys words have, from the first one to before the `last`; see `sorted_keys`."""

    def loop(words: int, first: int, last: int, bits: int) -> int:
        found, before = int64(0), int64(-1)
        for at in range(first, last):
            key = load("i64", words, at) >> bits
            found += key != before
            before = key
        return int(found)

    return loop


def parted() -> Callable[..., None]:
    """Indices of sorted keys in their tables, which begin at `starts`, and where each table ends.

    `kinds` has the bytes of a key and of an index, in that order: 4 or 8, as 16 times the first and
    the second.
    """

    def loop(
        keys: int, count: int, kinds: int, starts: int, tables: int, out: int, ends: int
    ) -> None:
        at, narrow = int64(0), kinds >> 4 == 4
        for table in range(tables):
            start, stop = load("i64", starts, table), load("i64", starts, table + 1)
            end, high = at, int64(count)
            while end < high:
                middle = (end + high) >> 1
                key = int64(load("i32", keys, middle)) if narrow else load("i64", keys, middle)
                if key < stop:
                    end = middle + 1
                else:
                    high = middle
            if kinds == 16 * 4 + 8:
                for i in range(at, end):
                    store("i64", out, i, int64(load("i32", keys, i)) - start)
            elif kinds == 16 * 4 + 4:
                for i in range(at, end):
                    store("i32", out, i, load("i32", keys, i) - int32(start))
            elif kinds == 16 * 8 + 8:
                for i in range(at, end):
                    store("i64", out, i, load("i64", keys, i) - start)
            else:
                for i in range(at, end):
                    store("i32", out, i, int32(load("i64", keys, i) - start))
            store("i64", ends, table, end)
            at = end

    return loop
