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
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..agree import BODY
from .header import NO_LIMIT, Header

__all__ = [
    "COLUMNS",
    "HIGHEST",
    "MOST",
    "ROOM",
    "ROWS",
    "UNKNOWN",
    "WHO",
    "WHOSE",
    "Longs",
    "Tables",
    "dtypes_of",
    "layout",
    "line",
    "top",
]

MOST = 256
"""Tables in a statement: more would not leave room for a header."""

UNKNOWN = "?"
"""In place of a row shape: this rank has no rows."""

_LINES = 1 << 12  # whose meaning is kept: models have the same tables in each step
_LISTS = 1 << 7  # of these
# tables, bytes of: lines, trouble, index; what comes with it, fallible
_FIXED = struct.Struct("<4qB?6x")
_HEADER, _ROWS = range(2)
_AROUND = 128  # bytes for alignment, and before a statement of calls that queued up
COLUMNS = 5
"""How many numbers a table has:"""
ROWS, HIGHEST, ROOM, WHOSE, WHO = range(COLUMNS)
"""Numbers of a table: rows, largest index, room in out, of which rank, who told the row shape."""

Longs = NDArray[np.int64]


def top(tables: int) -> int:
    """The bit from which on a joined index holds its table's number."""
    return 63 - max(1, (tables - 1).bit_length())


class Tables(NamedTuple):
    """The statement of one rank, or of some ranks together.

    Attributes:
        lines: of each table what it is, a tab, and the row shape.
        numbers: `[tables, 5]`, see `ROWS` and following.
        trouble: the number of the first table in which ranks differ, a tab, and how; or "".
        fallible: somebody passed a function, which may raise.
        header: of all tables' rows together; None where the rows are here.
        indices: bytes of the indices, in `layout` order; int32 or int64 by their number.
        values: bytes of the values, in `layout` order.
    """

    lines: tuple[str, ...]
    numbers: Longs
    trouble: str = ""
    fallible: bool = False
    header: Header | None = None
    indices: Tensor | None = None
    values: Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of the statement, if it carries rows."""
        text = sum(len(line) + 1 for line in self.lines)
        data = sum(part.numel() for part in (self.indices, self.values) if part is not None)
        return _FIXED.size + self.numbers.nbytes + text + len(self.trouble) + data + _AROUND

    @property
    def fits(self) -> bool:
        """Whether the rows may travel in the statement."""
        return self.size <= BODY

    def pack(self) -> Tensor:
        """The statement as bytes."""
        lines, trouble = _text_of(self.lines), self.trouble.encode()
        kind = _ROWS if self.header is None else _HEADER
        index = 0 if self.indices is None else self.indices.numel()
        sizes = len(lines), len(trouble), index
        fixed = _FIXED.pack(len(self.lines), *sizes, kind, self.fallible)
        parts: list[bytes | memoryview] = [fixed, self.numbers.tobytes(), lines, trouble]
        if self.header is not None:
            parts.append(self.header.pack().numpy().data)
        else:
            rows = [part for part in (self.indices, self.values) if part is not None]
            parts += [part.numpy().data for part in rows]
        padded = [piece for part in parts for piece in (part, bytes(-len(part) % 8))]
        return torch.frombuffer(bytearray().join(padded), dtype=torch.uint8)

    @classmethod
    def unpack(cls, raw: memoryview) -> Tables:
        """A statement from bytes; its numbers and rows are views of them."""
        fixed = _FIXED.unpack_from(raw)
        tables, lines, trouble, index, kind, fallible = fixed
        first = _FIXED.size + tables * COLUMNS * 8
        second = first + _aligned(lines)
        third = second + _aligned(trouble)
        numbers = np.frombuffer(raw, np.int64, tables * COLUMNS, _FIXED.size)
        rest = torch.frombuffer(raw, dtype=torch.uint8)[third:]
        return cls(
            _lines_in(bytes(raw[first : first + lines])) if tables else (),
            numbers.reshape(tables, COLUMNS),
            bytes(raw[second : second + trouble]).decode() if trouble else "",
            fallible,
            Header.unpack(rest) if kind == _HEADER else None,
            rest[:index] if kind == _ROWS else None,
            rest[_aligned(index) :] if kind == _ROWS else None,
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
        return self._replace(header=header, indices=None, values=None)

    def own_indices(self) -> Tensor:
        """The indices that came along, in `layout` order."""
        assert self.indices is not None
        count = int(self.numbers[:, ROWS].sum())
        wide = self.indices.numel() == 8 * count
        return self.indices.view(torch.int64 if wide else torch.int32)

    def order(self) -> list[int]:
        """The tables' numbers in the order in which their rows are laid out."""
        return layout(self.lines)

    def difference(self, numbered: Sequence[int]) -> str:
        """How ranks differ, in a sentence; `numbered` are the tables' numbers in the whole list."""
        table, how = self.trouble.split("\t")
        return f"the ranks differ in table {numbered[int(table)]}: {how}"

    @classmethod
    def together(cls, said: Sequence[Tables]) -> Tables:
        """One statement of several, in the order of their ranks; without rows."""
        first, columns = said[0], zip(*said, strict=True)
        texts, each, troubles, fallible, headers, _, _ = columns
        same = texts.count(first.lines) == len(said)
        if not same and len(set(map(len, texts))) > 1:
            return first  # the fingerprints tell
        everyone = np.array(each)
        numbers = first.numbers.copy()
        np.add.reduce(everyone[:, :, ROWS], 0, out=numbers[:, ROWS])
        np.maximum.reduce(everyone[:, :, HIGHEST], 0, out=numbers[:, HIGHEST])
        if everyone[:, :, ROOM].min(initial=NO_LIMIT) < NO_LIMIT:
            tightest = everyone[:, :, ROOM].argmin(0)
            rooms = everyone[tightest, np.arange(len(numbers))][:, [ROOM, WHOSE]]
            numbers[:, [ROOM, WHOSE]] = rooms
        trouble, lines = first.trouble, first.lines
        if not same:
            filled = list(lines)
            for one in said[1:]:
                trouble = trouble or _reconciled(filled, numbers, one) or one.trouble
            lines = tuple(filled)
        trouble = trouble or next(filter(None, troubles), "")
        header = None if None in headers else Header.together(headers)
        return cls(lines, numbers, trouble, any(fallible), header=header)


