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
where a tensor is made of others, a call goes by a group of torch's with a backend inside
(`through_dispatcher`).
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..base import _torch
from ..base.arguments import as_integer, in_words, shown, wrong_timeout
from ..base.errors import WeftError
from ..base.tensors import is_made_of_others
from ..comm.barrier import barrier, enter
from ..group import process_group
from ..group.group import Group
from ..sparse.request import op_name
from . import collectives
from .refusals import refuse, unsendable
from .tensors import tensors_in
from .work import NO_LIMIT, Collective

_UNSET = dist.BarrierOptions().timeout  # of a barrier that is given no timeout

_here = threading.local()  # `.begun`: calls that this thread has begun


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
        return self._joined()

    def _joined(self) -> Group:
        if self._weft_group is None or self._weft_group.closed:
            self._weft_group = process_group.of_group(self._group())
        found: Group = self._weft_group
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """Change what any one wait may last, from now on: torch 2.15's `dist.set_timeout`.

        Raises:
            WeftError: it is not above 0; nothing has changed.
        """
        seconds = timeout.total_seconds()
        if error := wrong_timeout(seconds):
            raise WeftError(f"rank {self._group().rank()}: {error}")
        group = process_group.joined(self._group())
        if group is not None:
            group.set_timeout(seconds)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        given, op = listed(tensors), op_of(opts)
        if all(tensor.layout == torch.strided for tensor in given):
            return self._start(opts, collectives.all_reduce, given, op)
        kernels.prepare()  # compile here, before the deadline of any wait begins
        is_inside = torch.is_inference_mode_enabled()  # on this thread, on which it may not run
        if not is_inside and any(tensor.is_inference() for tensor in given):
            error = "a sparse tensor was made in inference mode: pass a clone, or call inside it"
            return self._start(opts, refuse, "sparse_all_reduce", error)
        return self._start(opts, collectives.sparse_all_reduce, given, op)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._start(opts, collectives.broadcast, _single(tensors), _root_of(opts))

    def reduce(self, tensors: Any, opts: Any) -> Any:
        root, op = _root_of(opts), op_of(opts)
        return self._start(opts, collectives.reduce, _single(tensors), root, op)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._start_each(opts, collectives.all_gather, _nested(outs), listed(ins))

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        """`outs[p]` are the tensors of rank p, where in `allgather` they are one input's."""
        return self._start(opts, collectives.all_gather_coalesced, _nested(outs), listed(ins))

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
        sizes = _sizes("output", out_sizes), _sizes("input", in_sizes)
        tensors = _single(out), _single(mine)
        return self._start(opts, collectives.all_to_all_single, *tensors, *sizes)

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._start(opts, collectives.all_to_all, listed(outs), listed(ins))

    def gather(self, outs: Any, ins: Any, opts: Any) -> Any:
        root = _root_of(opts)
        return self._start_each(opts, collectives.gather, _nested(outs), listed(ins), root)

    def gather_single(self, out: Tensor, mine: Tensor, opts: Any) -> Any:
        root = _root_of(opts)
        return self._start(opts, collectives.gather_single, _single(out), _single(mine), root)

    def scatter(self, outs: Any, ins: Any, opts: Any) -> Any:
        root = _root_of(opts)
        return self._start_each(opts, collectives.scatter, listed(outs), _nested(ins), root)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks, for `timeout` of the options at most, as `weft.barrier` does.

        The first call on a group joins the ranks before, within the group's timeout, also where
        it is asynchronous.
        """
        limit = getattr(opts, "timeout", _UNSET)
        seconds = None if limit == _UNSET else limit.total_seconds()
        _here.begun = calls_begun() + 1
        group = self._joined()
        if _is_async(opts):
            return Collective(enter(group, seconds).work, limit=max(limit, NO_LIMIT))
        barrier(seconds, group)
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
        """Close the group, so that the peers know that this rank did not die. Twice is fine.

        Also one that only weft's own calls have used.
        """
        group, self._weft_group = self._weft_group, None
        if group is None or group.closed:
            group = process_group.joined(self._group())
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
        """Run a collective of several calls at once: of each an output and its input.

        If they are not as many, or as many on every rank, every rank raises the same in this call.
        """
        if len(outs) != len(ins):
            error = f"{len(outs)} outputs and {len(ins)} inputs were given: pass as many of both"
            return self._start(opts, refuse, collective.__name__, error)
        if not outs:
            call = collective.__name__.removesuffix("_single")  # as the others open it
            return self._start(opts, collectives.none, call)
        return self._start(opts, collective, outs, ins, *others)

    def _start(self, opts: Any, collective: Callable[..., list[Tensor]], *given: Any) -> Collective:
        """Run a collective of these arguments, outputs first, when its turn has come.

        Of a tensor it takes the memory that this has now. If the call is synchronous (`asyncOp` of
        the options is False), the caller's thread runs it. This saves two switches between threads.
        Errors are then raised here.
        """
        name, is_async = collective.__name__, _is_async(opts)
        arguments, owners, wrong = collectives.taken(collective, given)
        # before ranks are joined: where that fails, all of them hear of it
        _here.begun = calls_begun() + 1
        group = self.weft_group

        def job() -> list[Tensor]:
            error = wrong
            if error is None and is_async and owners:  # its memory may have been freed meanwhile
                error = unsendable(arguments)
            if error is not None:
                return refuse(group, name, error)
            try:
                done = collective(group, *arguments)
            except Exception as trouble:
                collectives.tell_early(group, name, trouble)
                raise
            return [owners.get(id(each), each) for each in done]

        if is_async:
            begun = Collective(group.worker.submit(name, job))
            if _torch.are_promised():
                begun.promise(tensors_in(given[0]))
            return begun
        return Collective(None, group.worker.call(name, job))


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
    def outer(self) -> Any:
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

    def _joined(self) -> Group:
        """As of `Collectives`; that of the group itself, if that is Python's."""
        group = self._group()
        return group._joined() if isinstance(group, PythonGroup) else super()._joined()

    @property
    def options(self) -> Any:
        return self._options

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._options._timeout = timeout  # which weft's group, if it is yet to come, will have

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)


