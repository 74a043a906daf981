"""Memory that ranks of one host share: a segment of each rank, which its peers map to read.

A segment is a file in memory without a name (memfd), of its full size from the start: pages that
were never touched cost nothing. It is sealed against shrinking and growing, so nobody's read can
fail. Its descriptor goes to each peer once, over the Unix socket that connects the two; peers map
it read-only. Workspaces that messages are sent from lie in it (`Group.lease`), and messages that
lie elsewhere are copied into it. A message is then an offset and a length on the socket.

Messages need no flags there, and no fences: a rank reads only what a frame on the socket has
announced, and the owner writes there again only after a frame has acknowledged it; the system calls
that carry the frames order memory. Meetings (`meeting`) have the first bytes for themselves. When a
process dies, the kernel frees what it had.

Where there is no memfd (macOS), or no memory for one, ranks of a host send over their sockets.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import resource
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from ...base.memory import Lease
from ...rendezvous.address import NO_SIGNAL

ROOM = 1 << 30
"""Bytes of a segment, where the machine has eight times as much."""

_MOMENT = 0.1  # seconds that a wait has at least, see `_seconds_left`
_QUIET = 64  # after all memory was free so many times, pages that were not used are released
_HELLO = struct.Struct("<Q")  # bytes of the segment whose descriptor comes along, or 0
_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK | F_SEAL_GROW


def _fits(segments: int, nbytes: int) -> bool:
    """Whether so many segments may be mapped: at most half of the address space, if limited."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return most == resource.RLIM_INFINITY or segments * nbytes <= most // 2


