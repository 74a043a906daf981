"""DistDL's partitions, made of `weft.Partition`.

A partition is a set of workers, in a line or in a Cartesian grid; a worker is a rank. Every rank
knows the workers of a partition, whether it is one of them or not; the extents of a grid are known
to its workers, since the others may pass any (`grids_of`). Making a partition from another one
communicates nothing. Making the first one may: `MPIPartition()` starts weft if it was not started,
and a communicator of mpi4py is asked for its ranks.

Source: DistDL's manual, "Partitions".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from weft import Partition, WeftError, nn
from weft.base.arguments import shown
from weft.base.errors import entry

from .communicator import (
    MPI,
    PROC_NULL,
    Communicator,
    Terms,
    is_mpi,
    line_of,
    numbers,
    print_sequential,
    reduced,
    terms_of,
)

T = TypeVar("T", bound="MPIPartition")

_OUTSIDE = -1  # is sent in place of the number of extents by a worker that is not in the grid

_OPERATIONS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class MPIPartition:
    """A set of workers in a line.

    Args:
        comm: None or `MPI.COMM_WORLD`: all ranks; weft is started if it was not. Or what `group=`
            of weft's calls takes; or a communicator of mpi4py.
        group, root: have no effect: they follow from `comm`.
        device: the value of the attribute `device`.
        requested_device, initialize_backend_comm: DistDL's, for CuPy and NCCL; have no effect.

    Attributes:
        active: whether this process is a worker of the partition.
        rank: this worker's number in the partition; -1 if it is not active.
        size: the number of workers.
        shape: the extents of the partition, an int64 array of shape [dim]; here [size].
        dim: the number of dimensions; here 1.
        index: the same as `rank`; None if this process is not active.
        device: for a script's own tensors: what was given, else "cpu", which DistDL's own layers
            compare it with. Layers take tensors on any device.

    Raises:
        WeftError: `comm` is no such group, or this rank is not in it.
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

    def __init__(
        self,
        comm: Any = None,
        group: object = None,
        root: object = None,
        device: torch.device | str | None = None,
        requested_device: object = None,
        initialize_backend_comm: bool = False,
    ) -> None:
        line = line_of(comm)
        self._set(line, line.shape, device)
        self._mpi = comm if is_mpi(comm) else None

    def _set(
        self,
        workers: Partition | None,
        extents: tuple[int, ...],
        device: torch.device | str | None,
    ) -> None:
        self._workers = workers  # in a line; None: there are none
        self._extents = extents  # as this worker was told them
        self._released = False
        self._mpi = None
        self.device = "cpu" if device is None else device

    @property
    def grid(self) -> Partition:
        """The same partition as a `weft.Partition`.

        Raises:
            WeftError: it was deactivated; or this worker is not in it, and does not know its shape.
        """
        line = self._line
        fits = math.prod(self._extents) == line.size and min(self._extents, default=1) > 0
        if not fits:
            raise WeftError(
                f"rank {line.rank} does not know the grid of {line.brief}: it is none of these "
                f"workers, and passed the shape {self._extents}: pass the right one on all workers"
            )
        return line.reshape(self._extents)

    @property
    def active(self) -> bool:
        return not self._released and self._workers is not None and self._workers.active

    @property
    def rank(self) -> int:
        return Communicator(self._workers).rank if self.active else PROC_NULL

    @property
    def size(self) -> int:
        return 0 if self._workers is None else self._workers.size

    @property
    def shape(self) -> NDArray[np.int64]:
        return np.array(self._extents, dtype=np.int64)

    @property
    def dim(self) -> int:
        return len(self._extents)

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
        """The workers in a line, for those who communicate."""
        if self._workers is None:
            raise WeftError("nobody is in this partition: make one by MPIPartition")
        if self._released:
            raise WeftError(f"this partition, {self._brief}, was deactivated: make another")
        return self._workers

    @property
    def _brief(self) -> str:
        if self._workers is None:
            return "of nobody"
        ranks = self._workers.brief.partition(" of ")[2]
        return f"{'x'.join(map(str, self._extents)) or '1'} of {ranks}"

    def set_device(self) -> None:
        """Set the attribute `device` to "cpu", which is DistDL's choice without CuPy."""
        self.device = "cpu"

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
            WeftError: the root is not in this partition, the workers name different roots, or the
                data is no array of numbers; the same text on every worker. The next call works.
            WireError: a peer or a link failed; names the culprit. The group is lost.

        Example:
            >>> from weft.testing import run
            >>> run(2, lambda ranks: MPIPartition().broadcast_data([ranks.rank + 5], 1).tolist())
            [[6], [6]]
        """
        if self._workers is None:
            return None

        def passed() -> tuple[Terms, NDArray[Any] | None]:
            source = (self if P_data is None else P_data)._line.subset([root])
            if not set(source.ranks) <= set(self._line.ranks):
                raise WeftError(f"the root, {source.brief}, is not in {self._brief}")
            array = np.atleast_1d(numbers(data)) if source.active else None
            return {"root": self._line.ranks.index(source.ranks[0])}, array

        if not self.active:
            passed()  # which raises what the workers raise
            return None
        arrays = Communicator(self._line).exchange("broadcast_data", passed)
        return next(array for array in arrays if array is not None)

    def allgather_data(self, data: Any) -> NDArray[Any]:
        """Send data of each worker to all workers of the partition. Collective.

        Args:
            data: an array, which is flattened, of the same length and dtype on every worker.

        Returns:
            The arrays in rank order, [size, length].

        Raises:
            WeftError: they do not fit together; the same text on every worker, naming the rank. The
                next call works.

        Example:
            >>> from weft.testing import run
            >>> run(2, lambda group: MPIPartition().allgather_data([group.rank, 7]).tolist())
            [[[0, 7], [1, 7]], [[0, 7], [1, 7]]]
        """

        def passed() -> tuple[Terms, NDArray[Any]]:
            array = np.ravel(numbers(data))
            return terms_of(array), array

        return np.stack(Communicator(self._line).exchange("allgather_data", passed))

    def allreduce_data(self, data: Any, op: str = "sum") -> NDArray[Any]:
        """Reduce arrays over all workers of the partition, in rank order. Collective.

        Args:
            data: an array, of the same shape and dtype on every worker.
            op: "sum", "prod", "min" or "max"; the same on every worker.

        Returns:
            A new array of that shape and dtype.

        Raises:
            WeftError: `op` is none of these, or the workers' arguments differ; the same text on
                every worker, naming the rank. The next call works.

        Example:
            >>> from weft.testing import run
            >>> run(3, lambda group: MPIPartition().allreduce_data(group.rank, "max").item())
            [2, 2, 2]
        """

        def passed() -> tuple[Terms, NDArray[Any]]:
            if not isinstance(op, str) or op not in _OPERATIONS:
                raise WeftError(f"op is {shown(op)}: use {', '.join(_OPERATIONS)}")
            array = numbers(data)
            return {"op": op, **terms_of(array)}, array

        arrays = Communicator(self._line).exchange("allreduce_data", passed)
        return reduced(arrays, _OPERATIONS[op])

    def print_sequential(self, val: object) -> None:
        """Print `val` of all workers, in rank order, on the first worker. Collective."""
        if self.active:
            print_sequential(Communicator(self._line), val)

    def __eq__(self, other: object) -> bool:
        """Whether this worker is active in both partitions, and they are the same grid."""
        if not isinstance(other, MPIPartition):
            return NotImplemented
        return self.active and other.active and self.grid == other.grid

    def __hash__(self) -> int:
        return hash(self._workers)

    def __repr__(self) -> str:
        state = ", deactivated" if self._released else ""
        return f"{type(self).__name__}({self._brief}{state})"

    def _made(self, kind: type[T], workers: Partition, extents: tuple[int, ...] | None = None) -> T:
        """A partition of workers, which are in a grid of these extents; None: as they stand."""
        other = object.__new__(kind)
        line = workers.reshape((workers.size,))
        other._set(line, workers.shape if extents is None else extents, self.device)
        return other

    @entry
    def create_partition_inclusive(self, ranks: Sequence[int]) -> MPIPartition:
        """Make the partition of the workers that have these ranks in this one, in that order.

        Raises:
            WeftError: a rank is not in this partition, or is there twice.
        """
        return self._made(MPIPartition, self._line.subset([int(rank) for rank in np.ravel(ranks)]))

    @entry
    def create_partition_union(
        self, other: MPIPartition, initialize_backend_comm: bool = False
    ) -> MPIPartition:
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
        return self._made(MPIPartition, self._line.union(other._line))

    @entry
    def create_cartesian_topology_partition(
        self, shape: Sequence[int], **options: Any
    ) -> MPICartesianPartition:
        """Make the Cartesian grid of all workers of this partition, in row-major order.

        Args:
            shape: the extents of the grid. Those who are not in this partition may pass anything.
            options: those of MPI_Cart_create; have no effect.

        Raises:
            WeftError: on a worker of this partition, if the product of the extents is not the
                number of workers.

        Example:
            >>> from weft.testing import run
            >>> def program(group):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 2])
            ...     return P_x.index.tolist()
            >>> run(4, program)
            [[0, 0], [0, 1], [1, 0], [1, 1]]
        """
        extents = _extents(shape)
        wrong = extents is None or math.prod(extents) != self.size or min(extents, default=1) < 1
        if wrong and self.active:
            raise WeftError(
                f"a grid of {shape if extents is None else extents} does not take the {self.size} "
                "workers of this partition: make one of as many by create_partition_inclusive first"
            )
        return self._made(MPICartesianPartition, self._line, extents or ())

    @entry
    def create_broadcast_partition_to(
        self,
        P_dest: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        initialize_backend_comm: bool = False,
    ) -> tuple[MPIPartition, MPIPartition]:
        """Make the partitions in which this worker sends and receives when this grid broadcasts.

        It is collective among the workers of both grids, as making a Broadcast is. Such a partition
        has a worker of this grid, followed by the workers of the other grid to which it sends.

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
            >>> def program(group):
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
        return self._teams(*grids, self._line.union(P_dest._line))

    @entry
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
        return self._teams(*grids, self._line.union(P_dest._line))[::-1]

    @entry
    def create_allreduction_partition(
        self, axes_reduce: Sequence[int], initialize_backend_comm: bool = False
    ) -> MPICartesianPartition:
        """The sub-grid through this worker along `axes_reduce`; its other extents are 1.

        On a worker that is not active it is not active either.

        Example:
            >>> from weft.testing import run
            >>> def program(group):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 2])
            ...     return P_x.create_allreduction_partition([1]).shape.tolist()
            >>> run(4, program)[0]
            [1, 2]
        """
        if not self.active:
            return self._made(MPICartesianPartition, self._line, ())
        axes = sorted(int(axis) % self.dim for axis in np.ravel(axes_reduce))
        shape = tuple(extent if dim in axes else 1 for dim, extent in enumerate(self._extents))
        return self._made(MPICartesianPartition, self.grid.keep(axes), shape)

    def _teams(
        self, small: Partition, large: Partition, union: Partition
    ) -> tuple[MPIPartition, MPIPartition]:
        """This worker's partition as one of the small grid, and as one of the large grid."""
        layer = nn.Broadcast(small, large)
        moves = layer.plan(dict.fromkeys(small.ranks, ())).moves if union.active else ()

        def team(root: int | None) -> MPIPartition:
            """A worker of the small grid, then those to which it sends; inactive without one."""
            if root is None:
                made = self._made(MPIPartition, union)
                made.deactivate()
                return made
            others = {move.destination for move in moves if move.source == root} - {root}
            place = union.ranks.index
            numbers = [place(root), *sorted(map(place, others))]
            return self._made(MPIPartition, union.subset(numbers))

        me = union.rank
        source = {move.destination: move.source for move in moves}
        return team(me if me in small.ranks else None), team(source.get(me))


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
            >>> def program(group):
            ...     P_x = MPIPartition().create_cartesian_topology_partition([2, 1])
            ...     return P_x.neighbor_ranks(0)
            >>> run(2, program)[0]
            [(-1, 1), (-1, -1)]
        """
        at = self.cartesian_index(rank) + 1
        ranks = np.pad(np.arange(self.size).reshape(self.shape), 1, constant_values=PROC_NULL)
        steps = np.eye(self.dim, dtype=np.int64)
        return [(int(ranks[*(at - step)]), int(ranks[*(at + step)])) for step in steps]

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
        if not self.active:
            return self._made(MPICartesianPartition, self._line, ())
        dims = [dim for dim, remains in enumerate(remain_shape) if remains]
        return self._made(MPICartesianPartition, self.grid.keep(dims))


def _extents(shape: Any) -> tuple[int, ...] | None:
    """A shape as integers; None if it is none."""
    try:
        return tuple(int(extent) for extent in np.ravel(shape))
    except (TypeError, ValueError):
        return None


def nobody(P: MPIPartition) -> Partition:
    """A grid that this worker, which is not in P, is not in either: a layer of it moves nothing."""
    return P._line.subset([0])


def grids_of(one: MPIPartition, other: MPIPartition) -> tuple[Partition, Partition] | None:
    """The grids of two partitions, as their workers know them; None on a worker of neither.

    Collective among the workers of both, unless these are the same: who is not in a partition may
    have passed any shape for it.

    Raises:
        WeftError: the workers of a partition passed different shapes.
    """
    both = one, other
    lines = [each._line for each in both]
    union = lines[0].union(lines[1])
    if not union.active:
        return None
    if set(lines[0].ranks) == set(lines[1].ranks):
        return one.grid, other.grid
    told: list[int] = []
    for each in both:
        told += [each.dim, *each.shape.tolist()] if each.active else [_OUTSIDE]
    found = iter(nn.AllGather(union, 0)(torch.tensor(told, device="cpu")).tolist())
    shapes: list[dict[int, tuple[int, ...]]] = [{}, {}]
    for rank in union.ranks:
        for known in shapes:
            count = next(found)
            if count != _OUTSIDE:
                known[rank] = tuple(next(found) for _ in range(count))
    grids = []
    for line, known in zip(lines, shapes, strict=True):
        first = known[line.ranks[0]]
        for rank, shape in known.items():
            if shape != first:
                raise WeftError(
                    f"rank {line.ranks[0]} made a grid of {first} of the workers {line.brief}, and "
                    f"rank {rank} one of {shape}: pass the same shape on all workers of a grid"
                )
        grids.append(line.reshape(first))
    return grids[0], grids[1]


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
    grids = grids_of(small, large)
    if grids is None:
        return nobody(small), nobody(small)
    shapes = [
        grid.shape[::-1] if turned else grid.shape
        for grid, turned in zip(grids, (transpose_small, transpose_large), strict=True)
    ]
    agree = [
        dim
        for dim, (a, b) in enumerate(zip(shapes[0][::-1], shapes[1][::-1], strict=False))
        if a == b
    ]  # counted from the last, since the smaller grid is padded on the left
    return (
        _turned(grids[0], agree) if transpose_small else grids[0],
        _turned(grids[1], agree) if transpose_large else grids[1],
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
