"""The numbers of the format that `floats` defines: what is loaded there and what is compiled."""

from __future__ import annotations

__all__ = [
    "BLOCK",
    "CODED",
    "ENOUGH",
    "EVERY",
    "HEAD",
    "PLAIN",
    "PLANES",
    "SAMPLED",
    "WINDOW",
    "ZEROS",
]

BLOCK = 1024
"""Numbers that share their codes."""

HEAD = 8
"""Bytes that a block begins with."""

WINDOW = 6
"""Exponents in a row that have codes."""

EVERY = 17
"""Of so many numbers one is looked at; not a power of two, as the widths of rows are."""

ENOUGH = 5
"""Eighths of those whose exponents must have codes; else the block is written plainly."""

PLANES = 3 * BLOCK // 8
"""Bytes of the codes of a block."""

PLAIN, CODED, ZEROS = range(3)
"""How a block is written."""

SAMPLED = len(range(0, BLOCK, EVERY))
"""Numbers of a block that are looked at."""
