"""The kernels on the CPU, by machine code: tensors become addresses, large work goes to threads.

Each function takes the machine code (`jit`) first. `distinct` and `union` return None, `reduce` and
`combine` False, if there is no loop for their arguments: then nothing is done yet, and `reference`
serves. The loops are in `loops`.
"""

from __future__ import annotations

import functools
import math
import threading
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from . import pool
from .jit import Loop, Loops
from .ops import OPS, Op
from .reference import Distinct, Picked, Shares, Union, name_unsorted

_KINDS = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_DIGIT = 11  # bits that one pass of the sort looks at; its counts then fit the first cache
_SMALL = 1 << 16  # words of bitmap that stay in the cache
_MOST = 1 << 25  # words of bitmap whose bits have numbers that fit an int32
_KEPT = 1 << 22  # words of workspace that a thread keeps


def kind_of(dtype: torch.dtype) -> str:
    """What lies in memory, as `loops` name it."""
    return _KINDS[dtype]


# Sorting --------------------------------------------------------------------------------------


def distinct(code: Loops, indices: Tensor) -> Distinct | None:
    """See `weft.kernels.distinct`."""
    count, kind = indices.numel(), kind_of(indices.dtype)
    if count >= 2**31:
        return None
    if count < 2:
        return Distinct(indices, None, None)
    falls, repeats, low, high = scan(code, indices)
    if falls == 0:
        return None if repeats else Distinct(indices, None, None)
    position_bits = (count - 1).bit_length()
    if position_bits + (high - low).bit_length() > 63:
        return None  # hashes as ids: an index and its position do not fit one word
    key_bits = max(1, (high - low).bit_length())
    passes = -(-key_bits // _DIGIT)
    digit_bits = -(-key_bits // passes)
    counts = torch.empty(passes << digit_bits, dtype=torch.int32)
    pairs, order = _workspace(count), torch.empty(count, dtype=torch.int64)
    digits = position_bits, digit_bits, passes
    addresses = pairs.data_ptr(), order.data_ptr(), counts.data_ptr()
    different = code[f"sort.{kind}"](indices.data_ptr(), count, low, high, *digits, *addresses)
    if different < 0:
        raise ValueError("indices changed while they were being sorted: wait for their writer")
    unique, starts = indices.new_empty(different), None
    if different < count:
        starts = torch.empty(different + 1, dtype=torch.int64)
        starts[different] = count
    code[f"unpack.{kind}"](
        *(pairs.data_ptr(), count, different, position_bits, low),
        *(unique.data_ptr(), order.data_ptr(), 0 if starts is None else starts.data_ptr()),
    )
    return Distinct(unique, order, starts)


def scan(code: Loops, indices: Tensor) -> Sequence[int]:
    """How often an index is below the one before it, how often equal; the least, the greatest."""
    found = array("q", bytes(32))
    loop = code[f"scan.{kind_of(indices.dtype)}"]
    loop(indices.data_ptr(), indices.numel(), found.buffer_info()[0])
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


# Uniting runs ---------------------------------------------------------------------------------


def union(code: Loops, runs: Sequence[Tensor]) -> Union | None:
    """See `weft.kernels.union`."""
    lengths = [run.numel() for run in runs]  # a tensor's len() takes ten times as long
    total = sum(lengths)
    if total >= 2**31:
        return None
    slots = list(torch.split(torch.empty(total, dtype=torch.int32), lengths))
    if total == 0:
        return Union(runs[0].new_empty(0), slots)
    found, table = array("q", bytes(16)), array("q")
    for run, slot in zip(runs, slots, strict=True):
        table.extend((run.data_ptr(), run.numel(), slot.data_ptr()))
    kind = kind_of(runs[0].dtype)
    code[f"ends.{kind}"](table.buffer_info()[0], len(runs), found.buffer_info()[0])
    low, high = found
    if not is_dense((high - low) // 64, total, len(runs)):
        return Union(_in_pairs(code, runs, slots), slots)
    words = max(0, high - low) // 64 + 1
    bits, ranks = torch.empty(words, dtype=torch.int64), torch.empty(words, dtype=torch.int32)
    given = table.buffer_info()[0], len(runs), low, words, bits.data_ptr()
    united = code[f"mark.{kind}"](*given)
    if united < 0:
        name_unsorted(runs)
    indices = runs[0].new_empty(united)
    code[f"place.{kind}"](*given, ranks.data_ptr(), indices.data_ptr())
    return Union(indices, slots)


def is_dense(words: int, total: int, runs: int) -> bool:
    """Whether so large a bitmap is a faster way to unite than pair by pair."""
    if runs == 1 or words >= _MOST:
        return False
    return words <= total or (runs > 2 and words <= min(8 * total, _SMALL))


def _in_pairs(code: Loops, runs: Sequence[Tensor], slots: Sequence[Tensor]) -> Tensor:
    """Unite two and two, then the unions, and so on; the slots are carried along."""
    if len(runs) == 1:
        torch.arange(-1, -runs[0].numel() - 1, -1, dtype=torch.int32, out=slots[0])
        return runs[0].clone()
    half = len(runs) // 2
    left, left_slots = _side(code, runs[:half], slots[:half])
    right, right_slots = _side(code, runs[half:], slots[half:])
    out = left.new_empty(left.numel() + right.numel())
    count = code[f"pair.{kind_of(left.dtype)}"](
        *(left.data_ptr(), left.numel(), right.data_ptr(), right.numel()),
        *(out.data_ptr(), left_slots.data_ptr(), right_slots.data_ptr()),
    )
    for some, outer in ((slots[:half], left_slots), (slots[half:], right_slots)):
        for slot in some if len(some) > 1 else ():
            code["compose"](slot.data_ptr(), slot.numel(), outer.data_ptr())
    return out[:count]


def _side(code: Loops, runs: Sequence[Tensor], slots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One side of a pair, and where its slots go: for a single run where they belong."""
    if len(runs) == 1:
        return runs[0], slots[0]
    union = _in_pairs(code, runs, slots)
    return union, torch.empty(union.numel(), dtype=torch.int32)


# Sharing places out ---------------------------------------------------------------------------


def shares(code: Loops, slots: Sequence[Tensor], total: int, weights: Sequence[int]) -> Shares:
    """See `weft.kernels.shares`."""
    words = torch.zeros(total, dtype=torch.int64)
    keys, order, at = torch.empty(3, total, dtype=torch.int32)
    for slot, weight in zip(slots, weights, strict=True):
        code["weigh"](slot.data_ptr(), len(slot), weight, words.data_ptr())
    code["aim"](words.data_ptr(), total, keys.data_ptr())
    for run, (slot, weight) in enumerate(zip(slots, weights, strict=True)):
        code["choose"](slot.data_ptr(), len(slot), weight, run, words.data_ptr(), keys.data_ptr())
    many = 2 * len(slots)
    starts = torch.zeros(many + 1, dtype=torch.int64)
    code["arrange"](
        keys.data_ptr(), total, many, starts.data_ptr(), order.data_ptr(), at.data_ptr()
    )
    return Shares(keys, order, at, starts.tolist())


def pick(code: Loops, slots: Tensor, shares: Shares, run: int, to: int) -> Picked:
    """See `weft.kernels.pick`."""
    room = min(len(slots), shares.count(to))
    rows, there = torch.empty(2, room, dtype=torch.int32)
    found = code["pick"](
        *(slots.data_ptr(), len(slots), shares.keys.data_ptr(), to),
        *(shares.at.data_ptr(), shares.starts[2 * to], shares.alone(to) if run == to else 0),
        *(rows.data_ptr(), there.data_ptr()),
    )
    return Picked(rows[:found], there[:found])


def deal(code: Loops, slots: Tensor, shares: Shares) -> list[Tensor]:
    """See `weft.kernels.deal`."""
    which = slots.data_ptr(), len(slots), shares.keys.data_ptr()
    counts = torch.zeros(len(shares.starts) // 2, dtype=torch.int64)
    code["deal"](*which, counts.data_ptr(), 0)
    starts = counts.cumsum(0) - counts
    rows = torch.empty(len(slots), dtype=torch.int32)
    code["deal"](*which, starts.data_ptr(), rows.data_ptr())
    return list(torch.split(rows, counts.tolist()))


# Values ---------------------------------------------------------------------------------------


@functools.cache
def _values_key(src: torch.dtype, dst: torch.dtype, name: str) -> str:
    """The part of an instance's name that says kinds and operation."""
    return f"{kind_of(src)}.{kind_of(dst)}.{'sum' if OPS[name].mean else name}"


def _loop(code: Loops, name: str, values: Tensor, out: Tensor, op: Op) -> Loop | None:
    """The loop for these, with the numbers of a row filled in; None if there is none."""
    if not (op.builtin and out.is_contiguous()):
        return None
    key = _values_key(values.dtype, out.dtype, op.name)
    loop, width = code.get(f"{name}.{key}"), math.prod(values.shape[1:])
    if loop is None or width != 1:
        return None if loop is None else functools.partial(loop, width)
    return code[f"{name}.{key}.1"]


def reduce(
    code: Loops, values: Tensor, distinct: Distinct, op: Op, out: Tensor, rows: Tensor | None = None
) -> bool:
    """See `weft.kernels.reduce`; `rows` are contiguous."""
    loop = _loop(code, "reduce", values, out, op)
    if loop is None:
        return False
    values, stride = _rows(values)
    size, wider = out.stride(0) * out.element_size(), out.element_size() == 2
    count, many = out.shape[0], distinct.indices.numel()
    cuts = pool.ranges(count, pool.share(2 * count * size))
    order = 0 if distinct.order is None else distinct.order.data_ptr()
    starts = 0 if distinct.starts is None else distinct.starts.data_ptr()
    from_, to = values.data_ptr(), out.data_ptr()
    chosen = 0 if rows is None else rows.data_ptr()

    def part(start: int, stop: int) -> int:
        sums = torch.empty(out[:1].numel() if wider else 0, dtype=torch.float32)
        target = to + start * size
        return loop(
            *(from_, stride, order, starts, chosen, many, start, stop, target, size),
            sums.data_ptr(),
        )

    if outside := sum(pool.run(part, cuts)):
        raise IndexError(f"{outside} of {count} rows are not among the {many} distinct ones")
    return True


def combine(code: Loops, out: Tensor, slots: Tensor, values: Tensor, op: Op, base: int) -> bool:
    """See `weft.kernels.combine`."""
    loop = _loop(code, "combine", values, out, op)
    if loop is None:
        return False
    values, stride = _rows(values)
    count, height, size = slots.numel(), out.shape[0], out.stride(0) * out.element_size()
    to, where, from_ = out.data_ptr(), slots.data_ptr(), values.data_ptr()

    def part(start: int, stop: int) -> int:
        return loop(to, height, base, where, from_, stride, start, stop, size)

    outside = sum(pool.run(part, pool.ranges(count, pool.share(3 * count * stride))))
    if outside:
        raise IndexError(
            f"{outside} of {count} rows belong outside of places {base} to {base + height - 1}: "
            "pass the slots of those places only"
        )
    return True


def put(code: Loops, out: Tensor, places: Tensor, values: Tensor) -> None:
    """See `weft.kernels.put`; all contiguous."""
    size, count = values.nbytes // len(values), len(values)
    addresses = places.data_ptr(), values.data_ptr()
    if outside := code["scatter"](out.data_ptr(), len(out), *addresses, size, count):
        raise IndexError(
            f"{outside} of {count} rows belong outside of places 0 to {len(out) - 1}: "
            "pass places of the result only"
        )


def _rows(values: Tensor) -> tuple[Tensor, int]:
    """The values with rows that are contiguous each, and bytes from row to row."""
    if values.is_neg() or not (values.is_contiguous() or _rows_are_contiguous(values)):
        values = values.resolve_neg().contiguous()
    several = values.shape[0] > 1
    stride = values.stride(0) if several else math.prod(values.shape[1:])
    return values, stride * values.element_size()


def _rows_are_contiguous(values: Tensor) -> bool:
    expected = 1
    for length, stride in zip(values.shape[:0:-1], values.stride()[:0:-1], strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
