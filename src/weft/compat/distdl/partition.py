"""DistDL's partitions, made of `weft.Partition`.

A partition is a set of workers, in a line or in a Cartesian grid; a worker is a rank. Every rank
makes the same ones, whether it is a worker or not. Making a partition from another one communicates
nothing. Making the first one may: `MPIPartition()` starts weft if it was not started.

Source: DistDL's manual, "Partitions".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import weft
from weft import Partition, WeftError
from weft.base.errors import entry

from ..arguments import group_of

_OUTSIDE = -1  # the rank of who is no worker: MPI's PROC_NULL in DistDL


class MPIPartition:
    """A set of workers in a line.

    Args:
        comm: None: all ranks; weft is started if it was not. Or what `group=` of weft's calls
            takes. Or a communicator of mpi4py of all ranks, such as `MPI.COMM_WORLD`; making the
            partition is collective then.

    Attributes:
        grid: the same as a `weft.Partition`, for layers of `weft.nn`.
        active: whether this process is a worker of the partition.
        rank: this worker's number in the partition; -1 if it is not active.
        size: the number of workers.
        shape: the extents of the partition, an int64 array of shape [dim]; here [size].
        dim: the number of dimensions; here 1.
        index: the same as `rank`; None if this process is not active.

    Raises:
        WeftError: `comm` is no such group, or not of all ranks in weft's order.
        WireError: as `weft.init`, where that is called.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_world = MPIPartition()
        ...     P_x = P_world.create_partition_inclusive([2, 0])
        ...     return P_x.active, P_x.rank, P_x.size
        >>> run(3, program)
        [(True, 1, 2), (False, -1, 2), (True, 0, 2)]
    """

    grid: Partition

    def __init__(self, comm: Any = None) -> None:
        if hasattr(comm, "Get_rank"):
            _check_world(comm)
            comm = None
        if comm is None:
            _started()
        self.grid = Partition(group_of(comm).size, group=comm)

    @classmethod
    def _of(cls, grid: Partition) -> Self:
        made = cls.__new__(cls)
        made.grid = grid
        return made

    @property
    def active(self) -> bool:
        return self.grid.active

    @property
    def rank(self) -> int:
        return self.grid.ranks.index(self.grid.rank) if self.active else _OUTSIDE

    @property
    def size(self) -> int:
        return self.grid.size

    @property
    def shape(self) -> NDArray[np.int64]:
        return np.array(self.grid.shape, dtype=np.int64)

    @property
    def dim(self) -> int:
        return self.grid.dim

    @property
    def index(self) -> Any:
        return self.rank if self.active else None

    @property
    def _comm(self) -> _Communicator | None:
        """What DistDL's scripts wait by, `P._comm.Barrier()`; None if this is not active."""
        return _Communicator(self.grid) if self.active else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.grid.brief})"

    @entry
    def create_partition_inclusive(self, ranks: Sequence[int]) -> MPIPartition:
        """Make the partition of the workers that have these ranks in this one, in that order.

        Raises:
            WeftError: a rank is not in this partition, or is there twice.
        """
        return MPIPartition._of(self.grid.subset([int(rank) for rank in np.ravel(ranks)]))

    @entry
    def create_partition_union(self, other: MPIPartition) -> MPIPartition:
        """Make the partition of the workers of both, those of this one first.

        Raises:
            WeftError: the two partitions are of different groups.

        Example:
            >>> from weft.testing import run
            >>> def program(group):
            ...     one, other = (MPIPartition().create_partition_inclusive([r]) for r in (2, 0))
            ...     return one.create_partition_union(other).rank
            >>> run(3, program)
            [1, -1, 0]
        """
        return MPIPartition._of(self.grid.union(other.grid))

    @entry
    def create_cartesian_topology_partition(
        self, shape: Sequence[int], **options: Any
    ) -> MPICartesianPartition:
        """Make the Cartesian grid of all workers of this partition, in row-major order.

        Args:
            shape: the extents of the grid, the same on every rank.
            options: those of MPI_Cart_create; have no effect.

        Raises:
            WeftError: the product of the extents is not the number of workers; raised on this rank
                alone. If ranks pass different shapes of as many, layers raise where they meet.

        Example:
            >>> from weft.testing import run
            >>> def program(group):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 2])
            ...     return P_x.index.tolist()
            >>> run(4, program)
            [[0, 0], [0, 1], [1, 0], [1, 1]]
        """
        try:
            extents = tuple(int(extent) for extent in np.ravel(shape))
        except (TypeError, ValueError):
            extents = ()
        if not extents or math.prod(extents) != self.size or min(extents) < 1:
            raise WeftError(
                f"rank {self.grid.rank}: a grid of {shape} does not take the {self.size} workers "
                f"of {self}: pass a shape of as many on every rank, or make a partition of as many "
                "by create_partition_inclusive first"
            )
        return MPICartesianPartition._of(self.grid.reshape(extents))


