"""Kernels: local arithmetic on rows. They never communicate.

Each function here picks an implementation by device and dtype: `cpu` (Numba) for built-in
operations on CPU tensors, once it is compiled; else `reference` (torch operations, any device),
which is the definition: the two agree bit for bit.

The vocabulary:

* `distinct(indices)` sorts and finds duplicates, looking at the indices alone.
* `reduce(values, distinct, op)` then sums the values of each distinct index, in input order, in
  the accumulation type, rounded once to the dtype of `out`.
* `reduce_parts` does so for several tensors whose indices were sorted together.
* `union(runs)` merges several sorted, duplicate-free index lists. For each run it gives *slots*:
  the place of each of its indices in the union, as `place` where an earlier run has that
  index too, and as `~place` (so negative) where this run is the first to bring it.
* `bitmap(indices, places)` has a bit for each; once ranks have united theirs, `unite_bitmap` reads
  the union from it.
* `combine(out, slots, values, op)` then adds one run: where the slot is negative it copies, else
  it reduces, `out` on the left. Doing that run by run, in rank order, is the merge.
* `finish(values, out, divisor)` rounds an accumulator to its result, dividing first if asked.
* `merge(runs, op)` is union and combine over whole runs.
* `shares(slots, total, weights)` gives each place of a union to one of the runs that have it;
  `deal` sorts a run's rows by the run that was given their places, `pick` finds those that some
  run was given, and where it has them; a `Putter` brings rows to places.
* `alone`, `held`, `copy`, `take`, `quantiles`, `sketch`: see each.
* `lists` does the keys of several tables at once, `lent` reads what other processes lend; see
  there.
* `gap_code`, `pack_gaps` and `unpack_gaps` write sorted indices in few bits; see `gaps`.
* `floats` writes floating-point numbers in fewer bytes, without loss.

A call never waits for a compiler: where machine code is missing the reference serves, and the code
is made in the background. `ready` tells whether it is there, `warm` makes it now, `prepare` makes
it now unless it is `kept` and only to be loaded, `describe` says what serves.
`WEFT_KERNELS=reference` in the environment keeps to the reference.

Callers have checked their arguments (`Op.refuses` for dtypes), here only what could touch foreign
memory is checked again. No kernel is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cpu, cpu_copy, cpu_indices, cpu_shares, lent, lists, meter, reference
from .compile import compiler
from .gaps import GapCode, expected_bits, gap_code, pack_gaps, unpack_gaps
from .ops import OPS, Op
from .putting import Putter
from .reduction import detached, on_cpu, reduce, reduce_parts
from .reference import Distinct, Picked, Shares, Union
from .usual import kept, prepare, ready, warm

__all__ = [
    "OPS",
    "Distinct",
    "GapCode",
    "Picked",
    "Putter",
    "Shares",
    "Union",
    "alone",
    "bitmap",
    "combine",
    "copy",
    "deal",
    "describe",
    "distinct",
    "expected_bits",
    "finish",
    "gap_code",
    "hashed",
    "held",
    "kept",
    "lent",
    "lists",
    "merge",
    "pack_gaps",
    "pick",
    "prepare",
    "quantiles",
    "ready",
    "reduce",
    "reduce_parts",
    "shares",
    "sketch",
    "take",
    "union",
    "unite_bitmap",
    "unpack_gaps",
    "warm",
]


def distinct(indices: Tensor) -> Distinct:
    """Sort indices and find the duplicates among them.

    Args:
        indices: 1-D, int32 or int64, in any order.

    Example:
        >>> distinct(torch.tensor([7, 2, 7]))
        Distinct(indices=tensor([2, 7]), order=tensor([1, 0, 2]), starts=tensor([0, 1, 3]))
    """
    indices = indices.contiguous()
    found = cpu_indices.distinct(indices) if on_cpu(indices) else None
    return reference.distinct(indices) if found is None else found


def union(runs: Sequence[Tensor]) -> Union:
    """Unite several runs of indices.

    Args:
        runs: at least one; each 1-D, sorted and unique, maybe empty; all int32 or all int64.

    Example:
        >>> union([torch.tensor([2, 5]), torch.tensor([1, 5])])
        Union(indices=tensor([1, 2, 5]), slots=[tensor([-2, -3], dtype=torch.int32), \
tensor([-1,  2], dtype=torch.int32)])
    """
    runs = [run.contiguous() for run in runs]
    meter.spend(meter.PLACE * sum(run.numel() for run in runs))
    found = cpu_indices.union(runs) if on_cpu(runs[0]) else None
    return reference.union(runs) if found is None else found


def bitmap(indices: Tensor, places: int) -> Tensor:
    """A bit for every place, set where an index is: bit i % 64 of word i // 64.

    Args:
        indices: 1-D, sorted and unique, int32 or int64, from 0 to below `places`.
        places: how many there are.

    Returns:
        int64 `[ceil(places / 64)]`.

    Example:
        >>> bitmap(torch.tensor([0, 2, 65]), 100)
        tensor([5, 2])
    """
    indices = indices.contiguous()
    meter.spend(meter.MARK * indices.numel() + places / 8)
    found = cpu_indices.bitmap(indices, places) if on_cpu(indices) else None
    return reference.bitmap(indices, places) if found is None else found


def unite_bitmap(bits: Tensor, indices: Tensor) -> Union:
    """The union that a bitmap says, and where in it a run is.

    Args:
        bits: as `bitmap` gives them, those of several runs combined by "or".
        indices: one of these runs.

    Returns:
        The union, in the dtype of `indices`; slots of the one run, as if it came first.

    Example:
        >>> unite_bitmap(bitmap(torch.tensor([0, 2, 65]), 100), torch.tensor([2]))
        Union(indices=tensor([ 0,  2, 65]), slots=[tensor([-2], dtype=torch.int32)])
    """
    indices = indices.contiguous()
    found = cpu_indices.unite_bitmap(bits, indices) if on_cpu(indices) else None
    if found is None:
        found = reference.unite_bitmap(bits, indices)
    spread = meter.SPREAD * found.indices.numel() + 3 * bits.nbytes
    meter.spend(spread + meter.MARK * indices.numel())
    return found


def combine(out: Tensor, slots: Tensor, values: Tensor, op: Op, base: int = 0) -> None:
    """Bring one run's rows to their places in a union: the first copies, the others add.

    `out[place - base]` becomes `values[i]` where slot i is `~place`, and `op(out[place - base],
    values[i])` where it is `place`.

    Args:
        out: `[n, *row_shape]` of `values.dtype` or its accumulator, the places from `base` on.
        slots: int32 `[k]`, ascending in their places.
        values: `[k, *row_shape]`.
        op: how to combine, `out` on the left.
        base: the place of the first row of `out`.

    Example:
        >>> slots = union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots
        >>> out = torch.empty(3)
        >>> combine(out, slots[0], torch.tensor([1.0, 2.0]), OPS["sum"])
        >>> combine(out, slots[1], torch.tensor([4.0, 8.0]), OPS["sum"])
        >>> out
        tensor([ 4.,  1., 10.])
    """
    if slots.numel() != values.shape[0] or values.shape[1:] != out.shape[1:]:
        raise ValueError(
            f"{len(slots)} slots, values {tuple(values.shape)} and out {tuple(out.shape)} do not "
            "fit together: give a slot for each row, and rows of one shape"
        )
    if values.numel() == 0:
        return
    slots, values = slots.contiguous(), detached(values)
    meter.spend(meter.CALL + values.numel() * out.element_size())
    if not (on_cpu(values) and cpu.combine(out, slots, values, op, base)):
        reference.combine(out, slots, values, op, base)


def finish(values: Tensor, out: Tensor, divisor: int = 1) -> None:
    """Make results of accumulated rows: divide, and round once to the dtype of `out`.

    Args:
        values: accumulated rows.
        out: of the same shape; may be `values` itself.
        divisor: what to divide by; only 1 for integers.

    Example:
        >>> out = torch.empty(2, dtype=torch.bfloat16)
        >>> finish(torch.tensor([1.0, 2.0]), out, divisor=4)
        >>> out
        tensor([0.2500, 0.5000], dtype=torch.bfloat16)
    """
    meter.spend(values.nbytes)
    reference.finish(detached(values), out, divisor)


def merge(
    runs: Sequence[tuple[Tensor, Tensor]], op: Op, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Add up whole runs of rows, in their order.

    Args:
        runs: at least one `(indices, values)`, the indices sorted and unique.
        op: how to combine.
        out_dtype: the dtype of the values returned; by default that of the accumulator. Where it is
            wider than that, it is what they are added in.

    Returns:
        The union of the indices, and the values.

    Example:
        >>> a = torch.tensor([2, 5]), torch.tensor([1.0, 2.0])
        >>> b = torch.tensor([1, 5]), torch.tensor([4.0, 8.0])
        >>> merge([a, b], OPS["sum"])
        (tensor([1, 2, 5]), tensor([ 4.,  1., 10.]))
    """
    indices, slots = union([run for run, _ in runs])
    first = runs[0][1]
    dtype = op.accumulator(first.dtype)
    if out_dtype is not None and out_dtype.itemsize > dtype.itemsize:
        dtype = out_dtype
    total = first.new_empty((len(indices), *first.shape[1:]), dtype=dtype)
    meter.spend(total.nbytes)  # fresh memory costs as much as the arithmetic in it
    for slot, (_, values) in zip(slots, runs, strict=True):
        combine(total, slot, values, op)
    if out_dtype is None or out_dtype == total.dtype:
        return indices, total
    result = torch.empty_like(total, dtype=out_dtype)
    finish(total, result)
    return indices, result


