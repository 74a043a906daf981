"""Buffers: whatever a caller has memory in, seen as a 1-D tensor of that very memory.

Nothing is copied, in either direction. A buffer is a torch tensor on any device, a NumPy array,
anything with the buffer protocol (`bytes`, `array`, ctypes arrays) or with DLPack, or an address of
host memory: an int, a `c_void_p` or a typed pointer of ctypes, whose extent a parameter of the
call tells, or an `Address`, which tells it itself. The memory must be contiguous, of the dtype that
was named, and long enough; `bytes`, `bytearray`, `mmap` and their memoryviews are of any dtype.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
from collections.abc import Mapping
from ctypes import _Pointer
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...sparse.call import overlapping, unwritable
from .dlpack import is_read_only
from .dtypes import NAMES, Wrong, dtype_of

__all__ = ["Address", "counted", "distinct", "dtype_in", "is_address", "one_integer", "seen"]

_UNTYPED = (bytes, bytearray, mmap.mmap)
_SPACE = 1 << 63  # bytes of addresses


@dataclass(frozen=True, slots=True)
class Address:
    """Host memory by its address: the caller answers for it, and keeps it while it is in use.

    Attributes:
        address: where it begins; a multiple of the dtype's size.
        count: elements in it.
        dtype: of an element; torch's, or a name of oneCCL's.

    Example:
        >>> import ctypes
        >>> floats = (ctypes.c_float * 3)(1, 2, 4)
        >>> where = Address(ctypes.addressof(floats), 3, torch.float32)
        >>> seen(where, 2, torch.float32, "send_val_buf")
        tensor([1., 2.])
    """

    address: int
    count: int
    dtype: torch.dtype | str


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
    if (pointed := _pointed_at(buffer, name)) is not None:
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
        if _pointed_at(buffer, name) not in (dtype, None):
            raise Wrong(f"{name} is a {type(buffer).__name__}, the call says {dtype}")
        where = _where(buffer)
        return _at(where, count * dtype.itemsize, None, name, dtype).view(dtype)
    if isinstance(buffer, Address):
        if not isinstance(where := buffer.address, int):
            raise Wrong(f"the address of {name} is {where!r}: pass an integer")
        held = counted(buffer.count, f"the count of {name}")
        own = dtype_of(buffer.dtype, f"the dtype of {name}")
        memory = _at(where, held * own.itemsize, None, name, own).view(own)
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
    extent = 1 if isinstance(buffer, _Pointer) else None  # C++'s `&count`
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


def is_address(buffer: object) -> bool:
    """Whether this is an address that does not say how much there is."""
    return isinstance(buffer, ctypes.c_void_p | _Pointer) or (
        isinstance(buffer, int) and not isinstance(buffer, bool)
    )


def _where(buffer: Any) -> int:
    if isinstance(buffer, _Pointer):
        buffer = ctypes.cast(buffer, ctypes.c_void_p)
    return getattr(buffer, "value", buffer) or 0


def _pointed_at(buffer: object, name: str) -> torch.dtype | None:
    """The dtype that a typed pointer says its memory has; None if this is no such pointer."""
    if not isinstance(buffer, _Pointer):
        return None
    return dtype_of(np.dtype(buffer._type_), f"what {name} points at")


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
    nbytes = array.nbytes // kind.itemsize * kind.itemsize
    return _at(array.ctypes.data, nbytes, array, name, kind).view(kind)


def _at(where: int, nbytes: int, owner: object, name: str, dtype: torch.dtype) -> Tensor:
    """Bytes at an address, which keep their owner alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if where <= 0 or where % dtype.itemsize or where + nbytes > _SPACE:
        raise Wrong(f"{name} is {nbytes} bytes at {where:#x}, where no {dtype} can be")
    block: Any = (ctypes.c_uint8 * nbytes).from_address(where)
    block.owner = owner
    return torch.frombuffer(block, dtype=torch.uint8)
