"""The third generation: a completion or an allocation callback, a communicator, an event.

The document: "Sparse collective operations" of oneCCL 2021.1 to 2021.3, `ccl::preview`.

Best of the three: an allocation callback is told the result's size and gives the memory that the
result is written straight to. In weft's own call that is `out=`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft import WeftError

from .attributes import check_results
from .buffers import dtype_in
from .communicator import Communicator, Kvs, create_communicator, create_kvs, create_main_kvs
from .operation import Operation, allocated, checked, described, start
from .overloads import overloaded
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


@dataclass(frozen=True, slots=True)
class SparseAllreduceAttr:
    """Attributes of a call. One callback must be set, and not both: the call checks that.

    Attributes:
        completion_fn: `(idx_buf, idx_count, idx_dtype, val_buf, val_count, val_dtype, ctx)`: called
            with the result, in 1-D tensors on the device of the values that were sent, on a
            thread of weft's, before `wait()` returns. It must not call weft on the same group.
        alloc_fn: `(idx_count, idx_dtype, val_count, val_dtype, ctx) -> (idx_buf, val_buf)`: called
            with the size of the result, returns two buffers to write it to.
        fn_ctx: anything; handed on as `ctx`.
        coalesce_mode: "regular": sorted indices, each once. "disable": the rows of all ranks one
            after the other, unreduced. "keep_precision": as regular, which in weft adds half
            precision in float32.
    """

    completion_fn: Callable[..., Any] | None = None
    alloc_fn: Callable[..., Any] | None = None
    fn_ctx: Any = None
    coalesce_mode: str = "regular"


create_sparse_allreduce_attr = SparseAllreduceAttr
default_sparse_allreduce_attr = SparseAllreduceAttr()  # has no callback: no call can do with it


@overloaded(SparseAllreduceAttr)
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
    deps: Sequence[Any] = (),
) -> Event:
    """Reduce the rows of all ranks; returns at once. See `weft.compat.oneccl`.

    The typed overload is served too: without `ind_dtype` and `val_dtype`, whose places are left
    out, the buffers' own dtypes are taken. So is the one without `stream` before `attr`.

    Args:
        send_ind_buf: indices, in any order, repeated or not; None if there are none.
        send_ind_count: how many.
        send_val_buf: values, row after row; None if there are none.
        send_val_count: how many; the same multiple of `send_ind_count` on every rank.
        recv_ind_buf: unused, and so are recv_ind_count, recv_val_buf and recv_val_count.
        ind_dtype: int8 to int64, uint8 to uint64.
        val_dtype: whatever weft reduces.
        rtype: "sum", "prod", "min", "max", another of weft's, a ReduceOp, or a function as
            `weft.sparse_all_reduce` takes it.
        comm: a communicator, or whatever weft takes as a group; None: the default group.
        stream: a stream of an accelerator, whose work must be done before the buffers are read;
            what the caller's current stream has queued always is.
        attr: the callback, its context, the coalesce mode.
        deps: what is waited for before the buffers are read: events, or what else has a `wait()`;
            for three quarters of the group's timeout, after which all ranks are told.

    Raises:
        WeftError: here or from `wait()`, on every rank: an argument is wrong or differs from the
            others', a callback raised, or what was waited for failed.
        WireError: from `wait()`: a peer or a link failed.

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
        callbacks = {"completion_fn": attr.completion_fn, "alloc_fn": attr.alloc_fn}
        check_results("attr", attr.coalesce_mode, callbacks)
        if stream is not None and not hasattr(stream, "synchronize"):
            raise WeftError(f"stream is a {type(stream).__name__}: pass a torch.Stream, or None")
        if not isinstance(deps, list | tuple):
            raise WeftError(f"deps is a {type(deps).__name__}: pass a list of events")
        index = dtype_in(send_ind_buf, "send_ind_buf") if ind_dtype is None else ind_dtype
        value = dtype_in(send_val_buf, "send_val_buf") if val_dtype is None else val_dtype
        sent = checked(
            *(send_ind_buf, send_ind_count, send_val_buf, send_val_count),
            ind_dtype=index,
            val_dtype=value,
        )
        awaited = [(f"deps[{number}]", event) for number, event in enumerate(deps)]
        awaited += [] if stream is None else [("stream", stream)]

        def finish(idx: Tensor, val: Tensor) -> None:
            if attr.completion_fn is not None:
                attr.completion_fn(*described(idx, val), attr.fn_ctx)

        return Operation(
            sent,
            rtype,
            finish,
            place=allocated(attr.alloc_fn, sent, attr.fn_ctx),
            mode=attr.coalesce_mode,
            after=awaited,
        )

    return Event(start(comm, prepare))
