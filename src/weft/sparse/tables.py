"""A list of tables in one sparse all-reduce: tables of one kind are reduced as one tall table.

A model with many embedding tables would pay the latency of a call for each. So the tables of one
dtype and row shape form a *group*: their indices are shifted, each table has a range of one key
space, and one ordinary call reduces the group. A small exchange comes before the first of these
calls. It tells every rank what each table is and how large its indices are; from that all ranks
compute the same groups and the same ranges. A rank without rows of a table need not know its row
shape.

A result may be wanted in the memory of another table's rows. So results are handed out behind the
last call; each has memory of its own.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..agree import agree, confess
from ..errors import WeftError
from ..rows import Rows
from ..tensors import extent, has_elements
from ..wire.base import Wire, fresh
from . import choice, run
from .call import Call, shape_in
from .choice import ALONE, EAGER, Explanation, Group
from .header import NO_LIMIT
from .request import NOTHING, Request

NAME = "sparse_all_reduce of a list"

_MOST = 512  # tables in a statement: of more it might not fit in the opening exchange
_UNKNOWN = "?"  # in place of a row shape: this rank has no rows
_END = 2**63 - 1  # of a key space: keys are int64, and so is the end
_FIXED = struct.Struct("<qq")  # tables, bytes of text
_FIELDS = ("op", "algorithm", "WEFT_LINK", "wire dtype", "number of tables")

_COLUMNS = 5
_HIGHEST, _ROOM, _WHOSE, _WHO, _FALLIBLE = range(_COLUMNS)
"""Numbers of a table: its largest index, rows that fit in the tightest `out` and whose that is, who
told the row shape, whether somebody passed a function for the result."""

_Longs = NDArray[np.int64]


def requests_of(
    rows: list[Any], op: Any, algorithm: object, wire_dtype: object, out: Any
) -> tuple[list[Request], str | None]:
    """What is asked for each table of a call, and what is wrong with one of them or the list.

    An empty list is one empty table.
    """
    places = list(out) if isinstance(out, list) else []
    requests = []
    for number, table in enumerate(rows or [NOTHING]):
        place = places[number] if number < len(places) else None
        request = Request.unsorted(table, op, algorithm, wire_dtype, place)
        request.look()
        requests.append(request)
    requests[0].fields["number of tables"] = len(rows)
    error = None
    if out is not None and len(places) != len(rows):
        error = (
            f"out is for {len(places) if isinstance(out, list) else 'one'} of {len(rows)} tables: "
            "pass a list with one for each"
        )
    wrong = (f"table {n}: {each.error}" for n, each in enumerate(requests) if each.error)
    return requests, error or _shared(places) or next(wrong, None)


def _shared(places: list[Any]) -> str | None:
    """What is wrong with buffers of different tables that are in the same memory."""
    parts = [
        (*extent(part), number)
        for number, place in enumerate(places)
        if isinstance(place, tuple | list)
        for part in place
        if isinstance(part, Tensor) and has_elements(part) and part.numel()
    ]
    for (_, end, one), (start, _, other) in pairwise(sorted(parts)):
        if start < end and one != other:
            return f"out has the same memory for tables {one} and {other}: pass one for each"
    return None


def reduced(
    wire: Wire, requests: Sequence[Request], error: str | None, note: Callable[..., object]
) -> list[Any]:
    """Run one call, and note what it did; collective.

    Args:
        wire: among whom.
        requests: the tables, with the same op and algorithm.
        error: what is wrong on this rank.
        note: as `recording` gives it.

    Returns:
        The result of each table, in the form that it was given in.
    """
    stated = _stated(wire, requests, error, NAME)
    done: list[run.Done] = []
    parts: dict[int, Rows] = {}
    for group in stated.groups():
        done.append(run.reduced(wire, group.request(requests)))
        parts |= group.parts(done[-1].rows, requests)
        done[-1] = replace(done[-1], rows=NOTHING)  # so that its memory goes with its parts
    for table, part in sorted(parts.items()):
        room, whose = stated.numbers[table, [_ROOM, _WHOSE]].tolist()
        if len(part) > room:
            raise WeftError(f"rank {whose}: table {table}: {run.too_small(room, len(part))}")
    nothing = ALONE if wire.size == 1 else EAGER
    note(
        " and ".join(dict.fromkeys(one.algorithm for one in done)) or nothing,
        rows=sum(one.own for one in done),
        total=sum(one.load.total for one in done),
        union=sum(one.load.union for one in done),
        bound=sum(one.load.bound for one in done),
    )
    results, trouble = [], None
    for table, request in enumerate(requests):
        part = parts.pop(table) if table in parts else stated.nothing(table, request.rows)
        part, raised = _handed_out(wire, request, part)
        trouble = trouble or raised
        results.append(request.restore(part))
    if stated.numbers[:, _FALLIBLE].any():
        confess(wire, f"the end of {NAME}", trouble)
    return results


def explained(wire: Wire, requests: Sequence[Request], error: str | None) -> Explanation:
    """Say what `reduced` would do; collective."""
    stated = _stated(wire, requests, error, f"explain of {NAME}")
    found = []
    for group in stated.groups():
        one = run.explained(wire, group.request(requests))
        rows = requests[group.tables[0]].rows
        kind = Group(group.tables, rows.values.dtype, group.row_shape)
        found.append(replace(one, groups=(kind,)))
    if not found:
        row = run.explained(wire, requests[0].of_rows(NOTHING))
        return replace(row, chosen=ALONE if wire.size == 1 else EAGER, lines=())
    return found[0] if len(found) == 1 else choice.together(found)


class _Group(NamedTuple):
    """Tables of one dtype and row shape, of which somebody has rows.

    Attributes:
        tables: their numbers.
        row_shape: shape of a row.
        starts: where the keys of each begin, and the end of all.
    """

    tables: tuple[int, ...]
    row_shape: tuple[int, ...]
    starts: list[int]

    def request(self, requests: Sequence[Request]) -> Request:
        """The call for the tall table."""
        tables = [requests[table].rows for table in self.tables]
        shaped = [rows.values.view(len(rows), *self.row_shape) for rows in tables]
        if len(tables) == 1:
            rows = Rows(tables[0].indices, shaped[0], tables[0].height)
            return requests[self.tables[0]].of_rows(rows)
        index = torch.int32 if self.starts[-1] < 2**31 else torch.int64
        keys = torch.empty(sum(map(len, tables)), dtype=index)
        ends = list(accumulate(map(len, tables)))
        for rows, start, end in zip(tables, self.starts, ends, strict=False):
            torch.add(rows.indices, start, out=keys[end - len(rows) : end])
        rows = Rows(keys, torch.cat(shaped), self.starts[-1])
        return requests[self.tables[0]].of_rows(rows)

    def parts(self, result: Rows, requests: Sequence[Request]) -> dict[int, Rows]:
        """The rows of each table: views of the result where they are wanted in other memory."""
        if len(self.tables) == 1:
            return {self.tables[0]: result}
        ends = torch.searchsorted(result.indices, result.indices.new_tensor(self.starts)).tolist()
        found = {}
        for table, start, (low, high) in zip(
            self.tables, self.starts, pairwise(ends), strict=False
        ):
            request, values = requests[table], result.values[low:high]
            indices = (result.indices[low:high] - start).to(request.rows.indices.dtype)
            if request.out is None:
                values = fresh(tuple(values.shape), values.dtype).copy_(values)
            found[table] = Rows(indices, values, request.rows.height)
        return found


class _Statement(NamedTuple):
    """What one rank, or some ranks together, say of the tables.

    Attributes:
        lines: of each table what must be equal on all ranks, a tab, and the row shape.
        numbers: `[tables, 5]`, see `_COLUMNS`.
        trouble: how ranks differ in the first table in which they do; or "".
    """

    lines: tuple[str, ...]
    numbers: _Longs
    trouble: str = ""

    @classmethod
    def of(cls, requests: Sequence[Request], rank: int) -> _Statement:
        """This rank's."""
        lines, numbers = [], np.empty((len(requests), _COLUMNS), np.int64)
        for table, request in enumerate(requests):
            shape = request.fields["row shape"]
            lines.append(
                f"{_values(request.rows.values.dtype, request.dtype)}, "
                f"{_short(request.rows.indices.dtype)} indices, "
                f"{'no height' if request.rows.height is None else f'height {request.rows.height}'}"
                f"\t{_UNKNOWN if shape is None else shape}"
            )
            room = NO_LIMIT if request.capacity is None else request.capacity
            numbers[table] = request.highest, room, rank, rank, callable(request.out)
        return cls(tuple(lines), numbers)

    def pack(self) -> Tensor:
        """The statement as bytes."""
        text = "\n".join((self.trouble, *self.lines)).encode()
        parts = _FIXED.pack(len(self.lines), len(text)), self.numbers.tobytes(), text
        return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)

    @classmethod
    def unpack(cls, body: Tensor) -> _Statement:
        """A statement from bytes, which may be reused afterwards."""
        raw = body.numpy().tobytes()
        tables, size = _FIXED.unpack_from(raw)
        numbers = np.frombuffer(raw, np.int64, tables * _COLUMNS, _FIXED.size)
        start = _FIXED.size + numbers.nbytes
        trouble, *lines = raw[start : start + size].decode().split("\n")
        return cls(tuple(lines), numbers.reshape(tables, _COLUMNS), trouble)

    @classmethod
    def together(cls, said: Sequence[_Statement]) -> _Statement:
        """One statement of several, in the order of their ranks."""
        first = said[0]
        if len({len(one.lines) for one in said}) > 1:
            return first  # the fingerprints tell
        everyone = np.stack([one.numbers for one in said])
        numbers = everyone.max(0)
        tightest = everyone[:, :, _ROOM].argmin(0), np.arange(len(numbers))
        for column in (_ROOM, _WHOSE):
            numbers[:, column] = everyone[*tightest, column]
        numbers[:, _WHO] = first.numbers[:, _WHO]
        lines, trouble = list(first.lines), first.trouble
        for one in said[1:]:
            if not trouble and tuple(lines) != one.lines:
                trouble = _reconcile(lines, numbers, one)
            trouble = trouble or one.trouble
        return cls(tuple(lines), numbers, trouble)

    def groups(self) -> list[_Group]:
        """The tables that somebody has rows of, by their kinds.

        Raises:
            WeftError: the indices of some do not fit in one key space.
        """
        kinds: dict[tuple[str, str], list[int]] = {}
        for table in np.flatnonzero(self.numbers[:, _HIGHEST] >= 0).tolist():
            what, shape = self.lines[table].split("\t")
            kinds.setdefault((what.split(",")[0], shape), []).append(table)
        found = []
        for (_, shape), tables in kinds.items():
            sizes = [int(self.numbers[table, _HIGHEST]) + 1 for table in tables]
            starts = [0, *accumulate(sizes)]
            if starts[-1] > _END and len(tables) > 1:
                most = max(zip(sizes, tables, strict=True))
                raise WeftError(
                    f"table {most[1]}: index {most[0] - 1} is too large for a list: pass it alone"
                )
            found.append(_Group(tuple(tables), shape_in(shape), starts))
        return found

    def nothing(self, table: int, rows: Rows) -> Rows:
        """The result of a table that nobody has rows of: a rank may know their shape of `out`."""
        shape = self.lines[table].split("\t")[1]
        row_shape = rows.row_shape if shape == _UNKNOWN else shape_in(shape)
        return Rows(rows.indices[:0], rows.values.new_empty(0, *row_shape), rows.height)


