"""A list of tables in one sparse all-reduce: tables of one kind are reduced as one tall table.

A model with many embedding tables would pay the latency of a call for each. So the tables of one
*kind*, of one dtype and row shape, become one: their indices are shifted, each table has a range of
one key space, and one ordinary call reduces all of them. An opening comes before the first of these
calls (several, of thousands of tables). In it every rank states three numbers of each table: a
digest of what must be equal, one of its row shape, and the largest index. From that all ranks find
the same kinds and the same ranges. Where ranks differ, an opening for that table tells how; or what
its row shape is, which a rank without rows of it need not know.

The results of the tables of a kind are parts of the tall table's memory, which is freed with the
last of them.

Tables that verbs carry are read for their largest indices together, and so are the places in the
results where tables begin. All tables of a list must be on one device.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.arguments import in_words
from ..base.errors import WeftError, check, conclusion, summed_up
from ..base.memory import fresh
from ..base.tensors import as_bytes, shape_in, there
from ..call.attempt import preparing
from ..call.opening import opened
from ..call.statement import room
from ..group.group import Group
from ..verbs.carrier import carried_by, verbs_of
from ..verbs.group import read
from ..verbs.interface import Verbs
from . import run
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

_NUMBERS = 3
"""What a rank states of a table: a digest of its kind, one of its row shape, and the largest index,
-1 if the rank has no rows of it."""

_KEPT = 1 << 12  # digests that are kept: training makes the same calls
_SHOWN = 40  # characters of a sparse shape; of a longer one a digest is compared

_INTEGERS = Rows(NOTHING.indices, NOTHING.indices)

_Numbers = NDArray[np.int64]
"""The numbers of some tables, `[tables, _NUMBERS]`."""


def requests_of(rows: list[Any], op: Any, algorithm: object, wire_dtype: object) -> list[Request]:
    """A request for each table of a call.

    An empty list becomes one empty table, of a dtype that the op takes.

    Raises:
        WeftError: something is wrong with the list, or with a table.
    """
    of_all = Request.asked(op, algorithm, wire_dtype)
    if _is_pair(rows):
        raise WeftError(
            "rows is a list of two tensors: for one table pass them as a tuple, (indices, values); "
            "a list is of several tables"
        )
    nothing = NOTHING if of_all.op.refuses(NOTHING.values.dtype) is None else _INTEGERS
    requests = []
    for number, table in enumerate(rows or [nothing]):
        with _naming(number):
            request = of_all.given(table)
            if request.rows.indices.is_cpu:
                request.look_at_ends(Tensor.tolist)
        requests.append(request)
    requests[0].fields["number of tables"] = len(rows)
    check(_scattered(requests))
    return requests


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """A block for one of several tables: what it raises says which."""
    try:
        yield
    except Exception as error:
        said = error if isinstance(error, WeftError) else in_words(error)
        raise WeftError(f"table {number}: {said}") from error


def _is_pair(rows: Sequence[object]) -> bool:
    """Whether a list looks like one table: its indices, and its values."""
    if len(rows) != 2 or not all(isinstance(each, Tensor) and each.ndim > 0 for each in rows):
        return False
    return all(each.layout == torch.strided for each in rows if isinstance(each, Tensor))


def _scattered(requests: Sequence[Request]) -> str | None:
    """The error if tables are on several devices, or None."""
    first = requests[0].device
    for number, each in enumerate(requests):
        if each.device != first:
            where = f"table {number} is on {each.device}, table 0 on {first}"
            return f"{where}: pass a list for each device"
    return None


def _take_ends(requests: Sequence[Request], verbs: Verbs) -> None:
    """Find the smallest and the largest index of each table, all with one read.

    Raises:
        WeftError: one is not of its table.
    """
    numbered = [(number, each) for number, each in enumerate(requests) if len(each.rows)]
    ends = [end.long() for _, each in numbered for end in each.rows.indices.aminmax()]
    found = iter(verbs.read(torch.stack(ends)) if ends else ())
    for number, request in numbered:
        with _naming(number):
            request.take_ends(next(found), next(found))


def _too_large(index: int) -> str:
    return f"index {index} is too large for a list: pass it alone"


def reduced(group: Group, requests: Sequence[Request]) -> list[Any]:
    """Run one call, and note what it did; collective.

    Args:
        group: the ranks that take part.
        requests: the tables, with the same op and algorithm.

    Returns:
        The result of each table, in the form that it was given in.
    """
    kinds = _kinds(_agreed_tables(group, requests), requests)
    with preparing(group, NAME):  # there may be no memory for tall tables
        calls = [kind.request(requests) for kind in kinds]
    done = [run.reduced(group, call) for call in calls]
    results = [(kind, rows) for kind, (rows, _) in zip(kinds, done, strict=True)]
    begin = [kind.begins(rows) for kind, rows in results if kind.tall]
    places = iter(read(group, torch.cat(begin)) if begin else ())
    parts = {table: _no_rows(request.rows) for table, request in enumerate(requests)}
    for kind, rows in results:
        parts |= kind.parts(rows, requests, places)
    note(group, _record_of_list(group, [record for _, record in done]))
    return [request.restore(parts[table]) for table, request in enumerate(requests)]


def _record_of_list(group: Group, records: Sequence[Record]) -> Record:
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
        tall: whether indices become keys; a single table keeps its indices.
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
        if not self.tall:
            return kind.of_rows(Rows(tables[0].indices, shaped[0], tables[0].height))
        counts = [len(each) for each in tables]
        indices = torch.cat([each.indices for each in tables])
        keys = indices.add(_repeated(self.starts[:-1], counts, indices))
        keys = keys.to(torch.int32 if self.starts[-1] < _SHORT else torch.int64)
        memory = fresh((len(keys), *self.row_shape), shaped[0].dtype, keys.device)
        return kind.of_rows(Rows(keys, torch.cat(shaped, out=memory), self.starts[-1]))

    def begins(self, result: Rows) -> Tensor:
        """The place in the result where the rows of each table begin, and the end of the last."""
        return torch.searchsorted(result.indices, there(self.starts, result.indices))

    def parts(
        self, result: Rows, requests: Sequence[Request], ends: Iterator[int]
    ) -> dict[int, Rows]:
        """The rows of each table. If the kind is tall, `ends` yields its places first."""
        if not self.tall:
            return {self.tables[0]: result}
        bounds = list(islice(ends, len(self.starts)))
        counts = [high - low for low, high in pairwise(bounds)]
        keys = result.indices - _repeated(self.starts[:-1], counts, result.indices)
        dtypes = {requests[table].rows.indices.dtype for table in self.tables}
        indices = {dtype: _split(keys.to(dtype), bounds) for dtype in dtypes}
        values = _split(result.values, bounds)
        parts = {}
        for number, table in enumerate(self.tables):
            rows = requests[table].rows
            parts[table] = Rows(indices[rows.indices.dtype][number], values[number], rows.height)
        return parts


def _repeated(numbers: Sequence[int], counts: Sequence[int], like: Tensor) -> Tensor:
    """Repeat `numbers[i]` `counts[i]` times; int64, on the device of `like`."""
    of, times = (there(each, like.new_empty(0, dtype=torch.int64)) for each in (numbers, counts))
    return torch.repeat_interleave(of, times, output_size=sum(counts))


def _split(whole: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """The rows between each bound and the next, each part with a storage of its own.

    So `torch.save` of a part does not save the whole. On the host the parts share the memory of the
    whole; on a device they are copies.
    """
    if not whole.is_cpu:
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


def _kinds(tables: Sequence[_Table], requests: Sequence[Request]) -> list[_Kind]:
    """The kinds of tables that have rows on some rank.

    Raises:
        WeftError: the indices of a kind do not fit in one key space.
    """
    numbers_of: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for number, table in enumerate(tables):
        if table.highest >= 0:
            numbers_of.setdefault((table.values, table.row_shape), []).append(number)
    kinds = []
    for (_, row_shape), numbers in numbers_of.items():
        sizes = [tables[number].highest + 1 for number in numbers]
        starts = [0, *accumulate(sizes)]
        tall = len(numbers) > 1
        if starts[-1] > _END and tall:
            most = max(zip(sizes, numbers, strict=True))
            raise conclusion(f"table {most[1]}: {_too_large(most[0] - 1)}")
        kinds.append(_Kind(tuple(numbers), row_shape, starts, tall))
    return kinds


def _no_rows(rows: Rows) -> Rows:
    """The result of a table without rows on any rank."""
    return Rows(rows.indices[:0], rows.values.new_empty(0, *rows.row_shape), rows.height)


class _Table(NamedTuple):
    """What all ranks know of a table.

    Attributes:
        values: their dtype, and as which they travel.
        row_shape: shape of a row; if no rank has rows, as this rank has it.
        highest: the largest index; -1 if no rank has rows.
    """

    values: str
    row_shape: tuple[int, ...]
    highest: int


def _agreed_tables(group: Group, requests: Sequence[Request]) -> list[_Table]:
    """What all ranks know of the tables; collective.

    Raises:
        WeftError: arguments are wrong on some rank, or ranks differ; the same text on every rank.
    """
    with preparing(group, NAME):
        verbs = verbs_of(group, requests[0].device)
        if verbs is not None:
            _take_ends(requests, verbs)
        mine = np.array([_numbers_of(request) for request in requests])
    requests[0].fields["device"] = carried_by(verbs)
    fields = {name: requests[0].fields.get(name) for name in _FIELDS}
    most = room(group.size) // (_NUMBERS * mine.itemsize)
    parts = []
    for start in range(0, len(requests), most):
        own = mine[start : start + most]
        opening = opened(group, NAME, fields, own.tobytes())
        parts.append(np.stack(opening.read(_numbers_in, len(own))))
    kinds, shapes, highest = np.moveaxis(np.concatenate(parts, axis=1), 2, 0)
    has_rows = highest >= 0
    shape = np.take_along_axis(shapes, has_rows.argmax(0)[None], 0)  # that of a rank with rows
    differs = (kinds != kinds[0]) | (has_rows.any(0) & (shapes != shape))
    tables = []
    for number, request in enumerate(requests):
        row_shape = tuple(request.rows.row_shape)
        if differs[:, number].any():
            row_shape = _row_shape(group, number, request)
        tables.append(_Table(_values(request), row_shape, int(highest[:, number].max())))
    return tables


def _row_shape(group: Group, number: int, request: Request) -> tuple[int, ...]:
    """The row shape of a table of which ranks have stated other digests; collective.

    Raises:
        WeftError: the ranks that have rows differ; or all, in something else.
    """
    name = f"the row shape of table {number}"
    fields = {f"table {number}": _kind(request), name: request.fields["row shape"]}
    return opened(group, NAME, fields).field(name, shape_in)


def _numbers_of(request: Request) -> tuple[int, int, int]:
    """What this rank states of a table."""
    row_shape = str(tuple(request.rows.row_shape))
    return _digest(_kind(request)), _digest(row_shape), request.highest


def _numbers_in(body: memoryview, tables: int) -> _Numbers:
    """Read what a rank states of so many tables. Raises ValueError if the bytes are none."""
    numbers = np.frombuffer(body, np.int64).reshape(tables, _NUMBERS)
    if (numbers[:, -1] < -1).any():
        raise ValueError("a highest index is below -1")
    return numbers


@functools.lru_cache(_KEPT)
def _digest(text: str) -> int:
    """An int64 that tells texts apart."""
    code = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(code, "little", signed=True)


def _kind(request: Request) -> str:
    """What must be equal on all ranks of a table, beside its row shape."""
    index = str(request.rows.indices.dtype)[6:]
    height = "no height" if request.rows.height is None else f"height {request.rows.height}"
    return f"{_values(request)}, {index} indices, {height}{_sparse_shape(request)}"


def _values(request: Request) -> str:
    """The dtype of a table's values, and as which they travel."""
    own = request.rows.values.dtype
    if request.half is not None:
        return f"{str(request.half)[6:]} values as float32"
    travels = "" if request.dtype == own else f" as {str(request.dtype)[6:]}"
    return f"{str(own)[6:]} values{travels}"


def _sparse_shape(request: Request) -> str:
    """The sparse dimensions that a table's height is the product of, as a clause; "" for one."""
    shape = request.fields.get("sparse shape", ())
    assert isinstance(shape, tuple)
    if len(shape) < 2:
        return ""
    return summed_up(f" of {shape}", _SHOWN, f" of {len(shape)} dimensions")
