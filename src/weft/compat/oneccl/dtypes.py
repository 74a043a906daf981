"""Data types: oneCCL's names for torch's dtypes, and the index dtypes that weft widens.

oneCCL's indices are of any integer type; weft's are int32 or int64, and none is negative. Narrowing
a result back cannot fail, since every index of it was some rank's, of the same dtype. uint64 is
seen as int64, bit by bit; to the numbers that are negative then `unsigned` and `concatenate` see.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["Wrong", "dtype_of", "index_dtype_of", "is_dtype", "narrowed", "widened"]

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
