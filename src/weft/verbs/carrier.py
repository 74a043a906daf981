"""Who carries the tensors of a device: weft's wire those of the CPU, a process group all others."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from ..base._torch import serves
from ..base.devices import IN_A_GRAPH, current, is_capturing
from ..base.errors import WeftError
from ..group.group import Group
from .group import GroupVerbs
from .interface import Verbs
from .posted import PostedVerbs

_HOST_ONLY = ("weft", "mpi", "fake", "undefined")  # backends whose own operations serve no device
_TAKES = {"cuda": "nccl", "xpu": "xccl"}  # for each kind of device a backend that does


def verbs_of(group: Group, device: torch.device) -> Verbs | None:
    """The verbs by which tensors of a device go; None: weft's wire carries them, by posts.

    It is asked in a call's turn, before the opening, which compares `carried_by` of all ranks.

    Args:
        group: of the call.
        device: of this rank's tensors.

    Raises:
        WeftError: nobody carries them.
    """
    if device.type == "cpu" and not group.session.is_by_group:
        return None
    if is_capturing(device):
        raise WeftError(IN_A_GRAPH)
    is_own = group.worker.is_in_background()
    name = f"verbs of {device}, {'asynchronous' if is_own else 'synchronous'}"
    verbs = group.state.get(name)
    if verbs is None:
        verbs = group.state[name] = _made(group, device, is_own)
    return cast(Verbs, verbs)


def carried_by(verbs: Verbs | None) -> str:
    """What goes by these, in words that are equal on all ranks."""
    return "cpu" if verbs is None else verbs.name


def device_of_process() -> torch.device:
    """The accelerator that this process computes on by now; the CPU if on none."""
    return current()


def own_device(kind: str) -> torch.device:
    """The device of a kind that this rank computes on.

    Raises:
        WeftError: it computes on none of that kind.
    """
    device = torch.device("cpu") if kind == "cpu" else current()
    if device.type != kind:
        raise WeftError(f"rows come on {kind}, of which this rank uses none: set a device first")
    return device


def _made(group: Group, device: torch.device, is_own: bool) -> Verbs:
    """New verbs; they end with the session.

    Raises:
        WeftError: nobody carries such tensors.
    """
    process_group = group.session.process_group()
    if group.size == 1 or (process_group is None and not dist.is_initialized()):
        return PostedVerbs(group, f"{device.type} (posts)")  # to nobody, or between threads
    process_group = process_group or _of_job(group)
    if process_group is None:
        raise WeftError(
            f"these ranks have no process group that takes {device.type} tensors, as threads have "
            "none: use a group of torch.distributed's, or `.cpu()`"
        )
    backend = backend_for(process_group, device)
    if backend is None:
        raise WeftError(_refusal(process_group, device))
    verbs = GroupVerbs(group, device, backend, is_own=is_own)
    group.session.carry(verbs)
    return verbs


def _of_job(group: Group) -> dist.ProcessGroup | None:
    """The default group, of which these ranks are some: those of a part, or of a line of calls.

    weft makes a process group of its own for them. None: they are others, such as threads.
    """
    world = dist.group.WORLD
    assert world is not None  # there is one
    is_own_rank = world.rank() == group.global_ranks[group.rank]
    return world if is_own_rank and max(group.global_ranks) < world.size() else None


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of a group's backend for tensors of a device; None if none takes them."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backends = {kind: name for kind, _, name in pairs}
    backend = backends.get(device.type, "undefined")
    takes = backend not in _HOST_ONLY and (backend != "gloo" or device.type in ("cpu", "cuda"))
    # if one of several backends is written in Python, torch keeps only that one: ask the group
    is_there = len(set(backends.values())) == 1 or serves(group, device)
    return backend if takes and is_there else None


def _refusal(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why a process group carries no tensors of a device, and what to do."""
    kind = device.type
    there = dist.get_backend_config(group)
    names = {pair.rpartition(":")[2] for pair in there.split(",")}
    whose = names.pop() if len(names) == 1 else there
    able = f"cpu:gloo,{kind}:{_TAKES[kind]}" if kind in _TAKES else f"a backend for {kind}"
    return f"this group's {whose} takes no {kind} tensors: `{able}`, or `.cpu()`"
