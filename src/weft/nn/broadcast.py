"""Broadcast and SumReduce: from some cells of a grid to more of them, and back.

Broadcast copies the tensor of each rank of a source grid to all ranks of the target grid that
stand for it, as NumPy broadcasts arrays: a dimension of extent 1 stands for all places of the
target's. Its adjoint, SumReduce, adds up what those ranks have. The ranks of the two grids may be
the same, some of the same, or others.

Source: DistDL (Hewett and Grady, arXiv:2006.03108).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import WeftError
from ..grid import Shape, cells, ravel, whole
from ..plan import Plan, Side, between
from .layer import Layer
from .partition import Partition, are_grids, normal_dims, same_group
from .spec import Spec, checked_shape, fitting


def copies(small: Partition, large: Partition) -> Mapping[int, tuple[int, ...]]:
    """For each rank of the small grid the ranks of the large one that it stands for."""
    return _copies(small.shape, small.ranks, large.shape, large.ranks)


@functools.lru_cache(maxsize=256)  # by integers: a partition would keep its wire open
def _copies(
    small: Shape, small_ranks: tuple[int, ...], large: Shape, large_ranks: tuple[int, ...]
) -> Mapping[int, tuple[int, ...]]:
    extra = len(large) - len(small)
    found: dict[int, list[int]] = {rank: [] for rank in small_ranks}
    for rank, cell in zip(large_ranks, cells(large), strict=True):
        at = [
            0 if extent == 1 else place for place, extent in zip(cell[extra:], small, strict=True)
        ]
        found[small_ranks[ravel(at, small)]].append(rank)
    return {rank: tuple(each) for rank, each in found.items()}


def check_grids(name: str, small: Partition, large: Partition) -> None:
    """See that one grid broadcasts to the other.

    Raises:
        WeftError: it does not.
    """
    same_group(name, small, large)
    tail = large.shape[large.dim - small.dim :]
    if small.dim > large.dim or any(
        a not in (1, b) for a, b in zip(small.shape, tail, strict=True)
    ):
        raise WeftError(
            f"{name}: a grid of {small.shape} does not broadcast to one of {large.shape}: each "
            "dimension must be 1 or as the other's"
        )


def first_along(partition: Partition, dims: Sequence[int] | int) -> Partition:
    """The cells of a grid that are first along some dimensions, as a grid of its own."""
    kept = normal_dims(dims, partition.dim)
    shape = tuple(1 if dim in kept else extent for dim, extent in enumerate(partition.shape))
    ranks = [r for r, cell in partition.cells.items() if all(cell[dim] == 0 for dim in kept)]
    return partition.subset([partition.ranks.index(rank) for rank in ranks]).reshape(shape)


class _BetweenGrids(Spec):
    """Ranks of a small grid, each of which stands for some ranks of a large one."""

    @property
    @abc.abstractmethod
    def copies(self) -> Mapping[int, tuple[int, ...]]:
        """For each rank of the small grid the ranks of the large one that it stands for."""

    def _connected(self) -> Iterable[Sequence[int]]:
        return [(rank, *each) for rank, each in self.copies.items()]

    def inputs(self, rank: int, shape: Shape) -> Mapping[int, Shape] | None:
        return dict.fromkeys(self.sources, shape)

    def output(self, rank: int, shape: Shape) -> Shape | None:
        return shape if rank in self.copies.get(rank, ()) else None

    def _here(self, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """The part of `copies` that concerns the group that these ranks are in."""
        group = {other for rank in ranks for other in self.groups[rank]}
        return {rank: each for rank, each in self.copies.items() if rank in group}


@dataclass(frozen=True)
class BroadcastSpec(_BetweenGrids):
    """From the small grid to the large one."""

    small: Partition
    large: Partition

    name: ClassVar[str] = "Broadcast"

    @property
    def copies(self) -> Mapping[int, tuple[int, ...]]:
        return copies(self.small, self.large)

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        have, want = [], []
        for rank, each in self._here(shapes).items():
            box = whole(shapes[rank])
            have.append(Side.of({rank: box}, sheet=rank))
            want.append(Side.of(dict.fromkeys(each, box), sheet=rank))
        return between(_together(have), _together(want))


@dataclass(frozen=True)
class SumReduceSpec(_BetweenGrids):
    """From the large grid to the small one."""

    large: Partition
    small: Partition

    name: ClassVar[str] = "SumReduce"
    summing: ClassVar[bool] = True

    @property
    def copies(self) -> Mapping[int, tuple[int, ...]]:
        return copies(self.small, self.large)

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        have, want = [], []
        for rank, each in self._here(shapes).items():
            fitting(self.name, dict.fromkeys(each, ()), {r: shapes[r] for r in each}, ())
            box = whole(shapes[each[0]])
            have.append(Side.of(dict.fromkeys(each, box), sheet=rank))
            want.append(Side.of({rank: box}, sheet=rank))
        return between(_together(have), _together(want))


def _together(sides: Sequence[Side]) -> Side:
    return Side(
        {rank: shape for side in sides for rank, shape in side.shapes.items()},
        tuple(piece for side in sides for piece in side.pieces),
    )


class Broadcast(Layer):
    """Copies tensors from the cells of a grid to more cells.

    Input: a tensor on each rank of the source, none elsewhere (`zero_volume_tensor()`). Output: a
    copy on each rank of the target, none elsewhere. Adjoint: SumReduce.

    Args:
        partition: the source grid; or the only one, if `target` names dimensions.
        target: the grid to copy to, each of whose dimensions is the source's or stands where the
            source has 1; or dimensions of `partition`, along which its first cells are the source.
        shape: the shape of the tensors, if it is known; checked, and needed under torch.compile.

    Raises:
        WeftError: the grids do not match.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     layer = weft.nn.Broadcast(weft.Partition(3), 0)
        ...     x = weft.nn.zero_volume_tensor() if wire.rank else torch.tensor([2.0, 5.0])
        ...     return layer(x)
        >>> run(3, program)[2]
        tensor([2., 5.])
    """

    def __init__(
        self,
        partition: Partition,
        target: Partition | Sequence[int] | int,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        are_grids("Broadcast", partition)
        if isinstance(target, Partition):
            small, large = partition, target
        else:
            small, large = first_along(partition, target), partition
        check_grids("Broadcast", small, large)
        super().__init__(BroadcastSpec(small, large, shape=checked_shape(shape)))


class SumReduce(Layer):
    """Adds up the tensors of the cells of a grid on fewer cells.

    Input: a tensor on each rank of the source, of the same shape wherever they are added up.
    Output: the sums on the ranks of the target, nothing elsewhere. float16 and bfloat16 are
    accumulated in float32. Adjoint: Broadcast.

    Args:
        partition: the source grid; or the only one, if `target` names dimensions.
        target: the grid to add up on, each of whose dimensions is the source's or 1; or dimensions
            of `partition`, along which its first cells are the target.
        shape: the shape of the tensors, if it is known; checked, and needed under torch.compile.

    Raises:
        WeftError: the grids do not match; when called: shapes differ, or the dtype has no addition.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> run(3, lambda wire: weft.nn.SumReduce(weft.Partition(3), 0)(torch.ones(2)))
        [tensor([3., 3.]), tensor([]), tensor([])]
    """

    def __init__(
        self,
        partition: Partition,
        target: Partition | Sequence[int] | int,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        are_grids("SumReduce", partition)
        if isinstance(target, Partition):
            large, small = partition, target
        else:
            large, small = partition, first_along(partition, target)
        check_grids("SumReduce", small, large)
        super().__init__(SumReduceSpec(large, small, shape=checked_shape(shape)))
