"""What a rank says of several tables when a coalesced call opens: one statement for all of them.

It holds a line of text for each table, which must be the same on all ranks (a rank without rows
does not know the row shape and agrees with any); a few numbers for each; and either the tables'
rows, where these are few, or one header (`header`) of all of them together. For the header the
tables' indices are put in one space: the table's number in the upper bits.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..agree import BODY
from .header import Header, combined

__all__ = [
    "HIGHEST",
    "MOST",
    "ROOM",
    "ROWS",
    "UNKNOWN",
    "WHOSE",
    "Longs",
    "Tables",
    "all_together",
    "dtypes_of",
    "joined",
    "layout",
    "line",
    "top",
]

MOST = 256
"""Tables in a statement: more would not leave room for a header."""

UNKNOWN = "?"
"""In place of a row shape: this rank has no rows."""

_FIXED = struct.Struct("<4q2?6x")  # tables, bytes of: lines, trouble, index; with rows, fallible
_AROUND = 128  # bytes for alignment, and before a statement of calls that queued up
_COLUMNS = 5
ROWS, HIGHEST, ROOM, WHOSE, WHO = range(_COLUMNS)
"""Numbers of a table: rows, largest index, room in out, of which rank, who told the row shape."""

Longs = NDArray[np.int64]


def top(tables: int) -> int:
    """The bit from which on a joined index holds its table's number."""
    return 63 - max(1, (tables - 1).bit_length())


def joined(indices: Sequence[Tensor], tables: int) -> Tensor:
    """Sorted indices of each table, one table after the other, in one space; int64."""
    counts = [part.numel() for part in indices]
    numbers = np.repeat(np.arange(len(indices), dtype=np.int64) << top(tables), counts)
    both = torch.cat([part.long() for part in indices]) if indices else torch.empty(0).long()
    return both.add_(torch.from_numpy(numbers))


