"""HaloExchange as in DistDL: it fills halos that the input has, with widths for each worker.

It is `weft.nn.HaloExchange` with `padded=True`. In DistDL a worker knows only its own widths, so
the workers exchange them when the layer is made. Halos beyond the edges of the grid belong to the
caller: the layer keeps what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft import WeftError, nn

from ..backend import BufferManager
from ..partition import MPICartesianPartition, nobody
from .module import Module

_UNKNOWN, _WRONG = -1, -2  # are sent in place of a width


class HaloExchange(Module, nn.HaloExchange):
    """Fills the halo of each worker's tensor with the adjacent elements of its neighbours.

    Making the layer is collective among the workers of the grid: they exchange the widths. Calling
    it is, too.

    Args:
        P_x: the grid, with as many dimensions as the tensor.
        halo_shape: the widths of this worker's halo, in elements: [dim, 2], before and after.
        recv_buffer_shape: the widths that are filled, [dim, 2]; None: those of `halo_shape`. The
            halo beyond the edges of the grid keeps what the caller put there.
        send_buffer_shape: the widths that the neighbours receive from this worker, [dim, 2]; None:
            not checked.
        buffer_manager: gets, from each call, the four buffers that DistDL would use. weft does not
            use them: they hold nothing.

    Raises:
        WeftError: the widths are no such array, or negative, or a worker's `send_buffer_shape` is
            not what its neighbour receives. From a call: the tensors do not fit together.
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
        buffer_manager: BufferManager | None = None,
    ) -> None:
        recv = halo_shape if recv_buffer_shape is None else recv_buffer_shape
        if P_x.active:
            widths = _told(P_x, recv, send_buffer_shape)
            super().__init__(P_x.grid, widths.__getitem__, padded=True)
        else:
            super().__init__(nobody(P_x), 0, padded=True)
        self.P_x = P_x
        self.halo_shape = halo_shape
        self.recv_buffer_shape = recv
        self.send_buffer_shape = send_buffer_shape
        self.buffer_manager = buffer_manager

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        manager = self.buffer_manager
        if manager is not None and self.P_x.active:
            for shapes in self._buffer_shapes(input.shape):
                manager.reserve(shapes, input.dtype)
        return y

    def _buffer_shapes(self, shape: Sequence[int]) -> list[list[tuple[int, ...]]]:
        """For each dimension the shapes of DistDL's four buffers; (0,) where it needs none.

        It exchanges one dimension after the other, with the halos of those before it: the elements
        to send and the halo to fill before this worker's part, then those after it.
        """
        received = np.asarray(self.recv_buffer_shape, dtype=np.int64)
        sent = received if self.send_buffer_shape is None else self.send_buffer_shape
        sent = np.asarray(sent, dtype=np.int64)
        found = []
        for dim in range(self.P_x.dim):
            across = list(shape)
            for later in range(dim + 1, self.P_x.dim):
                across[later] -= int(received[later].sum())
            widths = [sent[dim, 0], received[dim, 0], sent[dim, 1], received[dim, 1]]
            found.append(
                [(*across[:dim], int(w), *across[dim + 1 :]) if w else (0,) for w in widths]
            )
        return found


def _told(
    P_x: MPICartesianPartition, recv: Any, send: Any
) -> dict[tuple[int, ...], list[list[int]]]:
    """The widths of all workers' halos, by cell. Collective; all workers raise the same errors."""
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
                    recvs[rank, dim, side] = 0  # no neighbour: it is the caller's padding
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
    """The argument as widths, [dim, 2]; all `_WRONG` if it is none, so that all workers raise."""
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.shape == (dim, 2) and (array >= 0).all() and (array == np.floor(array)).all():
        return torch.from_numpy(array.astype(np.int64))
    return torch.full((dim, 2), _WRONG, device="cpu")
