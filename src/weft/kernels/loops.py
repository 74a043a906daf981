"""The compiled loops: of meetings, over indices, index codes, who sums what, and values.

Each takes addresses and counts. What comes before these, as `index`, says what lies at an address,
or how two numbers are combined: `jit` compiles an instance of the loop for each. `array` makes an
array of an address. Who calls them has checked what they are given: see `indices`, `values`
and `codec`.
Importing this imports Numba.

Where an index could be negative for all that Numba knows, it is made `uint64`: else each is asked
for its sign.

Sources: least-significant-digit radix sort (Knuth, TAOCP 3, 5.2.5); ranks in a bitmap by population
counts (Jacobson, "Space-efficient static trees and graphs", FOCS 1989); fractions by multiplication
with the golden ratio (Knuth, TAOCP 3, 6.4); Golomb-Rice codes (see `codec`).
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.extending import register_jitable

from .page import BEGUN, DEPTH, ENTRIES, ENTRY, READ, ROOM
from .words import (
    WORD,
    at,
    count_ones,
    give_way,
    load_shared,
    lowest_one,
    narrow,
    prefetch,
    store_shared,
    widen,
)

_GOLDEN = 2654435769  # 2**32 divided by the golden ratio
_BLOCK = 256  # as in `codec`
_WIDEST = 52  # as in `codec`: the greatest Rice parameter
_AHEAD = 4096  # bytes of rows before a row at which it is asked for,
_BEGINNING = 256  # and how much of it: what is behind that the processor foresees
_LINE = 64  # bytes of a line of the cache


@register_jitable
def array(address, shape, kind):
    """The array of this kind that lies there."""
    return carray(at(address), shape, kind)


@register_jitable
def ints(address, shape):
    return array(address, shape, np.int32)


@register_jitable
def longs(address, shape):
    return array(address, shape, np.int64)


@register_jitable
def word_at(address):
    """The word there, which need not be aligned."""
    return array(address, 1, WORD)[0]


@register_jitable
def row_of(rows, stride, number, width, kind):
    """A row of those that lie so many bytes apart."""
    return array(rows + stride * number, width, kind)


@register_jitable
def place_of(slot):
    """The place of a slot (see `union`), whether or not its run is the first to have it."""
    return np.uint32(slot ^ (slot >> 31))


# Meetings -------------------------------------------------------------------------------------
# They store and look at numbers that processes share, and `wire.tcp.meeting` alone calls them: it
# says what they are for, and `page` what lies where. Arrays are private memory of this process:
# what is read of a page is copied there first, and checked by who called.


def look(address):
    """The number there."""
    return load_shared(address)


def put(address, number):
    """Store a number."""
    store_shared(address, number)
    return 0


def put_each(lines, count, word, numbers):
    """Store numbers at this word of so many lines."""
    line, number = longs(lines, count), longs(numbers, count)
    for k in range(count):
        store_shared(line[k] + word, number[k])
    return 0


def reached(lines, count, word, numbers, less, looks):
    """Whether this word of each line is its number less `less`, or more, after so many looks."""
    line, number = longs(lines, count), longs(numbers, count)
    for k in range(count):
        while load_shared(line[k] + word) < number[k] - less:
            if looks <= 0:
                return 0
            looks -= 1
            if looks % 4 == 0:
                give_way()
    return 1


def announce(lines, pages, count, numbers, offset, nbytes, sleeps):
    """Begin a meeting of these numbers, whose message lies there: how many of the peers sleep.

    The entry of each line first, then BEGUN, which peers look at, then the look at who sleeps:
    `sleeps` gets the first number of each page.
    """
    line, number = longs(lines, count), longs(numbers, count)
    page, sleep = longs(pages, count), longs(sleeps, count)
    for k in range(count):
        entry = line[k] + ENTRIES + ENTRY * (number[k] % DEPTH)
        store_shared(entry, offset)
        store_shared(entry + 8, nbytes)
    for k in range(count):
        store_shared(line[k] + BEGUN, number[k])
    sleepers = 0
    for k in range(count):
        sleep[k] = load_shared(page[k])
        sleepers += sleep[k] != 0
    return sleepers


def find(line, number, entry):
    """Whether a peer has begun the meeting of this number; if so, copy its entry.

    -1: it says that it has begun more than it can have.
    """
    ahead = load_shared(line + BEGUN) - number
    if ahead < 0:
        return 0
    if ahead >= DEPTH:
        return -1
    source = line + ENTRIES + ENTRY * (number % DEPTH)
    copy = longs(entry, 2)
    copy[0] = load_shared(source)
    copy[1] = load_shared(source + 8)
    return 1


def confirm(own_line, line, page, number):
    """Store that this peer's message was read; whether the peer sleeps for that."""
    store_shared(own_line + READ, number)
    return load_shared(line + ROOM) and load_shared(page)