@dataclass(frozen=True, slots=True)
class Tables:
    """The statement of one rank, or of some ranks together.

    Attributes:
        lines: of each table what it is, a tab, and the row shape.
        numbers: `[tables, 5]`, see `ROWS` and following.
        trouble: how ranks differ, or "".
        fallible: somebody passed a function, which may raise.
        header: of all tables' rows together; None where the rows are here.
        index: bytes of the indices, in `layout` order; int32 or int64 by their number.
        values: bytes of the values, in `layout` order.
    """

    lines: list[str]
    numbers: Longs
    trouble: str = ""
    fallible: bool = False
    header: Header | None = None
    index: Tensor | None = None
    values: Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of the statement, if it carries rows."""
        text = sum(len(line) + 1 for line in self.lines)
        data = sum(part.numel() for part in (self.index, self.values) if part is not None)
        return _FIXED.size + self.numbers.nbytes + text + len(self.trouble) + data + _AROUND

    @property
    def fits(self) -> bool:
        """Whether the rows may travel in the statement."""
        return self.size <= BODY

    def pack(self) -> Tensor:
        """The statement as bytes."""
        lines, trouble = "\n".join(self.lines).encode(), self.trouble.encode()
        rows = self.header is None
        index = 0 if self.index is None else self.index.numel()
        fixed = _FIXED.pack(len(self.lines), len(lines), len(trouble), index, rows, self.fallible)
        parts = [np.frombuffer(fixed, np.uint8), self.numbers.reshape(-1).view(np.uint8)]
        parts += [np.frombuffer(text, np.uint8) for text in (lines, trouble)]
        if self.header is not None:
            parts.append(self.header.pack().numpy())
        else:
            parts += [part.numpy() for part in (self.index, self.values) if part is not None]
        starts = np.cumsum([0] + [_aligned(part.size) for part in parts])
        body = np.zeros(int(starts[-1]), np.uint8)
        for start, part in zip(starts, parts, strict=False):
            body[start : start + part.size] = part
        return torch.from_numpy(body)

    @classmethod
    def unpack(cls, body: Tensor) -> Tables:
        """A statement from bytes; the rows are views of them."""
        raw = body.numpy()
        tables, lines, trouble, index, rows, fallible = _FIXED.unpack_from(raw.data)
        sizes = (_FIXED.size, tables * _COLUMNS * 8, lines, trouble)
        starts = np.cumsum([0] + [_aligned(size) for size in sizes]).tolist()
        numbers, said, differ = (
            raw[start : start + size] for start, size in zip(starts[1:], sizes[1:], strict=False)
        )
        rest = body[starts[-1] :]
        return cls(
            bytes(said).decode().split("\n") if tables else [],
            numbers.view(np.int64).reshape(tables, _COLUMNS).copy(),
            bytes(differ).decode(),
            fallible,
            None if rows else Header.unpack(rest),
            rest[:index] if rows else None,
            rest[_aligned(index) :] if rows else None,
        )

    def described(self, rank: int) -> Tables:
        """The same with a header in place of the rows."""
        if self.header is not None:
            return self
        tables = len(self.lines)
        index = self.own_indices()
        numbers = (np.arange(tables) << top(tables))[self.order()]
        joint = index.long() + torch.from_numpy(
            np.repeat(numbers, self.numbers[self.order(), ROWS])
        )
        header = Header.of(joint.sort().values, rank)
        return replace(self, header=header, index=None, values=None)

    def own_indices(self) -> Tensor:
        """The indices that came along, in `layout` order."""
        assert self.index is not None
        count = int(self.numbers[:, ROWS].sum())
        wide = self.index.numel() == 8 * count
        return self.index.view(torch.int64 if wide else torch.int32)

    def order(self) -> list[int]:
        """The tables' numbers in the order in which their rows are laid out."""
        return layout(self.lines)

    def combine(self, other: Tables) -> Tables:
        """The statement of this one's ranks and of the other's, which are higher."""
        if len(self.lines) != len(other.lines):
            return self  # the fingerprints tell
        lines, numbers, trouble = list(self.lines), self.numbers.copy(), self.trouble
        if self.lines != other.lines:
            for table, (mine, theirs) in enumerate(zip(self.lines, other.lines, strict=True)):
                known = mine.split("\t"), theirs.split("\t")
                if known[0][1] == UNKNOWN and known[0][0] == known[1][0]:
                    lines[table] = theirs
                    numbers[table, WHO] = other.numbers[table, WHO]
                elif known[1][1] != UNKNOWN or known[0][0] != known[1][0]:
                    trouble = trouble or self._difference(other, table)
        numbers[:, ROWS] += other.numbers[:, ROWS]
        numbers[:, HIGHEST] = np.maximum(numbers[:, HIGHEST], other.numbers[:, HIGHEST])
        tighter = other.numbers[:, ROOM] < numbers[:, ROOM]
        numbers[tighter, ROOM : WHOSE + 1] = other.numbers[tighter, ROOM : WHOSE + 1]
        fallible = self.fallible or other.fallible
        header = None
        if self.header is not None and other.header is not None:
            header = self.header.combine(other.header)
        return Tables(lines, numbers, trouble or other.trouble, fallible, header)

    def _difference(self, other: Tables, table: int) -> str:
        mine, theirs = (one.lines[table].split("\t") for one in (self, other))
        same = mine == theirs
        if same:
            return ""
        ranks = [int(one.numbers[table, WHO]) for one in (self, other)]
        if mine[0] != theirs[0]:
            said = mine[0], theirs[0]
        else:
            said = f"rows of shape {mine[1]}", f"rows of shape {theirs[1]}"
        return (
            f"the ranks differ in table {table}: rank {ranks[0]} has {said[0]}, rank {ranks[1]} "
            f"has {said[1]}; pass the same on every rank"
        )


def all_together(everyone: Sequence[Tables]) -> Tables:
    """The statement of all ranks together, from each one's; those of lower ranks come first."""
    headers = [one.header for one in everyone if one.header is not None]
    bare = functools.reduce(Tables.combine, (replace(one, header=None) for one in everyone))
    return replace(bare, header=combined(headers)) if len(headers) == len(everyone) else bare


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def layout(lines: Sequence[str]) -> list[int]:
    """Tables by falling element size, those of one dtype and row shape together.

    By that on the wire first: so rows are aligned both as they travel and as they are handed out.

    Tables without rows, whose row shape is not known, may be anywhere.
    """

    def place(table: int) -> tuple[int, int, str, str, int]:
        what, shape = lines[table].split("\t")
        dtype, travels = dtypes_of(what)
        return -travels.itemsize, -dtype.itemsize, str(dtype), shape, table

    return sorted(range(len(lines)), key=place)


def line(
    index: torch.dtype,
    dtype: torch.dtype,
    height: int | None,
    shape: object,
    travels: torch.dtype | None = None,
) -> str:
    """A table's line of text; `travels` is the dtype of the values on the wire, if another."""
    tall = "no height" if height is None else f"height {height}"
    rounded = "" if travels is None or travels == dtype else f" as {_short(travels)}"
    return f"{_short(dtype)} values{rounded}, {_short(index)} indices, {tall}\t{shape}"


def dtypes_of(what: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the values in a table's line, and that in which they travel.

    >>> dtypes_of("float32 values as bfloat16, int64 indices, no height")
    (torch.float32, torch.bfloat16)
    """
    own, _, rounded = what.split(",", 1)[0].partition(" values")
    dtype, travels = (getattr(torch, name) for name in (own, rounded.removeprefix(" as ") or own))
    return dtype, travels


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
