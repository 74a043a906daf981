"""What the compiled loops make of indices: sorting, uniting runs, sampling; see `cpu`."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from . import pool
from .compile import KINDS, Key, Loops, compiler
from .reference import Distinct, Union

__all__ = ["bitmap", "distinct", "index_key", "sketch", "union", "unite_bitmap"]

_DIGIT = 11  # bits that one pass of the sort looks at; its counts then fit the first cache
_SMALL = 1 << 16  # words of bitmap that stay in the cache
_FEW = 1 << 12  # looks at the heads of runs, that cost less than a call for each two of them
_KEPT = 1 << 22  # words of workspace that a thread keeps


def index_key(dtype: torch.dtype) -> Key:
    """The set of loops for indices of this dtype."""
    return ("index", KINDS[dtype])


def distinct(indices: Tensor) -> Distinct | None:
    """See `weft.kernels.distinct`."""
    loops = compiler.loops(index_key(indices.dtype))
    count = indices.numel()
    if loops is None or count >= 2**31:
        return None
    if count < 2:
        return Distinct(indices, None, None)
    falls, repeats, low, high = loops["scan"](indices.data_ptr(), count)
    if falls == 0:
        return _segments(loops, indices, count - repeats)
    position_bits = (count - 1).bit_length()
    if position_bits + (high - low).bit_length() > 63:
        return None  # hashes as ids: an index and its position do not fit one word
    parts = _cut(loops, indices, low, high, pool.share(8 * count))
    pairs, order = _workspace(count), torch.empty(count, dtype=torch.int64)
    found = pool.run(_sort, [(loops, indices, part, pairs, order) for part in parts])
    places = [0, *accumulate(found)]
    total = places.pop()
    unique = indices.new_empty(total)
    starts = None if total == count else _starts(total, count)

    def unpack(part: _Part, different: int, place: int) -> None:
        loops["unpack"](
            pairs.data_ptr() + 8 * part.first,
            part.holds,
            different,
            position_bits,
            part.low,
            part.first,
            unique.data_ptr() + unique.element_size() * place,
            order.data_ptr() + 8 * part.first,
            0 if starts is None else starts.data_ptr() + 8 * place,
        )

    pool.run(unpack, zip(parts, found, places, strict=True))
    return Distinct(unique, order, starts)


def _segments(loops: Loops, indices: Tensor, different: int) -> Distinct:
    """The distinct among sorted indices."""
    count = len(indices)
    if different == count:
        return Distinct(indices, None, None)
    unique, starts = indices.new_empty(different), _starts(different, count)
    loops["segment"](indices.data_ptr(), count, different, unique.data_ptr(), starts.data_ptr())
    return Distinct(unique, None, starts)


def _starts(segments: int, count: int) -> Tensor:
    starts = torch.empty(segments + 1, dtype=torch.int64)
    starts[segments] = count
    return starts


class _Part(NamedTuple):
    """A range of keys, for one thread: where it begins, how wide it is, what lies in it."""

    low: int
    span: int
    first: int
    holds: int


def _cut(loops: Loops, indices: Tensor, low: int, high: int, parts: int) -> list[_Part]:
    """Ranges of keys that hold about as many of the indices each, none of them empty."""
    count = len(indices)
    if parts == 1:
        return [_Part(low, high - low + 1, 0, count)]
    shift = max(0, (high - low).bit_length() - 10)
    counts = torch.zeros(1 + ((high - low) >> shift), dtype=torch.int64)
    loops["histogram"](indices.data_ptr(), count, low, shift, counts.data_ptr())
    below = [0, *counts.cumsum(0).tolist()]
    goals = torch.tensor([count * part // parts for part in range(1, parts)])
    boxes = torch.searchsorted(torch.tensor(below), goals).tolist()
    return [
        _Part(low + (start << shift), (stop - start) << shift, below[start], holds)
        for start, stop in pairwise(sorted({0, *boxes, len(counts)}))
        if (holds := below[stop] - below[start])
    ]


def _sort(loops: Loops, indices: Tensor, part: _Part, pairs: Tensor, order: Tensor) -> int:
    """Leave the part's pairs of index and position sorted; returns how many indices differ."""
    key_bits = max(1, (part.span - 1).bit_length())
    passes = -(-key_bits // _DIGIT)
    digit_bits = -(-key_bits // passes)
    counts = torch.empty(passes << digit_bits, dtype=torch.int32)
    found: int = loops["sort"](
        indices.data_ptr(),
        len(indices),
        part.low,
        part.span,
        part.holds,
        (len(indices) - 1).bit_length(),
        digit_bits,
        passes,
        pairs.data_ptr() + 8 * part.first,
        order.data_ptr() + 8 * part.first,
        counts.data_ptr(),
    )
    if found < 0:
        raise ValueError("indices changed while they were being sorted: wait for their writer")
    return found


_local = threading.local()


def _workspace(words: int) -> Tensor:
    """Int64 memory for this thread until it asks again, so pages are not fresh each time."""
    kept: Tensor | None = getattr(_local, "workspace", None)
    if kept is None or len(kept) < words:
        kept = torch.empty(words, dtype=torch.int64)
        if words <= _KEPT:
            _local.workspace = kept
    return kept[:words]


def union(runs: Sequence[Tensor]) -> Union | None:
    """See `weft.kernels.union`."""
    loops = compiler.loops(index_key(runs[0].dtype))
    lengths = [run.numel() for run in runs]  # a tensor's len() takes ten times as long
    total = sum(lengths)
    if loops is None or total >= 2**31:
        return None
    slots = list(torch.split(torch.empty(total, dtype=torch.int32), lengths))
    if total == 0:
        return Union(runs[0].new_empty(0), slots)
    if len(runs) * total <= _FEW:
        return Union(_at_once(loops, runs, slots, total), slots)
    table = _table(runs, slots)
    low, high = loops["ends"](table.buffer_info()[0], len(runs))
    parts = _key_ranges(runs, slots, low, high, pool.share(12 * total))
    if _dense((high - low) // 64, total, len(runs)):
        return Union(_by_bitmap(loops, parts), slots)
    return Union(_in_pairs(loops, parts), slots)


def _dense(words: int, total: int, runs: int) -> bool:
    """Whether so large a bitmap is a faster way to unite than pair by pair."""
    if runs == 1:
        return False
    return words <= total or (runs > 2 and words <= min(8 * total, _SMALL))


class _Keys(NamedTuple):
    """The pieces of all runs that lie in one range of keys, and their slots."""

    low: int
    high: int
    runs: Sequence[Tensor]
    slots: Sequence[Tensor]


def _key_ranges(
    runs: Sequence[Tensor], slots: Sequence[Tensor], low: int, high: int, parts: int
) -> list[_Keys]:
    if parts == 1:
        return [_Keys(low, high, runs, slots)]
    longest = max(runs, key=len)
    goals = sorted({int(longest[len(longest) * part // parts]) for part in range(1, parts)})
    bounds = torch.tensor(goals, dtype=longest.dtype)
    edges = [[0, *torch.searchsorted(run, bounds).tolist(), len(run)] for run in runs]
    lows, highs = [low, *goals], [*(goal - 1 for goal in goals), high]
    return [
        _Keys(
            lows[part],
            highs[part],
            [run[edge[part] : edge[part + 1]] for run, edge in zip(runs, edges, strict=True)],
            [slot[edge[part] : edge[part + 1]] for slot, edge in zip(slots, edges, strict=True)],
        )
        for part in range(len(lows))
    ]


def _at_once(loops: Loops, runs: Sequence[Tensor], slots: Sequence[Tensor], total: int) -> Tensor:
    """Unite short runs, one index after the other."""
    table = array("q")
    for run, slot in zip(runs, slots, strict=True):
        table.extend((run.data_ptr(), run.numel(), slot.data_ptr(), 0))
    out = torch.empty(total, dtype=runs[0].dtype)
    found: int = loops["several"](table.buffer_info()[0], len(runs), out.data_ptr())
    if found < 0:
        _name_unsorted([_Keys(0, 0, runs, slots)])
    return out[:found]


def _table(runs: Sequence[Tensor], slots: Sequence[Tensor]) -> array[int]:
    table = array("q")
    for run, slot in zip(runs, slots, strict=True):
        table.extend((run.data_ptr(), run.numel(), slot.data_ptr()))
    return table


class _Bitmap(NamedTuple):
    """A bit for every key of a range, and room for the rank of every word."""

    keys: _Keys
    table: array[int]
    bits: Tensor
    ranks: Tensor


def _by_bitmap(loops: Loops, parts: list[_Keys]) -> Tensor:
    """Unite by setting bits; places are counts of the bits below."""
    bitmaps = []
    for part in parts:
        words = max(0, part.high - part.low) // 64 + 1
        bits, ranks = torch.empty(words, dtype=torch.int64), torch.empty(words, dtype=torch.int32)
        bitmaps.append(_Bitmap(part, _table(part.runs, part.slots), bits, ranks))

    def mark(bitmap: _Bitmap) -> int:
        keys, table, bits, _ = bitmap
        found: int = loops["mark"](
            table.buffer_info()[0], len(keys.runs), keys.low, len(bits), bits.data_ptr()
        )
        return found

    found = pool.run(mark, zip(bitmaps))
    if min(found) < 0:
        _name_unsorted(parts)
    places = [0, *accumulate(found)]
    indices = parts[0].runs[0].new_empty(places.pop())

    def place(bitmap: _Bitmap, base: int) -> None:
        keys, table, bits, ranks = bitmap
        loops["place"](
            table.buffer_info()[0],
            len(keys.runs),
            keys.low,
            len(bits),
            bits.data_ptr(),
            ranks.data_ptr(),
            base,
            indices.data_ptr(),
        )

    pool.run(place, zip(bitmaps, places, strict=True))
    return indices


def bitmap(indices: Tensor, places: int) -> Tensor | None:
    """See `weft.kernels.bitmap`."""
    loops = compiler.loops(index_key(indices.dtype))
    if loops is None:
        return None
    bits = torch.empty(-(-places // 64), dtype=torch.int64)
    slots = torch.empty(indices.numel(), dtype=torch.int32)
    table = _table([indices], [slots])
    if loops["mark"](table.buffer_info()[0], 1, 0, len(bits), bits.data_ptr()) < 0:
        raise ValueError(f"an index is not below {places}")
    return bits


def unite_bitmap(bits: Tensor, indices: Tensor) -> Union | None:
    """See `weft.kernels.unite_bitmap`."""
    loops = compiler.loops(index_key(indices.dtype))
    if loops is None:
        return None
    words, address = len(bits), bits.data_ptr()
    united = indices.new_empty(loops["spread"](words, address, 0))
    loops["spread"](words, address, united.data_ptr())
    slots = torch.full((indices.numel(),), -1, dtype=torch.int32)
    ranks = torch.empty(words, dtype=torch.int32)
    table = _table([indices], [slots])
    loops["place"](
        *(table.buffer_info()[0], 1, 0, words, address, ranks.data_ptr(), 0, united.data_ptr())
    )
    return Union(united, [slots])


def _name_unsorted(parts: list[_Keys]) -> None:
    pieces = list(zip(*(part.runs for part in parts), strict=True))
    for number, some in enumerate(pieces):
        run = torch.cat(some)
        if not bool((run[1:] > run[:-1]).all()):
            raise ValueError(f"run {number} of {len(pieces)} is not sorted and unique: sort it")
    raise ValueError("indices changed while they were being united: wait for their writer")


def _in_pairs(loops: Loops, parts: list[_Keys]) -> Tensor:
    """Unite two and two, then the unions, and so on; the slots are carried along."""
    united = pool.run(_tree, [(loops, part.runs, part.slots) for part in parts])
    base = len(united[0])
    for part, indices in zip(parts[1:], united[1:], strict=True):
        for slot in part.slots:
            loops["compose"](slot.data_ptr(), len(slot), 0, base)
        base += len(indices)
    return torch.cat(united)


def _tree(loops: Loops, runs: Sequence[Tensor], slots: Sequence[Tensor]) -> Tensor:
    """The union of the runs, which may be the only run itself."""
    if len(runs) == 1:
        torch.arange(-1, -runs[0].numel() - 1, -1, dtype=torch.int32, out=slots[0])
        return runs[0]
    half = len(runs) // 2
    left, left_slots = _side(loops, runs[:half], slots[:half])
    right, right_slots = _side(loops, runs[half:], slots[half:])
    left_count, right_count = left.numel(), right.numel()
    out = left.new_empty(left_count + right_count)
    count = loops["pair"](
        left.data_ptr(),
        left_count,
        right.data_ptr(),
        right_count,
        out.data_ptr(),
        left_slots.data_ptr(),
        right_slots.data_ptr(),
    )
    for some, outer in ((slots[:half], left_slots), (slots[half:], right_slots)):
        for slot in some if len(some) > 1 else ():
            loops["compose"](slot.data_ptr(), slot.numel(), outer.data_ptr(), 0)
    return out[:count]


def _side(loops: Loops, runs: Sequence[Tensor], slots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One side of a pair, and where its slots go: for a single run where they belong."""
    if len(runs) == 1:
        return runs[0], slots[0]
    union = _tree(loops, runs, slots)
    return union, torch.empty(union.numel(), dtype=torch.int32)


def sketch(indices: Tensor, count: int) -> Tensor | None:
    """See `weft.kernels.sketch`; for more than `count` indices."""
    loops = compiler.loops(index_key(indices.dtype))
    if loops is None:
        return None
    hashes, ids = torch.empty(2, count, dtype=torch.int64)
    loops["smallest"](indices.data_ptr(), len(indices), hashes.data_ptr(), ids.data_ptr(), count)
    sample: Tensor = ids[torch.argsort(hashes)]
    return sample
