"""What the layers on one grid share: which ranks make a slice, and how its tensor is cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import WeftError
from ..grid import Box, Shape, balanced
from .movement import Lengths, Movement, group_of, parts, slices
from .partition import Partition, integers

__all__ = ["Along", "cut", "evenly", "given", "shards", "told"]


@dataclass(frozen=True)
class Along(Movement):
    """What moves within the slices of one grid along some dimensions."""

    partition: Partition
    dims: Shape
    shape: Shape | None = None

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return (self.partition,)

    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        return group_of(slices(self.partition, self.dims))

    def _givers(self) -> Iterable[int]:
        return self.partition.ranks

    def settings(self) -> str:
        told = "" if self.shape is None else f", shape={self.shape}"
        return f"dims={self.dims}{told}"

    def batched(self, extent: int) -> Movement:
        return self if self.shape is None else replace(self, shape=(*self.shape, extent))

    def _cells(self, ranks: Sequence[int]) -> dict[int, Shape]:
        return {rank: self.partition.cells[rank] for rank in ranks}

    def _wholes(self, shape: Shape) -> dict[int, Shape]:
        """What each rank has of a tensor that is cut along all dimensions but `dims`."""
        others = [dim for dim in range(self.partition.dim) if dim not in self.dims]
        return evenly(self.partition, others, shape)


@dataclass(frozen=True)
class FromShards(Along):
    """Its tensors are cut along all dimensions of the grid."""

    def expected(self, rank: int) -> Mapping[int, Shape] | None:
        if self.shape is None:
            return None
        return evenly(self.partition, range(self.partition.dim), self.shape)


@dataclass(frozen=True)
class ToShards(Along):
    """It cuts tensors along `dims`, into parts of certain lengths, or balanced ones."""

    lengths: tuple[tuple[int, ...] | None, ...] | None = None

    def settings(self) -> str:
        cut = "" if self.lengths is None else f", lengths={self.lengths}"
        return f"{super().settings()}{cut}"

    def _lengths(self, shape: Shape) -> list[Shape]:
        return cut(self.name, self.partition, self.dims, shape, self.lengths)


def shards(
    cells: Mapping[int, Shape], lengths: Sequence[Shape], dims: Sequence[int]
) -> dict[int, Box]:
    """The box of each rank in the tensor of its slice, which is cut along `dims`."""
    found = {}
    for rank, cell in cells.items():
        start, stop = [], []
        for dim, each in enumerate(lengths):
            at = cell[dim] if dim in dims else 0
            start.append(sum(each[:at]))
            stop.append(sum(each[: at + 1]))
        found[rank] = Box(tuple(start), tuple(stop))
    return found


def cut(
    name: str, partition: Partition, dims: Sequence[int], shape: Shape, given: Lengths
) -> list[Shape]:
    """The lengths of the parts of a tensor that is cut along some dimensions of a grid.

    Raises:
        WeftError: the tensor has too few dimensions, or what was given does not fit.
    """
    if any(dim >= len(shape) for dim in dims):
        raise WeftError(
            f"{name}: the grid is cut along dims {tuple(dims)}, and the tensor has "
            f"{len(shape)} dimensions, {shape}"
        )
    found: list[Shape] = []
    for dim, extent in enumerate(shape):
        lengths = given[dim] if given is not None and dim < len(given) else None
        count = partition.shape[dim] if dim in dims else 1
        found.append(parts(name, extent, count, lengths, dim))
    return found


def evenly(partition: Partition, dims: Sequence[int], shape: Shape) -> dict[int, Shape]:
    """What each rank has of a tensor that is cut evenly along some dimensions of a grid."""
    kept = [dim for dim in dims if dim < len(shape)]
    lengths = [
        balanced(extent, partition.shape[dim] if dim in kept else 1)
        for dim, extent in enumerate(shape)
    ]
    return {rank: box.shape for rank, box in shards(partition.cells, lengths, kept).items()}


def told(shape: Sequence[int] | None) -> Shape | None:
    """A shape as a value.

    Raises:
        WeftError: it is none.
    """
    return None if shape is None else _extents("shape", shape)


def given(lengths: Lengths) -> tuple[tuple[int, ...] | None, ...] | None:
    """Lengths as a value.

    Raises:
        WeftError: they are not such.
    """
    if lengths is None:
        return None
    if isinstance(lengths, str) or not isinstance(lengths, Iterable):
        raise WeftError(
            f"lengths is {lengths!r}: pass for each dimension those of its parts, or None"
        )
    return tuple(None if each is None else _extents("lengths", each) for each in lengths)


def _extents(what: str, found: Sequence[int]) -> Shape:
    """Lengths as integers, each at least 0."""
    if not isinstance(found, Iterable):
        raise WeftError(
            f"{what} has {found!r} where it needs several integers: pass a tuple of them"
        )
    extents = integers(what, what, found)
    if min(extents, default=0) < 0:
        raise WeftError(f"{what} is {extents}: pass integers of at least 0; none may be left open")
    return extents
