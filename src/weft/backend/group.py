"""A process group written in Python, and a backend of one, whose collectives are weft's.

C++ and torch.distributed's functions pass lists and an options object to its methods. A direct
caller may pass one tensor and a ReduceOp, as to the overloads of `torch.distributed.ProcessGroup`.
Weft's group runs collectives one after the other: on its worker's thread, or on the caller's
thread if the call is synchronous.

What torch asks a backend for is a `PythonGroup`, which becomes the group; or, where the group has
another backend for other devices, a `PythonBackend`, by which it serves the CPU's tensors. Both
have the same collectives. A group alone is better: of a backend's works, C++ hands out an envelope
that only waits (tools/upstream/python_backend.md). But torch's dispatcher does not see a group's
calls. So where a mode of the caller's listens, as `CommDebugMode` and `FakeTensorMode` do, and
where a tensor is made of others, a call goes by a group of torch's with a backend inside.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..base import _torch
from ..base.arguments import in_words
from ..base.errors import WeftError
from ..base.tensors import is_made_of_others
from ..comm.barrier import barrier, enter
from ..group import process_group
from ..group.group import Group
from ..sparse.request import op_name
from . import collectives
from .work import NO_LIMIT, Collective


class Collectives:
    """Every collective of torch.distributed, over one of weft's groups."""

    _weft_group: Any = None

    def _group(self) -> dist.ProcessGroup:
        """The group that these collectives are of."""
        raise NotImplementedError

    @property
    def weft_group(self) -> Group:
        """The group as weft's own, which `group=` of weft's calls takes, too.

        The first call that needs it makes it. That is collective.
        """
        if self._weft_group is None or self._weft_group.closed:
            self._weft_group = process_group.of_group(self._group())
        found: Group = self._weft_group
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """Change what any one wait may last, from now on: torch 2.15's `dist.set_timeout`."""
        if self._weft_group is not None:
            self._weft_group.set_timeout(timeout.total_seconds())

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        given, op = listed(tensors), op_of(opts)
        if all(tensor.layout == torch.strided for tensor in given):
            return self._start(opts, collectives.all_reduce, (given, op))
        kernels.prepare()  # compile here, before the deadline of any wait begins
        return self._start(opts, collectives.sparse_all_reduce, (given, op))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        calls = [(each, _root_of(opts)) for each in listed(tensors)]
        return self._start(opts, collectives.broadcast, *calls)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        calls = [(each, _root_of(opts), op_of(opts)) for each in listed(tensors)]
        return self._start(opts, collectives.reduce, *calls)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._start_each(opts, collectives.all_gather, _nested(outs), listed(ins))

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """`outs[p]` are the tensors of rank p, where in `allgather` they are one input's."""
        call = _nested(outs), listed(ins)
        return self._start(opts, collectives.all_gather_coalesced, call)

    def all_gather_single(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._start_each(opts, collectives.all_gather_single, listed(outs), listed(ins))

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        op = op_of(opts)
        return self._start_each(opts, collectives.reduce_scatter, listed(outs), _nested(ins), op)

    def reduce_scatter_single(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        collective, op = collectives.reduce_scatter_single, op_of(opts)
        return self._start_each(opts, collective, listed(outs), listed(ins), op)

    def all_to_all_single(
        self, out: Tensor, mine: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Any:
        call = out, mine, list(out_sizes), list(in_sizes)
        return self._start(opts, collectives.all_to_all_single, call)

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._start(opts, collectives.all_to_all, (listed(outs), listed(ins)))

    def gather(self, outs: Any, ins: Any, opts: Any) -> Any:
        root = _root_of(opts)
        return self._start_each(opts, collectives.gather, _nested(outs), listed(ins), root)

    def gather_single(self, out: Tensor, mine: Tensor, opts: Any) -> Any:
        return self._start(opts, collectives.gather_single, (out, mine, _root_of(opts)))

    def scatter(self, outs: Any, ins: Any, opts: Any) -> Any:
        root = _root_of(opts)
        return self._start_each(opts, collectives.scatter, listed(outs), _nested(ins), root)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks, for `timeout` of the options at most, as `weft.barrier` does."""
        limit = getattr(opts, "timeout", NO_LIMIT)  # below none, if the caller gave none
        seconds = limit.total_seconds() if limit > NO_LIMIT else None
        if getattr(opts, "asyncOp", True):
            return Collective(enter(self.weft_group, seconds).work, limit=limit)
        barrier(seconds, self.weft_group)
        return Collective(None)

    allreduce_coalesced = allreduce
    all_gather_single_coalesced = all_gather_single
    reduce_scatter_single_coalesced = reduce_scatter_single

    # The names before torch 2.13, which calls some of them too.
    _allgather_base = allgather_into_tensor_coalesced = all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = reduce_scatter_single
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    def shutdown(self) -> None:
        """Close the group, so that the peers know that this rank did not die. Twice is fine."""
        group, self._weft_group = self._weft_group, None
        if group is not None:
            group.close()

    def _start_each(
        self,
        opts: Any,
        collective: Callable[..., list[Tensor]],
        outs: Sequence[Any],
        ins: Sequence[Any],
        *others: Any,
    ) -> Collective:
        """Run a collective once for each output and its input, and with these other arguments.

        If they are not as many, or as many on every rank, every rank raises the same in this call.
        """
        if len(outs) != len(ins):
            error = f"{len(outs)} outputs and {len(ins)} inputs were given: pass as many of both"
            return self._start(opts, collectives.refuse, (collective.__name__, error))
        if not outs:
            call = collective.__name__.removesuffix("_single")  # as the others open it
            return self._start(opts, collectives.none, (call,))
        calls = [(out, given, *others, len(outs)) for out, given in zip(outs, ins, strict=True)]
        return self._start(opts, collective, *calls)

    def _start(
        self, opts: Any, collective: Callable[..., list[Tensor]], *calls: tuple[Any, ...]
    ) -> Collective:
        """Run a collective, once for each of these arguments, when its turn has come.

        If the call is synchronous (`asyncOp` of the options is False), the caller's thread runs it.
        This saves two switches between threads. Errors are then raised here.
        """
        group = self.weft_group

        def job() -> list[Tensor]:
            error = None
            if collective is not collectives.sparse_all_reduce:  # which looks itself
                error = collectives.unsendable(calls)
            if error is not None:
                return collectives.refuse(group, collective.__name__, error)
            return [tensor for call in calls for tensor in collective(group, *call)]

        if getattr(opts, "asyncOp", True):
            return Collective(group.worker.submit(collective.__name__, job))
        return Collective(None, group.worker.call(collective.__name__, job))


# Any for mypy: the stubs are of the C++ classes. One Python method serves several overloads there,
# and the constructors take other arguments.
_ProcessGroup: Any = dist.ProcessGroup
_Backend: Any = _torch.backend_base() or object
_HAS_BACKENDS = _Backend is not object


class PythonGroup(Collectives, _ProcessGroup):  # type: ignore[misc]  # as said above
    """A group, on one rank, with every collective. Subclasses have `send` and `recv`."""

    timeout: float | None = None
    """Seconds that a wait of the group may last; None: as long as a message may."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def _group(self) -> dist.ProcessGroup:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self.timeout = timeout.total_seconds()

    @functools.cached_property
    def dispatched(self) -> Any:
        """torch's own group of these ranks, whose calls its dispatcher brings back here.

        Up to torch 2.13 nothing brings them back: it is for what is sent nowhere.
        """
        rank, size = self.rank(), self.size()
        if not _HAS_BACKENDS:
            return dist.ProcessGroup(dist.HashStore(), rank, size)
        limit = timedelta(seconds=_torch.default_timeout())
        inside = PythonBackend(self.getBackendName(), self, rank, size, limit)
        return _torch.process_group_of(inside, dist.HashStore(), rank, size)


class Answers(_Backend):  # type: ignore[misc]  # as said above
    """What a backend says of itself where torch asks it: it has none of torch's extras.

    It serves alone where a group has every operation itself, and torch wants to find a backend
    inside.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = name

    def getBackendName(self) -> str:  # C++ asks by this name
        return self._name

    # torch's own properties ask the subclass for their answer, which would be these again
    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False
    _supports_time_estimate = False


class PythonBackend(Collectives, Answers):
    """What serves the CPU's tensors of a group that has other backends for other devices.

    Only where `_torch.backend_base` has a class. Subclasses have `send` and `recv`.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(name, rank, size)
        self._of = weakref.ref(group)  # which has this
        self._options = _Backend.Options(name, timeout)

    def _group(self) -> dist.ProcessGroup:
        group = self._of()
        if group is None:
            raise WeftError("this process group was destroyed: make another")
        return group

    @property
    def options(self) -> Any:
        return self._options

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._options._timeout = timeout  # which weft's group, if it is yet to come, will have

    allreduce_sparse = Collectives.allreduce


def _dispatched(name: str) -> Callable[..., Any]:
    """A collective of `PythonGroup`, which goes by torch's dispatcher where somebody listens."""
    direct = getattr(Collectives, name)

    @functools.wraps(direct)
    def collective(self: PythonGroup, *given: Any, **options: Any) -> Any:
        if not _is_listened_to(given):
            return direct(self, *given, **options)
        try:
            return getattr(self.dispatched, name)(*given, **options)
        except WeftError:
            raise
        except Exception as trouble:  # of this rank's mode or tensor: the others are told
            opts = options.get("opts", given[-1] if given else None)
            return self._start(opts, collectives.refuse, (name, in_words(trouble)))

    return collective


def _is_listened_to(given: Sequence[Any]) -> bool:
    """Whether torch's dispatcher has to see a call of these arguments."""
    tensors = collectives.tensors_in(given)
    if not _torch.is_dispatching():
        return _HAS_BACKENDS and any(map(_unwraps_itself, tensors))
    if _HAS_BACKENDS:
        return all(tensor.layout == torch.strided for tensor in tensors)
    seen = [*map(is_made_of_others, tensors)]
    return bool(seen) and all(seen)


def _unwraps_itself(tensor: Tensor) -> bool:
    """Whether a tensor is made of others, to which its class may hand on a call.

    It is not where a fake one has left its mode, and what a functional collective of torch's has
    promised becomes a plain one (`_torch.waited`).
    """
    if not is_made_of_others(tensor):
        return False
    return not (hasattr(tensor, "fake_mode") or hasattr(tensor, "trigger_wait"))


for _name in (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "gather_single",
    "gather_into_tensor",
    "scatter",
    "barrier",
):
    setattr(PythonGroup, _name, _dispatched(_name))


def listed(tensors: Any) -> list[Tensor]:
    """One tensor or a list of them, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def op_of(options: Any) -> str:
    """weft's name of the reduction in the options; "sum" without options."""
    return "sum" if options is None else str(op_name(getattr(options, "reduceOp", options)))


def _nested(tensors: Any) -> list[list[Tensor]]:
    """A list of tensors, or a list of such lists, as the latter; None as a list of no tensors."""
    if not tensors or isinstance(tensors[0], Tensor):
        return [list(tensors or ())]
    return [list(each) for each in tensors]


def _root_of(options: Any) -> int:
    """The root of a collective, from its options."""
    root: int = options if isinstance(options, int) else options.rootRank
    return root
