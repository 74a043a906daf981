"""`distdl.backends.backend`: what the layers of a script take from `self._distdl_backend`.

It has partitions, and buffers that several layers share. weft's own layers do not use the buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from . import tensor_decomposition as tensor_decomposition
from .partition import MPICartesianPartition as CartesianPartition
from .partition import MPIPartition
from .tensor_comm import assemble_global_tensor_structure as assemble_global_tensor_structure
from .tensor_comm import (
    assemble_global_tensor_structure_along_axis as assemble_global_tensor_structure_along_axis,
)

__all__ = [
    "BufferManager",
    "CartesianPartition",
    "ExpandableBuffer",
    "Partition",
    "assemble_global_tensor_structure",
    "assemble_global_tensor_structure_along_axis",
    "get_device",
    "set_device",
    "tensor_decomposition",
]


class Partition(MPIPartition):
    """The partition of nobody, with which DistDL's layers begin; with arguments, an MPIPartition.

    Example:
        >>> Partition().active, Partition().size
        (False, 0)
    """

    def __init__(self, comm: Any = None, *arguments: Any, **options: Any) -> None:
        if comm is None:
            self._set(None, (0,), options.get("device"))
        else:
            super().__init__(comm, *arguments, **options)


def get_device() -> str:
    """The device for a script's own tensors, unless it chooses another one: "cpu"."""
    return "cpu"


def set_device(rank: int = 0) -> str:
    """The same; DistDL's other backends choose a device by the worker's rank."""
    return get_device()


class ExpandableBuffer:
    """An array that grows when a larger view of it is needed. All views begin at its start.

    Args:
        dtype: of the elements; a NumPy dtype.
        initial_capacity: the number of elements at first.

    Attributes:
        dtype: as given.
        capacity: the number of elements.
        raw_buffer: the array, 1-D; a new one when the buffer has grown.
        views: the views, by shape.

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
        """Grow to at least so many elements. The content is copied; all views are new."""
        if new_capacity <= self.capacity:
            return
        grown = np.empty(new_capacity, self.dtype)
        grown[: self.capacity] = self.raw_buffer
        self.raw_buffer, self.capacity = grown, new_capacity
        self.views = {shape: self._view(shape) for shape in self.views}

    def allocate_view(self, view_shape: Sequence[int]) -> None:
        """Make the view of this shape."""
        self.get_view(view_shape)

    def get_view(self, view_shape: Sequence[int]) -> NDArray[Any]:
        """Return the view of this shape; the same one until the buffer grows."""
        shape = tuple(view_shape)
        if shape not in self.views:
            self.expand(math.prod(shape))
            self.views[shape] = self._view(shape)
        return self.views[shape]

    def _view(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return self.raw_buffer[: math.prod(shape)].reshape(shape)


class BufferManager:
    """Buffers by dtype, which several layers share.

    Attributes:
        buffers_map: the buffers, by the dtype of the request.

    Example:
        >>> manager = BufferManager()
        >>> one, other = manager.request_buffers(2, np.float32)
        >>> manager.request_buffers(1, np.float32)[0] is one
        True
    """

    def __init__(self) -> None:
        self.buffers_map: dict[Any, list[ExpandableBuffer]] = {}

    def request_buffers(
        self, n_buffers: int, dtype: DTypeLike, **options: Any
    ) -> list[ExpandableBuffer]:
        """Return the first `n_buffers` buffers of a dtype; make those that do not exist.

        Args:
            n_buffers: the number of buffers.
            dtype: of their elements.
            options: arguments of `ExpandableBuffer` for those that are made.
        """
        held = self.buffers_map.setdefault(dtype, [])
        held += [ExpandableBuffer(dtype, **options) for _ in range(n_buffers - len(held))]
        return held[:n_buffers]

    def reserve(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        """Make a buffer and a view in it for each of these shapes; they hold nothing.

        Args:
            shapes: the shapes of the views.
            dtype: of a tensor. That of the buffers is NumPy's of that name; one of the same size
                for a dtype that NumPy does not have.
        """
        found = _dtype_of(dtype)
        buffers = self.request_buffers(len(shapes), found)
        for buffer, shape in zip(buffers, shapes, strict=True):
            buffer.allocate_view(shape)


def _dtype_of(dtype: torch.dtype) -> Any:
    empty = torch.empty(0, dtype=dtype, device="cpu")
    try:
        return empty.numpy().dtype.type
    except TypeError:  # such as bfloat16
        return np.dtype(f"u{dtype.itemsize}").type
