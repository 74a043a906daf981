"""Buffers: a caller's memory of any kind as a 1-D tensor that shares it.

Nothing is copied. A buffer is one of:

* a torch tensor on any device, a NumPy array, an object with the buffer protocol (`bytes`, `array`,
  ctypes arrays) or with DLPack;
* an address of host memory: an int, a `c_void_p` or a typed pointer of ctypes. A parameter of the
  call says how many elements are there;
* an `Address`, which says that itself.

The memory must be contiguous, of the dtype that the call names, and long enough. `bytes`,
`bytearray`, `mmap` and memoryviews of them hold any dtype.

weft cannot check that there is memory at an address. It checks that the address is aligned for the
dtype, and that the memory ends within the address space. An exporter of DLPack 1.0 or later marks
read-only memory. torch imports it as a writable tensor, so this module reads the mark itself
(`DLManagedTensorVersioned` in `dlpack.h`).

oneCCL's indices have any integer type, weft's are int32 or int64 and not negative. Converting the
result back cannot overflow, because each index of it came from some rank in the same dtype. uint64
memory is viewed as int64; `operation` handles the indices that are negative then.
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
    """A number of elements, which the parameter `name` gives.

    Raises:
        WeftError: it is no integer, or negative.
    """
    number = integer(count)
    if number is None or number < 0:
        raise WeftError(f"{name} is {count!r}: pass the number of elements, from 0 up")
    return number


def dtype_in(buffer: Any, name: str) -> torch.dtype:
    """The dtype of a buffer that knows its own.

    Raises:
        WeftError: it does not know it, such as an address.
    """
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
        buffer: see above; None if `count` is 0.
        count: how many elements the call uses; None: all that the buffer has.
        dtype: of the elements.
        name: the parameter's, for errors.
        write: whether weft writes to it.

    Raises:
        WeftError: it is no such buffer, or too short, of another dtype, or read-only.
    """
    if buffer is None and count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
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
    """A buffer of one integer, to which weft writes a count; None if the caller passed None."""
    if buffer is None:
        return None
    extent = 1 if isinstance(buffer, _Pointer) else None  # C++'s `&count`
    memory = seen(buffer, extent, dtype_in(buffer, name), name, write=True)
    if memory.numel() != 1 or memory.is_floating_point() or memory.dtype == torch.bool:
        what = f"{memory.numel()} elements of {memory.dtype}"
        raise WeftError(f"{name} holds {what}: pass a buffer of one integer to write to, or None")
    return memory


def distinct(buffers: Mapping[str, Tensor | None]) -> None:
    """Raise WeftError if two buffers for results, given by name, overlap."""
    given = [(name, buffer) for name, buffer in buffers.items() if buffer is not None]
    for (name, one), (other, another) in combinations(given, 2):
        starts = one.data_ptr(), another.data_ptr()
        ends = starts[0] + one.nbytes, starts[1] + another.nbytes
        if one.device == another.device and max(starts) < min(ends):
            raise WeftError(f"{name} and {other} are in the same memory: pass buffers of their own")


def _memory(buffer: Any, name: str, dtype: torch.dtype | None, *, write: bool = False) -> Tensor:
    """All of a buffer that knows its size, as a 1-D tensor; untyped memory is viewed as `dtype`."""
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
"""The dtypes by oneCCL's names: those of its first headers (`ccl_dtype_char`) and those of its last
(`ccl::datatype::int8`)."""


def _named(given: object) -> torch.dtype | None:
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, type) and issubclass(given, np.generic):
        given = np.dtype(given)  # numpy.int64 is written for either
    word = given.name if isinstance(given, np.dtype) else given
    return NAMES.get(word) if isinstance(word, str) else None


def is_dtype(given: object) -> bool:
    """Whether this is a dtype: torch's, NumPy's (or a type such as `numpy.int64`), or a name."""
    return isinstance(given, np.dtype) or _named(given) is not None


def dtype_of(given: object, name: str) -> torch.dtype:
    """The torch dtype that the parameter `name` gives.

    Raises:
        WeftError: it is none.

    Example:
        >>> dtype_of("bfp16", "value_dtype")
        torch.bfloat16
    """
    dtype = _named(given)
    if dtype is None:
        raise WeftError(f"{name} is {given!r}: pass a torch dtype or one of {', '.join(NAMES)}")
    return dtype


def index_dtype_of(given: object, name: str) -> torch.dtype:
    """The torch dtype of indices that the parameter `name` gives.

    Raises:
        WeftError: it is no integer type.
    """
    dtype = dtype_of(given, name)
    if dtype not in [NAMES[integer] for integer in _INTEGERS]:
        served = ", ".join(_INTEGERS)
        raise WeftError(f"{name} is {dtype}: indices are of an integer type, one of {served}")
    return dtype


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weft's own calls get indices of this dtype: int32 or int64."""
    return torch.int32 if dtype.itemsize < 4 or dtype == torch.int32 else torch.int64


_SPACE = 1 << 63  # bytes of addresses


@dataclass(frozen=True, slots=True)
class Address:
    """Host memory, given by its address. The caller must keep it alive while a call uses it.

    Attributes:
        address: of the first element; a multiple of the dtype's size in bytes.
        count: the number of elements.
        dtype: of the elements; torch's, or a name of oneCCL's.

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
    """Whether this is an address without a size."""
    return isinstance(buffer, ctypes.c_void_p | _Pointer) or (
        isinstance(buffer, int) and not isinstance(buffer, bool)
    )


def _memory_at(
    where: int, count: int, dtype: torch.dtype, name: str, owner: object = None
) -> Tensor:
    """A tensor of the `count` elements at an address; it keeps `owner` alive."""
    nbytes = count * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
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
    """Whether a DLPack exporter marks its memory read-only; exporters before 1.0 cannot.

    Example:
        >>> import numpy as np
        >>> array = np.zeros(3)
        >>> array.flags.writeable = False
        >>> _is_read_only(array), _is_read_only(np.zeros(3))
        (True, False)
    """
    try:
        capsule = buffer.__dlpack__(max_version=(1, 0))
    except TypeError:  # an exporter before 1.0
        return False
    if not _is_valid(capsule, _VERSIONED):
        return False
    flags = ctypes.c_uint64.from_address(_pointer(capsule, _VERSIONED) + _FLAGS)
    return bool(flags.value & _READ_ONLY)
