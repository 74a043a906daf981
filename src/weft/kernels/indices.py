"""Kernels over indices: which are distinct, ascend, or are in several runs; who sums what.

Machine code (`loops`) serves on the CPU, where there is any; else `reference`. Tensors become
addresses: what is given is checked here.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import jit, reference
from .jit import Loops
from .reference import Distinct, Union

INDICES = {torch.int32: "i32", torch.int64: "i64"}
"""Indices, as instances of loops name them."""
_DIGIT = 11  # bits that one pass of the sort looks at; its counts then fit the first cache
_SMALL = 1 << 16  # words of bitmap that stay in the cache
_MOST = 1 << 25  # words of bitmap whose bits have numbers that fit an int32
_KEPT = 1 << 22  # words of workspace that a thread keeps


# Sorting --------------------------------------------------------------------------------------


def distinct(indices: Tensor) -> Distinct:
    """Sort indices and find the duplicates among them.

    Args:
        indices: 1-D, int32 or int64, in any order.

    Example:
        >>> distinct(torch.tensor([7, 2, 7]))
        Distinct(indices=tensor([2, 7]), order=tensor([1, 0, 2]), starts=tensor([0, 1, 3]), most=0)
    """
    indices = indices.contiguous()
    code, count = jit.loops(), indices.numel()
    if code is None or not indices.is_cpu or count >= 2**31:
        return reference.distinct(indices)
    if count < 2:
        return Distinct(indices, None, None)
    kind = INDICES[indices.dtype]
    found = array("q", bytes(32))
    code[f"scan.{kind}"](indices.data_ptr(), count, found.buffer_info()[0])
    falls, repeats, low, high = found
    if not falls and not repeats:
        return Distinct(indices, None, None)
    position_bits, key_bits = (count - 1).bit_length(), (high - low).bit_length()
    if not falls or position_bits + key_bits > 63:  # hashes: one and its position fit no word
        return reference.distinct(indices)
    passes = -(-key_bits // _DIGIT)
    digit_bits = -(-key_bits // passes)
    counts = torch.empty(passes << digit_bits, dtype=torch.int32)
    pairs, order = _workspace(count), torch.empty(count, dtype=torch.int64)
    different = code[f"sort.{kind}"](
        *(indices.data_ptr(), count, low, high, position_bits, digit_bits, passes),
        *(pairs.data_ptr(), order.data_ptr(), counts.data_ptr()),
    )
    if different < 0:
        raise ValueError("indices changed while they were being sorted: wait for their writer")
    unique, starts = indices.new_empty(different), None
    if different < count:
        starts = torch.empty(different + 1, dtype=torch.int64)
    code[f"unpack.{kind}"](
        *(pairs.data_ptr(), count, different, position_bits, low),
        *(unique.data_ptr(), order.data_ptr(), 0 if starts is None else starts.data_ptr()),
    )
    return Distinct(unique, order, starts)


def ascends(indices: Tensor, last: int) -> bool:
    """Whether each index is above the one before it, the first not negative, and none above `last`.

    Args:
        indices: 1-D, int32 or int64, contiguous.
        last: the greatest that may be.

    Example:
        >>> ascends(torch.tensor([2, 7, 7]), 9)
        False
    """
    if not indices.numel():
        return True
    code = jit.loops()
    if code is None:
        return reference.rises(indices) and int(indices[0]) >= 0 and int(indices[-1]) <= last
    loop = code[f"ascends.{INDICES[indices.dtype]}"]
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


def union(runs: Sequence[Tensor]) -> Union:
    """Unite several runs of indices.

    Args:
        runs: at least one; each 1-D, sorted and unique, maybe empty; all int32 or all int64.

    Raises:
        ValueError: a run is not sorted and unique; this is not always noticed.

    Example:
        >>> found = union([torch.tensor([2, 5]), torch.tensor([1, 5])])
        >>> found.indices
        tensor([1, 2, 5])
        >>> found.slots
        [tensor([-2, -3], dtype=torch.int32), tensor([-1,  2], dtype=torch.int32)]
    """
    runs = [run.contiguous() for run in runs]
    lengths = [run.numel() for run in runs]  # a tensor's len() takes ten times as long
    code, total = jit.loops(), sum(lengths)
    if code is None or not runs[0].is_cpu or total >= 2**31:
        return reference.union(runs)
    if len(runs) == 1:
        return Union(runs[0].clone(), [torch.arange(-1, -total - 1, -1, dtype=torch.int32)])
    slots = list(torch.empty(total, dtype=torch.int32).split_with_sizes(lengths))
    table, found = _table(runs, slots), array("q", bytes(16))
    kind = INDICES[runs[0].dtype]
    code[f"ends.{kind}"](table.buffer_info()[0], len(runs), found.buffer_info()[0])
    low, high = found
    if not is_dense((high - low) // 64, total, len(runs)):
        return Union(_in_pairs(code, runs, slots), slots)
    words = max(0, high - low) // 64 + 1
    bits, ranks = torch.empty(words, dtype=torch.int64), torch.empty(words, dtype=torch.int32)
    given = table.buffer_info()[0], len(runs), low, words, bits.data_ptr()
    united = code[f"mark.{kind}"](*given)
    if united < 0:
        reference.check_sorted(runs)
        raise ValueError("indices changed while they were being united: wait for their writer")
    indices = runs[0].new_empty(united)
    code[f"place.{kind}"](*given, ranks.data_ptr(), indices.data_ptr(), united)
    return Union(indices, slots)


def _table(runs: Sequence[Tensor], slots: Sequence[Tensor]) -> array[int]:
    """Where runs and their slots lie, for machine code: see `loops.mark`."""
    table = array("q")
    for run, some in zip(runs, slots, strict=True):
        table.extend((run.data_ptr(), some.numel(), some.data_ptr()))
    return table


def is_dense(words: int, total: int, runs: int) -> bool:
    """Whether so large a bitmap is a faster way to unite than pair by pair."""
    if words >= _MOST:
        return False
    return words <= total or (runs > 2 and words <= min(8 * total, _SMALL))


def _in_pairs(code: Loops, runs: Sequence[Tensor], slots: Sequence[Tensor]) -> Tensor:
    """Unite two and two, then the unions, and so on; the slots are carried along.

    Args:
        runs: at least two.
        slots: of each run, to be filled.
    """
    half = len(runs) // 2
    left, left_slots = _side(code, runs[:half], slots[:half])
    right, right_slots = _side(code, runs[half:], slots[half:])
    out = left.new_empty(left.numel() + right.numel())
    count = code[f"pair.{INDICES[left.dtype]}"](
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


def shares(slots: Sequence[Tensor], total: int) -> Shares:
    """Give each place of a union to one of the runs that have it, each of them equally often.

    The same slots give the same shares everywhere. Places that several runs have are shared out by
    a sequence that is more even than chance, so runs that have the same places get equally many,
    give or take two or so.

    Args:
        slots: of all runs, as `union` gives them; on the CPU.
        total: U, the places of the union.

    Example:
        >>> slots = union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots
        >>> given = shares(slots, 3)
        >>> given.of(0), given.of(1)
        (tensor([1, 2], dtype=torch.int32), tensor([0], dtype=torch.int32))
    """
    slots = [slot.contiguous() for slot in slots]
    table = _table(slots, slots)  # runs are not looked at
    groups, order, positions = torch.empty(3, total, dtype=torch.int32)
    starts = torch.empty(2 * len(slots) + 1, dtype=torch.int64)
    jit.machine_code()["share"](
        *(table.buffer_info()[0], len(slots), total),
        *(groups.data_ptr(), starts.data_ptr(), order.data_ptr(), positions.data_ptr()),
    )
    return Shares(groups, order, positions, starts.tolist())


def pick(slots: Tensor, shares: Shares, run: int, to: int) -> Picked:
    """The rows of a run whose places were given to the run `to`, in the order of its places.

    Args:
        slots: of the run.
        shares: what `shares` said of all runs' slots.
        run: which run.
        to: the run that the places were given to; may be the same.

    Example:
        >>> slots = union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots
        >>> pick(slots[1], shares(slots, 3), 1, to=0)
        Picked(rows=tensor([1], dtype=torch.int32), slots=tensor([1], dtype=torch.int32))
    """
    slots = slots.contiguous()
    rows, slots_of_rows = torch.empty(2, min(len(slots), shares.count(to)), dtype=torch.int32)
    count = jit.machine_code()["pick"](
        *(slots.data_ptr(), len(slots)),
        *(shares.groups.data_ptr(), shares.positions.data_ptr(), len(shares.groups)),
        *(to, shares.starts[2 * to], shares.alone(to) if run == to else 0),
        *(rows.data_ptr(), slots_of_rows.data_ptr()),
    )
    return Picked(rows[:count], slots_of_rows[:count])
