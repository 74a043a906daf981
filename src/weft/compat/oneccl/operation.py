"""What the three generations share: a sparse all-reduce whose result a function takes.

All of it runs in one turn on the group's worker. A generation says where the result goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

import weft
from weft import Group, WeftError, Work

from ..arguments import group_of, telling
from .buffers import counted, dtype_of, index_dtype_of, seen

Result = tuple[Tensor, Tensor]
"""Indices and values, 1-D, in the caller's dtypes."""

Writes = Sequence[tuple[Tensor, Tensor]]
"""Places of the caller's, and what is written there."""


class Event:
    """An operation that may still be running: `ccl::request` and `ccl::event`."""

    __slots__ = ("_work",)

    def __init__(self, work: Work[None]) -> None:
        self._work = work

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Wait until the operation has ended.

        Args:
            timeout: seconds, or a timedelta; None: as long as the group's own deadlines allow.

        Raises:
            StillRunning: `timeout` passed first. Nothing is broken: wait again.
            WeftError: the call was wrong on some rank; the same text on every rank.
            WireError: a peer or a link failed; names the culprit. The group is lost.
        """
        self._work.wait(timeout)

    def test(self) -> bool:
        """Whether the operation has ended, with a result or with an error."""
        return self._work.is_completed()


@dataclass(frozen=True, slots=True)
class Communicator:
    """The ranks of an operation: `ccl::communicator`.

    Attributes:
        group: the same as a `weft.Group`, which `group=` of every call of weft takes.
    """

    group: Group

    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.group.rank

    def size(self) -> int:
        """The number of ranks."""
        return self.group.size


@dataclass(frozen=True, slots=True)
class Operation:
    """A call whose arguments passed all checks that need not read its buffers.

    Attributes:
        sent: indices and values of this rank.
        op: the reduction.
        take: is given the result; it returns what to write where. If it raises on one rank, all
            ranks raise, and nothing is written on any.
        deps: what must end before the buffers are read.
    """

    sent: Result
    op: Any
    take: Callable[[Tensor, Tensor], Writes]
    deps: Sequence[Event] = ()


def sending(ind_buf: Any, ind_count: Any, val_buf: Any, val_count: Any, **dtypes: Any) -> Result:
    """The send buffers of a call as tensors that share the caller's memory.

    Args:
        ind_buf, ind_count, val_buf, val_count: as in the documents.
        dtypes: of indices and of values, in that order, by the names of these parameters.

    Raises:
        WeftError: a buffer, a count or a dtype is wrong.
    """
    rows = counted(ind_count, "send_ind_count")
    count = counted(val_count, "send_val_count")
    if count % rows if rows else count:
        raise WeftError(
            f"{count} values do not divide among {rows} indices: send_val_count must be a "
            "multiple of send_ind_count"
        )
    (ind_name, ind_given), (val_name, val_given) = dtypes.items()
    ind_dtype = index_dtype_of(ind_given, ind_name)
    val_dtype = dtype_of(val_given, val_name)
    indices = seen(ind_buf, rows, ind_dtype, "send_ind_buf")
    values = seen(val_buf, count, val_dtype, "send_val_buf")
    if values.device.type != "cpu":  # what is queued there may write what is sent
        torch.accelerator.current_stream(values.device).synchronize()
    return indices, values


def start(comm: Any, prepare: Callable[[], Operation]) -> Event:
    """Start an operation among the ranks of `comm`; an error of `prepare` is raised on all ranks.

    Args:
        comm: a `Communicator`, or what weft takes as `group=`; None: the default group.
        prepare: checks the caller's arguments.

    Raises:
        WeftError: this rank is not in the group, or its own call is wrong.
    """
    group = comm.group if isinstance(comm, Communicator) else group_of(comm)
    with telling(group):
        operation = prepare()
    work = group.worker.submit("sparse_allreduce", lambda: _run(group, operation), several=True)
    return Event(work)


def _run(group: Group, operation: Operation) -> None:
    indices, values = operation.sent
    with telling(group):
        for number, event in enumerate(operation.deps):
            try:
                event.wait()
            except Exception as error:
                text = f"deps[{number}] failed: {type(error).__name__}: {error}"
                raise WeftError(text) from error
    wide = indices if indices.dtype in (torch.int32, torch.int64) else indices.long()
    # a rank without rows does not know how long they are
    rows = values.view(len(wide), -1) if len(wide) else values
    found, sums = weft.sparse_all_reduce((wide, rows), operation.op, group)

    def take() -> Writes:
        narrow = _narrowed(found, indices.dtype)
        _await_device(sums)
        return operation.take(narrow, sums.view(-1))

    writes = weft.attempt(take, group, name="the end of sparse_allreduce")
    for place, part in writes:
        place[: part.numel()].copy_(part)
    _await_device(*(place for place, _ in writes))


def _narrowed(indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Ascending indices in the dtype in which this rank sent its own.

    Raises:
        WeftError: another rank's do not fit.
    """
    if len(indices) and int(indices[-1]) > torch.iinfo(dtype).max:
        raise WeftError(
            f"index {int(indices[-1])} of another rank does not fit {dtype}: pass indices of one "
            "dtype on all ranks"
        )
    return indices.to(dtype)


def _await_device(*tensors: Tensor) -> None:
    """Wait until writes to these tensors, on accelerators, are done."""
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        torch.accelerator.synchronize(device)


def described(indices: Tensor, values: Tensor) -> tuple[Any, ...]:
    """The arguments of a completion callback: each buffer with its count and its dtype."""
    return indices, indices.numel(), indices.dtype, values, values.numel(), values.dtype


def check_function(name: str, function: object) -> None:
    """Raise WeftError unless a callback can be called."""
    if not callable(function):
        raise WeftError(f"{name} is a {type(function).__name__}: pass a function")
