"""The first generation: results go to buffers of the caller's, and a request tracks the call.

The document: "Sparse Collective Operations", of oneCCL before its first release (`iccl`).

Best where the result's size is known to fit. It often does not: the result holds the union of all
ranks' indices, so buffers of the size of what is sent are enough only where the ranks' indices
overlap, or repeat. Larger buffers are welcome, and `event` asks for as much as there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft import WeftError

from . import callback
from .attributes import Attributes, FnContext, Status
from .buffers import distinct, is_address, one_integer, seen
from .operation import Operation, await_device, checked, start
from .progress import Event

__all__ = ["Attributes", "FnContext", "Request", "Status", "sparse_allreduce"]


_ENDS = "recv_ind_buf", "recv_val_buf"
_COUNTS = "recv_ind_count", "recv_val_count"


class Request(Event):
    """One call under way.

    Attributes:
        recv_ind_count: elements that were written to `recv_ind_buf`; None until it is done.
        recv_val_count: elements that were written to `recv_val_buf`; None until it is done.
    """

    __slots__ = ()

    @property
    def recv_ind_count(self) -> int | None:
        return self._count(0)

    @property
    def recv_val_count(self) -> int | None:
        return self._count(1)

    def _count(self, which: int) -> int | None:
        (work,) = self.works
        done = work.is_completed() and work.exception() is None
        return work.result()[which].numel() if done else None


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
    """Reduce the rows of all ranks into buffers; returns at once. See `weft.compat.oneccl`.

    Args:
        send_ind_buf: indices, in any order, repeated or not; None if there are none.
        send_ind_count: how many.
        send_val_buf: values, row after row; None if there are none.
        send_val_count: how many; the same multiple of `send_ind_count` on every rank.
        recv_ind_buf: *out*: the reduced indices, ascending, each once. At least as large as the
            result; an address counts as `send_ind_count` elements, an `Address` as its own.
        recv_ind_count: *out*: how many they are; a buffer of one integer, or None.
        recv_val_buf: *out*: the reduced values. May be `send_val_buf`.
        recv_val_count: *out*: how many they are; a buffer of one integer, or None.
        index_dtype: of both index buffers: int8 to int64, uint8 to uint64.
        value_dtype: of both value buffers: whatever weft reduces.
        reduction: "sum", "prod", "min", "max", another of weft's, a ReduceOp, "custom" with the
            attributes' `reduction_fn`, or a function as `weft.sparse_all_reduce` takes it.
        attributes: what is out of the ordinary.
        comm: a communicator, or whatever weft takes as a group; None: the default group.

    Raises:
        WeftError: here or from `wait()`, on every rank: an argument is wrong or differs from
            the others', or a result does not fit on some rank. Then nothing was written on any.
        WireError: from `wait()`: a peer or a link failed.

    Example:
        >>> import numpy as np, weft
        >>> with weft.init():  # alone: a group of one
        ...     indices, values = np.array([7, 2, 7]), np.array([1.0, 2.0, 4.0], np.float32)
        ...     found, sums = np.empty(3, np.int64), np.empty(3, np.float32)
        ...     request = sparse_allreduce(
        ...         indices, 3, values, 3, found, None, sums, None, "int64", "float", "sum"
        ...     )
        ...     request.wait()
        ...     found[: request.recv_ind_count].tolist(), sums[: request.recv_val_count].tolist()
        ([2, 7], [2.0, 5.0])
    """

    def prepare() -> Operation:
        asked = Attributes() if attributes is None else attributes
        if not isinstance(asked, Attributes):
            raise WeftError(
                f"attributes is a {type(asked).__name__}: pass request.Attributes, or None"
            )
        if isinstance(asked, callback.Attributes):
            raise WeftError(
                "attributes is callback.Attributes, whose completion_fn nobody would call here: "
                "pass request.Attributes, or call callback.sparse_allreduce"
            )
        sent = checked(
            *(send_ind_buf, send_ind_count, send_val_buf, send_val_count),
            index_dtype=index_dtype,
            value_dtype=value_dtype,
        )
        ends = []
        for name, buffer, like in zip(_ENDS, (recv_ind_buf, recv_val_buf), sent, strict=True):
            extent = like.numel() if is_address(buffer) else None
            ends.append(seen(buffer, extent, like.dtype, name, write=True))
        given = zip(_COUNTS, (recv_ind_count, recv_val_count), strict=True)
        counts = [one_integer(buffer, name) for name, buffer in given]
        distinct(dict(zip(_ENDS + _COUNTS, (*ends, *counts), strict=True)))
        return Operation(sent, reduction, _into(ends, counts), asked)

    return Request(start(comm, prepare))


def _into(
    ends: Sequence[Tensor], counts: Sequence[Tensor | None]
) -> Callable[[Tensor, Tensor], Callable[[], None]]:
    """What writes a result to the caller's buffers, once it fits on every rank."""

    def finish(*made: Tensor) -> Callable[[], None]:
        if any(end.numel() < part.numel() for end, part in zip(ends, made, strict=True)):
            raise WeftError(
                f"recv_ind_buf holds {ends[0].numel()} elements and recv_val_buf "
                f"{ends[1].numel()}, the result has {made[0].numel()} indices and "
                f"{made[1].numel()} values: pass buffers of that size"
            )
        for count, part in zip(counts, made, strict=True):
            if count is not None and part.numel() > torch.iinfo(count.dtype).max:
                raise WeftError(f"a count of {count.dtype} cannot be {part.numel()}: pass an int64")

        def write() -> None:
            for end, count, part in zip(ends, counts, made, strict=True):
                end[: part.numel()].copy_(part)
                if count is not None:
                    count.fill_(part.numel())
            await_device(*ends, *(count for count in counts if count is not None))

        return write

    return finish
