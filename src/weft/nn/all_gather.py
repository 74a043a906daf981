"""AllGather and ReduceScatter: shards become the whole tensor along some dimensions, and back.

In each slice of the grid along `dims` the ranks' shards make up one tensor. AllGather gives it to
all of these ranks. Its adjoint, ReduceScatter, sums the tensors of these ranks and gives each of
them its part of the sum.

Use them for weights that are sharded to save memory: AllGather gathers a weight before it is used;
its backward sums and scatters the gradient. Source: DistDL's manual, "AllGather Layer", and Hewett
and Grady, "A linear algebraic approach to model parallelism in deep learning" (arXiv 2006.03108).
DistDL's works along one dimension, these along several.
"""

from __future__ import annotations

from .slices import CuttingLayer, Movement, SliceLayer


class AllGather(SliceLayer):
    """Gathers the shards along some dimensions of a grid, on all ranks.

    Input: this rank's shard, of any dtype. Shards may have any lengths, 0 included, that fit
    together: in a dimension of `dims`, ranks at the same index of the grid have equal lengths; in
    another dimension, all ranks of a slice have. Output: the whole tensor along `dims`. Adjoint:
    ReduceScatter.

    Args:
        partition: the grid.
        dims: the dimensions of the grid to gather along; negative ones count from its last.

    Raises:
        WeftError: a dim is out of range or repeated. From a call: the shards do not fit together.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):  # one rank's; its shard is as long as its number
        ...     layer = weft.nn.AllGather(weft.Partition(3), 0)
        ...     return layer(torch.full((group.rank,), group.rank))
        >>> run(3, program)[0]
        tensor([1, 2, 2])
    """

    movement = Movement("AllGather", "shards", "wholes")


class ReduceScatter(CuttingLayer):
    """Sums the tensors of each slice of a grid, and gives each of its ranks a part of the sum.

    Input: a tensor that is whole along `dims`, of the same shape on all ranks of a slice: integers,
    floating point (but float8) or complex. Output: this rank's part of the sum; float16 and
    bfloat16 are added in float32 and rounded once. Adjoint: AllGather.

    Args:
        partition: the grid.
        dims: the dimensions of the grid to scatter along; negative ones count from its last.
        lengths: for each dimension of the tensor the lengths of its parts, or None: balanced ones.
            None: all are balanced.

    Raises:
        WeftError: a dim is out of range or repeated. From a call: shapes differ in a slice, lengths
            do not fit, or the dtype has no addition.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     layer = weft.nn.ReduceScatter(weft.Partition(2), 0)
        ...     return layer(torch.arange(3.0))
        >>> run(2, program)
        [tensor([0., 2.]), tensor([4.])]
    """

    movement = Movement("ReduceScatter", "wholes", "shards")
