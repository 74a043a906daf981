"""Memory that is used again instead of being fresh each time.

Touching fresh pages costs more than the arithmetic done in them (64 MiB: 27 ms to fill when
fresh, 3 when reused), and more still in a virtual machine that returns free pages to its host:
86 MiB in huge pages took 4 ms at once, and 50 to 100 after a second in which they were returned.
So whatever lives for one call only is leased from a `Pool`; and the memory of a result goes onto a
`Shelf` when its tensor is gone, to be the next result. `fresh` takes from there.
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
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .shm import Segment

_log = logging.getLogger("weft")

_SMALLEST = 1 << 12  # bytes; a block is never smaller, unless a pool says so
_HUGE = 1 << 21  # bytes of a huge page on x86-64 and most of arm64
_WORTH_SHARING = 1 << 16  # bytes; smaller messages go through sockets
_WORTH_KEEPING = 1 << 20  # bytes; smaller results are left to the allocator of torch

SPARE = 1.25
"""Times what is asked for, that memory of a past result may have."""

PATIENCE = 8
"""Results that memory may fail to serve before it is let go."""


class Lease:
    """A piece of workspace: `tensor` (uint8, 1-D) is yours until `release()`."""

    __slots__ = ("_block", "_pool", "tensor")

    def __init__(self, pool: Pool, block: Tensor | int, tensor: Tensor) -> None:
        """
        Args:
            pool: whose it is.
            block: the memory, or where it begins in the segment.
            tensor: what is lent of it.
        """
        self._pool: Pool | None = pool
        self._block, self.tensor = block, tensor

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

    On a device torch's own allocator keeps memory for the next use, so blocks are as large as was
    asked for, and let go.

    Attributes:
        segment: memory that peers map, where it comes from if it is to be sent; or None.
        lent: bytes that are lent now, as they were asked for.
        peak: the most that were lent at once; whoever measures sets it back to `lent`.
    """

    def __init__(self, smallest: int = _SMALLEST, device: torch.device | None = None) -> None:
        self._smallest, self._device = smallest, device
        self._free: dict[int, list[Tensor]] = {}  # by their sizes
        self.segment: Segment | None = None
        self._lock = threading.Lock()
        self.lent = self.peak = 0

    def lease(self, nbytes: int, *, shared: bool = False) -> Lease:
        """Workspace of `nbytes` bytes, at least 64-byte aligned, holding anything.

        Args:
            nbytes: how many.
            shared: it is to be sent: it comes from the segment, if that has room.
        """
        with self._lock:
            self.lent += nbytes
            self.peak = max(self.peak, self.lent)
        if shared and nbytes > _WORTH_SHARING and self.segment is not None:
            offset = self.segment.allocate(nbytes)
            if offset is not None:
                return Lease(self, offset, self.segment.memory[offset : offset + nbytes])
        size = max(self._smallest, 1 << max(0, nbytes - 1).bit_length())
        size = nbytes if self._device is not None else size
        with self._lock:
            blocks = self._free.get(size)
            block = blocks.pop() if blocks else None
        if block is None:
            block = fresh((size,), torch.uint8, self._device)
        return Lease(self, block, block[:nbytes])

    def _take_back(self, block: Tensor | int, nbytes: int) -> None:
        with self._lock:
            self.lent -= nbytes
            if isinstance(block, Tensor) and self._device is None:
                self._free.setdefault(block.numel(), []).append(block)
        if isinstance(block, int) and self.segment is not None:
            self.segment.free(block)

    def drain(self) -> None:
        """Let go of all memory that is not lent."""
        with self._lock:
            self._free.clear()
        if self.segment is not None:
            self.segment.drain()


def typed(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    """The bytes of `memory` (uint8, 1-D) from `offset` on, seen as a tensor of that shape."""
    nbytes = math.prod(shape) * dtype.itemsize
    flat = memory[offset : offset + nbytes].view(dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A tensor that holds anything; on the CPU, as it is by default, of pages cheap to touch.

    Its storage cannot be resized if it is large, as that of `torch.from_numpy` cannot.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _WORTH_KEEPING or (device is not None and device.type != "cpu"):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_shelf().take(nbytes), dtype=dtype).resize_(shape)


class Shelf:
    """Memory that tensors had, kept for the tensors that come next; any thread may ask."""

    def __init__(self, limit: int) -> None:
        """Keep up to `limit` bytes."""
        self.limit = limit
        self._kept: list[_Piece] = []
        self._back: deque[_Piece] = deque()
        self._lock = threading.Lock()

    @property
    def kept(self) -> int:
        """Bytes that lie here, used by nobody."""
        with self._lock:
            self._put_away()
            return sum(len(piece.pages) for piece in self._kept)

    def take(self, nbytes: int) -> memoryview:
        """Memory of `nbytes` bytes, which comes back when nobody holds this view of it.

        Raises:
            MemoryError: there is no more, not even when all that is kept is let go.
        """
        piece = self._found(nbytes)
        if piece is None:
            eighth = 1 << max(0, (nbytes - 1).bit_length() - 4)
            size = -(-nbytes // eighth) * eighth  # for the next of about its size, too
            try:
                piece = _Piece(size)
            except OSError:  # a limit of this process or the machine: what is kept counts, too
                with self._lock:
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
        """A kept piece that fits, kept no more."""
        with self._lock:
            self._put_away()
            fit = [p for p in self._kept if nbytes <= p.size <= nbytes * SPARE]
            piece = min(fit, key=lambda piece: piece.size, default=None)
            for other in self._kept:
                other.passed_over += 1
            self._kept = [p for p in self._kept if p is not piece and p.passed_over < PATIENCE]
        return piece

    def _take_back(self, piece: _Piece) -> None:
        # a collection of garbage may bring us here in the middle of anything, `take` included
        self._back.append(piece)
        if self._lock.acquire(blocking=False):
            try:
                self._put_away()
            finally:
                self._lock.release()

    def _put_away(self) -> None:
        while self._back:
            self._kept.append(self._back.popleft())
        room = self.limit
        for piece in reversed(self._kept):  # those used last are wanted first
            room -= len(piece.pages)
            if room < 0:
                self._kept = [p for p in self._kept if p is not piece]


class _Piece:
    """Some pages. What is never touched of them costs nothing."""

    __slots__ = ("first", "pages", "passed_over", "size")

    def __init__(self, size: int) -> None:
        self.size, self.passed_over = size, 0
        huge = size >= _HUGE  # a smaller piece would have all of such a page filled with zeros
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.pages = mmap.mmap(-1, size + _HUGE if huge else size, flags=flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.first = -address % _HUGE if huge else 0
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):  # not on macOS
            with contextlib.suppress(OSError):  # a kernel without them: small pages do, too
                self.pages.madvise(mmap.MADV_HUGEPAGE)


@functools.cache
def _shelf() -> Shelf:
    """The one of this process."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 64
    said = os.environ.get("WEFT_KEEP")
    if said is not None:
        if said.isascii() and said.isdigit():
            limit = int(said) << 20
        else:  # in the middle of a call, which other ranks are in, too: no place to raise
            _log.warning("WEFT_KEEP is %r, not a number of MiB: keeping %d", said, limit >> 20)
    return Shelf(limit)


# a child begins with an empty one: another thread may have had the lock of this one
os.register_at_fork(after_in_child=_shelf.cache_clear)
