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
import math
import mmap
import operator
from collections.abc import Callable, Mapping
from ctypes import _Pointer
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...sparse.call import overlapping, unwritable

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


NAMES = {
    "char": torch.int8,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "uint16": torch.uint16,
    "int": torch.int32,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "float": torch.float32,
    "float32": torch.float32,
    "double": torch.float64,
    "float64": torch.float64,
    "bfp16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
}
"""oneCCL's names: of its first headers (`ccl_dtype_char`) and its last (`ccl::datatype::int8`)."""

_WIDER = {
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.int32: torch.int32,
    torch.uint32: torch.int64,
    torch.int64: torch.int64,
    torch.uint64: torch.int64,
}


class Wrong(Exception):
    """What is wrong with a call, in a sentence without the rank; to be stated to all ranks."""


def is_dtype(given: object) -> bool:
    """Whether this names a dtype: torch's, NumPy's (`numpy.int64` too), or a name of oneCCL's."""
    numpy = isinstance(given, type) and issubclass(given, np.generic)
    known = isinstance(given, str) and given in NAMES
    return numpy or known or isinstance(given, torch.dtype | np.dtype)


def dtype_of(given: object, name: str) -> torch.dtype:
    """The dtype that the parameter `name` stands for.

    Example:
        >>> dtype_of("bfp16", "value_dtype")
        torch.bfloat16
    """
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, type) and issubclass(given, np.generic):
        given = np.dtype(given)  # numpy.int64 is written for either
    word = given.name if isinstance(given, np.dtype) else given
    if isinstance(word, str) and word in NAMES:
        return NAMES[word]
    raise Wrong(f"{name} is {given!r}: pass a torch dtype or one of {', '.join(NAMES)}")


def index_dtype_of(given: object, name: str) -> torch.dtype:
    """The dtype of indices that the parameter `name` stands for."""
    dtype = dtype_of(given, name)
    if dtype not in _WIDER:
        served = ", ".join(str(each).removeprefix("torch.") for each in _WIDER)
        raise Wrong(f"{name} is {dtype}: indices are of an integer type, one of {served}")
    return dtype


def widened(indices: Tensor) -> Tensor:
    """Indices as int32 or int64; the same memory where that is possible."""
    wider = _WIDER[indices.dtype]
    return indices.view(wider) if indices.dtype == torch.uint64 else indices.to(wider)


def narrowed(indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Indices of a result as the caller's dtype; the same memory where that is possible."""
    return indices.view(dtype) if dtype == torch.uint64 else indices.to(dtype)


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


_VERSIONED = b"dltensor_versioned"
_FLAGS = 24  # bytes before the flags: two numbers of a version, a context, a deleter
_READ_ONLY = 1

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def is_read_only(buffer: Any) -> bool:
    """Whether the exporter says that its memory is; older ones cannot.

    Example:
        >>> import numpy as np
        >>> array = np.zeros(3)
        >>> array.flags.writeable = False
        >>> is_read_only(array), is_read_only(np.zeros(3))
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
