"""A process group written in Python, whose collectives go over a wire of weft's.

C++ and torch.distributed's functions give its methods lists and an options object; who calls a
method himself may give one tensor and a ReduceOp, as the overloads of
`torch.distributed.ProcessGroup` have it. Collectives take turns in the queue of the group's wire,
on the worker's thread unless the caller is going to wait anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..sparse.api import job_of
from ..sparse.request import op_name
from ..wire import process_group
from ..wire.base import Wire
from . import collectives
from .work import Collective, started

# To mypy it is Any: its stubs are those of the C++ class, whose overloads a method written in
# Python serves all at once, and whose constructor takes a store, which that of a Python group
# does not.
_ProcessGroup: Any = dist.ProcessGroup


class PythonGroup(_ProcessGroup):  # type: ignore[misc]  # as said above
    """One rank's end of a group, with every collective; messages are its subclasses' own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._wire: Any = None

    @property
    def wire(self) -> Wire:
        """The group's wire, that of `weft.sparse_all_reduce(group=...)` too.

        The first call that needs it makes it, collectively.
        """
        if self._wire is None or self._wire.closed:
            self._wire = process_group.of_group(self)
        wire: Wire = self._wire
        return wire

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        given, op = listed(tensors), op_of(opts)
        if any(tensor.layout != torch.strided for tensor in given):
            return _sparse_all_reduce(self.wire, given, opts)
        return self._start("all_reduce", lambda w: collectives.all_reduce(w, given, op), opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        given, root = listed(tensors), _root_of(opts)

        def job(wire: Wire) -> list[Tensor]:
            return [collectives.broadcast(wire, each, root)[0] for each in given]

        return self._start("broadcast", job, opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        given, root, op = listed(tensors)[0], _root_of(opts), op_of(opts)
        return self._start("reduce", lambda w: collectives.reduce(w, given, root, op), opts)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        mine, places = listed(ins)[0], _nested(outs)[0]
        return self._start("all_gather", lambda w: collectives.all_gather(w, places, mine), opts)

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        pairs = list(zip(_nested(outs), listed(ins), strict=True))

        def job(wire: Wire) -> list[Tensor]:
            return [out for outs, mine in pairs for out in collectives.all_gather(wire, outs, mine)]

        return self._start("all_gather", job, opts)

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        pairs = list(zip(listed(outs), listed(ins), strict=True))

        def job(wire: Wire) -> list[Tensor]:
            return [collectives.all_gather_single(wire, out, mine)[0] for out, mine in pairs]

        return self._start("all_gather", job, opts)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        out, parts, op = listed(outs)[0], _nested(ins)[0], op_of(opts)
        return self._start(
            "reduce_scatter", lambda w: collectives.reduce_scatter(w, out, parts, op), opts
        )

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        pairs, op = list(zip(listed(outs), listed(ins), strict=True)), op_of(opts)

        def job(wire: Wire) -> list[Tensor]:
            return [collectives.reduce_scatter_single(wire, *pair, op)[0] for pair in pairs]

        return self._start("reduce_scatter", job, opts)

    def all_to_all_single(
        self, out: Tensor, mine: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Any:
        sizes = list(out_sizes), list(in_sizes)
        return self._start(
            "all_to_all", lambda w: collectives.all_to_all_single(w, out, mine, *sizes), opts
        )

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        places, parts = listed(outs), listed(ins)
        return self._start("all_to_all", lambda w: collectives.all_to_all(w, places, parts), opts)

    def gather(self, outs: Any, ins: Any, opts: Any) -> Any:
        places = _nested(outs)[0] if outs else []
        mine, root = listed(ins)[0], _root_of(opts)
        return self._start("gather", lambda w: collectives.gather(w, places, mine, root), opts)

    def scatter(self, outs: Any, ins: Any, opts: Any) -> Any:
        parts = _nested(ins)[0] if ins else []
        out, root = listed(outs)[0], _root_of(opts)
        return self._start("scatter", lambda w: collectives.scatter(w, out, parts, root), opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._start("barrier", collectives.barrier, opts)

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([out], [mine], opts)

    def reduce_scatter_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([out], [mine], opts)

    allreduce_coalesced = allreduce

    # The names before torch 2.13, which calls some of them too.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def shutdown(self) -> None:
        """Leave: the peers learn that this is no death. Twice is fine."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _start(self, name: str, job: Callable[[Wire], list[Tensor]], opts: Any) -> Collective:
        wire = self.wire
        return started(wire, name, lambda: job(wire), opts)


def _sparse_all_reduce(wire: Wire, tensors: list[Tensor], opts: Any) -> Collective:
    """Reduce sparse tensors over all ranks, each in place: it becomes the coalesced result."""
    _warm()
    op = op_of(opts)

    def job() -> list[Tensor]:
        # entries of one index are its summands, which only a sum may take one by one
        given = [
            tensor if op in ("sum", "avg") or not _in_range(tensor) else tensor.coalesce()
            for tensor in tensors
        ]
        if len(given) == 1:  # without the exchange that opens a list
            results = [job_of(wire, given[0], op, "auto", None)()]
        else:
            results = job_of(wire, given, op, "auto", None)()
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


def listed(tensors: Any) -> list[Tensor]:
    """One tensor or a list of them, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def op_of(options: Any) -> str:
    """weft's name of the reduction; a sum if nothing is said."""
    return "sum" if options is None else str(op_name(getattr(options, "reduceOp", options)))


def _nested(tensors: Any) -> list[list[Tensor]]:
    """A list of tensors or a list of such lists, as the latter."""
    if not tensors or isinstance(tensors[0], Tensor):
        return [list(tensors)]
    return [list(each) for each in tensors]


def _root_of(options: Any) -> int:
    """The rank that a rooted collective starts or ends at."""
    root: int = options if isinstance(options, int) else options.rootRank
    return root
