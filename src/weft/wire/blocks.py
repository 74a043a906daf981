"""Memory that all ranks of a host write together, and that each then has as its own.

What every rank of a host is going to have, each would copy: P times the same bytes. Here they lie
in one file in memory that all of them map. Each rank writes its part, and what a caller gets is a
*private* mapping (copy-on-write): its pages are the file's until he writes to them, and then copies
of his own.

The file is cut into *blocks*. The first rank gives them out, each marked for itself alone. Who is
told of one and takes it marks it, too, and takes the mark away when it holds the block no more; the
first rank does not before it heard from all that they took it. One without marks is given out
again. Before it lets go, a rank drops pages that were written to, as /proc/self/pagemap tells. The
first write to a page takes 2.7 µs, and copying one 0.4, so a rank whose caller does write gets
copies for a while.

Or the first rank *offers* a block ahead of a call, in front of all blocks, where those see it who
hear from it afterwards.

A forked child would see what comes to lie in a block later. So before a fork all pages that
somebody holds become this process's own, by the call that prepares pages for being written to. A
kernel that does not know it (before 5.14) has no blocks.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arena import WORKS, Pages, advise, opened
from .memory import PATIENCE, SPARE, fresh, piece_size

__all__ = ["MOST", "RANKS", "Block", "Blocks", "Giver", "Place", "works"]

MOST = 1 << 29
"""Bytes of the largest block."""

RANKS = 64
"""The most ranks that have blocks together."""

_ROOM = 1 << 30  # bytes of the file; pages that nobody touched cost nothing
_HEAD = 1 << 13  # bytes in front of them: its sign, the marks, and what is on offer
_NAME, _SIGN = "weft-blocks", 16  # by which the file is known from others
_BLOCKS = 64  # at a time
_OFFER = _SIGN + _BLOCKS * RANKS  # where that is: the number of the call, and the block
_COPIES = 64  # results that are copied after one that was written to
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, for which Python has no name
_ENTRY = 8  # bytes about a page in the page map, of which these bits:
_THERE, _OF_FILE = 3 << 6, 1 << 5  # in the last of its bytes
_OTHERS = bytes(last for last in range(256) if not last & _THERE or last & _OF_FILE)

_log = logging.getLogger("weft")

_held: dict[int, int] = {}
"""What callers have of private mappings: addresses and sizes."""

_forking = threading.RLock()
"""Had by who forks, and while memory is lent or given back: the pages that a fork makes a process's
own are those of a block that it holds, until the fork is done."""


class Place(NamedTuple):
    """Where a block lies: the number of its marks, its first byte, and how many."""

    number: int
    start: int
    size: int


class Blocks:
    """The file as one rank has it."""

    def __init__(self, fd: int, rank: int) -> None:
        """Map it.

        Raises:
            OSError: it cannot be, or this kernel does not do all that it takes.
        """
        head = Pages(fd, 0, _HEAD, write=True)
        self._head = np.frombuffer(memoryview(head.memory), np.uint8)
        self._marks = self._head[_SIGN : _SIGN + _BLOCKS * RANKS].reshape(_BLOCKS, RANKS)
        self._offer = self._head[_OFFER : _OFFER + 32].view(np.int64)
        self._all = Pages(fd, _HEAD, _ROOM, write=True)
        self._memory = torch.frombuffer(self._all.memory, dtype=torch.uint8)
        self._own = Pages(fd, _HEAD, _ROOM, write=True, private=True)
        self._rank, self._process = rank, os.getpid()
        self._back: deque[Place] = deque()  # that no caller holds any more
        self._copies = 0
        address, page = self._own.address, mmap.PAGESIZE
        advise(address, page, _POPULATE_WRITE)
        told = _written(address, page)
        advise(address, page, mmap.MADV_DONTNEED)
        if not told or _written(address, page):
            raise OSError("the kernel does not tell which pages were written to")

    @classmethod
    def seen(cls, process: int, fd: int, rank: int, sign: bytes) -> Blocks | None:
        """The file that the first rank opened; None: it is out of reach."""
        try:
            with opened(process, fd, _NAME, _HEAD + _ROOM, write=True) as mine:
                blocks = cls(mine, rank)
        except OSError:
            return None
        return blocks if blocks._head[:_SIGN].tobytes() == sign else None

    def offered(self, call: int, nbytes: int) -> Place | None:
        """The block that is on offer for the call of that number, if it has so many bytes.

        All ranks find the same, between hearing from the first rank and saying something to it.
        """
        number, *place = self._offer.tolist()
        return Place(*place) if number == call and place[-1] >= nbytes else None

    def take(self, place: Place) -> Block:
        """One that was given out, or offered; to be released."""
        self._marks[place.number, self._rank] = 1
        return Block(self, place, self._memory[place.start : place.start + place.size])

    def lend(self, place: Place, start: int, stop: int) -> Tensor:
        """These bytes of a block as memory that only this process writes to (uint8, 1-D).

        The block goes back when nobody holds them.
        """
        view = memoryview(self._own.memory)[place.start + start : place.start + stop]
        address = self._own.address + place.start
        with _forking:
            _held[address] = place.size
            weakref.finalize(view, _let_go, address, self._back, place).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def copies(self) -> bool:
        """Whether a caller shall rather have a copy, since the last wrote to what he had."""
        self._copies = max(0, self._copies - 1)
        return self._copies > 0

    def give_back(self, place: Place) -> None:
        """Hold a block no more."""
        self._marks[place.number, self._rank] = 0

    def settle(self) -> None:
        """Give back what no caller holds any more."""
        if os.getpid() != self._process:  # a child holds nothing for the others
            return
        with _forking:
            while self._back:
                place = self._back.popleft()
                address = self._own.address + place.start
                try:
                    written = _written(address, place.size)
                except OSError:  # no more files: as if it were
                    written = True
                if written:
                    self._copies = _COPIES
                    advise(address, place.size, mmap.MADV_DONTNEED)
                self.give_back(place)


class Block:
    """A block that this rank holds.

    Attributes:
        memory: uint8, 1-D; what one rank writes, all see.
    """

    def __init__(self, blocks: Blocks, place: Place, memory: Tensor) -> None:
        self._blocks, self._place, self.memory = blocks, place, memory
        self._holds = True

    def own(self, start: int, stop: int) -> Tensor:
        """These bytes as memory of this rank's caller, and the end of this; all wrote before."""
        if stop == start or self._blocks.copies():
            mine = fresh((stop - start,), torch.uint8)
            mine.copy_(self.memory[start:stop])
            self.release()
            return mine
        self._holds = False
        return self._blocks.lend(self._place, start, stop)

    def release(self) -> None:
        """Hold it no more, if it is held; nobody here may look at it afterwards."""
        if self._holds:
            self._holds = False
            self._blocks.give_back(self._place)


