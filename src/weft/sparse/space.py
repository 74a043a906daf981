"""One space of keys for the tables of a coalesced call, one table behind the other.

All ranks make it from what all together said, so a key means the same row of the same table to
everybody, and a schedule sees one tall table. Tables of one row shape and dtype are neighbours in
it: a stack (`mixed`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from .call import shape_in
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
    """

    def __init__(self, said: Tables) -> None:
        self.tables = [table for table in layout(said.lines) if said.numbers[table, HIGHEST] >= 0]
        heights = said.numbers[self.tables, HIGHEST] + 1
        self.starts = np.concatenate([[0], np.cumsum(heights)]).astype(np.int64)
        self.end = int(self.starts[-1])
        self.index = torch.int32 if self.end <= 2**31 - 1 else torch.int64
        self.stacks: list[Stack] = []
        self.tables_of: list[list[int]] = []
        places = enumerate(self.tables)
        for _, group in groupby(places, lambda item: _kind(said.lines[item[1]])):
            members = list(group)
            dtype, travels, shape = _kind(said.lines[members[0][1]])
            end = int(self.starts[members[-1][0] + 1])
            wide = None if travels == dtype else dtype
            self.stacks.append(Stack(travels, shape_in(shape), end, wide))
            self.tables_of.append([table for _, table in members])
        self.row = np.zeros(len(said.lines), np.int64)
        for stack, tables in zip(self.stacks, self.tables_of, strict=True):
            self.row[tables] = stack.row

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


@functools.lru_cache(1 << 12)
def _kind(of: str) -> tuple[torch.dtype, torch.dtype, str]:
    what, shape = of.split("\t")
    return *dtypes_of(what), shape
