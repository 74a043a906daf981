"""HaloExchange as in DistDL: it fills halos that the input has, with widths for each worker.

In DistDL a worker knows only its own widths, so the workers tell each other when the layer is made.
Halos beyond the edges of the grid belong to the caller: the layer keeps what they hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft import Partition, WeftError, nn
from weft.base.errors import entry

from ...arguments import telling
from ..partition import MPICartesianPartition

_WRONG = -1  # is sent in place of widths

Widths = list[tuple[int, int]]
"""(before, after) in each dimension."""


class HaloExchange(nn.HaloExchange):
    """Fills the halo of each worker's tensor with the adjacent elements of its neighbours.

    Making the layer is collective among the workers of the grid: they exchange the widths. Calling
    it is, too.

    Args:
        P_x: the grid, with as many dimensions as the tensor.
        halo_shape: the widths of this worker's halo, in elements: [dim, 2], before and after.
        recv_buffer_shape: the widths that are filled, [dim, 2]; None: those of `halo_shape`. The
            halo beyond the edges of the grid keeps what the caller put there.
        send_buffer_shape: without effect: the neighbours say what they receive.

    Raises:
        WeftError: some worker's widths are no such array, or negative. From a call: the tensors do
            not fit together.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> from weft.compat.distdl import MPIPartition
        >>> def program(group):
        ...     P_x = MPIPartition().create_cartesian_topology_partition([2])
        ...     layer = HaloExchange(P_x, [[0, 1]] if P_x.rank == 0 else [[2, 0]])
        ...     x = torch.tensor([1, 2, 3, 0] if P_x.rank == 0 else [0, 0, 4, 5])
        ...     return layer(x)
        >>> run(2, program)
        [tensor([1, 2, 3, 4]), tensor([2, 3, 4, 5])]
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        halo_shape: Any,
        recv_buffer_shape: Any = None,
        send_buffer_shape: Any = None,
    ) -> None:
        filled = halo_shape if recv_buffer_shape is None else recv_buffer_shape
        cell = P_x.grid.index
        if cell is None:
            super().__init__(P_x.grid, 0)
            self._inside: Widths = []
        else:
            widths = _told(P_x.grid, filled)
            super().__init__(P_x.grid, widths.__getitem__)
            self._inside = widths[cell]

    @entry
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self._without_halo(input))

    def _without_halo(self, x: Any) -> Any:
        """A worker's part of the tensor, with what lies beyond the edges of the grid."""
        is_dense = isinstance(x, Tensor) and x.layout == torch.strided
        if not is_dense or x.dim() < len(self._inside):
            return x  # which weft's layer refuses
        for dim, (before, after) in enumerate(self._inside):
            length = x.shape[dim] - before - after
            if length < 0:
                grid = self.spec.partitions[0]
                with telling(grid.group.subset(self.spec.groups[grid.rank])):
                    raise WeftError(
                        f"HaloExchange: a tensor of shape {tuple(x.shape)} is smaller than its "
                        f"halo of {self._inside}: pad it by that first"
                    )
            x = x.narrow(dim, before, length)
        return x


def _told(grid: Partition, given: Any) -> dict[tuple[int, ...], Widths]:
    """The widths of all workers' halos, by cell; 0 beyond the edges of the grid. Collective."""
    line = grid.reshape((grid.size,))
    found: Tensor = nn.AllGather(line, 0)(_widths(given, grid.dim)[None])
    told = {}
    for rank, widths in zip(grid.ranks, found.tolist(), strict=True):
        if min(map(min, widths)) < 0:
            raise WeftError(
                f"HaloExchange: rank {rank} of a grid of {grid.shape} has halos that are no widths "
                f"of shape ({grid.dim}, 2), at least 0: pass (before, after) for each dimension"
            )
        cell = grid.cells[rank]
        told[cell] = [
            (before if at > 0 else 0, after if at < extent - 1 else 0)
            for (before, after), at, extent in zip(widths, cell, grid.shape, strict=True)
        ]
    return told


def _widths(given: Any, dim: int) -> Tensor:
    """The argument as widths, [dim, 2]; all `_WRONG` if it is none, so that all workers raise."""
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.shape == (dim, 2) and (array >= 0).all() and (array == np.floor(array)).all():
        return torch.from_numpy(array.astype(np.int64))
    return torch.full((dim, 2), _WRONG, device="cpu")
