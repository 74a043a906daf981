"""DistDL's layers along some axes of one grid, and from one grid to another.

They are weft's, with what DistDL's take besides: axes to keep, grids to transpose, gradients to
scale, results without elements that keep the size of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft import Partition, WeftError, nn

from ..partition import MPIPartition, paired
from .module import Module

if TYPE_CHECKING:
    from weft.plan import Plan

Overlap = tuple[tuple[slice, ...] | None, tuple[int, ...] | None, int | str | None]
"""Slices of a worker's own tensor, their shape, and who has them on the other side."""

NOTHING: Overlap = (None, None, None)


class _Layer(Module, nn.Layer):
    """What DistDL's layers do with a result.

    Attributes:
        P_x, P_y: the grids of input and output.
        preserve_batch: whether results without elements have the shape [batch, 0], not [0].
        scale_backward: what gradients are divided by, as the caller said.
    """

    P_x: MPIPartition
    P_y: MPIPartition
    preserve_batch = False
    scale_backward: Any = None
    _by: Any = None

    def _scale(self, P_x: MPIPartition, scale: Any) -> None:
        """Have gradients divided: by a number, or by the number of cells along a slice."""
        self.scale_backward = scale
        self._by = float(np.prod(P_x.shape[scale])) if isinstance(scale, slice) else scale

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        batch = self.preserve_batch and isinstance(input, Tensor) and input.dim()
        if batch and _only_brings(self.P_x, self.P_y):
            y = y.reshape(input.shape[0], 0)
        return y if self._by is None else _scaled(y, self._by)


class AllGather(_Layer, nn.AllGather):
    """Gathers the parts along some axes of a grid, on all its workers.

    Args:
        P_x: the grid.
        axes_all_gather: its axes to gather along, any number of them; negative ones count from the
            last.
        axes_keep: all others; pass one of the two.
        scale_backward: the gradient is divided by this number before it goes back; or by the number
            of workers along the axes of a slice. The caller's own gradient is left as it is.
        shape: of the tensor that the grid cuts, if it is cut evenly: torch.compile needs it.

    Raises:
        WeftError: both kinds of axes are given, or neither; or one is out of range.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(wire):
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
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        axes, kept = _axes_of("AllGather", P_x, axes_all_gather, axes_keep)
        super().__init__(P_x.grid, axes, shape=shape)
        self.P_x, self.axes_all_gather, self.axes_keep = P_x, axes, kept
        self._scale(P_x, scale_backward)


class ReduceScatter(_Layer, nn.ReduceScatter):
    """Adds up the tensors along some axes of a grid, and gives each worker its part of the sum.

    Arguments as of AllGather, whose adjoint it is; the parts are balanced.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        axes_reduce_scatter: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        scale_backward: Any = None,
    ) -> None:
        axes, kept = _axes_of("ReduceScatter", P_x, axes_reduce_scatter, axes_keep)
        super().__init__(P_x.grid, axes)
        self.P_x, self.axes_reduce_scatter, self.axes_keep = P_x, axes, kept
        self._scale(P_x, scale_backward)


class AllSumReduce(_Layer, nn.AllSumReduce):
    """Adds up the tensors along some axes of a grid, on all its workers.

    Arguments as of AllGather.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        axes_reduce: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        scale_backward: Any = None,
    ) -> None:
        axes, kept = _axes_of("AllSumReduce", P_x, axes_reduce, axes_keep)
        super().__init__(P_x.grid, axes)
        self.P_x, self.axes_reduce, self.axes_keep = P_x, axes, kept
        self._scale(P_x, scale_backward)


class Broadcast(_Layer, nn.Broadcast):
    """Copies the tensors of one grid to all workers of another that they stand for.

    Args:
        P_x: the grid of the input; each extent is `P_y`'s, or 1. It may have fewer dimensions.
        P_y: the grid of the output.
        transpose_src, transpose_dest: whether the shape of `P_x`, `P_y` is reversed for that.
        preserve_batch: whether results without elements have the shape [batch, 0], not [0].
        scale_backward: as of AllGather.
        shape: of each tensor: torch.compile needs it.

    Raises:
        WeftError: the grids do not match.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        scale_backward: Any = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(*paired(P_x, P_y, transpose_src, transpose_dest), shape=shape)
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, preserve_batch
        self.transpose_src, self.transpose_dest = transpose_src, transpose_dest
        self._scale(P_y, scale_backward)


