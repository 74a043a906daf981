"""DistDL's partitions: faces of `weft.Partition`.

Every rank knows who is in a partition, also those that are not. Making one communicates nothing,
but for one made of a communicator of mpi4py, which is asked for its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from weft import Partition, WeftError, nn

from .communicator import MPI, PROC_NULL, Communicator, is_mpi, line_of

T = TypeVar("T", bound="MPIPartition")

_OPERATIONS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class MPIPartition:
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
        self._mpi = comm if is_mpi(comm) else None

    def _set(self, grid: Partition, device: torch.device | str | None) -> None:
        self._grid, self._released, self._mpi = grid, False, None
        self.device = torch.device("cpu") if device is None else torch.device(device)

    @property
    def grid(self) -> Partition:
        """The `weft.Partition` that it is.

        Raises:
            WeftError: it was deactivated.
        """
        if self._released:
            raise WeftError(f"this partition, {self._grid.brief}, was deactivated: make another")
        return self._grid

    @property
    def active(self) -> bool:
        return not self._released and self._grid.active

    @property
    def rank(self) -> int:
        if not self.active:
            return PROC_NULL
        return self._grid.ranks.index(self._grid.rank)

    @property
    def size(self) -> int:
        return self._grid.size

    @property
    def shape(self) -> NDArray[np.int64]:
        return np.array(self._grid.shape, dtype=np.int64)

    @property
    def dim(self) -> int:
        return self._grid.dim

    @property
    def index(self) -> Any:
        return self.rank if self.active else None

    @property
    def comm(self) -> Any:
        """The communicator of mpi4py that it was made of, or one over weft; None if not active."""
        if not self.active:
            return None
        return Communicator(self._line) if self._mpi is None else self._mpi

    _comm = comm

    @property
    def _line(self) -> Partition:
        return self.grid.reshape((self.size,))

    def deactivate(self) -> None:
        """Be inactive from now on. Layers that were made of it still work."""
        self._released = True

    def initialize_backend_comm(self) -> None:
        """Nothing: weft has no other communicators."""

    def broadcast_data(
        self, data: Any, root: int = 0, P_data: MPIPartition | None = None
    ) -> NDArray[Any] | None:
        """Data of one worker, on all workers of this partition.

        Args:
            data: an array, or what makes one; read on the root alone.
            root: its rank in `P_data`.
            P_data: a partition of some of these workers; None: this one.

        Returns:
            The array, of at least one dimension; None where this partition is not active.

        Raises:
            WeftError: the root is none of these workers.
        """
        source = (self if P_data is None else P_data)._line.subset([root])
        if not set(source.ranks) <= set(self.grid.ranks):
            raise WeftError(f"the root, {source.brief}, is not in {self.grid.brief}")
        if not self.active:
            return None
        x = torch.from_numpy(np.atleast_1d(data)) if source.active else nn.zero_volume_tensor()
        found: NDArray[Any] = nn.Broadcast(source, self._line)(x).numpy()
        return found

    def allgather_data(self, data: Any) -> NDArray[Any]:
        """Data of all workers on all of them, shape [size, length]; collective in the partition."""
        return Communicator(self._line).gathered(np.ravel(data))

    def allreduce_data(self, data: Any, op: str = "sum") -> NDArray[Any]:
        """Arrays of all workers, of one shape, reduced by "sum", "prod", "min" or "max".

        Raises:
            WeftError: `op` is none of these.
        """
        if op not in _OPERATIONS:
            raise WeftError(f"allreduce_data: op is {op!r}: use {', '.join(_OPERATIONS)}")
        return Communicator(self._line).reduced(np.asarray(data), _OPERATIONS[op])

    def print_sequential(self, val: object) -> None:
        """Print what all workers have to say, in their order, on the first."""
        if self.active:
            said = torch.frombuffer(bytearray(f"{val}\n".encode()), dtype=torch.uint8)
            text = bytes(nn.Gather(self._line, 0)(said).tolist()).decode()
            print(text, end="", flush=True)

    def __eq__(self, other: object) -> bool:
        """Whether this worker is active in both, and they are the same grid."""
        if not isinstance(other, MPIPartition):
            return NotImplemented
        return self.active and other.active and self.grid == other.grid

    def __hash__(self) -> int:
        return hash(self._grid)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._grid.brief}{', deactivated' * self._released})"

    def _made(self, kind: type[T], grid: Partition) -> T:
        other = object.__new__(kind)
        other._set(grid, self.device)
        return other

    def create_partition_inclusive(self, ranks: Sequence[int]) -> MPIPartition:
        """The workers with these ranks in this partition, in that order.

        Raises:
            WeftError: there is none of that rank, or it is named twice.
        """
        return self._made(MPIPartition, self.grid.subset([int(rank) for rank in np.ravel(ranks)]))

    def create_partition_union(
        self, other: MPIPartition, initialize_backend_comm: bool = False
    ) -> MPIPartition:
        """The workers of both, those of this partition first.

        Raises:
            WeftError: they count in different groups.
        """
        return self._made(MPIPartition, self.grid.union(other.grid))

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
        return self._made(MPICartesianPartition, self.grid.reshape(extents))

    def create_broadcast_partition_to(
        self,
        P_dest: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        initialize_backend_comm: bool = False,
    ) -> tuple[MPIPartition, MPIPartition]:
        """This worker's teams, to send to and to receive in, where this grid broadcasts to another.

        A team is a worker of this grid and then those of the other that it stands for.

        Args:
            P_dest: the other grid.
            transpose_src, transpose_dest: whether the shape of this one, of the other is reversed.
            initialize_backend_comm: has no effect.

        Returns:
            P_send, P_recv: each is inactive where the worker has no such team.

        Raises:
            WeftError: the grids do not match.
        """
        grids = paired(self, P_dest, transpose_src, transpose_dest)
        return self._teams(*grids, self.grid.union(P_dest.grid))

    def create_reduction_partition_to(
        self,
        P_dest: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        initialize_backend_comm: bool = False,
    ) -> tuple[MPIPartition, MPIPartition]:
        """The same for a sum from this grid to another, whose workers come first in their teams."""
        grids = paired(P_dest, self, transpose_dest, transpose_src)
        return self._teams(*grids, self.grid.union(P_dest.grid))[::-1]

    def _teams(
        self, small: Partition, large: Partition, union: Partition
    ) -> tuple[MPIPartition, MPIPartition]:
        """This worker's team as one of the small grid, and as one of the large grid."""
        layer, me, place = nn.Broadcast(small, large), union.rank, union.ranks.index
        moves = layer.plan(()).moves if union.active else ()
        first = {move.destination: move.source for move in moves}
        found = []
        for root in (me if me in small.ranks else None, first.get(me)):
            team = self._made(MPIPartition, union)
            if root is None:
                team.deactivate()
            else:
                others = {move.destination for move in moves if move.source == root} - {root}
                numbers = [place(root), *sorted(map(place, others))]
                team = self._made(MPIPartition, union.subset(numbers))
            found.append(team)
        return found[0], found[1]


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
        at = self.cartesian_index(rank) + 1
        ranks = np.pad(np.arange(self.size).reshape(self.shape), 1, constant_values=PROC_NULL)
        steps = np.eye(self.dim, dtype=np.int64)
        return [(int(ranks[*(at - step)]), int(ranks[*(at + step)])) for step in steps]

    def create_cartesian_subtopology_partition(
        self, remain_shape: Sequence[bool]
    ) -> MPICartesianPartition:
        """The sub-grid through this worker, along the dimensions for which that is true."""
        dims = [dim for dim, remains in enumerate(remain_shape) if remains]
        return self._made(MPICartesianPartition, self.grid.keep(dims))

    def create_allreduction_partition(
        self, axes_reduce: Sequence[int], initialize_backend_comm: bool = False
    ) -> MPICartesianPartition:
        """The sub-grid through this worker along some dimensions, of extent 1 in the others."""
        axes = sorted(int(axis) % self.dim for axis in np.ravel(axes_reduce))
        shape = [extent if dim in axes else 1 for dim, extent in enumerate(self.grid.shape)]
        return self._made(MPICartesianPartition, self.grid.keep(axes).reshape(shape))


