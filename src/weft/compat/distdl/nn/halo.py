"""HaloExchange as in DistDL: into margins that the caller made, of each worker's own widths.

That is `weft.nn.HaloExchange` of padded tensors, but that a worker knows its own widths only, so
that they tell each other when the layer is made. Margins beyond the edges of the grid have no width
for it: they are part of what the worker holds, and so they are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft import WeftError, nn

from ..partition import MPICartesianPartition
from .module import Module

_UNKNOWN, _WRONG = -1, -2  # in place of a width


class HaloExchange(Module, nn.HaloExchange):
    """Fills the margins of each worker's tensor with what its neighbours have next to it.

    Collective among the workers of the grid, also when it is made: they tell each other the widths.

    Args:
        P_x: the grid, with as many dimensions as the tensor.
        halo_shape: how wide this worker's margins are: [dim, 2], before and after.
        recv_buffer_shape: how much of them is to be filled; None: all. What lies beyond the edges
            of the grid belongs to the caller, and is kept.
        send_buffer_shape: what the neighbours want of this worker; None: whatever they do.
        buffer_manager: has no effect.

    Raises:
        WeftError: the widths are not such an array, are negative, or what a worker sends is not
            what its neighbour receives; when called: tensors do not fit together.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> from weft.compat.distdl import MPIPartition
        >>> def program(wire):
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
        buffer_manager: object = None,
    ) -> None:
        recv = halo_shape if recv_buffer_shape is None else recv_buffer_shape
        widths = _told(P_x, recv, send_buffer_shape)
        super().__init__(P_x.grid, lambda cell: widths.get(cell, 0), padded=True)
        self.P_x, self.halo_shape = P_x, halo_shape
        self.recv_buffer_shape, self.send_buffer_shape = recv, send_buffer_shape


def _told(
    P_x: MPICartesianPartition, recv: Any, send: Any
) -> dict[tuple[int, ...], list[list[int]]]:
    """The widths of all workers' halos, by cell; collective among them, as is what is wrong."""
    if not P_x.active:
        return {}
    line = P_x.grid.reshape((P_x.size,))
    received = _widths(recv, P_x.dim)
    sent = torch.full_like(received, _UNKNOWN) if send is None else _widths(send, P_x.dim)
    found: Tensor = nn.AllGather(line, 0)(torch.stack([received, sent])[None])
    wrong = (found == _WRONG).flatten(1).any(1)
    if wrong.any():
        rank = line.ranks[int(wrong.int().argmax())]
        raise WeftError(
            f"HaloExchange: rank {rank} of a grid of {P_x.grid.shape} has halos that are no widths "
            f"of shape ({P_x.dim}, 2), at least 0: pass (before, after) for each dimension"
        )
    recvs = found[:, 0].clone()
    for rank in range(P_x.size):
        for dim, pair in enumerate(P_x.neighbor_ranks(rank)):
            for side, peer in enumerate(pair):
                if peer < 0:
                    recvs[rank, dim, side] = 0  # there is nobody: it is the caller's padding
                    continue
                sends = int(found[rank, 1, dim, side])
                wanted = int(found[peer, 0, dim, 1 - side])
                if sends not in (_UNKNOWN, wanted):
                    raise WeftError(
                        f"HaloExchange: in dimension {dim} rank {line.ranks[rank]} sends {sends} "
                        f"and its neighbour, rank {line.ranks[peer]}, receives {wanted}"
                    )
    cells = (P_x.grid.cells[rank] for rank in line.ranks)
    return dict(zip(cells, recvs.tolist(), strict=True))


def _widths(given: Any, dim: int) -> Tensor:
    """What was given as widths, [dim, 2]; wrong ones where they are none, as all are to be told."""
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.shape == (dim, 2) and (array >= 0).all() and (array == np.floor(array)).all():
        return torch.from_numpy(array.astype(np.int64))
    return torch.full((dim, 2), _WRONG, device="cpu")
