"""DistDL's layers along some axes of one grid, and from one grid to another.

They are those of `weft.nn` with DistDL's further arguments: axes to keep, grids to transpose, a
divisor of gradients, and outputs without elements that keep the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, autograd

from weft import WeftError, nn
from weft.base.errors import entry

from ..partition import MPIPartition, paired


class _Layer(nn.Layer):
    """The common base: what DistDL's layers do with the output of weft's.

    Attributes:
        P_x, P_y: the grids of input and output.
        preserve_batch: whether an output without elements has the shape [batch, 0] instead of [0].
    """

    def _of(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        *,
        preserve_batch: bool = False,
        scale_backward: Any = None,
    ) -> None:
        """Note what it was made of; a slice as a divisor is the number of workers along axes."""
        self.P_x, self.P_y = P_x, P_y
        self.preserve_batch = preserve_batch
        self._divisor = scale_backward
        if isinstance(scale_backward, slice):
            self._divisor = float(np.prod(P_x.shape[scale_backward]))

    def _along(self, P_x: MPIPartition, axes: Any, axes_keep: Any, scale_backward: Any) -> None:
        """Make a layer of one grid that works along these axes, or along the others.

        Raises:
            WeftError: both are given, or neither.
        """
        if (axes is None) == (axes_keep is None):
            raise WeftError(
                f"{type(self).__name__}: pass the axes to work along, or axes_keep, the others: "
                "one of the two"
            )
        if axes is None:
            kept = [int(axis) for axis in np.ravel(axes_keep)]
            P_x.grid.keep(kept)  # raises if one is no axis
            axes = [dim for dim in range(P_x.dim) if not {dim, dim - P_x.dim} & {*kept}]
        dims = [int(axis) for axis in np.ravel(axes)]
        # to weft's layer, the other base of each such class, of which mypy does not know here
        super().__init__(P_x.grid, dims)  # type: ignore[call-arg, arg-type]
        self._of(P_x, P_x, scale_backward=scale_backward)

    @entry
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        if self.preserve_batch and self.P_x.active and not self.P_y.active and input.dim():
            y = y.reshape(input.shape[0], 0)
        if self._divisor is not None:
            y = _Scaled.apply(y, self._divisor)  # type: ignore[no-untyped-call]  # torch's has none
        return y


class AllGather(_Layer, nn.AllGather):
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
        self._along(P_x, axes_all_gather, axes_keep, scale_backward)


class ReduceScatter(_Layer, nn.ReduceScatter):
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
        self._along(P_x, axes_reduce_scatter, axes_keep, scale_backward)


class AllSumReduce(_Layer, nn.AllSumReduce):
    """Sums tensors along axes of a grid; each worker there gets the sum. Collective.

    It is its own adjoint. Arguments and errors are those of AllGather, with `axes_reduce` in place
    of `axes_all_gather`.

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
        self._along(P_x, axes_reduce, axes_keep, scale_backward)


class Broadcast(_Layer, nn.Broadcast):
    """Copies each tensor of one grid to the matching workers of another. Collective.

    Its adjoint is SumReduce.

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
        >>> from weft.compat.distdl import zero_volume_tensor
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_world = MPIPartition()
        ...     P_x = P_world.create_partition_inclusive([0])
        ...     P_x = P_x.create_cartesian_topology_partition([1])
        ...     P_y = P_world.create_cartesian_topology_partition([2])
        ...     x = torch.tensor([7, 8]) if P_x.active else zero_volume_tensor()
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
        self._of(P_x, P_y, preserve_batch=preserve_batch, scale_backward=scale_backward)


class SumReduce(_Layer, nn.SumReduce):
    """Sums tensors of one grid on the matching workers of another. Collective.

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
        self._of(P_x, P_y, preserve_batch=preserve_batch)


class Repartition(_Layer, nn.Repartition):
    """Moves a tensor from one grid to another, where it is cut in the balanced way. Collective.

    Its adjoint is the Repartition back.

    Args:
        P_x, P_y: the grids, with as many dimensions as the tensor. If they are the same grid, the
            layer balances the parts.
        preserve_batch: as for Broadcast.

    Raises:
        WeftError: from a call: the parts do not fit together.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch
        >>> from weft.testing import run
        >>> def program(group):
        ...     P_y = MPIPartition().create_cartesian_topology_partition([2])
        ...     P_x = MPIPartition().create_partition_inclusive([1])
        ...     P_x = P_x.create_cartesian_topology_partition([1])
        ...     x = torch.tensor([1, 2, 3]) if P_x.active else torch.empty(0)
        ...     return Repartition(P_x, P_y)(x).tolist()
        >>> run(2, program)
        [[1, 2], [3]]
    """

    def __init__(self, P_x: MPIPartition, P_y: MPIPartition, preserve_batch: bool = True) -> None:
        super().__init__(P_x.grid, P_y.grid)
        self._of(P_x, P_y, preserve_batch=preserve_batch)


class _Scaled(autograd.Function):
    """The identity; backward divides the gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, by: Any) -> Tensor:
        ctx.by = by
        ctx.mark_dirty(y)  # y is a new tensor, so it needs neither a copy nor a view
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.by, None
