"""Sorted indices in few bits: a Golomb-Rice code of their gaps, and a bitmap where they are dense.

Written are the gaps, the indices left out between neighbours, in blocks of 256. Each block has a
*width*, its Rice parameter: that many low bits of each of its gaps, the *remainder*, are packed
one behind the other; the *unary part* of what is above them, as many zeros and a one, stands in a
string of its own. Where the width is 0 the unary parts are the bitmap of the indices. The width is
the one that is best for gaps of the block's mean whose places are random; then an index takes
hardly more bits than its entropy: at a density of 10 % 4.8, where that is 4.69. Whatever the gaps,
it takes about two bits more, at most, than the binary logarithm of the mean distance between the
indices of its block; so skewed lists are short too.

All numbers are little-endian and bits count from the lowest: a byte for each width, zeros up to
whole words of 64 bits; words of remainders, and a word of zeros behind them; words of unary parts.
What writes and reads them is machine code (`loops`); a rank that has none sends lists plainly, and
so do all ranks of a call with it.

Rice, "Some practical universal noiseless coding techniques" (JPL 79-22, 1979), for the code;
Kiely, "Selecting the Golomb parameter in Rice coding" (IPN Progress Report 42-159, 2004), for the
width; Elias, "Efficient storage and retrieval by content and address of static files" (JACM 1974),
for keeping the two parts of a number apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.memory import numbers_of
from . import jit
from .indices import INDICES

_BLOCK = 256  # gaps that share a width
_WIDEST = 52  # the greatest width:
_FARTHEST = 1 << _WIDEST  # from the first index to the last, so that every step below is exact


@dataclass(frozen=True, slots=True)
class IndexCode:
    """How one list will be written.

    Attributes:
        widths: uint8, of each block of gaps.
        start: bytes before the remainders.
        unary: bytes before the unary parts.
        most: bytes that it all takes at most.
    """

    widths: NDArray[np.uint8]
    start: int
    unary: int
    most: int

    @classmethod
    def of(cls, widths: NDArray[np.uint8], count: int, unary: int = 0) -> IndexCode:
        """The code of `count` indices, with unary parts of at most so many bits."""
        remainders = int((_lengths(count) * widths).sum())
        start = 8 * -(-len(widths) // 8)
        behind = start + 8 * (-(-remainders // 64) + 1)  # loops use a word at any bit of them
        return cls(widths, start, behind, behind + 8 * -(-unary // 64))


def _lengths(count: int) -> NDArray[np.int64]:
    """Gaps in each block of a list of so many indices."""
    lengths = np.full(-(-(count - 1) // _BLOCK), _BLOCK, np.int64)
    lengths[-1] = (count - 2) % _BLOCK + 1
    return lengths


def index_code(indices: Tensor) -> IndexCode | None:
    """How these indices are best written; None if they are too far apart, or nobody can write them.

    Args:
        indices: at least two, sorted and unique, int32 or int64, contiguous, on the CPU.
    """
    found = numbers_of(indices)
    if jit.loops() is None or int(found[-1]) - int(found[0]) >= _FARTHEST:
        return None
    ends = np.append(found[:-1:_BLOCK], found[-1:]).astype(np.int64)
    lengths = _lengths(len(found))
    left_out = np.diff(ends) - lengths
    # Kiely's (15): where m are left out for a gap it is 0, or 1 + floor(log2(0.4812 m + 0.2406)) if
    # that is more
    scaled = (2 * left_out + lengths) * 77 // (320 * lengths)
    widths = np.frexp(scaled)[1].astype(np.uint8)
    unary = int((lengths + (left_out >> widths)).sum())
    return IndexCode.of(widths, len(found), unary)


def encode(indices: Tensor, code: IndexCode, out: Tensor) -> int:
    """Write indices; returns how many bytes that took, at most `code.most`.

    Args:
        indices: those that `index_code` saw.
        code: what it said.
        out: uint8, 1-D, of at least `code.most` bytes.
    """
    raw = out.numpy()
    raw[: len(code.widths)] = code.widths
    raw[len(code.widths) : code.start] = 0
    raw[max(code.start, code.unary - 16) : code.unary] = 0  # the rest the loop writes
    address = out.data_ptr()
    words: int = jit.machine_code()[f"encode.{INDICES[indices.dtype]}"](
        *(indices.data_ptr(), len(indices)),
        *(address, address + code.start, address + code.unary, (code.most - code.unary) // 8),
    )
    if words < 0:
        raise ValueError("indices changed while they were being packed: wait for their writer")
    return code.unary + 8 * words


def decode(packed: Tensor, first: int, last: int, out: Tensor) -> bool:
    """Read back what `encode` wrote; False where that is damaged, and `out` then holds anything.

    Nothing beyond `packed` is read, and what is read is sorted, unique, and from `first` to `last`.

    Args:
        packed: uint8, 1-D, contiguous: what was written, or more.
        first: the first of the indices.
        last: none of them is greater.
        out: at least two indices long, of their dtype; to be filled.
    """
    count = len(out)
    blocks = -(-(count - 1) // _BLOCK)
    last = min(last, torch.iinfo(out.dtype).max)
    widths = packed[:blocks].numpy()
    if blocks < 1 or len(widths) < blocks:
        return False
    code = IndexCode.of(widths, count)
    words = (len(packed) - code.unary) // 8
    loops = jit.loops()
    if loops is None or words < 1 or not 0 <= first <= last:
        return False
    address = packed.data_ptr()
    damaged = loops[f"decode.{INDICES[out.dtype]}"](
        *(first, last, count, address, address + code.start, address + code.unary),
        *(words, out.data_ptr()),
    )
    return not damaged
