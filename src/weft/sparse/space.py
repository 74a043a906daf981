"""One space of keys for the tables of a coalesced call, one table behind the other.

All ranks make it from what all together said, so a key means the same row of the same table to
everybody, and a schedule sees one tall table. Tables of one row shape and dtype are neighbours in
it: a stack (`mixed`).
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .call import row_bytes, shape_in
from .header import Header
from .mixed import Stack
from .tables import HIGHEST, Longs, Tables, dtypes_of, layout, top

__all__ = ["Space"]


class Space:
    """Keys of all tables that have rows, in the order in which rows are laid out.

    Attributes:
        tables: their numbers.
        starts: the first key of each, and the end.
        end: the end of all keys.
        index: dtype of keys.
        stacks: of tables of one row shape and dtype.
        tables_of: the numbers of each stack's tables.
        row: bytes of a row of each table of the call, as it travels.
        weight: the same with the bytes of an index, of which all count as 4.
        which: of each of `tables` its number, and the bytes of a row.
    """

    def __init__(self, said: Tables) -> None:
        present = said.numbers[:, HIGHEST] >= 0
        found = _arranged(said.lines, present.tobytes())
        self.tables, self.tables_of, self.row = found.tables, found.tables_of, found.row
        self.which, self.weight = found.which, found.weight
        self.starts = np.zeros(len(self.tables) + 1, np.int64)
        np.add.accumulate(said.numbers[self.tables, HIGHEST] + 1, out=self.starts[1:])
        self.end = int(self.starts[-1])
        self.index = torch.int32 if self.end <= 2**31 - 1 else torch.int64
        self.stacks = [
            Stack(travels, shape, int(self.starts[last]), wide)
            for travels, shape, wide, last in found.stacks
        ]

    def keys(self, indices: Tensor, counts: Sequence[int] | Longs) -> Tensor:
        """The keys of indices that are laid out; `counts` are those of all tables."""
        starts = np.repeat(self.starts[:-1], [counts[table] for table in self.tables])
        return torch.from_numpy(starts).add_(indices).to(self.index)

    def place(self, header: Header, tables: int) -> tuple[Header, Longs]:
        """A header of joined indices as one of keys, and the bytes of a row at each point."""
        start = np.zeros(tables, np.int64)
        start[self.tables] = self.starts[:-1]
        bit = top(tables)
        table = header.points >> bit
        points = start[table] + (header.points & ((1 << bit) - 1))
        order = np.argsort(points, kind="stable")
        placed = replace(
            header, points=points[order], weights=header.weights[order], highest=self.end - 1
        )
        return placed, self.row[table][order]


class _Arranged(NamedTuple):
    """What follows from what tables are; kept, so nobody writes into it.

    Attributes:
        tables, tables_of, row, weight, which: as `Space` has them.
        stacks: of each its dtype on the wire, row shape, dtype if that is another, and how many of
            `tables` are in it or before it.
    """

    tables: list[int]
    tables_of: list[list[int]]
    row: Longs
    weight: list[int]
    which: array[int]
    stacks: list[tuple[torch.dtype, tuple[int, ...], torch.dtype | None, int]]


@functools.lru_cache(1 << 7)
def _arranged(lines: tuple[str, ...], present: bytes) -> _Arranged:
    """Of those tables that are `present`: a byte of each, not 0."""
    tables = [table for table in layout(lines) if present[table]]
    found = _Arranged(tables, [], np.zeros(len(lines), np.int64), [], array("q"), [])
    last = 0
    for (dtype, travels, shape), group in groupby(tables, lambda table: _kind(lines[table])):
        members = list(group)
        last += len(members)
        row_shape = shape_in(shape)
        found.tables_of.append(members)
        found.stacks.append((travels, row_shape, None if travels == dtype else dtype, last))
        found.row[members] = row_bytes(row_shape, travels)
    for table in tables:
        found.which.extend((table, int(found.row[table])))
    found.weight.extend((found.row + 4).tolist())
    found.row.flags.writeable = False
    return found


@functools.lru_cache(1 << 12)
def _kind(of: str) -> tuple[torch.dtype, torch.dtype, str]:
    what, shape = of.split("\t")
    return *dtypes_of(what), shape