def shares(slots: Sequence[Tensor], total: int, weights: Sequence[int]) -> Shares:
    """Give each place of a union to one of the runs that have it, in proportion to their weights.

    The same slots and weights give the same shares everywhere. Places that several runs have are
    shared out by a sequence that is more even than chance, so runs of equal weight that have the
    same places get equally many, give or take two or so.

    Args:
        slots: of all runs, as `union` gives them.
        total: U, the places of the union.
        weights: for each run 1 to 2**16.

    Example:
        >>> slots = union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots
        >>> given = shares(slots, 3, [1, 1])
        >>> given.of(0), given.of(1)
        (tensor([1, 2], dtype=torch.int32), tensor([0], dtype=torch.int32))
    """
    if min(weights) < 1 or max(weights) > 2**16:
        raise ValueError(f"weights are {list(weights)}: give each run one from 1 to 65536")
    slots = [slot.contiguous() for slot in slots]
    meter.spend(meter.SHARE * sum(map(len, slots)))
    found = cpu_shares.shares(slots, total, weights) if on_cpu(slots[0]) else None
    return reference.shares(slots, total, weights) if found is None else found


def pick(slots: Tensor, shares: Shares, run: int, to: int) -> Picked:
    """Of a run's rows those whose places were given to some run, as that run is to get them.

    Args:
        slots: of the run.
        shares: what `shares` said of all runs' slots.
        run: which run.
        to: the run that the places were given to; may be the same.

    Example:
        >>> slots = union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots
        >>> pick(slots[1], shares(slots, 3, [1, 1]), 1, to=0)
        Picked(rows=tensor([1], dtype=torch.int32), slots=tensor([1], dtype=torch.int32))
    """
    slots = slots.contiguous()
    meter.spend(meter.PICK * len(slots))
    found = cpu_shares.pick(slots, shares, run, to) if on_cpu(slots) else None
    return reference.pick(slots, shares, to) if found is None else found


