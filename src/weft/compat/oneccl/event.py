"""The third generation: a completion or an allocation callback, a communicator, an event.

Source: "Sparse collective operations" in the documentation of oneCCL 2021.1 to 2021.3,
`ccl::preview`.

Prefer it to the other two: an allocation callback is told the size of the result and returns the
memory for it, so no buffer is too small. In weft's own call that is `out=`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft import WeftError

from .attributes import check_results
from .buffers import dtype_in, is_dtype
from .communicator import Communicator, Kvs, create_communicator, create_kvs, create_main_kvs
from .operation import Operation, allocated, checked, described, start
from .progress import Event, compose

__all__ = [
    "Communicator",
    "Event",
    "Kvs",
    "SparseAllreduceAttr",
    "compose",
    "create_communicator",
    "create_kvs",
    "create_main_kvs",
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
            called with the size of the result, and returns two buffers, to which weft writes it.
        fn_ctx: any object; passed as `ctx`.
        coalesce_mode: "regular": the result has sorted indices, each once. "disable": it has the
            rows of all ranks, one rank after the other, and nothing is reduced. "keep_precision":
            as "regular", but half precision is sent in float32 and rounded once, in the result.

    Example:
        >>> attr = create_sparse_allreduce_attr()
        >>> attr.completion_fn = print
        >>> attr.coalesce_mode
        'regular'
    """

    completion_fn: Callable[..., Any] | None = None
    alloc_fn: Callable[..., Any] | None = None
    fn_ctx: Any = None
    coalesce_mode: str = "regular"


create_sparse_allreduce_attr = SparseAllreduceAttr
"""oneCCL's function that makes attributes."""

default_sparse_allreduce_attr = SparseAllreduceAttr()
"""The document's default of `attr`. It has no callback, so a call without `attr` is refused."""


_BUFFERS = 8  # arguments that all overloads begin with
_TYPED = 5  # what may follow them without dtypes: reduction, communicator, stream, attributes, deps


def _overloaded(function: Callable[..., Event]) -> Callable[..., Event]:
    """A decorator that lets a function of all arguments be called by oneCCL's overloads, too.

    oneCCL's call exists with the two dtypes and, for typed buffers, without them; each of these
    with a stream before the attributes, and without one.
    """

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Event:
        head, tail = given[:_BUFFERS], given[_BUFFERS:]
        if _is_typed(tail, named):
            tail = (None, None, *tail)
        if len(tail) > 4 and isinstance(tail[4], SparseAllreduceAttr):
            tail = (*tail[:4], None, *tail[4:])
        return function(*head, *tail, **named)

    return call


def _is_typed(tail: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the arguments after the buffers begin with the reduction, without dtypes.

    An argument that is a wrong dtype must not be taken for a reduction: the function reports it to
    all ranks.
    """
    if not 1 <= len(tail) <= _TYPED or "rtype" in named or tail[0] is None or is_dtype(tail[0]):
        return False
    return len(tail) == 1 or not (is_dtype(tail[1]) or isinstance(tail[1], str | int | type))


@_overloaded
def sparse_allreduce(
    send_ind_buf: Any,
    send_ind_count: int,
    send_val_buf: Any,
    send_val_count: int,
    recv_ind_buf: Any,
    recv_ind_count: Any,
    recv_val_buf: Any,
    recv_val_count: Any,
    ind_dtype: Any = None,
    val_dtype: Any = None,
    rtype: Any = "sum",
    comm: Any = None,
    stream: Any = None,
    attr: SparseAllreduceAttr = default_sparse_allreduce_attr,
    deps: Sequence[Any] | dict[Any, Any] | None = None,
) -> Event:
    """Reduce the rows of all ranks and pass the result to a callback; return at once. Collective.

    `weft.compat.oneccl` says what a buffer is, and on which rank an error is raised. oneCCL's
    overloads work, too: one leaves out `ind_dtype` and `val_dtype`, and the buffers' own dtypes
    count; another leaves out `stream` before `attr`.

    Args:
        send_ind_buf: the indices of this rank's rows, in any order; they may repeat. None if there
            are none.
        send_ind_count: the number of indices.
        send_val_buf: the values, one row after the other; None if there are none.
        send_val_count: the number of values: `send_ind_count` times the length of a row, which is
            the same on every rank.
        recv_ind_buf: unused, as in the document; so are `recv_ind_count`, `recv_val_buf` and
            `recv_val_count`.
        ind_dtype: of the indices: int8 to int64, uint8 to uint64; None: the buffer's own.
        val_dtype: of the values: any that weft reduces, and uint64; None: the buffer's own.
        rtype: "sum", "prod", "min", "max", another of weft's, a ReduceOp, or a function as
            `weft.sparse_all_reduce` takes it.
        comm: a `Communicator`, or what weft takes as `group=`; None: the default group.
        stream: None, or a stream of an accelerator. weft reads the buffers when the work that is
            queued there is done. It always waits for the work in the caller's current stream.
        attr: the callback, its context, the coalesce mode; required, although it has a default.
        deps: a list of events, or of other objects with `wait()`, `synchronize()` or `result()`;
            None, `{}` (the document's default) or `[]`: none. weft reads the buffers when all of
            them are done. If that takes more than three quarters of the group's timeout, every rank
            raises an error.

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
        >>> indices, values = torch.tensor([7, 2, 7]), torch.tensor([1.0, 2.0, 4.0])
        >>> with weft.init():  # alone: a group of one
        ...     comm = create_communicator()
        ...     sparse_allreduce(indices, 3, values, 3, *unused, "sum", comm, attr=attr).wait()
        >>> result
        {'indices': tensor([2, 7]), 'values': tensor([2., 5.])}
    """

    def prepare() -> Operation:
        if not isinstance(attr, SparseAllreduceAttr):
            raise WeftError(
                f"attr is a {type(attr).__name__}: make it by create_sparse_allreduce_attr"
            )
        asked = copy.copy(attr)
        callbacks = {"completion_fn": asked.completion_fn, "alloc_fn": asked.alloc_fn}
        check_results("attr", asked.coalesce_mode, callbacks)
        if stream is not None and not hasattr(stream, "synchronize"):
            raise WeftError(f"stream is a {type(stream).__name__}: pass a torch.Stream, or None")
        none = deps is None or (isinstance(deps, dict) and not deps)
        events = () if none else deps
        if not isinstance(events, list | tuple):
            raise WeftError(f"deps is a {type(deps).__name__}: pass a list of events")
        index = dtype_in(send_ind_buf, "send_ind_buf") if ind_dtype is None else ind_dtype
        value = dtype_in(send_val_buf, "send_val_buf") if val_dtype is None else val_dtype
        sent = checked(
            *(send_ind_buf, send_ind_count, send_val_buf, send_val_count),
            ind_dtype=index,
            val_dtype=value,
        )
        awaited = [(f"deps[{number}]", event) for number, event in enumerate(events)]
        awaited += [] if stream is None else [("stream", stream)]

        def finish(idx: Tensor, val: Tensor) -> None:
            if asked.completion_fn is not None:
                asked.completion_fn(*described(idx, val), asked.fn_ctx)

        return Operation(
            sent,
            rtype,
            finish,
            place=allocated(asked.alloc_fn, sent, asked.fn_ctx),
            mode=asked.coalesce_mode,
            after=awaited,
        )

    return Event(start(comm, prepare))
