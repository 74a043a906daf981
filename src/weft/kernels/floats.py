"""Floating-point numbers in fewer bytes, without loss: their exponents take three bits of eight.

Numbers that training moves (gradients, weights, their sums) have signs and fractions that look
random, and exponents that do not: of a normal distribution 97.5 % have one of seven. So a block of
1,024 numbers, float32 or bfloat16, says which six exponents in a row it uses most, and which other
one (zeros, as a rule); a number's *code* is the place of its exponent among the six, 6 for the
other one and 7 for any other, which is then written out. float32 takes 27.4 bits of 32 so,
bfloat16 11.4 of 16; the entropy of what is normal is 26.5 and 10.5. A block of zeros takes 8
bytes, and one that would not get smaller is written as it is.

A block begins with 8 bytes: how it is written, the first of the six exponents, the other one. Where
it is coded there follow the lower 16 bits of each number, if they have 32; a byte for each, the
sign and the upper 7 bits of the fraction; for each 64 numbers three words with the bits of their
codes, the lowest ones first; and the exponents that have no code, in order. All little-endian. What
is left behind the last whole block is written as it is. Which exponents a block uses most is
learned from one number of 17. Here is the definition, in NumPy, and what hands the work to machine
code (`float_loops`), which gives the same bytes, at 9 GB/s, and reads them at 15.

That exponents are what can be compressed: Lindstrom and Isenburg, "Fast and efficient compression
of floating-point data" (TVCG 2006); of weights and gradients, and for collectives: Johnson,
"DietGPU" (2022), with an entropy coder. Three bits and an escape take 3 % more than that could for
float32 and 8 % for bfloat16, and no number waits for the one before.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .address import address_of
from .compile import Key, compiler
from .float_table import BLOCK, CODED, ENOUGH, EVERY, HEAD, PLAIN, PLANES, SAMPLED, WINDOW, ZEROS

__all__ = ["FLOATS", "PIECES", "SHARES", "floats_key", "most_bytes", "pack_floats", "unpack_floats"]

PIECES: Key = ("pieces",)
"""The set of loops that send and receive them in pieces (`piece_table`)."""

FLOATS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""The dtypes that can be packed, in the words of `machine`."""

SHARES = {"f32": 0.856, "bf16": 0.711}
"""Of the bytes of typical numbers of a kind, those that are left: what costs go by.

Measured (`benchmarks/packing.py`, docs/packing.md): 0.855 and 0.711 of what is normally
distributed, 0.844 to 0.853 and 0.704 to 0.706 of gradients and weights. Random bits, and numbers
of very unequal size, do not get smaller; who sends such things finds predictions too short.
"""

_OTHER, _ESCAPED = WINDOW, WINDOW + 1  # codes
_SIZES = {"f32": 4, "bf16": 2}

Bytes = NDArray[np.uint8]


def floats_key(kind: str) -> Key:
    """The set of loops for numbers of this kind."""
    return ("floats", kind)