class Segment:
    """The memory of this rank that its peers map, and its allocator.

    Any thread may allocate and free. The lowest free memory is taken first, since pages that were
    used before are cheap to touch.

    Attributes:
        fd: the file; below 0 once it is closed.
        nbytes: its size.
        address: where it lies here.
        reserved: bytes at its start that it never allocates.
        pages: all of it; there are none once it is closed.
        memory: the same; None once it is closed.
        lock: held while something is allocated or freed.
    """

    def __init__(self, fd: int, nbytes: int, reserved: int = 0) -> None:
        """Map a file in memory, and own its descriptor.

        Args:
            fd, nbytes: the file, and its size.
            reserved: bytes at its start that are never allocated; whole pages.

        Raises:
            OSError: it cannot be mapped.
        """
        self.fd = fd
        self.nbytes = nbytes
        self.pages = mmap.mmap(fd, nbytes)
        self.memory: Tensor | None = torch.frombuffer(self.pages, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self.reserved = reserved
        # reentrant: a handler of a signal may close a wire in the middle of anything
        self.lock = threading.RLock()
        self._free = [(reserved, nbytes)]  # first byte and end of each part, ascending
        self._taken: dict[int, int] = {}  # bytes of each part that is in use, by its first
        self._touched = reserved  # the end of the pages that were used and not released
        self._peak = reserved  # the end of the memory that was used since all was free
        self._quiet = 0  # how often in a row the peak was less than half of what is touched

    @classmethod
    def make(cls, nbytes: int | None = None, reserved: int = 0) -> Segment | None:
        """A new segment; None if there is no memory for it, or memory cannot be shared here.

        Args:
            nbytes: its size; None: as the machine has.
            reserved: bytes at its start that are never allocated; none, if that is half of it.
        """
        if not sys.platform.startswith("linux"):
            return None
        room = nbytes or min(ROOM, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
        if not _fits(1, room):
            return None
        fd = -1
        try:
            fd = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.truncate(fd, room)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, room, reserved if reserved <= room // 2 else 0)
        except OSError:  # forbidden, or a limit on files, addresses or their sizes
            if fd >= 0:
                os.close(fd)
            return None

    def allocate(self, nbytes: int) -> int | None:
        """Allocate memory at the start of a page; its offset, or None if there is no room."""
        size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        if self.fd < 0:
            return None
        with self.lock:
            for at, (start, end) in enumerate(self._free):
                if end - start >= size:
                    if end - start == size:
                        del self._free[at]
                    else:
                        self._free[at] = (start + size, end)
                    self._taken[start] = size
                    self._peak = max(self._peak, start + size)
                    return start
        return None

    def lease(self, nbytes: int) -> Lease | None:
        """Memory for a while; None if there is no room."""
        memory = self.memory  # now: another thread may close it
        offset = self.allocate(nbytes)
        if offset is None or memory is None:
            return None
        return Lease(memory[offset : offset + nbytes], functools.partial(self.free, offset))

    def free(self, offset: int) -> None:
        """Free memory that `allocate` gave."""
        with self.lock:
            start = offset
            end = offset + self._taken.pop(offset)
            at = bisect.bisect(self._free, (start, end))
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == start:
                at -= 1
                start = self._free.pop(at)[0]
            self._free.insert(at, (start, end))
            if not self._taken:
                self._rest()

    def _rest(self) -> None:
        """All memory is free: release pages that were not used for a while."""
        self._touched = max(self._touched, self._peak)
        if 2 * (self._peak - self.reserved) < self._touched - self.reserved:
            self._quiet += 1
        else:
            self._quiet = 0
        if self._quiet >= _QUIET:
            self._let_go(self._peak)
        self._peak = self.reserved

    def drain(self) -> None:
        """Release all pages behind the last one in use."""
        with self.lock:
            self._touched = max(self._touched, self._peak)
            ends = (at + size for at, size in self._taken.items())
            self._let_go(max(ends, default=self.reserved))

    def _let_go(self, start: int) -> None:
        """Release the pages from there on."""
        if start < self._touched and self.fd >= 0:
            self.pages.madvise(mmap.MADV_REMOVE, start, self._touched - start)
        self._touched = start
        self._quiet = 0

    def offset_of(self, tensor: Tensor) -> int | None:
        """The offset of a tensor in the segment; None if it is elsewhere."""
        offset = tensor.data_ptr() - self.address
        return offset if offset >= 0 and offset + tensor.nbytes <= self.nbytes else None

    def stage(self, tensor: Tensor) -> int | None:
        """Copy a contiguous tensor into the segment; the offset, or None if there is no room."""
        memory = self.memory  # which the handler of a signal may close meanwhile: it stays mapped
        offset = self.allocate(tensor.nbytes)
        if offset is not None and memory is not None:
            ctypes.memmove(self.address + offset, tensor.data_ptr(), tensor.nbytes)
        return offset

    def after_fork(self) -> None:
        """In a forked child: the memory is the parent's, a thread of which may have the lock."""
        self.lock = threading.RLock()
        self.close()

    def close(self) -> None:
        """Allocate no more. Memory in use stays mapped until the last tensor in it is freed."""
        with self.lock:
            fd = self.fd
            self.fd = -1
            if fd >= 0:
                os.close(fd)
                self.memory = None
                del self.pages  # which holds a file, as the memory does


class Peer:
    """The segment of a peer, mapped here to be read.

    Attributes:
        pages: all of it; whoever writes there crashes.
        memory: the same, uint8, 1-D.
        nbytes: of it.
        address: where it lies here.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map it.

        Raises:
            OSError: it cannot be mapped, or is not sealed: its owner could shrink it.
        """
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if not sealed or os.fstat(fd).st_size != nbytes:
            raise OSError(f"a descriptor came that is no sealed segment of {nbytes} bytes")
        self.pages = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # of torch, that nobody may write there
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self.memory = torch.frombuffer(self.pages, dtype=torch.uint8)
        self.nbytes = nbytes
        self.address = self.memory.data_ptr()


def exchange(
    segment: Segment | None, sockets: Mapping[int, socket.socket], deadline: float
) -> dict[int, Peer]:
    """Send this rank's segment to the peers at these Unix sockets, and map theirs; collective.

    Args:
        segment: this rank's, or None.
        sockets: by peer; each wait sets their timeout.
        deadline: by `time.monotonic`, when all must have answered.

    Returns:
        The segments of peers that were mapped here, and have mapped that of this rank.

    Raises:
        OSError: a peer went away, or said nothing in time.
    """
    own_bytes = 0 if segment is None else segment.nbytes
    own_fds = [] if segment is None else [segment.fd]
    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", own_fds)
    for sock in sockets.values():
        sock.settimeout(_seconds_left(deadline))
        # `socket.send_fds` takes flags, and leaves them out
        sock.sendmsg([_HELLO.pack(own_bytes)], [rights], NO_SIGNAL)
    segments: dict[int, Peer] = {}
    for peer, sock in sockets.items():
        sock.settimeout(_seconds_left(deadline))
        hello, fds, _, _ = socket.recv_fds(sock, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
        nbytes = _HELLO.unpack(hello)[0] if len(hello) == _HELLO.size else 0
        for fd in fds:
            with contextlib.suppress(OSError, ValueError):  # then the peer sends over its socket
                if _fits(len(sockets) + 1, nbytes):
                    segments[peer] = Peer(fd, nbytes)
            os.close(fd)
        if len(hello) < _HELLO.size:
            raise _gone(peer)
        is_mapped = bytes([peer in segments])
        sock.sendall(is_mapped, NO_SIGNAL)
    for peer, sock in sockets.items():
        sock.settimeout(_seconds_left(deadline))
        answer = sock.recv(1)
        if not answer:
            raise _gone(peer)
        if answer != b"\1":
            segments.pop(peer, None)
    return segments


def _seconds_left(deadline: float) -> float:
    """Seconds until the deadline; at least a tenth of one.

    However late the last rank has come, the others then say who is missing, not that no time was
    left to look.
    """
    return max(deadline - time.monotonic(), _MOMENT)


def _gone(peer: int) -> ConnectionError:
    return ConnectionError(f"rank {peer} went away while it was connected to")
