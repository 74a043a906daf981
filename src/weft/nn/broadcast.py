"""Broadcast and SumReduce: from a small grid to a large one, and back.

Broadcast copies the tensor of each rank of a source grid to the matching ranks of a target grid.
The grids match as NumPy broadcasts arrays: a cell in a dimension of extent 1 matches all cells of
the other grid there. Its adjoint, SumReduce, sums the tensors of the matching ranks. The two grids
may have the same ranks, some in common, or none.

Source: DistDL (Hewett and Grady, arXiv:2006.03108).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..base.errors import WeftError
from ..base.tensors import Shape
from .grid import Box, whole
from .layer import Layer
from .partition import Partition, are_grids, normal_dims, same_group
from .plan import Plan, Side, between
from .spec import Spec, fitting


def first_along(partition: Partition, dims: Sequence[int] | int) -> Partition:
    """The cells of a grid that are first along some dimensions, as a grid of its own."""
    kept = normal_dims(dims, partition.dim)
    first = tuple(slice(1 if dim in kept else None) for dim in range(partition.dim))
    ranks = np.reshape(partition.ranks, partition.shape)[first]
    return partition.like(ranks.shape, ranks.ravel().tolist())


@dataclass(frozen=True)
class BroadcastSpec(Spec):
    """From the small grid to the large one."""

    source: Partition
    target: Partition

    name = "Broadcast"

    @functools.cached_property
    def copies(self) -> Mapping[int, list[int]]:
        """For each rank of the small grid, the matching ranks of the large one."""
        small, large = self.source, self.target
        if self.summing:
            small, large = large, small
        found: dict[int, list[int]] = {rank: [] for rank in small.ranks}
        matching = np.broadcast_to(np.reshape(small.ranks, small.shape), large.shape)
        for rank, other in zip(matching.ravel().tolist(), large.ranks, strict=True):
            found[rank].append(other)
        return found

    def _connected(self) -> Iterable[Sequence[int]]:
        return [(rank, *each) for rank, each in self.copies.items()]

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        few: dict[int, Box] = {}
        many: dict[int, Box] = {}
        sheets: dict[int, int] = {}
        for rank, each in self.copies.items():
            brings = each if self.summing else [rank]
            if brings[0] not in shapes:
                continue  # in another group of ranks
            fitting(self.name, dict.fromkeys(brings, ()), {r: shapes[r] for r in brings}, ())
            few[rank] = whole(shapes[brings[0]])
            many |= dict.fromkeys(each, few[rank])
            sheets |= dict.fromkeys(each, rank)
        plan = between(Side.of(few, {rank: rank for rank in few}), Side.of(many, sheets))
        return plan.T if self.summing else plan


@dataclass(frozen=True)
class SumReduceSpec(BroadcastSpec):
    """From the large grid to the small one."""

    name = "SumReduce"
    summing = True


class _BetweenGrids(Layer):
    """A layer between a small grid and a large one that it broadcasts to."""

    spec_type: ClassVar[type[BroadcastSpec]]

    def __init__(self, partition: Partition, target: Partition | Sequence[int] | int) -> None:
        name = self.spec_type.name
        summing = self.spec_type is SumReduceSpec
        are_grids(name, partition)
        if not isinstance(target, Partition):  # dimensions of the large grid
            small, large = first_along(partition, target), partition
        elif summing:
            small, large = target, partition
        else:
            small, large = partition, target
        same_group(name, small, large)
        shared = zip(small.shape, large.shape[large.dim - small.dim :], strict=False)
        if small.dim > large.dim or any(few not in (1, many) for few, many in shared):
            raise WeftError(
                f"{name}: a grid of {small.shape} does not broadcast to one of {large.shape}: each "
                "dimension must be 1 or as the other's"
            )
        source, target = (large, small) if summing else (small, large)
        super().__init__(self.spec_type(source, target))


class Broadcast(_BetweenGrids):
    """Copies the tensor of each rank of a grid to the matching ranks of a larger grid.

    Input: a tensor of any dtype on each rank of the source; on other ranks a tensor without
    elements (`zero_volume_tensor()`). Output: a copy on each rank of the target; on other ranks a
    tensor without elements. Adjoint: SumReduce.

    Args:
        partition: the source grid; or the target grid, if `target` names dimensions.
        target: the target grid. Each extent of the source is 1, or that of the target in the same
            dimension, counted from the last. Or dimensions of `partition`: then the source is the
            cells that are first along these.

    Raises:
        WeftError: the grids do not match.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     layer = weft.nn.Broadcast(weft.Partition(3), 0)
        ...     x = weft.nn.zero_volume_tensor() if group.rank else torch.tensor([2.0, 5.0])
        ...     return layer(x)
        >>> run(3, program)[2]
        tensor([2., 5.])
    """

    spec_type = BroadcastSpec


class SumReduce(_BetweenGrids):
    """Sums the tensors of the matching ranks of a grid on the ranks of a smaller grid.

    Input: a tensor on each rank of the source (integers, floating point but float8, or complex);
    those that are summed have the same shape. Output: the sums on the ranks of the target; on other
    ranks a tensor without elements. float16 and bfloat16 are added in float32 and rounded once.
    Adjoint: Broadcast.

    Args:
        partition: the source grid.
        target: the target grid. Each of its extents is 1, or that of the source in the same
            dimension, counted from the last. Or dimensions of `partition`: then the target is the
            cells that are first along these.

    Raises:
        WeftError: the grids do not match. From a call: shapes differ, or the dtype has no addition.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> run(3, lambda group: weft.nn.SumReduce(weft.Partition(3), 0)(torch.ones(2)))
        [tensor([3., 3.]), tensor([]), tensor([])]
    """

    spec_type = SumReduceSpec
