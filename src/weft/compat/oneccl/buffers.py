"""Buffers: whatever a caller has memory in, seen as a 1-D tensor of that very memory.

Nothing is copied, in either direction. A buffer is a torch tensor on any device, a NumPy array,
anything with the buffer protocol (`bytes`, `array`, ctypes arrays) or with DLPack, or an `address`
of host memory: an int, a `c_void_p` or a typed pointer of ctypes, whose extent a parameter of the
call tells, or an `Address`, which tells it itself. The memory must be contiguous, of the dtype that
was named, and long enough; `bytes`, `bytearray`, `mmap` and their memoryviews are of any dtype.
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...sparse.call import overlapping, unwritable
from .address import Address, is_address, is_pointer, memory_at, pointed_at
from .dlpack import is_read_only
from .dtypes import NAMES, Wrong, dtype_of

__all__ = ["counted", "distinct", "dtype_in", "one_integer", "seen"]

_UNTYPED = (bytes, bytearray, mmap.mmap)


def counted(count: object, name: str) -> int:
    """The number of elements that the parameter `name` gives."""
    try:
        number = operator.index(count)  # type: ignore[arg-type]  # whatever is no integer raises
    except TypeError:
        raise Wrong(f"{name} is {count!r}: pass the number of elements") from None
    if number < 0:
        raise Wrong(f"{name} is {number}: pass the number of elements, from 0 up")
    return number


def dtype_in(buffer: Any, name: str) -> torch.dtype:
    """The dtype that a buffer itself says it has."""
    if isinstance(buffer, Address):
        return dtype_of(buffer.dtype, f"the dtype of {name}")
    if (pointed := pointed_at(buffer, name)) is not None:
        return pointed
    if buffer is None or is_address(buffer):
        what = "None" if buffer is None else "an address"
        raise Wrong(f"{name} is {what}, which has no dtype: name the dtypes in the call")
    return _memory(buffer, name, None).dtype


def seen(
    buffer: Any, count: int | None, dtype: torch.dtype, name: str, *, write: bool = False
) -> Tensor:
    """The first `count` elements of a buffer, or all of them, as a 1-D tensor that shares them.

    Args:
        buffer: see above; None where `count` is 0.
        count: how many elements the call uses; None for as many as there are.
        dtype: what they are.
        name: what the caller knows the buffer as.
        write: whether it is to be written to.
    """
    if buffer is None and count == 0:
        return torch.empty(0, dtype=dtype)
    if is_address(buffer):
        if count is None:
            raise Wrong(f"{name} is an address of unknown extent: pass an Address, or a buffer")
        if pointed_at(buffer, name) not in (dtype, None):
            raise Wrong(f"{name} is a {type(buffer).__name__}, the call says {dtype}")
        return memory_at(buffer, count, dtype, name)
    if isinstance(buffer, Address):
        if not isinstance(where := buffer.address, int):
            raise Wrong(f"the address of {name} is {where!r}: pass an integer")
        held = counted(buffer.count, f"the count of {name}")
        own = dtype_of(buffer.dtype, f"the dtype of {name}")
        memory = memory_at(where, held, own, name)
    else:
        memory = _memory(buffer, name, dtype, write=write)
    if memory.dtype != dtype:
        raise Wrong(f"{name} holds {memory.dtype}, the call says {dtype}: make them equal")
    if count is not None and memory.numel() < count:
        raise Wrong(f"{name} holds {memory.numel()} elements, the call says {count}")
    if memory.is_meta:
        raise Wrong(f"{name} is on meta, where nothing is held: pass memory")
    if write and (reason := unwritable(memory)):
        raise Wrong(f"{name} is {reason}")
    return memory if count is None else memory[:count]


def one_integer(buffer: Any, name: str) -> Tensor | None:
    """A buffer of one integer that a count is written to; None if the caller gave none."""
    if buffer is None:
        return None
    extent = 1 if is_pointer(buffer) else None  # C++'s `&count`
    memory = seen(buffer, extent, dtype_in(buffer, name), name, write=True)
    if memory.numel() != 1 or memory.is_floating_point() or memory.dtype == torch.bool:
        what = f"{memory.numel()} elements of {memory.dtype}"
        raise Wrong(f"{name} holds {what}: pass a buffer of one integer to write to, or None")
    return memory


def distinct(buffers: Mapping[str, Tensor | None]) -> None:
    """Refuse buffers for results, by their names, that have memory in common."""
    given = [(name, buffer) for name, buffer in buffers.items() if buffer is not None]
    for (name, one), (other, another) in combinations(given, 2):
        if overlapping(one, another):
            raise Wrong(f"{name} and {other} are in the same memory: pass buffers of their own")


def _memory(buffer: Any, name: str, dtype: torch.dtype | None, *, write: bool = False) -> Tensor:
    """All of a buffer that is an object, as a 1-D tensor; untyped memory becomes `dtype`."""
    if isinstance(buffer, np.ma.MaskedArray):
        raise Wrong(f"{name} is a masked array, and a mask says nothing here: pass its data")
    if not isinstance(buffer, Tensor | np.ndarray) and hasattr(buffer, "__dlpack__"):
        if write and is_read_only(buffer):
            raise Wrong(f"{name} is read-only, and the result goes there")
        buffer = torch.utils.dlpack.from_dlpack(buffer)
    if isinstance(buffer, Tensor):
        if buffer.layout != torch.strided or not buffer.is_contiguous():
            raise Wrong(f"{name} is a tensor that is not contiguous: pass x.contiguous()")
        return buffer.detach().view(-1)
    try:
        array = buffer if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))
    except (TypeError, ValueError, NotImplementedError):
        raise Wrong(
            f"{name} is a {type(buffer).__name__}: pass a tensor, an array, anything with the "
            "buffer protocol or DLPack, or an address"
        ) from None
    if not array.flags.c_contiguous:
        raise Wrong(f"{name} is an array that is not contiguous: pass numpy.ascontiguousarray(x)")
    if not array.dtype.isnative or array.dtype.name not in NAMES:
        raise Wrong(f"{name} holds {array.dtype.str!r}, which torch has no dtype for")
    if write and not array.flags.writeable:
        raise Wrong(f"{name} is read-only, and the result goes there")
    bare = isinstance(buffer, memoryview) and buffer.format == "B"  # as that of shared memory
    untyped = isinstance(buffer.obj if bare else buffer, _UNTYPED)
    kind = dtype if untyped and dtype is not None else NAMES[array.dtype.name]
    return memory_at(array.ctypes.data, array.nbytes // kind.itemsize, kind, name, owner=array)
