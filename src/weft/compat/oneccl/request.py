"""The first generation: the result goes to buffers of the caller's, and a request tracks the call.

Source: "Sparse Collective Operations" in the documentation of oneCCL before its first release, then
named `iccl`.

Use it if you know a bound of the result's size. The result has the union of all ranks' indices, so
it may need more memory than what one rank sends. The document asks for receive buffers of the size
of the send buffers; here they may be larger. In `event` an allocation callback is told the size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft import WeftError

from .buffers import check_apart, written
from .callback import Attributes
from .operation import Event, Operation, Writes, sending, start

__all__ = ["Attributes", "Request", "sparse_allreduce"]

Request = Event
"""What the call returns."""


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
    """Reduce the rows of all ranks into buffers of the caller's; return at once. Collective.

    `weft.compat.oneccl` says what a buffer is.

    Args:
        send_ind_buf: the indices of this rank's rows, in any order; they may repeat. None if there
            are none.
        send_ind_count: the number of indices.
        send_val_buf: the values, one row after the other; None if there are none.
        send_val_count: the number of values: `send_ind_count` times the length of a row, which is
            the same on every rank.
        recv_ind_buf: *out*: weft writes the indices of the result there, ascending, each once. It
            must have room for them.
        recv_ind_count: *out*: the number of indices; a buffer of one int64, or None.
        recv_val_buf: *out*: weft writes the reduced values there. It may be `send_val_buf`.
        recv_val_count: *out*: the number of values; a buffer of one int64, or None.
        index_dtype: of both index buffers.
        value_dtype: of both value buffers: any that weft reduces.
        reduction: "sum", "prod", "min", "max", another of weft's, a ReduceOp, or a function as
            `weft.sparse_all_reduce` takes it.
        attributes: None, or attributes without a callback: the document names none.
        comm: an `event.Communicator`, or what weft takes as `group=`; None: the default group.

    Returns:
        A `Request`, with `wait()` and `test()`.

    Raises:
        WeftError: from the call or from `wait()`, on every rank: an argument of some rank is wrong
            or differs from the others', or the result does not fit into some rank's buffers. No
            rank's buffers were written then.
        WireError: from `wait()`: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import numpy as np, weft
        >>> indices, values = np.array([7, 2, 7]), np.array([1.0, 2.0, 4.0], np.float32)
        >>> found, sums = np.empty(3, np.int64), np.empty(3, np.float32)
        >>> counts = np.zeros(1, np.int64), np.zeros(1, np.int64)
        >>> with weft.init():  # alone: a group of one
        ...     request = sparse_allreduce(
        ...         *(indices, 3, values, 3, found, counts[0], sums, counts[1]),
        ...         *("int64", "float32", "sum"),
        ...     )
        ...     request.wait()
        >>> found[: counts[0].item()].tolist(), sums[: counts[1].item()].tolist()
        ([2, 7], [2.0, 5.0])
    """

    def prepare() -> Operation:
        if not isinstance(attributes, Attributes | None):
            raise WeftError(f"attributes is a {type(attributes).__name__}: pass Attributes or None")
        if attributes is not None and attributes.sparse_allreduce_completion_fn is not None:
            raise WeftError(
                "attributes has a completion_fn, which nobody would call here: pass none, or call "
                "callback.sparse_allreduce"
            )
        sent = sending(
            send_ind_buf,
            send_ind_count,
            send_val_buf,
            send_val_count,
            index_dtype=index_dtype,
            value_dtype=value_dtype,
        )
        found = written(recv_ind_buf, None, sent[0].dtype, "recv_ind_buf")
        sums = written(recv_val_buf, None, sent[1].dtype, "recv_val_buf")
        counts = _count(recv_ind_count, "recv_ind_count"), _count(recv_val_count, "recv_val_count")
        check_apart("the buffers for results", found, sums, *counts)

        def take(indices: Tensor, values: Tensor) -> Writes:
            if found.numel() < indices.numel() or sums.numel() < values.numel():
                raise WeftError(
                    f"recv_ind_buf holds {found.numel()} elements and recv_val_buf "
                    f"{sums.numel()}, the result has {indices.numel()} indices and "
                    f"{values.numel()} values: pass buffers of that size"
                )
            writes = [(found, indices), (sums, values)]
            for count, part in zip(counts, (indices, values), strict=True):
                if count is not None:
                    writes.append((count, torch.tensor([part.numel()], device="cpu")))
            return writes

        return Operation(sent, reduction, take)

    return start(comm, prepare)


def _count(buffer: Any, name: str) -> Tensor | None:
    return None if buffer is None else written(buffer, 1, torch.int64, name)
