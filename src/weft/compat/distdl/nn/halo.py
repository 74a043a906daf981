"""HaloExchange as in DistDL: into margins that the caller made, of each worker's own widths.

`weft.nn.HaloExchange` makes the margins itself, as wide on all ranks. Here a tensor comes with its
margins, which a strided kernel needs in widths that differ from worker to worker; what is in them
does not count, and the result is a new tensor of the same shape in which they are filled.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .... import nn
from ....errors import WeftError
from ....grid import Box, Shape
from ....nn.along import shards
from ....nn.layer import Layer
from ....nn.movement import Movement, fitting, group_of
from ....nn.partition import Partition
from ....plan import Piece, Plan, Side, between
from ..partition import MPICartesianPartition

__all__ = ["HaloExchange"]

Widths = tuple[tuple[int, int], ...]
"""(before, after) for each dimension of a tensor."""

_UNKNOWN, _WRONG = -1, -2  # in place of a width


@dataclass(frozen=True)
class _Filling(Movement):
    """Tensors with margins to the same with margins filled.

    Attributes:
        partition: the grid.
        halos: of each rank, by its number in the grid; empty on ranks that are not in it.
    """

    partition: Partition
    halos: tuple[Widths, ...]

    name: ClassVar[str] = "HaloExchange"

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return (self.partition,)

    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        return group_of([self.partition.ranks])

    def _givers(self) -> Iterable[int]:
        return self.partition.ranks

    def settings(self) -> str:
        return f"halos (digest {zlib.crc32(repr(self.halos).encode()):08x})"

    def alone(self, rank: int, shape: Shape) -> Shape | None:
        return shape

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        cells = self.partition.cells
        halos, bulk = {}, {}
        for rank, widths in zip(self.partition.ranks, self.halos, strict=True):
            shape = shapes[rank]
            if len(shape) < len(widths):
                raise WeftError(
                    f"{self.name}: rank {rank} has a tensor of {len(shape)} dimensions, {shape}, "
                    f"and halos for {len(widths)}"
                )
            halos[rank] = (*widths, *((0, 0),) * (len(shape) - len(widths)))
            bulk[rank] = tuple(n - sum(w) for n, w in zip(shape, halos[rank], strict=True))
            if min(bulk[rank]) < 0:
                raise WeftError(
                    f"{self.name}: rank {rank} has a tensor of shape {shape}, which is smaller "
                    f"than its halos {halos[rank]}: pad it by them first"
                )
        dims = range(self.partition.dim)
        lengths = fitting(f"{self.name} without the halos", cells, bulk, dims)
        held = shards(cells, lengths, dims)
        wanted = {rank: _grown(box, halos[rank]) for rank, box in held.items()}
        for rank, box in wanted.items():
            for dim, each in enumerate(lengths):
                if box.start[dim] < 0 or box.stop[dim] > sum(each):
                    raise WeftError(
                        f"{self.name}: rank {rank} has a halo of {halos[rank][dim]} in dimension "
                        f"{dim}, and there is not as much of the tensor next to it"
                    )
        pieces = tuple(
            Piece(rank, box, tuple(before for before, _ in halos[rank]))
            for rank, box in sorted(held.items())
        )
        return between(Side(dict(shapes), pieces), wanted)


def _grown(box: Box, widths: Widths) -> Box:
    return Box(
        tuple(at - before for at, (before, _) in zip(box.start, widths, strict=True)),
        tuple(at + after for at, (_, after) in zip(box.stop, widths, strict=True)),
    )


class HaloExchange(Layer):
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
        super().__init__(_Filling(P_x.grid, _told(P_x, recv, send_buffer_shape)))
        self.P_x, self.halo_shape = P_x, halo_shape
        self.recv_buffer_shape, self.send_buffer_shape = recv, send_buffer_shape


def _told(P_x: MPICartesianPartition, recv: Any, send: Any) -> tuple[Widths, ...]:
    """The widths of all workers' halos; collective among them, and so is what is wrong with any."""
    if not P_x.active:
        return ()
    line = P_x.grid.reshape((P_x.size,))
    both = _widths(recv, send, P_x.dim)
    found: Tensor = nn.AllGather(line, 0)(both[None])
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
    return tuple(tuple((int(a), int(b)) for a, b in each) for each in recvs.tolist())


def _widths(recv: Any, send: Any, dim: int) -> Tensor:
    """What this worker receives and sends, [2, dim, 2]."""
    found = torch.full((2, dim, 2), _WRONG, dtype=torch.int64)
    for place, given in enumerate((recv, send)):
        if given is None:
            found[place] = _UNKNOWN if place else _WRONG
            continue
        try:
            array = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError):
            continue  # it stays wrong, as all workers are told
        if array.shape == (dim, 2) and (array >= 0).all() and (array == np.floor(array)).all():
            found[place] = torch.from_numpy(array.astype(np.int64))
    return found
