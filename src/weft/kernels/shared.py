"""The compiled loops that store and look at numbers which processes share: those of a meeting.

They are no kernels, and `wire.tcp.meeting` alone calls them: it says what they are for. They are
here to be compiled, kept and loaded with the kernels, all or none. `page` says what lies where.

What `load` and `store` touch is private memory of this process: what is read of a page is copied
there first, and checked by who called.
"""

from __future__ import annotations

from collections.abc import Callable

from .llvm_intrinsics import give_way, load, load_shared, store, store_shared
from .page import BEGUN, DEPTH, ENTRIES, ENTRY, READ, ROOM


def look(address: int) -> int:
    """The number there."""
    number: int = load_shared(address)
    return number


def put(address: int, number: int) -> int:
    """Store a number; 0."""
    store_shared(address, number)
    return 0


def put_each(lines: int, count: int, word: int, numbers: int) -> int:
    """Store numbers at this word of so many lines; 0."""
    for k in range(count):
        store_shared(load("i64", lines, k) + word, load("i64", numbers, k))
    return 0


def reached(lines: int, count: int, word: int, numbers: int, less: int, looks: int) -> int:
    """Whether this word of each line is its number less `less`, or more, after so many looks."""
    for k in range(count):
        address, number = load("i64", lines, k) + word, load("i64", numbers, k) - less
        while load_shared(address) < number:
            if looks <= 0:
                return 0
            looks -= 1
            if looks % 4 == 0:
                give_way()
    return 1


def announce(
    lines: int,
    pages: int,
    count: int,
    numbers: int,
    offset: int,
    nbytes: int,
    sleeps: int,
) -> int:
    """Begin a meeting of these numbers, whose message lies there: how many of the peers sleep.

    The entry of each line first, then BEGUN, which peers look at, then the look at who sleeps:
    `sleeps` gets the first number of each page.
    """
    for k in range(count):
        number = load("i64", numbers, k)
        entry = load("i64", lines, k) + ENTRIES + ENTRY * (number % DEPTH)
        store_shared(entry, offset)
        store_shared(entry + 8, nbytes)
    for k in range(count):
        store_shared(load("i64", lines, k) + BEGUN, load("i64", numbers, k))
    sleepers = 0
    for k in range(count):
        sleep = load_shared(load("i64", pages, k))
        store("i64", sleeps, k, sleep)
        sleepers += sleep != 0
    return sleepers


def find(line: int, number: int, entry: int) -> int:
    """Whether a peer has begun the meeting of this number; if so, copy its entry.

    -1: it says that it has begun more than it can have.
    """
    ahead = load_shared(line + BEGUN) - number
    if ahead < 0:
        return 0
    if ahead >= DEPTH:
        return -1
    there = line + ENTRIES + ENTRY * (number % DEPTH)
    for k in range(2):
        store("i64", entry, k, load_shared(there + 8 * k))
    return 1


def confirm(own_line: int, line: int, page: int, number: int) -> int:
    """Store that this peer's message was read; whether the peer sleeps for that."""
    store_shared(own_line + READ, number)
    if load_shared(line + ROOM) == 0 or load_shared(page) == 0:
        return 0
    return 1


def impossible(own_lines: int, lines: int, count: int) -> int:
    """The first peer whose line cannot be, by its place, or -1.

    Who reads and writes as it may keeps to: my READ <= its BEGUN <= my READ + DEPTH, and
    my BEGUN - DEPTH <= its READ <= my BEGUN.
    """
    for k in range(count):
        own_line, line = load("i64", own_lines, k), load("i64", lines, k)
        ahead = load_shared(line + BEGUN) - load_shared(own_line + READ)
        behind = load_shared(own_line + BEGUN) - load_shared(line + READ)
        if ahead < 0 or ahead > DEPTH or behind < 0 or behind > DEPTH:
            return k
    return -1


LOOPS: dict[str, Callable[..., int]] = {
    loop.__name__: loop
    for loop in (look, put, put_each, reached, announce, find, confirm, impossible)
}
"""Each loop by its name."""
