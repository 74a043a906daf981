"""DistDL's layers along some axes of one grid, and from one grid to another.

They are those of `weft.nn` with DistDL's further arguments: axes to keep, grids to transpose, a
divisor of gradients, and outputs without elements that keep the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from weft import Partition, WeftError, nn
from weft.base.errors import entry

from ..backend import BufferManager
from ..partition import MPIPartition, grids_of, nobody, paired
from .module import Module

if TYPE_CHECKING:
    from weft.nn.plan import Plan
    from weft.nn.slices import Movement

Overlap = tuple[tuple[slice, ...] | None, tuple[int, ...] | None, int | str | None]
"""Slices of this worker's tensor, their shape, and the worker that has them on the other side."""

NOTHING: Overlap = (None, None, None)


class _Layer(Module, nn.Layer):
    """The common base: what DistDL's layers do with the output of weft's.

    Attributes:
        P_x, P_y: the grids of input and output.
        preserve_batch: whether an output without elements has the shape [batch, 0] instead of [0].
        scale_backward: the divisor of gradients, as the caller gave it.
    """

    P_x: MPIPartition
    P_y: MPIPartition
    preserve_batch = False
    scale_backward: Any = None
    _by: Any = None

    def _scale(self, P_x: MPIPartition, scale: Any) -> None:
        """Set the divisor of gradients: a number, or the number of workers along axes (a slice)."""
        self.scale_backward = scale
        self._by = float(np.prod(P_x.shape[scale])) if isinstance(scale, slice) else scale

    @entry
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        batch = self.preserve_batch and isinstance(input, Tensor) and input.dim()
        if batch and _only_brings(self.P_x, self.P_y):
            y = y.reshape(input.shape[0], 0)
        if self._by is not None:
            y = _Scaled.apply(y, self._by)  # type: ignore[no-untyped-call]  # torch's has no types
        return y


class _AlongAxes(_Layer):
    """A layer along some axes of one grid."""

    movement: ClassVar[Movement]

    def __init__(
        self,
        P_x: MPIPartition,
        axes: Sequence[int] | None,
        axes_keep: Sequence[int] | None,
        scale_backward: Any,
        **options: Any,
    ) -> None:
        chosen, kept = _axes_of(self.movement.name, P_x, axes, axes_keep)
        if P_x.active:
            super().__init__(P_x.grid, chosen, **options)
        else:
            super().__init__(nobody(P_x), ())
        self.P_x = P_x
        self.axes_keep = kept
        self._axes = chosen
        self._scale(P_x, scale_backward)


class AllGather(_AlongAxes, nn.AllGather):
    """Gathers the parts of a tensor along axes of a grid, on all workers there. Collective.

    Its adjoint is ReduceScatter. DistDL's manual allows a single axis; here there may be several.

    Args:
        P_x: the grid, with as many dimensions as the tensor.
        axes_all_gather: the axes to gather along; negative ones count from the last.
        axes_keep: all other axes. Pass one of the two.
        scale_backward: None, or a number by which the gradient of the input is divided; or a slice
            of axes: the number of workers along these. The gradient tensor that the caller passes
            to backward is not changed.

    Raises:
        WeftError: both kinds of axes are given, or neither; or an axis is out of range, or there
            twice. From a call: the parts do not fit together.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_world = MPIPartition()
        ...     P_x = P_world.create_cartesian_topology_partition([1, 3])
        ...     return AllGather(P_x, (1,))(torch.full((1, 2), P_x.rank))
        >>> run(3, program)[0]
        tensor([[0, 0, 1, 1, 2, 2]])
    """

    def __init__(
        self,
        P_x: MPIPartition,
        axes_all_gather: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        scale_backward: Any = None,
    ) -> None:
        super().__init__(P_x, axes_all_gather, axes_keep, scale_backward)
        self.axes_all_gather = self._axes


class ReduceScatter(_AlongAxes, nn.ReduceScatter):
    """Sums tensors along axes of a grid; each worker gets its balanced part of the sum. Collective.

    Its adjoint is AllGather. Arguments and errors are those of AllGather, with
    `axes_reduce_scatter` in place of `axes_all_gather`.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_x = MPIPartition().create_cartesian_topology_partition([2])
        ...     return ReduceScatter(P_x, (0,))(torch.tensor([1, 2, 3])).tolist()
        >>> run(2, program)
        [[2, 4], [6]]
    """

    def __init__(
        self,
        P_x: MPIPartition,
        axes_reduce_scatter: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        scale_backward: Any = None,
    ) -> None:
        super().__init__(P_x, axes_reduce_scatter, axes_keep, scale_backward)
        self.axes_reduce_scatter = self._axes