def _reconciled(lines: list[str], numbers: Longs, other: Tables) -> str:
    """Fill in what only the other knows of tables; returns how they differ, or ""."""
    trouble = ""
    for table, (mine, theirs) in enumerate(zip(lines, other.lines, strict=True)):
        if mine == theirs:
            continue
        known = mine.split("\t"), theirs.split("\t")
        if known[0][1] == UNKNOWN and known[0][0] == known[1][0]:
            lines[table] = theirs
            numbers[table, WHO] = other.numbers[table, WHO]
        elif known[1][1] != UNKNOWN or known[0][0] != known[1][0]:
            ranks = int(numbers[table, WHO]), int(other.numbers[table, WHO])
            trouble = trouble or _difference(table, ranks, known)
    return trouble


def _difference(table: int, ranks: tuple[int, int], known: tuple[list[str], list[str]]) -> str:
    said = [what for what, _ in known]
    if said[0] == said[1]:
        said = [f"rows of shape {shape}" for _, shape in known]
    return (
        f"{table}\trank {ranks[0]} has {said[0]}, rank {ranks[1]} has {said[1]}; pass the same on "
        "every rank"
    )


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def layout(lines: Sequence[str]) -> list[int]:
    """Tables by falling element size, those of one dtype and row shape together.

    By that on the wire first: so rows are aligned both as they travel and as they are handed out.

    Tables without rows, whose row shape is not known, may be anywhere.
    """
    return list(_layout(tuple(lines)))


@functools.lru_cache(_LISTS)
def _layout(lines: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(lines)), key=lambda table: (*_place(lines[table]), table)))


@functools.lru_cache(_LISTS)
def _text_of(lines: tuple[str, ...]) -> bytes:
    """Lines as they travel."""
    return "\n".join(lines).encode()


@functools.lru_cache(_LISTS)
def _lines_in(text: bytes) -> tuple[str, ...]:
    """At least one."""
    return tuple(text.decode().split("\n"))


@functools.lru_cache(_LINES)
def _place(line: str) -> tuple[int, int, str, str]:
    """By what a table comes before others, from its line."""
    what, shape = line.split("\t")
    dtype, travels = dtypes_of(what)
    return -travels.itemsize, -dtype.itemsize, str(dtype), shape


@functools.lru_cache(_LINES)
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


@functools.lru_cache(_LINES)
def dtypes_of(what: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the values in a table's line, and that in which they travel.

    >>> dtypes_of("float32 values as bfloat16, int64 indices, no height")
    (torch.float32, torch.bfloat16)
    """
    own, _, rounded = what.split(",", 1)[0].partition(" values")
    dtype, travels = (getattr(torch, name) for name in (own, rounded.removeprefix(" as ") or own))
    return dtype, travels


@functools.cache
def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
