"""The compiled loops over the gaps of sorted indices: write them in few bits, read them back.

Made and called like `value_loops`; what the bits mean is told, and defined, in `gaps`. Both loops
read and write the remainders with unaligned words of 64 bits, so a remainder of at most 56 bits
never takes a second one; and both keep the word of marks in a register, since bits set one by one
in memory wait for each other.

Kiely, "Selecting the Golomb parameter in Rice coding" (IPN Progress Report 42-159, 2004), for the
code; one branch for 64 marks is what makes it quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import load, lowest_one, store

LOOPS = ("pack_gaps", "unpack_gaps")

__all__ = ["LOOPS", *LOOPS]

int64: Any = np.int64  # casts, in machine code


def pack_gaps(kind: str) -> Callable[..., int]:
    """Write the gaps of `count` sorted, unique indices; returns how many words of marks.

    `widths` has a byte for each `block` of gaps. The remainders end with a word of zeros, which
    is the caller's to write: only that much of it may be overwritten.
    """

    def loop(indices: int, count: int, block: int, widths: int, remainders: int, marks: int) -> int:
        before = int64(load(kind, indices, 0))
        some, filled = int64(0), 0  # remainders not yet whole bytes
        word, bit = int64(0), 0
        words = 0
        for start in range(1, count, block):
            width = int64(load("u8", widths, start // block))
            mask = (int64(1) << width) - 1
            for i in range(start, min(start + block, count)):
                index = int64(load(kind, indices, i))
                gap = index - before - 1
                before = index
                some |= (gap & mask) << filled
                store("i64", remainders, 0, some)
                filled += width
                remainders += filled >> 3
                some >>= filled & ~7
                filled &= 7
                bit += gap >> width
                while bit >= 64:
                    store("i64", marks, words, word)
                    words += 1
                    word = int64(0)
                    bit -= 64
                word |= int64(1) << bit
                bit += 1
        store("i64", marks, words, word)
        return words + 1

    return loop


def unpack_gaps(kind: str) -> Callable[..., None]:
    """Read back what `pack_gaps` wrote: `count` indices from `first` on."""

    def loop(
        first: int, count: int, block: int, widths: int, remainders: int, marks: int, out: int
    ) -> None:
        store(kind, out, 0, first)
        index, at = int64(first), int64(0)
        base, last = int64(0), int64(-1)  # bits before this word of marks; the mark before
        word = load("i64", marks, 0)
        for start in range(1, count, block):
            width = int64(load("u8", widths, start // block))
            mask = (int64(1) << width) - 1
            for i in range(start, min(start + block, count)):
                while word == 0:
                    base += 64
                    word = load("i64", marks, base >> 6)
                mark = base + lowest_one(word)
                word &= word - 1
                rest = (load("i64", remainders + (at >> 3), 0) >> (at & 7)) & mask
                at += width
                index += (((mark - last - 1) << width) | rest) + 1
                last = mark
                store(kind, out, i, index)

    return loop
