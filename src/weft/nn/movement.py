"""Movements: what a layer is, before it has seen a tensor.

A movement knows its partitions and its arguments. From the shapes that the ranks turn out to have
it makes a plan, in integers alone, so every rank makes the same one or finds the same fault. A
layer is a movement with a face of torch.nn.Module; its adjoint is the plan's transpose.
"""

from __future__ import annotations

import abc
import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from ..errors import WeftError
from ..grid import Shape, balanced, cells
from ..plan import Plan
from .partition import Partition

__all__ = ["Lengths", "Movement", "fitting", "group_of", "parts", "planned", "slices"]

Lengths = Sequence[Sequence[int] | None] | None
"""For each dimension the lengths of the parts that it is cut into; None: balanced."""


@dataclass(frozen=True)
class Movement(abc.ABC):
    """What moves where, but for the sizes.

    Attributes:
        name: as errors and traces call it.
        summing: whether values of several ranks add up on the way forward.
        shape: the shape of the whole tensor, if the caller told; it is checked.
    """

    name: ClassVar[str]
    summing: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def partitions(self) -> tuple[Partition, ...]:
        """The grids it is about."""

    @abc.abstractmethod
    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        """`groups`, found once."""

    @abc.abstractmethod
    def _givers(self) -> Iterable[int]:
        """`givers`, found once."""

    @functools.cached_property
    def groups(self) -> Mapping[int, tuple[int, ...]]:
        """For each rank that takes part: all ranks that must hear of each other, ascending."""
        return self._groups()

    @functools.cached_property
    def givers(self) -> frozenset[int]:
        """The ranks that bring a tensor; what others bring has no volume."""
        return frozenset(self._givers())

    @functools.cached_property
    def names(self) -> tuple[str, str]:
        """What its calls are called, on the way forward and backward."""
        return self.name, f"{self.name} backward"

    @functools.cached_property
    def ranges(self) -> tuple[str, str]:
        """What traces call them."""
        return f"weft::{self.names[0]}", f"weft::{self.names[1]}"

    @functools.cached_property
    def arguments(self) -> str:
        """`settings`, shortened to a digest where they are long."""
        found = self.settings()
        return found if len(found) < 200 else f"{found[:150]}... {zlib.crc32(found.encode()):08x}"

    @functools.cached_property
    def grids(self) -> str:
        """The partitions, for comparing them across ranks."""
        return " and ".join(each.brief for each in self.partitions)

    def within(self, group: object) -> Movement:
        """The same in another group, whose ranks count alike."""
        own = ((each.name, getattr(self, each.name)) for each in fields(self))
        grids = {name: value.within(group) for name, value in own if isinstance(value, Partition)}
        return replace(self, **grids)

    @functools.cached_property
    def integers(self) -> Movement:
        """The same in no group in particular, so that who keeps it keeps no wire open."""
        return self.within(None)

    @abc.abstractmethod
    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        """The plan for the ranks of one group, given the shapes of those that bring a tensor.

        Raises:
            WeftError: the shapes do not fit together.
        """

    def expected(self, rank: int) -> Mapping[int, Shape] | None:
        """The shapes in this rank's group, if the caller told the whole; else None."""
        return None

    def settings(self) -> str:
        """The arguments besides the partitions, for comparing them across ranks."""
        return ""

    def batched(self, extent: int) -> Movement:
        """The same for tensors with one more dimension of that extent, at the end."""
        return self

    def alone(self, rank: int, shape: Shape) -> Shape | None:
        """The shape of a rank's result, from its own alone; None if that does not tell."""
        return None


def planned(movement: Movement, shapes: tuple[tuple[int, Shape], ...]) -> Plan:
    """The plan for these shapes, which were heard from everybody in this call.

    Raises:
        WeftError: the shapes do not fit together, or not what the caller told.
    """
    return _planned(movement.integers, shapes)


@functools.lru_cache(maxsize=512)
def _planned(movement: Movement, shapes: tuple[tuple[int, Shape], ...]) -> Plan:
    found = dict(shapes)
    told = movement.expected(shapes[0][0])
    if told is not None:
        for rank, shape in found.items():
            if told.get(rank, shape) != shape:
                raise WeftError(
                    f"rank {rank}: {movement.name} was told of a tensor of which this rank has "
                    f"{told[rank]}, and it brings {shape}: pass that, or another shape="
                )
    return movement.plan(found)


def fitting(
    name: str,
    places: Mapping[int, Shape],
    shapes: Mapping[int, Shape],
    cut: Sequence[int],
) -> list[Shape]:
    """The lengths of the parts along each dimension, for shards that make up a tensor.

    Args:
        name: of the layer, for errors.
        places: where in the grid each rank is.
        shapes: what each has.
        cut: the dimensions along which the ranks hold different parts.

    Raises:
        WeftError: ranks at the same place along a dimension have parts of different length.
    """
    ranks = sorted(places)
    first = ranks[0]
    for rank in ranks:
        if len(shapes[rank]) != len(shapes[first]):
            raise WeftError(
                f"{name}: rank {rank} has a tensor of {len(shapes[rank])} dimensions, "
                f"{shapes[rank]}, and rank {first} one of {len(shapes[first])}, {shapes[first]}"
            )
    ndim = len(shapes[first])
    for dim in cut:
        if dim >= ndim:
            raise WeftError(
                f"{name}: dimension {dim} is cut, and rank {first} has a tensor of {ndim} "
                f"dimensions, {shapes[first]}"
            )
    lengths: list[Shape] = []
    for dim in range(ndim):
        seen: dict[int, int] = {}
        for rank in ranks:
            at = places[rank][dim] if dim in cut else 0
            other = seen.setdefault(at, rank)
            if shapes[rank][dim] != shapes[other][dim]:
                place = f", at the same place of the grid ({at})," if dim in cut else ""
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


def slices(partition: Partition, dims: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of each slice along some dimensions: cells that differ in nothing else."""
    return list(_slices(partition.shape, partition.ranks, tuple(dims)))


@functools.lru_cache(maxsize=256)  # by integers: a partition would keep its wire open
def _slices(shape: Shape, ranks: tuple[int, ...], dims: Shape) -> tuple[tuple[int, ...], ...]:
    found: dict[Shape, list[int]] = {}
    for rank, index in zip(ranks, cells(shape), strict=True):
        rest = tuple(at for dim, at in enumerate(index) if dim not in dims)
        found.setdefault(rest, []).append(rank)
    return tuple(map(tuple, found.values()))


def group_of(found: Iterable[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """For each rank all ranks that it is connected with, ascending, by sets that may overlap."""
    group: dict[int, set[int]] = {}
    for ranks in found:
        together = set(ranks).union(*(group.get(rank, ()) for rank in ranks))
        group.update(dict.fromkeys(together, together))
    sorted_once = {id(each): tuple(sorted(each)) for each in group.values()}
    return {rank: sorted_once[id(each)] for rank, each in group.items()}
