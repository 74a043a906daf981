"""AllSumReduce: the sum of the tensors of each slice of a grid, on all its ranks.

It is its own adjoint. Use it where each rank has an addend of an activation, as after a matrix
product that is cut along the inner dimension. Source: DistDL (Hewett and Grady, arXiv 2006.03108),
where it is SumReduce followed by Broadcast.
"""

from __future__ import annotations

from .slices import Movement, SliceLayer


class AllSumReduce(SliceLayer):
    """Adds up the tensors of each slice of a grid, and gives the sum to all its ranks.

    Input: a tensor of the same shape on all ranks of a slice. Output: their sum, bit for bit the
    same on all of them; float16 and bfloat16 are accumulated in float32. Its own adjoint.

    Args:
        partition: the grid.
        dims: which of its dimensions to add up along; negative ones count from its last.
        shape: the shape of the tensor that the grid cuts along the others, if known; checked.

    Raises:
        WeftError: a dim is out of range or repeated; when called: shapes differ, or the dtype
            has no addition.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> run(2, lambda wire: weft.nn.AllSumReduce(weft.Partition(2), 0)(torch.ones(2)))
        [tensor([2., 2.]), tensor([2., 2.])]
    """

    movement = Movement("AllSumReduce", "wholes", "wholes")
