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
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..kernels import floats
from ..kernels.compile import compiler

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the module, or that there is none

__all__ = [
    "HEAD",
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

LEAST = 1 << 14
"""Bytes of a message from which on it travels in pieces."""

KINDS: Mapping[str, int] = {"f32": 1, "bf16": 2}
"""The kinds of numbers that may be packed, each with its bit in what a peer says that it reads."""

SLOW = 320e6
"""Bytes a second that all lines of a rank carry at the most where numbers are packed."""

_PLAIN = 0  # in the place of a kind's bit
_BY_BIT = {bit: kind for kind, bit in KINDS.items()}
_PIECE = 1 << 18  # bytes of a piece before it is packed: it stays in the cache
_HEADER = struct.Struct("!III")  # bit of its kind; bytes of the piece; bytes that it takes
HEAD = _HEADER.size
"""Bytes that say what follows of a piece."""

_NOT_SENT = 0x894B  # SIOCOUTQNSD of Linux: bytes in a socket that have not gone out yet
_GAIN = 0.98  # of its bytes a packed piece takes at the most, or it was not worth the while
_DULL = 8  # pieces to be sent as they are after one that was not worth it
_WINDOW = 2e-3  # seconds in which a socket always held something: its pace is known
_LOOKS = 15  # at a pace, by which it is judged
_LATELY = 0.1  # seconds for which such a pace counts beside those of others
_WORKS = fcntl is not None and sys.platform.startswith("linux") and sys.byteorder == "little"


def kind_of(tensor: Tensor) -> str:
    """The kind of numbers in a message, "" if it is not to be packed."""
    return floats.FLOATS.get(tensor.dtype, "") if tensor.nbytes >= LEAST else ""


def reads(kind: str) -> bool:
    """Whether numbers of a kind can be read at machine speed; if not yet, it is seen to."""
    return _can() and compiler.loops(floats.floats_key(kind)) is not None


def packs() -> bool:
    """Whether this rank packs numbers, and reads packed ones, once machine code for it is there."""
    return _can() and not compiler.unusable


def wanted() -> bool:
    """Whether the environment lets numbers be packed."""
    return os.environ.get("WEFT_PACK", "1") != "0"


def _can() -> bool:
    return _WORKS and wanted()


class Readable:
    """The kinds of numbers that are read here if packed: those that came up, once they can be."""

    def __init__(self) -> None:
        self._bits = 0

    def with_these(self, kinds: Iterable[str]) -> int:
        """The sum of their bits, these kinds included; a kind may be ""."""
        for kind in kinds:
            if kind and not self._bits & KINDS[kind] and reads(kind):
                self._bits |= KINDS[kind]
        return self._bits


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
    """Cuts the messages of one line into pieces, one message after the other."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock, self._pace = sock, pace
        self._room: memoryview | None = None
        self._rest = memoryview(b"")
        self._kind = ""
        self._dull = 0  # pieces that are not to be packed
        self._tells = True  # the kernel tells what the socket holds
        self._since: tuple[float, int] | None = None  # when it held something, and what had gone

    @property
    def done(self) -> bool:
        """Whether all of the message was given out."""
        return not self._rest

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

    def begin(self, kind: str, message: memoryview) -> None:
        """Cut a message of numbers of that kind, which the peer reads."""
        self._kind, self._rest = kind, message

    @property
    def pays(self) -> bool:
        """Whether to pack the next message."""
        return self._pace.slow

    def next(self) -> list[memoryview]:
        """The next piece as it goes out; the one before must have gone."""
        piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
        bit, written = self._packed(piece)
        return [memoryview(_HEADER.pack(bit, len(piece), len(written))), written]

    def _packed(self, piece: memoryview) -> tuple[int, memoryview]:
        if len(piece) < LEAST:  # a short rest gains nothing, and tells nothing about the others
            return _PLAIN, piece
        if self._dull:
            self._dull -= 1
            return _PLAIN, piece
        if self._room is None:
            self._room = _room()
        size = floats.pack_floats(self._kind, piece, self._room)
        if size > _GAIN * len(piece):
            self._dull = _DULL
            return _PLAIN, piece
        return KINDS[self._kind], self._room[:size]

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
    """Puts together the pieces that come on one line, one message after the other."""

    def __init__(self) -> None:
        self._room: memoryview | None = None
        self._rest: memoryview | None = None  # of the message, where the next piece belongs
        self._kind = ""

    @property
    def under_way(self) -> bool:
        """Whether pieces are still to come."""
        return self._rest is not None

    def begin(self, message: memoryview) -> None:
        """Await the pieces of a message, whose bytes belong there."""
        self._rest = message

    def place(self, header: bytes | memoryview) -> memoryview | None:
        """Where to put the bytes of a piece; None if this is no header of one."""
        bit, length, size = _HEADER.unpack(header)
        if self._rest is None or not 0 < length <= len(self._rest):
            return None
        self._into, self._size, self._kind = self._rest[:length], size, _BY_BIT.get(bit, "")
        if not self._kind:
            return self._into if bit == _PLAIN and size == length else None
        if self._room is None:
            self._room = _room()
        return self._room[:size] if size <= length <= _PIECE else None

    def filled(self) -> bool:
        """The bytes of the piece are there; whether they say what it takes to make it whole."""
        assert self._rest is not None
        if self._kind:
            assert self._room is not None
            if floats.unpack_floats(self._kind, self._room, self._into) != self._size:
                return False
        self._rest = self._rest[len(self._into) :] or None
        return True


def _room() -> memoryview:
    """Memory for a piece while it is packed, of whichever kind."""
    sizes = {kind: dtype.itemsize for dtype, kind in floats.FLOATS.items()}
    most = max(floats.most_bytes(kind, _PIECE // sizes[kind]) for kind in KINDS)
    return torch.empty(most, dtype=torch.uint8).numpy().data
