"""The common base of layers within slices of one grid: they change the form of a slice's tensor.

A slice is the set of ranks whose cells differ only in their index along `dims`. Its ranks hold one
tensor in one of three forms: each has a shard, each has a whole tensor, or the first has the whole
tensor. A layer is a `Movement` from one form to another. If each rank passes a whole tensor, these
are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from ..base.tensors import Shape
from .grid import Box, whole
from .layer import Layer
from .partition import Partition, are_grids, normal_dims
from .plan import Plan, between
from .spec import (
    CheckedLengths,
    Lengths,
    Spec,
    checked_lengths,
    cut,
    fitting,
    shards,
)

Form = Literal["shards", "wholes", "first"]
"""How the ranks of a slice hold its tensor."""


class Movement(NamedTuple):
    """What a layer does.

    Attributes:
        name: as errors and traces call it.
        brings: the form of the tensor before.
        gets: the form of it afterwards.
    """

    name: str
    brings: Form
    gets: Form


@dataclass(frozen=True)
class SliceSpec(Spec):
    """What moves within the slices of one grid along some dimensions.

    Attributes:
        movement: from which form to which.
        partition: the grid.
        dims: of the grid.
        lengths: of the parts that tensors are cut into, for each dimension; None: balanced.
    """

    movement: Movement = field(repr=False)  # whose name is that of the call
    partition: Partition
    dims: Shape
    lengths: CheckedLengths = None

    @property
    def name(self) -> str:
        return self.movement.name

    @property
    def summing(self) -> bool:
        return self.movement.brings == "wholes"

    def _connected(self) -> Iterable[Sequence[int]]:
        return slices_of(self.partition, self.dims)

    @functools.cached_property
    def sources(self) -> frozenset[int]:
        ranks = self.partition.ranks
        return frozenset(self._first(ranks) if self.movement.brings == "first" else ranks)

    def _first(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks that are first along `dims`."""
        cells = self.partition.cells
        return [rank for rank in ranks if not any(cells[rank][dim] for dim in self.dims)]

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        ranks = self.groups[next(iter(shapes))]
        sharded = self.movement.brings == "shards"
        cells = {rank: self.partition.cells[rank] for rank in ranks}
        brought = {rank: cells[rank] for rank in shapes}
        lengths = fitting(self.name, brought, shapes, self.dims if sharded else ())
        shape = tuple(map(sum, lengths))
        if self.movement.gets == "shards":
            lengths = cut(self.name, self.partition, self.dims, shape, self.lengths)

        def held(form: Form) -> dict[int, Box]:
            if form == "shards":
                return shards(cells, lengths, self.dims)
            return dict.fromkeys(ranks if form == "wholes" else self._first(ranks), whole(shape))

        return between(held(self.movement.brings), held(self.movement.gets))


def slices_of(partition: Partition, dims: Shape) -> Iterable[Sequence[int]]:
    """The ranks of each slice of a grid along some of its dimensions."""
    found: dict[Shape, list[int]] = {}
    for rank, cell in partition.cells.items():
        rest = tuple(at for dim, at in enumerate(cell) if dim not in dims)
        found.setdefault(rest, []).append(rank)
    return found.values()


class CuttingLayer(Layer):
    """A layer within the slices of one grid that cuts tensors, and may be told how."""

    movement: ClassVar[Movement]

    def __init__(
        self, partition: Partition, dims: Sequence[int] | int, *, lengths: Lengths = None
    ) -> None:
        are_grids(self.movement.name, partition)
        along = normal_dims(dims, partition.dim)
        super().__init__(SliceSpec(self.movement, partition, along, checked_lengths(lengths)))


class SliceLayer(CuttingLayer):
    """A layer within the slices of one grid that cuts nothing anew."""

    def __init__(self, partition: Partition, dims: Sequence[int] | int) -> None:
        super().__init__(partition, dims)