def _stated(wire: Wire, requests: Sequence[Request], error: str | None, name: str) -> _Statement:
    """What all ranks together say of the tables; collective.

    Raises:
        WeftError: what is wrong on some rank, or how the ranks differ; on all of them.
    """
    fields = {name: requests[0].fields.get(name) for name in _FIELDS}
    said = []
    for start in range(0, len(requests), _MOST):
        body = torch.empty(0, dtype=torch.uint8)
        if error is None:
            body = _Statement.of(requests[start : start + _MOST], wire.rank).pack()
        agreement = agree(wire, name, fields, error, body, _combined)
        said.append(_Statement.together(list(map(_Statement.unpack, agreement.bodies))))
        agreement.release()
        if said[-1].trouble:
            table, how = said[-1].trouble.split("\t")
            raise WeftError(f"the ranks differ in table {start + int(table)}: {how}")
    lines = tuple(line for one in said for line in one.lines)
    return _Statement(lines, np.concatenate([one.numbers for one in said]))


def _combined(lower: Tensor, upper: Tensor) -> Tensor:
    return _Statement.together([_Statement.unpack(lower), _Statement.unpack(upper)]).pack()


def _reconcile(lines: list[str], numbers: _Longs, other: _Statement) -> str:
    """Fill in what only the other knows of tables; returns how they differ, or ""."""
    for table, (mine, theirs) in enumerate(zip(lines, other.lines, strict=True)):
        (what, shape), (their_what, their_shape) = mine.split("\t"), theirs.split("\t")
        if what == their_what and shape != their_shape and _UNKNOWN in (shape, their_shape):
            if shape == _UNKNOWN:
                lines[table], numbers[table, _WHO] = theirs, other.numbers[table, _WHO]
        elif mine != theirs:
            if what == their_what:
                what, their_what = (f"rows of shape {each}" for each in (shape, their_shape))
            ranks = int(numbers[table, _WHO]), int(other.numbers[table, _WHO])
            return (
                f"{table}\trank {ranks[0]} has {what}, rank {ranks[1]} has {their_what}; pass the "
                "same on every rank"
            )
    return ""


def _handed_out(wire: Wire, request: Request, part: Rows) -> tuple[Rows, Exception | None]:
    """A table's result in the memory that its caller gave, and what a function for that raised."""
    if request.out is None:
        return part, None
    dtypes = part.indices.dtype, part.values.dtype
    call = Call(wire, request.op, tuple(part.row_shape), *dtypes, part.height, out=request.out)
    place = call.result(len(part))
    place.indices.copy_(part.indices)
    place.values.copy_(part.values)
    return run.handed_out(place, call), call.trouble


@functools.cache
def _values(dtype: torch.dtype, travels: torch.dtype) -> str:
    """In words, the dtype of values, and the one that they travel in."""
    return f"{_short(dtype)} values" + (f" as {_short(travels)}" if travels != dtype else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
