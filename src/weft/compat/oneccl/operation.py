"""An operation: a sparse all-reduce with the arguments of one of the three generations.

All of it runs in one turn on the group's worker: it waits for what it depends on, calls weft's own
function and passes on the result. An error on one rank is raised on all: an error before the call,
in it, or from the function that takes the result. A generation only says where the result goes.

weft's own call would not notice if ranks had different index dtypes or `match_id`s. So, where these
matter, the ranks compare them first, in one more small exchange.

uint64 indices from 2^63 on do not fit weft's int64. Their rows are reduced in a call of their own,
with 2^63 subtracted from the indices. Their result follows that of the lower rows, so the indices
are in the order of unsigned numbers.

uint64 values are viewed as int64, which has the same sums and products, bit by bit. For a minimum
or a maximum their top bit is flipped, so that int64 has the same order.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import Group, WeftError, Work

from ..arguments import group_of, tell
from .attributes import Attributes
from .buffers import counted, distinct, dtype_of, index_dtype_of, seen, widened
from .communicator import Communicator
from .progress import await_all

_SOONER = 0.75  # fraction of the group's timeout: after a longer wait others would time out first
_HALF = torch.iinfo(torch.int64)

Result = tuple[Tensor, Tensor]
"""Indices and values, 1-D, in the caller's dtypes."""

Rows = tuple[Tensor, Tensor]
"""Indices in a dtype of weft's, and values `[k, row]`, as weft's calls take them."""

Place = Callable[[int, int], Result]
"""(number of indices, number of values) -> memory for them, 1-D, in the caller's dtypes."""

Finish = Callable[[Tensor, Tensor], Callable[[], None] | None]
"""Takes a result. If it raises on one rank, all ranks raise. If it raised on none, each rank calls
what it returned."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A call whose arguments passed all checks that need not read its buffers.

    Attributes:
        sent: what this rank sends.
        reduction: as the caller gave it.
        finish: takes the result.
        attributes: of the call.
        place: gives the caller's memory for the result; None: weft allocates it.
        mode: one of `attributes.MODES`. "keep_precision" sends half precision in float32 and rounds
            the result, once; "regular" also rounds each rank's sum of an index before it sends it.
            "disable" reduces nothing: the result has the rows of all ranks, one rank after the
            other.
        after: (name, object) of what must end before the buffers are read.
    """

    sent: Result
    reduction: Any
    finish: Finish
    attributes: Attributes = field(default_factory=Attributes)
    place: Place | None = None
    mode: str = "regular"
    after: Sequence[tuple[str, Any]] = ()

    @property
    def unsigned(self) -> bool:
        """Whether the values are uint64, which weft gets as int64."""
        return self.sent[1].dtype == torch.uint64

    @property
    def flip(self) -> int:
        """The mask that is XORed to uint64 values so that int64 orders them alike; 0: no need."""
        ordering = "min", "max", dist.ReduceOp.MIN, dist.ReduceOp.MAX
        return _HALF.min if any(self.reduction == each for each in ordering) else 0

    def op(self) -> Any:
        """The `op=` of weft's call."""
        op = self.attributes.op(self.reduction)
        named = isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType)  # which can be called, too
        if not self.unsigned or named or not callable(op):
            return op

        @functools.wraps(op)  # ranks compare their reductions by name
        def combine(left: Tensor, right: Tensor) -> Tensor:
            made: Tensor = op(left.view(torch.uint64), right.view(torch.uint64))
            return made.view(torch.int64)

        return combine

    def rows(self, seconds: float, after: Sequence[tuple[str, Any]]) -> Rows:
        """Wait for `after`, at most so many seconds; return the rows that are reduced."""
        await_all(after, seconds)
        values = self.attributes.before(self.sent[1])
        if self.unsigned:
            values = values.view(torch.int64) ^ self.flip
        indices = _signed(self.sent[0])
        indices = indices.to(widened(indices.dtype))
        return indices, values.view(len(indices), -1) if len(indices) else values


