"""The compiled loops: over indices, over the slots of a union, over index codes, over values.

Each is a Python function of addresses and counts, all int64, in the words of `llvm_intrinsics`;
`INSTANCES` says for which kinds and operations each is made. Importing this imports Numba. Who
calls them has checked what they are given: see `cpu` and `codec`.

Sources: least-significant-digit radix sort (Knuth, TAOCP 3, 5.2.5); ranks in a bitmap by population
counts (Jacobson, "Space-efficient static trees and graphs", FOCS 1989); fractions by multiplication
with the golden ratio (Knuth, TAOCP 3, 6.4); Golomb-Rice codes (see `codec`).
"""

from __future__ import annotations

from collections.abc import Callable

from .llvm_intrinsics import (
    CODES,
    KINDS,
    apply,
    copy,
    count_ones,
    load,
    load_as,
    lowest_one,
    prefetch,
    store,
    store_as,
)
from .shared import LOOPS as SHARED

_LOW, _TOP = 0xFFFFFFFF, -(2**63)
_GOLDEN = 2654435769  # 2**32 divided by the golden ratio; as in `reference`
_BLOCK = 256  # as in `codec`
_WIDEST = 52  # as in `codec`: the greatest Rice parameter
_NARROW = KINDS["i32"]
_AHEAD = 4096  # bytes of rows that are asked for before they are read
_PLACES_AHEAD = 8  # rows whose places are asked for before they are written to


# Indices --------------------------------------------------------------------------------------


def scan(kind: int, indices: int, count: int, found: int) -> int:
    """How often an index is less than the one before it, how often equal; least; greatest."""
    falls, repeats = 0, 0
    least = greatest = load(kind, indices, 0)
    for i in range(1, count):
        index, before = load(kind, indices, i), load(kind, indices, i - 1)
        falls += index < before
        repeats += index == before
        least, greatest = min(least, index), max(greatest, index)
    store("i64", found, 0, falls)
    store("i64", found, 1, repeats)
    store("i64", found, 2, least)
    store("i64", found, 3, greatest)
    return 0


def sort(
    kind: int,
    indices: int,
    count: int,
    low: int,
    high: int,
    position_bits: int,
    digit_bits: int,
    passes: int,
    target: int,
    spare: int,
    counts: int,
) -> int:
    """Sort indices, all of them from `low` to `high`, with their positions.

    Leaves `(index - low) << position_bits | position` in `target`, sorted; `spare` is as large.
    Returns how many different indices there are, or -1 if one is out of that range.
    """
    mask = (1 << digit_bits) - 1
    for bin in range(passes << digit_bits):
        store("i32", counts, bin, 0)
    source, goal = (target, spare) if passes & 1 == 0 else (spare, target)
    for i in range(count):
        index = load(kind, indices, i)
        if index < low or index > high:
            return -1
        store("i64", source, i, ((index - low) << position_bits) | i)  # read once, may it change
        for digit in range(passes):
            bin = (digit << digit_bits) + (((index - low) >> (digit * digit_bits)) & mask)
            store("i32", counts, bin, load("i32", counts, bin) + 1)
    for digit in range(passes):
        row = counts + 4 * (digit << digit_bits)
        before = 0
        for bin in range(mask + 1):
            here = load("i32", row, bin)
            store("i32", row, bin, before)
            before += here
    for digit in range(passes):
        row = counts + 4 * (digit << digit_bits)
        shift = position_bits + digit * digit_bits
        for i in range(count):
            pair = load("i64", source, i)
            bin = (pair >> shift) & mask
            at = load("i32", row, bin)
            store("i32", row, bin, at + 1)
            store("i64", goal, at, pair)
        source, goal = goal, source
    different = 1
    for i in range(1, count):
        now, before = load("i64", target, i), load("i64", target, i - 1)
        different += (now >> position_bits) != (before >> position_bits)
    return different


def unpack(
    kind: int,
    pairs: int,
    count: int,
    different: int,
    position_bits: int,
    low: int,
    indices: int,
    order: int,
    starts: int,
) -> int:
    """Split the pairs that `sort` left: the distinct indices, the order, and where segments start.

    `starts` may be 0 if there are no duplicates.
    """
    mask = (1 << position_bits) - 1
    if starts == 0:
        for i in range(count):
            pair = load("i64", pairs, i)
            store("i64", order, i, pair & mask)
            store(kind, indices, i, (pair >> position_bits) + low)
        return 0
    segment = different - 1
    after = load("i64", pairs, count - 1) >> position_bits
    for i in range(count - 1, -1, -1):  # backwards, the first of a segment is written last
        pair = load("i64", pairs, i)
        key = pair >> position_bits
        segment -= key != after
        after = key
        store("i64", order, i, pair & mask)
        store(kind, indices, segment, key + low)
        store("i64", starts, segment, i)
    return 0


