"""Memory of another process on the same host, read where it lies.

A message over TCP is copied twice and passes through the network stack; Linux's `process_vm_readv`
copies it once, for a quarter of the CPU time. Both processes must belong to one user, and the
kernel must allow it (Yama, seccomp, containers may not), so a rank tries first, and what cannot be
read is sent. MPI libraries do the same and call it CMA (cross memory attach).

A rank that gives up may use its memory for something else while a peer still reads there. So
behind every read comes a look at the owner's *guard*, random bytes that it wipes first of all when
it gives up: if they are still there, what was read before them is what was lent.

Source of what Yama forbids: the Linux kernel's Documentation/admin-guide/LSM/Yama.rst.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from pathlib import Path

from ..kernels.address import address_of
from ..kernels.cpu_talk import Lender, lender
from ..kernels.talk_table import ARENA
from .arena import HEAD, ROOM, Arena, seen

__all__ = ["LEAST", "Guard", "Reach", "may_trace", "yama"]

LEAST = 1 << 17
"""Bytes from which on a message is worth being read where it lies."""

_PIECE = 8 << 20  # bytes that are read between two looks at signals
# host, guard, its address, process; of its arena the file, and the address
_CARD = struct.Struct("!16s16sQQqQ")
_SPAN = struct.Struct("@PN")  # an iovec of the C library: where, and how many bytes
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")
_TRACES = 1 << 19  # CAP_SYS_PTRACE in a mask of capabilities


class Guard:
    """Some random bytes, which say that this process still lends memory."""

    def __init__(self, arena: Arena | None = None) -> None:
        """Make them; also in the first page of the arena, if it has one."""
        self._bytes, self._process = os.urandom(16), os.getpid()
        self._arena = -1, 0
        self._memory = ctypes.create_string_buffer(self._bytes, len(self._bytes))
        self._head = None if arena is None else arena.head.memory
        if arena is not None:
            self._arena = arena.fd, arena.address
            ctypes.memmove(arena.head.memory, self._bytes, len(self._bytes))

    def card(self, host: bytes) -> bytes:
        """What a peer must know to read here; `host` is the 16-byte name of this host."""
        where = ctypes.addressof(self._memory), os.getpid(), *self._arena
        return _CARD.pack(host, self._bytes, *where)

    def wipe(self, *, arena: bool = True) -> None:
        """Lend nothing any more; any thread may call it. A forked child lent nothing.

        Args:
            arena: what is in the arena neither; otherwise that is closed, so that nobody writes
                there any more, and peers that map it may go on.
        """
        ctypes.memset(self._memory, 0, len(self._bytes))
        if arena and self._head is not None and os.getpid() == self._process:
            ctypes.memset(self._head, 0, len(self._bytes))  # which a child shares with its parent


class Reach:
    """Reads the memory of one peer."""

    SIZE = _CARD.size

    def __init__(
        self, guard: bytes, address: int, process: int, arena: tuple[int, int] = (-1, 0)
    ) -> None:
        """To a process with a guard there, and an arena of this file, at this address."""
        self._guard, self._address, self._process = guard, address, process
        self._record = lender(process, address, guard)
        self._offered: tuple[int, int] | None = arena

    @property
    def record(self) -> Lender:
        """The same for machine code; what is in its arena is mapped from here on, if it may be."""
        offered, self._offered = self._offered, None
        if offered is not None:
            fd, there = offered
            pages = seen(self._process, fd, self._guard)
            if pages is not None:
                arena = there, ROOM, pages.address + HEAD, pages.address
                self._record = lender(
                    self._process, self._address, self._guard, arena, pages.memory
                )
        return self._record

    @classmethod
    def of(cls, card: bytes, host: bytes) -> Reach | None:
        """To the peer with this card, or None: it is on another host, or may not be read."""
        there, guard, address, process, *arena = _CARD.unpack(card)
        if there != host or _read() is None:
            return None
        reach = cls(guard, address, process, (arena[0], arena[1]))
        return reach if reach._call(address, memoryview(bytearray(1))) else None

    def forget(self) -> None:
        """Let go of what is mapped here, once those that read there now are done."""
        self._offered = None
        self._record = lender(self._process, self._address, self._guard)

    def read(self, address: int, into: memoryview) -> bool:
        """Fill `into` from there; False if that is not allowed, or not what was lent any more.

        Any thread may call it, also several at once.
        """
        record = self.record  # which holds what is mapped
        there, room, here, guard = record[ARENA:].tolist()
        if room and 0 <= address - there <= room - len(into):
            ctypes.memmove(address_of(into), here + address - there, len(into))
            return ctypes.string_at(guard, len(self._guard)) == self._guard
        return self._call(address, into)

    def _call(self, address: int, into: memoryview) -> bool:
        """`read`, by the system call."""
        function, at = _read(), address_of(into)
        assert function is not None
        size = len(self._guard)
        seen = bytearray(size)
        behind = _SPAN.pack(address_of(memoryview(seen)), size)
        guard = _SPAN.pack(self._address, size)
        for start in range(0, len(into), _PIECE):
            count = min(_PIECE, len(into) - start)
            here = _SPAN.pack(at + start, count) + behind
            there = _SPAN.pack(address + start, count) + guard
            done = function(self._process, here, 2, there, 2, 0)
            if done != count + size or seen != self._guard:
                return False
        return True


def yama() -> int | None:
    """The kernel's `kernel.yama.ptrace_scope`; None if it has none, which is like 0.

    Of the processes of one user, 0 lets each read every other's memory; 1 only its descendants',
    and 2 none, but for those that `may_trace`; 3 lets nobody read.
    """
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):  # no Linux, no Yama, or a container hides it
        return None


def may_trace() -> bool:
    """Whether this process has CAP_SYS_PTRACE, as root has outside of containers."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:  # no Linux
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    return any(mask & _TRACES for mask in masks)


@functools.cache
def _read() -> ctypes._NamedFuncPointer | None:
    """The system call, if this system has it."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        number, spans = ctypes.c_ulong, ctypes.c_char_p
        function.argtypes = [ctypes.c_int, spans, number, spans, number, number]
    return function
