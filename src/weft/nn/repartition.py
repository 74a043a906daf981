"""Repartition: from any cut of a tensor to any other.

Its adjoint is the repartition the other way. The two grids may be on the same ranks, some of the
same, or others; the union of them takes part. Source: DistDL's "distributed transpose" (Hewett and
Grady, arXiv:2006.03108).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..errors import WeftError
from ..grid import Shape
from ..plan import Plan, between
from .along import cut, evenly, given, shards, told
from .layer import Layer
from .movement import Lengths, Movement, fitting, group_of
from .partition import Partition, are_grids

__all__ = ["Repartition", "Repartitioning"]


@dataclass(frozen=True)
class Repartitioning(Movement):
    """Shards on one grid to shards on another."""

    source: Partition
    target: Partition
    shape: Shape | None = None
    lengths: tuple[tuple[int, ...] | None, ...] | None = None

    name: ClassVar[str] = "Repartition"

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return (self.source, self.target)

    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        return group_of([(*self.source.ranks, *self.target.ranks)])

    def _givers(self) -> Iterable[int]:
        return self.source.ranks

    def settings(self) -> str:
        told = "" if self.shape is None else f"shape={self.shape}"
        cut = "" if self.lengths is None else f"lengths={self.lengths}"
        return ", ".join(filter(None, (told, cut)))

    def batched(self, extent: int) -> Movement:
        return self if self.shape is None else replace(self, shape=(*self.shape, extent))

    def expected(self, rank: int) -> Mapping[int, Shape] | None:
        if self.shape is None:
            return None
        return evenly(self.source, range(self.source.dim), self.shape)

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        lengths = fitting(self.name, self.source.cells, shapes, _cutting(self.source, shapes))
        have = shards(self.source.cells, lengths, range(self.source.dim))
        whole = tuple(sum(each) for each in lengths)
        dims = [dim for dim, extent in enumerate(self.target.shape) if extent > 1]
        there = cut(self.name, self.target, dims, whole, self.lengths)
        return between(have, shards(self.target.cells, there, dims))


def _cutting(source: Partition, shapes: Mapping[int, Shape]) -> list[int]:
    """The dimensions that a grid cuts; those of extent 1 need not be the tensor's."""
    ndim = len(next(iter(shapes.values())))
    return [dim for dim, extent in enumerate(source.shape) if extent > 1 or dim < ndim]


class Repartition(Layer):
    """Moves a tensor from one cut to another.

    Input: the shard of the source grid, of any lengths that fit together; nothing on other ranks.
    Output: the shard of the target grid; nothing on other ranks. Adjoint: the way back.

    Args:
        source: the grid that cuts the tensor now.
        target: the grid that is to cut it.
        shape: the shape of the tensor, if it is known and cut evenly; checked, and needed under
            torch.compile.
        lengths: for each dimension the lengths of the target's parts, or None: balanced.

    Raises:
        WeftError: the grids are of different groups; when called: shards do not fit together.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     rows, columns = weft.Partition((2, 1)), weft.Partition((1, 2))
        ...     return weft.nn.Repartition(rows, columns)(torch.full((1, 4), wire.rank))
        >>> run(2, program)[1]
        tensor([[0, 0],
                [1, 1]])
    """

    def __init__(
        self,
        source: Partition,
        target: Partition,
        *,
        shape: Sequence[int] | None = None,
        lengths: Lengths = None,
    ) -> None:
        are_grids("Repartition", source, target)
        if source.group is not target.group and source.group != target.group:
            raise WeftError("Repartition: the two grids count ranks in different groups")
        super().__init__(Repartitioning(source, target, told(shape), given(lengths)))
