"""The compiled loops over blocks of floating-point numbers: their exponents in few bits, and back.

Made and called like `value_loops`; what the bytes mean is told, and defined, in `floats`. Of 64
numbers at a time the parts are taken, and put together, by one word of `machine` each; numbers
whose exponent has no code are seen to one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .float_table import BLOCK, CODED, ENOUGH, EVERY, HEAD, PLAIN, PLANES, SAMPLED, WINDOW, ZEROS
from .machine import (
    SIZES,
    join_floats,
    load,
    lowest_one,
    memcpy,
    memset,
    split_floats,
    store,
)

LOOPS = ("pack_floats", "unpack_floats")

__all__ = ["LOOPS", *LOOPS]

_SIGNED = {"f32": "i32", "bf16": "i16"}

int64: Any = np.int64  # casts, in machine code
uint8: Any = np.uint8


def pack_floats(kind: str) -> Callable[..., int]:
    """Write whole blocks of numbers, and what is left plainly; returns how many bytes that took.

    At `out` there is room for `floats.most_bytes`: more than is taken is written on the way.
    """
    size, bits = SIZES[kind], _SIGNED[kind]
    shift = 8 * size - 9
    lows = 2 * BLOCK * (size == 4)

    def loop(numbers: int, count: int, out: int) -> int:
        begin, end = out, numbers + size * count
        while end - numbers >= size * BLOCK:
            low = out + HEAD

            # which exponents have codes; they are counted where parts of the block come later
            memset(low, 0, 256)
            lowest, highest = int64(255), int64(0)
            for i in range(0, BLOCK, EVERY):
                exponent = (int64(load(bits, numbers, i)) >> shift) & 255
                store("u8", low, exponent, uint8(load("u8", low, exponent) + 1))
                lowest, highest = min(lowest, exponent), max(highest, exponent)
            base, covered, within = int64(1), int64(0), int64(0)
            first = max(int64(1), lowest - WINDOW + 1)
            for exponent in range(first, first + WINDOW):
                within += load("u8", low, exponent)
            for start in range(first, min(int64(256 - WINDOW), highest) + 1):
                if within > covered:
                    base, covered = start, within
                within += load("u8", low, min(start + WINDOW, 255)) - load("u8", low, start)
            other, most = int64(0), int64(0)
            for exponent in range(lowest, highest + 1):
                count = int64(load("u8", low, exponent))
                if count > most and not base <= exponent < base + WINDOW:
                    other, most = exponent, count
            covered += most

            method = int64(CODED if 8 * covered >= ENOUGH * SAMPLED else PLAIN)
            if load("u8", low, 0) == SAMPLED:
                some = int64(0)
                for i in range(size * BLOCK // 8):
                    some |= load("i64", numbers, i)
                if some == 0:
                    method = int64(ZEROS)
            store("i64", out, 0, method | base << 8 | other << 16)
            after = low
            if method == CODED:
                high = low + lows
                planes = high + BLOCK
                after = planes + PLANES
                for group in range(0, BLOCK, 64):
                    some = numbers + size * group
                    escaped = split_floats(
                        kind,
                        some,
                        low + 2 * group,
                        high + group,
                        planes + 3 * group // 8,
                        base,
                        other,
                    )
                    while escaped != 0:
                        exponent = int64(load(bits, some, lowest_one(escaped))) >> shift
                        store("u8", after, 0, uint8(exponent & 255))
                        after += 1
                        escaped &= escaped - 1
                if after - low > size * BLOCK:
                    method = int64(PLAIN)
                    store("u8", out, 0, uint8(PLAIN))
            if method == PLAIN:
                memcpy(low, numbers, size * BLOCK)
                after = low + size * BLOCK
            out = after
            numbers += size * BLOCK
        memcpy(out, numbers, end - numbers)
        return out + (end - numbers) - begin

    return loop


def unpack_floats(kind: str) -> Callable[..., int]:
    """Read back `count` numbers that `pack_floats` wrote; returns how many bytes they took.

    Whatever lies there, no more is read than `floats.most_bytes` of so many numbers.
    """
    size, bits = SIZES[kind], _SIGNED[kind]
    shift = 8 * size - 9
    lows = 2 * BLOCK * (size == 4)
    kept = ~(255 << shift)
    narrow: Any = {4: np.int32, 2: np.int16}[size]

    def loop(packed: int, out: int, count: int) -> int:
        start, end = packed, out + size * count
        while end - out >= size * BLOCK:
            word = load("i64", packed, 0)
            method, base, other = word & 255, (word >> 8) & 255, (word >> 16) & 255
            packed += HEAD
            if method == CODED:
                high = packed + lows
                planes = high + BLOCK
                after = planes + PLANES
                for group in range(0, BLOCK, 64):
                    some = out + size * group
                    escaped = join_floats(
                        kind,
                        packed + 2 * group,
                        high + group,
                        planes + 3 * group // 8,
                        base,
                        other,
                        some,
                    )
                    while escaped != 0:
                        i = lowest_one(escaped)
                        exponent = int64(load("u8", after, 0))
                        after += 1
                        number = (int64(load(bits, some, i)) & kept) | exponent << shift
                        store(bits, some, i, narrow(number))
                        escaped &= escaped - 1
                packed = after
            elif method == ZEROS:
                memset(out, 0, size * BLOCK)
            else:
                memcpy(out, packed, size * BLOCK)
                packed += size * BLOCK
            out += size * BLOCK
        memcpy(out, packed, end - out)
        return packed + (end - out) - start

    return loop
