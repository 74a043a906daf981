"""`distdl.nn.mixins`: how wide the halos of a kernel are, on each worker. Integers only.

A layer that slides a kernel over a tensor, cut evenly along a grid both before and after, needs
from its neighbours whatever its part of the output looks at beyond its part of the input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..slicing import compute_start_index, compute_stop_index, compute_subshape
from ..tensor_decomposition import compute_subtensor_start_indices

__all__ = ["ConvMixin", "HaloMixin", "PoolingMixin"]

Integers = NDArray[np.int64]


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
        extents = np.atleast_1d(np.asarray(x_global_shape, dtype=np.int64))
        sizes = (
            _padded(kernel_size, len(extents), 1),
            _padded(stride, len(extents), 1),
            _padded(padding, len(extents), 0),
            _padded(dilation, len(extents), 1),
        )
        grid = np.atleast_1d(np.asarray(partition_shape, dtype=np.int64))
        index = np.atleast_1d(np.asarray(partition_index, dtype=np.int64))

        def halo_of(place: Integers, at_least_0: bool = True) -> Integers:
            return self._compute_halo_shape(
                grid, place, extents, *sizes, at_least_0, subtensor_shapes
            )

        halo = halo_of(index)
        send = np.zeros_like(halo)
        for dim in range(len(grid)):
            for side, step in enumerate((-1, 1)):
                place = index.copy()
                place[dim] += step
                if 0 <= place[dim] < grid[dim]:
                    send[dim, side] = halo_of(place)[dim, 1 - side]
        length = _cut(grid, index, extents, subtensor_shapes)[1]
        signed = halo_of(index, at_least_0=False)
        needed = np.stack(
            [np.maximum(0, -signed[:, 0]), length + np.maximum(0, signed).sum(1)], axis=1
        )
        return halo, halo.copy(), send, needed

    def _compute_halo_shape(
        self,
        shape: Integers,
        index: Integers,
        x_global_shape: Integers,
        kernel_size: Integers,
        stride: Integers,
        padding: Integers,
        dilation: Integers,
        require_nonnegative: bool = True,
        subtensor_shapes: Integers | None = None,
    ) -> Integers:
        """The halos at an index of a grid, [dim, 2]; negative where a worker has more than it needs
        and `require_nonnegative` is false."""
        kernel: Any = self  # also a ConvMixin
        start, length = _cut(shape, index, x_global_shape, subtensor_shapes)
        sizes = (kernel_size, stride, padding, dilation)
        outputs = (x_global_shape + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1
        first = compute_start_index(shape, index, outputs)
        last = compute_stop_index(shape, index, outputs) - 1
        low = np.maximum(0, kernel._compute_min_input_range(first, *sizes))
        high = np.minimum(x_global_shape - 1, kernel._compute_max_input_range(last, *sizes))
        found: Integers = np.stack([start - low, high - (start + length - 1)], axis=1)
        return np.maximum(found, 0) if require_nonnegative else found


def _padded(given: ArrayLike, dim: int, fill: int) -> Integers:
    array = np.atleast_1d(np.asarray(given, dtype=np.int64))
    return np.concatenate([np.full(dim - len(array), fill, dtype=np.int64), array])


def _cut(
    shape: Integers, index: Integers, extents: Integers, subtensor_shapes: Integers | None
) -> tuple[Integers, Integers]:
    """Where a part begins, and its shape."""
    if subtensor_shapes is None:
        return compute_start_index(shape, index, extents), compute_subshape(shape, index, extents)
    place = tuple(int(at) for at in index)
    starts = compute_subtensor_start_indices(subtensor_shapes)
    return starts[place], subtensor_shapes[place]
