"""Long messages of floating-point numbers in pieces, some of them in fewer bytes than they have.

Between hosts bytes are dear and cores wait for them, so a line may pack what it sends, and nobody
else knows: what arrives is what was sent, bit by bit (`weft.kernels.floats`). It does so where the
link is what is waited for: where at times the socket still holds bytes that did not go out when the
next piece is due. Writing and reading a piece at 3 to 7 GB/s takes less than 0.15 of the time in
which such a link takes it, or 0.29, which is what it spares. A peer is sent packed pieces once it
has said that it can read them at machine speed.

`WEFT_PACK=0` in the environment has all pieces sent as they are.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels import floats
from ..kernels.compile import compiler

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["HEAD", "KINDS", "LEAST", "Packer", "Unpacker", "kind_of", "reads"]

LEAST = 1 << 14
"""Bytes of a message from which on it travels in pieces."""

KINDS: Mapping[str, int] = {"f32": 1, "bf16": 2}
"""The kinds of numbers that may be packed, each with its bit in what a peer says that it reads."""

_PLAIN = 0  # in the place of a kind's bit
_BY_BIT = {bit: kind for kind, bit in KINDS.items()}
_PIECE = 1 << 17  # bytes of a piece before it is packed: what fits into the cache beside the rest
_HEADER = struct.Struct("!III")  # bit of its kind; bytes of the piece; bytes that it takes
HEAD = _HEADER.size
"""Bytes that say what follows of a piece."""

_NOT_SENT = 0x894B  # SIOCOUTQNSD of Linux: bytes in a socket that have not gone out yet
_GAIN = 0.98  # of its bytes a packed piece takes at the most, or it was not worth the while
_DULL = 32  # pieces to be sent as they are after one that was not worth it
_WAITED, _TRUSTED = 16, 128  # pieces that are packed after a wait of the link; at the most
_WORKS = fcntl is not None and sys.platform.startswith("linux")


def kind_of(tensor: Tensor) -> str:
    """The kind of numbers in a message, "" if it is not to be packed."""
    return floats.FLOATS.get(tensor.dtype, "") if tensor.nbytes >= LEAST else ""


def reads(kind: str) -> bool:
    """Whether numbers of a kind can be read at machine speed; if not yet, it is seen to."""
    return _wanted() and compiler.loops(floats.floats_key(kind)) is not None


def _wanted() -> bool:
    return _WORKS and os.environ.get("WEFT_PACK", "1") != "0"


class Packer:
    """Cuts the messages of one line into pieces, one message after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._room: memoryview | None = None
        self._rest = memoryview(b"")
        self._kind = ""
        self._dull = 0  # pieces that are not to be packed
        self._slow = 0  # pieces for which the link is held to be slow

    @property
    def done(self) -> bool:
        """Whether all of the message was given out."""
        return not self._rest

    def begin(self, kind: str, message: memoryview) -> None:
        """Cut a message of numbers of that kind, which the peer reads."""
        self._kind, self._rest = kind, message

    def next(self) -> list[memoryview]:
        """The next piece as it goes out; the one before must have gone."""
        piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
        packed = self._packed(piece)
        bit, written = (_PLAIN, piece) if packed is None else (KINDS[self._kind], packed)
        return [memoryview(_HEADER.pack(bit, len(piece), len(written))), written]

    def _packed(self, piece: memoryview) -> memoryview | None:
        if self._dull:
            self._dull -= 1
            return None
        waits = self._waits()
        self._slow = min(_TRUSTED, self._slow + _WAITED) if waits else max(0, self._slow - 1)
        if not self._slow:
            return None
        if self._room is None:
            self._room = _room()
        size = floats.pack_floats(self._kind, piece, self._room)
        if size > _GAIN * len(piece):
            self._dull = _DULL
            return None
        return self._room[:size]

    def _waits(self) -> bool:
        """Whether the link has not taken yet what was sent before."""
        held = bytearray(4)
        try:
            fcntl.ioctl(self._sock, _NOT_SENT, held)
        except OSError:  # a kernel, or a sandbox, that does not tell
            self._dull = sys.maxsize
            return False
        return int.from_bytes(held, sys.byteorder) > 0


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
        if self._rest is None or not 0 < length <= min(_PIECE, len(self._rest)):
            return None
        self._kind = _BY_BIT.get(bit, "")
        self._into = self._rest[:length]
        if not self._kind:
            return self._into if bit == _PLAIN and size == length else None
        if self._room is None:
            self._room = _room()
        self._size = size
        return self._room[:size] if size <= length else None

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
