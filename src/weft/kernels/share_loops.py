"""The compiled loops that share the places of a union out among the runs; see `cpu_shares`.

Made and called like `value_loops` and `index_loops`. All of them work on slots and places, so one
set serves every dtype. A *word* (int64, one for each place) first holds what `weigh` counts, then
what is left of the place's target; a *key* (int32) holds twice the run that was chosen, plus one
where several runs have the place.

Source of the fractions: Knuth, TAOCP 3, 6.4 (multiplication by the golden ratio).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import fence, load, prefetch_row, store, stream

LOOPS = (
    "aim",
    "alone",
    "arrange",
    "choose",
    "deal",
    "held",
    "mark_again",
    "pick",
    "put1",
    "put32",
    "put4",
    "put8",
    "tally",
    "weigh",
)

__all__ = ["LOOPS", *LOOPS]

_AHEAD = 8  # rows whose places are asked for before they are written to
_LINES = 1024  # bytes of a row that are asked for

int32: Any = np.int32  # casts, in machine code
int64: Any = np.int64
uint8: Any = np.uint8

_GOLDEN = 2654435769  # 2**32 divided by the golden ratio; as in `reference`
_LOW = 0xFFFFFFFF


def weigh() -> Callable[..., None]:
    """Add one holder, and its weight, to the words of a run's places."""

    def loop(slots: int, count: int, weight: int, words: int) -> None:
        more = (int64(1) << 32) | weight
        for i in range(count):
            slot = int64(load("i32", slots, i))
            place = slot ^ (slot >> 63)
            store("i64", words, place, load("i64", words, place) + more)

    return loop


def aim() -> Callable[..., None]:
    """Words become targets, from 0 up to the sum of weights; keys say which places have several."""

    def loop(words: int, total: int, keys: int) -> None:
        fraction = int64(0)
        for place in range(total):
            word = load("i64", words, place)
            several = (word >> 32) > 1
            store("i64", words, place, (fraction * (word & _LOW)) >> 32 if several else int64(0))
            store("i32", keys, place, int32(several))
            if several:
                fraction = (fraction + _GOLDEN) & _LOW

    return loop


def choose() -> Callable[..., None]:
    """The run takes its weight off its places' targets, and has those that fall below 0."""

    def loop(slots: int, count: int, weight: int, run: int, words: int, keys: int) -> None:
        for i in range(count):
            slot = int64(load("i32", slots, i))
            place = slot ^ (slot >> 63)
            left = load("i64", words, place)
            if left >= 0:
                left -= weight
                store("i64", words, place, left)
                if left < 0:
                    store("i32", keys, place, load("i32", keys, place) + int32(2 * run))

    return loop


def arrange() -> Callable[..., None]:
    """Sort the places by key, stably: `order` has the places, `at` where each place stands.

    `starts` has an entry for each key and one more, all 0, and becomes where each key starts.
    """

    def loop(keys: int, total: int, many: int, starts: int, order: int, at: int) -> None:
        for place in range(total):
            key = int64(load("i32", keys, place)) + 1
            store("i64", starts, key, load("i64", starts, key) + 1)
        for key in range(many):
            store("i64", starts, key + 1, load("i64", starts, key + 1) + load("i64", starts, key))
        for place in range(total):
            key = int64(load("i32", keys, place))
            here = load("i64", starts, key)
            store("i64", starts, key, here + 1)
            store("i32", order, here, int32(place))
            store("i32", at, place, int32(here))
        for key in range(many, 0, -1):
            store("i64", starts, key, load("i64", starts, key - 1))
        store("i64", starts, 0, int64(0))

    return loop


def mark_again() -> Callable[..., None]:
    """Mark the places of a run that an earlier run has too: a byte for each place."""

    def loop(slots: int, count: int, marks: int) -> None:
        for i in range(count):
            slot = int64(load("i32", slots, i))
            if slot >= 0:
                store("u8", marks, slot, uint8(1))

    return loop


def alone() -> Callable[..., int]:
    """The first `most` rows of a run whose places no other run has; returns how many there are."""

    def loop(slots: int, count: int, marks: int, most: int, rows: int) -> int:
        found = 0
        for i in range(count):
            if found == most:
                break
            slot = int64(load("i32", slots, i))
            if slot < 0 and load("u8", marks, ~slot) == 0:
                store("i32", rows, found, int32(i))
                found += 1
        return found

    return loop


