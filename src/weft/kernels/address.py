"""Where memory begins, for machine code and system calls that take it as a number."""

from __future__ import annotations

import ctypes

import numpy as np

__all__ = ["address_of"]


def address_of(memory: memoryview) -> int:
    """The address of its first byte; of empty memory it says nothing."""
    if memory.readonly or not memory.nbytes:
        return int(np.frombuffer(memory, np.uint8).ctypes.data)
    # a fifth of the time, which counts where messages travel in pieces
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
