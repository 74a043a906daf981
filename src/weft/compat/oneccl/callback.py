"""The second generation: the result goes to a completion callback in the call attributes.

Source: "Sparse collective operations" in the documentation of oneCCL's beta releases.

Use it for code that was written for those releases. New code should call
`weft.sparse_all_reduce`, which returns its result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft import WeftError

from . import attributes as common
from .attributes import FnContext, Status, check_results, check_status
from .operation import Operation, allocated, checked, described, start
from .progress import Event

__all__ = [
    "Attributes",
    "FnContext",
    "Status",
    "ccl_datatype_t",
    "ccl_fn_context_t",
    "ccl_status_success",
    "ccl_status_t",
    "sparse_allreduce",
]

_NOT_GIVEN = object()


ccl_status_t = Status
"""The document's name of `Status`."""

ccl_status_success = Status.success
"""The document's name of `Status.success`."""

ccl_fn_context_t = FnContext
"""The document's name of `FnContext`."""

ccl_datatype_t = torch.dtype
"""The document's name of the type of what a callback gets as a dtype."""


@dataclass(slots=True, kw_only=True)
class Attributes(common.Attributes):
    """Collective call attributes: the common ones, and those of `sparse_allreduce`.

    Exactly one of the two callbacks must be set; the call checks that. weft runs it on a thread of
    its own, before `wait()` returns. It must not call weft on the same group.

    Attributes:
        sparse_allreduce_completion_fn: `(indices_buf, indices_count, indices_dtype, values_buf,
            values_count, values_dtype, fn_ctx, user_ctx) -> status`. The buffers are 1-D tensors,
            on the device of the values that were sent. They are temporary: copy what you keep.
            `fn_ctx` is a `FnContext`.
        sparse_allreduce_completion_ctx: any object; passed as `user_ctx`.
        sparse_allreduce_alloc_fn: since beta07: `(indices_count, indices_dtype, values_count,
            values_dtype, fn_ctx) -> (indices_buf, values_buf)`. It is told the size of the result
            and returns two buffers, to which weft writes the result.
        sparse_allreduce_fn_ctx: since beta07: any object, None included; passed to either callback
            as `fn_ctx`. If it is given, the completion callback gets no `user_ctx`.
        sparse_coalesce_mode: since beta07: the `coalesce_mode` of `event.SparseAllreduceAttr`.

    Example:
        >>> Attributes(sparse_allreduce_completion_fn=print, match_id="table").context.match_id
        'table'
    """

    sparse_allreduce_completion_fn: Callable[..., Any] | None = None
    sparse_allreduce_completion_ctx: Any = None
    sparse_allreduce_alloc_fn: Callable[..., Any] | None = None
    sparse_allreduce_fn_ctx: Any = _NOT_GIVEN
    sparse_coalesce_mode: str = "regular"

    @property
    def contexts(self) -> tuple[Any, ...]:
        """What a completion callback is told last; an allocation the first of it."""
        if self.sparse_allreduce_fn_ctx is _NOT_GIVEN:
            return self.context, self.sparse_allreduce_completion_ctx
        return (self.sparse_allreduce_fn_ctx,)


def sparse_allreduce(
    send_ind_buf: Any,
    send_ind_count: int,
    send_val_buf: Any,
    send_val_count: int,
    recv_ind_buf: Any,
    recv_ind_count: Any,
    recv_val_buf: Any,
    recv_val_count: Any,
    index_dtype: Any,
    value_dtype: Any,
    reduction: Any,
    attributes: Attributes | None = None,
    *,
    comm: Any = None,
) -> Event:
    """Reduce the rows of all ranks and call a callback with the result; return at once. Collective.

    `weft.compat.oneccl` says what a buffer is, and on which rank an error is raised.

    Args:
        send_ind_buf: the indices of this rank's rows, in any order; they may repeat. None if there
            are none.
        send_ind_count: the number of indices.
        send_val_buf: the values, one row after the other; None if there are none.
        send_val_count: the number of values: `send_ind_count` times the length of a row, which is
            the same on every rank.
        recv_ind_buf: ignored, as in the document.
        recv_ind_count: ignored.
        recv_val_buf: ignored.
        recv_val_count: ignored.
        index_dtype: of the indices: int8 to int64, uint8 to uint64.
        value_dtype: of the values: any that weft reduces, and uint64.
        reduction: "sum", "prod", "min", "max", another of weft's, a ReduceOp, "custom" with the
            attributes' `reduction_fn`, or a function as `weft.sparse_all_reduce` takes it.
        attributes: the callback, and other settings; required, although it has a default.
        comm: a `Communicator`, or what weft takes as `group=`; None: the default group.

    Returns:
        An `Event`, with `wait()` and `test()`.

    Raises:
        WeftError: from the call or from `wait()`, on every rank: an argument of some rank is wrong
            or differs from the others'; a callback raised, or returned a status other than success.
        WireError: from `wait()`: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> def keep(indices, indices_count, indices_dtype, values, *rest):
        ...     fn_ctx, user_ctx = rest[-2:]
        ...     user_ctx += indices.tolist(), values.tolist()
        ...     return Status.success
        >>> result = []
        >>> asked = Attributes(
        ...     sparse_allreduce_completion_fn=keep, sparse_allreduce_completion_ctx=result
        ... )
        >>> indices, values = torch.tensor([7, 2, 7]), torch.tensor([1.0, 2.0, 4.0])
        >>> unused = [None] * 4
        >>> with weft.init():  # alone: a group of one
        ...     sparse_allreduce(
        ...         indices, 3, values, 3, *unused, torch.int64, torch.float32, "sum", asked
        ...     ).wait()
        >>> result
        [[2, 7], [2.0, 5.0]]
    """

    def prepare() -> Operation:
        if not isinstance(attributes, Attributes):
            what = "None" if attributes is None else f"a {type(attributes).__name__}"
            raise WeftError(f"attributes is {what}: pass callback.Attributes with a completion_fn")
        asked = copy.copy(attributes)
        names = "sparse_allreduce_completion_fn", "sparse_allreduce_alloc_fn"
        callbacks = {name: getattr(asked, name) for name in names}
        check_results("attributes", asked.sparse_coalesce_mode, callbacks)
        complete, allocate = callbacks.values()

        def finish(indices: Tensor, values: Tensor) -> None:
            if complete is not None:
                status = complete(*described(indices, values), *asked.contexts)
                check_status(status, names[0])

        sent = checked(
            *(send_ind_buf, send_ind_count, send_val_buf, send_val_count),
            index_dtype=index_dtype,
            value_dtype=value_dtype,
        )
        place = allocated(allocate, sent, asked.contexts[0])
        return Operation(sent, reduction, finish, asked, place, asked.sparse_coalesce_mode)

    return Event(start(comm, prepare))