class SumReduce(_Layer, nn.SumReduce):
    """Adds up the tensors of one grid on the workers of another that stand for them.

    Arguments as of Broadcast, whose adjoint it is, the other way round: each extent of `P_y` is
    `P_x`'s, or 1.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        small, large = paired(P_y, P_x, transpose_dest, transpose_src)
        super().__init__(large, small, shape=shape)
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, preserve_batch
        self.transpose_src, self.transpose_dest = transpose_src, transpose_dest


class Repartition(_Layer, nn.Repartition):
    """Moves a tensor from one grid to another, on which it is cut evenly.

    Args:
        P_x, P_y: the grids, of the same number of dimensions; the same one evens its parts out.
        preserve_batch: as of Broadcast.
        buffer_manager: has no effect.
        shape: of the tensor that is cut, if it is cut evenly: torch.compile needs it.

    Attributes:
        P_x_to_y_overlaps: of the last call, for each worker of `P_y` what went there: slices of
            this worker's tensor, their shape, and "self" or the worker's place in the union of
            `P_x` and `P_y`; three None if nothing went.
        P_y_to_x_overlaps: for each worker of `P_x` what came from there: slices of the result.

    Raises:
        WeftError: the grids have different numbers of dimensions.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        preserve_batch: bool = True,
        buffer_manager: object = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        if P_x.dim != P_y.dim:
            raise WeftError(
                f"Repartition: P_x has {P_x.dim} dimensions and P_y {P_y.dim}: make both of as "
                "many, of extent 1 where nothing is cut"
            )
        super().__init__(P_x.grid, P_y.grid, shape=shape)
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, preserve_batch

    @property
    def P_x_to_y_overlaps(self) -> list[Overlap]:
        plan = self.spec.latest
        return [] if plan is None else self._overlaps(plan.T, self.spec.partitions[1])

    @property
    def P_y_to_x_overlaps(self) -> list[Overlap]:
        plan = self.spec.latest
        return [] if plan is None else self._overlaps(plan, self.spec.partitions[0])

    def _overlaps(self, plan: Plan, others: Partition) -> list[Overlap]:
        """For each of the others what this worker gets from it, by the plan."""
        source, target = self.spec.partitions
        me, union = source.rank, source.union(target).ranks
        boxes = {peer: moves[0][1] for peer, moves in plan.local(me).sources.items()}
        found: list[Overlap] = []
        for rank in others.ranks if me in plan.want.shapes else ():
            box, partner = boxes.get(rank), "self" if rank == me else union.index(rank)
            found.append(NOTHING if box is None else (box.slices, box.shape, partner))
        return found


def _axes_of(
    name: str, P_x: MPIPartition, axes: Sequence[int] | None, axes_keep: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that a layer works along, and those that it keeps, given one of the two.

    Raises:
        WeftError: both are given, or neither; or one is out of range, or there twice.
    """
    if (axes is None) == (axes_keep is None):
        raise WeftError(
            f"{name}: pass the axes to work along, or axes_keep, the others: one of the two"
        )
    chosen: Any = axes_keep if axes is None else axes
    named = np.ravel(chosen).tolist()
    P_x.grid.keep(named)  # which refuses what is no axis
    given = tuple(axis % P_x.dim for axis in named)
    others = tuple(dim for dim in range(P_x.dim) if dim not in given)
    return (others, given) if axes is None else (given, others)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _only_brings(P_x: MPIPartition, P_y: MPIPartition) -> bool:
    return P_x.active and not P_y.active


def _scaled(y: Tensor, by: Any) -> Tensor:
    """A layer's result, fresh, whose gradient is divided before it goes back, in a new tensor."""
    found: Tensor
    try:
        found = _Scaled.apply(y, by)  # type: ignore[no-untyped-call]  # torch's has no types
    except RuntimeError:  # torch.func and forward mode take nothing that is changed in place
        found = _ScaledCopy.apply(y, by)  # type: ignore[no-untyped-call]  # torch's has no types
    return found


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, by: Any) -> Tensor:
        ctx.by = by
        ctx.mark_dirty(y)  # which is fresh: no copy is needed, and no view
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.by, None


class _ScaledCopy(torch.autograd.Function):
    """The same for torch.func and forward mode.

    A tangent goes forward, so it is not divided.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, by: Any) -> Tensor:
        return y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    backward = _Scaled.backward

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.clone()
