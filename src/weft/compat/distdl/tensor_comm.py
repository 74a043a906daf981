"""`distdl.backends.common.tensor_comm`: the structure of a whole tensor, from its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..arguments import Integers
from .communicator import Communicator
from .partition import MPIPartition
from .tensors import TensorStructure


def assemble_global_tensor_structure(
    local_tensor_structure: Any, P_in: MPIPartition, P_out: MPIPartition | None = None
) -> TensorStructure:
    """The shape, dtype and requires_grad of a tensor that is cut along a grid. Collective.

    Args:
        local_tensor_structure: a tensor, or an object with the `shape`, `dtype` and `requires_grad`
            of this worker's part. It is not read on workers that are not in `P_in`.
        P_in: the grid. Parts may have any lengths that fit together.
        P_out: the workers that get the result, with dtype and requires_grad of the first worker of
            `P_in`, which must be among them. None: the workers of `P_in`.

    Returns:
        The structure, whose shape is an int64 array [number of dimensions of the grid]. All is None
        on a worker that is in neither.

    Raises:
        WeftError: the first worker of `P_in` is not in `P_out`.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 1])
        ...     return assemble_global_tensor_structure(torch.empty(group.rank + 3, 5), P_x).shape
        >>> run(2, program)
        [array([7, 5]), array([7, 5])]
    """
    whole = TensorStructure()
    if P_in.active:
        _read(whole, local_tensor_structure)
        lengths = _lengths(local_tensor_structure, P_in)
        whole.shape = np.array([_total(lengths, dim) for dim in range(P_in.dim)], dtype=np.int64)
    if P_out is None or not P_out.active:
        return whole
    told = P_out.broadcast_data(whole.shape, P_data=P_in)  # raises where that cannot be
    first = P_out._line.ranks.index(P_in._line.ranks[0])
    others = (whole.dtype, whole.requires_grad)
    whole.shape = told
    whole.dtype, whole.requires_grad = Communicator(P_out._line).bcast(others, root=first)
    return whole


def assemble_global_tensor_structure_along_axis(
    local_tensor_structure: Any, P_x: MPIPartition, axis: Sequence[int]
) -> TensorStructure:
    """The structure of a tensor that is cut along the first of these axes only. Collective.

    Its shape is a torch.Size: that of this worker's part, but for the axis. All is None on a worker
    that is not in the grid.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 1])
        ...     x = torch.empty(group.rank + 3, 5)
        ...     return tuple(assemble_global_tensor_structure_along_axis(x, P_x, (0,)).shape)
        >>> run(2, program)
        [(7, 5), (7, 5)]
    """
    whole = TensorStructure()
    if P_x.active:
        _read(whole, local_tensor_structure)
        shape = list(local_tensor_structure.shape)
        shape[axis[0]] = _total(_lengths(local_tensor_structure, P_x), axis[0])
        whole.shape = torch.Size(shape)
    return whole


def _read(whole: TensorStructure, local_tensor_structure: Any) -> None:
    whole.dtype = local_tensor_structure.dtype
    whole.requires_grad = local_tensor_structure.requires_grad


def _lengths(local_tensor_structure: Any, P: MPIPartition) -> Integers:
    """The lengths of each worker's part in the dimensions of the grid: [*grid, dim]."""
    own = np.array(local_tensor_structure.shape[: P.dim], dtype=np.int64)
    found: Integers = P.allgather_data(own).reshape(*P.shape, P.dim)
    return found


def _total(lengths: Integers, dim: int) -> int:
    """The sum of the parts along a dimension, at the first place of all others."""
    return int(lengths[..., dim].sum(axis=dim).flat[0])
