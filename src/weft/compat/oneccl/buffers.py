"""Buffers: whatever a caller has memory in, seen as a 1-D tensor of that very memory.

Nothing is copied, in either direction. A buffer is a torch tensor on any device, a NumPy array,
anything with the buffer protocol (`bytes`, `array`, ctypes arrays) or with DLPack, or an `address`
of host memory: an int, a `c_void_p` or a typed pointer of ctypes, whose extent a parameter of the
call tells, or an `Address`, which tells it itself. The memory must be contiguous, of the dtype that
was named, and long enough; `bytes`, `bytearray`, `mmap` and their memoryviews are of any dtype.

An address is the caller's word that there is memory. What can be checked is: that it begins where
an element may lie, and ends within the space of addresses. An exporter of DLPack 1.0 or later marks
memory that must not be written to; torch's tensor of it is writable all the same, so the mark is
read here (`DLManagedTensorVersioned` in `dlpack.h`).

oneCCL's indices are of any integer type; weft's are int32 or int64, and none is negative. Narrowing
a result back cannot fail, since every index of it was some rank's, of the same dtype. uint64 is
seen as int64, bit by bit; `operation` sees to the numbers that are negative then.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from ctypes import _Pointer
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft import WeftError

from ..arguments import integer, unfit

_UNTYPED = (bytes, bytearray, mmap.mmap)


def counted(count: object, name: str) -> int:
    """The number of elements that the parameter `name` gives."""
    number = integer(count)
    if number is None or number < 0:
        raise WeftError(f"{name} is {count!r}: pass the number of elements, from 0 up")
    return number


def dtype_in(buffer: Any, name: str) -> torch.dtype:
    """The dtype that a buffer itself says it has."""
    if isinstance(buffer, Address):
        return dtype_of(buffer.dtype, f"the dtype of {name}")
    if isinstance(buffer, _Pointer):
        return dtype_of(np.dtype(buffer._type_), f"what {name} points at")
    if buffer is None or is_address(buffer):
        what = "None" if buffer is None else "an address"
        raise WeftError(f"{name} is {what}, which has no dtype: name the dtypes in the call")
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
            raise WeftError(f"{name} is an address of unknown extent: pass an Address, or a buffer")
        kind = dtype_in(buffer, name) if isinstance(buffer, _Pointer) else dtype
        buffer = Address(_where(buffer), count, kind)
    memory = _memory(buffer, name, dtype, write=write)
    if memory.dtype != dtype:
        raise WeftError(f"{name} holds {memory.dtype}, the call says {dtype}: make them equal")
    if count is not None and memory.numel() < count:
        raise WeftError(f"{name} holds {memory.numel()} elements, the call says {count}")
    if reason := unfit(memory, write=write):
        raise WeftError(f"{name} is {reason}")
    return memory if count is None else memory[:count]


def one_integer(buffer: Any, name: str) -> Tensor | None:
    """A buffer of one integer that a count is written to; None if the caller gave none."""
    if buffer is None:
        return None
    extent = 1 if isinstance(buffer, _Pointer) else None  # C++'s `&count`
    memory = seen(buffer, extent, dtype_in(buffer, name), name, write=True)
    if memory.numel() != 1 or memory.is_floating_point() or memory.dtype == torch.bool:
        what = f"{memory.numel()} elements of {memory.dtype}"
        raise WeftError(f"{name} holds {what}: pass a buffer of one integer to write to, or None")
    return memory


def distinct(buffers: Mapping[str, Tensor | None]) -> None:
    """Refuse buffers for results, by their names, that have memory in common."""
    given = [(name, buffer) for name, buffer in buffers.items() if buffer is not None]
    for (name, one), (other, another) in combinations(given, 2):
        starts = one.data_ptr(), another.data_ptr()
        ends = starts[0] + one.nbytes, starts[1] + another.nbytes
        if one.device == another.device and max(starts) < min(ends):
            raise WeftError(f"{name} and {other} are in the same memory: pass buffers of their own")


def _memory(buffer: Any, name: str, dtype: torch.dtype | None, *, write: bool = False) -> Tensor:
    """All of a buffer that knows its extent, as a 1-D tensor; untyped memory becomes `dtype`."""
    if isinstance(buffer, Address):
        if not isinstance(buffer.address, int):
            raise WeftError(f"the address of {name} is {buffer.address!r}: pass an integer")
        held = counted(buffer.count, f"the count of {name}")
        return _memory_at(buffer.address, held, dtype_in(buffer, name), name)
    if isinstance(buffer, np.ma.MaskedArray):
        raise WeftError(f"{name} is a masked array, and a mask says nothing here: pass its data")
    if not isinstance(buffer, Tensor | np.ndarray) and hasattr(buffer, "__dlpack__"):
        if write and _is_read_only(buffer):
            raise WeftError(f"{name} is read-only, and the result goes there")
        buffer = torch.utils.dlpack.from_dlpack(buffer)
    if isinstance(buffer, Tensor):
        if buffer.layout != torch.strided or not buffer.is_contiguous():
            raise WeftError(f"{name} is a tensor that is not contiguous: pass x.contiguous()")
        return buffer.detach().view(-1)
    try:
        array = buffer if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))
    except (TypeError, ValueError, NotImplementedError):
        raise WeftError(
            f"{name} is a {type(buffer).__name__}: pass a tensor, an array, anything with the "
            "buffer protocol or DLPack, or an address"
        ) from None
    if not array.flags.c_contiguous:
        raise WeftError(f"{name} is an array that is not contiguous: pass np.ascontiguousarray(x)")
    if not array.dtype.isnative or array.dtype.name not in NAMES:
        raise WeftError(f"{name} holds {array.dtype.str!r}, which torch has no dtype for")
    if write and not array.flags.writeable:
        raise WeftError(f"{name} is read-only, and the result goes there")
    bare = isinstance(buffer, memoryview) and buffer.format == "B"  # as that of shared memory
    untyped = isinstance(buffer.obj if bare else buffer, _UNTYPED)
    kind = dtype if untyped and dtype is not None else NAMES[array.dtype.name]
    return _memory_at(array.ctypes.data, array.nbytes // kind.itemsize, kind, name, owner=array)


_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_FLOATS = ["float16", "bfloat16", "float32", "float64"]

NAMES = {name: getattr(torch, name) for name in (*_INTEGERS, *_FLOATS, "bool")} | {
    "char": torch.int8,
    "int": torch.int32,
    "bfp16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
"""oneCCL's names: of its first headers (`ccl_dtype_char`) and its last (`ccl::datatype::int8`)."""


