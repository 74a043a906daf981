"""The three ways to sum a table's sparse gradient over the ranks: weft's, and PyTorch's two.

This is the one file of the command line that calls `torch.distributed` itself: the ways that weft
is compared with are PyTorch's own calls. All three start their sum while the backward pass goes
on and are waited for when the update needs it; all give the mean over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft.wire.base import Wire

from .record import Reduction

__all__ = ["START", "Started", "stop_together"]


class Started(Protocol):
    """A sum under way.

    Attributes:
        began: when it was started, by `time.perf_counter`.
        ended: when it was done; set once it was waited for.
        reduction: weft's own figures, once it was waited for; None for the other ways.
    """

    began: float
    ended: float
    reduction: Reduction | None

    def wait(self) -> Tensor:
        """The mean gradient; a sparse or a dense tensor, as the way has it."""


class Weft:
    """weft.sparse_all_reduce, asynchronous."""

    def __init__(self, gradient: Tensor, wire: Wire, buffer: Tensor | None) -> None:
        self.began = self.ended = time.perf_counter()
        self.reduction: Reduction | None = None
        self._work = weft.sparse_all_reduce(gradient, op="avg", async_op=True)
        # Calls take turns, so what runs next in the queue finds the record of this one.
        self._record = wire.worker.submit("record", _record)

    def wait(self) -> Tensor:
        gradient: Tensor = self._work.wait()
        self.reduction, self.ended = self._record.wait()
        return gradient


def _record() -> tuple[Reduction, float]:
    now = time.perf_counter()
    call = weft.sparse.last_call()
    assert call is not None  # it runs right after one
    reduction = Reduction(
        algorithm=call.algorithm,
        rows=call.rows,
        total=call.total,
        union=call.union,
        messages=call.messages,
        sent=call.sent_bytes,
        bound=call.bound_bytes,
    )
    return reduction, now


class Torch:
    """torch.distributed.all_reduce, asynchronous, of the COO gradient or of a dense tensor."""

    reduction: Reduction | None = None

    def __init__(self, tensor: Tensor, wire: Wire) -> None:
        self.began = time.perf_counter()
        self.ended = float("inf")
        self._tensor, self._size = tensor, wire.size
        work: Any = dist.all_reduce(tensor, async_op=True)
        work.get_future().then(self._stamp)
        self._work = work

    def _stamp(self, _: object) -> None:
        self.ended = min(self.ended, time.perf_counter())

    def wait(self) -> Tensor:
        self._work.wait()
        self.ended = min(self.ended, time.perf_counter())
        return self._tensor.div_(self._size)


def _sparse(gradient: Tensor, wire: Wire, buffer: Tensor | None) -> Started:
    return Torch(gradient, wire)


def _dense(gradient: Tensor, wire: Wire, buffer: Tensor | None) -> Started:
    assert buffer is not None  # kept from step to step: fresh pages would make this way slower
    buffer.zero_().index_add_(0, gradient._indices()[0], gradient._values())
    return Torch(buffer, wire)


START: dict[str, Callable[[Tensor, Wire, Tensor | None], Started]] = {
    "weft": Weft,
    "torch": _sparse,
    "dense": _dense,
}
"""By way: start summing a sparse gradient, given a table-sized buffer where the way is dense."""


def stop_together(wish: bool) -> bool:
    """Whether rank 0 wishes to stop, told to all: they must stop at the same step."""
    flag = torch.tensor([wish], dtype=torch.int32)
    dist.broadcast(flag, 0)
    return bool(flag.item())
