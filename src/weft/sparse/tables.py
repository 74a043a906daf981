"""A list of tables in one sparse all-reduce: tables of one kind are reduced as one tall table.

A model with many embedding tables would pay the latency of a call for each. So the tables of one
*kind*, of one dtype and row shape, become one: their indices are shifted, each table has a range of
one key space, and one ordinary call reduces all of them. An opening comes before the first of these
calls (several, of thousands of tables). In it every rank states two numbers of each table: a digest
of what must be equal, and the largest index. From that all ranks find the same kinds and the same
ranges. Where digests differ, an opening for that table tells how; or what its row shape is, which a
rank without rows of it need not know.

The results of the tables of a kind are parts of the tall table's memory, which is freed with the
last of them.

Tables that verbs carry are read for their largest indices together, and so are the rows of
the results at which tables begin. All tables of a list must be on one device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.arguments import in_words
from ..base.errors import WeftError, conclusion
from ..base.memory import fresh
from ..base.tensors import shape_in, there
from ..call.attempt import preparing
from ..call.fingerprint import UNKNOWN
from ..call.opening import opened
from ..call.statement import room
from ..group.group import Group
from ..verbs.carrier import carried_by, verbs_of
from ..verbs.group import read
from . import run
from .record import Record, note
from .registry import EAGER
from .request import Request
from .rows import Rows

NAME = "sparse_all_reduce of a list"

_END = 2**63 - 1  # the largest end of a key space: the end, too, must fit in int64
_SHORT = 2**31  # keys below fit in int32

_NUMBERS = 2
"""What a rank states of a table: a digest of what must be equal, also of its row shape, and the
largest index, -1 if the rank has no rows of it."""


def requests_of(rows: list[Any], of_all: Request) -> list[Request]:
    """A request for each table of a call, whose other arguments are those of `of_all`.

    Raises:
        WeftError: something is wrong with the list, or with a table.
    """
    if _is_pair(rows):
        raise WeftError(
            "rows is a list of two tensors: for one table pass them as a tuple, (indices, values); "
            "a list is of several tables"
        )
    requests: list[Request] = []
    for number, table in enumerate(rows):
        with _naming(number):
            request = of_all.given(table)
        requests.append(request)
        first = requests[0].device
        if request.device != first:
            where = f"table {number} is on {request.device}, table 0 on {first}"
            raise WeftError(f"{where}: pass a list for each device")
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
    return len(rows) == 2 and all(
        isinstance(each, Tensor) and each.ndim > 0 and each.layout == torch.strided for each in rows
    )


def _take_ends(requests: Sequence[Request], read: Callable[[Tensor], list[int]]) -> None:
    """Find the smallest and the largest index of each table, all with one read (to the host).

    Raises:
        WeftError: one is not of its table.
    """
    numbered = [(number, each) for number, each in enumerate(requests) if len(each.rows)]
    ends = [end.long() for _, each in numbered for end in each.rows.indices.aminmax()]
    found = iter(read(torch.stack(ends)) if ends else ())
    for number, request in numbered:
        with _naming(number):
            request.take_ends(next(found), next(found))


def reduced(group: Group, of_all: Request, requests: Sequence[Request]) -> list[Any]:
    """Run one call, and note what it did; collective.

    Args:
        group: the ranks that take part.
        of_all: the arguments that do not depend on the tables.
        requests: the tables.

    Returns:
        The result of each table, in the form that it was given in.
    """
    kinds = _kinds(requests, *_agreed_tables(group, of_all, requests))
    with preparing(group, NAME):  # there may be no memory for tall tables
        calls = [kind.request() for kind in kinds]
    done = [run.reduced(group, call) for call in calls]
    results = [(kind, rows) for kind, (rows, _) in zip(kinds, done, strict=True)]
    begin = [
        torch.searchsorted(rows.indices, there(kind.starts, rows.indices))
        for kind, rows in results
        if kind.tall
    ]
    bounds = iter(read(group, torch.cat(begin)) if begin else ())
    parts = {table: request.rows for table, request in enumerate(requests)}  # if nobody has rows
    for kind, rows in results:
        parts |= kind.parts(rows, bounds)
    note(group, _record_of_list(group, [record for _, record in done]))
    return [request.restore(parts[table]) for table, request in enumerate(requests)]


def _record_of_list(group: Group, records: Sequence[Record]) -> Record:
    """One record of the calls for all tables."""
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
        tables: of each its number and its request.
        row_shape: shape of a row.
        starts: the first key of each table, and the end of all keys.
    """

    tables: list[tuple[int, Request]]
    row_shape: tuple[int, ...]
    starts: list[int]

    @property
    def tall(self) -> bool:
        """Whether indices become keys; a single table keeps its indices."""
        return len(self.tables) > 1

    def request(self) -> Request:
        """The call for the tall table."""
        _, kind = self.tables[0]
        given = [request.rows for _, request in self.tables]
        shaped = [rows.values.view(len(rows), *self.row_shape) for rows in given]
        if not self.tall:
            return kind.of_rows(Rows(given[0].indices, shaped[0], given[0].height))
        indices = torch.cat([rows.indices for rows in given])
        start, count = (
            there(numbers, indices.new_empty(0, dtype=torch.int64))
            for numbers in (self.starts[:-1], [len(rows) for rows in given])
        )
        keys = indices + torch.repeat_interleave(start, count, output_size=len(indices))
        keys = keys.to(torch.int32 if self.starts[-1] < _SHORT else torch.int64)
        memory = fresh((len(keys), *self.row_shape), shaped[0].dtype, keys.device)
        return kind.of_rows(Rows(keys, torch.cat(shaped, out=memory), self.starts[-1]))

    def parts(self, result: Rows, bounds: Iterator[int]) -> dict[int, Rows]:
        """The rows of each table.

        If the kind is tall, the next of `bounds` say where in the result each table begins, and
        where the last one ends.
        """
        if not self.tall:
            return {self.tables[0][0]: result}
        keys = result.indices.long()
        own = pairwise(islice(bounds, len(self.starts)))
        parts = {}
        for (table, request), start, (low, high) in zip(
            self.tables, self.starts[:-1], own, strict=True
        ):
            indices = (keys[low:high] - start).to(request.rows.indices.dtype)
            parts[table] = Rows(indices, _part(result.values, low, high), request.rows.height)
        return parts