@dataclass(slots=True)
class _Piece:
    place: Place
    passed_over: int = field(default=0)


class Giver:
    """The file as the first rank has it, which gives blocks out.

    Attributes:
        fd: of the file, until the others have seen it.
        sign: what they see in it.
        blocks: the file as the others have it.
    """

    def __init__(self, ranks: int, limit: int = _ROOM) -> None:
        """Make a file, of which up to `limit` bytes are kept that nobody holds.

        Raises:
            OSError: there is none, or it is no use.
        """
        if not WORKS or ranks > RANKS:
            raise OSError("no memory is shared here")
        self._limit = limit
        self._offered: Place | None = None
        self._pieces: list[_Piece] = []  # by their places
        self.sign = os.urandom(_SIGN)
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.truncate(self.fd, _HEAD + _ROOM)
            self.blocks = Blocks(self.fd, 0)
        except OSError:
            self.close()
            raise
        self.blocks._head[:_SIGN] = np.frombuffer(self.sign, np.uint8)

    def close(self) -> None:
        """Let nobody see the file any more who did not yet."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def take(self, nbytes: int) -> Place | None:
        """A block of so many bytes; None: there is none left. Nothing stays on offer."""
        self._withdraw()
        return self._given(nbytes)

    def offer(self, call: int, nbytes: int) -> None:
        """Have a block of so many bytes on offer for the call of that number, if there is one."""
        if self._offered is None or not nbytes <= self._offered.size <= nbytes * SPARE:
            self._withdraw()
            self._offered = self._given(nbytes)
        if self._offered is not None:
            self.blocks._offer[:] = call, *self._offered

    def gone(self) -> None:
        """What was on offer was taken by all ranks."""
        self._offered = None

    def _withdraw(self) -> None:
        """Have nothing on offer."""
        if self._offered is not None:
            self.blocks.give_back(self._offered)
            self._offered = None
        self.blocks._offer[0] = -1

    def _given(self, nbytes: int) -> Place | None:
        """Memory that nobody held, marked for this rank; None: there is no more."""
        free = [p for p in self._pieces if not self.blocks._marks[p.place.number].any()]
        fit = [p for p in free if nbytes <= p.place.size <= nbytes * SPARE]
        found = min(fit, key=lambda piece: piece.place.size, default=None)
        room, leave = self._limit, []
        for other in sorted(free, key=lambda piece: piece.passed_over):
            if other is found:
                continue
            other.passed_over += 1
            if other.passed_over >= PATIENCE or other.place.size > room:
                leave.append(other)
            else:
                room -= other.place.size
        self._let_go(leave)
        if found is None:
            found = self._cut(nbytes)
            if found is None:  # what is kept takes its room
                self._let_go(free)
                found = self._cut(nbytes)
            if found is None:
                return None
        found.passed_over = 0
        self.blocks._marks[found.place.number, 0] = 1
        return found.place

    def _cut(self, nbytes: int) -> _Piece | None:
        """A new piece."""
        size = piece_size(nbytes, mmap.PAGESIZE)
        used = {piece.place.number for piece in self._pieces}
        number = next((n for n in range(_BLOCKS) if n not in used), None)
        start = 0
        for index, piece in enumerate([*self._pieces, None]):
            end = _ROOM if piece is None else piece.place.start
            if number is not None and size <= end - start:
                made = _Piece(Place(number, start, size))
                self._pieces.insert(index, made)
                return made
            if piece is not None:
                start = piece.place.start + piece.place.size
        return None

    def _let_go(self, pieces: list[_Piece]) -> None:
        """Give the memory of pieces that nobody holds back to the system."""
        for _, start, size in (piece.place for piece in pieces if piece in self._pieces):
            advise(self.blocks._all.address + start, size, mmap.MADV_REMOVE)
        self._pieces = [piece for piece in self._pieces if piece not in pieces]


def works() -> bool:
    """Whether this machine has blocks."""
    try:
        Giver(1).close()
    except OSError:
        return False
    return True


def _let_go(address: int, back: deque[Place], place: Place) -> None:
    # a collection of garbage may bring us here in the middle of anything: no locks, no calls
    _held.pop(address, None)
    back.append(place)


def _written(address: int, size: int) -> bool:
    """Whether this process has pages of its own in a private mapping."""
    first, last = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.pread(fd, (last - first) * _ENTRY, first * _ENTRY)
    finally:
        os.close(fd)
    return bool(text[_ENTRY - 1 :: _ENTRY].translate(None, _OTHERS))


def _make_own() -> None:
    """Make pages that callers hold this process's own, before it forks."""
    _forking.acquire()  # another thread waits with its results until the fork is done
    for address, size in list(_held.items()):
        try:
            advise(address, size, _POPULATE_WRITE)
        except OSError as error:
            if address in _held:  # else it is gone by now, and its pages may be, too
                _log.warning("a forked child may see a result change: %s", error.strerror)


if WORKS:
    os.register_at_fork(
        before=_make_own, after_in_parent=_forking.release, after_in_child=_forking.release
    )