def checked(ind_buf: Any, ind_count: Any, val_buf: Any, val_count: Any, **dtypes: Any) -> Result:
    """The send buffers of a call as tensors that share the caller's memory.

    Args:
        ind_buf, ind_count, val_buf, val_count: as in the documents.
        dtypes: of indices and of values, in that order, by the names of these parameters.

    Raises:
        WeftError: a buffer, a count or a dtype is wrong.
    """
    rows = counted(ind_count, "send_ind_count")
    values = counted(val_count, "send_val_count")
    if values % rows if rows else values:
        raise WeftError(
            f"{values} values do not divide among {rows} indices: send_val_count must be a "
            "multiple of send_ind_count"
        )
    (name, index), (other, value) = dtypes.items()
    index = index_dtype_of(index, name)
    value = dtype_of(value, other)
    indices = seen(ind_buf, rows, index, "send_ind_buf")
    return indices, seen(val_buf, values, value, "send_val_buf")


def described(indices: Tensor, values: Tensor) -> tuple[Any, ...]:
    """The arguments of a completion callback: each buffer with its count and its dtype."""
    return indices, indices.numel(), indices.dtype, values, values.numel(), values.dtype


def allocated(allocate: Callable[..., Any] | None, sent: Result, ctx: Any) -> Place | None:
    """The `place` of an operation that calls an allocation callback and checks what it returns.

    Args:
        allocate: `(idx_count, idx_dtype, val_count, val_dtype, ctx) -> (idx_buf, val_buf)`; None:
            the result is None, too.
        sent: what this rank sends.
        ctx: passed to the callback.
    """
    if allocate is None:
        return None
    index, value = (each.dtype for each in sent)

    def place(idx_count: int, val_count: int) -> Result:
        made = allocate(idx_count, index, val_count, value, ctx)
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise WeftError(f"alloc_fn returned a {type(made).__name__}, not two buffers")
        idx = seen(made[0], idx_count, index, "alloc_fn's idx_buf", write=True)
        val = seen(made[1], val_count, value, "alloc_fn's val_buf", write=True)
        distinct({"alloc_fn's idx_buf": idx, "its val_buf": val})
        return idx, val

    return place


def start(comm: Any, prepare: Callable[[], Operation]) -> Work[Result]:
    """Start an operation among the ranks of `comm`; an error of `prepare` is raised on all ranks.

    Raises:
        WeftError: this rank is not in the group, or its own call is wrong. If the call is
            synchronous, also what `wait()` would raise.
        WireError: from a synchronous call: what `wait()` would raise.
    """
    group = comm.group if isinstance(comm, Communicator) else group_of(comm)
    try:
        operation = prepare()
        operation.attributes.check()
        if operation.unsigned and operation.attributes.prologue_fn is not None:
            raise WeftError("prologue_fn takes no values of torch.uint64: pass them as torch.int64")
        reduce = functools.partial(
            weft.sparse_all_reduce, op=operation.op(), group=group, algorithm=selected()
        )
        after, device = list(operation.after), operation.sent[1].device
        if device.type != "cpu":  # what is queued so far may write what is sent
            stream = torch.accelerator.current_stream(device)
            after.append(("the current stream", stream.record_event()))
    except Exception as error:  # of ours, or of a buffer's that cannot be seen
        tell(error, group)
    work = group.worker.submit(
        "sparse_allreduce", lambda: _run(group, operation, reduce, after), several=True
    )
    if operation.attributes.synchronous:
        work.wait()
    return work


def _run(
    group: Group,
    operation: Operation,
    reduce: Callable[..., Rows],
    after: Sequence[tuple[str, Any]],
) -> Result:
    index, value = (each.dtype for each in operation.sent)
    rows = _agreed(group, operation, lambda: operation.rows(_SOONER * group.timeout, after))
    if operation.mode == "keep_precision" and rows[1].dtype in (torch.float16, torch.bfloat16):
        reduce = functools.partial(reduce, wire_dtype=torch.float32)
    if operation.mode == "disable":
        result = _concatenated(group, rows, index == torch.uint64)
    elif index == torch.uint64:
        result = _reduced(group, reduce, rows)
    else:
        result = reduce(rows)

    def hand_out() -> tuple[Result, Callable[[], None] | None]:
        values = result[1].view(-1)
        if operation.unsigned:
            values = values.bitwise_xor_(operation.flip).view(value)
        indices = result[0].view(index) if index == torch.uint64 else result[0].to(index)
        made = indices, operation.attributes.after(values, value)
        if operation.place is not None:
            made = _copied(made, operation.place)
        await_device(*made)
        return made, operation.finish(*made)

    made, write = weft.attempt(hand_out, group, name="the end of sparse_allreduce")
    if write is not None:
        write()
    return made


