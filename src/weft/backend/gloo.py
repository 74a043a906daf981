"""Backend "weft": gloo's collectives, with those served by weft that gloo lacks or is slow at.

Sparse `all_reduce`, `all_gather` into a list (of equal sizes or not) and `reduce_scatter` of a list
go over weft's wire for the group; all else goes to the gloo group inside. Which of the two serves a
call depends on the kind of call alone, never on one rank's sizes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..sparse.api import reduce_now
from ..sparse.request import Request
from ..wire import process_group
from ..wire.base import Wire
from . import collectives
from .arguments import PythonGroup, listed, nested, op_of
from .work import Ended, Queued, started

__all__ = ["WeftGroup", "sparse_all_reduce"]


class WeftGroup(PythonGroup):  # type: ignore[misc]  # see there
    """One rank's end of a group of backend "weft"."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)  # which serves all that is not overridden here
        self._wire: Wire | None = None

    def getBackendName(self) -> str:  # C++ asks by this name
        return "weft"

    @property
    def wire(self) -> Wire:
        """The group's wire, that of `weft.sparse_all_reduce(group=...)` too.

        The first call that needs it makes it, collectively.
        """
        self._wire = process_group.of_group(self)
        return self._wire

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        given = listed(tensors)
        if all(tensor.layout == torch.strided for tensor in given):
            return self._gloo.allreduce(given, *([] if opts is None else [opts]))
        return sparse_all_reduce(self.wire, given, opts)

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

    def shutdown(self) -> None:
        """Leave: the peers learn that this is no death. Twice is fine."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._gloo.shutdown()


def sparse_all_reduce(wire: Wire, tensors: list[Tensor], opts: Any) -> Ended | Queued:
    """Reduce sparse tensors over all ranks, each in place: it becomes the coalesced result."""
    op = op_of(opts)

    def job() -> list[Tensor]:
        for tensor in tensors:
            # entries of one index are its summands, which only a sum may take one by one
            given = tensor if op in ("sum", "avg") else tensor.coalesce()
            result, _ = reduce_now(wire, Request.of(given, op, "auto", None, None))
            tensor.data = result  # the caller's tensor takes over the memory of the result
        return tensors

    return started(wire, "all_reduce", job, opts)
