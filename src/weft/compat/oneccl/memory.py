"""Memory: where a result goes, the caller's own where there is a place for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .dtypes import Wrong, narrowed

__all__ = ["Memory", "Place", "Result", "await_device"]

Place = Callable[[int, int], tuple[Tensor, Tensor]]
"""(indices, values) -> memory for so many, 1-D, of the caller's dtypes."""

Result = tuple[Tensor, Tensor]
"""Indices and values, 1-D, of the caller's dtypes."""


def await_device(*tensors: Tensor) -> None:
    """Wait until what was written to an accelerator has arrived."""
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        torch.accelerator.synchronize(device)


class Memory:
    """Where the result of one operation goes: to the caller's memory, if there is a place."""

    def __init__(self, place: Place | None, index: torch.dtype) -> None:
        self._place, self._index = place, index
        self._taken: Result | None = None

    def reserve(self, count: int, row_shape: tuple[int, ...]) -> Result:
        """Have the caller make room for so many rows."""
        assert self._place is not None
        try:
            self._taken = self._place(count, count * math.prod(row_shape))
        except Wrong as wrong:  # weft names the kind of what an allocator raises
            raise ValueError(str(wrong)) from None
        return self._taken

    def allocate(
        self, count: int, row_shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        """The caller's memory for weft to write to; indices apart where theirs are narrower."""
        indices, values = self.reserve(count, row_shape)
        if indices.dtype == torch.uint64:
            indices = indices.view(torch.int64)
        if indices.dtype != dtypes[0]:
            indices = torch.empty(count, dtype=dtypes[0], device=indices.device)
        return indices, values.view(count, *row_shape)

    def fill(self, result: tuple[Tensor, Tensor]) -> Result:
        """The result as the caller's dtypes, in the caller's memory if there is a place."""
        indices, values = narrowed(result[0], self._index), result[1].view(-1)
        if self._taken is None:
            return indices, values
        for taken, made in zip(self._taken, (indices, values), strict=True):
            if taken.data_ptr() != made.data_ptr():
                taken.copy_(made)
        return self._taken
