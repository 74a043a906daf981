"""A list of tables in one sparse all-reduce: tables of one kind are reduced as one tall table.

A model with many embedding tables would pay the latency of a call for each. So the tables of one
dtype and row shape form a *group*: their indices are shifted, each table has a range of one key
space, and one ordinary call reduces the group. A small exchange comes before the first of these
calls. It tells every rank the kind and the largest index of each table; from that all ranks compute
the same groups and the same ranges. A rank without rows of a table need not know its row shape.

The results of a group's tables are parts of the tall table's memory, which is freed with the last
of them.

On an accelerator all tables must be on one device, and results are copies. All indices are surveyed
before the exchange, and a result's size is found together with the places where its tables begin.
So the host waits once for the list, and once for each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..base.devices import on_host
from ..base.errors import conclusion, summed_up
from ..base.memory import fresh
from ..base.tensors import as_bytes, shape_in
from ..call.opening import opened
from ..call.statement import BODY, Bytes
from ..group.group import Group
from . import run
from .header import POINTS
from .record import Record, note
from .registry import ALONE, EAGER
from .request import NOTHING, Request
from .rows import Rows

NAME = "sparse_all_reduce of a list"

_END = 2**63 - 1  # the largest end of a key space: the end, too, must fit in int64
_SHORT = 2**31  # keys below fit in int32
_FIELDS = (
    "op",
    "algorithm",
    "wire_dtype",
    "number of tables",
    "device",
)

_TABLE = np.dtype(
    [
        ("what", "S128"),  # dtypes, height and sparse shape, which must be equal on all ranks
        ("shape", "S128"),  # of a row; empty if this is not known
        ("highest", np.int64),  # index; -1 if there are no rows
        ("odd", np.int64),  # whether ranks differ
    ]
)
"""What a rank states of a table, or what the statements of some ranks combine to."""

_LONGEST = _TABLE["shape"].itemsize  # characters of a row shape
_SHOWN = 40  # characters of a sparse shape; of a longer one a digest is compared
_MOST = BODY // _TABLE.itemsize  # tables in a statement

_INTEGERS = Rows(NOTHING.indices, NOTHING.indices)

_Tables = NDArray[Any]
"""An array of `_TABLE`: one element for each table."""


def requests_of(
    rows: list[Any], op: Any, algorithm: object, wire_dtype: object
) -> tuple[list[Request], str | None]:
    """A request for each table of a call, and what is wrong with the list or with a table, or None.

    An empty list becomes one empty table, of a dtype that the op takes.
    """
    of_all = Request.asked(op, algorithm, wire_dtype)
    nothing = NOTHING
    if not rows and of_all.given(NOTHING).error:
        nothing = _INTEGERS
    requests = []
    for table in rows or [nothing]:
        request = of_all.given(table)
        if on_host(request.rows.indices):
            request.look_at_ends()
        if request.error is None and len(str(request.fields["row shape"])) > _LONGEST:
            dims = len(request.rows.row_shape)
            request.error = f"rows of {dims} dimensions are too many for a list: pass it alone"
        requests.append(request)
    requests[0].fields["number of tables"] = len(rows)
    wrong = _wrong(requests) if rows else requests[0].error
    if wrong and _is_pair(rows):
        wrong = (
            "rows is a list of two tensors: for one table pass them as a tuple, (indices, values); "
            "a list is of several tables"
        )
    return requests, wrong or _scattered(requests)


def _is_pair(rows: Sequence[object]) -> bool:
    """Whether a list looks like one table: its indices, and its values."""
    if len(rows) != 2 or not all(isinstance(each, Tensor) and each.ndim > 0 for each in rows):
        return False
    return all(each.layout == torch.strided for each in rows if isinstance(each, Tensor))


def _wrong(requests: Sequence[Request]) -> str | None:
    """The first error of a table, or None."""
    for number, each in enumerate(requests):
        if each.error:
            return f"table {number}: {each.error}"
    return None


def _scattered(requests: Sequence[Request]) -> str | None:
    """The error if tables are on several devices, or None."""
    first = requests[0].device
    for number, each in enumerate(requests):
        if each.device != first:
            where = f"table {number} is on {each.device}, table 0 on {first}"
            return f"{where}: pass a list for each device"
    return None


def _surveyed(requests: Sequence[Request]) -> str | None:
    """Survey the indices of all tables on an accelerator, with one wait; a table's error, or None.

    The first table of a group keeps the survey of the keys of the whole group.
    """
    kinds: dict[Any, list[tuple[Request, Tensor]]] = {}
    shift, index = _shift(requests)
    for number, request in enumerate(requests):
        rows = request.rows
        end = 1 << shift
        if len(rows):
            ids = rows.indices.long()
            most = end if rows.height is None else min(end, rows.height)
            keys = (ids + number * end).where((ids >= 0) & (ids < most), -1).to(index)
            kind = request.half, rows.values.dtype, rows.row_shape  # as `_kinds` tells them apart
            kinds.setdefault(kind, []).append((request, keys))
            request.highest = 0  # not -1: the table has rows
    tall = [torch.cat([keys for _, keys in tables]) for tables in kinds.values()]
    surveys = kernels.survey(tall, POINTS)
    for tables, survey in zip(kinds.values(), surveys, strict=True):
        tables[0][0].survey = survey
        for request, _ in tables if survey.lowest < 0 else ():
            if request.look_at_ends().highest >= end:
                request.error = request.error or _too_large(request.highest)
    return _wrong(requests)


def _too_large(index: int) -> str:
    return f"index {index} is too large for a list: pass it alone"


def _shift(requests: Sequence[Request]) -> tuple[int, torch.dtype]:
    """The layout of keys on an accelerator: the bits for an index, and the dtype.

    Above those bits stands the table's number. The bits do not depend on the indices, since no rank
    knows yet how large those of the others are.
    """
    heights = [_END if each.rows.height is None else each.rows.height for each in requests]
    shift = min(max(heights).bit_length(), 62 - (len(requests) - 1).bit_length())
    return shift, torch.int32 if len(requests) << shift < _SHORT else torch.int64


def reduced(group: Group, requests: Sequence[Request], error: str | None) -> list[Any]:
    """Run one call, and note what it did; collective.

    Args:
        group: the ranks that take part.
        requests: the tables, with the same op and algorithm.
        error: what is wrong on this rank.

    Returns:
        The result of each table, in the form that it was given in.
    """
    stated = _stated(group, requests, error)
    kinds = _kinds(stated, requests)
    calls = [kind.request(requests) for kind in kinds]
    done = [run.reduced(group, call) for call in calls]
    # where tables begin in the results, unless the algorithm knows: read together, with one wait
    found = [
        (kind, call.of_device.below, rows)
        for kind, call, (rows, _) in zip(kinds, calls, done, strict=True)
    ]
    unknown = [kind.ends(rows) for kind, below, rows in found if kind.tall and not below]
    ends = iter(kernels.read(torch.cat(unknown)) if unknown else ())
    parts: dict[int, Rows] = {}
    for kind, below, rows in found:
        parts |= kind.parts(rows, requests, iter(below or ends))
    note(group, _of_all(group, [record for _, record in done]))
    results = []
    for table, request in enumerate(requests):
        part = parts.get(table)
        results.append(request.restore(_nothing(request.rows) if part is None else part))
    return results


def _of_all(group: Group, records: Sequence[Record]) -> Record:
    """One record of the calls for all tables; without any no rank has rows."""
    if not records and group.size == 1:
        return Record.of(group, ALONE, "the group has one rank")
    if not records:
        why = "no rank has rows, and nothing is sent after ranks have said so"
        return Record.of(group, EAGER, why)
    return replace(
        records[-1],  # which counted the messages of all
        algorithm=" and ".join(dict.fromkeys(each.algorithm for each in records)),
        why="; ".join(dict.fromkeys(each.why for each in records)),
        rows=sum(each.rows for each in records),
        total=sum(each.total for each in records),
        union=sum(each.union for each in records),
        bound_bytes=sum(each.bound_bytes for each in records),
    )


class _Kind(NamedTuple):
    """Tables of one dtype and row shape, each with rows on some rank.

    Attributes:
        tables: their numbers.
        row_shape: shape of a row.
        starts: the first key of each table, and the end of all keys.
        tall: whether indices become keys; a single table on the host keeps its indices.
    """

    tables: tuple[int, ...]
    row_shape: tuple[int, ...]
    starts: list[int]
    tall: bool

    def request(self, requests: Sequence[Request]) -> Request:
        """The call for the tall table."""
        tables = [requests[table].rows for table in self.tables]
        shaped = [rows.values.view(len(rows), *self.row_shape) for rows in tables]
        kind = requests[self.tables[0]]
        if not on_host(shaped[0]):
            surveys = (requests[table].survey for table in self.tables)
            survey = next(filter(None, surveys), None)
            none = shaped[0].new_empty(0, dtype=_shift(requests)[1])
            keys = none if survey is None else survey.distinct.indices
            return kind.of_rows(Rows(keys, torch.cat(shaped), self.starts[-1]), survey, self.starts)
        if not self.tall:
            return kind.of_rows(Rows(tables[0].indices, shaped[0], tables[0].height))
        counts = [len(each) for each in tables]
        indices = torch.cat([each.indices for each in tables])
        keys = indices.add(_repeated(self.starts[:-1], counts, indices))
        keys = keys.to(torch.int32 if self.starts[-1] < _SHORT else torch.int64)
        memory = fresh((len(keys), *self.row_shape), shaped[0].dtype)
        return kind.of_rows(Rows(keys, torch.cat(shaped, out=memory), self.starts[-1]))

    def ends(self, result: Rows) -> Tensor:
        """The place in the result where the rows of each table begin, and the end of the last."""
        return torch.searchsorted(result.indices, kernels.there(self.starts, result.indices))

    def parts(
        self, result: Rows, requests: Sequence[Request], ends: Iterator[int]
    ) -> dict[int, Rows]:
        """The rows of each table. If the group is tall, `ends` yields its places first."""
        if not self.tall:
            return {self.tables[0]: result}
        bounds = list(islice(ends, len(self.starts)))
        counts = [high - low for low, high in pairwise(bounds)]
        keys = result.indices - _repeated(self.starts[:-1], counts, result.indices)
        dtypes = {requests[table].rows.indices.dtype for table in self.tables}
        indices = {dtype: _cut(keys.to(dtype), bounds) for dtype in dtypes}
        values = _cut(result.values, bounds)
        parts = {}
        for number, table in enumerate(self.tables):
            rows = requests[table].rows
            parts[table] = Rows(indices[rows.indices.dtype][number], values[number], rows.height)
        return parts


def _repeated(numbers: Sequence[int], counts: Sequence[int], like: Tensor) -> Tensor:
    """Repeat `numbers[i]` `counts[i]` times; int64, on the device of `like`."""
    of, times = (
        kernels.there(each, like.new_empty(0, dtype=torch.int64)) for each in (numbers, counts)
    )
    return torch.repeat_interleave(of, times, output_size=sum(counts))


def _cut(whole: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """The rows between each bound and the next, each part with a storage of its own.

    So `torch.save` of a part does not save the whole. On the host the parts share the memory of the
    whole; on an accelerator they are copies.
    """
    if not on_host(whole):
        return [whole[low:high].clone() for low, high in pairwise(bounds)]
    memory = as_bytes(whole).numpy()
    shape = whole.shape[1:]
    dtype = whole.dtype
    row = math.prod(shape)
    parts = []
    for low, high in pairwise(bounds):
        count = (high - low) * row
        first = low * row * dtype.itemsize
        part = torch.empty(0, dtype=dtype)  # which no buffer may be asked for
        if count:
            part = torch.frombuffer(memory, dtype=dtype, count=count, offset=first)
        parts.append(part.view(high - low, *shape))
    return parts


def _kinds(stated: _Tables, requests: Sequence[Request]) -> list[_Kind]:
    """The groups of tables that have rows on some rank.

    Raises:
        WeftError: the indices of a group do not fit in one key space.
    """
    kinds: dict[tuple[bytes, bytes], list[int]] = {}
    what, shape, highest = (stated[name].tolist() for name in ("what", "shape", "highest"))
    for table, top in enumerate(highest):
        if top >= 0:
            kinds.setdefault((what[table].split(b",")[0], shape[table]), []).append(table)
    groups = []
    for (_, row_shape), tables in kinds.items():
        sizes = [highest[table] + 1 for table in tables]
        starts = [0, *accumulate(sizes)]
        staying = not on_host(requests[0].rows.indices)
        tall = staying or len(tables) > 1
        if staying:
            starts = [table << _shift(requests)[0] for table in (*tables, tables[-1] + 1)]
        elif starts[-1] > _END and tall:
            most = max(zip(sizes, tables, strict=True))
            raise conclusion(f"table {most[1]}: {_too_large(most[0] - 1)}")
        groups.append(_Kind(tuple(tables), shape_in(row_shape.decode()), starts, tall))
    return groups


def _nothing(rows: Rows) -> Rows:
    """The result of a table without rows on any rank."""
    return Rows(rows.indices[:0], rows.values.new_empty(0, *rows.row_shape), rows.height)


def _stated(group: Group, requests: Sequence[Request], error: str | None) -> _Tables:
    """The combined statements of all ranks on the tables; collective.

    Raises:
        WeftError: arguments are wrong on some rank, or ranks differ; the same text on every rank.
    """
    over = group.on(requests[0].rows.values.device)
    if not on_host(requests[0].rows.values) and error is None:
        error = _surveyed(requests)
    error = error or over.refusal
    requests[0].fields["device"] = over.route
    fields = {name: requests[0].fields.get(name) for name in _FIELDS}
    mine = np.zeros(len(requests) if error is None else 0, _TABLE)
    if error is None:
        mine[:] = [_statement(request) for request in requests]
    statements = []
    for start in _first_tables(requests):
        body = mine[start : start + _MOST].view(np.uint8).data
        with opened(group, NAME, fields, error, body, combined_statement) as opening:
            statements.append(_together(opening.read(_read, body.nbytes)))
    stated = np.concatenate(statements)
    if stated["odd"].any():
        table = int(stated["odd"].argmax())
        what, shape = (mine[each][table].decode() for each in ("what", "shape"))
        fields = {f"table {table}": what, f"the row shape of table {table}": shape or None}
        with opened(group, NAME, fields, None):
            pass  # which raises how they differ
    return stated


def _first_tables(requests: Sequence[Request]) -> range:
    """The number of the first table of each statement."""
    return range(0, len(requests), _MOST)


def _statement(request: Request) -> tuple[object, ...]:
    """What this rank states of a table."""
    values = str(request.rows.values.dtype)[6:]
    index = str(request.rows.indices.dtype)[6:]
    travels = ""
    if request.half is not None:
        values = str(request.half)[6:]
        travels = " as float32"
    elif request.dtype != request.rows.values.dtype:
        travels = f" as {str(request.dtype)[6:]}"
    height = "no height" if request.rows.height is None else f"height {request.rows.height}"
    shape = request.fields["row shape"]
    what = f"{values} values{travels}, {index} indices, {height}{_sparse_shape(request)}"
    shape = "" if shape is None else str(shape)
    return what, shape, request.highest, False


def _sparse_shape(request: Request) -> str:
    """The sparse dimensions that a table's height is the product of, as a clause; "" for one."""
    shape = request.fields.get("sparse shape", ())
    assert isinstance(shape, tuple)
    if len(shape) < 2:
        return ""
    return summed_up(f" of {shape}", _SHOWN, f" of {len(shape)} dimensions")


def _read(body: memoryview, nbytes: int) -> _Tables:
    """Read a statement. Raises ValueError if it is none of so many bytes."""
    tables: _Tables = np.frombuffer(body, _TABLE)
    for text in set(tables["shape"].tolist()):
        shape_in(text.decode())
    if len(body) != nbytes or (tables["highest"] < -1).any():
        raise ValueError(f"{len(tables)} tables, of which some are none")
    return tables


def _together(each: Sequence[_Tables]) -> _Tables:
    """Combine statements on the tables, in the order of the ranks."""
    statements = np.stack(each)
    every = np.arange(statements.shape[1])
    known = statements["shape"] != b""
    # as the first has it who knows the row shape
    stated: _Tables = statements[known.argmax(0), every]
    other_shape = known & (statements["shape"] != stated["shape"])
    odd = (statements["what"] != stated["what"]) | other_shape
    for name in ("highest", "odd"):
        stated[name] = statements[name].max(0)
    stated["odd"] |= odd.any(0)
    return stated


def combined_statement(lower: memoryview, upper: memoryview) -> Bytes:
    if len(lower) != len(upper):
        return lower  # the fingerprints tell
    return _together([_read(each, len(lower)) for each in (lower, upper)]).tobytes()
