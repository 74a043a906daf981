"""DistDL's partitions, made of `weft.Partition`.

A partition is a set of workers, in a line or in a Cartesian grid; a worker is a rank. Every rank
knows the workers of a partition, whether it is one of them or not. Making a partition from another
one communicates nothing. Making the first one may: `MPIPartition()` starts weft if it was not
started, and a communicator of mpi4py is asked for its ranks.

Source: DistDL's manual, "Partitions".
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
    """A set of workers in a line.

    Args:
        comm: None or `MPI.COMM_WORLD`: all ranks; weft is started if it was not. Or what `group=`
            of weft's calls takes; or a communicator of mpi4py.
        group, root: have no effect: they follow from `comm`.
        device: the value of the attribute `device`; None: the CPU.
        requested_device, initialize_backend_comm: DistDL's, for CuPy and NCCL; have no effect.

    Attributes:
        active: whether this process is a worker of the partition.
        rank: this worker's number in the partition; -1 if it is not active.
        size: the number of workers.
        shape: the extents of the partition, an int64 array of shape [dim]; here [size].
        dim: the number of dimensions; here 1.
        index: the same as `rank`; None if this process is not active.
        device: for a script's own tensors. Layers take tensors on any device.

    Raises:
        WeftError: `comm` is no such group, or this rank is not in it.
        WireError: as `weft.init`, where that is called.

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
        """The same partition as a `weft.Partition`.

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
        """The communicator of mpi4py that made it, else one over weft; None if it is not active."""
        if not self.active:
            return None
        return Communicator(self._line) if self._mpi is None else self._mpi

    _comm = comm

    @property
    def _line(self) -> Partition:
        return self.grid.reshape((self.size,))

    def deactivate(self) -> None:
        """Make this partition inactive on this worker. Layers that were made of it still work."""
        self._released = True

    def initialize_backend_comm(self) -> None:
        """Do nothing: weft needs no second communicator."""

    def broadcast_data(
        self, data: Any, root: int = 0, P_data: MPIPartition | None = None
    ) -> NDArray[Any] | None:
        """Send data of one worker to all workers of this partition. Collective.

        Args:
            data: an array, or what NumPy makes an array of; only the root's is read.
            root: the rank, in `P_data`, of the worker that has the data.
            P_data: a partition whose root is a worker of this one; None: this one.

        Returns:
            The array, of at least one dimension; None where this partition is not active.

        Raises:
            WeftError: the root is not in this partition.
            WireError: a peer or a link failed; names the culprit. The group is lost.

        Example:
            >>> from weft.testing import run
            >>> run(2, lambda wire: MPIPartition().broadcast_data([wire.rank + 5], root=1).tolist())
            [[6], [6]]
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
        """Send data of each worker to all workers of the partition. Collective.

        Args:
            data: an array, which is flattened, of the same length and dtype on every worker.

        Returns:
            The arrays in rank order, [size, length].

        Example:
            >>> from weft.testing import run
            >>> run(2, lambda wire: MPIPartition().allgather_data([wire.rank, 7]).tolist())
            [[[0, 7], [1, 7]], [[0, 7], [1, 7]]]
        """
        return Communicator(self._line).gathered(np.ravel(data))

    def allreduce_data(self, data: Any, op: str = "sum") -> NDArray[Any]:
        """Reduce arrays over all workers of the partition, in rank order. Collective.

        Args:
            data: an array, of the same shape and dtype on every worker.
            op: "sum", "prod", "min" or "max".

        Returns:
            A new array of that shape and dtype.

        Raises:
            WeftError: `op` is none of these.

        Example:
            >>> from weft.testing import run
            >>> run(3, lambda wire: MPIPartition().allreduce_data(wire.rank, "max").item())
            [2, 2, 2]
        """
        if op not in _OPERATIONS:
            raise WeftError(f"allreduce_data: op is {op!r}: use {', '.join(_OPERATIONS)}")
        return Communicator(self._line).reduced(np.asarray(data), _OPERATIONS[op])

    def print_sequential(self, val: object) -> None:
        """Print `val` of all workers, in rank order, on the first worker. Collective."""
        if self.active:
            said = torch.frombuffer(bytearray(f"{val}\n".encode()), dtype=torch.uint8)
            text = bytes(nn.Gather(self._line, 0)(said).tolist()).decode()
            print(text, end="", flush=True)

    def __eq__(self, other: object) -> bool:
        """Whether this worker is active in both partitions, and they are the same grid."""
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
        """Make the partition of the workers that have these ranks in this one, in that order.

        Raises:
            WeftError: a rank is not in this partition, or is there twice.
        """
        return self._made(MPIPartition, self.grid.subset([int(rank) for rank in np.ravel(ranks)]))

    def create_partition_union(
        self, other: MPIPartition, initialize_backend_comm: bool = False
    ) -> MPIPartition:
        """Make the partition of the workers of both, those of this one first.

        Raises:
            WeftError: the two partitions are of different groups.

        Example:
            >>> from weft.testing import run
            >>> def program(wire):
            ...     one, other = (MPIPartition().create_partition_inclusive([r]) for r in (2, 0))
            ...     return one.create_partition_union(other).rank
            >>> run(3, program)
            [1, -1, 0]
        """
        return self._made(MPIPartition, self.grid.union(other.grid))

    def create_cartesian_topology_partition(
        self, shape: Sequence[int], **options: Any
    ) -> MPICartesianPartition:
        """Make the Cartesian grid of all workers of this partition, in row-major order.

        Args:
            shape: the extents of the grid.
            options: those of MPI_Cart_create; have no effect.

        Raises:
            WeftError: the product of the extents is not the number of workers.

        Example:
            >>> from weft.testing import run
            >>> def program(wire):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 2])
            ...     return P_x.index.tolist()
            >>> run(4, program)
            [[0, 0], [0, 1], [1, 0], [1, 1]]
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
        """Make the partitions in which this worker sends and receives when this grid broadcasts.

        Such a partition has a worker of this grid, followed by the workers of the other grid to
        which it sends.

        Args:
            P_dest: the other grid.
            transpose_src: whether to reverse the shape of this grid before the grids are matched.
            transpose_dest: the same for `P_dest`.
            initialize_backend_comm: has no effect.

        Returns:
            P_send, in which this worker is the sender, and P_recv, in which it receives. Each is
            inactive if there is no such partition for this worker.

        Raises:
            WeftError: the grids do not match.

        Example:
            >>> from weft.testing import run
            >>> def program(wire):
            ...     P_world = MPIPartition()
            ...     P_y = P_world.create_cartesian_topology_partition([2])
            ...     P_x = P_world.create_partition_inclusive([0])
            ...     P_x = P_x.create_cartesian_topology_partition([1])
            ...     P_send, P_recv = P_x.create_broadcast_partition_to(P_y)
            ...     return P_send.active, P_recv.active, P_recv.size
            >>> run(2, program)
            [(True, True, 2), (False, True, 2)]
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
        """Make the same partitions for a sum from this grid to `P_dest`.

        A partition has a worker of `P_dest`, followed by the workers of this grid whose tensors it
        sums. Arguments, results and errors are those of `create_broadcast_partition_to`.
        """
        grids = paired(P_dest, self, transpose_dest, transpose_src)
        return self._teams(*grids, self.grid.union(P_dest.grid))[::-1]

    def _teams(
        self, small: Partition, large: Partition, union: Partition
    ) -> tuple[MPIPartition, MPIPartition]:
        """This worker's partition as one of the small grid, and as one of the large grid."""
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
    """Workers in a Cartesian grid; `create_cartesian_topology_partition` makes it.

    Attributes:
        shape: the extents of the grid, an int64 array of shape [dim].
        dim: the number of dimensions.
        index: this worker's index in the grid, an int64 array of shape [dim]; None if this process
            is not active.

    Example:
        >>> from weft.testing import run
        >>> def program(wire):
        ...     P_x = MPIPartition().create_cartesian_topology_partition([1, 2])
        ...     return P_x.dim, P_x.shape.tolist(), P_x.index.tolist()
        >>> run(2, program)
        [(2, [1, 2], [0, 0]), (2, [1, 2], [0, 1])]
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise WeftError("make it of another partition, by create_cartesian_topology_partition")

    @property
    def index(self) -> NDArray[np.int64] | None:
        return self.cartesian_index(self.rank) if self.active else None

    def cartesian_index(self, rank: int) -> NDArray[np.int64]:
        """The index, in the grid, of the worker with this rank: an int64 array of shape [dim].

        Raises:
            WeftError: there is no such worker.
        """
        return np.array(self.grid.cells[self.grid.subset([rank]).ranks[0]], dtype=np.int64)

    def neighbor_ranks(self, rank: int) -> list[tuple[int, int]]:
        """The ranks of a worker's neighbours: (before, after) in each dimension.

        Beyond an edge of the grid the rank is -1.

        Example:
            >>> from weft.testing import run
            >>> def program(wire):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 1])
            ...     return P_x.neighbor_ranks(0)
            >>> run(2, program)[0]
            [(-1, 1), (-1, -1)]
        """
        at = self.cartesian_index(rank) + 1
        ranks = np.pad(np.arange(self.size).reshape(self.shape), 1, constant_values=PROC_NULL)
        steps = np.eye(self.dim, dtype=np.int64)
        return [(int(ranks[*(at - step)]), int(ranks[*(at + step)])) for step in steps]

    def create_cartesian_subtopology_partition(
        self, remain_shape: Sequence[bool]
    ) -> MPICartesianPartition:
        """The sub-grid through this worker along the dimensions where `remain_shape` is true.

        Example:
            >>> from weft.testing import run
            >>> def program(wire):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 2])
            ...     row = P_x.create_cartesian_subtopology_partition([False, True])
            ...     return row.shape.tolist(), row.rank
            >>> run(4, program)
            [([2], 0), ([2], 1), ([2], 0), ([2], 1)]
        """
        dims = [dim for dim, remains in enumerate(remain_shape) if remains]
        return self._made(MPICartesianPartition, self.grid.keep(dims))

    def create_allreduction_partition(
        self, axes_reduce: Sequence[int], initialize_backend_comm: bool = False
    ) -> MPICartesianPartition:
        """The sub-grid through this worker along `axes_reduce`; its other extents are 1.

        Example:
            >>> from weft.testing import run
            >>> def program(wire):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 2])
            ...     return P_x.create_allreduction_partition([1]).shape.tolist()
            >>> run(4, program)[0]
            [1, 2]
        """
        axes = sorted(int(axis) % self.dim for axis in np.ravel(axes_reduce))
        shape = [extent if dim in axes else 1 for dim, extent in enumerate(self.grid.shape)]
        return self._made(MPICartesianPartition, self.grid.keep(axes).reshape(shape))


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
