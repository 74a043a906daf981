"""Layer specs: what a layer is, before it has seen a tensor.

A spec knows its partitions and its arguments. From the shapes that the ranks turn out to have it
makes a plan, in integers alone, so every rank makes the same plan or finds the same fault. A layer
is a spec with a face of torch.nn.Module; its adjoint is the plan's transpose.

To add a layer: subclass `Spec` (or `SliceSpec`, for a layer that works within the slices of one
grid), say how the plan follows from the shapes, and put a `Layer` around it.
"""

from __future__ import annotations

import abc
import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from ..errors import WeftError
from ..grid import Box, Shape, balanced, cells, whole
from ..plan import Plan
from .partition import Partition, are_grids, integers, normal_dims

Lengths = Sequence[Sequence[int] | None] | None
"""For each dimension the lengths of the parts that it is cut into; None: balanced."""

CheckedLengths = tuple[Shape | None, ...] | None


@dataclass(frozen=True)
class Spec(abc.ABC):
    """What moves where, but for the sizes.

    Attributes:
        name: as errors and traces call it.
        summing: whether values of several ranks add up on the way forward.
        shape: the shape of the whole tensor, if the caller told; it is checked.
    """

    name: ClassVar[str]
    summing: ClassVar[bool] = False

    shape: Shape | None = field(default=None, kw_only=True)

    @abc.abstractmethod
    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        """The plan for the ranks of one group, given the shapes of those that bring a tensor.

        Raises:
            WeftError: the shapes do not fit together.
        """

    def inputs(self, rank: int, shape: Shape) -> Mapping[int, Shape] | None:
        """What the ranks of a rank's group bring of a whole tensor of that shape, if it tells."""
        return None

    def output(self, rank: int, shape: Shape) -> Shape | None:
        """The shape of a rank's result, from that of its own tensor; None if that does not tell."""
        return None

    def _connected(self) -> Iterable[Sequence[int]]:
        """Sets of ranks that must hear of each other; they may overlap."""
        return [[rank for each in self.partitions for rank in each.ranks]]

    def _sources(self) -> Iterable[int]:
        """The ranks that bring a tensor."""
        return self.partitions[0].ranks

    def settings(self) -> str:
        """The arguments besides the partitions, for comparing them across ranks."""
        shape, *own = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(
            f"{name}={value}"
            for name, value in (*own, shape)
            if value is not None and not isinstance(value, Partition)
        )

    def batched(self, extent: int) -> Spec:
        """The same for tensors with one more dimension of that extent, at the end."""
        return self if self.shape is None else replace(self, shape=(*self.shape, extent))

    # what follows from that

    @functools.cached_property
    def partitions(self) -> tuple[Partition, ...]:
        """The grids it is about; the ranks of the first bring a tensor."""
        own = (getattr(self, each.name) for each in fields(self))
        return tuple(each for each in own if isinstance(each, Partition))

    @functools.cached_property
    def groups(self) -> Mapping[int, tuple[int, ...]]:
        """For each rank that takes part: all ranks that must hear of each other, ascending."""
        group: dict[int, set[int]] = {}
        for ranks in self._connected():
            together = set(ranks).union(*(group.get(rank, ()) for rank in ranks))
            group.update(dict.fromkeys(together, together))
        ascending = {id(each): tuple(sorted(each)) for each in group.values()}
        return {rank: ascending[id(each)] for rank, each in group.items()}

    @functools.cached_property
    def sources(self) -> frozenset[int]:
        """The ranks that bring a tensor; what others bring has no volume."""
        return frozenset(self._sources())

    @functools.cached_property
    def names(self) -> tuple[str, str]:
        """What its calls are called, on the way forward and backward."""
        return self.name, f"{self.name} backward"

    @functools.cached_property
    def arguments(self) -> str:
        """`settings`, shortened to a digest where they are long."""
        found = self.settings()
        return found if len(found) < 200 else f"{found[:150]}... {zlib.crc32(found.encode()):08x}"

    @functools.cached_property
    def grids(self) -> str:
        """The partitions, for comparing them across ranks."""
        return " and ".join(each.brief for each in self.partitions)

    def within(self, group: object) -> Spec:
        """The same in another group, whose ranks count alike."""
        own = ((each.name, getattr(self, each.name)) for each in fields(self))
        grids: dict[str, Any] = {
            name: value.within(group) for name, value in own if isinstance(value, Partition)
        }
        return replace(self, **grids)

    @functools.cached_property
    def integers(self) -> Spec:
        """The same in no group in particular, so that who keeps it keeps no wire open."""
        return self.within(None)

    def expected(self, rank: int) -> Mapping[int, Shape] | None:
        """The shapes in this rank's group, if the caller told the whole; else None."""
        return None if self.shape is None else self.inputs(rank, self.shape)