def impossible(own_lines, lines, count):
    """The first peer whose line cannot be, by its place, or -1.

    Who reads and writes as it may keeps to: my READ <= its BEGUN <= my READ + DEPTH, and
    my BEGUN - DEPTH <= its READ <= my BEGUN.
    """
    own_line, line = longs(own_lines, count), longs(lines, count)
    for k in range(count):
        ahead = load_shared(line[k] + BEGUN) - load_shared(own_line[k] + READ)
        behind = load_shared(own_line[k] + BEGUN) - load_shared(line[k] + READ)
        if ahead < 0 or ahead > DEPTH or behind < 0 or behind > DEPTH:
            return k
    return -1


# Indices --------------------------------------------------------------------------------------


def scan(index, indices, count, found):
    """How often an index is less than the one before it, how often equal; least; greatest."""
    indices, found = array(indices, count, index), longs(found, 4)
    falls = repeats = 0
    least = greatest = indices[0]
    for i in range(1, count):
        falls += indices[i] < indices[i - 1]
        repeats += indices[i] == indices[i - 1]
        least = min(least, indices[i])
        greatest = max(greatest, indices[i])
    found[0] = falls
    found[1] = repeats
    found[2] = least
    found[3] = greatest
    return 0


def ascends(index, indices, count, last):
    """1 if each index is above the one before it, the first not negative, and none above `last`."""
    indices = array(indices, count, index)
    is_wrong = indices[0] < 0 or indices[count - 1] > last
    for i in range(1, count):
        is_wrong |= indices[i] <= indices[i - 1]
    return np.int64(not is_wrong)


def sort(
    index,
    indices,
    count,
    low,
    high,
    position_bits,
    digit_bits,
    passes,
    target,
    spare,
    counts,
):
    """Sort indices, all of them from `low` to `high`, with their positions.

    Leaves `(index - low) << position_bits | position` in `target`, sorted; `spare` is as large.
    Returns how many different indices there are, or -1 if one is out of that range.
    """
    indices = array(indices, count, index)
    goal, source = longs(target, count), longs(spare, count)
    if passes % 2 == 0:
        goal, source = source, goal
    mask = (1 << digit_bits) - 1
    counts = array(counts, (passes, mask + 1), np.uint32)
    counts[:] = 0
    for i in range(count):
        key = np.int64(indices[i]) - low  # read once, may it change
        if key < 0 or key > high - low:
            return -1
        source[i] = key << position_bits | i
        for digit in range(passes):
            counts[digit, np.uint64((key >> digit * digit_bits) & mask)] += 1
    for digit in range(passes):
        row = counts[digit]
        before = 0
        for bin in range(mask + 1):
            count_here = row[bin]
            row[bin] = before
            before += count_here
        shift = position_bits + digit * digit_bits
        for i in range(np.uint64(count)):
            pair = source[i]
            bin = np.uint64((pair >> shift) & mask)
            position = row[bin]
            row[bin] = position + 1
            goal[position] = pair
        goal, source = source, goal
    different = 1
    for i in range(1, count):
        different += source[i] >> position_bits != source[i - 1] >> position_bits
    return different


