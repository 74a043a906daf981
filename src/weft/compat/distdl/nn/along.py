"""AllGather, ReduceScatter, AllSumReduce: along some axes of one grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft import nn

from ..partition import MPIPartition
from .pairing import axes_of, divisor, scaled


class AllGather(nn.AllGather):
    """Gathers the parts along some axes of a grid, on all its workers.

    Args:
        P_x: the grid.
        axes_all_gather: its axes to gather along, any number of them; negative ones count from the
            last.
        axes_keep: all others; pass one of the two.
        scale_backward: the gradient is divided by this number before it goes back; or by the number
            of workers along the axes of a slice. The caller's own gradient is left as it is.
        shape: of the tensor that the grid cuts, if it is cut evenly: torch.compile needs it.

    Raises:
        WeftError: both kinds of axes are given, or neither; or one is out of range.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(wire):
        ...     P_world = MPIPartition()
        ...     P_x = P_world.create_cartesian_topology_partition([1, 3])
        ...     return AllGather(P_x, (1,))(torch.full((1, 2), P_x.rank))
        >>> run(3, program)[0]
        tensor([[0, 0, 1, 1, 2, 2]])
    """

    def __init__(
        self,
        P_x: MPIPartition,
        axes_all_gather: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        scale_backward: Any = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        axes, kept = axes_of("AllGather", P_x, axes_all_gather, axes_keep)
        super().__init__(P_x.grid, axes, shape=shape)
        self.P_x, self.axes_all_gather, self.axes_keep = P_x, axes, kept
        self.scale_backward, self._by = scale_backward, divisor(P_x, scale_backward)

    def forward(self, input: Tensor) -> Tensor:
        return scaled(super().forward(input), self._by)


class ReduceScatter(nn.ReduceScatter):
    """Adds up the tensors along some axes of a grid, and gives each worker its part of the sum.

    Arguments as of AllGather, whose adjoint it is; the parts are balanced.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        axes_reduce_scatter: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        scale_backward: Any = None,
    ) -> None:
        axes, kept = axes_of("ReduceScatter", P_x, axes_reduce_scatter, axes_keep)
        super().__init__(P_x.grid, axes)
        self.P_x, self.axes_reduce_scatter, self.axes_keep = P_x, axes, kept
        self.scale_backward, self._by = scale_backward, divisor(P_x, scale_backward)

    def forward(self, input: Tensor) -> Tensor:
        return scaled(super().forward(input), self._by)


class AllSumReduce(nn.AllSumReduce):
    """Adds up the tensors along some axes of a grid, on all its workers.

    Arguments as of AllGather.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        axes_reduce: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        scale_backward: Any = None,
    ) -> None:
        axes, kept = axes_of("AllSumReduce", P_x, axes_reduce, axes_keep)
        super().__init__(P_x.grid, axes)
        self.P_x, self.axes_reduce, self.axes_keep = P_x, axes, kept
        self.scale_backward, self._by = scale_backward, divisor(P_x, scale_backward)

    def forward(self, input: Tensor) -> Tensor:
        return scaled(super().forward(input), self._by)
