"""An operation: one sparse all-reduce as the face of a generation was asked for it.

Checking raises on no rank before all ranks know: a rank whose arguments are wrong still takes part
in the opening exchange, with a sentence of what is wrong, and then all raise it. Left to the faces
is where a result goes.

uint64 indices from 2^63 on have no place among weft's int64 from 0 up. Their rows are reduced in a
call of their own, behind that of the rows below, their indices less 2^63; its result comes behind
the first one's, in the order of unsigned numbers. Only a rank that has such rows states so in the
fingerprint of the first call. So all ranks know it before there is a result, and where nobody has
any, nothing travels or is copied for their sake.

Coalesce mode "disable" reduces nothing: the rows of all ranks, one after the other, travel as in
`weft.sparse_all_gather`, whichever algorithm was selected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...agree import agree
from ...errors import WeftError
from ...rows import Rows
from ...sparse.api import reduce_now
from ...sparse.arguments import outside
from ...sparse.call import Allocator
from ...sparse.family.all_gather import gather_now
from ...sparse.record import as_one
from ...sparse.registry import ALGORITHMS
from ...sparse.request import Request
from ...wire import default
from ...wire.base import Wire, Work
from .attributes import Attributes
from .buffers import (
    Memory,
    Place,
    Result,
    Wrong,
    await_device,
    counted,
    dtype_of,
    index_dtype_of,
    seen,
    widened,
)
from .communicator import Communicator
from .progress import await_all

_PLAIN = Attributes()
_SOONER = 0.75  # of the group's timeout: who waits longer than that cannot tell the others in time
MODES = ("regular", "disable", "keep_precision")

Finish = Callable[[Tensor, Tensor], Callable[[], None] | None]
"""Takes a result. It may raise: then all ranks do. If none did, what it returned is called."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A call that has nothing wrong as far as can be told without reading its buffers.

    Attributes:
        sent: what this rank sends.
        reduction: as the caller named it.
        finish: what becomes of the result.
        attributes: as in the document.
        place: where the caller wants the result; None: in memory of weft's.
        mode: one of `MODES`. weft adds half precision in float32 and rounds once in any of them, so
            "keep_precision" is "regular"; "disable" reduces nothing.
        after: what is waited for before the buffers are read, each with its name.
    """

    sent: Sent
    reduction: Any
    finish: Finish
    attributes: Attributes = _PLAIN
    place: Place | None = None
    mode: str = "regular"
    after: Sequence[tuple[str, Any]] = ()


def start(comm: Any, prepare: Callable[[], Operation]) -> Work[Result]:
    """Start an operation among the ranks of `comm`; what `prepare` finds wrong is told to all.

    Raises:
        WeftError: this rank is not in the group, or its own call is wrong; or any rank's is, and
            the call is synchronous.
        WireError: as a wait does.
    """
    wire = comm.wire if isinstance(comm, Communicator) else default.resolve(comm)
    try:
        operation = prepare()
        operation.attributes.check()
        reduction, algorithm = operation.attributes.op(operation.reduction), selected()
        marks = [*operation.after, *_marks(operation.sent)]
    except Exception as error:  # of ours, or of a buffer's that cannot be seen: told to all alike
        sentence = _sentence(wire, error)
        work: Work[Result] = wire.worker.submit(
            "sparse_allreduce", lambda: _refused(wire, sentence)
        )
        work.wait()
        return work
    work = wire.worker.submit(
        "sparse_allreduce", lambda: _run(wire, operation, marks, reduction, algorithm)
    )
    if operation.attributes.synchronous:
        work.wait()
    return work


def _refused(wire: Wire, sentence: str) -> Result:
    """Tell all ranks what is wrong on this one, which raises."""
    request = Request(error=sentence)
    result: Result = reduce_now(wire, request)[0]
    return result


def _run(
    wire: Wire,
    operation: Operation,
    marks: Sequence[tuple[str, Any]],
    reduction: Any,
    algorithm: str,
) -> Result:
    sent, trouble = operation.sent, None
    memory = Memory(operation.place, sent.indices.dtype)
    nothing = Rows(torch.empty(0, dtype=torch.int64), sent.values[:0])
    parts = nothing, nothing
    in_order, index = operation.mode == "disable", sent.indices.dtype
    try:
        await_all(marks, _SOONER * wire.timeout)
        parts = sent.rows(operation.attributes), nothing
        if index == torch.uint64 and not in_order:
            parts = halves(parts[0])
    except Exception as error:
        trouble = error
    out = memory.allocate if operation.place is not None else None

    def asked(rows: Rows, out: Allocator | None) -> Request:
        pair = (rows.indices, rows.values)
        request = Request.unsorted(pair, reduction, algorithm, None, out)
        if not in_order:
            request.sort()
        request.error = request.error if trouble is None else _sentence(wire, trouble)
        request.fields |= {
            "index dtype": str(index),
            "match_id": repr(operation.attributes.match_id),
        }
        return request

    try:
        if in_order:
            result = concatenated(wire, asked(parts[0], out), index)
        elif index == torch.uint64:
            result = reduced(wire, parts, asked, out)
        else:
            result = reduce_now(wire, asked(parts[0], out))[0]
    except WeftError as error:
        raise error from trouble
    return _finish(wire, operation, lambda: memory.fill(result))


def _finish(wire: Wire, operation: Operation, fill: Callable[[], Result]) -> Result:
    """Hand out a result; raises alike on all ranks if that fails on one."""
    trouble, write = None, None
    try:
        indices, values = fill()
        values = operation.attributes.after(values, operation.sent.values.dtype)
        await_device(indices, values)
        write = operation.finish(indices, values)
    except Exception as error:
        trouble = error
    sentence = None if trouble is None else _sentence(wire, trouble)
    nothing = torch.empty(0, dtype=torch.uint8)
    try:
        agree(wire, "the end of sparse_allreduce", {}, sentence, nothing, lambda a, b: a).release()
    except WeftError as error:
        raise error from trouble
    if write is not None:
        write()
    return indices, values


def _sentence(wire: Wire, trouble: Exception) -> str:
    if isinstance(trouble, Wrong | WeftError):
        return str(trouble).removeprefix(f"rank {wire._named}: ")  # which is said for all
    return f"{type(trouble).__name__}: {trouble}"


def _marks(sent: Sent) -> list[tuple[str, Any]]:
    """What to wait for on an accelerator before its memory is read: the work queued so far."""
    device = sent.values.device
    if device.type == "cpu":
        return []
    return [("the current stream", torch.accelerator.current_stream(device).record_event())]


_FIELD = "indices from 2^63"
_ENDS = torch.iinfo(torch.int64)

_Dtypes = tuple[torch.dtype, torch.dtype]

Ask = Callable[[Rows, Allocator | None], Request]
"""What makes a request of rows, and of where the result is wanted."""


def halves(rows: Rows) -> tuple[Rows, Rows]:
    """Rows below 2^63, and those from there on less that; each in their order.

    Args:
        rows: their indices are uint64, seen as int64.

    Example:
        >>> bits = torch.tensor([2**64 - 1, 7], dtype=torch.uint64).view(torch.int64)
        >>> [half.indices.tolist() for half in halves(Rows(bits, torch.ones(2)))]
        [[7], [9223372036854775807]]
    """
    indices, values = rows.indices, rows.values
    if not len(rows) or int(indices.min()) >= 0:
        return rows, Rows(indices[:0], values[:0])
    upper = indices < 0
    lower = ~upper
    return (
        Rows(indices[lower], values[lower]),
        Rows(indices[upper] & _ENDS.max, values[upper]),
    )


def reduced(
    wire: Wire, parts: tuple[Rows, Rows], ask: Ask, out: Allocator | None
) -> tuple[Tensor, Tensor]:
    """The result, ascending, its indices seen as int64; collective.

    Args:
        wire: among whom.
        parts: as `halves` gives them.
        ask: makes a request.
        out: the caller's memory, which is asked for once, for all the result.
    """

    def asked(part: Rows, place: Allocator) -> Request:
        request = ask(part, None if out is None else place)
        for each in parts:  # so that the rows of both calls are known to be of one shape
            if len(each):
                request.fields["row shape"] = tuple(each.row_shape)
        return request

    def place(count: int, row_shape: tuple[int, ...], dtypes: _Dtypes) -> tuple[Tensor, Tensor]:
        assert out is not None
        if _FIELD not in first.agreed:
            return out(count, row_shape, dtypes)
        return torch.empty(count, dtype=dtypes[0]), torch.empty(count, *row_shape, dtype=dtypes[1])

    first = asked(parts[0], place)
    if len(parts[1]):
        first.fields[_FIELD] = "some"
    lower: tuple[Tensor, Tensor]
    lower, record = reduce_now(wire, first)
    if _FIELD not in first.agreed:
        return lower
    begin = len(lower[0])
    whole: list[Tensor] = []

    def behind(count: int, row_shape: tuple[int, ...], dtypes: _Dtypes) -> tuple[Tensor, Tensor]:
        assert out is not None
        whole.extend(out(begin + count, row_shape, dtypes))
        return whole[0][begin:], whole[1][begin:]

    upper, more = reduce_now(wire, asked(parts[1], behind))
    as_one(wire, record, more)
    if out is None:
        whole = [torch.cat(each) for each in zip(lower, upper, strict=True)]
    else:
        for each, part in zip(whole, lower, strict=True):
            each[:begin].copy_(part)
    whole[0][begin:].bitwise_or_(_ENDS.min)
    return whole[0], whole[1]


def concatenated(wire: Wire, request: Request, index: torch.dtype) -> Any:
    """All ranks' rows in rank order, in the form of the request's; collective.

    Indices are int64, whatever they were; `request`, which has not looked at them, says so, and
    states its errors. Those of uint64 travel as they are, bit by bit, since nobody compares them.

    Args:
        wire: among whom.
        request: this rank's rows, and the fingerprint.
        index: the dtype that the indices were.
    """
    rows = request.rows
    if request.error is None and len(rows):
        lowest, highest = (int(end) for end in rows.indices.aminmax())
        if index == torch.uint64 and lowest < 0:
            highest = torch.iinfo(torch.int64).max  # as int32 they would lose the upper bits
        else:
            request.error = outside(lowest, highest, None)
        request.highest = highest
    request.rows = Rows(rows.indices.long(), rows.values)
    request.fields |= {"ind_dtype": request.fields["index dtype"], "index dtype": "torch.int64"}
    return gather_now(wire, request, "sparse_allreduce in coalesce mode disable")[0]


ONECCL = {
    "ring": "ring",
    "mask": "mask",
    "allgatherv": "gather",
    "allgather": "gather",
    "basic": "ring",
    "size": "ring",
}
"""weft's algorithm for each of oneCCL's."""

_VARIABLE = "CCL_SPARSE_ALLREDUCE"


def selected() -> str:
    """What `algorithm=` of weft's call the environment asks for."""
    said = os.environ.get(_VARIABLE, "").strip()
    if not said:
        return "auto"
    name = said if said in ALGORITHMS else ONECCL.get(said, said)
    if name not in ("auto", *ALGORITHMS):
        known = sorted({"auto", *ALGORITHMS, *(a for a, b in ONECCL.items() if b in ALGORITHMS)})
        raise Wrong(f"{_VARIABLE}={said!r} is unknown: use one of {', '.join(known)}")
    return name


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sends: 1-D tensors that share the caller's memory, as many values an index."""

    indices: Tensor
    values: Tensor

    @classmethod
    def of(
        cls,
        ind_buf: Any,
        ind_count: Any,
        val_buf: Any,
        val_count: Any,
        ind_dtype: Any,
        val_dtype: Any,
        names: tuple[str, str] = ("index_dtype", "value_dtype"),
    ) -> Sent:
        """Check the sending half of a call's parameters; `names` are those of its dtypes."""
        rows, values = counted(ind_count, "send_ind_count"), counted(val_count, "send_val_count")
        if values % rows if rows else values:
            raise Wrong(
                f"{values} values do not divide among {rows} indices: send_val_count must be a "
                "multiple of send_ind_count"
            )
        index, dtype = index_dtype_of(ind_dtype, names[0]), dtype_of(val_dtype, names[1])
        return cls(
            seen(ind_buf, rows, index, "send_ind_buf"), seen(val_buf, values, dtype, "send_val_buf")
        )

    def rows(self, attributes: Attributes) -> Rows:
        """The rows that are reduced; reads the memory."""
        count, values = len(self.indices), attributes.before(self.values)
        return Rows(widened(self.indices), values.view(count, -1) if count else values)