def unpack(index, pairs, count, different, position_bits, low, indices, order, starts):
    """Split the pairs that `sort` left: the distinct indices, the order, and where segments start.

    The last of the starts is where all end. They are not written where there are no duplicates.
    """
    pairs, order = longs(pairs, count), longs(order, count)
    indices, starts = array(indices, different, index), longs(starts, different + 1)
    mask = (1 << position_bits) - 1
    if different == count:
        for i in range(count):
            order[i] = pairs[i] & mask
            indices[i] = (pairs[i] >> position_bits) + low
        return 0
    one = np.uint64(1)
    segment = np.uint64(0)
    before = pairs[0] >> position_bits
    starts[0] = 0
    for i in range(np.uint64(count)):
        pair = pairs[i]
        key = pair >> position_bits
        segment += np.uint64(key != before)
        before = key
        order[i] = pair & mask
        indices[segment] = key + low
        starts[segment + one] = i + one  # the last of the segment says it last
    return 0


def ends(index, table, runs, found):
    """The least first and the greatest last index of the runs of a table (see `mark`)."""
    table, found = longs(table, (runs, 3)), longs(found, 2)
    low, high = 2**63 - 1, -(2**63)
    for run in range(runs):
        count = table[run, 1]
        if count:
            indices = array(table[run, 0], count, index)
            low = min(low, indices[0])
            high = max(high, indices[count - 1])
    found[0] = low
    found[1] = high
    return 0


@register_jitable
def slots_of(table, run):
    """The slots of a run of a table (see `mark`)."""
    return ints(table[run, 2], table[run, 1])


def mark(index, table, runs, low, words, bitmap):
    """Set the bit of every index of every run; returns how many bits are set in the end.

    `table` has a row for each run: its address, its length, the address of its slots. A slot
    becomes `~bit` where no earlier run has that index, else `bit`. Bit 0 is the index `low`; there
    are at most 2**31 bits. Returns -1 for an index beyond the bitmap: its run is not sorted.
    """
    table, bitmap = longs(table, (runs, 3)), longs(bitmap, words)
    bitmap[:] = 0
    ones = 0
    for run in range(runs):
        count = table[run, 1]
        indices, slots = array(table[run, 0], count, index), slots_of(table, run)
        for i in range(count):
            bit = np.int64(indices[i]) - low
            word = np.uint64(bit >> 6)
            if word >= np.uint64(words):
                return -1
            bits = bitmap[word]
            first = ((bits >> (bit & 63)) & 1) - 1  # -1 or 0
            slots[i] = bit ^ first
            ones -= first
            bitmap[word] = bits | (1 << (bit & 63))
    return ones


def place(index, table, runs, low, words, bitmap, ranks, out, united):
    """After `mark`: every slot becomes the place of its index, and the united indices go to `out`.

    `ranks` is scratch, int32 per word. Indices are not read again: another thread may have changed
    them.
    """
    table, bitmap, ranks = longs(table, (runs, 3)), longs(bitmap, words), ints(ranks, words)
    out = array(out, united, index)
    before = 0
    for word in range(words):
        ranks[word] = before
        before += count_ones(bitmap[word])
    for run in range(runs):
        slots = slots_of(table, run)
        for i in range(len(slots)):
            first = np.int64(slots[i]) >> 63  # -1 or 0
            bit = slots[i] ^ first
            word = np.uint64(bit >> 6)
            lower = bitmap[word] & ((1 << (bit & 63)) - 1)
            here = ranks[word] + count_ones(lower)
            slots[i] = here ^ first
            out[np.uint64(here)] = bit + low
    return 0


@register_jitable
def append(run, start, slots, out, length):
    """Bring the rest of a run, which no other has, to a union; returns the length of that then."""
    for i in range(start, np.uint64(len(run))):
        out[length] = run[i]
        slots[i] = ~np.int64(length)
        length += np.uint64(1)
    return length


