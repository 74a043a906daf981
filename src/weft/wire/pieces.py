"""Long messages of floating-point numbers in pieces, some of them in fewer bytes than they have.

Between hosts bytes are dear and cores wait for them, so a line may pack what it sends, and nobody
else knows: what arrives is what was sent, bit by bit (`weft.kernels.floats`). It does so where the
link is slow: writing and reading a piece takes a tenth of the time in which 2.5 Gbit/s carry it,
and spares 0.15 of that, or 0.29. How quick the link is can be told where it is waited for: what a
socket still held when it was given more went out as quickly as it could. A peer is sent packed
pieces once it has said that it can read them at machine speed.

`WEFT_PACK=0` in the environment has all pieces sent as they are.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import floats
from ..kernels.address import address_of
from ..kernels.compile import compiler
from ..kernels.piece_table import (
    AHEAD,
    BLOCKED,
    BROKEN,
    CLOSED,
    EACH,
    FD,
    GOT,
    HEAD,
    HEADED,
    LEAST,
    LENGTH,
    MISSING,
    MORE,
    PIECE,
    READY,
    REST,
    ROOM,
    ROW,
    SIZE,
    TOOK,
    UNREADABLE,
)

if TYPE_CHECKING:
    from .line import Line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the module, or that there is none

__all__ = [
    "FRAMES",
    "KINDS",
    "LEAST",
    "SLOW",
    "Pace",
    "Packer",
    "Readable",
    "Unpacker",
    "kind_of",
    "packs",
    "reads",
    "wanted",
]

KINDS: Mapping[str, int] = {"f32": 1, "bf16": 2}
"""The kinds of numbers that may be packed, each with its bit in what a peer says that it reads."""

SLOW = 320e6
"""Bytes a second that all lines of a rank carry at the most where numbers are packed."""

FRAMES = 1 << 12
"""Bytes of frames that may go before a message in pieces."""

_EACH = {kind: dtype.itemsize for dtype, kind in floats.FLOATS.items()}
_BY_BIT = {bit: kind for kind, bit in KINDS.items()}
_WRONG = {
    CLOSED: "the connection was closed",
    BROKEN: "a piece of a message came that is none",
    UNREADABLE: "a piece of a message came that cannot be read",
}

_NOT_SENT = 0x894B  # SIOCOUTQNSD of Linux: bytes in a socket that have not gone out yet
_WINDOW = 2e-3  # seconds in which a socket always held something: its pace is known
_LOOKS = 15  # at a pace, by which it is judged
_LATELY = 0.1  # seconds for which such a pace counts beside those of others
_WORKS = fcntl is not None and sys.platform.startswith("linux") and sys.byteorder == "little"


def kind_of(tensor: Tensor) -> str:
    """The kind of numbers in a message, "" if it is not to be packed."""
    return floats.FLOATS.get(tensor.dtype, "") if tensor.nbytes >= LEAST else ""


def reads() -> bool:
    """Whether pieces can be read, and written, at machine speed; if not yet, it is seen to."""
    return _can() and compiler.loops(floats.PIECES) is not None


def packs() -> bool:
    """Whether this rank packs numbers, and reads packed ones, once machine code for it is there."""
    return _can() and not compiler.unusable


def wanted() -> bool:
    """Whether the environment lets numbers be packed."""
    return os.environ.get("WEFT_PACK", "1") != "0"


def _can() -> bool:
    return _WORKS and wanted()


class Readable:
    """The kinds of numbers that are read here if packed: those that came up, once they can be.

    Attributes:
        told: kinds of which no peer is to be told any more, also "".
    """

    def __init__(self) -> None:
        self._bits = 0
        self.told = {""}

    def tell(self, kind: str, lines: Collection[Line]) -> list[Line]:
        """Have lines to other hosts say that this kind is read here, too; those that now do.

        It is to be called again until all peers have said where they are, and machine code is
        there: then the kind is among those `told`.
        """
        between = [line for line in lines if line.lends is False]
        if between and not self._bits & KINDS[kind] and reads():
            self._bits |= KINDS[kind]
        told = [line for line in between if line.offered != self._bits]
        for line in told:
            line.offer(self._bits)
        met = all(line.lends is not None for line in lines)
        if met and (self._bits & KINDS[kind] or not between):
            self.told.add(kind)
        return told


class Pace:
    """How quick the links of a rank are, as far as they are what is waited for.

    Attributes:
        slow: whether they are held to be so slow that packing pays.
    """

    def __init__(self) -> None:
        self.slow = False
        self._seen: dict[object, tuple[float, float]] = {}
        self._rates: deque[float] = deque(maxlen=_LOOKS)  # of all lines, each time one was seen

    def see(self, line: object, rate: float, now: float) -> None:
        """A line could carry so many bytes a second just now, while others carried theirs."""
        self._seen[line] = rate, now
        self._rates.append(sum(each for each, at in self._seen.values() if now - at < _LATELY))
        # the third quartile: a busy machine makes links look slow, and a shaper lets bursts pass
        rates = sorted(self._rates)
        self.slow = len(rates) > 3 and rates[-1 - len(rates) // 4] < SLOW


class Packer:
    """Sends the messages of one line in pieces, one message after the other.

    Attributes:
        under_way: whether there is a message of which something was not sent.
    """

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock, self._pace = sock, pace
        self._table = array("q", bytes(8 * ROW))
        self._at = self._table.buffer_info()[0]
        self._room: memoryview | None = None
        self._message: memoryview | None = None  # whose address is in the table
        self._send: Callable[[int], int] | None = None
        self.under_way = False
        self._tells = True  # the kernel tells what the socket holds
        self._since: tuple[float, int] | None = None  # when it held something, and what had gone

    def look(self, sent: int) -> None:
        """See how quickly the link took what the socket held; it is about to be given more.

        Args:
            sent: bytes that it was given so far.
        """
        holds, now = self._held() if self._tells else 0, time.monotonic()
        if not holds:  # the link has been idle
            self._since = None
            return
        gone = sent - holds
        if self._since is None:
            self._since = now, gone
        elif now - self._since[0] >= _WINDOW:
            began, before = self._since
            self._pace.see(self, (gone - before) / (now - began), now)
            self._since = now, gone

    @property
    def pays(self) -> bool:
        """Whether to pack the next message."""
        return self._pace.slow

    def begin(self, kind: str, frames: bytes, message: memoryview) -> None:
        """Have a message of numbers of that kind sent, which the peer reads, behind its frames."""
        loops = compiler.loops(floats.PIECES)
        assert loops is not None and len(frames) <= FRAMES
        table = self._table
        if self._room is None:
            self._room = _room(FRAMES + SIZE)
            table[ROOM] = address_of(self._room) + FRAMES + SIZE
        self._room[FRAMES - len(frames) : FRAMES] = frames
        table[EACH] = _EACH[kind]
        table[HEAD], table[HEADED] = table[ROOM] - SIZE - len(frames), len(frames)
        table[REST], table[MORE] = address_of(message), len(message)
        self._message, self._send, self.under_way = message, loops["send_piece"], True

    def send(self) -> int:
        """Send a piece, or what is left of one; how many bytes the socket took.

        Raises:
            OSError: it takes none, now (BlockingIOError) or ever.
        """
        assert self._send is not None
        table = self._table
        table[FD] = self._sock.fileno()  # each time: once it is closed it is somebody else's
        found = self._send(self._at)
        took = table[TOOK]
        if found == 0 and not table[MORE]:
            self.under_way, self._message = False, None
        if found and not took:
            raise BlockingIOError if found == BLOCKED else OSError(-found, os.strerror(-found))
        return took

    def _held(self) -> int:
        """Bytes that the socket holds and that have not gone out yet; 0 if that is not told."""
        held = bytearray(4)
        try:
            fcntl.ioctl(self._sock, _NOT_SENT, held)
        except (OSError, ValueError):  # a kernel, or a sandbox, that does not tell; it is closed
            self._tells = False
            return 0
        return int.from_bytes(held, sys.byteorder)


class Unpacker:
    """Receives the messages that come on one line in pieces, one message after the other.

    Attributes:
        under_way: whether pieces are still to come.
        missing: bytes that are sure to come, and to be waited for together.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._table = array("q", bytes(8 * ROW))
        self._at = self._table.buffer_info()[0]
        self._room: memoryview | None = None
        self._message: memoryview | None = None  # whose address is in the table
        self._take: Callable[[int, int], int] | None = None
        self.under_way = False
        self.missing = 0

    def begin(self, bits: int, message: memoryview) -> bool:
        """Await the pieces of a message, whose bytes belong there; False: they cannot be read.

        Args:
            bits: what its kind is among `KINDS`.
            message: its memory.
        """
        kind, loops = _BY_BIT.get(bits, ""), compiler.loops(floats.PIECES)
        if not kind or loops is None or not len(message):
            return False
        table = self._table
        table[EACH] = _EACH[kind]
        if self._room is None:
            self._room = _room()
            table[ROOM] = address_of(self._room)
        table[REST], table[MORE] = address_of(message), len(message)
        table[LENGTH] = table[GOT] = 0
        self._message, self._take, self.under_way = message, loops["take_pieces"], True
        return True

    def take(self, ahead: int, ready: int, most: int) -> tuple[int, int]:
        """Receive what is there, up to the end of the message.

        Args:
            ahead: address of what was read already.
            ready: bytes of that.
            most: bytes to take from the socket.

        Returns:
            How many bytes were taken of what was read already, and from the socket.

        Raises:
            OSError, ValueError: the socket gives no more; what comes is wrong.
        """
        assert self._take is not None
        table = self._table
        table[AHEAD], table[READY], table[FD] = ahead, ready, self._sock.fileno()
        found = self._take(self._at, most)
        if found == 0:
            self.under_way, self._message = False, None
        elif found == BLOCKED:
            # with what precedes the next, so that one need not be woken for that alone
            rest = table[MISSING] + SIZE * (table[MORE] > table[LENGTH])
            self.missing = rest if table[LENGTH] else SIZE - table[GOT]
        elif found in _WRONG:
            raise ValueError(_WRONG[found])
        else:
            raise OSError(-found, os.strerror(-found))
        return ready - table[READY], table[TOOK]


def _room(before: int = 0) -> memoryview:
    """Memory for a piece while it is packed, of whichever kind, and for what precedes it."""
    most = max(floats.most_bytes(kind, PIECE // each) for kind, each in _EACH.items())
    return torch.empty(before + most, dtype=torch.uint8).numpy().data