def _part(whole: Tensor, low: int, high: int) -> Tensor:
    """Some rows, with a storage of their own, so that `torch.save` of them does not save the whole.

    On the host they share the memory of the whole; on a device they are a copy.
    """
    if not whole.is_cpu:
        return whole[low:high].clone()
    some = whole[low:high]
    first = some.storage_offset() * some.itemsize
    memory: torch.UntypedStorage = some.untyped_storage()[first : first + some.nbytes]
    return torch.empty(0, dtype=some.dtype).set_(memory).view(some.shape)


def _kinds(
    requests: Sequence[Request], shapes: Sequence[tuple[int, ...]], highest: Sequence[int]
) -> list[_Kind]:
    """The kinds of tables that have rows on some rank, of which all ranks know the row shapes and
    the largest indices.

    Raises:
        WeftError: the indices of a kind do not fit in one key space.
    """
    numbers_of: dict[tuple[object, tuple[int, ...]], list[int]] = {}
    for number, request in enumerate(requests):
        if highest[number] >= 0:
            dtype = request.fields["value dtype"]
            numbers_of.setdefault((dtype, shapes[number]), []).append(number)
    kinds = []
    for (_, row_shape), numbers in numbers_of.items():
        starts = [0, *accumulate(highest[number] + 1 for number in numbers)]
        kind = _Kind([(number, requests[number]) for number in numbers], row_shape, starts)
        if starts[-1] > _END and kind.tall:
            most = max(numbers, key=highest.__getitem__)
            text = f"index {highest[most]} is too large for a list: pass it alone"
            raise conclusion(f"table {most}: {text}")
        kinds.append(kind)
    return kinds


def _agreed_tables(
    group: Group, of_all: Request, requests: Sequence[Request]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The row shape of each table, if no rank has rows as this rank has it; and the largest index
    of all ranks, -1 if none has rows; collective.

    Raises:
        WeftError: arguments are wrong on some rank, or ranks differ; the same text on every rank.
    """
    with preparing(group, NAME):
        verbs = verbs_of(group, device_of(of_all, requests))
        _take_ends(requests, Tensor.tolist if verbs is None else verbs.read)
        stated = [(_digest(request), request.highest) for request in requests]
        mine = np.array(stated, np.int64).reshape(-1, _NUMBERS)
    fields = {**of_all.fields, "number of tables": len(requests), "device": carried_by(verbs)}
    most = room(group.size) // (_NUMBERS * mine.itemsize)
    parts = []
    for start in range(0, max(1, len(requests)), most):
        own = mine[start : start + most]
        opening = opened(group, NAME, fields, own.tobytes())
        parts.append(np.stack(opening.read(_numbers_in, len(own))))
    digests, highest = np.moveaxis(np.concatenate(parts, axis=1), 2, 0)
    shapes: list[tuple[int, ...]] = [request.rows.row_shape for request in requests]
    for number in np.flatnonzero((digests != digests[0]).any(0)).tolist():
        shapes[number] = _row_shape(group, number, requests[number])
    return shapes, highest.max(0).tolist()


def device_of(of_all: Request, requests: Sequence[Request]) -> torch.device:
    """Where the tables are; of an empty list the CPU."""
    return (requests[0] if requests else of_all).device


def _row_shape(group: Group, number: int, request: Request) -> tuple[int, ...]:
    """The row shape of a table of which ranks have stated other digests; collective.

    Raises:
        WeftError: the ranks that have rows differ; or all, in something else.
    """
    fields = {f"{name} of table {number}": value for name, value in request.fields.items()}
    opening = opened(group, NAME, fields)
    name = f"row shape of table {number}"
    if opening.fields[name] == UNKNOWN:  # no rank has rows
        return request.rows.row_shape
    return opening.field(name, shape_in)


def _numbers_in(body: memoryview, tables: int) -> NDArray[np.int64]:
    """Read what a rank states of so many tables. Raises ValueError if the bytes are none."""
    numbers = np.frombuffer(body, np.int64).reshape(tables, _NUMBERS)
    if (numbers[:, -1] < -1).any():
        raise ValueError("a highest index is below -1")
    return numbers


def _digest(request: Request) -> int:
    """An int64 that tells apart what must be equal on all ranks of a table."""
    fields = request.fields | {"row shape": tuple(request.rows.row_shape)}
    code = hashlib.blake2b(str(fields).encode(), digest_size=8).digest()
    return int.from_bytes(code, "little", signed=True)
