"""Backend "weft_mpi": every collective of torch.distributed over MPI, on CPU tensors of any dtype.

What `weft.init(backend="mpi")` sets up. Collectives take turns in the queue of the group's wire, on
the worker's thread unless the caller is going to wait anyway; messages of `send` and `recv` have a
wire of their own, on which many may be under way.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WeftError
from ..wire import mpi, process_group
from ..wire.base import Wire, is_plain, plain
from ..wire.torchdist import TorchWire
from . import collectives
from .arguments import listed, nested, op_of, root_of
from .gloo import sparse_all_reduce
from .group import PythonGroup
from .work import Ended, Posted, Queued, started

__all__ = ["TRANSPORT", "MpiGroup"]

TRANSPORT = process_group.Transport("mpi", TorchWire, mpi.join)


class MpiGroup(PythonGroup):
    """One rank's end of a group of backend "weft_mpi".

    Attributes:
        timeout: seconds that any one wait may last.
    """

    transport = TRANSPORT  # how `process_group.of_group` joins the ranks

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.timeout = timeout.total_seconds()
        self._name = self._described = ""
        # made here, where all ranks are: a message concerns two of them only
        self._messages = process_group.connect(
            store, rank, size, self.timeout, name="messages", transport=TRANSPORT
        )

    def getBackendName(self) -> str:  # C++ asks by this name
        return "weft_mpi"

    # What torch otherwise asks the backends inside a group, and here there are none inside.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._described = text

    def getGroupDesc(self) -> str:
        return self._described

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Whether several messages can be posted as one."""
        return False

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        given, op = listed(tensors), op_of(opts)
        if any(tensor.layout != torch.strided for tensor in given):
            return sparse_all_reduce(self.wire, given, opts)
        return self._start("all_reduce", lambda w: collectives.all_reduce(w, given, op), opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        given, root = listed(tensors), root_of(opts)
        return self._start(
            "broadcast",
            lambda w: [collectives.broadcast(w, each, root)[0] for each in given],
            opts,
        )

    def reduce(self, tensors: Any, opts: Any) -> Any:
        given, root, op = listed(tensors)[0], root_of(opts), op_of(opts)
        return self._start("reduce", lambda w: collectives.reduce(w, given, root, op), opts)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        mine, places = listed(ins)[0], nested(outs)[0]
        return self._start("all_gather", lambda w: collectives.all_gather(w, places, mine), opts)

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        pairs = list(zip(nested(outs), listed(ins), strict=True))

        def job(wire: Wire) -> list[Tensor]:
            return [out for outs, mine in pairs for out in collectives.all_gather(wire, outs, mine)]

        return self._start("all_gather", job, opts)

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        pairs = list(zip(listed(outs), listed(ins), strict=True))

        def job(wire: Wire) -> list[Tensor]:
            for out, mine in pairs:
                collectives.all_gather_single(wire, out, mine)
            return [out for out, _ in pairs]

        return self._start("all_gather", job, opts)

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([out], [mine], opts)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        out, pieces, op = listed(outs)[0], nested(ins)[0], op_of(opts)
        return self._start(
            "reduce_scatter", lambda w: collectives.reduce_scatter(w, out, pieces, op), opts
        )

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        pairs, op = list(zip(listed(outs), listed(ins), strict=True)), op_of(opts)

        def job(wire: Wire) -> list[Tensor]:
            for out, mine in pairs:
                collectives.reduce_scatter_single(wire, out, mine, op)
            return [out for out, _ in pairs]

        return self._start("reduce_scatter", job, opts)

    def reduce_scatter_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([out], [mine], opts)

    def all_to_all_single(
        self, out: Tensor, mine: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Any:
        takes, gives = list(out_sizes), list(in_sizes)
        return self._start(
            "all_to_all",
            lambda w: collectives.all_to_all_single(w, out, mine, takes, gives),
            opts,
        )

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        places, pieces = listed(outs), listed(ins)
        return self._start("all_to_all", lambda w: collectives.all_to_all(w, places, pieces), opts)

    def gather(self, outs: Any, ins: Any, opts: Any) -> Any:
        places = nested(outs)[0] if outs else []
        mine, root = listed(ins)[0], root_of(opts)
        return self._start("gather", lambda w: collectives.gather(w, places, mine, root), opts)

    def scatter(self, outs: Any, ins: Any, opts: Any) -> Any:
        pieces = nested(ins)[0] if ins else []
        out, root = listed(outs)[0], root_of(opts)
        return self._start("scatter", lambda w: collectives.scatter(w, out, pieces, root), opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._start("barrier", collectives.barrier, opts)

    # The names before torch 2.13, which calls some of them too.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        given = [plain(each.detach()) for each in listed(tensors)]
        pending = self._messages.post([(target, each) for each in given], (), tag)
        return Posted(pending, self.rank(), [(each, each) for each in given])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        given = [each.detach() for each in listed(tensors)]
        places = [each if is_plain(each) else torch.empty_like(each).contiguous() for each in given]
        pending = self._messages.post((), [(source, place) for place in places], tag)
        return Posted(pending, source, list(zip(given, places, strict=True)))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        raise WeftError(
            f"rank {self.rank()}: this backend receives from a rank that is named: pass src="
        )

    def abort(self) -> None:
        """Break the group: every rank's waits end and say so."""
        for wire in (self._wire, self._messages):
            if wire is not None:
                wire.abort("its process group was aborted")

    def shutdown(self) -> None:
        super().shutdown()
        self._messages.close()

    def _start(self, name: str, job: Callable[[Wire], list[Tensor]], opts: Any) -> Ended | Queued:
        wire = self.wire
        return started(wire, name, lambda: job(wire), opts)
