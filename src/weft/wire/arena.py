"""Arenas: memory that a rank lends from, and that its peers on the host map.

Reading another process's memory by a system call (`lent`) pins its pages one by one and copies them
in the kernel: for some hundred KB up to some MB that took 1.5 to 2.4 times as long as copying from
memory that is mapped here, and what is to be added must be copied first. So each rank has one
*arena*, a file in memory from which workspaces come that peers are going to read
(`Wire.lease(..., lent=True)`). Peers open it through /proc, which whoever may read a process may,
when they first read; then it is theirs to look at, never to write.

The file is as large as an arena can get from the start; pages that were never touched cost nothing.
Nothing is ever cut off or filled with zeros, so nobody's read fails, whatever its owner does, and
the pages go when the last process that maps them has gone: there is no name to unlink. The first
page holds the owner's guard, so a peer sees that what it has read was still lent without a system
call either.

What a message says was written before it was sent, and messages through pipes or sockets order
that on x86-64, where alone there are arenas, as there are pipes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["HEAD", "ROOM", "WORKS", "Arena", "Pages", "advise", "opened", "seen"]

WORKS = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether ranks share memory: arenas, and pipes (`pipe`)."""

ROOM = 256 << 20
"""Bytes of an arena: workspaces beyond that come from elsewhere, and are read by system calls."""

HEAD = 2 << 20
"""Bytes of the file before them, of which a page is used: so the rest begins on a huge page."""

_GRAIN = 64  # bytes, of which all places are multiples
_NAME = "weft-arena"
_FAILED = ctypes.c_void_p(-1).value
_NORESERVE = 0x4000  # MAP_NORESERVE: no swap space is set aside for pages that may be written to


class Pages:
    """Pages of a file that are mapped here until nobody holds this.

    Attributes:
        address: of the first of them.
        memory: they, as a buffer.
    """

    __slots__ = ("__weakref__", "address", "memory")

    def __init__(
        self, fd: int, offset: int, size: int, *, write: bool, private: bool = False
    ) -> None:
        """Map them; what is written to those that are `private`, nobody else sees.

        Raises:
            OSError: they cannot be.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE * write
        kind = mmap.MAP_PRIVATE | _NORESERVE if private else mmap.MAP_SHARED
        c = _c()
        found = c.mmap(None, size, protection, kind, fd, offset)
        if found == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address = int(found)
        self.memory = (ctypes.c_char * size).from_address(self.address)
        # not with this object: a tensor made of the buffer holds only that
        weakref.finalize(self.memory, c.munmap, self.address, size).atexit = False


class Arena:
    """Memory of this rank that its peers map.

    Attributes:
        fd: of its file, by which peers find it.
        head: the page that holds the guard.
        address: where what is taken from it lies.
    """

    def __init__(self, fd: int, head: Pages, room: Pages) -> None:
        self.fd, self.head, self.address = fd, head, room.address
        self._process = os.getpid()
        self._room: Tensor | None = torch.frombuffer(room.memory, dtype=torch.uint8)
        self._taken = 0

    @classmethod
    def made(cls) -> Arena | None:
        """An arena; None where there are none, or no more of them."""
        if not WORKS:
            return None
        fd = -1
        try:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.truncate(fd, HEAD + ROOM)
            head = Pages(fd, 0, mmap.PAGESIZE, write=True)
            room = Pages(fd, HEAD, ROOM, write=True)
        except OSError:  # forbidden, or a limit on files, addresses or their sizes
            if fd >= 0:
                os.close(fd)
            return None
        _c().madvise(room.address, ROOM, mmap.MADV_HUGEPAGE)  # where not, small ones do
        return cls(fd, head, room)

    @property
    def usable(self) -> bool:
        """Whether memory may be taken, and used again: it is open, and this process's own."""
        return self._room is not None and os.getpid() == self._process

    def take(self, nbytes: int) -> Tensor | None:
        """Memory that nobody else has (uint8, 1-D), for good; None: there is no room left."""
        room, start = self._room, self._taken
        if room is None or start + nbytes > ROOM:
            return None
        self._taken += -(-nbytes // _GRAIN) * _GRAIN
        return room[start : start + nbytes]

    def holds(self, memory: Tensor) -> bool:
        """Whether that was taken from here."""
        at = memory.data_ptr() - self.address
        return self.usable and at >= 0 and at + memory.nbytes <= ROOM

    def close(self) -> None:
        """Let nobody take memory or find the file any more; what was taken stays. Twice is fine."""
        self._room = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def seen(process: int, fd: int, guard: bytes) -> Pages | None:
    """The file of another process's arena, to be read; None: it is gone, or may not be opened."""
    try:
        with opened(process, fd, _NAME, HEAD + ROOM) as mine:
            pages = Pages(mine, 0, HEAD + ROOM, write=False)
    except OSError:
        return None
    return pages if ctypes.string_at(pages.address, len(guard)) == guard else None


@contextmanager
def opened(process: int, fd: int, name: str, size: int, *, write: bool = False) -> Iterator[int]:
    """Another process's file in memory, within.

    Args:
        process, fd: where it is.
        name: that it was made with.
        size: its bytes.
        write: whether to write to it, too.

    Raises:
        OSError: it is gone, another one by now, or may not be opened.
    """
    if not WORKS or fd < 0:
        raise OSError(errno.EBADF, "no file in memory")
    path = f"/proc/{process}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{name} "):
        raise OSError(errno.EBADF, f"no {name}", path)
    mine = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if os.fstat(mine).st_size != size:
            raise OSError(errno.EBADF, f"not of {size} bytes", path)
        yield mine
    finally:
        os.close(mine)


def advise(address: int, size: int, advice: int) -> None:
    """Tell the kernel something about pages that are mapped here.

    Raises:
        OSError: it does not know that, or cannot do it.
    """
    if _c().madvise(address, size, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def _c() -> ctypes.CDLL:
    """The C library, whose mapping of files needs no further open file for each."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
