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
from typing import NamedTuple

import torch
from torch import Tensor

from . import pool
from .jit import Loops
from .ops import Op
from .reference import Distinct, Union, check_sorted

KINDS = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""What lies in memory, as instances of loops name it."""
_SUMS = {
    "f32": ("f32", "f16", "bf16"),  # also as they are sent
    "f16": ("f16", "f32", "f64"),
    "bf16": ("bf16", "f32", "f64"),
    "f64": ("f64",),
    "i32": ("i32",),
    "i64": ("i64",),
}
"""Of which kinds rows are summed by machine code, into which; `reference` serves all others."""
_DIGIT = 11  # bits that one pass of the sort looks at; its counts then fit the first cache
_SMALL = 1 << 16  # words of bitmap that stay in the cache
_MOST = 1 << 25  # words of bitmap whose bits have numbers that fit an int32
_KEPT = 1 << 22  # words of workspace that a thread keeps


# Sorting --------------------------------------------------------------------------------------


def distinct(code: Loops, indices: Tensor) -> Distinct | None:
    """See `weft.kernels.distinct`."""
    count, kind = indices.numel(), KINDS[indices.dtype]
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
    loop = code[f"scan.{KINDS[indices.dtype]}"]
    loop(indices.data_ptr(), indices.numel(), found.buffer_info()[0])
    return found


def ascends(code: Loops, indices: Tensor, last: int) -> bool:
    """See `weft.kernels.ascends`."""
    loop = code[f"ascends.{KINDS[indices.dtype]}"]
    return bool(loop(indices.data_ptr(), indices.numel(), last))


_local = threading.local()


def _workspace(words: int) -> Tensor:
    """Int64 memory for this thread until it asks again, so pages are not fresh each time."""
    kept: Tensor | None = getattr(_local, "workspace", None)
    if kept is None or kept.numel() < words:
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
    memory = torch.empty(total, dtype=torch.int32)
    slots = list(memory.split_with_sizes(lengths))
    if total == 0:
        return Union(runs[0].new_empty(0), slots)
    found, table = array("q", bytes(16)), array("q")
    slots_at = memory.data_ptr()
    for run, length in zip(runs, lengths, strict=True):
        table.extend((run.data_ptr(), length, slots_at))
        slots_at += 4 * length
    kind = KINDS[runs[0].dtype]
    code[f"ends.{kind}"](table.buffer_info()[0], len(runs), found.buffer_info()[0])
    low, high = found
    if not is_dense((high - low) // 64, total, len(runs)):
        return Union(_in_pairs(code, runs, slots), slots)
    words = max(0, high - low) // 64 + 1
    bits, ranks = torch.empty(words, dtype=torch.int64), torch.empty(words, dtype=torch.int32)
    given = table.buffer_info()[0], len(runs), low, words, bits.data_ptr()
    united = code[f"mark.{kind}"](*given)
    if united < 0:
        check_sorted(runs)
        raise ValueError("indices changed while they were being united: wait for their writer")
    indices = runs[0].new_empty(united)
    code[f"place.{kind}"](*given, ranks.data_ptr(), indices.data_ptr(), united)
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
    count = code[f"pair.{KINDS[left.dtype]}"](
        *(left.data_ptr(), left.numel(), right.data_ptr(), right.numel()),
        *(out.data_ptr(), left_slots.data_ptr(), right_slots.data_ptr()),
    )
    for some, outer in ((slots[:half], left_slots), (slots[half:], right_slots)):
        for slot in some if len(some) > 1 else ():
            code["compose"](slot.data_ptr(), slot.numel(), outer.data_ptr(), outer.numel())
    return out[:count]


def _side(code: Loops, runs: Sequence[Tensor], slots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One side of a pair, and where its slots go: for a single run where they belong."""
    if len(runs) == 1:
        return runs[0], slots[0]
    union = _in_pairs(code, runs, slots)
    return union, torch.empty(union.numel(), dtype=torch.int32)


# Who sums what --------------------------------------------------------------------------------


class Shares(NamedTuple):
    """The places of a union shared out: each is given to one of the runs that have it.

    Attributes:
        groups: int32 `[U]`: twice the run that a place was given to, plus 1 if several runs have
            it.
        order: int32 `[U]`, the places by group: first those that run 0 has alone, then the others
            given to it, then run 1's, and so on; ascending in each group.
        positions: int32 `[U]`: where in `order` each place stands.
        starts: where in `order` each group starts, and its end: twice the number of runs, and one.
    """

    groups: Tensor
    order: Tensor
    positions: Tensor
    starts: list[int]

    def of(self, run: int) -> Tensor:
        """The places given to a run, those first that it has alone."""
        return self.order[self.starts[2 * run] : self.starts[2 * run + 2]]

    def count(self, run: int) -> int:
        """How many places were given to a run."""
        return self.starts[2 * run + 2] - self.starts[2 * run]

    def alone(self, run: int) -> int:
        """How many places a run has alone."""
        return self.starts[2 * run + 1] - self.starts[2 * run]


class Picked(NamedTuple):
    """The rows of one run whose places were given to some run, in the order of `Shares.of`.

    Attributes:
        rows: int32: their positions in their run.
        slots: int32: their places among those given, counted from 0; as `~place` where no earlier
            run has it.
    """

    rows: Tensor
    slots: Tensor