class AllSumReduce(_AlongAxes, nn.AllSumReduce):
    """Sums tensors along axes of a grid; each worker there gets the sum. Collective.

    It is its own adjoint. Arguments and errors are those of AllGather, with
    `axes_reduce` in place of `axes_all_gather`.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_x = MPIPartition().create_cartesian_topology_partition([2])
        ...     return AllSumReduce(P_x, (0,))(torch.tensor([1, P_x.rank])).tolist()
        >>> run(2, program)
        [[2, 1], [2, 1]]
    """

    def __init__(
        self,
        P_x: MPIPartition,
        axes_reduce: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        scale_backward: Any = None,
    ) -> None:
        super().__init__(P_x, axes_reduce, axes_keep, scale_backward)
        self.axes_reduce = self._axes


class Broadcast(_Layer, nn.Broadcast):
    """Copies each tensor of one grid to the matching workers of another. Collective.

    Its adjoint is SumReduce. Making the layer is collective among the workers of both grids, unless
    these are the same workers: they tell each other the shapes of the grids.

    Args:
        P_x: the grid of the input. In each dimension its extent is that of `P_y`, or 1. It may have
            fewer dimensions; then it is padded on the left with extents of 1.
        P_y: the grid of the output.
        transpose_src: whether to reverse the shape of `P_x` before the grids are matched.
        transpose_dest: the same for `P_y`.
        preserve_batch: whether an output without elements has the shape [batch, 0] instead of [0],
            where batch is the first extent of the worker's input.
        scale_backward: as for AllGather.

    Raises:
        WeftError: the grids do not match. From a call: the tensors do not fit together.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_world = MPIPartition()
        ...     P_y = P_world.create_cartesian_topology_partition([2])
        ...     P_x = P_world.create_partition_inclusive([0])
        ...     P_x = P_x.create_cartesian_topology_partition([1])
        ...     x = torch.tensor([7, 8]) if P_x.active else torch.empty(0)
        ...     return Broadcast(P_x, P_y)(x).tolist()
        >>> run(2, program)
        [[7, 8], [7, 8]]
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        scale_backward: Any = None,
    ) -> None:
        super().__init__(*paired(P_x, P_y, transpose_src, transpose_dest))
        self.P_x = P_x
        self.P_y = P_y
        self.preserve_batch = preserve_batch
        self.transpose_src = transpose_src
        self.transpose_dest = transpose_dest
        self._scale(P_y, scale_backward)


class SumReduce(_Layer, nn.SumReduce):
    """Sums the tensors of one grid on the matching workers of another. Collective.

    Its adjoint is Broadcast. Arguments (but for `scale_backward`) and errors are those of
    Broadcast, with the grids in the other roles: in each dimension the extent of `P_y` is that of
    `P_x`, or 1.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_world = MPIPartition()
        ...     P_x = P_world.create_cartesian_topology_partition([2])
        ...     P_y = P_world.create_partition_inclusive([0])
        ...     P_y = P_y.create_cartesian_topology_partition([1])
        ...     return SumReduce(P_x, P_y)(torch.tensor([7, P_x.rank])).tolist()
        >>> run(2, program)[0]
        [14, 1]
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
    ) -> None:
        small, large = paired(P_y, P_x, transpose_dest, transpose_src)
        super().__init__(large, small)
        self.P_x = P_x
        self.P_y = P_y
        self.preserve_batch = preserve_batch
        self.transpose_src = transpose_src
        self.transpose_dest = transpose_dest


