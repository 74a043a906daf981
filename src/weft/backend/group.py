"""A process group of backend "weft": gloo's, but for the four calls of `calls`.

C++ and torch.distributed's functions pass lists and an options object to its methods. A direct
caller may pass one tensor and a ReduceOp, as to the overloads of `torch.distributed.ProcessGroup`.
Weft's calls run one after the other: on the worker's thread of a group of weft's, or on the
caller's thread if the call is synchronous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import _torch
from ..base.arguments import shown, wrong_timeout
from ..base.errors import WeftError
from ..call.attempt import preparing
from ..comm.barrier import barrier, enter
from ..group import process_group
from ..group.group import Group
from ..rendezvous.address import gloo_interfaces
from ..sparse.request import op_name
from . import calls
from .space import unused
from .work import NO_LIMIT, Collective

_UNSET = dist.BarrierOptions().timeout  # of a barrier that is given no timeout

# Any for mypy: the stubs are of the C++ class. One Python method serves several overloads there.
_ProcessGroup: Any = dist.ProcessGroup


def _of_weft(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is weft's; under FakeTensorMode torch's dispatcher has it send nothing."""

    @_torch.uncompiled
    @functools.wraps(method)
    def called(self: WeftGroup, *given: Any, **options: Any) -> Any:
        if _torch.is_faking():
            return getattr(self._inside, method.__name__)(*given, **options)
        return method(self, *given, **options)

    return called


class WeftGroup(_ProcessGroup):  # type: ignore[misc]  # as said above
    """A group of backend "weft", on one rank.

    Attributes:
        space: the part of the store in which its ranks meet, where no earlier group has met.
    """

    _weft_group: Group | None = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Make the gloo group inside; collective.

        Raises:
            WeftError: the timeout is not above 0, as one becomes that is too long for C++.
            WireError: as `unused`.
        """
        super().__init__(rank, size)
        seconds = timeout.total_seconds()
        if error := wrong_timeout(seconds):
            raise WeftError(f"rank {rank}: {error}, of at most 292 years")
        self.space = unused(store, rank, size, seconds)
        interfaces = gloo_interfaces(store)
        self._gloo: Any = _torch.gloo_group(self.space, rank, size, seconds, interfaces)
        # the same as torch's dispatcher sees it
        self._inside = _torch.process_group_of(self._gloo, self.space, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)

    def getBackendName(self) -> str:  # C++ asks by this name
        return "weft"

    @property
    def weft_group(self) -> Group:
        """The group as weft's own, which `group=` of weft's calls takes, too.

        The first call that needs it makes it. That is collective.
        """
        if self._weft_group is None or self._weft_group.closed:
            self._weft_group = process_group.of_group(self)
        return self._weft_group

    def set_timeout(self, timeout: timedelta) -> None:
        """Of torch 2.15. Raises WeftError: weft's waits would go on as they were."""
        raise WeftError(
            f"rank {self.rank()}: cpu:weft keeps its timeout: pass {timeout} to "
            "dist.init_process_group or dist.new_group"
        )

    @_of_weft
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        def prepare(group: Group) -> calls.Job:
            tensor = _single(tensors)
            if tensor.layout == torch.sparse_coo:
                return calls.sparse_all_reduce(group, tensor, _op_of(opts))
            return calls.all_reduce(group, tensor, _op_of(opts))

        return self._begun("all_reduce", opts, tensors, prepare)

    @_of_weft
    def all_gather_single(self, out: Any, mine: Any, opts: Any = None) -> Any:
        def prepare(group: Group) -> calls.Job:
            return calls.all_gather_single(group, _single(out), _single(mine))

        return self._begun("all_gather_single", opts, out, prepare)

    @_of_weft
    def reduce_scatter_single(self, out: Any, whole: Any, opts: Any = None) -> Any:
        def prepare(group: Group) -> calls.Job:
            return calls.reduce_scatter_single(group, _single(out), _single(whole), _op_of(opts))

        return self._begun("reduce_scatter_single", opts, out, prepare)

    # The names before torch 2.13, which calls some of them too.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    @_torch.uncompiled
    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks, for `timeout` of the options at most, as `weft.barrier` does.

        The first call on a group joins the ranks before, within the group's timeout, also where
        it is asynchronous.
        """
        limit = getattr(opts, "timeout", _UNSET)
        seconds = None if limit == _UNSET else limit.total_seconds()
        if _is_async(opts):
            return Collective(enter(self.weft_group, seconds).work, limit=max(limit, NO_LIMIT))
        barrier(seconds, self.weft_group)
        return Collective(None)

    def shutdown(self) -> None:
        """Close the group, so that the peers know that this rank did not die. Twice is fine."""
        group = process_group.joined(self)  # also one that only weft's own calls have used
        if group is not None:
            group.close()
        self._gloo.shutdown()

    def _begun(
        self, name: str, opts: Any, out: Any, prepare: Callable[[Group], calls.Job]
    ) -> Collective:
        """Run a call when its turn has come: in the caller's thread if it is synchronous.

        What `prepare` raises of this rank's arguments, every rank raises.
        """
        group = self.weft_group
        with preparing(group, name) as call:
            call.is_async = _is_async(opts)
            call.job = prepare(group)
        if not call.is_async:
            return Collective(None, call.start())
        begun = Collective(call.start())
        if _torch.are_promised():
            begun.promise(_single(out))
        return begun


def _to_gloo(name: str) -> Callable[..., Any]:
    """A method that is gloo's.

    C++ would find it by itself, but hold the GIL while it starts the call. gloo's threads take the
    GIL while they hold a lock that starting needs: a deadlock, now and then.
    """

    @_torch.uncompiled
    def method(self: WeftGroup, *given: Any, **options: Any) -> Any:
        return getattr(self._inside, name)(*given, **options)

    method.__name__ = name
    return method


_OF_GLOO = (
    "allgather",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
for _name in _OF_GLOO:  # of several versions of torch
    setattr(WeftGroup, _name, _to_gloo(_name))


def _single(tensors: Any) -> Tensor:
    """One tensor, or that of a list of one.

    Raises:
        WeftError: there are more, or fewer, or it is none.
    """
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != 1 or not isinstance(found[0], Tensor):
        raise WeftError(f"{shown(tensors)} was given: pass one tensor, or a list of one")
    return found[0]


def _op_of(options: Any) -> str:
    """weft's name of the reduction in the options; "sum" without options."""
    return "sum" if options is None else str(op_name(getattr(options, "reduceOp", options)))


def _is_async(options: Any) -> bool:
    """Whether a call's work is waited for later; so it is without options that say it."""
    return bool(getattr(options, "asyncOp", True))
