"""`distdl.nn.mixins.conv_mixin`: on which input a convolution depends. Integers only."""

from __future__ import annotations

from typing import Any


class ConvMixin:
    """The range of input indices on which an output index of a convolution depends.

    Example:
        >>> kernel = {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 1}
        >>> ConvMixin()._compute_min_input_range(2, **kernel)
        1
        >>> ConvMixin()._compute_max_input_range(2, **kernel)
        3
    """

    def _compute_min_input_range(
        self, idx: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> Any:
        """The first index of the input on which the output at `idx` depends."""
        return stride * idx - padding

    def _compute_max_input_range(
        self, idx: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> Any:
        """The last index of the input on which the output at `idx` depends."""
        return stride * idx - padding + dilation * (kernel_size - 1)
