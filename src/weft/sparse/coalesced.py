"""Several tables in one sparse all-reduce: one opening exchange and one schedule for all of them.

A model with many embedding tables would pay the latency of a call for each. Here all tables share
one statement (`tables`), and few rows travel in it. Else the tables get one space of keys, one
behind the other, so that they are one tall table to the schedule: any registered algorithm where
all have one row shape and dtype, those of `mixed` where they do not. So a list takes as many
messages as one table of that size does.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..agree import agree, is_direct
from ..errors import WeftError
from ..rows import Rows
from ..wire.base import Wire, as_bytes
from ..wire.memory import fresh, typed
from . import mixed
from .call import Call, row_bytes
from .choice import ALONE, EAGER, choose, with_link
from .cost import Load
from .header import NO_LIMIT, Header
from .mixed import Extents, Stack, Stacked
from .owners import cuts
from .registry import find
from .request import Request
from .run import confess, handed_out, too_small
from .tables import (
    HIGHEST,
    MOST,
    ROOM,
    ROWS,
    UNKNOWN,
    WHOSE,
    Longs,
    Tables,
    dtype_of,
    joined,
    layout,
    line,
    top,
)

__all__ = ["Coalesced", "reduced"]

_NAME = "sparse_all_reduce of a list"


@dataclass(frozen=True, slots=True)
class Coalesced:
    """What came of a call.

    Attributes:
        algorithm: what ran for all tables.
        rows: the result of each table.
        total: rows of all ranks and tables together.
        bound: bytes that the average rank must receive.
    """

    algorithm: str
    rows: list[Rows]
    total: int
    bound: float


def reduced(wire: Wire, requests: Sequence[Request], error: str | None = None) -> Coalesced:
    """Run one call; collective.

    Args:
        wire: among whom.
        requests: one for each table, at least one, with the same op and algorithm.
        error: what is wrong with the list as a whole.
    """
    for start in range(0, len(requests), MOST):
        error = error or _first_error(requests, start)
    return _together(
        [
            _reduced(wire, requests[start : start + MOST], error)
            for start in range(0, len(requests), MOST)
        ]
    )


def _first_error(requests: Sequence[Request], start: int) -> str | None:
    tables = requests[start : start + MOST]
    limit = 1 << top(len(tables))
    for number, request in enumerate(tables, start):
        if request.error is not None:
            return f"table {number}: {request.error}"
        indices = request.distinct.indices
        if len(indices) and int(indices[-1]) >= limit:
            return (
                f"table {number}: index {int(indices[-1])} is too large for a list: pass it alone"
            )
    return None


def _together(done: Sequence[Coalesced]) -> Coalesced:
    names = dict.fromkeys(one.algorithm for one in done)
    return Coalesced(
        " and ".join(names),
        [rows for one in done for rows in one.rows],
        sum(one.total for one in done),
        sum(one.bound for one in done),
    )


class _Own:
    """This rank's rows of all tables, duplicates combined, laid out as they travel."""

    def __init__(self, wire: Wire, requests: Sequence[Request], call: Call) -> None:
        self.requests, self._call = requests, call
        self.counts = [request.distinct.indices.numel() for request in requests]
        self.lines = [
            line(
                request.rows.indices.dtype,
                request.rows.values.dtype,
                request.rows.height,
                UNKNOWN if request.fields["row shape"] is None else request.fields["row shape"],
            )
            for request in requests
        ]
        self.numbers = np.array(
            [
                (
                    count,
                    int(request.distinct.indices[-1]) if count else -1,
                    NO_LIMIT if request.capacity is None else request.capacity,
                    wire.rank,
                    wire.rank,
                )
                for request, count in zip(requests, self.counts, strict=True)
            ],
            np.int64,
        ).reshape(-1, 5)
        self.order = [table for table in layout(self.lines) if self.counts[table]]
        self.size = sum(self.counts[table] * requests[table].rows.row_bytes for table in self.order)
        self.fallible = any(request.fallible for request in requests)
        self._values: Tensor | None = None

    def indices(self) -> Tensor:
        """In the order in which rows are laid out; int32 if all fit."""
        narrow = all(self.numbers[table, HIGHEST] < 2**31 for table in self.order)
        dtype = torch.int32 if narrow else torch.int64
        parts = [self.requests[table].distinct.indices.to(dtype) for table in self.order]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

    def statement(self, memory: Tensor, eager: bool) -> Tables:
        """With the rows, if they may travel in it and fit."""
        said = Tables(self.lines, self.numbers, fallible=self.fallible)
        if eager:
            rows = replace(said, index=as_bytes(self.indices()), values=memory[: self.size])
            if rows.fits:
                self.values(memory)
                return rows
        indices = [request.distinct.indices for request in self.requests]
        header = Header.of(joined(indices, len(indices)), self._call.wire.rank)
        return replace(said, header=header)

    def values(self, memory: Tensor) -> Tensor:
        """The bytes of all rows, in `memory`; computed once."""
        if self._values is None:
            start = 0
            for table in self.order:
                request, count = self.requests[table], self.counts[table]
                given, distinct = request.rows.values, request.distinct
                space = typed(memory, (count, *given.shape[1:]), given.dtype, start)
                if distinct.order is None and distinct.starts is None:
                    space.copy_(given)
                else:
                    kernels.reduce(given, distinct, self._call.op, out=space)
                start += count * request.rows.row_bytes
            self._values = memory[:start]
        return self._values


