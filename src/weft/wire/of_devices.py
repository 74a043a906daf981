"""The wires of devices: over the caller's process group, where that serves them, or the host.

* Tensors of a device go over the process group if its backend takes them, as NCCL, XCCL and UCC do
  (gloo only those of the CPU);
* else through the host: copies in page-locked memory, over the wire of the CPU.
"""

from __future__ import annotations

import logging
import weakref

import torch
import torch.distributed as dist

from ..base._torch import serves
from .interface import Wire
from .staged import Staged
from .torch_rounds import rounds_over

_log = logging.getLogger("weft")

_HOST_ONLY = ("gloo", "weft", "mpi", "fake", "undefined")  # backends that take CPU tensors only


def wire_of_device(
    process_group: dist.ProcessGroup | None, cpu_wire: Wire, device: torch.device
) -> tuple[Wire, str]:
    """A wire for tensors of a device, and its name.

    Where there is a process group, and the host carries the tensors nevertheless, the log says so.

    Args:
        process_group: of the same ranks, which the wire does not keep alive; None: there is none.
        cpu_wire: what carries tensors of the CPU.
        device: whose tensors there are to carry.
    """
    if process_group is not None:
        backend = backend_for(process_group, device)
        if backend is not None:
            group = weakref.ref(process_group)
            return rounds_over(group, cpu_wire.rank, cpu_wire.size, device), backend
        _log.warning(
            "rank %d: tensors on %s are copied through the host: the group's backends are %s",
            cpu_wire.rank,
            device.type,
            dist.get_backend_config(process_group),
        )
    return Staged(cpu_wire, device), "staged through the host"


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of a group's backend for tensors of a device; None if none takes them."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backends = {kind: name for kind, _, name in pairs}
    backend = backends.get(device.type, "undefined")
    takes = backend not in _HOST_ONLY or (backend == "gloo" and device.type == "cpu")
    # if one of several backends is written in Python, torch keeps only that one: ask the group
    is_there = len(set(backends.values())) == 1 or serves(group, device)
    return backend if takes and is_there else None
