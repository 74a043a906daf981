"""One rank's rows of all tables of a list: duplicates combined, and laid out as they travel.

A sort, a sum of duplicates and their checks cost a table of some hundred rows more in calls than in
work. So the tables' indices get one space of keys here, that of this rank alone, one table
behind the other; they are sorted together, and each table is a range of what comes out. The tables
lie in the order of `tables.layout`: those of one row shape and dtype are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import itemgetter, mul

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..agree import BODY
from ..kernels.lists import joined
from ..kernels.ops import Op
from ..wire.base import as_bytes
from ..wire.memory import typed
from .arguments import outside
from .call import row_bytes
from .header import NO_LIMIT, Header
from .listed import Listed
from .space import Space
from .tables import (
    COLUMNS,
    HIGHEST,
    ROOM,
    ROWS,
    UNKNOWN,
    WHOSE,
    Longs,
    Tables,
    layout,
    line,
    top,
)

__all__ = ["Joint"]

_Kind = tuple[torch.dtype, torch.dtype, tuple[int, ...]]
"""Dtypes of values, on the wire and as they are given, and the row shape."""

_INDICES = itemgetter(0)
_NOTHING = torch.empty(0, dtype=torch.int64)
_UNLIMITED = np.array([0, -1, NO_LIMIT, 0, 0])  # the numbers of a table without rows


class Joint:
    """This rank's rows of all tables.

    Attributes:
        given, requests: the tables, and what was asked for each, as in `Listed`.
        numbered: their numbers in the list.
        error: what is wrong with the first table that something is wrong with, or None. With an
            error there are no rows.
        lines: of each table what it is.
        numbers: of each table, see `tables`.
        index_dtypes: of the indices of all tables.
        placed: those tables whose results are wanted in memory of the caller's.
        is_sorted: `sort` did its work.
        size: bytes of the values of all rows, as they travel: with duplicates, until `sort`
            combined them; only then is known:
        counts: of each table its rows.
    """

    def __init__(self, given: Listed, rank: int, numbered: Sequence[int] | None = None) -> None:
        """Look at these tables; `numbered` where they are not the whole list."""
        self.given, (self.requests, self._pairs), self._rank = given, given, rank
        self.error: str | None = None
        self.numbered = range(len(self.requests)) if numbered is None else numbered
        op = self.requests[0].op
        lines: list[str] = []
        kinds: list[_Kind] = []  # by which rows are laid out
        self._row: list[int] = []
        self.index_dtypes: set[torch.dtype] = set()
        self.placed: list[int] = []
        heights: list[int] = []
        self.fallible = not op.builtin
        rooms: list[tuple[int, int]] = []
        for _, neighbours in groupby(self.requests, id):
            request, *others = neighbours
            if request.error is not None:
                self.error = f"table {self.numbered[len(lines)]}: {request.error}"
                break
            rows, many = request.rows, 1 + len(others)
            own, said = (rows.indices.dtype, rows.values.dtype), request.fields["row shape"]
            text = line(*own, rows.height, UNKNOWN if said is None else said, request.dtype)
            kind = request.dtype, own[1], tuple(rows.row_shape)
            self.index_dtypes.add(own[0])
            if rows.height is not None:
                heights.append(rows.height)
            if request.out is not None:
                self.placed.append(len(lines))
                self.fallible |= request.fallible
                if request.capacity is not None:
                    rooms.append((len(lines), request.capacity))
            lines += [text] * many
            kinds += [kind] * many
            self._row += [row_bytes(kind[2], request.dtype)] * many
        self._height = min(heights, default=None)
        self.lines, self._kinds = tuple(lines), kinds
        counts = list(map(Tensor.numel, map(_INDICES, self._pairs[: len(lines)])))
        order = layout(self.lines)
        self._order = order if all(counts) else [table for table in order if counts[table]]
        self._begins = [0, *accumulate(map(counts.__getitem__, self._order))]
        self._starts = self._firsts = np.zeros(0, np.int64)
        self._distinct = kernels.Distinct(_NOTHING, None, None)
        self._values: Tensor | None = None
        self.numbers = np.empty((len(lines), COLUMNS), np.int64)
        self.numbers[:] = _UNLIMITED
        self.numbers[:, WHOSE:] = rank  # and who told the row shape
        for table, room in rooms:
            self.numbers[table, ROOM] = room
        self.counts = counts
        self.size = self._bytes()
        self.is_sorted = False

    def part(self, tables: Sequence[int]) -> Joint:
        """Some of the tables."""
        return Joint(self.given.part(tables), self._rank, [self.numbered[one] for one in tables])

    def _bytes(self) -> int:
        return sum(map(mul, self.counts, self._row))

    def _stacks(self) -> list[list[int]]:
        """The tables of each kind, in the order in which rows are laid out."""
        return [list(tables) for _, tables in groupby(self._order, self._kinds.__getitem__)]

    def sort(self) -> None:
        """Sort the rows and find what is distinct among them; once.

        What is wrong with their indices is in `error` then, and there are no rows.
        """
        if self.is_sorted:
            return
        self.is_sorted = True
        if self._order:
            keys, lows, highs = joined([self._pairs[table][0] for table in self._order])
            if self._right(lows.tolist(), highs.tolist()):
                self._sort(keys, highs)
        self.size = self._bytes()

    def _right(self, lows: list[int], highs: list[int]) -> bool:
        """Whether all indices are; else there are no rows."""
        limit = (1 << top(len(self.requests))) - 1  # so that the end of all keys is an int64
        most = limit if self._height is None else min(limit, self._height)
        if min(lows) < 0 or max(highs) >= most:
            self.error = self._wrong(lows, highs, limit) or self.error
        if self.error is not None:
            self._order, self.counts, self.size = [], [0] * len(self.counts), 0
        return self.error is None

    def _wrong(self, lows: list[int], highs: list[int], limit: int) -> str | None:
        """What is wrong with the indices, in the first table of which they are."""
        for table, low, high in sorted(zip(self._order, lows, highs, strict=True)):
            error = outside(low, high, self.requests[table].rows.height)
            if error is None and high >= limit:
                error = f"index {high} is too large for a list: pass it alone"
            if error is not None:
                return f"table {self.numbered[table]}: {error}"
        return None

    def _sort(self, keys: Tensor, highs: Longs) -> None:
        ends = np.add.accumulate(highs + 1)
        self._starts = ends - highs - 1
        self._distinct = kernels.distinct(keys)
        found = self._distinct.indices.numpy()
        self._firsts = np.empty(len(ends) + 1, np.int64)
        self._firsts[:-1] = found.searchsorted(self._starts)
        self._firsts[-1] = len(found)
        self.numbers[self._order, ROWS] = self._firsts[1:] - self._firsts[:-1]
        self.numbers[self._order, HIGHEST] = highs
        self.counts = self.numbers[:, ROWS].tolist()

    def _offset(self, starts: Longs) -> Tensor:
        """Of each row what its table has in `starts`."""
        return torch.from_numpy(np.repeat(starts, np.diff(self._firsts)))

    def indices(self) -> Tensor:
        """In the order in which rows are laid out; int32 if all fit."""
        own = self._distinct.indices - self._offset(self._starts)
        narrow = bool((self.numbers[:, HIGHEST] < 2**31).all())
        return own.int() if narrow else own

    def keys(self, space: Space) -> Tensor:
        """In the space of keys of all ranks, in order."""
        first = np.zeros(len(self.requests), np.int64)
        first[space.tables] = space.starts[:-1]
        return (self._distinct.indices + self._offset(first[self._order] - self._starts)).to(
            space.index
        )

    def _header(self, rank: int) -> Header:
        """Of all rows together, their tables' numbers in the upper bits of the indices."""
        numbers = np.array(self._order, np.int64) << top(len(self.lines))
        joined = self._distinct.indices + self._offset(numbers - self._starts)
        if self._order != sorted(self._order):
            joined = joined.sort().values
        return Header.of(joined, rank, digest=False)

    def statement(self, memory: Tensor, op: Op, rank: int, *, eager: bool) -> Tables:
        """What to say of them: with the rows, if they may travel in it and fit.

        Args:
            memory: for the values.
            op: how duplicates are combined.
            rank: this one.
            eager: whether rows may travel in it.
        """
        lines, numbers, fallible = self.lines, self.numbers, self.fallible
        self.sort()
        said = Tables(lines, numbers, fallible=fallible)
        if eager and self.size <= BODY:
            rows = said._replace(indices=as_bytes(self.indices()), values=memory[: self.size])
            if rows.fits:
                self.values(memory, op)
                return rows
        return said._replace(header=self._header(rank))

    def values(self, memory: Tensor, op: Op) -> Tensor:
        """The bytes of all rows, which are sorted, in `memory`; computed once."""
        if self._values is None:
            place = start = 0
            firsts = self._firsts.tolist()
            for tables in self._stacks():
                first, last = firsts[place], firsts[place + len(tables)]
                given = [self._pairs[table][1] for table in tables]
                request = self.requests[tables[0]]
                shape = (last - first, *request.rows.row_shape)
                kernels.reduce_parts(
                    given,
                    self._distinct,
                    op,
                    typed(memory, shape, request.dtype, start),
                    firsts[place : place + len(tables) + 1],
                    self._begins[place : place + len(tables)],
                )
                place += len(tables)
                start += (last - first) * self._row[tables[0]]
            self._values = memory[:start]
        return self._values
