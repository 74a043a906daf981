"""Kernels: local arithmetic on rows. They never communicate.

Each function here picks an implementation by device and dtype: `cpu` (machine code) for built-in
operations on tensors on the CPU, of the kinds in `cpu`; else `reference` (torch operations), which
is the definition: the two agree bit for bit.

The vocabulary:

* `distinct(indices)` sorts and finds duplicates, looking at the indices alone.
* `reduce(values, distinct, op)` then sums the values of each distinct index, in input order, in
  the accumulation type, rounded once to the dtype of `out`.
* `union(runs)` merges several sorted, duplicate-free index lists. For each run it gives *slots*:
  the place of each of its indices in the union, as `place` where an earlier run has that
  index too, and as `~place` (so negative) where this run is the first to bring it.
* `combine(out, slots, values, op)` then adds one run: where the slot is negative it copies, else
  it reduces, `out` on the left. Doing that run by run, in rank order, is the merge:
  `combine_runs`.
* `finish(values, out, divisor)` rounds an accumulator to its result, dividing first if asked.
* `merge(runs, op)` is union and combine over whole runs.
* `shares(slots, total)` gives each place of a union to one of the runs that have it; `pick` finds
  the rows of a run whose places some run was given, and where it has them.
* `index_code`, `encode`, `decode`: sorted indices in few bits; see `codec`.

`shares`, `pick` and the index codes are machine code alone. Where a rank has none (`is_compiled`),
no rank calls them: the opening of a call tells.

Tensors on an accelerator are reduced and finished without a wait of the host's, if `Distinct.most`
is known; indices are sorted and united on the CPU.

Which of them serves on the host is decided once in a process, at `weft.init` or by the first call
(`jit`): machine code, or torch operations for all of it, where Numba is missing or fails, or where
the environment says `WEFT_KERNELS=reference`. `describe` says which.

Callers have checked their arguments (`Op.refuses` for dtypes); here only that is checked again
which would read or write memory of others. No kernel is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cpu, jit, reference
from .codec import IndexCode as IndexCode
from .codec import decode as decode
from .codec import encode as encode
from .codec import index_code as index_code
from .cpu import Picked as Picked
from .cpu import Shares as Shares
from .ops import OPS as OPS
from .ops import Op
from .reference import Distinct as Distinct
from .reference import Union as Union


def prepare() -> None:
    """Load the machine code, or make it, which may take ten seconds once on a machine."""
    jit.loops()


def is_compiled() -> bool:
    """Whether there is machine code, and not torch operations alone."""
    return jit.loops() is not None


def describe() -> str:
    """Whether machine code or torch operations serve on the CPU, in a line."""
    return f"{jit.describe()}; {torch.get_num_threads()} threads"


def distinct(indices: Tensor) -> Distinct:
    """Sort indices and find the duplicates among them.

    Args:
        indices: 1-D, int32 or int64, in any order.

    Example:
        >>> distinct(torch.tensor([7, 2, 7]))
        Distinct(indices=tensor([2, 7]), order=tensor([1, 0, 2]), starts=tensor([0, 1, 3]), most=0)
    """
    indices = indices.contiguous()
    code = jit.loops() if indices.is_cpu else None
    found = None if code is None else cpu.distinct(code, indices)
    return reference.distinct(indices) if found is None else found


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
        return reference.ascends(indices, last)
    return cpu.ascends(code, indices, last)


def reduce(values: Tensor, distinct: Distinct, op: Op, out: Tensor | None = None) -> Tensor:
    """Combine the rows of each distinct index, in input order, rounding once.

    Args:
        values: `[k, *row_shape]`, the rows of the indices that `distinct` was made from.
        distinct: their distinct indices.
        op: how to combine; a callable is given neighbours of all indices at once.
        out: `[u, *row_shape]` of `values.dtype`, of `op.accumulator(values.dtype)`, or for floating
            point of half precision, to be filled; by default a new tensor of `values.dtype`.

    Returns:
        `out`. Without `out`, where the indices were sorted and unique, `values` itself.

    Raises:
        ValueError: there is not one row for each index, or `out` has another shape.

    Example:
        >>> values = torch.tensor([[1.0], [2.0], [4.0]])
        >>> reduce(values, distinct(torch.tensor([7, 2, 7])), OPS["sum"])
        tensor([[2.],
                [5.]])
    """
    _check_count(values, distinct)
    is_unique = distinct.order is None and distinct.starts is None
    if out is None:
        if is_unique:
            return values
        out = values.new_empty((distinct.indices.numel(), *values.shape[1:]))
    else:
        _check_shape(out, distinct.indices, values)
    if out.numel() == 0:
        return out
    total = out
    if values.dtype is torch.float64 and out.dtype.itemsize == 2:  # for which there is no loop
        total = torch.empty_like(out, dtype=values.dtype)
    code = jit.loops() if values.is_cpu and not is_unique else None
    if code is None or not cpu.reduce(code, values, distinct, op, total):
        reference.reduce(values.detach(), distinct, op, total)
    if total is not out:
        reference.finish(total, out, 1)
    return out


def reduce_some(values: Tensor, distinct: Distinct, op: Op, rows: Tensor, out: Tensor) -> bool:
    """Combine the rows of some of the distinct indices, as `reduce` does those of all.

    Args:
        values: as for `reduce`.
        distinct: their distinct indices.
        op: how to combine.
        rows: the numbers of some of the distinct indices, int32 `[n]`, in any order.
        out: `[n, *row_shape]`, to be filled.

    Returns:
        False, and nothing was done, where only `reduce` of all serves: there is no loop for these.

    Raises:
        IndexError: a number in `rows` is not that of a distinct index.
        ValueError: as `reduce`.

    Example:
        >>> values, out = torch.tensor([[1.0], [2.0], [4.0]]), torch.empty(1, 1)
        >>> found = distinct(torch.tensor([7, 2, 7]))
        >>> reduce_some(values, found, OPS["sum"], torch.tensor([1], dtype=torch.int32), out)
        True
        >>> out
        tensor([[5.]])
    """
    _check_count(values, distinct)
    _check_shape(out, rows, values)
    if distinct.order is None and distinct.starts is None:
        return False
    code = jit.loops()
    return code is not None and cpu.reduce(code, values, distinct, op, out, rows)


def _check_count(values: Tensor, distinct: Distinct) -> None:
    count, order, starts = values.shape[0], distinct.order, distinct.starts
    given = distinct.indices.numel() if order is None else order.numel()
    if starts is not None and order is None:
        given = int(starts[-1]) if starts.is_cpu else count
    if count != given:
        raise ValueError(f"there are {given} indices and {count} rows: give one row for each")


def _check_shape(out: Tensor, indices: Tensor, values: Tensor) -> None:
    shape = indices.numel(), *values.shape[1:]
    if out.shape != shape:
        raise ValueError(f"out is {tuple(out.shape)}, the result {shape}: make them equal")


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
    code = jit.loops() if runs[0].is_cpu else None
    found = None if code is None else cpu.union(code, runs)
    return reference.union(runs) if found is None else found


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

    Raises:
        ValueError: there is not one slot for each row, or rows of `out` have another shape.
        IndexError: a place is not one of a row of `out`.

    Example:
        >>> slots = union([torch.tensor([2, 5]), torch.tensor([1, 5])]).slots
        >>> out = torch.empty(3)
        >>> combine(out, slots[0], torch.tensor([1.0, 2.0]), OPS["sum"])
        >>> combine(out, slots[1], torch.tensor([4.0, 8.0]), OPS["sum"])
        >>> out
        tensor([ 4.,  1., 10.])
    """
    combine_runs(out, [slots], [values], op, base)


