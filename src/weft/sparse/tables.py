"""A list of tables in one sparse all-reduce: tables of one kind are reduced as one tall table.

A model with many embedding tables would pay the latency of a call for each. So the tables of one
*kind*, of one dtype and row shape, become one: their indices are shifted, each table has a range of
one key space, and they are reduced together. An opening comes first (several, of thousands of
tables). In it every rank states numbers of each table: a digest of what must be equal, and the
largest index. From that all ranks find the same kinds and the same ranges. Where digests differ, an
opening for that table tells how; or what its row shape is, which a rank without rows of it need not
know.

On the wire each kind is then an ordinary call. By verbs ranks sort their rows first (`look`), and
state how many there are: so no opening for a kind follows, and a device is read once for all
tables of a rank, and once for the result of each kind.

The results of the tables of a kind are parts of the tall table's memory, which is freed with the
last of them; on a device they are copies. All tables of a list must be on one device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..base.arguments import in_words
from ..base.errors import WeftError
from ..base.tensors import Shape, shape_in, there
from ..call.attempt import preparing
from ..call.fingerprint import UNKNOWN
from ..call.opening import opened
from ..call.statement import room
from ..group.group import Group
from ..kernels import Distinct
from ..verbs.carrier import carried_by
from ..verbs.interface import Verbs
from . import plain, run
from .call import Call
from .canonical import CanonicalRows
from .choose import Line
from .header import Header
from .look import looks_at
from .record import Record, note
from .registry import EAGER
from .request import Request
from .rows import Rows
from .tall import Tall

NAME = "sparse_all_reduce of a list"

_NUMBERS = 3
"""What a rank states of a table: a digest of what must be equal, also of its row shape; the largest
index, -1 if the rank has no rows of it; and by verbs, of the first table of a kind that the rank
has rows of, how many rows it has of the kind, each index once."""

_Kind = tuple[object, Shape]  # the dtype, as all know it, and the row shape


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
        try:
            request = of_all.given(table)
        except Exception as error:
            said = error if isinstance(error, WeftError) else in_words(error)
            raise WeftError(f"table {number}: {said}") from error
        request.naming = f"table {number}: "
        if kernels.on_host(request.rows.indices):
            request.look_at_ends(Tensor.tolist)
        requests.append(request)
        first = requests[0].device
        if request.device != first:
            where = f"table {number} is on {request.device}, table 0 on {first}"
            raise WeftError(f"{where}: pass a list for each device")
    return requests


def _is_pair(rows: Sequence[object]) -> bool:
    """Whether a list looks like one table: its indices, and its values."""
    return len(rows) == 2 and all(
        isinstance(each, Tensor) and each.ndim > 0 and each.layout == torch.strided for each in rows
    )


def device_of(of_all: Request, requests: Sequence[Request]) -> torch.device:
    """Where the tables are; of an empty list the CPU."""
    return (requests[0] if requests else of_all).device


def reduced(group: Group, of_all: Request, requests: Sequence[Request]) -> list[Any]:
    """Run one call, and note what it did; collective.

    Args:
        group: the ranks that take part.
        of_all: the arguments that do not depend on the tables.
        requests: the tables.

    Returns:
        The result of each table, in the form that it was given in.
    """
    looks: dict[_Kind, Distinct] = {}
    with preparing(group, NAME):
        verbs = run.verbs_for(group, requests[0] if requests else of_all)
        shapes = [tuple(each.rows.row_shape) for each in requests]
        own = _kinds(requests, shapes, [len(each.rows) > 0 for each in requests])
        if verbs is not None:
            found = looks_at(verbs, [[requests[table] for table in each] for each in own.values()])
            looks = dict(zip(own, found, strict=True))
        stated = [(_digest(request), request.highest, 0) for request in requests]
        mine = np.array(stated, np.int64).reshape(-1, _NUMBERS)
        for kind, look in looks.items():
            mine[own[kind][0], -1] = len(look.indices)
    fields = {**of_all.fields, "number of tables": len(requests), "device": carried_by(verbs)}
    numbers, shapes, agreed = _agreed(group, fields, requests, shapes, mine)
    _, highest, counts = np.moveaxis(numbers, 2, 0)
    parts = [request.rows for request in requests]  # of which no rank has rows
    records = []
    for kind, tables in _kinds(requests, shapes, highest.max(0) >= 0).items():
        alike = [requests[table] for table in tables]
        tall = Tall.of(alike, kind[1], highest[:, tables].max(0).tolist())
        if verbs is None:
            rows, record, cuts = _by_wire(group, tall)
        else:
            of_ranks = counts[:, tables].sum(1).tolist()
            rows, record, cuts = _by_verbs(group, verbs, agreed, tall, of_ranks, looks.get(kind))
        records.append(record)
        for table, part in zip(tables, tall.parts(rows, cuts), strict=True):
            parts[table] = part
    note(group, _record_of_list(group, records))
    return [request.restore(part) for request, part in zip(requests, parts, strict=True)]


def _kinds(
    requests: Sequence[Request], shapes: Sequence[Shape], are_there: Sequence[bool]
) -> dict[_Kind, list[int]]:
    """The numbers of the tables of each kind.

    Args:
        requests: of all tables.
        shapes: the row shape of each.
        are_there: whether a table has rows; else it is of no kind.
    """
    found: dict[_Kind, list[int]] = {}
    for table, request in enumerate(requests):
        if are_there[table]:
            found.setdefault((request.fields["value dtype"], shapes[table]), []).append(table)
    return found


def _by_wire(group: Group, tall: Tall) -> tuple[Rows, Record, list[int]]:
    """The sum of tables by weft's wire, and how many rows come before each; collective."""
    with preparing(group, NAME):  # there may be no memory for a tall table
        request = tall.request().look()
    rows, record = run.reduced(group, request)
    cuts = torch.searchsorted(rows.indices, there(tall.bounds, rows.indices)).tolist()
    return rows, record, cuts