def _named(given: object) -> torch.dtype | None:
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, type) and issubclass(given, np.generic):
        given = np.dtype(given)  # numpy.int64 is written for either
    word = given.name if isinstance(given, np.dtype) else given
    return NAMES.get(word) if isinstance(word, str) else None


def is_dtype(given: object) -> bool:
    """Whether this names a dtype: torch's, NumPy's (`numpy.int64` too), or a name of oneCCL's."""
    return isinstance(given, np.dtype) or _named(given) is not None


def dtype_of(given: object, name: str) -> torch.dtype:
    """The dtype that the parameter `name` stands for.

    Example:
        >>> dtype_of("bfp16", "value_dtype")
        torch.bfloat16
    """
    dtype = _named(given)
    if dtype is None:
        raise WeftError(f"{name} is {given!r}: pass a torch dtype or one of {', '.join(NAMES)}")
    return dtype


def index_dtype_of(given: object, name: str) -> torch.dtype:
    """The dtype of indices that the parameter `name` stands for."""
    dtype = dtype_of(given, name)
    if dtype not in [NAMES[integer] for integer in _INTEGERS]:
        served = ", ".join(_INTEGERS)
        raise WeftError(f"{name} is {dtype}: indices are of an integer type, one of {served}")
    return dtype


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weft's own calls take such indices."""
    return torch.int32 if dtype.itemsize < 4 or dtype == torch.int32 else torch.int64


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


def is_address(buffer: object) -> bool:
    """Whether this is an address that does not say how much there is."""
    return isinstance(buffer, ctypes.c_void_p | _Pointer) or (
        isinstance(buffer, int) and not isinstance(buffer, bool)
    )


def _memory_at(
    where: int, count: int, dtype: torch.dtype, name: str, owner: object = None
) -> Tensor:
    """So many elements at an address; they keep their owner alive."""
    nbytes = count * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if where <= 0 or where % dtype.itemsize or where + nbytes > _SPACE:
        raise WeftError(f"{name} is {nbytes} bytes at {where:#x}, where no {dtype} can be")
    block: Any = (ctypes.c_uint8 * nbytes).from_address(where)
    block.owner = owner
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype)


def _where(address: Any) -> int:
    if isinstance(address, _Pointer):
        address = ctypes.cast(address, ctypes.c_void_p)
    return getattr(address, "value", address) or 0


_VERSIONED = b"dltensor_versioned"
_FLAGS = 24  # bytes before the flags: two numbers of a version, a context, a deleter
_READ_ONLY = 1

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _is_read_only(buffer: Any) -> bool:
    """Whether the exporter says that its memory is; older ones cannot.

    Example:
        >>> import numpy as np
        >>> array = np.zeros(3)
        >>> array.flags.writeable = False
        >>> _is_read_only(array), _is_read_only(np.zeros(3))
        (True, False)
    """
    try:
        capsule = buffer.__dlpack__(max_version=(1, 0))
    except TypeError:  # which knows no versions
        return False
    if not _is_valid(capsule, _VERSIONED):
        return False
    flags = ctypes.c_uint64.from_address(_pointer(capsule, _VERSIONED) + _FLAGS)
    return bool(flags.value & _READ_ONLY)