def deal(slots: Tensor, shares: Shares) -> list[Tensor]:
    """A run's rows by the run that their places were given to.

    Args:
        slots: of the run.
        shares: what `shares` said of all runs' slots.

    Returns:
        For each run int32: the positions in this run of the rows given to it, ascending.

    Example:
        >>> slots = union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots
        >>> deal(slots[1], shares(slots, 3, [1, 1]))
        [tensor([1], dtype=torch.int32), tensor([0], dtype=torch.int32)]
    """
    slots = slots.contiguous()
    meter.spend(meter.PICK * len(slots))
    found = cpu_shares.deal(slots, shares) if on_cpu(slots) else None
    return reference.deal(slots, shares) if found is None else found


def alone(slots: Sequence[Tensor], runs: Sequence[int], total: int, most: int) -> list[Tensor]:
    """For some runs the first rows that no other run has.

    Args:
        slots: of all runs, as `union` gives them.
        runs: which runs.
        total: U, the places of the union.
        most: how many rows of each to look for.

    Returns:
        For each of `runs` int32: positions in the run, ascending.

    Example:
        >>> alone(union([torch.tensor([2, 5]), torch.tensor([1, 5, 7])]).slots, [1], 4, most=9)
        [tensor([0, 2], dtype=torch.int32)]
    """
    slots = [slot.contiguous() for slot in slots]
    found = cpu_shares.alone(slots, runs, total, most) if on_cpu(slots[0]) else None
    return reference.alone(slots, runs, total, most) if found is None else found