def ends(kind: int, table: int, runs: int, found: int) -> int:
    """The least first and the greatest last index of the runs of a table (see `mark`)."""
    low, high = 2**63 - 1, _TOP
    for run in range(runs):
        indices, count = load("i64", table, 3 * run), load("i64", table, 3 * run + 1)
        if count:
            low = min(low, load(kind, indices, 0))
            high = max(high, load(kind, indices, count - 1))
    store("i64", found, 0, low)
    store("i64", found, 1, high)
    return 0


def mark(kind: int, table: int, runs: int, low: int, words: int, bitmap: int) -> int:
    """Set the bit of every index of every run; returns how many bits are set in the end.

    `table` has a row for each run: its address, its length, the address of its slots. A slot
    becomes `~bit` where no earlier run has that index, else `bit`. Bit 0 is the index `low`; there
    are at most 2**31 bits. Returns -1 for an index beyond the bitmap: its run is not sorted.
    """
    for word in range(words):
        store("i64", bitmap, word, 0)
    for run in range(runs):
        indices, slots = load("i64", table, 3 * run), load("i64", table, 3 * run + 2)
        for i in range(load("i64", table, 3 * run + 1)):
            bit = load(kind, indices, i) - low
            at = bit >> 6
            if at < 0 or at >= words:
                return -1
            word = load("i64", bitmap, at)
            store("i32", slots, i, bit ^ (((word >> (bit & 63)) & 1) - 1))
            store("i64", bitmap, at, word | (1 << (bit & 63)))
    ones = 0
    for word in range(words):
        ones += count_ones(load("i64", bitmap, word))
    return ones


def place(
    kind: int, table: int, runs: int, low: int, words: int, bitmap: int, ranks: int, out: int
) -> int:
    """After `mark`: every slot becomes the place of its index, and the united indices go to `out`.

    `ranks` is scratch, int32 per word. Indices are not read again: another thread may have changed
    them.
    """
    before = 0
    for word in range(words):
        store("i32", ranks, word, before)
        before += count_ones(load("i64", bitmap, word))
    for run in range(runs):
        slots = load("i64", table, 3 * run + 2)
        for i in range(load("i64", table, 3 * run + 1)):
            slot = load("i32", slots, i)
            first = slot >> 63  # -1 or 0
            bit = slot ^ first
            lower = load("i64", bitmap, bit >> 6) & ((1 << (bit & 63)) - 1)
            here = load("i32", ranks, bit >> 6) + count_ones(lower)
            store("i32", slots, i, here ^ first)
            store(kind, out, here, bit + low)
    return 0


def pair(
    kind: int,
    left: int,
    left_count: int,
    right: int,
    right_count: int,
    out: int,
    left_slots: int,
    right_slots: int,
) -> int:
    """Unite two sorted runs; returns the length of the union. Slots as in `union`."""
    size = 4 if kind == _NARROW else 8
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
        prefetch(left + i * size + 512, 1)
        prefetch(right + j * size + 512, 1)
    for rest in range(i, left_count):
        store(kind, out, n, load(kind, left, rest))
        store("i32", left_slots, rest, ~n)
        n += 1
    for rest in range(j, right_count):
        store(kind, out, n, load(kind, right, rest))
        store("i32", right_slots, rest, ~n)
        n += 1
    return n


def compose(slots: int, count: int, outer: int) -> int:
    """Slots in a part of a union become slots in the whole: `outer` has those of the part."""
    for i in range(count):
        slot = load("i32", slots, i)
        first = slot >> 63  # -1 where the part brings the index first, else 0
        slot = load("i32", outer, slot ^ first)
        store("i32", slots, i, slot ^ (slot >> 63) ^ (first & (slot >> 63)))
    return 0


# Index codes ----------------------------------------------------------------------------------
# Remainders are read and written with unaligned words of 64 bits, so one of at most 56 bits never
# takes a second one; the word of unary parts stays in a register, since bits set one by one in
# memory wait for each other.