def combine_runs(
    out: Tensor, slots: Sequence[Tensor], values: Sequence[Tensor], op: Op, base: int = 0
) -> None:
    """Bring the rows of several runs to their places, one run after the other: see `combine`.

    Args:
        out: as for `combine`.
        slots: of each run.
        values: of each run, at least one; all of one dtype.
        op: how to combine, `out` on the left.
        base: the place of the first row of `out`.

    Raises:
        ValueError, IndexError: as `combine`.
    """
    dtype = values[0].dtype
    for slot, rows in zip(slots, values, strict=True):
        fits = slot.numel() == rows.shape[0] and rows.shape[1:] == out.shape[1:]
        if not fits or rows.dtype != dtype:
            raise ValueError(
                f"{len(slot)} slots, values {tuple(rows.shape)} of {rows.dtype} and out "
                f"{tuple(out.shape)} do not fit together: give a slot for each row, and rows of "
                f"one shape and of {dtype}"
            )
    code = jit.loops() if out.is_cpu else None
    if code is None or not cpu.combine(code, out, slots, values, op, base):
        for slot, rows in zip(slots, values, strict=True):
            if rows.numel():
                reference.combine(out, slot, rows.detach(), op, base)


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
    reference.finish(values.detach(), out, divisor)


def merge(runs: Sequence[tuple[Tensor, Tensor]], op: Op) -> tuple[Tensor, Tensor]:
    """Add up whole runs of rows, in their order.

    Args:
        runs: at least one `(indices, values)`, the indices sorted and unique.
        op: how to combine.

    Returns:
        The union of the indices, and the values, in the dtype of the accumulator.

    Example:
        >>> a = torch.tensor([2, 5]), torch.tensor([1.0, 2.0])
        >>> b = torch.tensor([1, 5]), torch.tensor([4.0, 8.0])
        >>> merge([a, b], OPS["sum"])
        (tensor([1, 2, 5]), tensor([ 4.,  1., 10.]))
    """
    indices, slots = union([run for run, _ in runs])
    first = runs[0][1]
    total = first.new_empty((len(indices), *first.shape[1:]), dtype=op.accumulator(first.dtype))
    combine_runs(total, slots, [values for _, values in runs], op)
    return indices, total


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
    return cpu.shares(jit.machine_code(), [slot.contiguous() for slot in slots], total)


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
    return cpu.pick(jit.machine_code(), slots.contiguous(), shares, run, to)
