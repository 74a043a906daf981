"""DLPack: what another library says of its memory and torch does not look at.

An exporter of DLPack 1.0 or later marks memory that must not be written to; torch's tensor of it is
writable all the same. The layout is that of `DLManagedTensorVersioned` in `dlpack.h`.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["is_read_only"]

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