def _agreed(group: Group, operation: Operation, rows: Callable[[], Rows]) -> Rows:
    """The rows of this rank. If one rank has an error, or ranks differ, all ranks raise it."""
    index, name = operation.sent[0].dtype, operation.attributes.match_id
    if name or index != widened(index) or operation.unsigned:
        named = f" with match_id={name!r}" if name else ""
        unsigned = " of torch.uint64 values" if operation.unsigned else ""
        what = f"sparse_allreduce{unsigned} of {index} indices{named}"
        return weft.attempt(rows, group, name=what)
    try:
        return rows()
    except Exception as error:
        tell(error, group)


def await_device(*tensors: Tensor) -> None:
    """Wait until writes to these tensors, on accelerators, are done."""
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        torch.accelerator.synchronize(device)


def _copied(made: Result, place: Place) -> Result:
    """The result in the memory of the caller's."""
    taken = place(made[0].numel(), made[1].numel())
    for memory, part in zip(taken, made, strict=True):
        memory.copy_(part)
    return taken


def _signed(tensor: Tensor) -> Tensor:
    """A view of uint64 memory as int64; any other tensor itself."""
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor


def _reduced(group: Group, reduce: Callable[..., Rows], rows: Rows) -> Rows:
    """Reduce rows whose uint64 indices are viewed as int64; the result is in unsigned order."""
    indices, values = rows
    upper = indices < 0
    above, their_values = reduce((indices[upper] & _HALF.max, values[upper]))
    if not len(above):
        return reduce(rows)
    below = indices[~upper], values[~upper]
    if not len(below[0]):  # perhaps nobody has such rows, and nobody says what they look like
        below = below[0], values.new_empty((0, *their_values.shape[1:]))
    lower = reduce(below)
    # neither call could compare the row shapes of the two halves
    if len(lower[0]) and lower[1].shape[1:] != their_values.shape[1:]:
        weft.attempt(lambda: _check_width(values, lower[1]), group)
    whole = torch.cat([lower[0], above | _HALF.min])
    return whole, torch.cat([lower[1].view(-1), their_values.view(-1)])


def _check_width(values: Tensor, others: Tensor) -> None:
    if len(values) and values.shape[1:] != others.shape[1:]:
        raise WeftError(
            f"rows have {values[0].numel()} values each, those of other ranks "
            f"{others[0].numel()}: pass rows of one width"
        )


def _concatenated(group: Group, rows: Rows, wide: bool) -> Rows:
    """All ranks' rows in rank order; the top bit of uint64 indices is sent separately."""
    if not wide:
        found: Rows = weft.sparse_all_gather(rows, group)
        return found
    indices, values = rows
    highest = (indices < 0).to(torch.uint8)
    found = weft.sparse_all_gather((indices & _HALF.max, values), group)
    _, bits = weft.sparse_all_gather((torch.zeros_like(indices), highest), group)
    found[0].bitwise_or_(bits.to(found[0]) << 63)
    return found


ONECCL = {
    "allgatherv": "gather",
    "allgather": "gather",
    "ring": "split",
    "mask": "split",
    "basic": "split",
    "size": "split",
}
"""The algorithm of weft for each name of oneCCL's."""

_VARIABLE = "CCL_SPARSE_ALLREDUCE"


def selected() -> str:
    """The `algorithm=` of weft's call, from the environment.

    Raises:
        WeftError: there is no algorithm of that name.
    """
    said = os.environ.get(_VARIABLE, "").strip() or "auto"
    known = {"auto", *weft.sparse.ALGORITHMS}
    name = said if said in known else ONECCL.get(said, said)
    if name not in known:
        known |= {theirs for theirs, ours in ONECCL.items() if ours in known}
        raise WeftError(f"{_VARIABLE}={said!r} is unknown: use one of {', '.join(sorted(known))}")
    return name
