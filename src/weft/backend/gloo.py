"""Backend "weft": gloo's collectives, with those served by weft that gloo lacks or is slow at.

Dense and sparse `all_reduce`, `all_gather` into a list (of equal sizes or not) and `reduce_scatter`
of a list go over weft's wire for the group. So a call gives the same everywhere, also of what gloo
does not take (int16), or rounds at every hop (halves). All else goes to the gloo group inside.
Which of the two serves a call depends on the kind of call, never on one rank's sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..sparse.queued import QueuedCall, run_queued
from ..sparse.request import Request
from ..wire.base import Wire
from . import collectives
from .arguments import listed, nested, op_of
from .group import PythonGroup
from .space import unused
from .work import Ended, Queued, Several, started

__all__ = ["WeftGroup", "sparse_all_reduce"]


def _through(name: str) -> Callable[..., Any]:
    """A method that gloo serves.

    C++ could find gloo by itself, but would keep the GIL while it starts the call, and gloo's
    threads take it with the lock held that starting needs: a deadlock, now and then.
    """

    def method(group: WeftGroup, *args: Any, **options: Any) -> Any:
        return getattr(group._gloo, name)(*args, **options)

    return method


class WeftGroup(PythonGroup):
    """One rank's end of a group of backend "weft".

    Attributes:
        space: the store in which its ranks meet, and no group before it has.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.space = unused(store, rank, size, timeout.total_seconds())
        self._gloo: Any = dist.ProcessGroupGloo(self.space, rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)  # which serves all that is not overridden here

    def getBackendName(self) -> str:  # C++ asks by this name
        return "weft"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        given = listed(tensors)
        if all(tensor.layout == torch.strided for tensor in given):
            return self._dense_all_reduce(given, opts)
        return sparse_all_reduce(self.wire, given, opts)

    def _dense_all_reduce(self, given: list[Tensor], opts: Any) -> Any:
        job = functools.partial(collectives.all_reduce, self.wire, given, op_of(opts))
        return started(self.wire, "all_reduce", job, opts)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        wire, mine, places = self.wire, listed(ins)[0], nested(outs)[0]
        return started(wire, "all_gather", lambda: collectives.all_gather(wire, places, mine), opts)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        wire, out, pieces, op = self.wire, listed(outs)[0], nested(ins)[0], op_of(opts)
        return started(
            wire,
            "reduce_scatter",
            lambda: collectives.reduce_scatter(wire, out, pieces, op),
            opts,
        )

    # All that C++ asks a Python group for; the rest does not pass through Python.

    all_to_all_single = _through("alltoall_base")
    allreduce_coalesced = _through("allreduce_coalesced")
    barrier = _through("barrier")
    broadcast = _through("broadcast")
    recv = _through("recv")
    send = _through("send")

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        pairs, passed = zip(listed(outs), listed(ins), strict=True), [] if opts is None else [opts]
        return Several([self._gloo._allgather_base(*pair, *passed) for pair in pairs], listed(outs))

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        pairs, passed = zip(listed(outs), listed(ins), strict=True), [] if opts is None else [opts]
        return Several(
            [self._gloo._reduce_scatter_base(*pair, *passed) for pair in pairs], listed(outs)
        )

    # the names before torch 2.13
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        super().shutdown()
        self._gloo.shutdown()


def sparse_all_reduce(wire: Wire, tensors: list[Tensor], opts: Any) -> Ended | Queued:
    """Reduce sparse tensors over all ranks, each in place: it becomes the coalesced result.

    Calls that wait for their turn together, as those of DistributedDataParallel do, are served as
    one.
    """
    _warm()
    op = op_of(opts)

    def request_of(tensor: Tensor) -> Request:
        # entries of one index are its summands, which only a sum may take one by one
        one_by_one = op in ("sum", "avg") or not _in_range(tensor)
        return Request.unsorted(tensor if one_by_one else tensor.coalesce(), op, "auto", None)

    blocks = not getattr(opts, "asyncOp", True)
    calls = [QueuedCall(functools.partial(request_of, tensor), blocks) for tensor in tensors]

    def start(served: Callable[[], None], leave: bool) -> Ended | Queued:
        def job() -> list[Tensor]:
            served()
            for tensor, call in zip(tensors, calls, strict=True):
                tensor.data = call.result  # the caller's takes over the memory of the result
            return tensors

        return started(wire, "all_reduce", job, opts, leave=leave)

    return run_queued(wire, calls, start)


def _in_range(tensor: Tensor) -> bool:
    """Whether all indices are of the tensor: `coalesce` writes where others point to."""
    sizes = torch.tensor(tensor.shape[: tensor.sparse_dim()], device=tensor.device)[:, None]
    indices = tensor._indices()
    return bool(((indices >= 0) & (indices < sizes)).all())


@functools.cache
def _warm() -> None:
    """Before the first sparse call, make the machine code: nobody's deadline runs yet."""
    kernels.warm()
