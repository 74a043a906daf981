"""`distdl.backends.backend`: what layers of a script ask of `self._distdl_backend`.

Partitions, and buffers that several layers share. weft's own layers need no buffers of a script's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .partition import MPICartesianPartition as CartesianPartition
from .partition import MPIPartition as Partition

__all__ = ["BufferManager", "CartesianPartition", "ExpandableBuffer", "Partition"]


class ExpandableBuffer:
    """Memory that grows when a larger view of it is asked for; all views begin at its start.

    Args:
        dtype: of its elements.
        initial_capacity: how many of them there are at first.

    Attributes:
        dtype: as it was given.
        capacity: elements that there are.
        raw_buffer: all of them, an array of one dimension; another one once it has grown.
        views: the view of each shape that was asked for.

    Example:
        >>> buffer = ExpandableBuffer(np.float32)
        >>> buffer.get_view((2, 3)).shape, buffer.capacity
        ((2, 3), 6)
    """

    def __init__(self, dtype: DTypeLike, initial_capacity: int = 0) -> None:
        self.dtype, self.capacity = dtype, initial_capacity
        self.raw_buffer: NDArray[Any] = np.empty(initial_capacity, dtype)
        self.views: dict[tuple[int, ...], NDArray[Any]] = {}

    def expand(self, new_capacity: int) -> None:
        """Hold at least so many elements; what was there stays there, in new views."""
        if new_capacity <= self.capacity:
            return
        grown = np.empty(new_capacity, self.dtype)
        grown[: self.capacity] = self.raw_buffer
        self.raw_buffer, self.capacity = grown, new_capacity
        self.views = {shape: self._view(shape) for shape in self.views}

    def allocate_view(self, view_shape: Sequence[int]) -> None:
        """Have a view of that shape."""
        self.get_view(view_shape)

    def get_view(self, view_shape: Sequence[int]) -> NDArray[Any]:
        """The view of that shape; the same one until the buffer grows."""
        shape = tuple(view_shape)
        if shape not in self.views:
            self.expand(math.prod(shape))
            self.views[shape] = self._view(shape)
        return self.views[shape]

    def _view(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return self.raw_buffer[: math.prod(shape)].reshape(shape)


class BufferManager:
    """Buffers that are handed out again and again, by dtype.

    Attributes:
        buffers_map: all of them, by the dtype that they were asked for with.
    """

    def __init__(self) -> None:
        self.buffers_map: dict[Any, list[ExpandableBuffer]] = {}

    def request_buffers(
        self, n_buffers: int, dtype: DTypeLike, **options: Any
    ) -> list[ExpandableBuffer]:
        """The first so many buffers of a dtype; those that are not there are made.

        Args:
            n_buffers: how many.
            dtype: of their elements.
            options: of `ExpandableBuffer`, for those that are made.
        """
        held = self.buffers_map.setdefault(dtype, [])
        held += [ExpandableBuffer(dtype, **options) for _ in range(n_buffers - len(held))]
        return held[:n_buffers]
