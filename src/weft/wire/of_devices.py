"""Who carries tensors of devices: the caller's process group, where its backend takes them.

NCCL, XCCL and UCC do; gloo takes those of the CPU only. Where nobody does, a call is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from ..base._torch import serves
from ..base.errors import WeftError
from .interface import Failure, Features, Recv, Send
from .torch_rounds import TorchRounds, rounds_over

_HOST_ONLY = ("gloo", "weft", "mpi", "fake", "undefined")  # backends that take CPU tensors only
_TAKES = {"cuda": "nccl", "xpu": "xccl"}  # for each kind of device a backend that does


def wire_of_device(
    process_group: dist.ProcessGroup | None, rank: int, size: int, device: torch.device
) -> tuple[TorchRounds, str] | None:
    """A wire for tensors of a device, and the name of the backend; None: nobody carries them.

    Args:
        process_group: of the same ranks, which the wire does not keep alive; None: there is none.
        rank, size: this rank, and how many there are.
        device: whose tensors there are to carry.
    """
    backend = None if process_group is None else backend_for(process_group, device)
    if process_group is None or backend is None:
        return None
    return rounds_over(weakref.ref(process_group), rank, size, device), backend


def refusal(process_group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Why nobody carries tensors of a device, and what to do, as the text of an error."""
    kind = device.type
    if process_group is None:
        return (
            f"these ranks have no process group that takes {kind} tensors, as parts that `split` "
            "makes have none: use a group of torch.distributed's, or `.cpu()`"
        )
    there = dist.get_backend_config(process_group)
    names = {pair.rpartition(":")[2] for pair in there.split(",")}
    whose = names.pop() if len(names) == 1 else there
    able = f"cpu:gloo,{kind}:{_TAKES[kind]}" if kind in _TAKES else f"a backend for {kind}"
    return f"this group's {whose} takes no {kind} tensors: `{able}`, or `.cpu()`"


class Refusing:
    """One rank's end where nobody carries tensors of a device; a `weft.wire.interface.Wire`.

    Calls state the refusal in their openings, so that all ranks raise it. One that comes here has
    posted nothing, and is refused on every rank that does.
    """

    def __init__(self, rank: int, size: int, device: torch.device, text: str) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.features = Features()
        self._text = text

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> NoReturn:
        raise WeftError(f"rank {self.rank}: {self._text}")

    def lease(self, nbytes: int) -> None:
        """Any memory is as good: None."""
        return None

    def abort(self, failure: Failure) -> None:
        """There are no waits."""

    def failure(self) -> None:
        """It never fails: None."""
        return None

    def close(self) -> None:
        """There is nothing to let go of."""


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of a group's backend for tensors of a device; None if none takes them."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backends = {kind: name for kind, _, name in pairs}
    backend = backends.get(device.type, "undefined")
    takes = backend not in _HOST_ONLY or (backend == "gloo" and device.type == "cpu")
    # if one of several backends is written in Python, torch keeps only that one: ask the group
    is_there = len(set(backends.values())) == 1 or serves(group, device)
    return backend if takes and is_there else None
