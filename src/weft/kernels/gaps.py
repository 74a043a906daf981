"""Sorted indices in few bits: a Golomb-Rice code of their gaps, and a bitmap where they are dense.

Written are the gaps, the indices left out between neighbours, in blocks of 256. Each block has a
*width*: that many low bits of each of its gaps, the *remainder*, are packed one behind the other;
what is above them says how many zeros stand before the gap's one in a string of *marks*. Where the
width is 0 the marks are the bitmap of the indices. The width is the one that is best for gaps of
the block's mean whose places are random; then an index takes hardly more bits than its entropy: at
a density of 10 % 4.8, where that is 4.69. Whatever the gaps, it takes hardly two bits more than the
logarithm of its block's mean gap; so skewed lists are short too.

All numbers are little-endian and bits count from the lowest: a byte for each width, zeros up to
whole words of 64 bits; words of remainders, and a word of zeros behind them; words of marks. Here
is the definition, in NumPy, and what hands the work to machine code (`gap_loops`), which gives the
same bytes.

Rice, "Some practical universal noiseless coding techniques" (JPL 79-22, 1979), for the code;
Kiely, "Selecting the Golomb parameter in Rice coding" (IPN Progress Report 42-159, 2004), for the
width; Elias, "Efficient storage and retrieval by content and address of static files" (JACM 1974),
for keeping the two parts of a number apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .compile import KINDS, Key, compiler

__all__ = ["GapCode", "expected_bits", "gap_code", "gaps_key", "pack_gaps", "unpack_gaps"]

BLOCK = 256
"""Gaps that share a width."""

_WIDEST = 1 << 52  # from the first index to the last: so that every step below is exact

Longs = NDArray[np.int64]


def gaps_key(dtype: torch.dtype) -> Key:
    """The set of loops for indices of this dtype."""
    return ("gaps", KINDS[dtype])


@dataclass(frozen=True, slots=True)
class GapCode:
    """How the gaps of one list will be written.

    Attributes:
        widths: uint8, of each block of gaps.
        remainders: words of remainders, the word of zeros behind them included.
        most: bytes that it all takes at most.
    """

    widths: NDArray[np.uint8]
    remainders: int
    most: int

    @property
    def start(self) -> int:
        """Bytes before the remainders."""
        return -(-len(self.widths) // 8) * 8

    @property
    def marks(self) -> int:
        """Bytes before the marks."""
        return self.start + 8 * self.remainders

    @classmethod
    def of(cls, widths: NDArray[np.uint8], count: int, marks: int = 0) -> GapCode:
        """The code of `count` indices with those widths, and at most that many bits of marks."""
        bits = int((_lengths(count) * widths).sum())
        remainders = -(-bits // 64) + 1  # the loops read and write a word at any bit of them
        size = -(-len(widths) // 8) + remainders + -(-marks // 64)
        return cls(widths, remainders, 8 * size)


def _lengths(count: int) -> Longs:
    """Gaps in each block of a list of so many indices."""
    lengths = np.full(-(-(count - 1) // BLOCK), BLOCK, np.int64)
    lengths[-1] = (count - 2) % BLOCK + 1
    return lengths


def gap_code(indices: Tensor) -> GapCode | None:
    """How the gaps of these indices are best written; None if they are too far apart.

    Args:
        indices: at least two, sorted and unique, int32 or int64, contiguous, on the CPU.
    """
    found = indices.numpy()
    if int(found[-1]) - int(found[0]) >= _WIDEST:
        return None
    ends = np.append(found[:-1:BLOCK], found[-1:]).astype(np.int64)
    lengths = _lengths(len(found))
    left_out = np.diff(ends) - lengths
    widths = _width(left_out, lengths)
    marks = int((lengths + (left_out >> widths)).sum())
    return GapCode.of(widths.astype(np.uint8), len(found), marks)


def _width(left_out: Longs, gaps: Longs) -> Longs:
    """The best width for so many gaps that leave out so many indices together: Kiely's (15).

    With m left out for a gap it is 0, or 1 + floor(log2(0.4812 m + 0.2406)) if that is more.
    """
    scaled = (2 * left_out + gaps) * 77 // (320 * gaps)
    return np.frexp(scaled.astype(np.float64))[1].astype(np.int64)


def expected_bits(count: float, places: float) -> float:
    """Bits that an index of so many, which are anywhere among so many places, will take.

    Infinite where they may be too far apart.
    """
    if places > _WIDEST:
        return math.inf
    left_out = max(places / count - 1, 0.0)
    width = math.frexp(math.floor((2 * left_out + 1) * 77 / 320))[1]  # as `_width`
    further = (left_out / (left_out + 1)) ** 2.0**width  # the odds of each zero before a mark
    return float(width + 1 / (1 - further) + 8 / BLOCK)


def pack_gaps(indices: Tensor, code: GapCode, out: Tensor) -> int:
    """Write the gaps of indices; returns how many bytes that took, at most `code.most`.

    Args:
        indices: those that `gap_code` saw.
        code: what it said.
        out: uint8, 1-D, of at least `code.most` bytes.
    """
    raw = out.numpy()
    raw[: len(code.widths)] = code.widths
    raw[len(code.widths) : code.start] = 0
    raw[max(code.start, code.marks - 16) : code.marks] = 0  # the rest the loop writes
    loops = compiler.loops(gaps_key(indices.dtype))
    if loops is None:
        return _pack(indices.numpy(), code, raw)
    address = out.data_ptr()
    words: int = loops["pack_gaps"](
        indices.data_ptr(),
        len(indices),
        BLOCK,
        address,
        address + code.start,
        address + code.marks,
    )
    return code.marks + 8 * words


def _pack(indices: NDArray[np.integer], code: GapCode, raw: NDArray[np.uint8]) -> int:
    longs: Longs = indices.astype(np.int64)
    gaps: Longs = longs[1:] - longs[:-1] - 1
    widths = np.repeat(code.widths.astype(np.int64), _lengths(len(indices)))
    starts = np.cumsum(widths) - widths
    bits = np.zeros(64 * code.remainders, np.uint8)
    for bit in range(int(code.widths.max())):
        some = widths > bit
        bits[starts[some] + bit] = gaps[some] >> bit & 1
    raw[code.start : code.marks] = np.packbits(bits, bitorder="little")
    marks = np.cumsum((gaps >> widths) + 1) - 1
    bits = np.zeros(-(-(int(marks[-1]) + 1) // 64) * 64, np.uint8)
    bits[marks] = 1
    raw[code.marks : code.marks + len(bits) // 8] = np.packbits(bits, bitorder="little")
    return code.marks + len(bits) // 8


def unpack_gaps(packed: Tensor, first: int, out: Tensor) -> None:
    """Read back what `pack_gaps` wrote.

    Args:
        packed: uint8, 1-D: what was written, or more.
        first: the first of the indices.
        out: at least two indices long, of their dtype; to be filled.
    """
    widths = packed[: len(_lengths(len(out)))].numpy()
    code = GapCode.of(widths, len(out))
    loops = compiler.loops(gaps_key(out.dtype))
    if loops is None:
        _unpack(packed.numpy(), code, first, out.numpy())
        return
    address = packed.data_ptr()
    loops["unpack_gaps"](
        first,
        len(out),
        BLOCK,
        address,
        address + code.start,
        address + code.marks,
        out.data_ptr(),
    )


def _unpack(raw: NDArray[np.uint8], code: GapCode, first: int, out: NDArray[np.integer]) -> None:
    widths = np.repeat(code.widths.astype(np.int64), _lengths(len(out)))
    marks = np.flatnonzero(np.unpackbits(raw[code.marks :], bitorder="little"))[: len(widths)]
    gaps = np.diff(marks, prepend=-1) - 1 << widths
    bits = np.unpackbits(raw[code.start : code.marks], bitorder="little").astype(np.int64)
    starts = np.cumsum(widths) - widths
    for bit in range(int(code.widths.max())):
        some = widths > bit
        gaps[some] |= bits[starts[some] + bit] << bit
    out[0] = first
    out[1:] = first + np.cumsum(gaps + 1)