def paired(
    small: MPIPartition, large: MPIPartition, transpose_small: bool, transpose_large: bool
) -> tuple[Partition, Partition]:
    """Two grids such that those of `weft` broadcast as DistDL's do.

    A transposed grid has its shape reversed. As in DistDL, the cells of the two grids are matched
    by their number along the dimensions whose extents agree, which is counted in row-major order,
    but in a transposed grid in column-major order. That is its row-major order before it was
    transposed: where several such dimensions are cut, ranks are matched in the order they stand in,
    not at mirrored places.
    """
    shapes = [
        grid.shape[::-1] if turned else grid.shape
        for grid, turned in ((small.grid, transpose_small), (large.grid, transpose_large))
    ]
    agree = [
        dim
        for dim, (a, b) in enumerate(zip(shapes[0][::-1], shapes[1][::-1], strict=False))
        if a == b
    ]  # counted from the last, since the smaller grid is padded on the left
    return (
        _turned(small.grid, agree) if transpose_small else small.grid,
        _turned(large.grid, agree) if transpose_large else large.grid,
    )


def _turned(grid: Partition, agree: Sequence[int]) -> Partition:
    """A grid transposed, with its cells numbered as above; `agree` counts from the last."""
    cells = np.arange(grid.size).reshape(grid.shape).transpose()
    dims = sorted(grid.dim - 1 - dim for dim in agree)
    first = tuple(range(len(dims)))
    front = np.moveaxis(cells, dims, first)
    by_column = front.transpose(*first[::-1], *range(len(dims), grid.dim)).reshape(front.shape)
    turned = np.moveaxis(by_column, first, dims)
    return grid.subset(turned.ravel().tolist()).reshape(cells.shape)