def told_to_all(name: str, direct: Callable[..., Any]) -> Callable[..., Any]:
    """The same collective: what it raises before it has begun, it raises on every rank.

    The compiler does not look into it.
    """

    @_torch.uncompiled
    @functools.wraps(direct)
    def collective(self: Collectives, *given: Any, **options: Any) -> Any:
        before = calls_begun()
        try:
            return direct(self, *given, **options)
        except Exception as trouble:
            if calls_begun() > before:  # the others are through with this call, or raise, too
                raise
            # of this rank's arguments, or its mode: the others are told
            error = str(trouble) if isinstance(trouble, WeftError) else in_words(trouble)
            opts = options.get("opts", given[-1] if given else None)
            return self._start(opts, refuse, name, error)

    return collective


def through_dispatcher(name: str, direct: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of `PythonGroup`, which goes by torch's dispatcher where somebody listens."""

    @functools.wraps(direct)
    def collective(self: PythonGroup, *given: Any, **options: Any) -> Any:
        if not is_listened_to(given):
            return direct(self, *given, **options)
        return getattr(self.outer, name)(*given, **options)

    return collective


def calls_begun() -> int:
    """How many collectives this thread has begun so far, of all groups."""
    begun: int = getattr(_here, "begun", 0)
    return begun


def is_listened_to(given: Sequence[Any]) -> bool:
    """Whether torch's dispatcher has to see a call of these arguments.

    What has nothing to hand on, and is refused, need not be seen: tensors on the meta device, fake
    ones that have left their mode, and DTensors. Sparse tensors, which no mode of torch's knows,
    are not seen either.
    """
    tensors = tensors_in(given)
    if _torch.is_faking():
        return all(tensor.layout == torch.strided for tensor in tensors)
    if not _HAS_BACKENDS:
        return False
    listens = _torch.is_dispatching()
    unwraps = False
    for tensor in tensors:
        kind = type(tensor)
        if kind is Tensor and not tensor.is_meta and tensor.layout == torch.strided:
            continue
        is_refused = tensor.is_meta or hasattr(tensor, "fake_mode") or hasattr(tensor, "to_local")
        if is_refused or tensor.layout != torch.strided:
            return False
        # what a functional collective of torch's has promised becomes a plain one by itself
        unwraps |= is_made_of_others(tensor) and not hasattr(tensor, "trigger_wait")
    return listens or unwraps


# those that torch's own groups have, too: of others its dispatcher knows nothing
_COLLECTIVES = vars(Collectives).keys() & vars(dist.ProcessGroup).keys()
for _name in _COLLECTIVES - {"__doc__", "__module__", "set_timeout", "shutdown"}:
    _direct = vars(Collectives)[_name]
    setattr(PythonGroup, _name, told_to_all(_name, through_dispatcher(_name, _direct)))
    setattr(PythonBackend, _name, told_to_all(_name, _direct))


def listed(tensors: Any) -> list[Tensor]:
    """One tensor or a list of them, as a list.

    Raises:
        WeftError: it is neither; on this rank.
    """
    found = _items(tensors)
    for each in found:
        if not isinstance(each, Tensor):
            raise WeftError(f"{shown(each)} was given: pass tensors")
    return found


def _items(given: Any) -> list[Any]:
    """What a list has; anything else as the one item of a list."""
    if isinstance(given, Tensor):
        return [given]
    try:
        return list(given)
    except Exception:  # a caller's object may raise anything
        return [given]


def sendable(rank: int, tensors: Any) -> list[Tensor]:
    """The tensors of a message, as a list.

    Raises:
        WeftError: one has no elements to send; on this rank, since two ranks at most are concerned.
    """
    given = listed(tensors)
    error = unsendable(given)
    if error is not None:
        raise WeftError(f"rank {rank}: {error}")
    return given


def _is_async(options: Any) -> bool:
    """Whether a call's work is waited for later; so it is without options that say it."""
    try:
        return bool(getattr(options, "asyncOp", True))
    except Exception:  # of a caller's object
        return True


def op_of(options: Any) -> str:
    """weft's name of the reduction in the options; "sum" without options."""
    return "sum" if options is None else str(op_name(getattr(options, "reduceOp", options)))


def _nested(tensors: Any) -> list[list[Tensor]]:
    """A list of tensors, or a list of such lists, as the latter; None as a list of no tensors."""
    found = [] if tensors is None else _items(tensors)
    if not found or isinstance(found[0], Tensor):
        return [listed(found)]
    return [listed(each) for each in found]


def _single(tensors: Any) -> Tensor:
    """One tensor, or that of a list of one."""
    found = listed(tensors)
    if len(found) != 1:
        raise WeftError(f"{len(found)} tensors were given: pass one")
    return found[0]


def _sizes(what: str, given: Any) -> list[int]:
    """The split sizes of a tensor."""
    try:
        sizes = [as_integer(each) for each in given]
    except Exception:  # a caller's object may raise anything
        sizes = [-1]
    if min(sizes, default=0) < 0:
        raise WeftError(f"the split sizes of the {what} are {shown(given)}: pass integers from 0")
    return sizes


def _root_of(options: Any) -> int:
    """The root of a collective, from its options."""
    try:
        return operator.index(getattr(options, "rootRank", options))
    except Exception:  # of a caller's object
        raise WeftError(f"the root is {shown(options)}: pass a rank") from None
