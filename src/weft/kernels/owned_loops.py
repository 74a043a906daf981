"""The compiled loops that lay rows of tables where others read them, and sum those of all ranks.

Made and called like `value_loops`: all arguments are int64, addresses and counts; the kind of
numbers and the operation are constants of the loops. See `lists`. They close over nothing else:
over functions, no two processes would find the same loop in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import (
    SIZES,
    combine_rows,
    fence,
    load,
    memcpy,
    memset,
    prefetch_row,
    prefetch_to_write,
    store,
    stream,
)

LOOPS = ("laid", "sums")

__all__ = ["LOOPS", *LOOPS]

_AHEAD = 16  # rows that are asked for before they are read, or written
_LINES = 1024  # bytes of a row that are asked for
_NARROW = (1 << 31) - 1  # the greatest int32
_GOLDEN = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, as an int64

int32: Any = np.int32  # casts, in machine code
int64: Any = np.int64


def laid(kind: str, op: str) -> Callable[..., int]:
    """Lay some tables' rows one behind the other, each index of a table once.

    Rows of one index make one, added in the order in which they come, where the first of them is.
    `given` has of all tables the addresses of their indices, then their counts, the bytes of an
    index, the addresses of the values, and the bits of each count; `places` has room for int32,
    four times the greatest number of as many bits. Indices become int64 if `wide`, else int32; a
    row has `width` numbers. `counts`, `lows` and `highs` get how many rows are left of each table,
    and its ends. Returns 0, or 1 behind the first table that has an index which is no int32, if not
    `wide`.
    """
    size = SIZES[kind]

    def loop(
        given: int, tables: int, width: int, wide: int, indices: int, values: int, counts: int,
        lows: int, highs: int, places: int,
    ) -> int:  # fmt: skip
        row = width * size
        lines = min(row, _LINES)
        for table in range(tables):
            source, count = load("i64", given, table), load("i64", given, tables + table)
            narrow = load("i64", given, 2 * tables + table) == 4
            rows = load("i64", given, 3 * tables + table)
            bits = load("i64", given, 4 * tables + table) + 2  # of places, some of which stay free
            mask, shift, found = (int64(1) << bits) - 1, 64 - bits, int64(0)
            memset(places, 0, 4 << bits)
            low = high = int64(load("i32", source, 0)) if narrow else load("i64", source, 0)
            for i in range(count):
                index = int64(load("i32", source, i)) if narrow else load("i64", source, i)
                low, high = min(low, index), max(high, index)
                at = (((index ^ (index >> 29)) * _GOLDEN) >> shift) & mask
                while True:
                    place = int64(load("i32", places, at)) - 1
                    if place < 0:
                        # others' cores read there in a call before, and still have these lines
                        prefetch_to_write(values + (found + _AHEAD) * row, lines)
                        store("i32", places, at, int32(found + 1))
                        if wide:
                            store("i64", indices, found, index)
                        else:
                            store("i32", indices, found, int32(index))
                        memcpy(values + found * row, rows, row)
                        found += 1
                        break
                    if wide:
                        other = load("i64", indices, place)
                    else:
                        other = int64(load("i32", indices, place))
                    if other == index:
                        there = values + place * row
                        combine_rows(op, kind, there, there, rows, width)
                        break
                    at = (at + 1) & mask
                rows += row
            store("i64", counts, table, found)
            store("i64", lows, table, low)
            store("i64", highs, table, high)
            if high > _NARROW and not wide:
                return 1
            indices += (8 if wide else 4) * found
            values += found * row
        return 0

    return loop


def sums(kind: str, op: str) -> Callable[..., int]:
    """Add up rows by words as `list_loops.sorted_keys` leaves them, from word `at` up to `stop`.

    Ranks' rows of one key are added in the order of ranks; the word at `stop` is of another key.
    `bases` has for each rank where its row of position 0 would lie; a row has `width` numbers.
    Writes the sums to `out`, and their keys, which in words count from `low`, to `keys`: as int64
    if `wide`, else as int32. Rows that one rank alone has go past the cache if `past`, where `out`
    and a row's bytes are multiples of 32. Returns how many there are.
    """
    size = SIZES[kind]

    def loop(
        words: int, at: int, stop: int, position_bits: int, bits: int, low: int, bases: int,
        width: int, wide: int, past: int, keys: int, out: int,
    ) -> int:  # fmt: skip
        position, ranks = (int64(1) << position_bits) - 1, (int64(1) << (bits - position_bits)) - 1
        row, done, ahead = width * size, int64(0), int64(at)
        lines = min(row, _LINES)
        while at < stop:
            soon = min(at + _AHEAD, stop)
            while ahead < soon:
                word = load("i64", words, ahead)
                there = load("i64", bases, (word >> position_bits) & ranks)
                there += (word & position) * row
                prefetch_row(there, lines)
                ahead += 1
            word = load("i64", words, at)
            key = word >> bits
            if wide:
                store("i64", keys, done, key + low)
            else:
                store("i32", keys, done, int32(key + low))
            first = load("i64", bases, (word >> position_bits) & ranks) + (word & position) * row
            at += 1
            word = load("i64", words, at)
            if word >> bits != key:
                if past:
                    for piece in range(0, row, 32):
                        stream(out + piece, first + piece)
                else:
                    memcpy(out, first, row)
            while word >> bits == key:
                other = load("i64", bases, (word >> position_bits) & ranks)
                other += (word & position) * row
                combine_rows(op, kind, out, first, other, width)
                first = out
                at += 1
                word = load("i64", words, at)
            out += row
            done += 1
        fence()
        return int(done)

    return loop