class MPICartesianPartition(MPIPartition):
    """Workers in a Cartesian grid; `create_cartesian_topology_partition` makes it.

    Attributes:
        shape: the extents of the grid, an int64 array of shape [dim].
        dim: the number of dimensions.
        index: this worker's index in the grid, an int64 array of shape [dim]; None if this process
            is not active.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_x = MPIPartition().create_cartesian_topology_partition([1, 2])
        ...     return P_x.dim, P_x.shape.tolist(), P_x.index.tolist()
        >>> run(2, program)
        [(2, [1, 2], [0, 0]), (2, [1, 2], [0, 1])]
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise WeftError("make it of another partition, by create_cartesian_topology_partition")

    @property
    def index(self) -> NDArray[np.int64] | None:
        return np.array(self.grid.index, dtype=np.int64) if self.active else None

    @entry
    def create_cartesian_subtopology_partition(
        self, remain_shape: Sequence[bool]
    ) -> MPICartesianPartition:
        """The sub-grid through this worker along the dimensions where `remain_shape` is true.

        On a worker that is not active it is not active either.

        Example:
            >>> from weft.testing import run
            >>> def program(group):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 2])
            ...     row = P_x.create_cartesian_subtopology_partition([False, True])
            ...     return row.shape.tolist(), row.rank
            >>> run(4, program)
            [([2], 0), ([2], 1), ([2], 0), ([2], 1)]
        """
        dims = [dim for dim, remains in enumerate(remain_shape) if remains]
        return MPICartesianPartition._of(self.grid.keep(dims))


class _Communicator:
    """All that is left of a partition's communicator."""

    def __init__(self, grid: Partition) -> None:
        self._grid = grid

    def Barrier(self) -> None:
        """Wait until all workers of the partition have called this."""
        weft.barrier(group=self._grid.group.subset(self._grid.ranks))


def _started() -> weft.Group:
    """The default group, of all ranks; weft is started if it was not."""
    try:
        return group_of()
    except WeftError:
        return weft.init()


def _check_world(comm: Any) -> None:
    """Check that a communicator of mpi4py has weft's ranks, in their order; collective.

    Raises:
        WeftError: it has not; the same text on every rank, unless it has another size.
    """
    group = _started()
    remedy = "pass MPI.COMM_WORLD or nothing, and make parts by create_partition_inclusive"
    if comm.Get_size() != group.size:
        raise WeftError(
            f"rank {group.rank}: the communicator has {comm.Get_size()} processes, and there are "
            f"{group.size} ranks: {remedy}"
        )

    def check() -> None:
        if comm.Get_rank() != group.rank:
            raise WeftError(f"it is rank {comm.Get_rank()} of the communicator: {remedy}")

    weft.attempt(check, group, name="MPIPartition")


def paired(
    small: MPIPartition, large: MPIPartition, transpose_small: bool, transpose_large: bool
) -> tuple[Partition, Partition]:
    """Two grids between which `weft.nn.Broadcast` broadcasts as DistDL does between the given ones.

    A transposed grid has its shape reversed. DistDL matches the cells of the two grids by their
    number along the dimensions whose extents agree. It counts them in row-major order, but in a
    transposed grid in column-major order, which is the row-major order before the grid was
    transposed. So, if several such dimensions are cut, ranks are matched in the order of their
    numbers, and not cell by transposed cell.
    """
    grids = (small.grid, transpose_small), (large.grid, transpose_large)
    # counted from the last, since the smaller grid is padded on the left
    extents = [grid.shape if turned else grid.shape[::-1] for grid, turned in grids]
    pairs = enumerate(zip(*extents, strict=False))
    agree = [dim for dim, (one, other) in pairs if one == other]
    first, second = [_turned(grid, agree) if turned else grid for grid, turned in grids]
    return first, second


def _turned(grid: Partition, agree: Sequence[int]) -> Partition:
    """The transposed grid, with its cells numbered as in `paired`.

    `agree` has the dimensions whose extents agree, counted from the last.
    """
    cells = np.arange(grid.size).reshape(grid.shape).transpose()
    dims = sorted(grid.dim - 1 - dim for dim in agree)
    first = tuple(range(len(dims)))
    front = np.moveaxis(cells, dims, first)
    by_column = front.transpose(*first[::-1], *range(len(dims), grid.dim)).reshape(front.shape)
    turned = np.moveaxis(by_column, first, dims)
    return grid.subset(turned.ravel().tolist()).reshape(cells.shape)
