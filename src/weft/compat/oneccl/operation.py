"""An operation: one sparse all-reduce as the face of a generation was asked for it.

Checking raises on no rank before all ranks know: a rank whose arguments are wrong still takes part
in the opening exchange, with a sentence of what is wrong, and then all raise it. Left to the faces
is where a result goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...agree import agree
from ...errors import WeftError
from ...rows import Rows
from ...sparse.api import reduce_now
from ...sparse.call import Allocator
from ...sparse.request import Request
from ...wire import default
from ...wire.base import Wire
from ...wire.worker import Work
from .attributes import Attributes
from .communicator import Communicator
from .concatenate import concatenated
from .dtypes import Wrong
from .memory import Memory, Place, Result, await_device
from .progress import await_all
from .selection import selected
from .sent import Sent
from .unsigned import halves, reduced

__all__ = ["MODES", "Operation", "start"]

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
        return str(trouble).removeprefix(f"rank {wire.named}: ")  # which is said for all
    return f"{type(trouble).__name__}: {trouble}"


def _marks(sent: Sent) -> list[tuple[str, Any]]:
    """What to wait for on an accelerator before its memory is read: the work queued so far."""
    device = sent.values.device
    if device.type == "cpu":
        return []
    return [("the current stream", torch.accelerator.current_stream(device).record_event())]