def held(slots: Sequence[Tensor], places: Tensor) -> Tensor:
    """Which runs have some places of their union.

    Args:
        slots: of all runs, as `union` gives them.
        places: int64 `[n]`, ascending.

    Returns:
        int64 `[n, runs]`: 1 where the run has the place, else 0.

    Example:
        >>> held(union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots, torch.tensor([0, 2]))
        tensor([[0, 1],
                [1, 1]])
    """
    slots, places = [slot.contiguous() for slot in slots], places.contiguous()
    found = cpu_shares.held(slots, places) if on_cpu(slots[0]) else None
    return reference.held(slots, places) if found is None else found


def copy(out: Tensor, values: Tensor, among: int = 0) -> None:
    """`out.copy_(values)`, which leaves the cache to others where there is much to copy.

    Args:
        out: to be filled; not in the same memory.
        values: of the same shape.
        among: bytes that are copied together with these, if they are a part of more.

    Example:
        >>> out = torch.empty(2)
        >>> copy(out, torch.tensor([1.0, 4.0]))
        >>> out
        tensor([1., 4.])
    """
    values, nbytes = detached(values), values.nbytes
    meter.spend(nbytes)
    large = max(nbytes, among) >= cpu_copy.LEAST and on_cpu(values) and on_cpu(out)
    if not (large and cpu_copy.copy(out, values)):
        out.copy_(values)


def take(values: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """The rows at some positions (int32 or int64), in their order.

    Raises:
        IndexError: a position is not that of a row.

    Example:
        >>> take(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0]))
        tensor([4., 1.])
    """
    taken = torch.index_select(detached(values), 0, positions, out=out)
    meter.spend(taken.nbytes)
    return taken


def quantiles(indices: Tensor, count: int) -> Tensor:
    """Indices that cut sorted unique ones in `count` parts of equal length.

    Returns:
        int64 `[count + 1]`: entry j is `indices[min(k - 1, j * k // count)]`, the last one the
        greatest index; zeros if there are none.

    Example:
        >>> quantiles(torch.tensor([1, 2, 4, 8]), 2)
        tensor([1, 4, 8])
    """
    return reference.quantiles(indices, count)


def sketch(indices: Tensor, count: int) -> Tensor:
    """A sample of a set that can be united with the samples of others.

    Returns:
        int64 `[min(count, k)]`: of the k distinct indices those with the smallest hashes,
        smallest first. The hash is a bijection of 64 bits, so the indices say it all.
    """
    indices = indices.contiguous()
    found = None
    if 0 < count < len(indices) and on_cpu(indices):
        found = cpu_indices.sketch(indices, count)
    return reference.sketch(indices, count) if found is None else found


def hashed(ids: Tensor) -> Tensor:
    """The hashes by which `sketch` samples: of int64 ids, as int64 that order like the hashes.

    A bijection; add 2**63 for the hash as a number from 0 up.

    Example:
        >>> hashed(torch.tensor([0])).item() + 2**63
        0
    """
    return reference.hashed(ids)


def describe() -> str:
    """What serves on the CPU, in a line."""
    return f"{compiler.describe()}; {torch.get_num_threads()} threads"