def most_bytes(kind: str, count: int) -> int:
    """Bytes that there must be room for while so many numbers are written, or read."""
    size = _SIZES[kind]
    return -(-count // BLOCK) * (HEAD + size * BLOCK + PLANES + BLOCK)


def pack_floats(kind: str, numbers: memoryview, out: memoryview) -> int:
    """Write numbers in few bytes; returns in how many, at most 8 for each block more than before.

    Args:
        kind: of the numbers, one of `FLOATS`.
        numbers: their bytes.
        out: of `most_bytes`; what lies behind what is written may be overwritten, too.
    """
    loops = compiler.loops(floats_key(kind))
    if loops is None:
        return _pack(kind, np.frombuffer(numbers, np.uint8), np.frombuffer(out, np.uint8))
    count = numbers.nbytes // _SIZES[kind]
    size: int = loops["pack_floats"](address_of(numbers), count, address_of(out))
    return size


def unpack_floats(kind: str, packed: memoryview, out: memoryview) -> int:
    """Read back what `pack_floats` wrote; returns how many bytes that were.

    Args:
        kind: of the numbers, one of `FLOATS`.
        packed: `most_bytes` of memory, which begins with them. Anything else that lies there makes
            other numbers, and touches nothing beyond.
        out: where the bytes of the numbers go, which say how many there are.
    """
    loops = compiler.loops(floats_key(kind))
    if loops is None:
        return _unpack(kind, np.frombuffer(packed, np.uint8), np.frombuffer(out, np.uint8))
    count = out.nbytes // _SIZES[kind]
    size: int = loops["unpack_floats"](address_of(packed), address_of(out), count)
    return size


def _codes_of(sample: Bytes) -> tuple[int, int, int]:
    """The codes that fit some exponents: the first of six, the other one, and how many have one."""
    counts = np.bincount(sample, minlength=256)
    firsts = np.arange(1, 256 - WINDOW + 1)
    within = np.array([counts[first : first + WINDOW].sum() for first in firsts])
    base = int(firsts[within.argmax()]) if within.any() else 1
    counts[base : base + WINDOW] = 0
    other = int(counts.argmax())
    return base, other, int(within.max() + counts[other])


def _pack(kind: str, numbers: Bytes, out: Bytes) -> int:
    at, size = 0, _SIZES[kind] * BLOCK
    whole = len(numbers) // size * size
    for start in range(0, whole, size):
        block = numbers[start : start + size]
        narrow = block.view(np.uint16)
        upper = narrow[1::2] if kind == "f32" else narrow  # little-endian
        exponents = (upper >> 7).astype(np.uint8)
        base, other, covered = _codes_of(exponents[::EVERY])
        method, parts = PLAIN, [block]
        if not block.any():
            method, parts = ZEROS, []
        elif 8 * covered >= ENOUGH * SAMPLED:
            codes = np.where(exponents == other, _OTHER, _ESCAPED)
            inside = (exponents >= base) & (exponents < base + WINDOW)
            codes = np.where(inside, exponents - base, codes).astype(np.uint8)
            signed = (upper >> 8 & 0x80 | upper & 0x7F).astype(np.uint8)
            lower = [narrow[::2].copy().view(np.uint8)] if kind == "f32" else []
            written = [*lower, signed, _planes(codes), exponents[codes == _ESCAPED]]
            if sum(map(len, written)) <= size:
                method, parts = CODED, written
        head = np.array([method, base, other, 0, 0, 0, 0, 0], np.uint8)
        for part in (head, *parts):
            out[at : at + len(part)] = part
            at += len(part)
    rest = numbers[whole:]
    out[at : at + len(rest)] = rest
    return at + len(rest)


def _planes(codes: Bytes) -> Bytes:
    """The bits of the codes: of each 64 the lowest ones, then the next."""
    bits = codes.reshape(-1, 1, 64) >> np.arange(3, dtype=np.uint8).reshape(1, 3, 1) & 1
    return np.packbits(bits, axis=-1, bitorder="little").reshape(-1)


def _unpack(kind: str, packed: Bytes, out: Bytes) -> int:
    at, size = 0, _SIZES[kind] * BLOCK

    def taken(count: int) -> Bytes:
        nonlocal at
        at += count
        return packed[at - count : at]

    whole = len(out) // size * size
    for start in range(0, whole, size):
        block = out[start : start + size]
        method, base, other = (int(each) for each in taken(HEAD)[:3])
        if method == ZEROS:
            block[:] = 0
        elif method == CODED:
            lower = taken(2 * BLOCK).view(np.uint16) if kind == "f32" else None
            signed = taken(BLOCK).astype(np.uint16)
            planes = taken(PLANES).reshape(-1, 3, 8)
            bits = np.unpackbits(planes, axis=-1, bitorder="little")
            codes = (bits << np.arange(3, dtype=np.uint8).reshape(1, 3, 1)).sum(1).reshape(-1)
            exponents = np.where(codes == _OTHER, other, codes + base).astype(np.uint16)
            escaped = codes == _ESCAPED
            exponents[escaped] = taken(int(escaped.sum()))
            upper = (signed & 0x80) << 8 | (exponents & 0xFF) << 7 | signed & 0x7F
            if lower is None:
                block[:] = upper.view(np.uint8)
            else:
                block[:] = (upper.astype(np.uint32) << 16 | lower).view(np.uint8)
        else:
            block[:] = taken(size)
    out[whole:] = taken(len(out) - whole)
    return at