def pair(index, left, left_count, right, right_count, out, left_slots, right_slots):
    """Unite two sorted runs; returns the length of the union. Slots as in `union`."""
    left, right = array(left, left_count, index), array(right, right_count, index)
    left_slots, right_slots = ints(left_slots, left_count), ints(right_slots, right_count)
    out = array(out, left_count + right_count, index)
    i = j = n = np.uint64(0)
    one = np.uint64(1)
    while i < np.uint64(left_count) and j < np.uint64(right_count):
        a, b = left[i], right[j]
        # written at every step, and right when its index is consumed: no branch to guess
        out[n] = min(a, b)
        left_slots[i] = ~np.int64(n)
        right_slots[j] = np.int64(n) if a == b else ~np.int64(n)
        i += np.uint64(a <= b)
        j += np.uint64(b <= a)
        n += one
    n = append(left, i, left_slots, out, n)
    n = append(right, j, right_slots, out, n)
    return np.int64(n)


def compose(slots, count, outer, outer_count):
    """Slots in a part of a union become slots in the whole: `outer` has those of the part."""
    slots, outer = ints(slots, count), ints(outer, outer_count)
    for i in range(count):
        first = slots[i] >> 31  # -1 where the part brings the index first, else 0
        slot = outer[place_of(slots[i])]
        slots[i] = place_of(slot) ^ (first & (slot >> 31))
    return 0


# Index codes ----------------------------------------------------------------------------------
# Remainders are read and written with unaligned words of 64 bits, so one of at most 56 bits never
# takes a second one; the word of unary parts stays in a register, since bits set one by one in
# memory wait for each other.