def tally() -> Callable[..., None]:
    """Count a run's places by the run that they were given to."""

    def loop(slots: int, count: int, keys: int, counts: int) -> None:
        for i in range(count):
            slot = int64(load("i32", slots, i))
            to = int64(load("i32", keys, slot ^ (slot >> 63))) >> 1
            store("i64", counts, to, load("i64", counts, to) + 1)

    return loop


def deal() -> Callable[..., None]:
    """Sort a run's rows by the run that their places were given to, stably.

    `starts` says where the rows of each begin in `rows`, and is moved on to where they end.
    """

    def loop(slots: int, count: int, keys: int, starts: int, rows: int) -> None:
        for i in range(count):
            slot = int64(load("i32", slots, i))
            to = int64(load("i32", keys, slot ^ (slot >> 63))) >> 1
            here = load("i64", starts, to)
            store("i64", starts, to, here + 1)
            store("i32", rows, here, int32(i))

    return loop


def pick() -> Callable[..., int]:
    """Of a run's places those given to `to`: `rows`, where in the run; `slots_there`, where there.

    `alone` says how many places of this run nobody else has and so stand first: 0 in other runs.
    Returns how many were found.
    """

    def loop(
        slots: int,
        count: int,
        keys: int,
        to: int,
        at: int,
        start: int,
        alone: int,
        rows: int,
        slots_there: int,
    ) -> int:
        single, shared = 0, alone
        for i in range(count):
            slot = int64(load("i32", slots, i))
            first = slot >> 63
            place = slot ^ first
            key = int64(load("i32", keys, place))
            if key >> 1 != to:
                continue
            here = shared if key & 1 else single
            store("i32", rows, here, int32(i))
            there = int64(load("i32", at, place)) - start
            store("i32", slots_there, here, int32(there ^ first))
            shared += key & 1
            single += 1 - (key & 1)
        return shared

    return loop


def held() -> Callable[..., None]:
    """Whether a run has some places, ascending: 1 or 0 in every `apart`-th word of `out`.

    Each is looked for from the one before on, in steps that double.
    """

    def loop(slots: int, count: int, places: int, many: int, apart: int, out: int) -> None:
        low = int64(0)
        for i in range(many):
            place, high, step = load("i64", places, i), low, int64(1)
            while high < count:
                slot = int64(load("i32", slots, high))
                if slot ^ (slot >> 63) >= place:
                    break
                low = high + 1
                high += step
                step += step
            high = min(high, int64(count))
            while low < high:
                middle = (low + high) >> 1
                slot = int64(load("i32", slots, middle))
                if slot ^ (slot >> 63) < place:
                    low = middle + 1
                else:
                    high = middle
            found = int64(0)
            if low < count:
                slot = int64(load("i32", slots, low))
                found = int64(slot ^ (slot >> 63) == place)
            store("i64", out, i * apart, found)

    return loop


def put1() -> Callable[..., int]:
    """As `put8`, for rows of any size."""
    return _put("u8")


def put4() -> Callable[..., int]:
    """As `put8`, for rows whose size is a multiple of four bytes."""
    return _put("i32")


def put8() -> Callable[..., int]:
    """Copy rows `first` to `last` to their places; returns how many have none of `height`."""
    return _put("i64")


def put32() -> Callable[..., int]:
    """As `put8`, past the cache, for rows and an `out` that are multiples of 32 bytes."""
    return _put("i64", past=True)


def _put(kind: str, past: bool = False) -> Callable[..., int]:
    def loop(
        out: int,
        height: int,
        places: int,
        values: int,
        stride: int,
        first: int,
        last: int,
        width: int,
    ) -> int:
        outside, lines = 0, min(stride, _LINES)
        for i in range(first, last):
            place = int64(load("i32", places, i))
            if place < 0 or place >= height:
                outside += 1
                continue
            target, row = out + place * stride, values + i * stride
            if past:
                for piece in range(0, stride, 32):
                    stream(target + piece, row + piece)
                continue
            if i + _AHEAD < last:
                prefetch_row(out + int64(load("i32", places, i + _AHEAD)) * stride, lines)
            for j in range(width):
                store(kind, target, j, load(kind, row, j))
        if past:
            fence()
        return outside

    return loop
