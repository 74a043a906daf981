"""The sparse all-reduce that users call, and `explain`, which says what it would do.

Here is the public face; `request` checks the arguments, `run` takes the steps of a call.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.profiler import record_function

from ..rows import Rows
from ..wire import default
from ..wire.base import Wire
from . import run
from .choice import Explanation
from .request import Request

if TYPE_CHECKING:
    from ..wire.worker import Work

__all__ = ["Record", "explain", "last_call", "sparse_all_reduce"]


@dataclass(frozen=True, slots=True)
class Record:
    """What one sparse all-reduce did, on this rank.

    Attributes:
        algorithm: what ran; "eager" where all rows travelled in the opening exchange.
        rows: rows of this rank, without duplicates.
        total: rows of all ranks together, K.
        union: rows of the result, U.
        messages: sent by this rank, the opening exchange included.
        sent_bytes: in those messages.
        bound_bytes: bytes that the average rank must receive, whatever the algorithm.
        seconds: from the opening to the result.
    """

    algorithm: str
    rows: int
    total: int
    union: int
    messages: int
    sent_bytes: int
    bound_bytes: int
    seconds: float


_records: WeakKeyDictionary[Wire, Record] = WeakKeyDictionary()


def sparse_all_reduce(
    rows: Any,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
    out: Any = None,
) -> Any:
    """Reduce the rows of all ranks; every rank gets all the result, bit for bit the same.

    Args:
        rows: a sparse COO tensor (any number of sparse dimensions), `(indices, values)`, or
            `weft.Rows`; the result has the same form and device. Indices are int32 or int64, in any
            order, with duplicates, or none at all; values are `[k, *row_shape]`. A list of these is
            several tables, and gives a list.
        op: "sum", "avg" (divides by the size of the group), "min", "max", "prod", "band", "bor",
            "bxor", a `torch.distributed.ReduceOp`, or an associative function `(a, b) -> tensor` of
            two `[n, *row_shape]` tensors, applied row by row, the lower rank's rows left.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.
        async_op: return at once, with a `Work` whose `wait()` gives the result. The input must not
            change before.
        algorithm: "auto" or a registered name; the environment's WEFT_ALGORITHM replaces "auto".
        wire_dtype: None, or `torch.bfloat16` or `torch.float16`, in which floating-point values are
            then sent. Every rank's sum of an index is rounded to it before it travels, and so is
            the result, once each, to nearest even; additions are as wide as ever. Lossy:
            docs/wire-dtype.md has the bound. Values of two bytes travel as they are.
        out: None, `(indices, values)` with room for the result, or a function
            `(count, row_shape, (index_dtype, value_dtype)) -> (indices, values)`. What it
            holds after an error is undefined.

    Returns:
        Canonical rows: sorted indices, each once. Local duplicates are added in input order and
        ranks in rank order (`doubling` and `dense`: see docs/algorithms.md), so the same inputs
        give the same bits. Half precision adds in float32 and rounds at the end; integers wrap.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> with weft.init():  # alone: a group of one
        ...     weft.sparse_all_reduce((torch.tensor([7, 2, 7]), torch.tensor([1.0, 2.0, 4.0])))
        (tensor([2, 7]), tensor([2., 5.]))
    """
    wire = default.resolve(group)
    requests = _requests(rows, op, algorithm, wire_dtype, out)

    def job() -> Any:
        results = [reduce_now(wire, request)[0] for request in requests]
        return results[: len(rows)] if isinstance(rows, list) else results[0]

    if async_op:
        work: Work[Any] = wire.worker.submit("sparse_all_reduce", job)
        return work
    return wire.worker.call("sparse_all_reduce", job)


def explain(
    rows: Any,
    op: Any = "sum",
    group: Any = None,
    *,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> Explanation:
    """What `sparse_all_reduce` would do with these arguments, and why; nothing is reduced.

    Collective, like the call it explains, with the same errors. Prints as a table: algorithm,
    messages, bytes, predicted time, ratio to the bound, and chosen or why not.

    Example:
        >>> import torch, weft
        >>> with weft.init():
        ...     rows = (torch.tensor([2, 7]), torch.rand(2, 64))
        ...     weft.explain(rows).chosen  # nobody to talk to
        'alone'
    """
    wire = default.resolve(group)
    request = Request.of(rows, op, algorithm, wire_dtype, None)

    return wire.worker.call("explain", lambda: run.explained(wire, request))


def last_call(group: Any = None) -> Record | None:
    """What the last sparse all-reduce on this group did, on this rank; None before the first."""
    return _records.get(default.resolve(group))


def _requests(rows: Any, op: Any, algorithm: object, wire_dtype: object, out: Any) -> list[Request]:
    """One request, or one for each table of a list; an empty list is an empty table."""
    if not isinstance(rows, list):
        return [Request.of(rows, op, algorithm, wire_dtype, out)]
    tables = rows or [Rows(torch.empty(0, dtype=torch.int64), torch.empty(0))]
    outs = out if isinstance(out, list) else [out] * len(tables)
    requests = [
        Request.of(table, op, algorithm, wire_dtype, place)
        for table, place in zip_longest(tables, outs[: len(tables)])
    ]
    for request in requests:
        request.fields["number of tables"] = len(rows)
        if out is not None and (not isinstance(out, list) or len(out) != len(rows)):
            request.error = (
                f"out is for {len(out) if isinstance(out, list) else 'one'} of {len(rows)} tables: "
                "pass a list with one for each"
            )
    return requests


def reduce_now(wire: Wire, request: Request) -> tuple[Any, Record]:
    """One call whose turn on the wire it is: the result in the form asked for, and what it did."""
    start, messages, sent = time.perf_counter(), wire.traffic.messages, wire.traffic.bytes
    with record_function("weft::sparse_all_reduce"):
        done = run.reduced(wire, request)
    load, result = done.load, done.rows
    record = _records[wire] = Record(
        done.algorithm,
        request.distinct.indices.numel(),
        load.total,
        len(result),
        wire.traffic.messages - messages,
        wire.traffic.bytes - sent,
        round(load.bound),
        time.perf_counter() - start,
    )
    return request.restore(result), record
