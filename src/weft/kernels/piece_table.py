"""What lies where in the tables of `piece_loops`, all of int64; `weft.wire.pieces` makes them.

A message that travels in pieces is cut by its sender, who may pack each piece (`floats`). A piece
is preceded by 8 bytes, little-endian: 4 that say how many bytes it has, 4 how many it takes. It is
packed where these are fewer.
"""

from __future__ import annotations

__all__ = [
    "AHEAD",
    "BLOCKED",
    "BODY",
    "BROKEN",
    "CLOSED",
    "DULL",
    "EACH",
    "FD",
    "GOT",
    "HEAD",
    "HEADED",
    "HEADER",
    "INTO",
    "LEAST",
    "LEFT",
    "LENGTH",
    "MISSING",
    "MORE",
    "PIECE",
    "READY",
    "REST",
    "ROOM",
    "ROW",
    "SIZE",
    "TAKES",
    "TOOK",
    "UNREADABLE",
]

LEAST = 1 << 14
"""Bytes of a piece from which on it may be packed."""

PIECE = 1 << 18
"""Bytes of a piece before it is packed: it stays in the cache."""

SIZE = 8
"""Bytes that precede a piece."""

# what both tables have
FD = 0  # the number of the socket, which does not block
REST, MORE = 1, 2  # what comes next of the message, there or to be put there: address and bytes
ROOM = 3  # address of memory for a piece while it is packed; what precedes it lies just before
TOOK = 4  # bytes that the socket took, or gave, in the last call
EACH = 5  # bytes of a number: 4 are float32, 2 are bfloat16

# what that of a sender has
HEAD, HEADED = 6, 7  # of what goes before a piece and was not sent yet: address and bytes
BODY, LEFT = 8, 9  # of the piece
DULL = 10  # pieces that are not to be tried

# what that of a receiver has
INTO, MISSING = 6, 7  # where what is missing of the piece goes, and its bytes
LENGTH, TAKES = 8, 9  # the bytes of the piece, 0 while none is under way, and those that it takes
GOT, HEADER = 10, 11  # bytes that came of what precedes it, and these
AHEAD, READY = 12, 13  # what was read ahead: address and bytes

ROW = 14

BLOCKED, CLOSED, BROKEN, UNREADABLE = 1, -5000, -5001, -5002
"""How a call ended, besides 0, when a piece (a message, of who receives) is through, and the number
of an error of the socket, negative: it takes or gives no more now; it ended; what comes is no
piece; it is one that cannot be read."""
