"""Several tables in one sparse all-reduce: one opening exchange and one schedule for all of them.

A model with many embedding tables would pay the latency of a call for each. Here all tables share
one statement (`tables`), and few rows travel in it. Else the tables get one space of keys, one
behind the other, so that they are one tall table to the schedule: any registered algorithm where
all have one row shape and dtype, those of `mixed` where they do not. So a list takes as many
messages as one table of that size does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..agree import agree, is_direct
from ..errors import WeftError
from ..rows import Rows
from ..wire.base import Wire, as_bytes
from ..wire.memory import fresh, typed
from . import choice, mixed
from .call import Call, partial_dtype, row_bytes
from .choice import ALONE, EAGER, Explanation, Group, choose, with_link
from .cost import Load
from .header import NO_LIMIT, Header, of_tables, tables_in, tables_of
from .mixed import Extents, Stack, Stacked, widened
from .owners import cuts
from .registry import find
from .request import Request
from .run import confess, handed_out, too_small
from .space import Space
from .tables import (
    HIGHEST,
    MOST,
    ROOM,
    ROWS,
    UNKNOWN,
    WHOSE,
    Tables,
    all_together,
    joined,
    layout,
    line,
    top,
)

__all__ = ["Coalesced", "Fewer", "as_one", "explained", "reduced"]

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
    parts, error = _parts(requests, error)
    return _together([_reduced(wire, part, error) for part in parts])


@dataclass(slots=True)
class Fewer(Exception):
    """Of calls that queued up, only the first `count` can be served as one; all ranks know it."""

    count: int


def as_one(wire: Wire, requests: Sequence[Request]) -> Coalesced:
    """Serve calls that queued up, of one table each, as one; collective.

    It opens as the first of them alone would, so ranks where fewer of them queued up take part.

    Args:
        wire: among whom, few enough that statements are direct.
        requests: at least two, at most `MOST`; right as far as this rank can tell, with one op.

    Raises:
        Fewer: some rank has fewer of them, or they do not go together; nothing was done.
        WeftError: what the first of them alone would raise.
    """
    return _reduced(wire, requests, None, queued=True)


def explained(wire: Wire, requests: Sequence[Request], error: str | None = None) -> Explanation:
    """Say what `reduced` would do; collective."""
    parts, error = _parts(requests, error)
    starts = range(0, len(requests), MOST)
    found = [
        _explained(wire, part, range(start, start + len(part)), error)
        for start, part in zip(starts, parts, strict=True)
    ]
    return found[0] if len(found) == 1 else choice.together(found)


def _parts(
    requests: Sequence[Request], error: str | None
) -> tuple[list[Sequence[Request]], str | None]:
    """What goes into one call each, and the first error of all."""
    parts = [requests[start : start + MOST] for start in range(0, len(requests), MOST)]
    for number, part in enumerate(parts):
        error = error or _first_error(part, number * MOST)
    return parts, error


def _first_error(tables: Sequence[Request], start: int) -> str | None:
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
                request.dtype,
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
        self.row = [row_bytes(request.rows.row_shape, request.dtype) for request in requests]
        self.size = sum(self.counts[table] * self.row[table] for table in self.order)
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
                space = typed(memory, (count, *given.shape[1:]), request.dtype, start)
                if distinct.order is None and distinct.starts is None and request.wide is None:
                    space.copy_(given)
                else:
                    kernels.reduce(given, distinct, self._call.op, out=space)
                start += count * self.row[table]
            self._values = memory[:start]
        return self._values


@dataclass(frozen=True, slots=True)
class _Opened:
    """A list that all ranks agreed on.

    Attributes:
        call: what every rank knows of it.
        own: this rank's rows; their bytes are in `memory`.
        everyone: what each rank said.
        both: what all together said.
        space: of the keys of all tables.
        eager: the rows of all ranks came in the opening exchange.
    """

    call: Call
    own: _Own
    memory: Tensor
    everyone: list[Tables]
    both: Tables
    space: Space
    eager: bool


@contextmanager
def _opened(
    wire: Wire, requests: Sequence[Request], error: str | None, name: str, *, queued: bool = False
) -> Iterator[_Opened]:
    """Agree on a list, or on calls that queued up; collective."""
    first = requests[0]
    names = ("op", "algorithm", "WEFT_LINK", "wire dtype", "number of tables")
    fields = first.fields if queued else {name: first.fields.get(name) for name in names}
    call = Call(wire, first.op)
    own = _Own(wire, [] if error else requests, call)

    def combine(lower: Tensor, upper: Tensor) -> Tensor:
        return Tables.unpack(lower).combine(Tables.unpack(upper)).pack()

    with wire.lease(own.size) as memory:
        body = torch.empty(0, dtype=torch.uint8)
        if error is None:
            eager = first.algorithm == "auto" and is_direct(wire) and wire.size > 1
            body = own.statement(memory, eager).pack()
            body = of_tables(body, len(requests)) if queued else body
        agreement = agree(
            wire, name, fields, error, body, combine, meanwhile=lambda: own.values(memory)
        )
        try:
            bodies = agreement.bodies
            if queued:
                counts = [tables_in(body) for body in agreement.said]
                if min(counts) < max(counts):
                    raise Fewer(min(counts))
                bodies = list(map(tables_of, bodies))
            everyone = [Tables.unpack(body) for body in bodies]
            eager = wire.size > 1 and all(one.header is None for one in everyone)
            if not eager:
                everyone = [one.described(rank) for rank, one in enumerate(everyone)]
            both = all_together(everyone)
            if both.trouble:
                raise Fewer(1) if queued else WeftError(both.trouble)
            space = Space(both)
            call.index, call.height = space.index, space.end
            yield _Opened(call, own, memory, everyone, both, space, eager)
        finally:
            agreement.release()


def _reduced(
    wire: Wire, requests: Sequence[Request], error: str | None, *, queued: bool = False
) -> Coalesced:
    name = "sparse_all_reduce" if queued else _NAME
    with _opened(wire, requests, error, name, queued=queued) as opening:
        call, both, space = opening.call, opening.both, opening.space
        result: Stacked | None
        if opening.eager:
            algorithm, result = EAGER, _merged(opening.everyone, call, space)
        else:
            algorithm, result = _run(
                call, opening.own, opening.memory, both, space, requests[0].algorithm
            )
    if result is None:
        return _kind_by_kind(wire, requests, space)
    return _handed_out(requests, both, space, call, algorithm, result)


def _explained(
    wire: Wire, requests: Sequence[Request], numbers: Sequence[int], error: str | None
) -> Explanation:
    """What a call for these tables would do; `numbers` are theirs in the whole list."""
    asked = requests[0].algorithm
    with _opened(wire, requests, error, f"explain of {_NAME}") as opening:
        call, both, space, everyone = opening.call, opening.both, opening.space, opening.everyone
        if opening.eager:
            both = all_together([one.described(rank) for rank, one in enumerate(everyone)])
        assert both.header is not None
        call.header, _ = space.place(both.header, len(both.lines))
        call.load = _load(call, both, space)
    groups = tuple(
        Group(tuple(numbers[table] for table in tables), stack.given.dtype, stack.row_shape)
        for stack, tables in zip(space.stacks, space.tables_of, strict=True)
    )
    if wire.size > 1 and not space.stacks:
        return Explanation(EAGER, call.load, None, (), groups)
    load = with_link(wire, call.load) if wire.size > 1 else call.load
    among = None if len(space.stacks) < 2 else mixed.NAMES
    if wire.size > 1 and among and asked != "auto" and asked not in among:
        calls = [
            _explained(wire, [requests[t] for t in tables], [numbers[t] for t in tables], None)
            for tables in space.tables_of
        ]
        return replace(choice.together(calls), load=load, groups=groups)
    found = choice.explained(wire, load, asked, space.index, eager=opening.eager, among=among)
    return replace(found, groups=groups)


def _run(
    call: Call, own: _Own, memory: Tensor, both: Tables, space: Space, asked: str
) -> tuple[str, Stacked | None]:
    """What runs, and its result; no result where each kind of tables needs a call of its own."""
    wire, stacks = call.wire, space.stacks
    assert both.header is not None
    values = own.values(memory)
    mine = Stacked(space.keys(own.indices(), own.counts), values)
    if wire.size == 1 or not stacks:  # nobody, or nothing, to talk about
        copied = Stacked(mine.keys, fresh((own.size,), torch.uint8).copy_(values))
        return ALONE if wire.size == 1 else EAGER, widened(copied, stacks)
    call.header, sizes = space.place(both.header, len(both.lines))
    call.load = with_link(wire, _load(call, both, space))
    if len(stacks) == 1:
        call.row_shape, call.dtype = stacks[0].row_shape, stacks[0].dtype
        call.wide = stacks[0].wide
        name = choose(wire, call.load, asked)
        shape = (mine.keys.numel(), *call.row_shape)
        rows = Rows(mine.keys, typed(values, shape, call.dtype), space.end)
        result = call.widened(find(name).run(rows, call))
        return name, Stacked(result.indices, as_bytes(result.values))
    name = choose(wire, call.load, asked, mixed.NAMES) if asked == "auto" else asked
    if name == "gather":
        return name, widened(mixed.gather(mine, call, stacks), stacks)
    if name == "split":
        bounds = cuts(call.header, wire.size, sizes)
        return name, widened(mixed.split(mine, call, stacks, bounds), stacks)
    return name, None


def _load(call: Call, both: Tables, space: Space) -> Load:
    header, wire = call.header, call.wire
    total = both.numbers[:, ROWS]
    row = int((total * space.row).sum()) // max(1, header.total)  # of tables of one kind: exact
    wider = [row_bytes(stack.row_shape, _partial(call, stack)) for stack in space.stacks]
    partial = max(
        (wide * row // max(1, stack.row) for wide, stack in zip(wider, space.stacks, strict=True)),
        default=0,
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


def _partial(call: Call, stack: Stack) -> torch.dtype:
    return partial_dtype(call.op, stack.dtype, stack.wide)


def _merged(everyone: Sequence[Tables], call: Call, space: Space) -> Stacked:
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
        sums.append(kernels.merge(runs, call.op, _partial(call, stack)))
    union = torch.cat([indices for indices, _ in sums]) if sums else keys[0]
    found = Extents(union, space.stacks)
    out = fresh((found.bytes[-1],), torch.uint8)
    for (indices, values), stack, start in zip(sums, space.stacks, found.bytes, strict=False):
        kernels.finish(values, stack.typed(out, indices.numel(), start), call.divisor)
    return widened(Stacked(union, out), space.stacks)


def _kind_by_kind(wire: Wire, requests: Sequence[Request], space: Space) -> Coalesced:
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
    space: Space,
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
    for travelled, tables in zip(space.stacks, space.tables_of, strict=True):
        stack = travelled.given
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
