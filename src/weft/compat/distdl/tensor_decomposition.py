"""`distdl.utilities.tensor_decomposition`: the parts of a tensor in all cells of a grid.

An array of shapes is an int64 array [*grid, dim]: at each cell of the grid it has the shape of the
part there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arguments import Integers, integers
from .partition import MPIPartition
from .slicing import compute_subshape, range_index
from .slicing import compute_subtensor_intersection_slice as compute_subtensor_intersection_slice


def compute_subtensor_shapes_balanced(
    global_tensor_structure: Any, P_tensor_shape: ArrayLike
) -> Integers:
    """The shapes of the parts of a tensor that is cut in the balanced way.

    Args:
        global_tensor_structure: an object with the `shape` of the whole tensor.
        P_tensor_shape: the shape of the grid, with as many dimensions as the tensor.

    Example:
        >>> import torch
        >>> compute_subtensor_shapes_balanced(torch.empty(5, 4), [2, 1]).tolist()
        [[[3, 4]], [[2, 4]]]
    """
    extents = integers(P_tensor_shape)
    shapes = np.empty((*extents, len(extents)), dtype=np.int64)
    for index in range_index(extents):
        shapes[index] = compute_subshape(extents, index, tuple(global_tensor_structure.shape))
    return shapes


def compute_subtensor_shapes_unbalanced(
    local_tensor_structure: Any, P_in: MPIPartition, P_out: MPIPartition | None = None
) -> Integers | None:
    """The shapes of the parts that the workers of a grid have. Collective.

    Args:
        local_tensor_structure: an object with the `shape` of this worker's part.
        P_in: the grid, with as many dimensions as the tensor.
        P_out: the workers that get the result; the first worker of `P_in` must be among them.
            None: the workers of `P_in`.

    Returns:
        The shapes, [*grid, dim]; None on a worker that is in neither.

    Raises:
        WeftError: the first worker of `P_in` is not in `P_out`.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_x = MPIPartition().create_cartesian_topology_partition([2])
        ...     x = torch.empty(group.rank + 3)
        ...     return compute_subtensor_shapes_unbalanced(x, P_x).tolist()
        >>> run(2, program)
        [[[3], [4]], [[3], [4]]]
    """
    shapes = None
    if P_in.active:
        found = P_in.allgather_data(np.array(local_tensor_structure.shape, dtype=np.int64))
        shapes = found.reshape(*P_in.shape, P_in.dim)
    if P_out is not None and P_out.active:
        shapes = P_out.broadcast_data(shapes, P_data=P_in)
    return shapes


def compute_subtensor_stop_indices(shapes: Integers) -> Integers:
    """For each part, the index after its last one in the whole tensor: [*grid, dim].

    Example:
        >>> compute_subtensor_stop_indices(np.array([[2], [1], [3]])).tolist()
        [[2], [3], [6]]
    """
    dims = range(shapes.ndim - 1)
    return np.stack([np.cumsum(shapes[..., dim], axis=dim) for dim in dims], axis=-1)


def compute_subtensor_start_indices(shapes: Integers) -> Integers:
    """For each part, its first index in the whole tensor: [*grid, dim].

    Example:
        >>> compute_subtensor_start_indices(np.array([[2], [1], [3]])).tolist()
        [[0], [2], [3]]
    """
    return compute_subtensor_stop_indices(shapes) - shapes
