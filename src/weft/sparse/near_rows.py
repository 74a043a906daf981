"""The rows of some tables of all ranks, where this rank, which owns them, can read and add them up.

What was lent is added where it lies, if the lender's arena is mapped here, else it is read first;
what came in a statement is taken from there. Machine code sorts all keys at once and adds in their
order (`kernels.lists`). Where there is none, or for rows whose sums are wider than they are, each
rank's rows are sorted, and then merged, which gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels import lent, lists
from ..kernels.cpu_talk import Lender
from ..kernels.lists import Place, Sorted, Spans
from ..wire.memory import typed
from .call import Call, partial_dtype
from .mixed import Stack
from .space import Space
from .tables import Longs, Tables

__all__ = ["Cut", "Owned", "Part", "owned"]

_POINTS = 128  # indices of each rank by which a table is cut
_NOTHING = torch.empty(0, dtype=torch.uint8)

Cut = tuple[int, float]
"""The table in which a rank's range begins, and how much of it lies before."""


@contextmanager
def owned(
    call: Call,
    space: Space,
    everyone: Sequence[Tables],
    spans: Spans,
    tables: tuple[int, int],
) -> Iterator[Owned]:
    """Those rows; within, they can be read.

    Args:
        call: what every rank knows of it.
        space: the keys of all ranks.
        everyone: what each rank said.
        spans: of all tables.
        tables: the first, and the end.

    Raises:
        WireError: what a peer lends cannot be read.
    """
    wire, (first, last) = call.wire, tables
    places: list[Place] = []
    mapped: list[tuple[int, Lender, int]] = []
    away: list[tuple[int, int, int]] = []  # of a rank, an address there and bytes: to be read
    for rank, said in enumerate(everyone):
        rows, bytes_ = spans.rows[rank], spans.bytes[rank]
        if said.lent is None:
            assert said.indices is not None and said.values is not None
            size = said.indices.numel() // max(1, rows[-1])
            where = said.indices.data_ptr(), said.values.data_ptr()
        else:
            size, where = spans.itemsizes[rank], said.lent
        place = Place(where[0] + size * rows[first], size, where[1] + bytes_[first])
        if said.lent is not None and rank != wire.rank:
            both = (
                (place.indices, size * (rows[last] - rows[first])),
                (place.values, bytes_[last] - bytes_[first]),
            )
            lender = wire.lender(rank)
            here = None if lender is None else lent.mapped(lender, both)
            if lender is not None and here is not None:
                mapped.append((rank, lender, place.indices))
                place = Place(here[0], size, here[1])
            else:
                away += [(rank, *span) for span in both]
        places.append(place)
    if away:
        begins = [0, *accumulate(-(-nbytes // 64) * 64 for *_, nbytes in away)]
        with wire.lease(begins[-1]) as memory:
            reads = [
                (rank, address, memory[begin : begin + nbytes])
                for begin, (rank, address, nbytes) in zip(begins, away, strict=False)
            ]
            wire.read_all(reads)
            for (rank, _, indices), (_, _, values) in zip(reads[::2], reads[1::2], strict=True):
                size = places[rank].itemsize
                places[rank] = Place(indices.data_ptr(), size, values.data_ptr())
            yield Owned(call, space, places, spans, tables)
    else:
        yield Owned(call, space, places, spans, tables)
    # of no bytes: whether what was added was still lent
    done = lent.fetch([(lender, address, _NOTHING) for _, lender, address in mapped])
    if mapped and done != len(mapped):
        wire.unread(mapped[done or 0][0], _NOTHING)


class Owned:
    """Some tables' rows of all ranks."""

    def __init__(
        self,
        call: Call,
        space: Space,
        places: Sequence[Place],
        spans: Spans,
        tables: tuple[int, int],
    ) -> None:
        """The first of these tables is at these places."""
        self._call, self._space, self._places = call, space, places
        self._spans, (self._first, self._last) = spans, tables

    def between(self, cuts: Sequence[Cut]) -> list[Part]:
        """Those between two cuts, in the first of the tables and in the last, stack by stack."""
        space, (low, high) = self._space, (self._key(*cut) for cut in cuts)
        if low >= high:
            return []
        starts, rows = space.starts, [own[self._first : self._last] for own in self._spans.counts]
        keys = lists.sorted_keys(self._places, rows, starts[self._first :], low, high)
        parts: list[Part] = []
        end = 0
        for stack, members in zip(space.stacks, space.tables_of, strict=True):
            begin, end = end, end + len(members)
            first, last = max(begin, self._first), min(end, self._last)
            if first >= last:
                continue
            if keys is None or stack.wide or not lists.adds(stack.dtype, self._call.op):
                parts.append(_Runs(self._call, stack, self._runs(stack, first, last, low, high)))
                continue
            words = keys.before(max(low, int(starts[first]))), keys.before(int(starts[last]))
            before = [self._of(rank, first) for rank in range(len(self._places))]
            bases = [
                place.values + nbytes - stack.row * many
                for place, (many, nbytes) in zip(self._places, before, strict=True)
            ]
            parts.append(_Words(self._call, stack, keys, words, bases))
        return parts

    def _of(self, rank: int, table: int) -> tuple[int, int]:
        """Rows and bytes of a rank from the first of these tables to another."""
        rows, bytes_ = self._spans.rows[rank], self._spans.bytes[rank]
        return rows[table] - rows[self._first], bytes_[table] - bytes_[self._first]

    def _key(self, table: int, into: float) -> int:
        """The key of a cut."""
        start = int(self._space.starts[table])
        if not into:
            return start
        every = [self._indices(rank, table, table + 1) for rank in range(len(self._places))]
        step = max(1, sum(map(len, every)) // (_POINTS * len(every)))
        points = np.concatenate([each[::step] for each in every])
        place = int(len(points) * into)
        return start + int(np.partition(points, place)[place])

    def _indices(self, rank: int, first: int, last: int) -> Longs:
        """A rank's indices of some tables, as they lie there."""
        place = self._places[rank]
        size, (begin, _), (end, _) = place.itemsize, self._of(rank, first), self._of(rank, last)
        seen = _seen(place.indices + size * begin, size * (end - begin))
        return seen.view(torch.int32 if size == 4 else torch.int64).numpy()

    def _runs(self, stack: Stack, first: int, last: int, low: int, high: int) -> list[_Run]:
        """Of each rank the keys between two, sorted, and the rows of them, of a stack's tables."""
        starts, runs = self._space.starts[first : last + 1], []
        for rank, place in enumerate(self._places):
            rows, (_, begin) = self._spans.rows[rank], self._of(rank, first)
            shift = np.repeat(starts[:-1], np.diff(rows[first : last + 1]))
            keys = torch.from_numpy(self._indices(rank, first, last) + shift)
            seen = _seen(place.values + begin, keys.numel() * stack.row)
            values = stack.typed(seen, keys.numel(), 0)
            inside = (keys >= low) & (keys < high)
            if not bool(inside.all()):
                keys, values = keys[inside], values[inside]
            distinct = kernels.distinct(keys)
            if distinct.order is not None:
                values = kernels.take(values, distinct.order)
            runs.append((distinct.indices, values))
        return runs


_Run = tuple[Tensor, Tensor]
"""A rank's keys, sorted, and rows."""


class Part(Protocol):
    """The rows of one stack.

    Attributes:
        stack: whose.
        many: how many sums of them there are.
    """

    stack: Stack
    many: int

    def add_up(self, keys: Tensor, out: Tensor, *, past: bool) -> None:
        """Fill both with the sums and their keys, in order; if `past`, not to be read here soon."""


class _Words(Part):
    """By the words of sorted keys."""

    def __init__(
        self, call: Call, stack: Stack, keys: Sorted, words: tuple[int, int], bases: Sequence[int]
    ) -> None:
        self.stack, self.many = stack, keys.distinct(*words)
        self._call, self._keys, self._words, self._bases = call, keys, words, bases

    def add_up(self, keys: Tensor, out: Tensor, *, past: bool) -> None:
        call = self._call
        past = past and call.divisor == 1
        lists.sums(self._keys, *self._words, self._bases, call.op, keys, out, past=past)
        if call.divisor != 1:
            kernels.finish(out, out, call.divisor)


class _Runs(Part):
    """By the union of all ranks' keys."""

    def __init__(self, call: Call, stack: Stack, runs: Sequence[_Run]) -> None:
        self._union = kernels.union([keys for keys, _ in runs])
        self.stack, self.many = stack, self._union.indices.numel()
        self._call, self._rows = call, [values for _, values in runs]

    def add_up(self, keys: Tensor, out: Tensor, *, past: bool) -> None:
        call, stack = self._call, self.stack
        keys.copy_(self._union.indices)
        partial = partial_dtype(call.op, stack.dtype, stack.wide)
        wider = out.numel() * partial.itemsize if partial != stack.dtype else 0
        with call.wire.lease(wider) as memory:
            into = typed(memory, tuple(out.shape), partial) if wider else out
            for slots, values in zip(self._union.slots, self._rows, strict=True):
                kernels.combine(into, slots, values, call.op)
            if into is not out or call.divisor != 1:
                kernels.finish(into, out, call.divisor)


def _seen(address: int, nbytes: int) -> Tensor:
    """Bytes of this process's memory, which somebody else keeps, as a tensor."""
    if not nbytes:
        return _NOTHING
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