def encode(index, indices, count, widths, remainders, unary, most):
    """Write the gaps of `count` sorted, unique indices; returns how many words of unary parts.

    `widths` has a byte for each block of gaps. The remainders end with a word of zeros, which is
    the caller's to write: only that much of it may be overwritten. Returns -1 where the unary parts
    take more than `most` words: the widths are of other indices.
    """
    indices, unary = array(indices, count, index), longs(unary, most)
    widths = array(widths, (count + _BLOCK - 2) // _BLOCK, np.uint8)
    before = np.int64(indices[0])
    some = filled = 0  # remainders not yet whole bytes
    word = bit = words = 0
    for start in range(1, count, _BLOCK):
        width = np.int64(widths[start // _BLOCK])
        mask = (1 << width) - 1
        for i in range(start, min(start + _BLOCK, count)):
            gap = indices[i] - before - 1
            before += gap + 1
            some |= (gap & mask) << filled
            word_at(remainders).bits = some
            filled += width
            remainders += filled >> 3
            some >>= filled & ~7
            filled &= 7
            bit += gap >> width
            while bit >= 64:
                if words + 1 >= most:
                    return -1
                unary[np.uint64(words)] = word
                words += 1
                word = 0
                bit -= 64
            word |= 1 << bit
            bit += 1
    unary[np.uint64(words)] = word
    return words + 1


def decode(index, first, last, count, widths, remainders, unary, words, out):
    """Read back what `encode` wrote: `count` indices from `first` on, none of them beyond `last`.

    Reads no more than `words` of unary parts, and of remainders what lies before those. Returns 0,
    or -1 where that is no list that was written so.
    """
    bits = 8 * (unary - remainders) - 64
    unary, out = longs(unary, words), array(out, count, index)
    widths = array(widths, (count + _BLOCK - 2) // _BLOCK, np.uint8)
    out[0] = first
    current = first
    read = 0  # bits of remainders
    base, before = 0, -1  # bits before this word of unary parts; the bit of the part before
    word = unary[0]
    for start in range(1, count, _BLOCK):
        width = np.int64(widths[start // _BLOCK])
        stop = min(start + _BLOCK, count)
        if width > _WIDEST or read + width * (stop - start) > bits:  # it may be the peer's memory
            return -1
        mask = (1 << width) - 1
        for i in range(start, stop):
            while word == 0:
                base += 64
                if base >> 6 >= words:
                    return -1
                word = unary[np.uint64(base >> 6)]
            bit = base + lowest_one(word)
            word &= word - 1
            quotient = bit - before - 1
            before = bit
            if quotient > (last - current) >> width:  # before it is shifted, and overflows
                return -1
            rest = (word_at(remainders + (read >> 3)).bits >> (read & 7)) & mask
            read += width
            current += ((quotient << width) | rest) + 1
            if current > last:
                return -1
            out[i] = current
    return 0


# Who sums what --------------------------------------------------------------------------------
# Each place of a union is given to one of the runs that have it. The places of a run are two
# *groups*: number `2 * run`, those that it has alone, then those that other runs have, too.


def share(table, runs, total, groups, starts, order, positions):
    """Give each place to a run that has it, and sort the places by group, stably.

    `table` as of `mark`. `order` gets the places, `positions` where in `order` each place stands,
    `starts` where each group starts, and the end of the last.
    """
    table, groups = longs(table, (runs, 3)), ints(groups, total)
    order, positions = ints(order, total), ints(positions, total)
    starts = longs(starts, 2 * runs + 1)
    # `positions` has first how many runs have a place, then how many of these it still passes over
    passed = positions
    passed[:] = 0
    for run in range(runs):
        slots = slots_of(table, run)
        for i in range(len(slots)):
            passed[place_of(slots[i])] += 1
    fraction = 0
    for place in range(total):
        several = passed[place] > 1
        groups[place] = several
        passed[place] = fraction * np.int64(passed[place]) >> 32 if several else 0
        if several:
            fraction = (fraction + _GOLDEN) & 0xFFFFFFFF
    for run in range(runs):
        slots = slots_of(table, run)
        for i in range(len(slots)):
            place = place_of(slots[i])
            passes_over = passed[place]
            passed[place] = passes_over - 1
            if passes_over == 0:
                is_shared = groups[place]  # as it said so far
                groups[place] = 2 * run + is_shared
    starts[:] = 0
    for place in range(total):
        starts[np.uint32(groups[place])] += 1
    for group in range(2 * runs):  # where each ends, first
        starts[group + 1] += starts[group]
    for left in range(total, 0, -1):  # backwards, each moves from there to its start
        place = np.uint64(left - 1)
        group = np.uint32(groups[place])
        position = starts[group] - 1
        starts[group] = position
        positions[place] = position
        order[np.uint64(position)] = place
    return 0


def pick(slots, count, groups, positions, total, run, start, alone, rows, slots_of_rows):
    """Find the rows of some run whose places were given to `run`; returns how many.

    Writes their positions in their run to `rows`, and their slots, counted among the places of
    `run`, which begin at `start`, to `slots_of_rows`. The first `alone` are those of places that
    only this run has.
    """
    slots, groups, positions = ints(slots, count), ints(groups, total), ints(positions, total)
    rows, slots_of_rows = ints(rows, count), ints(slots_of_rows, count)
    single, shared = 0, alone
    for i in range(count):
        place = place_of(slots[i])
        is_shared = groups[place] - 2 * run
        if not 0 <= is_shared <= 1:
            continue
        goal = np.uint64(shared if is_shared else single)
        rows[goal] = i
        slots_of_rows[goal] = (positions[place] - start) ^ (slots[i] >> 31)
        shared += is_shared
        single += 1 - is_shared
    return shared


# Values ---------------------------------------------------------------------------------------
# The inner loop runs over the numbers of a row, in order, so it vectorises and never reorders
# additions. Of rows of one number (`of` is 1, else 0) it is none: so they took two to six times as
# long.


@register_jitable
def add(a, b):
    return a + b


@register_jitable
def least(a, b):
    """IEEE 754-2019's: NaN wins, and -0.0 is less than 0.0."""
    if a != a or b != b:
        return a + b
    return b if b < a or (a == b and np.signbit(b)) else a


@register_jitable
def greatest(a, b):
    if a != a or b != b:
        return a + b
    return b if b > a or (a == b and np.signbit(a)) else a


@register_jitable
def rows_ahead(stride):
    """How many rows before a row it is asked for."""
    return np.uint64(max(1, _AHEAD // max(1, stride)))


@register_jitable
def fetch(values, stride, order, place):
    """Ask for the beginning of the row at a place of `order`, if it has that: it is needed soon."""
    if place < np.uint64(len(order)):
        line = values + stride * order[place]
        end = line + min(stride, _BEGINNING)
        while line < end:  # a range would be counted first
            prefetch(line)
            line += _LINE


def take(of, src, dst, values, stride, order, count, width, out):
    """Copy the rows order[0], order[1], ... of `values` to those of `out`.

    Rows of `values` lie `stride` bytes apart.
    """
    width = of or width
    order, out = longs(order, count), array(out, (count, width), dst)
    ahead = rows_ahead(stride)
    for i in range(count):
        if not of:
            fetch(values, stride, order, np.uint64(i) + ahead)
        row = row_of(values, stride, order[i], width, src)
        for j in range(width):
            out[i, j] = narrow(widen(row[j]), dst)
    return 0


def reduce(
    of,
    src,
    dst,
    total,
    combine,
    values,
    stride,
    order,
    last,
    begins,
    ends,
    count,
    width,
    out,
    sums,
    sums_size,
):
    """Reduce the rows order[begins[s]], ..., order[ends[s] - 1] to row s of `out`, for all s.

    Rows of `values` lie `stride` bytes apart; `order` has `last`. Sums are kept as `total`, in
    `sums`: the rows of `out` if this is what `out` has, else one row for all; those of one number
    in a register.
    """
    width = of or width
    order, begins, ends = longs(order, last), longs(begins, count), longs(ends, count)
    out = array(out, (count, width), dst)
    ahead = rows_ahead(stride)
    for segment in range(count):
        begin, end = np.uint64(begins[segment]), np.uint64(ends[segment])
        target = out[segment]
        row = row_of(values, stride, order[begin], width, src)
        if of:
            number = narrow(widen(row[0]), total)
            for place in range(begin + np.uint64(1), end):
                other = row_of(values, stride, order[place], width, src)
                number = narrow(combine(number, widen(other[0])), total)
            target[0] = narrow(number, dst)
            continue
        fetch(values, stride, order, begin + ahead)
        if end == begin + np.uint64(1):
            for j in range(width):
                target[j] = narrow(widen(row[j]), dst)
            continue
        sum = row_of(sums, sums_size, segment, width, total)
        for j in range(width):
            sum[j] = narrow(widen(row[j]), total)
        for place in range(begin + np.uint64(1), end):
            fetch(values, stride, order, place + ahead)
            other = row_of(values, stride, order[place], width, src)
            for j in range(width):
                sum[j] = combine(sum[j], widen(other[j]))
        if sums_size == 0:
            for j in range(width):
                target[j] = narrow(sum[j], dst)
    return 0


def combine(of, src, dst, combine, out, height, base, slots, values, stride, count, width):
    """Copy or add rows to the places that their slots say.

    Returns how many rows were left out, because their place is not one of `height` from `base` on.
    """
    width = of or width
    out, slots, outside = array(out, (height, width), dst), ints(slots, count), 0
    for i in range(count):
        place = np.uint64(np.int64(place_of(slots[i])) - base)
        if place >= np.uint64(height):
            outside += 1
            continue
        target = out[place]
        row = row_of(values, stride, i, width, src)
        if of:  # without a branch: who is first is anybody's guess
            number = widen(row[0])
            both = combine(widen(target[0]), number)
            target[0] = narrow(number if slots[i] < 0 else both, dst)
        elif slots[i] < 0:
            for j in range(width):
                target[j] = narrow(widen(row[j]), dst)
        else:
            for j in range(width):
                target[j] = narrow(combine(widen(target[j]), widen(row[j])), dst)
    return outside


CONSTANTS = {
    "numbers": 1,
    "rows": 0,
    "i32": np.int32,
    "i64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.int16,
    "bf16": np.uint16,
    "sum": add,
    "min": least,
    "max": greatest,
}
"""What a part of an instance's name stands for; half precision lies in memory as bits. Rows of one
number have a known width."""
