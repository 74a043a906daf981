"""Scatter and Gather: between the first rank of each slice of a grid and all of its ranks.

Scatter cuts the tensor of the first rank and gives each rank its part; Gather puts the parts
together there. Each is the other's adjoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..grid import Shape, whole
from ..plan import Plan, between
from .along import FromShards, ToShards, given, shards, told
from .broadcast import first_along
from .layer import Layer
from .movement import Lengths, fitting
from .partition import Partition, are_grids, normal_dims

__all__ = ["Collecting", "Distributing", "Gather", "Scatter"]


@dataclass(frozen=True)
class Distributing(ToShards):
    """The whole on the first rank to shards on all."""

    name: ClassVar[str] = "Scatter"

    def _givers(self) -> Iterable[int]:
        return first_along(self.partition, self.dims).ranks

    def expected(self, rank: int) -> Mapping[int, Shape] | None:
        if self.shape is None:
            return None
        found = self._wholes(self.shape)
        return {rank: found[rank] for rank in self.givers}

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        ((root, shape),) = shapes.items()
        cells = self._cells(self.groups[root])
        lengths = self._lengths(shape)
        return between({root: whole(shape)}, shards(cells, lengths, self.dims))


@dataclass(frozen=True)
class Collecting(FromShards):
    """Shards on all ranks to the whole on the first."""

    name: ClassVar[str] = "Gather"

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        cells = self._cells(list(shapes))
        lengths = fitting(self.name, cells, shapes, self.dims)
        (root,) = (rank for rank, cell in cells.items() if not any(cell[d] for d in self.dims))
        return between(
            shards(cells, lengths, self.dims), {root: whole([sum(each) for each in lengths])}
        )


class Scatter(Layer):
    """Cuts the tensor of the first rank of each slice, and gives each rank its part.

    Input: the whole along `dims` on the ranks that are first along them, nothing elsewhere.
    Output: each rank's part. Adjoint: Gather.

    Args:
        partition: the grid.
        dims: which of its dimensions to scatter along; negative ones count from its last.
        shape: the shape of the tensor that the grid cuts, if it is known; checked, and needed under
            torch.compile.
        lengths: for each dimension the lengths of the parts, or None: balanced.

    Raises:
        WeftError: a dim is out of range or there twice; when called: the lengths do not fit.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     x = weft.nn.zero_volume_tensor() if wire.rank else torch.arange(3)
        ...     return weft.nn.Scatter(weft.Partition(2), 0)(x)
        >>> run(2, program)
        [tensor([0, 1]), tensor([2])]
    """

    def __init__(
        self,
        partition: Partition,
        dims: Sequence[int] | int,
        *,
        shape: Sequence[int] | None = None,
        lengths: Lengths = None,
    ) -> None:
        are_grids("Scatter", partition)
        found = normal_dims(dims, partition.dim)
        super().__init__(Distributing(partition, found, told(shape), given(lengths)))


class Gather(Layer):
    """Puts the shards of each slice together on its first rank.

    Input: each rank's shard; any lengths, also 0, that fit together. Output: the whole along
    `dims` on the ranks that are first along them, nothing elsewhere. Adjoint: Scatter.

    Args:
        partition: the grid.
        dims: which of its dimensions to gather along; negative ones count from its last.
        shape: the shape of the tensor that the grid cuts, if it is known and cut evenly; checked,
            and needed under torch.compile.

    Raises:
        WeftError: a dim is out of range or there twice; when called: shards do not fit together.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     return weft.nn.Gather(weft.Partition(2), 0)(torch.tensor([wire.rank]))
        >>> run(2, program)
        [tensor([0, 1]), tensor([], dtype=torch.int64)]
    """

    def __init__(
        self, partition: Partition, dims: Sequence[int] | int, *, shape: Sequence[int] | None = None
    ) -> None:
        are_grids("Gather", partition)
        found = normal_dims(dims, partition.dim)
        super().__init__(Collecting(partition, found, told(shape)))
