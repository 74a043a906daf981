"""The compiled loops that send and receive messages in pieces, packed where that pays.

Made and called like `value_loops`; the table is told in `piece_table`. They never sleep, and raise
nothing: whoever calls them looks at what they return, and at the table.
"""

from __future__ import annotations

from collections.abc import Callable

from .float_loops import pack_floats, unpack_floats
from .machine import NOT_NOW, load, memcpy, not_now, part, recv, send, store
from .piece_table import (
    AHEAD,
    BLOCKED,
    BODY,
    BROKEN,
    CLOSED,
    DULL,
    EACH,
    FD,
    GOT,
    HEAD,
    HEADED,
    HEADER,
    INTO,
    LEAST,
    LEFT,
    LENGTH,
    MISSING,
    MORE,
    PIECE,
    READY,
    REST,
    ROOM,
    SIZE,
    TAKES,
    TOOK,
    UNREADABLE,
)

LOOPS = ("send_piece", "take_pieces")

__all__ = ["LOOPS", *LOOPS]

_GAIN = 98  # of a hundred bytes a packed piece takes at the most, or it was not worth the while
_DULL = 8  # pieces to be sent as they are after one that was not worth it
_MORE_FOLLOWS = NOT_NOW | 0x8000  # MSG_MORE of Linux: the start of a packet
_LOW = (1 << 32) - 1


_pack_f32, _pack_bf16 = part(pack_floats("f32")), part(pack_floats("bf16"))
_unpack_f32, _unpack_bf16 = part(unpack_floats("f32")), part(unpack_floats("bf16"))


def send_piece() -> Callable[..., int]:
    """Send the rest of a piece, or if there is none the next, as far as the socket takes it.

    Returns 0: it went out whole; `BLOCKED`; or below 0 the number of an error.
    """

    def loop(table: int) -> int:
        store("i64", table, TOOK, 0)
        if load("i64", table, LEFT) == 0:
            _cut(table)
        while load("i64", table, LEFT):
            head, headed = load("i64", table, HEAD), load("i64", table, HEADED)
            body, left = load("i64", table, BODY), load("i64", table, LEFT)
            fd = load("i64", table, FD)
            if headed and head + headed == body:
                took = send(fd, head, headed + left, NOT_NOW)
            elif headed:
                took = send(fd, head, headed, _MORE_FOLLOWS)
            else:
                took = send(fd, body, left, NOT_NOW)
            if took < 0:
                return not_now(BLOCKED)
            store("i64", table, TOOK, load("i64", table, TOOK) + took)
            before = min(took, headed)
            store("i64", table, HEAD, head + before)
            store("i64", table, HEADED, headed - before)
            store("i64", table, BODY, body + took - before)
            store("i64", table, LEFT, left - took + before)
        return 0

    return loop


def take_pieces() -> Callable[..., int]:
    """Receive what is there of a message, so many bytes at the most from the socket.

    Returns 0: it is whole; `BLOCKED`: more is to come; below 0 the number of an error, `CLOSED`,
    `BROKEN` or `UNREADABLE`. Nothing behind the message is read.
    """

    def loop(table: int, most: int) -> int:
        store("i64", table, TOOK, 0)
        while load("i64", table, MORE):
            if load("i64", table, LENGTH) == 0:
                at, got = table + 8 * HEADER, load("i64", table, GOT)
                came = _take(table, at + got, SIZE - got, most)
                if came <= 0:
                    return came if came else BLOCKED
                store("i64", table, GOT, got + came)
                if got + came < SIZE:
                    continue
                if not _expect(table, load("i64", at, 0)):
                    return BROKEN
            into, missing = load("i64", table, INTO), load("i64", table, MISSING)
            came = _take(table, into, missing, most)
            if came <= 0:
                return came if came else BLOCKED
            store("i64", table, INTO, into + came)
            store("i64", table, MISSING, missing - came)
            if came == missing and not _place(table):
                return UNREADABLE
        return 0

    return loop


@part
def _cut(table: int) -> None:
    """Begin the next piece, behind frames that are to go before it."""
    rest, more = load("i64", table, REST), load("i64", table, MORE)
    room, dull = load("i64", table, ROOM), load("i64", table, DULL)
    length = min(more, PIECE)
    takes, body = length, rest
    if length >= LEAST and dull:  # a short rest gains nothing, and tells nothing of the others
        store("i64", table, DULL, dull - 1)
    elif length >= LEAST:
        if load("i64", table, EACH) == 4:
            takes = _pack_f32(rest, length // 4, room)
        else:
            takes = _pack_bf16(rest, length // 2, room)
        if 100 * takes > _GAIN * length:
            store("i64", table, DULL, _DULL)
            takes = length
        else:
            body = room
    if load("i64", table, HEADED) == 0:
        store("i64", table, HEAD, room - SIZE)
    store("i64", room - SIZE, 0, length | takes << 32)
    store("i64", table, HEADED, load("i64", table, HEADED) + SIZE)
    store("i64", table, BODY, body)
    store("i64", table, LEFT, takes)
    store("i64", table, REST, rest + length)
    store("i64", table, MORE, more - length)


@part
def _take(table: int, into: int, want: int, most: int) -> int:
    """Some bytes, first of what was read ahead: how many; 0: there are none now; below 0 why."""
    ready = load("i64", table, READY)
    if ready:
        here, ahead = min(ready, want), load("i64", table, AHEAD)
        memcpy(into, ahead, here)
        store("i64", table, AHEAD, ahead + here)
        store("i64", table, READY, ready - here)
        return int(here)
    if load("i64", table, TOOK) >= most:
        return 0
    came = recv(load("i64", table, FD), into, want, NOT_NOW)
    if came == 0:
        return CLOSED
    if came < 0:
        return not_now(0)
    store("i64", table, TOOK, load("i64", table, TOOK) + came)
    return int(came)


@part
def _expect(table: int, word: int) -> bool:
    """Begin to receive the piece of which that was said; whether it is one."""
    length, takes = word & _LOW, (word >> 32) & _LOW
    plain = takes == length
    if not (0 < takes <= length <= load("i64", table, MORE)) or (length > PIECE and not plain):
        return False
    store("i64", table, GOT, 0)
    store("i64", table, LENGTH, length)
    store("i64", table, TAKES, takes)
    store("i64", table, INTO, load("i64", table, REST if plain else ROOM))
    store("i64", table, MISSING, takes)
    return True


@part
def _place(table: int) -> bool:
    """A piece is here: bring it to its place; whether it can be read."""
    rest, room = load("i64", table, REST), load("i64", table, ROOM)
    length, takes = load("i64", table, LENGTH), load("i64", table, TAKES)
    read = takes
    if takes < length and load("i64", table, EACH) == 4:
        read = _unpack_f32(room, rest, length // 4)
    elif takes < length:
        read = _unpack_bf16(room, rest, length // 2)
    store("i64", table, REST, rest + length)
    store("i64", table, MORE, load("i64", table, MORE) - length)
    store("i64", table, LENGTH, 0)
    return bool(read == takes)
