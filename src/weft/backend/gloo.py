"""Backend "weft": every collective over a wire of weft's, messages over gloo.

So a collective gives the same everywhere, on tensors of every dtype, sparse and uneven ones too,
and its errors are the same on every rank. `send` and `recv` go to a gloo group inside, which also
receives from whoever sends.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..sparse.api import list_job, table_job
from ..wire.base import Wire
from .group import PythonGroup, op_of
from .space import unused
from .work import Collective, started

__all__ = ["WeftGroup", "sparse_all_reduce"]


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

    # C++ could find gloo by itself, but would keep the GIL while it starts the call, and gloo's
    # threads take it with the lock held that starting needs: a deadlock, now and then.

    def send(self, *args: Any) -> Any:
        return self._gloo.send(*args)

    def recv(self, *args: Any) -> Any:
        return self._gloo.recv(*args)

    def shutdown(self) -> None:
        super().shutdown()
        self._gloo.shutdown()


def sparse_all_reduce(wire: Wire, tensors: list[Tensor], opts: Any) -> Collective:
    """Reduce sparse tensors over all ranks, each in place: it becomes the coalesced result."""
    _warm()
    op = op_of(opts)

    def job() -> list[Tensor]:
        # entries of one index are its summands, which only a sum may take one by one
        given = [
            tensor if op in ("sum", "avg") or not _in_range(tensor) else tensor.coalesce()
            for tensor in tensors
        ]
        if len(given) == 1:
            results = [table_job(wire, given[0], op, "auto", None, None)()]
        else:
            results = list_job(wire, given, op, "auto", None, None)()
        for tensor, result in zip(tensors, results, strict=True):
            tensor.data = result  # the caller's takes over the memory of the result
        return tensors

    return started(wire, "all_reduce", job, opts)


def _in_range(tensor: Tensor) -> bool:
    """Whether all indices are of the tensor: `coalesce` writes where others point to."""
    sizes = torch.tensor(tensor.shape[: tensor.sparse_dim()], device=tensor.device)[:, None]
    indices = tensor._indices()
    return bool(((indices >= 0) & (indices < sizes)).all())


@functools.cache
def _warm() -> None:
    """Before the first sparse call, make the machine code: nobody's deadline runs yet."""
    kernels.prepare()