def encode(
    kind: int, indices: int, count: int, widths: int, remainders: int, unary: int, most: int
) -> int:
    """Write the gaps of `count` sorted, unique indices; returns how many words of unary parts.

    `widths` has a byte for each block of gaps. The remainders end with a word of zeros, which is
    the caller's to write: only that much of it may be overwritten. Returns -1 where the unary parts
    take more than `most` words: the widths are of other indices.
    """
    before = load(kind, indices, 0)
    some, filled = 0, 0  # remainders not yet whole bytes
    word, bit, words = 0, 0, 0
    for start in range(1, count, _BLOCK):
        width = load("u8", widths, start // _BLOCK)
        mask = (1 << width) - 1
        for i in range(start, min(start + _BLOCK, count)):
            index = load(kind, indices, i)
            gap = index - before - 1
            before = index
            some |= (gap & mask) << filled
            store("i64", remainders, 0, some)
            filled += width
            remainders += filled >> 3
            some >>= filled & ~7
            filled &= 7
            bit += gap >> width
            while bit >= 64:
                if words + 1 >= most:
                    return -1
                store("i64", unary, words, word)
                words += 1
                word = 0
                bit -= 64
            word |= 1 << bit
            bit += 1
    store("i64", unary, words, word)
    return words + 1


def decode(
    kind: int,
    first: int,
    last: int,
    count: int,
    widths: int,
    remainders: int,
    unary: int,
    words: int,
    out: int,
) -> int:
    """Read back what `encode` wrote: `count` indices from `first` on, none of them beyond `last`.

    Reads no more than `words` of unary parts, and of remainders what lies before those. Returns 0,
    or -1 where that is no list that was written so.
    """
    store(kind, out, 0, first)
    index, at, bits = first, 0, 8 * (unary - remainders) - 64
    base, before = 0, -1  # bits before this word of unary parts; the bit of the part before
    word = load("i64", unary, 0)
    for start in range(1, count, _BLOCK):
        width = load("u8", widths, start // _BLOCK)
        stop = min(start + _BLOCK, count)
        if width > _WIDEST or at + width * (stop - start) > bits:  # it may be memory of the peer's
            return -1
        mask = (1 << width) - 1
        for i in range(start, stop):
            while word == 0:
                base += 64
                if base >> 6 >= words:
                    return -1
                word = load("i64", unary, base >> 6)
            bit = base + lowest_one(word)
            word &= word - 1
            quotient = bit - before - 1
            before = bit
            if quotient > (last - index) >> width:  # before it is shifted, and overflows
                return -1
            rest = (load("i64", remainders + (at >> 3), 0) >> (at & 7)) & mask
            at += width
            index += ((quotient << width) | rest) + 1
            if index > last:
                return -1
            store(kind, out, i, index)
    return 0


# Slots: whose rows stand for which places -----------------------------------------------------
# A *word* (int64, one for each place) first holds what `weigh` counts, then what is left of the
# place's target; a *key* (int32) holds twice the run that was chosen, plus one where several runs
# have the place.


def weigh(slots: int, count: int, weight: int, words: int) -> int:
    """Add one holder, and its weight, to the words of a run's places."""
    more = (1 << 32) | weight
    for i in range(count):
        slot = load("i32", slots, i)
        place = slot ^ (slot >> 63)
        store("i64", words, place, load("i64", words, place) + more)
    return 0


def aim(words: int, total: int, keys: int) -> int:
    """Words become targets, from 0 up to the sum of weights; keys say which places have several."""
    fraction = 0
    for place in range(total):
        word = load("i64", words, place)
        several = (word >> 32) > 1
        store("i64", words, place, (fraction * (word & _LOW)) >> 32 if several else 0)
        store("i32", keys, place, several)
        if several:
            fraction = (fraction + _GOLDEN) & _LOW
    return 0


def choose(slots: int, count: int, weight: int, run: int, words: int, keys: int) -> int:
    """Subtract the run's weight from its places' targets; it is given those that fall below 0."""
    for i in range(count):
        slot = load("i32", slots, i)
        place = slot ^ (slot >> 63)
        left = load("i64", words, place)
        if left >= 0:
            left -= weight
            store("i64", words, place, left)
            if left < 0:
                store("i32", keys, place, load("i32", keys, place) + 2 * run)
    return 0


def arrange(keys: int, total: int, many: int, starts: int, order: int, at: int) -> int:
    """Sort the places by key, stably: `order` has the places, `at` where each place stands.

    `starts` has an entry for each key and one more, all 0, and becomes where each key starts.
    """
    for place in range(total):
        key = load("i32", keys, place) + 1
        store("i64", starts, key, load("i64", starts, key) + 1)
    for key in range(many):
        store("i64", starts, key + 1, load("i64", starts, key + 1) + load("i64", starts, key))
    for place in range(total):
        key = load("i32", keys, place)
        here = load("i64", starts, key)
        store("i64", starts, key, here + 1)
        store("i32", order, here, place)
        store("i32", at, place, here)
    for key in range(many, 0, -1):
        store("i64", starts, key, load("i64", starts, key - 1))
    store("i64", starts, 0, 0)
    return 0


def deal(slots: int, count: int, keys: int, starts: int, rows: int) -> int:
    """Sort a run's rows by the run that their places were given to, stably.

    `starts` says where the rows of each begin in `rows`, and is moved on to where they end. If
    `rows` is 0 they are only counted.
    """
    for i in range(count):
        slot = load("i32", slots, i)
        to = load("i32", keys, slot ^ (slot >> 63)) >> 1
        here = load("i64", starts, to)
        store("i64", starts, to, here + 1)
        if rows:
            store("i32", rows, here, i)
    return 0


def pick(
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
    """Find the rows of a run whose places were given to the run `to`; returns how many.

    Writes their positions in the run to `rows`, and their slots, counted among the places of `to`,
    to `slots_there`. `alone` is how many places no other run has, which come first; 0 if `to` is
    another run.
    """
    single, shared = 0, alone
    for i in range(count):
        slot = load("i32", slots, i)
        first = slot >> 63
        place = slot ^ first
        key = load("i32", keys, place)
        if key >> 1 != to:
            continue
        here = shared if key & 1 else single
        store("i32", rows, here, i)
        there = load("i32", at, place) - start
        store("i32", slots_there, here, there ^ first)
        shared += key & 1
        single += 1 - (key & 1)
    return shared


def scatter(out: int, height: int, places: int, values: int, size: int, count: int) -> int:
    """Copy rows of `size` bytes to their places; returns how many have none of `height`."""
    outside = 0
    for i in range(count):
        place = load("i32", places, i)
        if place < 0 or place >= height:
            outside += 1
            continue
        if i + _PLACES_AHEAD < count:
            prefetch(out + load("i32", places, i + _PLACES_AHEAD) * size, min(size, 1024))
        copy(out + place * size, values + i * size, size)
    return outside


# Values ---------------------------------------------------------------------------------------
# `type` is what they are computed in. The inner loop runs over the numbers of a row, in order, so
# it vectorises and never reorders additions.


def reduce(type: str) -> Callable[..., int]:
    """Reduce segment s = order[starts[s] : starts[s + 1]] of `values` to row s - first of `out`.

    `order` or `starts` may be 0: the identity, and segments of one row. Rows of `values` lie
    `stride` bytes apart, those of `out` `size`. Sums are kept as `total`: where that is not `dst`,
    `scratch` holds one row of them. If `which` is not 0, for the segments which[first], ...,
    which[last - 1] (int32): those that are not from 0 to `many` - 1 are left out. Returns how many.
    """

    def loop(
        src: int,
        dst: int,
        total: int,
        op: int,
        width: int,
        values: int,
        stride: int,
        order: int,
        starts: int,
        which: int,
        many: int,
        first: int,
        last: int,
        out: int,
        size: int,
        scratch: int,
    ) -> int:
        stop = load("i64", starts, last) if starts and not which else last
        ahead = max(1, _AHEAD // max(1, stride))
        nearest = min(stride, _AHEAD)
        outside = 0
        for at in range(first, last):
            segment = load("i32", which, at) if which else at
            if which and (segment < 0 or segment >= many):
                outside += 1
                continue
            begin, end = segment, segment + 1
            if starts:
                begin, end = load("i64", starts, segment), load("i64", starts, segment + 1)
            row = values + stride * (load("i64", order, begin) if order else begin)
            target = out + (at - first) * size
            if width == 1:
                number = load_as(type, src, row, 0)
                for place in range(begin + 1, end):
                    other = values + stride * (load("i64", order, place) if order else place)
                    number = apply(op, number, load_as(type, src, other, 0))
                store_as(type, dst, target, 0, number)
                continue
            if order and (at if which else begin) + ahead < stop:
                later = begin + ahead
                if which:
                    later = min(max(load("i32", which, at + ahead), 0), many - 1)
                    later = load("i64", starts, later) if starts else later
                prefetch(values + stride * load("i64", order, later), nearest)
            if end == begin + 1:
                for j in range(width):
                    store_as(type, dst, target, j, load_as(type, src, row, j))
                continue
            sums = target if total == dst else scratch
            known = end if which else stop  # up to there rows are read in this order
            if order and begin + 1 + ahead < known:
                prefetch(values + stride * load("i64", order, begin + 1 + ahead), nearest)
            other = values + stride * (load("i64", order, begin + 1) if order else begin + 1)
            for j in range(width):
                both = apply(op, load_as(type, src, row, j), load_as(type, src, other, j))
                store_as(type, total, sums, j, both)
            for place in range(begin + 2, end):
                if order and place + ahead < known:
                    prefetch(values + stride * load("i64", order, place + ahead), nearest)
                other = values + stride * (load("i64", order, place) if order else place)
                for j in range(width):
                    both = apply(op, load_as(type, total, sums, j), load_as(type, src, other, j))
                    store_as(type, total, sums, j, both)
            if total != dst:
                for j in range(width):
                    store_as(type, dst, target, j, load_as(type, total, sums, j))
        return outside

    return loop


def combine(type: str) -> Callable[..., int]:
    """Copy or add rows `first` to `last` of `values` to the places that `slots` says.

    Returns how many rows were left out, because their place is not one of `height` rows.
    """

    def loop(
        src: int,
        dst: int,
        op: int,
        width: int,
        out: int,
        height: int,
        base: int,
        slots: int,
        values: int,
        stride: int,
        first: int,
        last: int,
        size: int,
    ) -> int:
        outside = 0
        for i in range(first, last):
            slot = load("i32", slots, i)
            place = (slot ^ (slot >> 63)) - base
            if place < 0 or place >= height:
                outside += 1
                continue
            target, row = out + place * size, values + i * stride
            if width == 1:  # without a branch: who is first is anybody's guess
                number = load_as(type, src, row, 0)
                both = apply(op, load_as(type, dst, target, 0), number)
                store_as(type, dst, target, 0, number if slot < 0 else both)
            elif slot < 0:
                for j in range(width):
                    store_as(type, dst, target, j, load_as(type, src, row, j))
            else:
                for j in range(width):
                    both = apply(op, load_as(type, dst, target, j), load_as(type, src, row, j))
                    store_as(type, dst, target, j, both)
        return outside

    return loop


# What is compiled -----------------------------------------------------------------------------

_BY_KIND = (scan, sort, unpack, ends, mark, place, pair, encode, decode)
_PLAIN = (compose, weigh, aim, choose, arrange, deal, pick, scatter)

LOOPS: dict[str, Callable[..., int]] = (
    {loop.__name__: loop for loop in (*_BY_KIND, *_PLAIN)}
    | {
        f"{make.__name__}_{type}": make(type)
        for make in (reduce, combine)
        for type in ("f32", "f64", "i64")
    }
    | SHARED
)
"""Each loop by the name that it has in `INSTANCES`."""

_SUMS = (
    *(("f32", dst) for dst in ("f32", "f16", "bf16")),  # also as they are sent
    *((src, dst) for src in ("f16", "bf16") for dst in (src, "f32", "f64")),
    ("f64", "f64"),
)
VALUES: tuple[tuple[str, str, str], ...] = (
    *((src, dst, "sum") for src, dst in _SUMS),
    *((kind, kind, op) for kind in ("f32", "f64") for op in ("min", "max")),
    *((kind, kind, "sum") for kind in ("i32", "i64")),
)
"""Of which kinds rows are reduced and combined by machine code, into which, and how: what is
often asked for. Each takes a tenth of a second to compile; the reference serves all others."""


def _instances() -> dict[str, tuple[str, tuple[int, ...]]]:
    made: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{loop.__name__}.{kind}": (loop.__name__, (KINDS[kind],))
        for loop in _BY_KIND
        for kind in ("i32", "i64")
    }
    made |= {name: (name, ()) for name in (*(loop.__name__ for loop in _PLAIN), *SHARED)}
    for src, dst, op in VALUES:
        type = "f64" if dst == "f64" else "i64" if dst[0] == "i" else "f32"
        total = "f32" if dst in ("f16", "bf16") else dst
        codes = tuple(KINDS[kind] for kind in (src, dst, total))
        key = f"{src}.{dst}.{op}"
        made[f"reduce.{key}"] = f"reduce_{type}", (*codes, CODES[op])
        made[f"combine.{key}"] = f"combine_{type}", (*codes[:2], CODES[op])
        made[f"reduce.{key}.1"] = f"reduce_{type}", (*codes, CODES[op], 1)
        made[f"combine.{key}.1"] = f"combine_{type}", (*codes[:2], CODES[op], 1)
    return made


INSTANCES = _instances()
"""Of each instance the loop that it is of, and the constants that are its first arguments."""