def planned(spec: Spec, shapes: tuple[tuple[int, Shape], ...]) -> Plan:
    """The plan for these shapes, which were heard from everybody in this call.

    Raises:
        WeftError: the shapes do not fit together, or not what the caller told.
    """
    return _planned(spec.integers, shapes)


@functools.lru_cache(maxsize=512)
def _planned(spec: Spec, shapes: tuple[tuple[int, Shape], ...]) -> Plan:
    found = dict(shapes)
    told = spec.expected(shapes[0][0]) or {}
    for rank, shape in found.items():
        if told.get(rank, shape) != shape:
            raise WeftError(
                f"rank {rank}: {spec.name} was told of a tensor of which this rank has "
                f"{told[rank]}, and it brings {shape}: pass that, or another shape="
            )
    return spec.plan(found)


# Layers within the slices of one grid


@dataclass(frozen=True)
class SliceSpec(Spec):
    """What moves within the slices of one grid along some dimensions.

    A slice is the ranks whose cells differ in nothing but their place along `dims`.

    Attributes:
        partition: the grid.
        dims: of the grid.
        lengths: of the parts that tensors are cut into, for each dimension; None: balanced.
        sharded: whether ranks bring shards along all dimensions; else they bring the whole along
            `dims`.
    """

    sharded: ClassVar[bool] = False

    partition: Partition
    dims: Shape
    lengths: CheckedLengths = None

    @classmethod
    def along(
        cls,
        partition: Partition,
        dims: Sequence[int] | int,
        shape: Sequence[int] | None,
        lengths: Lengths = None,
    ) -> Self:
        """The spec of what a layer was given.

        Raises:
            WeftError: that is no grid, or not what it has or takes.
        """
        are_grids(cls.name, partition)
        found = normal_dims(dims, partition.dim)
        return cls(partition, found, checked_lengths(lengths), shape=checked_shape(shape))

    def _connected(self) -> Iterable[Sequence[int]]:
        return _slices(self.partition.shape, self.partition.ranks, self.dims)

    def inputs(self, rank: int, shape: Shape) -> Mapping[int, Shape] | None:
        dims = range(self.partition.dim)
        along = dims if self.sharded else [dim for dim in dims if dim not in self.dims]
        return evenly(self.partition, along, shape)

    def cells(self, ranks: Iterable[int]) -> dict[int, Shape]:
        """The cells of some ranks."""
        return {rank: self.partition.cells[rank] for rank in ranks}

    def joined(self, shapes: Mapping[int, Shape]) -> tuple[dict[int, Box], Box]:
        """The box of each rank's shard in the tensor of its slice, and all of that."""
        cells = self.cells(shapes)
        lengths = fitting(self.name, cells, shapes, self.dims)
        return shards(cells, lengths, self.dims), whole([sum(each) for each in lengths])

    def divided(self, ranks: Iterable[int], shape: Shape) -> dict[int, Box]:
        """The boxes of the parts into which a tensor is cut for some ranks of a slice."""
        lengths = cut(self.name, self.partition, self.dims, shape, self.lengths)
        return shards(self.cells(ranks), lengths, self.dims)


@functools.lru_cache(maxsize=256)  # by integers: a partition would keep its wire open
def _slices(shape: Shape, ranks: tuple[int, ...], dims: Shape) -> tuple[tuple[int, ...], ...]:
    found: dict[Shape, list[int]] = {}
    for rank, index in zip(ranks, cells(shape), strict=True):
        rest = tuple(at for dim, at in enumerate(index) if dim not in dims)
        found.setdefault(rest, []).append(rank)
    return tuple(map(tuple, found.values()))


# How tensors are cut


