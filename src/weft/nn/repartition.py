"""Repartition: from any cut of a tensor to any other.

Its adjoint is the repartition back. The two grids may have the same ranks, some in common, or none;
all ranks of both take part. Source: DistDL's "distributed transpose" (Hewett and Grady, arXiv
2006.03108).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..base.tensors import Shape
from .layer import Layer
from .partition import Partition, are_grids, same_group
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


@dataclass(frozen=True)
class RepartitionSpec(Spec):
    """Shards on one grid to shards on another."""

    source: Partition
    target: Partition
    lengths: CheckedLengths = None

    name = "Repartition"

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        dims = range(self.source.dim)
        lengths = fitting(self.name, self.source.cells, shapes, dims)
        have = shards(self.source.cells, lengths, dims)
        extents = tuple(sum(each) for each in lengths)
        there = cut(self.name, self.target, range(self.target.dim), extents, self.lengths)
        return between(have, shards(self.target.cells, there, range(self.target.dim)))


class Repartition(Layer):
    """Moves a tensor from the cut of one grid to that of another.

    Input: this rank's shard on the source grid, of any dtype, and of any lengths that fit together;
    on other ranks a tensor without elements. Output: this rank's shard on the target grid; on other
    ranks a tensor without elements. Adjoint: the reverse movement.

    Args:
        source: the grid that cuts the input.
        target: the grid that cuts the output.
        lengths: for each dimension the lengths of the target's parts, or None: balanced ones. None:
            all are balanced.

    Raises:
        WeftError: the grids are of different groups. From a call: the shards do not fit together,
            or `lengths` do not fit.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     rows, columns = weft.Partition((2, 1)), weft.Partition((1, 2))
        ...     return weft.nn.Repartition(rows, columns)(torch.full((1, 4), group.rank))
        >>> run(2, program)[1]
        tensor([[0, 0],
                [1, 1]])
    """

    def __init__(
        self,
        source: Partition,
        target: Partition,
        *,
        lengths: Lengths = None,
    ) -> None:
        are_grids("Repartition", source, target)
        same_group("Repartition", source, target)
        super().__init__(RepartitionSpec(source, target, checked_lengths(lengths)))
