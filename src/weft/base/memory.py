"""Memory that is used again instead of being fresh each time.

Touching fresh pages costs more than the arithmetic done in them (64 MiB: 27 ms to fill when
fresh, 3 when reused), and more still in a virtual machine that returns free pages to its host:
86 MiB in huge pages took 4 ms at once, and 50 to 100 after a second in which they were returned.
So memory that only one call needs is leased from a `Pool`. The memory of a result goes onto a
`Shelf` when its tensor is freed, and `fresh` takes the memory of the next result from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .tensors import as_bytes

_log = logging.getLogger("weft")

_HUGE = 1 << 21  # bytes of a huge page on x86-64 and most of arm64
_WORTH_KEEPING = 1 << 20  # bytes; smaller results are left to the allocator of torch
_NO_BYTES = torch.empty(0, dtype=torch.uint8)  # which torch makes of no memory

SPARE = 1.25
"""How many times the requested size a kept piece may have to be used."""

PATIENCE = 8
"""How many results in a row may not fit in a kept piece before it is freed."""


class Lease:
    """A piece of workspace: `tensor` (uint8, 1-D) is yours until `release()`.

    Who needs less of it may set `tensor` to a part of it.
    """

    __slots__ = ("_give_back", "tensor")

    def __init__(self, tensor: Tensor, give_back: Callable[[], object]) -> None:
        """
        Args:
            tensor: what is leased.
            give_back: takes it back.
        """
        self._give_back: Callable[[], object] | None = give_back
        self.tensor = tensor

    def release(self) -> None:
        """Give the memory back; afterwards nobody may touch it. Releasing twice does nothing."""
        give_back = self._give_back
        self._give_back = None
        if give_back is not None:
            give_back()

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        self.release()


class Pool:
    """Blocks of power-of-two sizes that are leased again and again; any thread may use it."""

    smallest = 1 << 12  # bytes: a block is never smaller

    def __init__(self) -> None:
        # by their sizes; each use of it is one operation, which no other thread comes between
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def lease(self, nbytes: int) -> Lease:
        """Workspace of `nbytes` bytes, at least 64-byte aligned, holding anything."""
        size = max(self.smallest, 1 << (nbytes - 1).bit_length())
        blocks = self._free[size]
        try:
            block = blocks.pop()
        except IndexError:
            block = fresh((size,), torch.uint8)
        return Lease(block[:nbytes], functools.partial(blocks.append, block))

    def drain(self) -> None:
        """Free all memory that is not leased, and what is leased as it comes back."""
        self._free.clear()


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor; they hold its storage, whatever becomes of the tensor."""
    return as_bytes(tensor.detach())


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a plain tensor, to be read and written without torch operations.

    They are held, whatever other memory the tensor gets (`tensor.data = other`, `set_`), until its
    owner frees them (`untyped_storage().resize_`). Plain is as of `tensors.is_plain`.
    """
    assert tensor.is_contiguous()  # else these would be other bytes than its own, also to write to
    return np.asarray(_Held(tensor, "|u1", tensor.nbytes)).data


def numbers_of(tensor: Tensor) -> NDArray[Any]:
    """The elements of a plain tensor of integers, 1-D, in its memory."""
    assert tensor.is_contiguous() and tensor.dim() == 1
    return np.asarray(_Held(tensor, f"<i{tensor.itemsize}", tensor.numel()))


class _Held:
    """A tensor's memory, as NumPy asks for it. After `Tensor.numpy` torch resizes no storage."""

    __slots__ = ("__array_interface__", "_alias")

    def __init__(self, tensor: Tensor, kind: str, count: int) -> None:
        self._alias = tensor.detach()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": kind,
            "shape": (count,),
        }


def tensor_of(memory: bytearray | memoryview) -> Tensor:
    """A tensor of these bytes: uint8, 1-D."""
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else _NO_BYTES


def fault_of(length: int, limit: int, *, is_sized: bool) -> str:
    """What is wrong with a message of that length, as the end of "rank 1 sent ..."; "": nothing.

    Args:
        length: of the message, in bytes.
        limit: the bytes of the receive's tensor or, by size, the most that may come.
        is_sized: whether the receive is by size.

    Example:
        >>> fault_of(9, 8, is_sized=True), fault_of(7, 8, is_sized=False)
        ('9 bytes for a receive of 8', '7 bytes for a receive of exactly 8')
        >>> fault_of(7, 8, is_sized=True)
        ''
    """
    if is_sized and length > limit:
        return f"{length} bytes for a receive of {limit}"
    if not is_sized and length != limit:
        return f"{length} bytes for a receive of exactly {limit}"
    return ""