class _Space:
    """One space of keys for all tables that have rows, in the order in which rows are laid out."""

    def __init__(self, said: Tables) -> None:
        self.tables = [table for table in layout(said.lines) if said.numbers[table, HIGHEST] >= 0]
        heights = said.numbers[self.tables, HIGHEST] + 1
        self.starts = np.concatenate([[0], np.cumsum(heights)]).astype(np.int64)
        self.end = int(self.starts[-1])
        self.index = torch.int32 if self.end <= 2**31 - 1 else torch.int64
        self.stacks: list[Stack] = []
        self.tables_of: list[list[int]] = []  # of each stack
        places = enumerate(self.tables)
        for _, group in groupby(places, lambda item: _kind(said.lines[item[1]])):
            members = list(group)
            dtype, shape = _kind(said.lines[members[0][1]])
            end = int(self.starts[members[-1][0] + 1])
            self.stacks.append(Stack(dtype, ast.literal_eval(shape), end))
            self.tables_of.append([table for _, table in members])
        self.row = np.zeros(len(said.lines), np.int64)  # bytes of each table's rows
        for stack, members_ in zip(self.stacks, self.tables_of, strict=True):
            self.row[members_] = stack.row

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


def _kind(of: str) -> tuple[torch.dtype, str]:
    what, shape = of.split("\t")
    return dtype_of(what), shape


def _reduced(wire: Wire, requests: Sequence[Request], error: str | None) -> Coalesced:
    first = requests[0]
    names = ("op", "algorithm", "WEFT_LINK", "number of tables")
    fields = {name: first.fields.get(name) for name in names}
    call = Call(wire, first.op)
    own = _Own(wire, [] if error else requests, call)

    def combine(lower: Tensor, upper: Tensor) -> Tensor:
        return Tables.unpack(lower).combine(Tables.unpack(upper)).pack()

    with wire.lease(own.size) as memory:
        body = torch.empty(0, dtype=torch.uint8)
        if error is None:
            eager = first.algorithm == "auto" and is_direct(wire) and wire.size > 1
            body = own.statement(memory, eager).pack()
        agreement = agree(
            wire, _NAME, fields, error, body, combine, meanwhile=lambda: own.values(memory)
        )
        try:
            everyone = [Tables.unpack(body) for body in agreement.bodies]
            eager = wire.size > 1 and all(one.header is None for one in everyone)
            if not eager:
                everyone = [one.described(rank) for rank, one in enumerate(everyone)]
            both = functools.reduce(Tables.combine, everyone)
            if both.trouble:
                raise WeftError(both.trouble)
            space = _Space(both)
            call.index, call.height = space.index, space.end
            result: Stacked | None
            if eager:
                algorithm, result = EAGER, _merged(everyone, call, space)
            else:
                algorithm, result = _run(call, own, memory, both, space, first.algorithm)
        finally:
            agreement.release()
    if result is None:
        return _kind_by_kind(wire, requests, space)
    return _handed_out(requests, both, space, call, algorithm, result)


def _run(
    call: Call, own: _Own, memory: Tensor, both: Tables, space: _Space, asked: str
) -> tuple[str, Stacked | None]:
    """What runs, and its result; no result where each kind of tables needs a call of its own."""
    wire, stacks = call.wire, space.stacks
    assert both.header is not None
    values = own.values(memory)
    mine = Stacked(space.keys(own.indices(), own.counts), values)
    if wire.size == 1 or not stacks:  # nobody, or nothing, to talk about
        copied = fresh((own.size,), torch.uint8).copy_(values)
        return ALONE if wire.size == 1 else EAGER, Stacked(mine.keys, copied)
    call.header, sizes = space.place(both.header, len(both.lines))
    call.load = with_link(wire, _load(call, both, space))
    if len(stacks) == 1:
        call.row_shape, call.dtype = stacks[0].row_shape, stacks[0].dtype
        name = choose(wire, call.load, asked)
        shape = (mine.keys.numel(), *call.row_shape)
        rows = Rows(mine.keys, typed(values, shape, call.dtype), space.end)
        result = find(name).run(rows, call)
        return name, Stacked(result.indices, as_bytes(result.values))
    name = choose(wire, call.load, asked, mixed.NAMES) if asked == "auto" else asked
    if name == "gather":
        return name, mixed.gather(mine, call, stacks)
    if name == "split":
        return name, mixed.split(mine, call, stacks, cuts(call.header, wire.size, sizes))
    return name, None


