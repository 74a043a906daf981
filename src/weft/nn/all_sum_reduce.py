"""AllSumReduce: the sum of the tensors of each slice of a grid, on all its ranks.

It is its own adjoint. Use it where each rank has an addend of an activation, as after a matrix
product that is cut along the inner dimension. Source: DistDL (Hewett and Grady, arXiv 2006.03108),
where it is SumReduce followed by Broadcast.
"""

from __future__ import annotations

from .slices import Movement, SliceLayer


class AllSumReduce(SliceLayer):
    """Sums the tensors of each slice of a grid, and gives the sum to all its ranks.

    Input: a tensor of the same shape on all ranks of a slice: integers, floating point (but float8)
    or complex. Output: their sum, with the same bits on all of them; float16 and bfloat16 are added
    in float32 and rounded once. It is its own adjoint.

    Args:
        partition: the grid.
        dims: the dimensions of the grid to sum along; negative ones count from its last.

    Raises:
        WeftError: a dim is out of range or repeated. From a call: shapes differ in a slice, or the
            dtype has no addition.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> run(2, lambda group: weft.nn.AllSumReduce(weft.Partition(2), 0)(torch.ones(2)))
        [tensor([2., 2.]), tensor([2., 2.])]
    """

    movement = Movement("AllSumReduce", "wholes", "wholes")
