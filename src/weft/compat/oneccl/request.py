"""The first generation: the result goes to buffers of the caller's, and a request tracks the call.

Source: "Sparse Collective Operations" in the documentation of oneCCL before its first release, then
named `iccl`.

Use it if you know a bound of the result's size. The result has the union of all ranks' indices, so
it may need more memory than what one rank sends. The document asks for receive buffers of the size
of the send buffers; here they may be larger. In `event` an allocation callback is told the size.
"""

from __future__ import annotations

import copy
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
    """A call that may still be running: an `Event` that also knows the size of the result.

    Attributes:
        recv_ind_count: the number of elements that weft wrote to `recv_ind_buf`; None until the
            call has succeeded.
        recv_val_count: the same of `recv_val_buf`.
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
    """Reduce the rows of all ranks into buffers of the caller's; return at once. Collective.

    `weft.compat.oneccl` says what a buffer is, and on which rank an error is raised.

    Args:
        send_ind_buf: the indices of this rank's rows, in any order; they may repeat. None if there
            are none.
        send_ind_count: the number of indices.
        send_val_buf: the values, one row after the other; None if there are none.
        send_val_count: the number of values: `send_ind_count` times the length of a row, which is
            the same on every rank.
        recv_ind_buf: *out*: weft writes the indices of the result there, ascending, each once. It
            must have room for them. An address stands for `send_ind_count` elements, an `Address`
            for as many as it says.
        recv_ind_count: *out*: the number of indices; a buffer of one integer, or None.
        recv_val_buf: *out*: weft writes the reduced values there. It may be `send_val_buf`. An
            address stands for `send_val_count` elements.
        recv_val_count: *out*: the number of values; a buffer of one integer, or None.
        index_dtype: of both index buffers: int8 to int64, uint8 to uint64.
        value_dtype: of both value buffers: any that weft reduces, and uint64.
        reduction: "sum", "prod", "min", "max", another of weft's, a ReduceOp, "custom" with the
            attributes' `reduction_fn`, or a function as `weft.sparse_all_reduce` takes it.
        attributes: settings of the call; None: the default ones.
        comm: a `Communicator`, or what weft takes as `group=`; None: the default group.

    Returns:
        A `Request`, with `wait()`, `test()` and the two counts.

    Raises:
        WeftError: from the call or from `wait()`, on every rank: an argument of some rank is wrong
            or differs from the others', or the result does not fit into some rank's buffers. No
            rank's buffers were written then.
        WireError: from `wait()`: a peer or a link failed; names the culprit. The group is lost.

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
        asked = Attributes() if attributes is None else copy.copy(attributes)
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
    """The `finish` of an operation that checks the buffers, and then writes the result to them."""

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
