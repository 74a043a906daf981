"""The compiled loops over indices: sort, find duplicates, unite sorted runs, sample.

Made and called like `value_loops`: each function makes one loop for a kind of index ("i32" or
"i64"), whose arguments are addresses and counts. Nothing here looks at values.

Sources: least-significant-digit radix sort (Knuth, TAOCP 3, 5.2.5); ranks in a bitmap by
population counts (Jacobson, "Space-efficient static trees and graphs", FOCS 1989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import SIZES, count_ones, load, lowest_one, part, prefetch, store

LOOPS = (
    "compose",
    "ends",
    "histogram",
    "mark",
    "pair",
    "place",
    "scan",
    "segment",
    "several",
    "smallest",
    "sort",
    "spread",
    "unpack",
)

__all__ = ["LOOPS", *LOOPS]

int32: Any = np.int32  # casts, in machine code
int64: Any = np.int64

# as in `reference`: the factors of the hash, as int64
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xD6E8FEB86659FD93 - 2**64
_LOW, _TOP = 0xFFFFFFFF, -(2**63)


@part
def _hash(index: int) -> int:
    word = index * _FIRST
    word = (word ^ ((word >> 32) & _LOW)) * _SECOND
    return word ^ ((word >> 32) & _LOW) ^ _TOP


def scan(kind: str) -> Callable[..., tuple[Any, ...]]:
    """How often an index is less than the one before it, how often equal; least; greatest."""

    def loop(indices: int, count: int) -> tuple[Any, ...]:
        falls, repeats = int64(0), int64(0)
        least = greatest = load(kind, indices, 0)
        for i in range(1, count):
            index, before = load(kind, indices, i), load(kind, indices, i - 1)
            falls += index < before
            repeats += index == before
            least, greatest = min(least, index), max(greatest, index)
        return falls, repeats, int64(least), int64(greatest)

    return loop


def histogram(kind: str) -> Callable[..., None]:
    """Count the indices whose distance from `low`, shifted right, is 0, 1, 2, ..."""

    def loop(indices: int, count: int, low: int, shift: int, counts: int) -> None:
        for i in range(count):
            bin = (int64(load(kind, indices, i)) - low) >> shift
            store("i64", counts, bin, load("i64", counts, bin) + 1)

    return loop


def sort(kind: str) -> Callable[..., int]:
    """Sort those of `count` indices that are `low <= index < low + span`, with their positions.

    Leaves `(index - low) << position_bits | position` in `target`, sorted, which has room for
    `expected` of them like `spare`. Returns how many different indices there are, or -1 if
    there are not as many as expected.
    """

    def loop(
        indices: int,
        count: int,
        low: int,
        span: int,
        expected: int,
        position_bits: int,
        digit_bits: int,
        passes: int,
        target: int,
        spare: int,
        counts: int,
    ) -> int:
        mask = (1 << digit_bits) - 1
        for bin in range(passes << digit_bits):
            store("i32", counts, bin, 0)
        found = 0
        whole = expected == count
        source, goal = (target, spare) if passes & 1 == 0 else (spare, target)
        for i in range(count):
            key = int64(load(kind, indices, i)) - low
            if whole:
                if key < 0 or key >= span:
                    return -1
            else:  # the stores of those out of range are overwritten by the next in range
                inside = key >= 0 and key < span
                if found < expected:
                    store("i64", source, found, (key << position_bits) | i)
                found += inside
                if not inside:
                    continue
            for digit in range(passes):
                bin = (digit << digit_bits) + ((key >> (digit * digit_bits)) & mask)
                store("i32", counts, bin, load("i32", counts, bin) + 1)
        if not whole and found != expected:
            return -1
        for digit in range(passes):
            row = counts + 4 * (digit << digit_bits)
            before = int32(0)
            for bin in range(mask + 1):
                here = load("i32", row, bin)
                store("i32", row, bin, before)
                before += here
        for digit in range(passes):
            row = counts + 4 * (digit << digit_bits)
            shift = position_bits + digit * digit_bits
            for i in range(expected):
                if whole and digit == 0:
                    pair = ((int64(load(kind, indices, i)) - low) << position_bits) | i
                else:
                    pair = load("i64", source, i)
                bin = (pair >> shift) & mask
                at = int64(load("i32", row, bin))
                store("i32", row, bin, at + 1)
                store("i64", goal, at, pair)
            source, goal = goal, source
        different = 1
        for i in range(1, expected):
            now, before = load("i64", target, i), load("i64", target, i - 1)
            different += (now >> position_bits) != (before >> position_bits)
        return different

    return loop


def unpack(kind: str) -> Callable[..., None]:
    """Take apart what `sort` left: the distinct indices, the order, and where segments start.

    `base` is the place of the first pair among all; `starts` may be 0 if there are no duplicates.
    """

    def loop(
        pairs: int,
        count: int,
        different: int,
        position_bits: int,
        low: int,
        base: int,
        indices: int,
        order: int,
        starts: int,
    ) -> None:
        mask = (1 << position_bits) - 1
        if starts == 0:
            for i in range(count):
                pair = load("i64", pairs, i)
                store("i64", order, i, pair & mask)
                store(kind, indices, i, (pair >> position_bits) + low)
            return
        segment = different - 1
        after = load("i64", pairs, count - 1) >> position_bits
        for i in range(count - 1, -1, -1):  # backwards, the first of a segment is written last
            pair = load("i64", pairs, i)
            key = pair >> position_bits
            segment -= key != after
            after = key
            store("i64", order, i, pair & mask)
            store(kind, indices, segment, key + low)
            store("i64", starts, segment, base + i)

    return loop


def segment(kind: str) -> Callable[..., None]:
    """The distinct indices of sorted ones, and where the segments of equal ones start."""

    def loop(sorted: int, count: int, different: int, indices: int, starts: int) -> None:
        segment = different - 1
        after = load(kind, sorted, count - 1)
        for i in range(count - 1, -1, -1):
            index = load(kind, sorted, i)
            segment -= index != after
            after = index
            store(kind, indices, segment, index)
            store("i64", starts, segment, i)

    return loop


def ends(kind: str) -> Callable[..., tuple[Any, ...]]:
    """The least first and the greatest last index of the runs of a table (see `mark`)."""

    def loop(table: int, runs: int) -> tuple[Any, ...]:
        low, high = int64(2**63 - 1), int64(-(2**63))
        for run in range(runs):
            indices, count = load("i64", table, 3 * run), load("i64", table, 3 * run + 1)
            if count:
                low = min(low, int64(load(kind, indices, 0)))
                high = max(high, int64(load(kind, indices, count - 1)))
        return low, high

    return loop


def mark(kind: str) -> Callable[..., int]:
    """Set the bit of every index of every run; returns how many bits are set in the end.

    `table` has a row for each run: its address, its length, the address of its slots. A slot
    becomes -1 where no earlier run has that index, else 0. Bit 0 is the index `low`. Returns -1
    for an index beyond the bitmap: its run is not sorted.
    """

    def loop(table: int, runs: int, low: int, words: int, bitmap: int) -> int:
        for word in range(words):
            store("i64", bitmap, word, 0)
        for run in range(runs):
            indices, slots = load("i64", table, 3 * run), load("i64", table, 3 * run + 2)
            for i in range(load("i64", table, 3 * run + 1)):
                bit = int64(load(kind, indices, i)) - low
                at = bit >> 6
                if at < 0 or at >= words:
                    return -1
                word = load("i64", bitmap, at)
                store("i32", slots, i, ((word >> (bit & 63)) & 1) - 1)
                store("i64", bitmap, at, word | (1 << (bit & 63)))
        ones = 0
        for word in range(words):
            ones += count_ones(load("i64", bitmap, word))
        return ones

    return loop


def place(kind: str) -> Callable[..., None]:
    """After `mark`: every slot becomes the place of its index, `base` being that of the first.

    Writes the united indices to `out` from place `base` on; `ranks` is scratch, int32 per word.
    """

    def loop(
        table: int, runs: int, low: int, words: int, bitmap: int, ranks: int, base: int, out: int
    ) -> None:
        before = base
        for word in range(words):
            store("i32", ranks, word, before)
            before += count_ones(load("i64", bitmap, word))
        for run in range(runs):
            indices, slots = load("i64", table, 3 * run), load("i64", table, 3 * run + 2)
            for i in range(load("i64", table, 3 * run + 1)):
                index = int64(load(kind, indices, i))
                bit = index - low
                lower = load("i64", bitmap, bit >> 6) & ((1 << (bit & 63)) - 1)
                here = int64(load("i32", ranks, bit >> 6)) + count_ones(lower)
                store("i32", slots, i, here ^ int64(load("i32", slots, i)))
                store(kind, out, here, index)

    return loop


def spread(kind: str) -> Callable[..., int]:
    """Write the indices of a bitmap that begins at 0 to `out`, unless that is 0; how many."""

    def loop(words: int, bitmap: int, out: int) -> int:
        found = 0
        for at in range(words):
            word = load("i64", bitmap, at)
            if out == 0:
                found += count_ones(word)
                continue
            while word != 0:
                store(kind, out, found, (at << 6) + lowest_one(word))
                word &= word - 1
                found += 1
        return found

    return loop


def pair(kind: str) -> Callable[..., int]:
    """Unite two sorted runs; returns the length of the union. Slots as in `union`."""
    size = SIZES[kind]

    def loop(
        left: int,
        left_count: int,
        right: int,
        right_count: int,
        out: int,
        left_slots: int,
        right_slots: int,
    ) -> int:
        i, j, n = 0, 0, 0
        while i < left_count and j < right_count:
            a, b = load(kind, left, i), load(kind, right, j)
            # written at every step, and right when its index is consumed: no branch to guess
            store(kind, out, n, min(a, b))
            store("i32", left_slots, i, ~n)
            store("i32", right_slots, j, n if a == b else ~n)
            i += a <= b
            j += b <= a
            n += 1
            prefetch(left + i * size + 512)
            prefetch(right + j * size + 512)
        for rest in range(i, left_count):
            store(kind, out, n, load(kind, left, rest))
            store("i32", left_slots, rest, ~n)
            n += 1
        for rest in range(j, right_count):
            store(kind, out, n, load(kind, right, rest))
            store("i32", right_slots, rest, ~n)
            n += 1
        return n

    return loop


def several(kind: str) -> Callable[..., int]:
    """Unite some short sorted runs at once; returns the length of the union. Slots as in `union`.

    Looks at the heads of all runs for each index. The table has a fourth number for each run, 0.
    Below 0 where a run is not sorted and unique.
    """

    def loop(table: int, runs: int, out: int) -> int:
        n, before = 0, int64(0)
        while True:
            least, found = int64(0), 0
            for run in range(runs):
                at = load("i64", table, 4 * run + 3)
                if at < load("i64", table, 4 * run + 1):
                    index = int64(load(kind, load("i64", table, 4 * run), at))
                    least = min(least, index) if found else index
                    found += 1
            if found == 0:
                return n
            if n and least <= before:
                return -1
            store(kind, out, n, least)
            before = least
            slot = ~n
            for run in range(runs):
                at = load("i64", table, 4 * run + 3)
                more = at < load("i64", table, 4 * run + 1)
                if more and int64(load(kind, load("i64", table, 4 * run), at)) == least:
                    store("i32", load("i64", table, 4 * run + 2), at, slot)
                    store("i64", table, 4 * run + 3, at + 1)
                    slot = n
            n += 1

    return loop


def compose(kind: str) -> Callable[..., None]:
    """Slots in a part of a union become slots in the whole: `outer` has those of the part.

    `outer` may be 0 for the identity; `base` is added to the places.
    """

    def loop(slots: int, count: int, outer: int, base: int) -> None:
        for i in range(count):
            slot = int64(load("i32", slots, i))
            first = slot >> 63  # -1 where the part brings the index first, else 0
            if outer:
                inner = slot ^ first
                slot = int64(load("i32", outer, inner))
                first &= slot >> 63
                slot ^= slot >> 63
            else:
                slot ^= first
            store("i32", slots, i, (slot + base) ^ first)

    return loop


def smallest(kind: str) -> Callable[..., None]:
    """The `room` indices with the smallest hashes, out of at least that many, in no order.

    `hashes` are as in `reference.hashed`: int64 in the order of the uint64.
    """

    def loop(indices: int, count: int, hashes: int, ids: int, room: int) -> None:
        for i in range(room):
            index = int64(load(kind, indices, i))
            store("i64", ids, i, index)
            store("i64", hashes, i, _hash(index))
        inner = room // 2  # nodes that have children: first these sift down, which makes a heap
        for step in range(inner + count - room):
            if step < inner:
                node = inner - 1 - step
                hash, index = load("i64", hashes, node), load("i64", ids, node)
            else:  # then every other index takes the place of the greatest, if it is less
                node = 0
                index = int64(load(kind, indices, step - inner + room))
                hash = _hash(index)
                if hash >= load("i64", hashes, 0):
                    continue
            while 2 * node + 1 < room:
                child = 2 * node + 1
                if child + 1 < room:
                    child += load("i64", hashes, child + 1) > load("i64", hashes, child)
                if hash >= load("i64", hashes, child):
                    break
                store("i64", hashes, node, load("i64", hashes, child))
                store("i64", ids, node, load("i64", ids, child))
                node = child
            store("i64", hashes, node, hash)
            store("i64", ids, node, index)

    return loop
