"""AllGather and ReduceScatter: along some dimensions of a grid, shards become the whole, and back.

In each slice of the grid along `dims`, the ranks' shards make up one tensor. AllGather gives it to
all of them. Its adjoint, ReduceScatter, adds up the tensors of all of them and gives each its
part.

Best for weights that are sharded to save memory: gathered before they are used, and their gradients
summed and scattered. Source: DistDL (Hewett and Grady, "A linear algebraic approach to model
parallelism in deep learning", arXiv:2006.03108), there along one dimension.
"""

from __future__ import annotations

from .slices import CuttingLayer, Movement, SliceLayer


class AllGather(SliceLayer):
    """Gathers the shards along some dimensions of a grid, on all ranks.

    Input: the rank's shard; any lengths, also 0, that fit together. Output: the whole along
    `dims`. Adjoint: ReduceScatter.

    Args:
        partition: the grid.
        dims: which of its dimensions to gather along; negative ones count from its last.
        shape: the shape of the tensor that the grid cuts, if it is known and cut evenly; checked
            against what the ranks bring, and needed under torch.compile.

    Raises:
        WeftError: a dim is out of range or repeated; when called: shards do not fit together.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):  # one rank's; its shard is as long as its number
        ...     layer = weft.nn.AllGather(weft.Partition(3), 0)
        ...     return layer(torch.full((wire.rank,), wire.rank))
        >>> run(3, program)[0]
        tensor([1, 2, 2])
    """

    movement = Movement("AllGather", "shards", "wholes")


class ReduceScatter(CuttingLayer):
    """Adds up the tensors of a slice of a grid, and gives each of its ranks a part of the sum.

    Input: the whole along `dims`, of the same shape on all ranks of a slice. Output: the rank's
    part; sums of float16 and bfloat16 are accumulated in float32. Adjoint: AllGather.

    Args:
        partition: the grid.
        dims: which of its dimensions to scatter along; negative ones count from its last.
        shape: the shape of the tensor that the grid cuts, if it is known; checked.
        lengths: for each dimension the lengths of the parts, or None: balanced.

    Raises:
        WeftError: a dim is out of range or repeated; when called: shapes differ, or the dtype
            has no addition.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     layer = weft.nn.ReduceScatter(weft.Partition(2), 0)
        ...     return layer(torch.arange(3.0))
        >>> run(2, program)
        [tensor([0., 2.]), tensor([4.])]
    """

    movement = Movement("ReduceScatter", "wholes", "shards")
