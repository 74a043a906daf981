"""The third generation: a completion or an allocation callback, a communicator, an event.

Source: "Sparse collective operations" in the documentation of oneCCL 2021.1 to 2021.3,
`ccl::preview`.

Prefer it to the other two: an allocation callback is told the size of the result and returns the
memory for it, so no buffer is too small.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft import WeftError

from ..arguments import group_of
from .buffers import check_apart, written
from .operation import (
    Communicator,
    Event,
    Operation,
    Result,
    Writes,
    check_function,
    described,
    sending,
    start,
)

__all__ = [
    "Communicator",
    "Event",
    "SparseAllreduceAttr",
    "create_communicator",
    "create_sparse_allreduce_attr",
    "default_sparse_allreduce_attr",
    "sparse_allreduce",
]


@dataclass(slots=True)
class SparseAllreduceAttr:
    """Attributes of a call. Exactly one of the two callbacks must be set; the call checks that.

    Each may be set after they were made. A call keeps those that it found: a change after the call
    does not affect it.

    weft runs the callback on a thread of its own, before `wait()` returns. It must not call weft on
    the same group.

    Attributes:
        completion_fn: `(idx_buf, idx_count, idx_dtype, val_buf, val_count, val_dtype, ctx)`. It is
            called with the result, in 1-D tensors on the device of the values that were sent. They
            are temporary: copy what you keep.
        alloc_fn: `(idx_count, idx_dtype, val_count, val_dtype, ctx) -> (idx_buf, val_buf)`. It is
            called with the size of the result, and returns two buffers, to which weft copies it.
        fn_ctx: any object; passed as `ctx`.

    Example:
        >>> attr = create_sparse_allreduce_attr()
        >>> attr.completion_fn = print
    """

    completion_fn: Callable[..., Any] | None = None
    alloc_fn: Callable[..., Any] | None = None
    fn_ctx: Any = None


create_sparse_allreduce_attr = SparseAllreduceAttr
"""oneCCL's function that makes attributes."""

default_sparse_allreduce_attr = SparseAllreduceAttr()
"""The document's default of `attr`. It has no callback, so a call without `attr` is refused."""


def create_communicator(group: Any = None) -> Communicator:
    """The communicator of a group, as `group=` of weft's calls takes it; None: the default group.

    Example:
        >>> import weft
        >>> with weft.init():  # alone: a group of one
        ...     comm = create_communicator()
        ...     comm.rank(), comm.size()
        (0, 1)
    """
    return Communicator(group_of(group))


