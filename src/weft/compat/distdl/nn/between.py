"""Broadcast, SumReduce, Repartition: from one grid to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft import nn

from ..partition import MPIPartition
from .pairing import divisor, kept_batch, paired, same, scaled


class Broadcast(nn.Broadcast):
    """Copies the tensors of one grid to all workers of another that they stand for.

    Args:
        P_x: the grid of the input; each extent is `P_y`'s, or 1. It may have fewer dimensions.
        P_y: the grid of the output.
        transpose_src, transpose_dest: whether the shape of `P_x`, `P_y` is reversed for that.
        preserve_batch: whether results without elements have the shape [batch, 0], not [0].
        scale_backward: as of AllGather.
        shape: of each tensor: torch.compile needs it.

    Raises:
        WeftError: the grids do not match.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        scale_backward: Any = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(*paired(P_x, P_y, transpose_src, transpose_dest), shape=shape)
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, preserve_batch
        self.transpose_src, self.transpose_dest = transpose_src, transpose_dest
        self.scale_backward, self._by = scale_backward, divisor(P_y, scale_backward)

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        if self.preserve_batch:
            y = kept_batch(y, input, self.P_x, self.P_y)
        return scaled(y, self._by)


class SumReduce(nn.SumReduce):
    """Adds up the tensors of one grid on the workers of another that stand for them.

    Arguments as of Broadcast, whose adjoint it is, the other way round: each extent of `P_y` is
    `P_x`'s, or 1.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        small, large = paired(P_y, P_x, transpose_dest, transpose_src)
        super().__init__(large, small, shape=shape)
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, preserve_batch
        self.transpose_src, self.transpose_dest = transpose_src, transpose_dest

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return kept_batch(y, input, self.P_x, self.P_y) if self.preserve_batch else y


class Repartition(nn.Repartition):
    """Moves a tensor from one grid to another, on which it is cut evenly.

    Args:
        P_x, P_y: the grids. If they are the same, the result is a copy, cut as the input is.
        preserve_batch: as of Broadcast.
        buffer_manager: has no effect.
        shape: of the tensor that is cut, if it is cut evenly: torch.compile needs it.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        preserve_batch: bool = True,
        buffer_manager: object = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(P_x.grid, P_y.grid, shape=shape)
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, preserve_batch

    def forward(self, input: Tensor) -> Tensor:
        if same(self.P_x, self.P_y):
            return input.clone()
        y = super().forward(input)
        return kept_batch(y, input, self.P_x, self.P_y) if self.preserve_batch else y