def fitting(
    name: str, places: Mapping[int, Shape], shapes: Mapping[int, Shape], dims: Iterable[int]
) -> list[Shape]:
    """The lengths of the parts along each dimension, for shards that make up a tensor.

    Args:
        name: of the layer, for errors.
        places: where in the grid each rank is.
        shapes: what each has.
        dims: the dimensions along which the ranks hold different parts, if the grid has several
            places there.

    Raises:
        WeftError: ranks at the same place along a dimension have parts of different length.
    """
    along, ranks = set(dims), sorted(places)
    first = ranks[0]
    ndim = len(shapes[first])
    for rank in ranks:
        if len(shapes[rank]) != ndim:
            raise WeftError(
                f"{name}: rank {rank} has a tensor of {len(shapes[rank])} dimensions, "
                f"{shapes[rank]}, and rank {first} one of {ndim}, {shapes[first]}"
            )
    for dim in along:
        if dim >= ndim and any(place[dim] for place in places.values()):
            raise WeftError(
                f"{name}: dimension {dim} is cut, and rank {first} has a tensor of {ndim} "
                f"dimensions, {shapes[first]}"
            )
    lengths: list[Shape] = []
    for dim in range(ndim):
        seen: dict[int, int] = {}
        for rank in ranks:
            at = places[rank][dim] if dim in along else 0
            other = seen.setdefault(at, rank)
            if shapes[rank][dim] != shapes[other][dim]:
                place = f", at the same place of the grid ({at})," if dim in along else ""
                raise WeftError(
                    f"{name}: in dimension {dim} rank {rank} has {shapes[rank][dim]}, and rank "
                    f"{other}{place} has {shapes[other][dim]}: shards must fit together"
                )
        lengths.append(tuple(shapes[seen[at]][dim] for at in sorted(seen)))
    return lengths


def parts(name: str, extent: int, count: int, given: Sequence[int] | None, dim: int) -> Shape:
    """The lengths of the parts that a dimension is cut into: those given, or balanced.

    Raises:
        WeftError: those given are not so many, or do not add up.
    """
    if given is None:
        return balanced(extent, count)
    if len(given) != count or sum(given) != extent or min(given) < 0:
        raise WeftError(
            f"{name}: dimension {dim} has {extent} and is cut into {count} parts, which lengths "
            f"{tuple(given)} are not"
        )
    return tuple(given)


def cut(
    name: str, partition: Partition, dims: Iterable[int], shape: Shape, given: Lengths
) -> list[Shape]:
    """The lengths of the parts of a tensor that is cut along some dimensions of a grid.

    Raises:
        WeftError: the tensor has too few dimensions, or what was given does not fit.
    """
    along = tuple(dims)
    if any(dim >= len(shape) and partition.shape[dim] > 1 for dim in along):
        raise WeftError(
            f"{name}: the grid is cut along dims {along}, and the tensor has "
            f"{len(shape)} dimensions, {shape}"
        )
    found: list[Shape] = []
    for dim, extent in enumerate(shape):
        lengths = given[dim] if given is not None and dim < len(given) else None
        count = partition.shape[dim] if dim in along else 1
        found.append(parts(name, extent, count, lengths, dim))
    return found


def shards(
    places: Mapping[int, Shape], lengths: Sequence[Shape], dims: Iterable[int]
) -> dict[int, Box]:
    """The box of each rank in the tensor of its slice, which is cut along `dims`."""
    along = set(dims)
    found = {}
    for rank, place in places.items():
        at = [place[dim] if dim in along else 0 for dim in range(len(lengths))]
        start = tuple(sum(each[:a]) for each, a in zip(lengths, at, strict=True))
        stop = tuple(sum(each[: a + 1]) for each, a in zip(lengths, at, strict=True))
        found[rank] = Box(start, stop)
    return found


def evenly(partition: Partition, dims: Iterable[int], shape: Shape) -> dict[int, Shape]:
    """What each rank has of a tensor that is cut evenly along some dimensions of a grid."""
    kept = [dim for dim in dims if dim < len(shape)]
    lengths = [
        balanced(extent, partition.shape[dim] if dim in kept else 1)
        for dim, extent in enumerate(shape)
    ]
    return {rank: box.shape for rank, box in shards(partition.cells, lengths, kept).items()}


# Arguments


def checked_shape(shape: Sequence[int] | None) -> Shape | None:
    """A shape as a value.

    Raises:
        WeftError: it is none.
    """
    return None if shape is None else _extents("shape", shape)


def checked_lengths(lengths: Lengths) -> CheckedLengths:
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
