"""`distdl.nn.mixins`: how wide the halos of a kernel are, on each worker. Integers only.

A layer that slides a kernel over a tensor, cut evenly along a grid both before and after, needs
from its neighbours whatever its part of the output looks at beyond its part of the input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...arguments import Integers, integers
from ..slicing import compute_start_index, compute_stop_index, compute_subshape
from ..tensor_decomposition import compute_subtensor_start_indices


class ConvMixin:
    """Which places of the input a convolution looks at."""

    def _compute_min_input_range(
        self, idx: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> Any:
        """The first place of the input that the output at `idx` depends on."""
        return stride * idx - padding

    def _compute_max_input_range(
        self, idx: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> Any:
        """The last one."""
        return stride * idx - padding + dilation * (kernel_size - 1)


class PoolingMixin(ConvMixin):
    """The same for pooling, which looks at the same places."""


class HaloMixin:
    """How wide the halos are; for a class that is a ConvMixin or a PoolingMixin, too."""

    def _compute_exchange_info(
        self,
        x_global_shape: ArrayLike,
        kernel_size: ArrayLike,
        stride: ArrayLike,
        padding: ArrayLike,
        dilation: ArrayLike,
        partition_active: bool,
        partition_shape: ArrayLike,
        partition_index: Any,
        subtensor_shapes: Integers | None = None,
    ) -> tuple[Integers | None, Integers | None, Integers | None, Integers | None]:
        """What HaloExchange takes, for the worker at an index of a grid.

        Args:
            x_global_shape: of the input.
            kernel_size, stride, padding, dilation: of the kernel; those of fewer dimensions are
                about the last ones.
            partition_active: whether this worker is in the grid; four None if not.
            partition_shape, partition_index: the grid's shape, and this worker's place.
            subtensor_shapes: how the input is cut; None: evenly.

        Returns:
            halo_shape, recv_buffer_shape, send_buffer_shape: [dim, 2], before and after; and the
            range [start, stop] of the tensor with its halos that the kernel is to be given.
        """
        if not partition_active:
            return None, None, None, None
        extents, grid, index = map(integers, (x_global_shape, partition_shape, partition_index))
        given = ((kernel_size, 1), (stride, 1), (padding, 0), (dilation, 1))
        sizes = [_padded(each, len(extents), fill) for each, fill in given]

        def beyond(place: Integers) -> Integers:
            """How much a worker needs beyond its part, [dim, 2]; negative where it has more."""
            start, length = _cut(grid, place, extents, subtensor_shapes)
            low, high = self._needed(grid, place, extents, *sizes)
            found: Integers = np.stack([start - low, high - (start + length - 1)], axis=1)
            return found

        signed = beyond(index)
        halo, send = np.maximum(signed, 0), np.zeros_like(signed)
        for dim in range(len(grid)):
            for side, step in enumerate((-1, 1)):
                place = index.copy()
                place[dim] += step
                if 0 <= place[dim] < grid[dim]:
                    send[dim, side] = max(0, beyond(place)[dim, 1 - side])
        length = _cut(grid, index, extents, subtensor_shapes)[1]
        first = np.maximum(0, -signed[:, 0])
        return halo, halo.copy(), send, np.stack([first, length + halo.sum(1)], axis=1)

    def _needed(
        self, grid: Integers, place: Integers, extents: Integers, *sizes: Integers
    ) -> tuple[Integers, Integers]:
        """The first and the last place of the input that the part of the output depends on.

        `sizes` are those of the kernel: its own, stride, padding, dilation.
        """
        looks: Any = self  # also a ConvMixin
        kernel, stride, padding, dilation = sizes
        outputs = (extents + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        first = compute_start_index(grid, place, outputs)
        last = compute_stop_index(grid, place, outputs) - 1
        low = np.maximum(0, looks._compute_min_input_range(first, *sizes))
        return low, np.minimum(extents - 1, looks._compute_max_input_range(last, *sizes))


def _padded(given: ArrayLike, dim: int, fill: int) -> Integers:
    array = integers(given)
    return np.concatenate([np.full(dim - len(array), fill, dtype=np.int64), array])


def _cut(
    shape: Integers, index: Integers, extents: Integers, subtensor_shapes: Integers | None
) -> tuple[Integers, Integers]:
    """Where a part begins, and its shape."""
    if subtensor_shapes is None:
        return compute_start_index(shape, index, extents), compute_subshape(shape, index, extents)
    place = tuple(index)
    return compute_subtensor_start_indices(subtensor_shapes)[place], subtensor_shapes[place]
