"""What DistDL's layers take that weft's do not: axes to keep, grids to transpose, gradients to
scale, zero-volume results that keep the size of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft import Partition, WeftError

from ..partition import MPIPartition


def axes_of(
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


def paired(
    small: MPIPartition, large: MPIPartition, transpose_small: bool, transpose_large: bool
) -> tuple[Partition, Partition]:
    """Two grids such that those of `weft` broadcast as DistDL's do.

    A transposed grid has its shape reversed. As in DistDL, the cells of the two grids are matched
    by their number along the dimensions whose extents agree, which is counted in row-major order,
    but in a transposed grid in column-major order. That is its row-major order before it was
    transposed: where several such dimensions are cut, ranks are matched in the order they stand in,
    not at mirrored places.
    """
    shapes = [
        grid.shape[::-1] if turned else grid.shape
        for grid, turned in ((small.grid, transpose_small), (large.grid, transpose_large))
    ]
    agree = [
        dim
        for dim, (a, b) in enumerate(zip(shapes[0][::-1], shapes[1][::-1], strict=False))
        if a == b
    ]  # counted from the last, since the smaller grid is padded on the left
    return (
        _turned(small.grid, agree) if transpose_small else small.grid,
        _turned(large.grid, agree) if transpose_large else large.grid,
    )


def _turned(grid: Partition, agree: Sequence[int]) -> Partition:
    """A grid transposed, with its cells numbered as above; `agree` counts from the last."""
    cells = np.arange(grid.size).reshape(grid.shape).transpose()
    dims = sorted(grid.dim - 1 - dim for dim in agree)
    first = tuple(range(len(dims)))
    front = np.moveaxis(cells, dims, first)
    by_column = front.transpose(*first[::-1], *range(len(dims), grid.dim)).reshape(front.shape)
    turned = np.moveaxis(by_column, first, dims)
    return grid.subset(turned.ravel().tolist()).reshape(cells.shape)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def _only_brings(P_x: MPIPartition, P_y: MPIPartition) -> bool:
    return P_x.active and not P_y.active


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no types
def same(P_x: MPIPartition, P_y: MPIPartition) -> bool:
    """Whether two grids are the same, on workers that are not in them, too."""
    return P_x._grid == P_y._grid


def kept_batch(y: Tensor, x: Any, P_x: MPIPartition, P_y: MPIPartition) -> Tensor:
    """A layer's result; where there is none, but an input, one with its size of batch."""
    if isinstance(x, Tensor) and x.dim() and _only_brings(P_x, P_y):
        return y.reshape(x.shape[0], 0)
    return y


def divisor(P_x: MPIPartition, scale: Any) -> Any:
    """What gradients are to be divided by: a number as it is; for a slice of the grid's dimensions
    the number of its cells along them; None as it is."""
    return float(np.prod(P_x.shape[scale])) if isinstance(scale, slice) else scale


def scaled(y: Tensor, by: Any) -> Tensor:
    """A layer's result, fresh, whose gradient is divided before it goes back, in a new tensor."""
    if by is None:
        return y
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
