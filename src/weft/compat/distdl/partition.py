"""DistDL's partitions, and the communicators that scripts make the first one of.

`MPIPartition` and `MPICartesianPartition` are faces of `weft.Partition`. Every rank knows who is in
a partition, also those that are not; making one communicates nothing, but for one made of a
communicator of mpi4py.

Scripts call little of a communicator but `Barrier()`, a rank, a size. `MPI` stands for mpi4py's
module of that name; a communicator of mpi4py's own serves, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import weft
from weft import Partition, WeftError, Wire, nn

from ..arguments import wire_of

T = TypeVar("T", bound="MPIPartition")

PROC_NULL = -1
"""The rank of a worker in a partition that it is not active in, and of a neighbour beyond an edge.
"""


@dataclass(frozen=True, slots=True)
class Communicator:
    """The workers of a partition, for a script that speaks to them as MPI does.

    Attributes:
        line: the workers, in order; None: all ranks of the default group, once it is there.
    """

    line: Partition | None = None

    @property
    def rank(self) -> int:
        """This worker's place among them; PROC_NULL if it is none of them."""
        index = self._line.index
        return PROC_NULL if index is None else index[0]

    @property
    def size(self) -> int:
        """How many they are."""
        return self._line.size

    def Get_rank(self) -> int:
        """`rank`, as MPI spells it."""
        return self.rank

    def Get_size(self) -> int:
        """`size`, as MPI spells it."""
        return self.size

    def Barrier(self) -> None:
        """Wait until all of them are here; at most the group's timeout.

        Raises:
            WireError: a worker failed, or did not come in time.
        """
        line = self._line
        if line.active:
            nn.AllSumReduce(line, 0)(torch.zeros((), device="cpu"))

    @property
    def _line(self) -> Partition:
        return self.line or line_of(None)


class MPI:
    """What scripts take from mpi4py's module of this name, without an MPI.

    Attributes:
        COMM_WORLD: all ranks of weft's default group, which is started if there is none.
        PROC_NULL: the rank of nobody.
    """

    COMM_WORLD = Communicator()
    PROC_NULL = PROC_NULL

    @staticmethod
    def Wtime() -> float:
        """Seconds since some moment in the past."""
        return time.perf_counter()


def set_backend(backend_comm: object = None, backend_array: object = None) -> None:
    """Nothing: DistDL chooses here between MPI and NCCL, NumPy and CuPy, and weft needs none."""


def line_of(comm: Any) -> Partition:
    """The ranks of a communicator or a group, in order.

    Args:
        comm: None or `MPI.COMM_WORLD`: all ranks; a Communicator; whatever `group=` of weft's calls
            takes; or a communicator of mpi4py, which is asked for its ranks: collective in it.

    Raises:
        WeftError: it is none of these, or mpi4py's COMM_NULL, or a communicator whose processes are
            not weft's ranks.
    """
    if comm is None:
        return Partition(_world().size)
    if isinstance(comm, Communicator):
        return comm.line or line_of(None)
    if hasattr(comm, "Get_rank") and hasattr(comm, "allgather"):
        if not comm:  # as mpi4py's COMM_NULL is, which has nobody to ask
            raise WeftError(
                f"rank {_world().rank}: MPI.COMM_NULL tells nothing of the workers of a partition: "
                "make it on all of them, by create_partition_inclusive of MPIPartition()"
            )
        ranks = [int(rank) for rank in comm.allgather(_world().rank)]
        if len(set(ranks)) < len(ranks):
            raise WeftError(
                f"the processes of this communicator are ranks {ranks} of weft's group: start both "
                "by the same launcher, so that each process is one rank of either"
            )
        return Partition(len(ranks), ranks=ranks)
    return Partition(wire_of(comm).size, group=comm)


def _world() -> Wire:
    """The default wire. DistDL needs no start, so where there is none, it is started here."""
    try:
        return wire_of()
    except WeftError:
        return weft.init()


_OPERATIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


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

    def _set(self, grid: Partition, device: torch.device | str | None) -> None:
        self._grid, self._released = grid, False
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
    def comm(self) -> Communicator | None:
        """What a script may call as a communicator of MPI; None if it is not active."""
        return Communicator(self._line) if self.active else None

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
        return _array(nn.Broadcast(source, self._line)(x))

    def allgather_data(self, data: Any) -> NDArray[Any]:
        """Data of all workers on all of them, shape [size, length]; collective in the partition."""
        flat = np.atleast_1d(data).reshape(1, -1)
        return _array(nn.AllGather(self._line, 0)(torch.from_numpy(flat)))

    def allreduce_data(self, data: Any, op: str = "sum") -> NDArray[Any]:
        """Arrays of all workers, of one shape, reduced by "sum", "prod", "min" or "max".

        Raises:
            WeftError: `op` is none of these.
        """
        if op not in _OPERATIONS:
            raise WeftError(f"allreduce_data: op is {op!r}: use {', '.join(_OPERATIONS)}")
        array = np.asarray(data)
        found = _array(nn.AllGather(self._line, 0)(torch.from_numpy(array[None])))
        result: NDArray[Any] = _OPERATIONS[op].reduce(found, axis=0, dtype=array.dtype)
        return result

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


def _array(x: torch.Tensor) -> NDArray[Any]:
    found: NDArray[Any] = x.numpy()
    return found
