"""Scatter and Gather: between the first rank of each slice of a grid and all its ranks.

Scatter cuts the tensor of the first rank and gives each rank its part. Gather puts the parts
together on the first rank. Each is the other's adjoint. They are MPI's collectives of these names
(MPI 3.1, chapter 5), along the dimensions of a grid.
"""

from __future__ import annotations

from .slices import CuttingLayer, Movement, SliceLayer


class Scatter(CuttingLayer):
    """Cuts the tensor of the first rank of each slice, and gives each rank of the slice its part.

    Input: a tensor of any dtype, whole along `dims`, on the ranks that are first along `dims`; on
    other ranks a tensor without elements. Output: this rank's part. Adjoint: Gather.

    Args:
        partition: the grid.
        dims: the dimensions of the grid to scatter along; negative ones count from its last.
        lengths: for each dimension of the tensor the lengths of its parts, or None: balanced ones.
            None: all are balanced.

    Raises:
        WeftError: a dim is out of range or repeated. From a call: `lengths` do not fit.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     x = weft.nn.zero_volume_tensor() if group.rank else torch.arange(3)
        ...     return weft.nn.Scatter(weft.Partition(2), 0)(x)
        >>> run(2, program)
        [tensor([0, 1]), tensor([2])]
    """

    movement = Movement("Scatter", "first", "shards")


class Gather(SliceLayer):
    """Puts the shards of each slice together on its first rank.

    Input: this rank's shard, of any dtype, and of any lengths, 0 included, that fit together.
    Output: on the ranks that are first along `dims` the whole tensor along these; on other ranks a
    tensor without elements. Adjoint: Scatter.

    Args:
        partition: the grid.
        dims: the dimensions of the grid to gather along; negative ones count from its last.

    Raises:
        WeftError: a dim is out of range or repeated. From a call: the shards do not fit together.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     return weft.nn.Gather(weft.Partition(2), 0)(torch.tensor([group.rank]))
        >>> run(2, program)
        [tensor([0, 1]), tensor([], dtype=torch.int64)]
    """

    movement = Movement("Gather", "shards", "first")
