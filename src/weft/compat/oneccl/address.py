"""Addresses: memory of the host that is known by where it begins, as C++ hands it over.

Nothing but the caller's word says that there is memory. What can be checked is: that it begins
where an element may lie, and ends within the space of addresses.
"""

from __future__ import annotations

import ctypes
from ctypes import _Pointer
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .dtypes import Wrong, dtype_of

__all__ = ["Address", "is_address", "is_pointer", "memory_at", "pointed_at"]

_SPACE = 1 << 63  # bytes of addresses


@dataclass(frozen=True, slots=True)
class Address:
    """Host memory by its address: the caller answers for it, and keeps it while it is in use.

    Attributes:
        address: where it begins; a multiple of the dtype's size.
        count: elements in it.
        dtype: of an element; torch's, or a name of oneCCL's.

    Example:
        >>> from weft.compat.oneccl.buffers import seen
        >>> floats = (ctypes.c_float * 3)(1, 2, 4)
        >>> where = Address(ctypes.addressof(floats), 3, torch.float32)
        >>> seen(where, 2, torch.float32, "send_val_buf")
        tensor([1., 2.])
    """

    address: int
    count: int
    dtype: torch.dtype | str


def is_pointer(buffer: object) -> bool:
    """Whether this is a typed pointer of ctypes, such as C++'s `&count`."""
    return isinstance(buffer, _Pointer)


def is_address(buffer: object) -> bool:
    """Whether this is an address that does not say how much there is."""
    return isinstance(buffer, ctypes.c_void_p | _Pointer) or (
        isinstance(buffer, int) and not isinstance(buffer, bool)
    )


def pointed_at(buffer: object, name: str) -> torch.dtype | None:
    """The dtype that a typed pointer says its memory has; None if this is no such pointer."""
    if not isinstance(buffer, _Pointer):
        return None
    return dtype_of(np.dtype(buffer._type_), f"what {name} points at")


def memory_at(
    address: Any, count: int, dtype: torch.dtype, name: str, owner: object = None
) -> Tensor:
    """So many elements at an address, a pointer's too; they keep their owner alive."""
    nbytes = count * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    where = _where(address)
    if where <= 0 or where % dtype.itemsize or where + nbytes > _SPACE:
        raise Wrong(f"{name} is {nbytes} bytes at {where:#x}, where no {dtype} can be")
    block: Any = (ctypes.c_uint8 * nbytes).from_address(where)
    block.owner = owner
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype)


def _where(address: Any) -> int:
    if isinstance(address, _Pointer):
        return ctypes.cast(address, ctypes.c_void_p).value or 0
    return getattr(address, "value", address) or 0
