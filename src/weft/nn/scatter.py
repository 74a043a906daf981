"""Scatter and Gather: between the first rank of each slice of a grid and all of its ranks.

Scatter cuts the tensor of the first rank and gives each rank its part; Gather puts the parts
together there. Each is the other's adjoint.
"""

from __future__ import annotations

from .slices import CuttingLayer, Movement, SliceLayer


class Scatter(CuttingLayer):
    """Cuts the tensor of the first rank of each slice, and gives each rank its part.

    Input: the whole along `dims` on the ranks that are first along them, nothing elsewhere.
    Output: each rank's part. Adjoint: Gather.

    Args:
        partition: the grid.
        dims: which of its dimensions to scatter along; negative ones count from its last.
        shape: the shape of the tensor that the grid cuts, if it is known; checked, and needed under
            torch.compile.
        lengths: for each dimension the lengths of the parts, or None: balanced.

    Raises:
        WeftError: a dim is out of range or repeated; when called: the lengths do not fit.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     x = weft.nn.zero_volume_tensor() if wire.rank else torch.arange(3)
        ...     return weft.nn.Scatter(weft.Partition(2), 0)(x)
        >>> run(2, program)
        [tensor([0, 1]), tensor([2])]
    """

    movement = Movement("Scatter", "first", "shards")


class Gather(SliceLayer):
    """Puts the shards of each slice together on its first rank.

    Input: each rank's shard; any lengths, also 0, that fit together. Output: the whole along
    `dims` on the ranks that are first along them, nothing elsewhere. Adjoint: Scatter.

    Args:
        partition: the grid.
        dims: which of its dimensions to gather along; negative ones count from its last.
        shape: the shape of the tensor that the grid cuts, if it is known and cut evenly; checked,
            and needed under torch.compile.

    Raises:
        WeftError: a dim is out of range or repeated; when called: shards do not fit together.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     return weft.nn.Gather(weft.Partition(2), 0)(torch.tensor([wire.rank]))
        >>> run(2, program)
        [tensor([0, 1]), tensor([], dtype=torch.int64)]
    """

    movement = Movement("Gather", "shards", "first")
