"""Partitions and torch.distributed: DTensors, and the names and ranks of process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..base import _torch
from ..base.errors import WeftError
from ..base.tensors import Shape

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def mesh_of(device_type: str, ranks: list[Any], names: Sequence[str] | None) -> DeviceMesh:
    """A DeviceMesh of these ranks, nested; collective among all ranks of the default group."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=None if names is None else tuple(names))


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Shape
) -> DTensor:
    """This rank's part of a tensor of that shape as a DTensor; nothing is sent.

    It must be what PyTorch would cut: nobody compares them.
    """
    from torch.distributed.tensor import DTensor  # here: it takes a while

    stride = torch.empty(shape, device="meta").stride()
    size = torch.Size(shape)
    return DTensor.from_local(local, mesh, placements, shape=size, stride=stride)


def as_shard(rows: Tensor, height: int, process_group: dist.ProcessGroup) -> DTensor:
    """This rank's rows as a DTensor `[height, ...]` with `Shard(0)`; nothing is sent."""
    from torch.distributed.tensor import Shard

    along = DeviceMesh.from_group(process_group, rows.device.type)
    return as_dtensor(rows, along, [Shard(0)], (height, *rows.shape[1:]))


def ranks_in(group: object, ranks: Sequence[int]) -> list[int]:
    """The ranks of torch's default group, as ranks in another group; -1: it is not in that.

    Args:
        group: None or a Group, for which the numbers stay the same; a ProcessGroup or a 1-D
            DeviceMesh.
        ranks: in torch's default group.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        return list(ranks)
    members = dist.get_process_group_ranks(group)
    return [members.index(rank) if rank in members else -1 for rank in ranks]


def name_of(group: object) -> str | None:
    """The name by which another process of the job finds the group; None: the default group."""
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    return group.group_name if isinstance(group, dist.ProcessGroup) else None


def group_named(name: str) -> dist.ProcessGroup:
    """The group of that name.

    Raises:
        WeftError: this process has none.
    """
    try:
        return _torch.group_named(name)
    except KeyError as error:
        raise WeftError(f"there is no process group {name!r} here: make it first") from error