def typed(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    """The bytes of `memory` (uint8, 1-D) from `offset` on, seen as a tensor of that shape."""
    nbytes = math.prod(shape) * dtype.itemsize
    flat = memory[offset : offset + nbytes].view(dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor; a large one on the CPU is of pages that were used before, if any.

    The storage of such a large one cannot be resized, as that of `torch.from_numpy` cannot.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _WORTH_KEEPING or (device is not None and device.type != "cpu"):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(shelf_of_process().take(nbytes), dtype=dtype).resize_(shape)


class Shelf:
    """Memory of freed tensors, kept for the next tensors; any thread may use it.

    Attributes:
        limit: the most bytes that are kept.
        lock: held while something is taken or put away. Memory may come back meanwhile, in any
            thread, and a process may fork.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: list[_Piece] = []
        self._back: deque[_Piece] = deque()
        self.lock = threading.Lock()

    @property
    def kept(self) -> int:
        """Bytes that are kept here, unused."""
        with self.lock:
            self._put_away()
            return sum(len(piece.pages) for piece in self._kept)

    def take(self, nbytes: int) -> memoryview:
        """Memory of `nbytes` bytes, which comes back when this view of it is freed.

        Raises:
            MemoryError: there is none, even after all kept memory was freed.
        """
        piece = self._found(nbytes)
        if piece is None:
            eighth = 1 << max(0, (nbytes - 1).bit_length() - 4)
            size = -(-nbytes // eighth) * eighth  # for the next of about its size, too
            try:
                piece = _Piece(size)
            except OSError:  # a limit of the process or the machine: free what is kept, try again
                with self.lock:
                    self._back.clear()
                    self._kept.clear()
            try:
                piece = piece or _Piece(size)
            except OSError as error:
                raise MemoryError(f"no memory for {size} bytes: {error.strerror}") from None
        piece.passed_over = 0
        view = memoryview(piece.pages)[piece.first : piece.first + nbytes]
        weakref.finalize(view, self._take_back, piece).atexit = False
        return view

    def _found(self, nbytes: int) -> _Piece | None:
        """Take a kept piece that fits off the shelf, if there is one."""
        with self.lock:
            self._put_away()
            fit = [p for p in self._kept if nbytes <= p.size <= nbytes * SPARE]
            piece = min(fit, key=lambda piece: piece.size, default=None)
            for other in self._kept:
                other.passed_over += 1
            self._kept = [p for p in self._kept if p is not piece and p.passed_over < PATIENCE]
        return piece

    def _take_back(self, piece: _Piece) -> None:
        # the garbage collector may call this at any point, also within `take`
        self._back.append(piece)
        if self.lock.acquire(blocking=False):
            try:
                self._put_away()
            finally:
                self.lock.release()

    def _put_away(self) -> None:
        while self._back:
            self._kept.append(self._back.popleft())
        room = self.limit
        for piece in reversed(self._kept):  # the limit keeps those that were used last
            room -= len(piece.pages)
            if room < 0:
                self._kept = [p for p in self._kept if p is not piece]


class _Piece:
    """Some pages of memory; pages that are never touched cost nothing."""

    __slots__ = ("first", "pages", "passed_over", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.passed_over = 0
        huge = size >= _HUGE  # a smaller piece would have all of such a page filled with zeros
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.pages = mmap.mmap(-1, size + _HUGE if huge else size, flags=flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.first = -address % _HUGE if huge else 0
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):  # not on macOS
            with contextlib.suppress(OSError):  # a kernel without them: small pages do, too
                self.pages.madvise(mmap.MADV_HUGEPAGE)


@functools.cache
def shelf_of_process() -> Shelf:
    """The shelf of this process."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 64
    value = os.environ.get("WEFT_KEEP")
    if value is not None:
        if value.isascii() and value.isdigit():
            limit = int(value) << 20
        else:  # other ranks are in the same call, so this rank must not raise here
            _log.warning("WEFT_KEEP is %r, not a number of MiB: keeping %d", value, limit >> 20)
    return Shelf(limit)


# a forked child begins with a new one: another thread of the parent may have held the lock
os.register_at_fork(after_in_child=shelf_of_process.cache_clear)
