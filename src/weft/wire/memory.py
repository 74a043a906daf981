"""Leased workspaces: memory that is used again instead of being fresh each time.

Touching fresh pages costs more than the arithmetic done in them (64 MiB: 27 ms to fill when
fresh, 3 when reused), so whatever lives for one call only is leased from a `Pool`. Results that a
user keeps cannot be reused; `fresh` gives them huge pages, which are cheap to touch.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading

import torch
from torch import Tensor

__all__ = ["Lease", "Pool", "fresh", "typed"]

_SMALLEST = 1 << 12  # bytes; a block is never smaller, unless a pool says so
_HUGE = 1 << 21  # bytes of a huge page on x86-64 and most of arm64
_WORTH_HUGE = 1 << 22  # bytes; below this a result's pages are not worth a system call


class Lease:
    """A piece of workspace: `tensor` (uint8, 1-D) is yours until `release()`."""

    __slots__ = ("_block", "_pool", "tensor")

    def __init__(self, pool: Pool, block: Tensor, nbytes: int) -> None:
        self._pool: Pool | None = pool
        self._block = block
        self.tensor = block[:nbytes]

    def release(self) -> None:
        """Give the memory back; afterwards nobody may touch it. Releasing twice does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._take_back(self._block, self.tensor.numel())

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        self.release()


class Pool:
    """Blocks of power-of-two sizes that are lent, taken back and lent again; any thread may ask.

    Attributes:
        lent: bytes that are lent now, as they were asked for.
        peak: the most that were lent at once; whoever measures sets it back to `lent`.
    """

    def __init__(self, smallest: int = _SMALLEST) -> None:
        self._smallest = smallest
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self.lent = self.peak = 0

    def lease(self, nbytes: int) -> Lease:
        """Workspace of `nbytes` bytes, at least 64-byte aligned, holding anything."""
        size = max(self._smallest, 1 << max(0, nbytes - 1).bit_length())
        with self._lock:
            blocks = self._free.get(size)
            block = blocks.pop() if blocks else None
            self.lent += nbytes
            self.peak = max(self.peak, self.lent)
        return Lease(self, fresh((size,), torch.uint8) if block is None else block, nbytes)

    def _take_back(self, block: Tensor, nbytes: int) -> None:
        with self._lock:
            self.lent -= nbytes
            self._free.setdefault(block.numel(), []).append(block)

    def drain(self) -> None:
        """Let go of all memory that is not lent."""
        with self._lock:
            self._free.clear()


def typed(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    """The bytes of `memory` (uint8, 1-D) from `offset` on, seen as a tensor of that shape."""
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty CPU tensor whose pages are cheap to touch for the first time."""
    out = torch.empty(shape, dtype=dtype)
    nbytes = out.numel() * out.element_size()
    advise = _madvise()
    if nbytes >= _WORTH_HUGE and advise is not None:
        first = -(-out.data_ptr() // _HUGE) * _HUGE
        length = (out.data_ptr() + nbytes - first) // _HUGE * _HUGE
        if length > 0:
            advise(first, length, mmap.MADV_HUGEPAGE)  # advice: a refusal changes nothing
    return out


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # macOS
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
