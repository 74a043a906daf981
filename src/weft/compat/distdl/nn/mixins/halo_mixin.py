"""`distdl.nn.mixins.halo_mixin`: the widths of the halo that a kernel needs. Integers only.

A convolution or pooling layer slides a kernel over a tensor that is cut along a grid, its input and
its output. A worker needs from its neighbours the elements that its part of the output depends on
and that are outside of its part of the input. The output is cut in the balanced way.

Source: Hewett and Grady (arXiv 2006.03108), which derives the widths of halos from the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ....arguments import Integers, integers
from ...slicing import compute_start_index, compute_stop_index, compute_subshape
from ...tensor_decomposition import compute_subtensor_start_indices


class HaloMixin:
    """Computes the widths of halos; for a class that is also a ConvMixin or a PoolingMixin.

    Example:
        >>> from weft.compat.distdl import ConvMixin
        >>> class Convolution(HaloMixin, ConvMixin): pass
        >>> kernel, grid, index = (3, 1, 1, 1), [1, 1, 2], [0, 0, 0]
        >>> found = Convolution()._compute_exchange_info([1, 1, 10], *kernel, True, grid, index)
        >>> found[0].tolist()
        [[0, 0], [0, 0], [0, 1]]
    """

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
        """Compute the arguments of HaloExchange for the worker at an index of a grid.

        Args:
            x_global_shape: the shape of the whole input, [dim].
            kernel_size, stride, padding, dilation: of the kernel, in elements. If they have fewer
                than dim numbers, they are of the last dimensions.
            partition_active: whether this worker is in the grid. If not, all results are None.
            partition_shape, partition_index: the shape of the grid, and this worker's index in it.
            subtensor_shapes: the shapes of the input's parts, [*grid, dim]; None: balanced ones.

        Returns:
            halo_shape, recv_buffer_shape, send_buffer_shape: widths [dim, 2], before and after; and
            [dim, 2], the range (start, stop) of the tensor with its halo that the kernel is applied
            to.
        """
        if not partition_active:
            return None, None, None, None
        extents, grid, index = map(integers, (x_global_shape, partition_shape, partition_index))
        given = ((kernel_size, 1), (stride, 1), (padding, 0), (dilation, 1))
        sizes = [_padded(each, len(extents), fill) for each, fill in given]

        def beyond(place: Integers) -> Integers:
            """The widths that a worker needs beyond its part, [dim, 2]; negative: has too much."""
            start, length = _cut(grid, place, extents, subtensor_shapes)
            low, high = self._needed(grid, place, extents, *sizes)
            found: Integers = np.stack([start - low, high - (start + length - 1)], axis=1)
            return found

        return exchange_info(beyond, grid, index, _cut(grid, index, extents, subtensor_shapes)[1])

    def _needed(
        self, grid: Integers, place: Integers, extents: Integers, *sizes: Integers
    ) -> tuple[Integers, Integers]:
        """The first and the last index of the input on which a worker's part of the output depends.

        `sizes` are kernel size, stride, padding and dilation.
        """
        looks: Any = self  # also a ConvMixin
        kernel, stride, padding, dilation = sizes
        outputs = (extents + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        first = compute_start_index(grid, place, outputs)
        last = compute_stop_index(grid, place, outputs) - 1
        low = np.maximum(0, looks._compute_min_input_range(first, *sizes))
        return low, np.minimum(extents - 1, looks._compute_max_input_range(last, *sizes))


def exchange_info(
    beyond: Callable[[Integers], Integers], grid: Integers, index: Integers, length: Integers
) -> tuple[Integers, Integers, Integers, Integers]:
    """The arguments of HaloExchange for a worker, and the range of its input that it uses.

    Args:
        beyond: the widths that the worker in a cell needs beyond its part, [dim, 2]; negative where
            it has more than it needs.
        grid: the extents of the grid.
        index: this worker's cell.
        length: the shape of its part.

    Returns:
        halo_shape, recv_buffer_shape, send_buffer_shape, and the range: as `HaloMixin` has them.
    """
    signed = beyond(index)
    halo = np.maximum(signed, 0)
    send = np.zeros_like(signed)
    for dim in range(len(grid)):
        for side, step in enumerate((-1, 1)):
            place = index.copy()
            place[dim] += step
            if 0 <= place[dim] < grid[dim]:
                send[dim, side] = max(0, beyond(place)[dim, 1 - side])
    first = np.maximum(0, -signed[:, 0])
    return halo, halo.copy(), send, np.stack([first, length + halo.sum(1)], axis=1)


def _padded(given: ArrayLike, dim: int, fill: int) -> Integers:
    array = integers(given)
    return np.concatenate([np.full(dim - len(array), fill, dtype=np.int64), array])


def _cut(
    shape: Integers, index: Integers, extents: Integers, subtensor_shapes: Integers | None
) -> tuple[Integers, Integers]:
    """The first index of a part in the whole tensor, and its shape."""
    if subtensor_shapes is None:
        return compute_start_index(shape, index, extents), compute_subshape(shape, index, extents)
    place = tuple(index)
    return compute_subtensor_start_indices(subtensor_shapes)[place], subtensor_shapes[place]
