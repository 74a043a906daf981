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
from typing import NamedTuple

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
from .header import of_tables, tables_in, tables_of
from .joint import Joint
from .listed import Listed
from .mixed import Extents, Stack, Stacked, widened
from .outcome import NAME, Coalesced, in_order, placed, result_of, together
from .owners import cuts
from .registry import find
from .space import Space
from .tables import MOST, ROWS, Tables

__all__ = ["Fewer", "as_one", "explained", "reduced"]

_NOTHING = torch.empty(0, dtype=torch.uint8)


def reduced(wire: Wire, given: Listed, error: str | None = None) -> Coalesced:
    """Run one call; collective.

    Args:
        wire: among whom.
        given: the tables, with the same op and algorithm.
        error: what is wrong with the list as a whole.
    """
    parts, error = _parts(wire, given, error)
    return placed(wire, parts, together([_reduced(wire, part, error) for part in parts]))


@dataclass(slots=True)
class Fewer(Exception):
    """Of calls that queued up, only the first `count` can be served as one; all ranks know it."""

    count: int


def as_one(wire: Wire, given: Listed) -> Coalesced:
    """Serve calls that queued up, of one table each, as one; collective.

    It opens as the first of them alone would, so ranks where fewer of them queued up take part.

    Args:
        wire: among whom, few enough that statements are direct.
        given: at least two, at most `MOST`; right as far as this rank can tell, with one op.

    Raises:
        Fewer: some rank has fewer of them, or they do not go together; nothing was done.
        WeftError: what the first of them alone would raise.
    """
    return _reduced(wire, Joint(given, wire.rank), None, queued=True)


def explained(wire: Wire, given: Listed, error: str | None = None) -> Explanation:
    """Say what `reduced` would do; collective."""
    parts, error = _parts(wire, given, error)
    found = [_explained(wire, part, error) for part in parts]
    return found[0] if len(found) == 1 else choice.together(found)


def _parts(wire: Wire, given: Listed, error: str | None) -> tuple[list[Joint], str | None]:
    """What goes into one call each, and the first error of all."""
    many = range(len(given.requests))
    if len(many) <= MOST:
        part = Joint(given, wire.rank)
        return [part], error or part.error
    chunks = [many[start : start + MOST] for start in many[::MOST]]
    parts = [Joint(given.part(chunk), wire.rank, chunk) for chunk in chunks]
    for part in parts:  # what is wrong with one, the first call says
        part.sort()
    return parts, error or next((part.error for part in parts if part.error), None)


class _Opened(NamedTuple):
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
    own: Joint
    memory: Tensor
    everyone: list[Tables]
    both: Tables
    space: Space
    eager: bool


@contextmanager
def _opened(
    wire: Wire,
    own: Joint,
    error: str | None,
    name: str,
    *,
    queued: bool = False,
) -> Iterator[_Opened]:
    """Agree on a list, or on calls that queued up; collective."""
    first = own.requests[0]
    names = ("op", "algorithm", "WEFT_LINK", "wire dtype", "number of tables")
    fields = first.fields if queued else {name: first.fields.get(name) for name in names}
    call = Call(wire, first.op)

    def combine(lower: Tensor, upper: Tensor) -> Tensor:
        both = (Tables.unpack(each.numpy().data) for each in (lower, upper))
        return Tables.together(list(both)).pack()

    auto = first.algorithm == "auto" and is_direct(wire) and wire.size > 1
    own.sort()
    with wire.lease(own.size) as memory:
        error = error or own.error
        body = _NOTHING
        if error is None:
            said = own.statement(*(memory, call.op, wire.rank), eager=auto)
            body = of_tables(said.pack(), len(own.requests)) if queued else said.pack()
        agreement = agree(
            wire,
            name,
            fields,
            error,
            body,
            combine,
            meanwhile=lambda: own.is_sorted and own.values(memory, call.op),
        )
        try:
            bodies = agreement.said
            if queued:
                counts = list(map(tables_in, bodies))
                if min(counts) < max(counts):
                    raise Fewer(min(counts))
                bodies = list(map(tables_of, bodies))
            everyone = list(map(Tables.unpack, bodies))
            both = Tables.together(everyone)
            if both.trouble:
                raise Fewer(1) if queued else WeftError(both.difference(own.numbered))
            eager = wire.size > 1 and all(one.indices is not None for one in everyone)
            if not (eager or both.header):
                everyone = [one.described(rank) for rank, one in enumerate(everyone)]
                both = Tables.together(everyone)
            space = Space(both)
            call.index, call.height = space.index, space.end
            yield _Opened(call, own, memory, everyone, both, space, eager)
            return
        finally:
            agreement.release()


def _reduced(wire: Wire, own: Joint, error: str | None, *, queued: bool = False) -> Coalesced:
    name = "sparse_all_reduce" if queued else NAME
    with _opened(wire, own, error, name, queued=queued) as opening:
        call, both, space = opening.call, opening.both, opening.space
        result: Stacked | None
        if opening.eager:
            algorithm, result = EAGER, _merged(opening.everyone, call, space)
        else:
            asked = own.requests[0].algorithm
            algorithm, result = _run(call, own, opening.memory, both, space, asked)
    if result is None:
        return _kind_by_kind(wire, own, both, space)
    return result_of(own, both, space, call, algorithm, result)


def _explained(wire: Wire, own: Joint, error: str | None) -> Explanation:
    asked = own.requests[0].algorithm
    with _opened(wire, own, error, f"explain of {NAME}") as opening:
        call, both, space, everyone = opening.call, opening.both, opening.space, opening.everyone
        if opening.eager:
            described = [one.described(rank) for rank, one in enumerate(everyone)]
            both = Tables.together(described)
        assert both.header is not None
        call.header, _ = space.place(both.header, len(both.lines))
        call.load = _load(call, both, space)
    groups = tuple(
        Group(tuple(own.numbered[table] for table in tables), stack.given.dtype, stack.row_shape)
        for stack, tables in zip(space.stacks, space.tables_of, strict=True)
    )
    if wire.size > 1 and not space.stacks:
        return Explanation(EAGER, call.load, None, (), groups)
    load = with_link(wire, call.load) if wire.size > 1 else call.load
    among = None if len(space.stacks) < 2 else mixed.NAMES
    if wire.size > 1 and among and asked != "auto" and asked not in among:
        calls = [_explained(wire, own.part(tables), None) for tables in space.tables_of]
        return replace(choice.together(calls), load=load, groups=groups)
    found = choice.explained(wire, load, asked, space.index, eager=opening.eager, among=among)
    return replace(found, groups=groups)


def _run(
    call: Call, own: Joint, memory: Tensor, both: Tables, space: Space, asked: str
) -> tuple[str, Stacked | None]:
    """What runs, and its result; no result where each kind of tables needs a call of its own."""
    wire, stacks = call.wire, space.stacks
    assert both.header is not None
    values = own.values(memory, call.op)
    mine = Stacked(own.keys(space), values)
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


def _kind_by_kind(wire: Wire, own: Joint, both: Tables, space: Space) -> Coalesced:
    """A call for the tables of each row shape and dtype, for algorithms that know only one."""
    one = together([_reduced(wire, own.part(tables), None) for tables in space.tables_of])
    pairs = in_order(own.given, both, dict(zip(space.tables, one.pairs, strict=True)))
    return replace(one, pairs=pairs, fallible=both.fallible)
