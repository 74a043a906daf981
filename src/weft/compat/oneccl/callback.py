"""The second generation: the result goes to a completion callback in the call attributes.

Source: "Sparse collective operations" in the documentation of oneCCL's beta releases.

Use it for code that was written for those releases. New code should call
`weft.sparse_all_reduce`, which returns its result.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft import WeftError

from .operation import Event, Operation, Writes, check_function, described, sending, start

__all__ = [
    "Attributes",
    "FnContext",
    "Request",
    "Status",
    "ccl_datatype_t",
    "ccl_fn_context_t",
    "ccl_status_success",
    "ccl_status_t",
    "sparse_allreduce",
]

Request = Event
"""What the call returns."""


class Status(enum.IntEnum):
    """What a callback returns where all went well; it may also return nothing."""

    success = 0


@dataclass(frozen=True, slots=True)
class FnContext:
    """What a callback is told about its call.

    Attributes:
        match_id: that of the attributes.
    """

    match_id: str = ""


ccl_status_t = Status
"""The document's name of `Status`."""

ccl_status_success = Status.success
"""The document's name of `Status.success`."""

ccl_fn_context_t = FnContext
"""The document's name of `FnContext`."""

ccl_datatype_t = torch.dtype
"""The document's name of the type of what a callback gets as a dtype."""


@dataclass(slots=True, kw_only=True)
class Attributes:
    """Collective call attributes. Each may be set after they were made; a call keeps what it found.

    weft runs the callback on a thread of its own, before `wait()` returns. It must not call weft on
    the same group.

    Attributes:
        sparse_allreduce_completion_fn: `(indices_buf, indices_count, indices_dtype, values_buf,
            values_count, values_dtype, fn_ctx, user_ctx) -> status`; required. The buffers are 1-D
            tensors, on the device of the values that were sent. They are temporary: copy what you
            keep. `fn_ctx` is a `FnContext`.
        sparse_allreduce_completion_ctx: any object; passed as `user_ctx`.
        match_id: a name of the call; passed in `fn_ctx`.

    Example:
        >>> Attributes(sparse_allreduce_completion_fn=print).match_id
        ''
    """

    sparse_allreduce_completion_fn: Callable[..., Any] | None = None
    sparse_allreduce_completion_ctx: Any = None
    match_id: str = ""


_NAME = "sparse_allreduce_completion_fn"


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
) -> Request:
    """Reduce the rows of all ranks and call a callback with the result; return at once. Collective.

    `weft.compat.oneccl` says what a buffer is.

    Args:
        send_ind_buf: the indices of this rank's rows, in any order; they may repeat. None if there
            are none.
        send_ind_count: the number of indices.
        send_val_buf: the values, one row after the other; None if there are none.
        send_val_count: the number of values: `send_ind_count` times the length of a row, which is
            the same on every rank.
        recv_ind_buf: ignored, as in the document; so are `recv_ind_count`, `recv_val_buf` and
            `recv_val_count`.
        index_dtype: of the indices.
        value_dtype: of the values: any that weft reduces.
        reduction: "sum", "prod", "min", "max", another of weft's, a ReduceOp, or a function as
            `weft.sparse_all_reduce` takes it.
        attributes: the callback; required, although it has a default.
        comm: an `event.Communicator`, or what weft takes as `group=`; None: the default group.

    Returns:
        A `Request`, with `wait()` and `test()`.

    Raises:
        WeftError: from the call or from `wait()`, on every rank: an argument of some rank is wrong
            or differs from the others'; a callback raised, or returned a status other than success.
        WireError: from `wait()`: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> def keep(indices, indices_count, indices_dtype, values, *rest):
        ...     fn_ctx, user_ctx = rest[-2:]
        ...     user_ctx += indices.tolist(), values.tolist()
        ...     return ccl_status_success
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
        complete = asked.sparse_allreduce_completion_fn
        if complete is None:
            raise WeftError(f"attributes has no {_NAME}: the result goes there, so set it")
        check_function(_NAME, complete)

        def take(indices: Tensor, values: Tensor) -> Writes:
            contexts = FnContext(asked.match_id), asked.sparse_allreduce_completion_ctx
            status = complete(*described(indices, values), *contexts)
            if status is None or (isinstance(status, int) and status == Status.success):
                return []
            raise WeftError(
                f"{_NAME} returned status {status!r:.60}: return Status.success, or nothing"
            )

        sent = sending(
            send_ind_buf,
            send_ind_count,
            send_val_buf,
            send_val_count,
            index_dtype=index_dtype,
            value_dtype=value_dtype,
        )
        return Operation(sent, reduction, take)

    return start(comm, prepare)