def sparse_allreduce(
    send_ind_buf: Any,
    send_ind_count: int,
    send_val_buf: Any,
    send_val_count: int,
    recv_ind_buf: Any,
    recv_ind_count: Any,
    recv_val_buf: Any,
    recv_val_count: Any,
    ind_dtype: Any,
    val_dtype: Any,
    rtype: Any,
    comm: Any = None,
    stream: Any = None,
    attr: SparseAllreduceAttr = default_sparse_allreduce_attr,
    deps: Sequence[Event] | Mapping[Any, Any] = (),
) -> Event:
    """Reduce the rows of all ranks and pass the result to a callback; return at once. Collective.

    `weft.compat.oneccl` says what a buffer is.

    Args:
        send_ind_buf: the indices of this rank's rows, in any order; they may repeat. None if there
            are none.
        send_ind_count: the number of indices.
        send_val_buf: the values, one row after the other; None if there are none.
        send_val_count: the number of values: `send_ind_count` times the length of a row, which is
            the same on every rank.
        recv_ind_buf: unused, as in the document; so are `recv_ind_count`, `recv_val_buf` and
            `recv_val_count`.
        ind_dtype: of the indices.
        val_dtype: of the values: any that weft reduces.
        rtype: "sum", "prod", "min", "max", another of weft's, a ReduceOp, or a function as
            `weft.sparse_all_reduce` takes it.
        comm: a `Communicator`, or what weft takes as `group=`; None: the default group.
        stream: None, or a stream of an accelerator, which the call brings to its end. It does so
            with the caller's current stream, too, if the values are on an accelerator.
        attr: the callback and its context; required, although it has a default.
        deps: a list of events; `{}`, the document's default, is none. weft reads the buffers when
            all of them have ended.

    Returns:
        An `Event`, with `wait()` and `test()`.

    Raises:
        WeftError: from the call or from `wait()`, on every rank: an argument of some rank is wrong
            or differs from the others', a callback raised, or one of `deps` failed.
        WireError: from `wait()`: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> def allocate(idx_count, idx_dtype, val_count, val_dtype, ctx):
        ...     ctx["indices"] = torch.empty(idx_count, dtype=idx_dtype)
        ...     ctx["values"] = torch.empty(val_count, dtype=val_dtype)
        ...     return ctx["indices"], ctx["values"]
        >>> result, unused = {}, [None] * 4
        >>> attr = create_sparse_allreduce_attr(alloc_fn=allocate, fn_ctx=result)
        >>> sent = torch.tensor([7, 2, 7]), 3, torch.tensor([1.0, 2.0, 4.0]), 3
        >>> dtypes = torch.int64, torch.float32
        >>> with weft.init():  # alone: a group of one
        ...     comm = create_communicator()
        ...     sparse_allreduce(*sent, *unused, *dtypes, "sum", comm, None, attr).wait()
        >>> result
        {'indices': tensor([2, 7]), 'values': tensor([2., 5.])}
    """

    def prepare() -> Operation:
        asked = _checked(attr)
        events = _events(deps)
        if stream is not None:
            if not hasattr(stream, "synchronize"):
                raise WeftError(
                    f"stream is a {type(stream).__name__}: pass a torch.Stream, or None"
                )
            stream.synchronize()
        sent = sending(
            send_ind_buf,
            send_ind_count,
            send_val_buf,
            send_val_count,
            ind_dtype=ind_dtype,
            val_dtype=val_dtype,
        )

        def take(*result: Tensor) -> Writes:
            if asked.completion_fn is None:
                return [*zip(_allocated(asked, *result), result, strict=True)]
            asked.completion_fn(*described(*result), asked.fn_ctx)
            return []

        return Operation(sent, rtype, take, events)

    return start(comm, prepare)


def _checked(attr: object) -> SparseAllreduceAttr:
    """A copy of a caller's attributes.

    Raises:
        WeftError: they are none, or do not have one callback.
    """
    if not isinstance(attr, SparseAllreduceAttr):
        raise WeftError(f"attr is a {type(attr).__name__}: make it by create_sparse_allreduce_attr")
    asked = copy.copy(attr)
    if (asked.completion_fn is None) == (asked.alloc_fn is None):
        how = "neither completion_fn nor" if asked.alloc_fn is None else "both completion_fn and"
        raise WeftError(f"attr has {how} alloc_fn: results go to one of them, so set one")
    if asked.completion_fn is None:
        check_function("alloc_fn", asked.alloc_fn)
    else:
        check_function("completion_fn", asked.completion_fn)
    return asked


def _events(deps: Any) -> Sequence[Event]:
    """What a call depends on.

    Raises:
        WeftError: it is no list of events.
    """
    if isinstance(deps, dict) and not deps:
        return ()
    if not isinstance(deps, list | tuple):
        raise WeftError(f"deps is a {type(deps).__name__}: pass a list of events")
    for number, event in enumerate(deps):
        if not isinstance(event, Event):
            raise WeftError(
                f"deps[{number}] is a {type(event).__name__}: pass what sparse_allreduce returned"
            )
    return tuple(deps)


def _allocated(asked: SparseAllreduceAttr, indices: Tensor, values: Tensor) -> Result:
    """The caller's memory for a result.

    Raises:
        WeftError: the allocation callback returned no such memory.
    """
    assert asked.alloc_fn is not None
    sizes = indices.numel(), indices.dtype, values.numel(), values.dtype
    made = asked.alloc_fn(*sizes, asked.fn_ctx)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise WeftError(f"alloc_fn returned a {type(made).__name__}, not two buffers")
    place = written(made[0], indices.numel(), indices.dtype, "alloc_fn's idx_buf")
    room = written(made[1], values.numel(), values.dtype, "alloc_fn's val_buf")
    check_apart("alloc_fn's idx_buf and its val_buf", place, room)
    return place, room