class Repartition(_Layer, nn.Repartition):
    """Moves a tensor from one grid to another, where it is cut in the balanced way. Collective.

    Its adjoint is the Repartition back. Making the layer is collective as that of Broadcast.

    Args:
        P_x, P_y: the grids, with as many dimensions as the tensor. If they are the same grid, the
            layer balances the parts.
        preserve_batch: as for Broadcast.
        buffer_manager: gets, from each call, the buffers that DistDL would use, one for each part
            that this worker sends or receives. weft does not use them: they hold nothing.

    Attributes:
        P_x_to_y_overlaps: for each worker of `P_y`, what this worker sent to it in the last call:
            slices of the input, their shape, and the receiver: "self", or its place in the union of
            `P_x` and `P_y`. Three times None if it sent nothing. An empty list before the first
            call, and on a worker outside of `P_x`.
        P_y_to_x_overlaps: for each worker of `P_x`, what this worker received from it: the same,
            with slices of the output.

    Raises:
        WeftError: the grids have different numbers of dimensions. From a call: the parts do not fit
            together.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_y = MPIPartition().create_cartesian_topology_partition([2])
        ...     P_x = MPIPartition().create_partition_inclusive([1])
        ...     P_x = P_x.create_cartesian_topology_partition([1])
        ...     x = torch.tensor([1, 2, 3]) if P_x.active else torch.empty(0)
        ...     layer = Repartition(P_x, P_y)
        ...     return layer(x).tolist(), layer.P_x_to_y_overlaps
        >>> for each in run(2, program):
        ...     print(each)
        ([1, 2], [])
        ([3], [((slice(0, 2, None),), (2,), 1), ((slice(2, 3, None),), (1,), 'self')])
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        preserve_batch: bool = True,
        buffer_manager: BufferManager | None = None,
    ) -> None:
        x, y = grids_of(P_x, P_y) or (nobody(P_x), nobody(P_y))
        if x.dim != y.dim:
            raise WeftError(
                f"Repartition: P_x has {x.dim} dimensions and P_y {y.dim}: make both of as "
                "many, of extent 1 where nothing is cut"
            )
        super().__init__(x, y)
        self.P_x = P_x
        self.P_y = P_y
        self.preserve_batch = preserve_batch
        self.buffer_manager = buffer_manager

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        if self.buffer_manager is not None:
            overlaps = [*self.P_x_to_y_overlaps, *self.P_y_to_x_overlaps]
            shapes = [shape for _, shape, peer in overlaps if shape is not None and peer != "self"]
            self.buffer_manager.reserve(shapes, input.dtype)
        return y

    @property
    def P_x_to_y_overlaps(self) -> list[Overlap]:
        plan = self.spec.latest
        return [] if plan is None else self._overlaps(plan.T, self.spec.partitions[1])

    @property
    def P_y_to_x_overlaps(self) -> list[Overlap]:
        plan = self.spec.latest
        return [] if plan is None else self._overlaps(plan, self.spec.partitions[0])

    def _overlaps(self, plan: Plan, others: Partition) -> list[Overlap]:
        """For each worker of `others`, what this worker receives from it by the plan."""
        source, target = self.spec.partitions
        union = source.union(target)
        me = union.rank
        if me not in plan.want.shapes:
            return []
        found: list[Overlap] = []
        sources = plan.local(me).sources
        for rank in others.ranks:
            if rank not in sources:
                found.append(NOTHING)
                continue
            ((_, box),) = sources[rank]  # parts of two grids have one box in common
            partner = "self" if rank == me else union.ranks.index(rank)
            found.append((box.slices, box.shape, partner))
        return found


def _axes_of(
    name: str, P_x: MPIPartition, axes: Sequence[int] | None, axes_keep: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that a layer works along and those that it keeps, given one of the two.

    A worker that is not in the grid does not know the others.

    Raises:
        WeftError: both are given, or neither; or an axis is out of range, or there twice.
    """
    if (axes is None) == (axes_keep is None):
        raise WeftError(
            f"{name}: pass the axes to work along, or axes_keep, the others: one of the two"
        )
    chosen: Any = axes_keep if axes is None else axes
    named = np.ravel(chosen).tolist()
    if not P_x.active:
        return ((), tuple(named)) if axes is None else (tuple(named), ())
    P_x.grid.keep(named)  # raises if one is no axis
    given = tuple(axis % P_x.dim for axis in named)
    others = tuple(dim for dim in range(P_x.dim) if dim not in given)
    return (others, given) if axes is None else (given, others)


def _only_brings(P_x: MPIPartition, P_y: MPIPartition) -> bool:
    return P_x.active and not P_y.active


class _Scaled(torch.autograd.Function):
    """The identity; backward divides the gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, by: Any) -> Tensor:
        ctx.by = by
        ctx.mark_dirty(y)  # y is a new tensor, so it needs neither a copy nor a view
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.by, None