def shares(code: Loops, slots: Sequence[Tensor], total: int) -> Shares:
    """See `weft.kernels.shares`."""
    table = array("q")
    for slot in slots:
        table.extend((0, slot.numel(), slot.data_ptr()))
    groups, order, positions = torch.empty(3, total, dtype=torch.int32)
    starts = torch.empty(2 * len(slots) + 1, dtype=torch.int64)
    code["share"](
        *(table.buffer_info()[0], len(slots), total),
        *(groups.data_ptr(), starts.data_ptr(), order.data_ptr(), positions.data_ptr()),
    )
    return Shares(groups, order, positions, starts.tolist())


def pick(code: Loops, slots: Tensor, shares: Shares, run: int, to: int) -> Picked:
    """See `weft.kernels.pick`."""
    rows, slots_of_rows = torch.empty(2, min(len(slots), shares.count(to)), dtype=torch.int32)
    count = code["pick"](
        *(slots.data_ptr(), len(slots)),
        *(shares.groups.data_ptr(), shares.positions.data_ptr(), len(shares.groups)),
        *(to, shares.starts[2 * to], shares.alone(to) if run == to else 0),
        *(rows.data_ptr(), slots_of_rows.data_ptr()),
    )
    return Picked(rows[:count], slots_of_rows[:count])


# Values ---------------------------------------------------------------------------------------


@functools.cache
def _kinds(src: torch.dtype, dst: torch.dtype, op: str) -> tuple[str, str, str, str] | None:
    """What the loops for such rows are named by: kinds of values, result and sums; operation."""
    kind, goal = KINDS.get(src, ""), KINDS.get(dst, "")
    if op in ("sum", "avg") and goal in _SUMS.get(kind, ()):
        return kind, goal, "f32" if dst.itemsize == 2 else goal, "sum"
    if op in ("min", "max") and kind == goal and kind in ("f32", "f64"):
        return kind, goal, goal, op
    return None


def reduce(
    code: Loops, values: Tensor, distinct: Distinct, op: Op, out: Tensor, rows: Tensor | None = None
) -> bool:
    """See `weft.kernels.reduce`, and of some `rows` `reduce_some`."""
    kinds = _kinds(values.dtype, out.dtype, op.name)
    if kinds is None or not (op.builtin and out.is_contiguous()):
        return False
    src, dst, total, name = kinds
    width = math.prod(values.shape[1:])
    of = "numbers" if width == 1 else "rows"
    order, starts = distinct.order, distinct.starts
    if order is None:
        order = torch.arange(len(values))
    if starts is None:
        loop = code[f"take.{of}.{src}.{dst}"]
        order = order if rows is None else order.index_select(0, rows)
    else:
        loop = code[f"reduce.{of}.{src}.{dst}.{total}.{name}"]
        begins, ends = starts[:-1], starts[1:]
        if rows is not None:
            begins, ends = begins.index_select(0, rows), ends.index_select(0, rows)
        begins_at, ends_at = begins.data_ptr(), ends.data_ptr()
    if loop is None:
        return False
    values, stride = _rows(values, width)
    given = values.data_ptr(), stride
    order_at, last, size = order.data_ptr(), order.numel(), width * out.itemsize
    out_at = out.data_ptr()

    def take(first: int, stop: int) -> None:
        loop(*given, order_at + 8 * first, stop - first, width, out_at + size * first)

    def add(first: int, stop: int) -> None:
        target = out_at + size * first
        sums = target, size
        if total != dst:  # in one row, which is rounded when all is added
            scratch = torch.empty(width, dtype=torch.float32)
            sums = scratch.data_ptr(), 0
        segments = begins_at + 8 * first, ends_at + 8 * first, stop - first
        loop(*given, order_at, last, *segments, width, target, *sums)

    part = take if starts is None else add
    pool.run(part, out.shape[0], 2 * out.nbytes)
    return True


def combine(
    code: Loops,
    out: Tensor,
    slots: Sequence[Tensor],
    values: Sequence[Tensor],
    op: Op,
    base: int,
) -> bool:
    """See `weft.kernels.combine_runs`."""
    kinds = _kinds(values[0].dtype, out.dtype, op.name)
    if kinds is None or not (op.builtin and out.is_contiguous()):
        return False
    height, width = out.shape[0], math.prod(out.shape[1:])
    src, dst, _, name = kinds
    loop = code[f"combine.{'numbers' if width == 1 else 'rows'}.{src}.{dst}.{name}"]
    if loop is None:
        return False
    to = out.data_ptr()

    def bring(slots: Tensor, values: Tensor) -> None:
        slots = slots.contiguous()
        values, stride = _rows(values, width)
        count, slots_at, values_at = values.shape[0], slots.data_ptr(), values.data_ptr()

        def part(first: int, stop: int) -> int:
            some = slots_at + 4 * first, values_at + stride * first, stride, stop - first
            outside: int = loop(to, height, base, *some, width)
            return outside

        outside = sum(pool.run(part, count, 3 * count * stride))
        if outside:
            raise IndexError(
                f"{outside} of {count} rows belong outside of places {base} to "
                f"{base + height - 1}: pass the slots of those places only"
            )

    for of_run in zip(slots, values, strict=True):  # in their order
        bring(*of_run)
    return True


def _rows(values: Tensor, width: int) -> tuple[Tensor, int]:
    """The values with rows that are contiguous each, and bytes from row to row."""
    values = values.resolve_neg()
    stride = width
    if not values.is_contiguous():
        if _rows_are_contiguous(values):
            stride = values.stride(0)
        else:
            values = values.contiguous()
    return values, stride * values.itemsize


def _rows_are_contiguous(values: Tensor) -> bool:
    expected = 1
    for length, stride in zip(values.shape[:0:-1], values.stride()[:0:-1], strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