def _load(call: Call, both: Tables, space: _Space) -> Load:
    header, wire = call.header, call.wire
    total = both.numbers[:, ROWS]
    row = int((total * space.row).sum()) // max(1, header.total)  # of tables of one kind: exact
    wider = [row_bytes(stack.row_shape, call.op.accumulator(stack.dtype)) for stack in space.stacks]
    partial = max(
        wide * row // max(1, stack.row) for wide, stack in zip(wider, space.stacks, strict=True)
    )
    return Load(
        ranks=wire.size,
        total=header.total,
        most=header.most,
        fewest=header.fewest,
        union=header.union(space.end),
        height=space.end,
        row=row,
        partial=partial,
        index=space.index.itemsize,
        places=space.end,
        in_order=not call.op.builtin,
    )


def _merged(everyone: Sequence[Tables], call: Call, space: _Space) -> Stacked:
    """Merge the rows that came in the opening exchange."""
    keys = [space.keys(one.own_indices(), one.numbers[:, ROWS]) for one in everyone]
    extents = [Extents(run, space.stacks) for run in keys]
    sums = []
    for number, stack in enumerate(space.stacks):
        runs = []
        for run, one, extent in zip(keys, everyone, extents, strict=True):
            assert one.values is not None
            part = run[slice(*extent.rows[number : number + 2])]
            runs.append((part, stack.typed(one.values, part.numel(), extent.bytes[number])))
        sums.append(kernels.merge(runs, call.op, call.op.accumulator(stack.dtype)))
    union = torch.cat([indices for indices, _ in sums]) if sums else keys[0]
    found = Extents(union, space.stacks)
    out = fresh((found.bytes[-1],), torch.uint8)
    for (indices, values), stack, start in zip(sums, space.stacks, found.bytes, strict=False):
        kernels.finish(values, stack.typed(out, indices.numel(), start), call.divisor)
    return Stacked(union, out)


def _kind_by_kind(wire: Wire, requests: Sequence[Request], space: _Space) -> Coalesced:
    """A call for the tables of each row shape and dtype, for algorithms that know only one."""
    rows = [_nothing(request) for request in requests]
    done = []
    for tables in space.tables_of:
        done.append(reduced(wire, [requests[table] for table in tables]))
        for table, result in zip(tables, done[-1].rows, strict=True):
            rows[table] = result
    return replace(_together(done), rows=rows)


def _nothing(request: Request) -> Rows:
    rows = request.rows
    return Rows(rows.indices[:0].clone(), rows.values[:0].clone(), rows.height)


def _handed_out(
    requests: Sequence[Request],
    both: Tables,
    space: _Space,
    call: Call,
    algorithm: str,
    result: Stacked,
) -> Coalesced:
    """Each table's part of the result, where its caller wants it."""
    wire = call.wire
    ends = torch.searchsorted(result.keys, result.keys.new_tensor(space.starts - 1), right=True)
    part = dict(zip(space.tables, pairwise(ends.tolist()), strict=True))
    counts = [
        part[table][1] - part[table][0] if table in part else 0 for table in range(len(requests))
    ]
    for table, (count, room) in enumerate(zip(counts, both.numbers[:, ROOM].tolist(), strict=True)):
        if count > room:
            whose = both.numbers[table, WHOSE]
            raise WeftError(f"rank {whose}: table {table}: {too_small(room, count)}")

    rows = [_nothing(request) for request in requests]
    found = [counts[table] for table in space.tables]
    indices = result.keys - torch.from_numpy(np.repeat(space.starts[:-1], found)).to(space.index)
    start = 0
    for stack, tables in zip(space.stacks, space.tables_of, strict=True):
        for table in tables:
            low, high = part[table]
            values = stack.typed(result.values, high - low, start)
            start += (high - low) * stack.row
            given = requests[table].rows
            rows[table] = Rows(indices[low:high].to(given.indices.dtype), values, given.height)
    for table, request in enumerate(requests):
        if request.out is not None:
            rows[table] = _placed(rows[table], request, call)
    if both.fallible:
        confess(wire, _NAME, call)
    sizes = both.numbers[:, ROWS] + (wire.size - 2) * np.array(counts, np.int64)
    bound = float((sizes * (space.row + 4)).sum()) / wire.size
    return Coalesced(algorithm, rows, int(both.numbers[:, ROWS].sum()), bound)


def _placed(rows: Rows, request: Request, call: Call) -> Rows:
    """A table's result in the memory that its caller gave."""
    own = Call(
        call.wire,
        request.op,
        tuple(rows.row_shape),
        rows.indices.dtype,
        rows.values.dtype,
        rows.height,
        out=request.out,
    )
    place = own.result(len(rows))
    place.indices.copy_(rows.indices)
    place.values.copy_(rows.values)
    call.trouble = call.trouble or own.trouble
    return handed_out(place, own)
