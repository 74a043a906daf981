"""Pipes: memory that two ranks of one host share, which small messages go through.

A message over a socket is two system calls, each of which locks, allocates and wakes: about 10 us
for what a copy does in one, and more in a virtual machine. Here the sender copies it into memory
and says how far that is filled, the receiver looks. The socket stays: who finds nothing and goes to
sleep says so in that memory, and is woken by a byte over the socket, its *bell*; and the end of
the socket is the end of the connection, also where the peer was killed.

Whoever is about to sleep says so, then looks once more; whoever moved something stores how far,
then looks whether the other sleeps. One of the two sees the other if no processor lets these loads
pass the stores before them: hence the fences. All else rests on what x86-64 promises, stores and
loads in their order, so there are no pipes elsewhere (Intel, Software Developer's Manual, volume
3A, "Memory Ordering").

What lies where is said in `kernels/talk_table`: machine code moves frames through the same pipes,
and messages of any length (`put_all`, `take_all`), where a line has nothing else to do.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.compile import Loops, compiler
from ..kernels.cpu_talk import KEY, Path
from ..kernels.talk_table import BYTES, DONE, MESSAGE, PIPE, PUT, SLEEPS, TAKEN, WAITS
from .arena import WORKS
from .line import Order
from .small import SIZE, SmallLine

__all__ = ["MOST", "WORKS", "PipeLine", "TensorOrder", "mapped", "memory", "put_all", "take_all"]

MOST = 16
"""Ranks of a host that have pipes at the most, the lowest: each two of them share 512 KiB."""

_EACH = PIPE + BYTES  # bytes of a pipe
_BELLS = 4096  # bytes read at a time, of which none says anything


def memory() -> int | None:
    """A file in memory for two pipes, all zero; None where there are none. Close it once mapped."""
    if not WORKS:
        return None
    fd = -1
    try:
        fd = os.memfd_create("weft", os.MFD_CLOEXEC)
        os.truncate(fd, 2 * _EACH)
    except OSError:  # it is forbidden, or there are too many files; sockets do as well
        if fd >= 0:
            os.close(fd)
        return None
    return fd


def mapped(fd: int) -> Tensor | None:
    """The memory of that file, which may be closed then; None if it cannot be had."""
    try:
        if not WORKS or os.fstat(fd).st_size != 2 * _EACH:
            return None
        where = f"/proc/self/fd/{fd}"
        return torch.from_file(where, shared=True, size=2 * _EACH, dtype=torch.uint8)
    except (OSError, RuntimeError):  # of torch: no /proc, or no memory
        return None


class PipeLine(SmallLine):
    """One end of a connection through a pipe each way.

    A message begins at a multiple of 8 bytes, so what precedes it lies in one piece. Machine code
    takes frames out whole, or not at all, and puts them in so: nothing is ever read ahead.
    """

    def __init__(self, peer: int, sock: socket.socket, shared: Tensor, *, first: bool) -> None:
        """Through `shared`, which both have `mapped`; one of them is the first, the other not."""
        super().__init__(peer, sock)
        self._shared = shared  # whose addresses are in the path
        there, here = shared[:_EACH], shared[_EACH:]
        outward, inward = (there, here) if first else (here, there)
        self._path = self.fd, outward.data_ptr(), inward.data_ptr()
        self._out, self._room = _parts(outward)
        self._in, self._ready = _parts(inward)
        self._into: memoryview | None = None  # what is still missing of the message that comes
        self._end = ""  # how the connection ended
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        return self._path

    @property
    def wanted(self) -> int:
        return select.POLLIN * (self.reads or self.writes)  # either is rung for

    @property
    def stirs(self) -> bool:
        """Whether something can be moved that waits to be moved."""
        if self.reads and self._in[PUT] != self._in[TAKEN]:
            return True
        return self.writes and self._out[PUT] - self._out[TAKEN] < BYTES

    def takes(self, order: Order) -> bool:
        """Whether the next message that comes is this one's, all of it."""
        return bool(self.asked) and self.asked[0] is order and not (self._into or self.lost)

    def sleep(self) -> None:
        """Have the peer ring for what is waited for; if it `stirs` after that, it may not ring."""
        if self.asked:
            self._in[SLEEPS] = 1
        if self.unsent:
            self._out[WAITS] = 1
        self._fence()

    def wake(self) -> None:
        """The peer need not ring any more."""
        self._in[SLEEPS] = self._out[WAITS] = 0

    def send(self, order: Order) -> None:
        size = len(order.buffer)
        self._send(order, b"".join((SIZE.pack(size), order.buffer, bytes(-size % 8))))

    def go_on(self, order: Order, sent: int) -> None:
        if sent:
            order.done = True
        else:
            self._send(order, b"".join((order.buffer, bytes(-len(order.buffer) % 8))))

    def take_up(self, order: Order, came: memoryview) -> None:
        if came:
            order.buffer[: len(came) - SIZE.size] = came[SIZE.size :]
            order.done = True
        else:
            self.asked.append(order)
            self._take()

    def give(self, place: memoryview) -> int:
        return 0

    def flush(self) -> None:
        while self.unsent and not self.lost:
            order, rest = self.unsent[0]
            put = self._put(rest)
            if put < len(rest):
                self.unsent[0] = order, rest[put:]
                return
            self.unsent.popleft()
            order.done = True

    def hear(self) -> None:
        """Read what the socket brings: bells, which have rung by now, or the end."""
        try:
            if not self.sock.recv(_BELLS):
                self._end = "the connection was closed"
        except BlockingIOError:
            return
        except OSError as error:
            self._end = str(error)

    def receive(self) -> bool:
        if self.lost:
            return False
        came = bool(self.asked) and self._take()
        if not came and self._end:  # what the peer put in before it went was there by then
            self.lost = self.lost or self._end
        return came

    def _send(self, order: Order, message: bytes) -> None:
        put = self._put(memoryview(message)) if not self.unsent and not self.lost else 0
        if put == len(message):
            order.done = True
        else:
            self.unsent.append((order, memoryview(message)[put:]))

    def _put(self, message: memoryview) -> int:
        """Put in what there is room for; how many bytes, a multiple of 8."""
        words, data = self._out, self._room
        put = words[PUT]
        count = min(BYTES - put + words[TAKEN], len(message))
        if not count:
            return 0
        at = put % BYTES
        first = min(count, BYTES - at)
        data[at : at + first] = message[:first]
        if first < count:
            data[: count - first] = message[first:count]
        words[PUT] = put + count
        self._ring(words, SLEEPS)
        return count

    def _take(self) -> bool:
        """Give what is there to those that ask for it; whether there was anything."""
        words, data = self._in, self._ready
        begin = taken = words[TAKEN]
        put = words[PUT]
        while self.asked and taken < put:
            order = self.asked[0]
            if self._into is None:
                (size,) = SIZE.unpack_from(data, taken % BYTES)
                if size > len(order.buffer):
                    most = len(order.buffer)
                    self.lost = f"{size} bytes came where at most {most} were expected"
                    break
                taken += SIZE.size
                self._into = order.buffer[:size]
            into = self._into
            here, at = min(put - taken, len(into)), taken % BYTES
            first = min(here, BYTES - at)
            into[:first] = data[at : at + first]
            if first < here:
                into[first:here] = data[: here - first]
            taken += here + -here % 8
            if here < len(into):
                self._into = into[here:]
                break
            self._into = None
            order.done = True
            self.asked.popleft()
        if taken == begin:
            return False
        words[TAKEN] = taken
        self._ring(words, WAITS)
        return True

    def _ring(self, words: memoryview, whether: int) -> None:
        """Wake the peer if it says that it sleeps."""
        self._fence()
        if words[whether]:
            words[whether] = 0  # before the bell: it may go to sleep again in between
            try:
                self.sock.send(b"\0")
            except OSError:
                return  # it has bells enough; or it is gone, which whoever waits for it will see

    def _fence(self) -> None:
        """What is loaded after this is not older than what was stored before."""
        with self._lock:  # an instruction with a lock, which no load passes
            pass


