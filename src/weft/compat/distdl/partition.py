"""MPIPartition and MPICartesianPartition: DistDL's faces of `weft.Partition`.

Every rank knows who is in a partition, also those that are not; making one communicates nothing,
but for one made of a communicator of mpi4py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import WeftError
from ...nn.partition import Partition
from .communicator import PROC_NULL, line_of
from .team import Team

__all__ = ["MPICartesianPartition", "MPIPartition"]


class MPIPartition(Team):
    """A team of workers, in a line.

    Args:
        comm: None or `MPI.COMM_WORLD`: all ranks, for which weft is started if it was not; or what
            `group=` of weft's calls takes; or a communicator of mpi4py.
        group, root: found from `comm`; have no effect.
        device: what `device` is to be; None: the CPU.
        requested_device, initialize_backend_comm: DistDL's for CuPy and NCCL; have no effect.

    Attributes:
        active: whether this worker is in it.
        rank: its place in the partition; -1 if it is not active.
        size: how many workers there are.
        shape: of the partition; dtype int64, shape [dim].
        dim: how many dimensions it has: 1.
        index: as `rank`; None if it is not active.
        device: for a script's own tensors; layers take those on any device.

    Example:
        >>> from weft.testing import run
        >>> def program(wire):
        ...     P_world = MPIPartition()
        ...     P_x = P_world.create_partition_inclusive([2, 0])
        ...     return P_x.active, P_x.rank, P_x.size
        >>> run(3, program)
        [(True, 1, 2), (False, -1, 2), (True, 0, 2)]
    """

    def __init__(
        self,
        comm: Any = None,
        group: object = None,
        root: object = None,
        device: torch.device | str | None = None,
        requested_device: object = None,
        initialize_backend_comm: bool = False,
    ) -> None:
        self._set(line_of(comm), device)

    def _like(self, grid: Partition) -> MPIPartition:
        other = object.__new__(MPIPartition)
        other._set(grid, self.device)
        return other

    def _cartesian(self, grid: Partition) -> MPICartesianPartition:
        other = object.__new__(MPICartesianPartition)
        other._set(grid, self.device)
        return other

    def create_partition_inclusive(self, ranks: Sequence[int]) -> MPIPartition:
        """The workers with these ranks in this partition, in that order.

        Raises:
            WeftError: there is none of that rank, or it is named twice.
        """
        return self._like(self.grid.subset([int(rank) for rank in np.ravel(ranks)]))

    def create_partition_union(
        self, other: MPIPartition, initialize_backend_comm: bool = False
    ) -> MPIPartition:
        """The workers of both, those of this partition first.

        Raises:
            WeftError: they count in different groups.
        """
        return self._like(self.grid.union(other.grid))

    def create_cartesian_topology_partition(
        self, shape: Sequence[int], **options: Any
    ) -> MPICartesianPartition:
        """All workers of this partition in a grid, in row-major order.

        Args:
            shape: of the grid.
            options: those of MPI_Comm_create_cart; have no effect.

        Raises:
            WeftError: the grid does not have as many cells as there are workers.
        """
        extents = [int(extent) for extent in np.ravel(shape)]
        if int(np.prod(extents)) != self.size:
            raise WeftError(
                f"a grid of {tuple(extents)} does not take the {self.size} workers of this "
                "partition: make one of as many by create_partition_inclusive first"
            )
        return self._cartesian(self.grid.reshape(extents))


class MPICartesianPartition(MPIPartition):
    """A team of workers in a grid; made by `create_cartesian_topology_partition`.

    Attributes:
        shape: how many workers in each dimension; dtype int64, shape [dim].
        dim: how many dimensions.
        index: of this worker, dtype int64, shape [dim]; None if it is not active.
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise WeftError("make it of another partition, by create_cartesian_topology_partition")

    @property
    def index(self) -> NDArray[np.int64] | None:
        return self.cartesian_index(self.rank) if self.active else None

    def cartesian_index(self, rank: int) -> NDArray[np.int64]:
        """The index of a worker, by its rank in this partition.

        Raises:
            WeftError: there is no such worker.
        """
        return np.array(self.grid.cells[self.grid.subset([rank]).ranks[0]], dtype=np.int64)

    def neighbor_ranks(self, rank: int) -> list[tuple[int, int]]:
        """The ranks in this partition of the workers before and after, for each dimension.

        -1 beyond the edges.
        """
        found = []
        for dim, at in enumerate(self.cartesian_index(rank)):
            step = int(np.prod(self.shape[dim + 1 :]))
            before = rank - step if at > 0 else PROC_NULL
            after = rank + step if at + 1 < self.shape[dim] else PROC_NULL
            found.append((before, after))
        return found

    def create_cartesian_subtopology_partition(
        self, remain_shape: Sequence[bool]
    ) -> MPICartesianPartition:
        """The sub-grid through this worker, along the dimensions for which that is true."""
        dims = [dim for dim, remains in enumerate(remain_shape) if remains]
        return self._cartesian(self.grid.keep(dims))

    def create_allreduction_partition(
        self, axes_reduce: Sequence[int], initialize_backend_comm: bool = False
    ) -> MPICartesianPartition:
        """The sub-grid through this worker along some dimensions, of extent 1 in the others."""
        kept = self.grid.keep(sorted(int(axis) % self.dim for axis in np.ravel(axes_reduce)))
        shape = [1] * self.dim
        for axis in np.ravel(axes_reduce):
            shape[axis] = self.grid.shape[axis]
        return self._cartesian(kept.reshape(shape))
