"""What came of a call for a list of tables: each table's part of it, where its caller wants it.

The results of all tables of a kind come in one piece of memory, and are views of it. A list may
take several calls, and a result may be wanted in the memory of another table's rows. So none is put
there before the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from operator import mul, sub

import torch
from torch import Tensor

from ..errors import WeftError
from ..kernels.lists import parted
from ..rows import Rows
from ..wire.base import Wire
from .arguments import Pair
from .call import Call, shape_in
from .header import NO_LIMIT
from .joint import Joint
from .listed import Listed
from .mixed import Stacked
from .record import Note, Record
from .request import Request
from .run import confess, handed_out, too_small
from .space import Space
from .tables import ROOM, ROWS, UNKNOWN, WHOSE, Tables

__all__ = ["NAME", "Coalesced", "in_order", "placed", "result_of", "together"]

NAME = "sparse_all_reduce of a list"


@dataclass(frozen=True, slots=True)
class Coalesced:
    """What came of a call.

    Attributes:
        algorithm: what ran for all tables.
        pairs: the result of each table.
        own: rows of this rank, in all tables.
        total: rows of all ranks and tables together.
        union: rows of the result, in all tables.
        bound: bytes that the average rank must receive.
        fallible: somebody passed a function, which may raise; all ranks know it.
        trouble: what one raised here.
    """

    algorithm: str
    pairs: list[Pair]
    own: int
    total: int
    union: int
    bound: float
    fallible: bool
    trouble: Exception | None

    def noted(self, note: Note) -> Record:
        """The record of the call."""
        return note(
            self.algorithm, rows=self.own, total=self.total, union=self.union, bound=self.bound
        )


def together(done: Sequence[Coalesced]) -> Coalesced:
    if len(done) == 1:
        return done[0]
    names = dict.fromkeys(one.algorithm for one in done)
    return Coalesced(
        " and ".join(names),
        [pair for one in done for pair in one.pairs],
        sum(one.own for one in done),
        sum(one.total for one in done),
        sum(one.union for one in done),
        sum(one.bound for one in done),
        any(one.fallible for one in done),
        next((one.trouble for one in done if one.trouble is not None), None),
    )


def in_order(given: Listed, both: Tables, pairs: Mapping[int, Pair]) -> list[Pair]:
    """The result of every table; those of which nobody has rows are in no stack."""
    tables = range(len(given.pairs))
    if len(pairs) == len(tables):
        return list(map(pairs.__getitem__, tables))
    return [
        pairs[table] if table in pairs else _nothing(given.pairs[table], both.lines[table])
        for table in tables
    ]


def _nothing(pair: Pair, line: str) -> Pair:
    """The result of a table without rows, whose row shape a rank may know from its `out`."""
    (indices, values), shape = pair, line.split("\t")[1]
    row_shape = values.shape[1:] if shape == UNKNOWN else shape_in(shape)
    return indices.new_empty(0), values.new_empty((0, *row_shape))


def result_of(
    own: Joint,
    both: Tables,
    space: Space,
    call: Call,
    algorithm: str,
    result: Stacked,
) -> Coalesced:
    """Each table's part of the result."""
    requests = own.requests
    of_dtype: dict[torch.dtype, Tensor] = {}
    ends: list[int] = []
    for dtype in own.index_dtypes:
        of_dtype[dtype], ends = parted(result.keys, space.starts, dtype)
    sizes = list(map(sub, ends, [0, *ends]))
    rooms = both.numbers[:, ROOM].tolist()
    if min(rooms) < NO_LIMIT:
        for table, count in sorted(zip(space.tables, sizes, strict=True)):
            if count > rooms[table]:
                whose, number = both.numbers[table, WHOSE], own.numbered[table]
                raise WeftError(f"rank {whose}: table {number}: {too_small(rooms[table], count)}")

    indices = {dtype: every.split_with_sizes(sizes) for dtype, every in of_dtype.items()}
    alone = next(iter(indices.values())) if len(indices) == 1 else None  # whose dtype all have
    where = alone or [
        indices[requests[table].rows.indices.dtype][place]
        for place, table in enumerate(space.tables)
    ]
    found = zip(where, _pieces(result, space, sizes), strict=True)
    pairs = in_order(own.given, both, dict(zip(space.tables, found, strict=True)))
    given = both.numbers[:, ROWS].tolist()
    # the average rank receives others' rows, and sums from others
    summed = sum(map(mul, sizes, map(space.weight.__getitem__, space.tables)))
    bound = (sum(map(mul, given, space.weight)) + (call.wire.size - 2) * summed) / call.wire.size
    union = ends[-1] if ends else 0
    fallible, trouble = both.fallible, call.trouble
    return Coalesced(algorithm, pairs, sum(own.counts), sum(given), union, bound, fallible, trouble)


def placed(wire: Wire, parts: Sequence[Joint], found: Coalesced) -> Coalesced:
    """Results in the memory that callers gave, once all their calls are through; collective."""
    trouble = found.trouble
    for part in parts:
        for table in part.placed:
            number = part.numbered[table]
            found.pairs[number], raised = _placed(wire, found.pairs[number], part.requests[table])
            trouble = trouble or raised
    if found.fallible:
        confess(wire, NAME, trouble)
    return found


def _pieces(result: Stacked, space: Space, sizes: Sequence[int]) -> list[Tensor]:
    """The rows of each table of a result, in the order of the space."""
    pieces: list[Tensor] = []
    end = 0
    for travelled, tables in zip(space.stacks, space.tables_of, strict=True):
        stack, first, last = travelled.given, len(pieces), len(pieces) + len(tables)
        row = stack.row
        # A view costs as much as several tables in the call that takes it apart. So what others
        # left free between two tables is a part, too, unless it is no whole number of rows.
        views: list[tuple[int, list[int], list[bool]]] = []
        for low, high in pairwise(
            [first, *(at for at in result.begins if first < at < last), last]
        ):
            apart = result.begins.get(low, end) - end
            if low == first or not row or apart % row:
                cut, ours = list[int](), list[bool]()
                views.append((end + apart, cut, ours))
            elif apart:
                cut.append(apart // row)
                ours.append(False)
            cut += sizes[low:high]
            ours += [True] * (high - low)
            end += apart + row * sum(sizes[low:high])
        for start, cut, ours in views:
            parts = stack.typed(result.values, sum(cut), start).split_with_sizes(cut)
            pieces += compress(parts, ours)
    return pieces


def _placed(wire: Wire, pair: Pair, request: Request) -> tuple[Pair, Exception | None]:
    """A table's result in the memory that its caller gave, and what a function for that raised."""
    rows = Rows(*pair, request.rows.height)
    call = Call(
        wire,
        request.op,
        tuple(rows.row_shape),
        rows.indices.dtype,
        rows.values.dtype,
        rows.height,
        out=request.out,
    )
    place = call.result(len(rows))
    place.indices.copy_(rows.indices)
    place.values.copy_(rows.values)
    there = handed_out(place, call)
    return (there.indices, there.values), call.trouble
