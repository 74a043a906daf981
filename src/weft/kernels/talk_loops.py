"""The compiled loops that say and hear small messages, over sockets and pipes; see `cpu_talk`.

Made and called like `value_loops`: all arguments are int64. They never sleep, and raise nothing:
whoever calls them looks at what the table says then, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable

from .lent_loops import read
from .machine import (
    MONOTONIC,
    NOT_NOW,
    clock_gettime,
    fence,
    load,
    memcmp,
    memcpy,
    memset,
    part,
    recv,
    sched_yield,
    send,
    store,
)
from .talk_table import (
    ADD,
    AT,
    BYTES,
    COPY,
    COUNTS,
    DONE,
    FD,
    FRAME,
    FROM,
    GOT,
    IN_X,
    IN_Y,
    IN_Z,
    INWARD,
    LENDER,
    LENGTH,
    LIKE,
    MESSAGE,
    MODEL,
    OUTWARD,
    PIPE,
    PLACE,
    PUT,
    READ,
    ROW,
    SENT,
    SIZE,
    SLEEPS,
    STEP,
    TAKEN,
    TELL,
    TO,
    VIA,
    WAITS,
    WANT,
    WIDTH,
    ZERO,
)

LOOPS = ("carry", "put", "take", "talk")

__all__ = ["LOOPS", *LOOPS]

_HEAD = 16  # bytes of a frame's length and number
_SECOND = 10**9  # nanoseconds


def _adding(kind: str) -> Callable[[int, int, int], None]:
    """Adds numbers of that kind to others."""

    def add(here: int, there: int, count: int) -> None:
        for at in range(count):
            store(kind, here, at, load(kind, here, at) + load(kind, there, at))

    return part(add)


_add_f32, _add_f64, _add_i32, _add_i64 = map(_adding, ("f32", "f64", "i32", "i64"))


def carry() -> Callable[..., int]:
    """Carry out steps, one after the other, between tensors at x, y and z, and frames.

    Returns how many were not, since something could not be read.
    """

    def loop(steps: int, count: int, x: int, y: int, z: int) -> int:
        return _carry(steps, count, x, y, z)

    return loop


def talk() -> Callable[..., int]:
    """Say a frame to each peer and hear one of each, with the steps that go with it.

    Whoever comes late is looked for again and again, for `awake` nanoseconds at most; between two
    looks whoever else wants the core has it. Nothing is read behind a frame.

    Args of the loop, besides the table and the number of the call: whether to say (1), to hear (2)
    or both (3); steps before anything is said, while it is under way, and once all was heard.

    Returns how many peers did not say what is expected, or not in time; then the last steps are
    still to be carried out, and frames may be sent in part. Below 0: so many of the last steps are.
    """

    def loop(
        table: int,
        peers: int,
        number: int,
        what: int,
        awake: int,
        steps: int,
        before: int,
        meanwhile: int,
        after: int,
        x: int,
        y: int,
        z: int,
    ) -> int:
        if what & 1:
            _carry(steps, before, x, y, z)
            _say(table, peers, number)
            _carry(steps + 8 * STEP * before, meanwhile, x, y, z)
        if what == 1:
            return 0
        clock = table + 8 * ROW * peers
        until = _now(clock) + awake
        while _missing(table, peers) and _now(clock) < until:
            sched_yield()
        other = 0
        for peer in range(peers):
            row = table + 8 * ROW * peer
            place, model = load("i64", row, PLACE), load("i64", row, MODEL)
            if load("i64", row, WANT) == 0:
                continue
            alike = load("i64", row, GOT) == load("i64", row, WANT)
            alike = alike and load("i64", place, 0) == load("i64", model, 0)
            alike = alike and load("i64", place, 1) == number
            like = load("i64", row, LIKE) - _HEAD
            alike = alike and memcmp(place + _HEAD, model + _HEAD, like) == 0
            other += not alike
        if other == 0:
            for peer in range(peers):
                store("i64", table + 8 * ROW * peer, GOT, 0)
            return -_carry(steps + 8 * STEP * (before + meanwhile), after, x, y, z)
        return other

    return loop


def put() -> Callable[..., int]:
    """Put messages of any length into pipes, with their lengths: each whole, or not at all.

    Sleepers are woken when all are there: one may get this core, and needs others' answers then.

    Returns how many were; the table says which.
    """

    def loop(table: int, count: int) -> int:
        done = 0
        for number in range(count):
            row = table + 8 * MESSAGE * number
            here = _put_message(row)
            store("i64", row, DONE, here)
            done += here
        for number in range(count):
            row = table + 8 * MESSAGE * number
            if load("i64", row, DONE):
                _ring(row, load("i64", row, VIA), SLEEPS)
        return done

    return loop


def take() -> Callable[..., int]:
    """Take messages out of pipes, one of each; those that are there whole, and not too long.

    Whoever comes late is looked for as in `talk`, for `awake` nanoseconds at most.

    Returns how many are not there; the table says which were taken.
    """

    def loop(table: int, count: int, awake: int) -> int:
        clock, until = table + 8 * MESSAGE * count, 0
        while True:
            missing = 0
            for number in range(count):
                row = table + 8 * MESSAGE * number
                if load("i64", row, DONE) == 0:
                    missing += _take_message(row)
            now = _now(clock) if missing else 0
            until = until or now + awake
            if missing == 0 or now >= until:
                return missing
            sched_yield()

    return loop


@part
def _say(table: int, peers: int, number: int) -> None:
    for peer in range(peers):
        row = table + 8 * ROW * peer
        frame, size = load("i64", row, FRAME), load("i64", row, SIZE)
        if size:
            store("i64", frame, 1, number)
            if load("i64", row, OUTWARD):
                store("i64", row, SENT, _put(row, frame, size))
            else:
                store("i64", row, SENT, max(0, send(load("i64", row, FD), frame, size, NOT_NOW)))
    for peer in range(peers):  # as in `put`
        row = table + 8 * ROW * peer
        if load("i64", row, OUTWARD) and load("i64", row, SIZE) and load("i64", row, SENT):
            _ring(row, load("i64", row, OUTWARD), SLEEPS)


@part
def _now(clock: int) -> int:
    clock_gettime(MONOTONIC, clock)
    return int(load("i64", clock, 0) * _SECOND + load("i64", clock, 1))


@part
def _missing(table: int, peers: int) -> int:
    """Receive what is there; how many frames are not whole."""
    missing = 0
    for peer in range(peers):
        row = table + 8 * ROW * peer
        got, want = load("i64", row, GOT), load("i64", row, WANT)
        if got < want and load("i64", row, INWARD):
            missing += _take(row, want)
        elif got < want:
            came = recv(load("i64", row, FD), load("i64", row, PLACE) + got, want - got, NOT_NOW)
            got += max(0, came)
            store("i64", row, GOT, got)
            missing += got < want
    return missing


@part
def _put(row: int, frame: int, size: int) -> int:
    """Put a frame into the pipe of a row if there is room for all of it; how many bytes were.

    Whoever calls it wakes the other side then.

    What is stored in one order is seen in that order by the other side: that is so on x86-64, where
    alone there are pipes. Only a load may pass a store before it, so there are fences where the
    other side is asked whether it sleeps.
    """
    pipe = load("i64", row, OUTWARD)
    put = load("i64", pipe, PUT)
    if size > BYTES - put + load("i64", pipe, TAKEN):
        return 0
    _put_in(pipe, put, frame, size)
    return size


@part
def _take(row: int, want: int) -> int:
    """Take the frame that is expected out of the pipe of a row; 1 if it is not there yet.

    A message of another length stays where it is.
    """
    pipe, place = load("i64", row, INWARD), load("i64", row, PLACE)
    taken = load("i64", pipe, TAKEN)
    ready = load("i64", pipe, PUT) - taken
    if ready == 0:
        return 1
    fence()
    at = taken % BYTES
    if load("i64", pipe + PIPE + at, 0) != load("i64", load("i64", row, MODEL), 0):
        return 0
    if ready < want:
        return 1
    _take_out(row, pipe, taken, place, want)
    store("i64", row, GOT, want)
    return 0


@part
def _put_message(row: int) -> int:
    """`_put` for a message without its length; whether it was put in."""
    pipe, size = load("i64", row, VIA), load("i64", row, LENGTH)
    put = load("i64", pipe, PUT)
    whole = 8 + (size + 7) // 8 * 8
    if whole > BYTES - put + load("i64", pipe, TAKEN):
        return 0
    store("i64", pipe + PIPE + put % BYTES, 0, _turned(size))
    _put_in(pipe, put + 8, load("i64", row, AT), size)
    return 1


@part
def _take_message(row: int) -> int:
    """Take the next message out of a pipe; 1 if there is none yet.

    One that is too long, or comes in parts, stays where it is.
    """
    pipe, place = load("i64", row, VIA), load("i64", row, AT)
    taken = load("i64", pipe, TAKEN)
    ready = load("i64", pipe, PUT) - taken
    if ready == 0:
        return 1
    fence()
    size = _turned(load("i64", pipe + PIPE + taken % BYTES, 0))
    whole = 8 + (size + 7) // 8 * 8
    if size > load("i64", row, LENGTH) or ready < whole:
        store("i64", row, DONE, 2)
        return 0
    _take_out(row, pipe, taken + 8, place, size)
    store("i64", row, DONE, 1)
    return 0


@part
def _put_in(pipe: int, put: int, source: int, size: int) -> None:
    """Copy bytes into a pipe, behind the first `put` that ever were, and say that they are in."""
    at = put % BYTES
    first = min(size, BYTES - at)
    memcpy(pipe + PIPE + at, source, first)
    memcpy(pipe + PIPE, source + first, size - first)
    fence()
    store("i64", pipe, PUT, put + (size + 7) // 8 * 8)


@part
def _take_out(row: int, pipe: int, taken: int, place: int, size: int) -> None:
    """Copy bytes out of a pipe, behind the first `taken`, and say that there is room."""
    at = taken % BYTES
    first = min(size, BYTES - at)
    memcpy(place, pipe + PIPE + at, first)
    memcpy(place + first, pipe + PIPE, size - first)
    fence()
    store("i64", pipe, TAKEN, taken + (size + 7) // 8 * 8)
    _ring(row, pipe, WAITS)


@part
def _turned(number: int) -> int:
    """The number whose bytes are those of this one the other way round: lengths travel so."""
    turned = 0
    for byte in range(8):
        turned = (turned << 8) | ((number >> (8 * byte)) & 255)
    return turned


@part
def _ring(row: int, pipe: int, whether: int) -> None:
    """Wake the other side if it sleeps; it looks once more between saying so and sleeping."""
    fence()
    if load("i64", pipe, whether):
        store("i64", pipe, whether, 0)
        send(load("i64", row, FD), row, 1, NOT_NOW)  # a socket that is full wakes it, too


@part
def _carry(steps: int, count: int, x: int, y: int, z: int) -> int:
    """How many steps were not done, since something could not be read."""
    for number in range(count):
        step = steps + 8 * STEP * number
        source = _at(step, FROM, x, y, z)
        to = _at(step, TO, x, y, z)
        what, width = load("i64", step, 0), load("i64", step, WIDTH)
        outer, middle = load("i64", step, COUNTS), load("i64", step, COUNTS + 1)
        if what == TELL:
            store("i64", to, 0, source)
            continue
        if what == READ:
            address = load("i64", source, 0) + load("i64", step, FROM + 2)
            if read(load("i64", step, LENDER), address, to, width) == 0:
                return count - number
            continue
        for i in range(outer):
            for j in range(middle):
                here = to + i * load("i64", step, TO + 2) + j * load("i64", step, TO + 3)
                there = source + i * load("i64", step, FROM + 2) + j * load("i64", step, FROM + 3)
                if what == COPY:
                    memcpy(here, there, width)
                elif what == ZERO:
                    memset(here, 0, width)
                elif what == ADD:
                    _add_f32(here, there, width)
                elif what == ADD + 1:
                    _add_f64(here, there, width)
                elif what == ADD + 2:
                    _add_i32(here, there, width)
                elif what == ADD + 3:
                    _add_i64(here, there, width)
    return 0


@part
def _at(step: int, side: int, x: int, y: int, z: int) -> int:
    where, at = load("i64", step, side), load("i64", step, side + 1)
    if where == IN_X:
        at += x
    elif where == IN_Y:
        at += y
    elif where == IN_Z:
        at += z
    return int(at)
