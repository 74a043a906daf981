"""Partitions and torch.distributed: device meshes, and the names and ranks of process groups.

It is imported at its first use, because importing torch.distributed's device meshes takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..base import _torch
from ..base.errors import WeftError


def mesh(device_type: str, ranks: list[Any], names: Sequence[str] | None) -> DeviceMesh:
    """A DeviceMesh of these ranks, nested; collective among all ranks of the default group."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=None if names is None else tuple(names))


def as_shard(rows: Tensor, height: int, process_group: dist.ProcessGroup) -> Tensor:
    """This rank's rows as a DTensor `[height, ...]` with `Shard(0)`; nothing is sent.

    The rows must be this rank's chunk, as `torch.chunk` cuts: nobody compares them.
    """
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((height, *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    along = DeviceMesh.from_group(process_group, rows.device.type)
    found: Tensor = DTensor.from_local(rows, along, [Shard(0)], shape=shape, stride=stride)
    return found


def ranks_in(group: object, ranks: Sequence[int]) -> list[int]:
    """The ranks of torch's default group, as ranks in another group.

    Args:
        group: None or a Group, for which the numbers stay the same; a ProcessGroup or a 1-D
            DeviceMesh.
        ranks: in torch's default group.

    Raises:
        WeftError: one of them is not in the group.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        return list(ranks)
    members = dist.get_process_group_ranks(group)
    strange = sorted(set(ranks) - set(members))
    if strange:
        raise WeftError(
            f"rank{'s' * (len(strange) > 1)} {' and '.join(map(str, strange))} of the default "
            f"group is not in the group of {members}"
        )
    return [members.index(rank) for rank in ranks]


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