class TensorOrder(Order):
    """A message in a tensor (uint8, 1-D, contiguous), whose bytes are looked at when needed."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.done, self.number = tensor, False, 0

    @property
    def buffer(self) -> memoryview:  # type: ignore[override]  # there a slot, filled at once
        return self.tensor.numpy().data


def _loops() -> Loops | None:
    """What is made already; for these few messages alone nobody need import a compiler."""
    return compiler.loops(KEY) if compiler.made(KEY) else None


def put_all(told: Sequence[tuple[PipeLine, TensorOrder]]) -> None:
    """Send messages over lines that send nothing else, if that is soon done; done are those sent.

    By machine code: a few messages cost more in Python than in the copies that move them.
    """
    loops = _loops()
    if loops is None or not told:
        return
    table = array("q")
    for line, order in told:
        fd, outward, _ = line.path
        table.extend((fd, outward, order.tensor.data_ptr(), order.tensor.numel(), 0))
    loops["put"](table.buffer_info()[0], len(told))
    for (_, order), done in zip(told, table[DONE::MESSAGE], strict=True):
        order.done = done == 1


def take_all(asked: Sequence[tuple[PipeLine, TensorOrder]], awake: int) -> bool:
    """Receive the messages that lines ask for first; done are those that come soon, and whole.

    Args:
        asked: on different lines, none of which is in the middle of a message.
        awake: nanoseconds to look for those that are not there yet.

    Returns:
        Whether it looked: there is machine code for it, and something was asked for.
    """
    loops = _loops()
    if loops is None or not asked:
        return False
    table = array("q")
    for line, order in asked:
        fd, _, inward = line.path
        table.extend((fd, inward, order.tensor.data_ptr(), order.tensor.numel(), 0))
    table.extend((0, 0))
    loops["take"](table.buffer_info()[0], len(asked), awake)
    for (line, order), done in zip(asked, table[DONE::MESSAGE], strict=True):
        if done == 1:
            order.done = True
            line.asked.popleft()
    return True


def _parts(pipe: Tensor) -> tuple[memoryview, memoryview]:
    """What a pipe begins with, as numbers, and the bytes that are under way."""
    every = pipe.numpy().data
    return every[:PIPE].cast("q"), every[PIPE:]
