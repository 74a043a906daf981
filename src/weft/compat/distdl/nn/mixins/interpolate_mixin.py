"""`distdl.nn.mixins.interpolate_mixin`: the halos of an interpolation. Integers only.

An output index j of an interpolated dimension lies at a place of the input. "nearest" takes the
element before that place, "linear" weights the elements on both sides of it. Dimensions 0 and 1,
batch and channels, are not interpolated.

Source: the manual of torch.nn.functional.interpolate, on `align_corners` and `scale_factor`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from weft import WeftError

from ....arguments import Integers, integers
from ...slicing import compute_start_index, compute_stop_index, compute_subshape
from .halo_mixin import exchange_info

_FIRST = 2  # the first dimension that is interpolated


class InterpolateMixin:
    """The range of input indices on which an output index of an interpolation depends.

    Arguments that the methods share:

    - `y_global_idx`: an index of the whole output, [dim].
    - `x_global_shape`, `y_global_shape`: the shapes of the whole input and output, [dim].
    - `scale_factor`: as for torch.nn.functional.interpolate; None: the ratio of the shapes. It
      matters for "linear" without `align_corners`.
    - `mode`: "nearest" or "linear".
    - `align_corners`: for "linear", whether the corners of input and output coincide.

    Another mode raises WeftError.

    Example:
        >>> shapes = dict(x_global_shape=[1, 1, 4], y_global_shape=[1, 1, 8])
        >>> options = dict(scale_factor=2, mode="linear", align_corners=False)
        >>> InterpolateMixin()._compute_needed_start([0, 0, 3], **shapes, **options)
        tensor([0, 0, 1])
        >>> InterpolateMixin()._compute_needed_stop([0, 0, 3], **shapes, **options)
        tensor([1, 1, 3])
    """

    def _compute_needed_start(
        self,
        y_global_idx: ArrayLike,
        x_global_shape: ArrayLike,
        y_global_shape: ArrayLike,
        scale_factor: Any,
        mode: str,
        align_corners: bool,
    ) -> Tensor:
        """The first index of the input on which the output at an index depends: int64 [dim]."""
        place = _place(
            y_global_idx, x_global_shape, y_global_shape, scale_factor, mode, align_corners
        )
        return torch.from_numpy(place)

    def _compute_needed_stop(
        self,
        y_global_idx: ArrayLike,
        x_global_shape: ArrayLike,
        y_global_shape: ArrayLike,
        scale_factor: Any,
        mode: str,
        align_corners: bool,
    ) -> Tensor:
        """The index after the last one on which the output at an index depends: int64 [dim]."""
        stop = 1 + _place(
            y_global_idx, x_global_shape, y_global_shape, scale_factor, mode, align_corners
        )
        if mode == "linear":
            stop[_FIRST:] += 1
        return torch.from_numpy(np.minimum(stop, integers(x_global_shape)))

    def _compute_exchange_info(
        self,
        P_x: Any,
        x_global_tensor_structure: Any,
        y_global_tensor_structure: Any,
        scale_factor: Any,
        mode: str,
        align_corners: bool,
    ) -> tuple[Integers | None, Integers | None, Integers | None, Integers | None]:
        """Compute the arguments of HaloExchange for this worker.

        Args:
            P_x: the grid, with as many dimensions as the tensors, which it cuts in the balanced
                way. If this worker is not in it, all results are None.
            x_global_tensor_structure, y_global_tensor_structure: objects with the shapes of the
                whole input and output.
            scale_factor, mode, align_corners: see above.

        Returns:
            As `HaloMixin._compute_exchange_info`.
        """
        if not P_x.active:
            return None, None, None, None
        grid = integers(P_x.shape)
        index = integers(P_x.index)
        shapes = [
            integers(each.shape) for each in (x_global_tensor_structure, y_global_tensor_structure)
        ]
        options = (*shapes, scale_factor, mode, align_corners)

        def beyond(cell: Integers) -> Integers:
            """The widths that a worker needs beyond its part, [dim, 2]; negative: has too much."""
            first = compute_start_index(grid, cell, shapes[1])
            last = compute_stop_index(grid, cell, shapes[1]) - 1
            low = self._compute_needed_start(first, *options).numpy()
            high = self._compute_needed_stop(last, *options).numpy()
            before = compute_start_index(grid, cell, shapes[0]) - low
            after = high - compute_stop_index(grid, cell, shapes[0])
            found: Integers = np.stack([before, after], axis=1)
            return found

        found = exchange_info(beyond, grid, index, compute_subshape(grid, index, shapes[0]))
        found[3][:, 1] += np.minimum(0, beyond(index)[:, 1])  # what it has too much of at its end
        return found


def _place(
    y_global_idx: ArrayLike,
    x_global_shape: ArrayLike,
    y_global_shape: ArrayLike,
    scale_factor: Any,
    mode: str,
    align_corners: bool,
) -> Integers:
    """The index of the input at or before the place of an output index.

    Raises:
        WeftError: the mode is unknown.
    """
    index = integers(y_global_idx)
    extents = integers(x_global_shape)
    target = integers(y_global_shape)
    ratio: NDArray[np.float64] = extents / target
    if mode == "nearest":
        place = index * ratio
    elif mode != "linear":
        raise WeftError(f"interpolation of mode {mode!r} is not known here: use nearest or linear")
    elif align_corners:
        place = index * (extents - 1) / np.maximum(target - 1, 1)
    else:
        if scale_factor is not None:
            ratio[_FIRST:] = 1 / np.asarray(scale_factor, dtype=np.float64)
        place = (index + 0.5) * ratio - 0.5
    found = np.clip(np.floor(place).astype(np.int64), 0, extents - 1)
    found[:_FIRST] = index[:_FIRST]
    return found