def _by_verbs(
    group: Group,
    verbs: Verbs,
    fields: Mapping[str, str],
    tall: Tall,
    counts: Sequence[int],
    look: Distinct | None,
) -> tuple[Rows, Record, list[int]]:
    """The sum of tables by verbs, and how many rows come before each; collective.

    It is behind the opening: a rank that has no memory for a tall table ends the group.

    Args:
        group, verbs: of the call.
        fields: that all agreed on.
        tall: the tables.
        counts: how many rows each rank has, each index once.
        look: what this rank found; None if it has no rows.
    """
    request = tall.request()
    if look is not None:
        request.distinct = look.of(request.rows.indices)
    headers = [Header(count, tall.starts[-1] - 1, 0, 0) for count in counts]
    cuts: list[int] = []

    def algorithm(rows: CanonicalRows, call: Call) -> tuple[Line, Rows]:
        sums, cuts[:] = plain.summed(verbs, rows, call, tall.bounds)
        return plain.line_of(verbs, call), sums

    agreed = verbs, fields, headers
    rows, record = run.performed(group, request, NAME, algorithm, agreed=agreed)
    return rows, record, cuts


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


def _agreed(
    group: Group,
    fields: Mapping[str, object],
    requests: Sequence[Request],
    shapes: Sequence[Shape],
    mine: NDArray[np.int64],
) -> tuple[NDArray[np.int64], list[Shape], Mapping[str, str]]:
    """Tell each other the numbers of all tables; collective.

    Args:
        group: the ranks that take part.
        fields: the fingerprint of the call.
        requests: the tables.
        shapes: their row shapes, as this rank has them.
        mine: their numbers on this rank, `[tables, numbers]`.

    Returns:
        The numbers of all ranks, `[size, tables, numbers]`; the row shape of each table, if no rank
        has rows as this rank has it; and the fields that all agreed on.

    Raises:
        WeftError: arguments are wrong on some rank, or ranks differ; the same text on every rank.
    """
    most = room(group.size) // (_NUMBERS * mine.itemsize)
    parts = []
    for start in range(0, max(1, len(requests)), most):
        own = mine[start : start + most]
        opening = opened(group, NAME, fields, own.tobytes())
        parts.append(np.stack(opening.read(_numbers_in, len(own))))
    numbers = np.concatenate(parts, axis=1)
    digests = numbers[:, :, 0]
    agreed = [*shapes]
    for table in np.flatnonzero((digests != digests[0]).any(0)).tolist():
        agreed[table] = _row_shape(group, table, requests[table])
    return numbers, agreed, opening.fields


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
    if (numbers[:, 1] < -1).any() or (numbers[:, 2] < 0).any():
        raise ValueError("no table has such rows")
    return numbers


def _digest(request: Request) -> int:
    """An int64 that tells apart what must be equal on all ranks of a table."""
    fields = request.fields | {"row shape": tuple(request.rows.row_shape)}
    code = hashlib.blake2b(str(fields).encode(), digest_size=8).digest()
    return int.from_bytes(code, "little", signed=True)
