"""The kernels as torch operations, on any device: what the results are by definition.

On an accelerator the host runs ahead of the device, and waits for it in `read` alone. What only the
device knows, such as how many indices are distinct, is asked for once, when all of it is known;
until then tensors are as long as they can be at most. So, but for `distinct`,
which are for the host, no operation here makes a result whose size depends on data, is indexed by a
mask, or takes a number from the host's memory.

Where several numbers are scattered to one place, they are equal, or integers that are added: so the
bits are the same each time. Floating-point sums and products are made from left to right, in the
order of the input; on an accelerator from 0.0 on, so that a sum of several -0.0 is 0.0. The machine
code agrees with this file bit for bit, payloads of NaNs excepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..base.devices import on_host
from .ops import Op

_BLOCK = 1 << 17  # numbers that are worked on at once


class Distinct(NamedTuple):
    """The distinct indices among some, and where in the input each occurs.

    Attributes:
        indices: sorted and unique, `[u]`, of the input's dtype; the input itself where it was so.
        order: int64 `[k]`, the permutation that sorts the input stably; None if it is sorted.
        starts: int64 `[u + 1]`: distinct index s occurs at `order[starts[s]:starts[s + 1]]`; None
            if there are no duplicates.
        most: how often the most frequent index occurs; 0 where nobody counted.
    """

    indices: Tensor
    order: Tensor | None
    starts: Tensor | None
    most: int = 0


class Survey(NamedTuple):
    """What the host must know of a table's indices before ranks meet.

    Attributes:
        distinct: the indices.
        lowest, highest: the least and the greatest of them; 0 and -1 if there are none.
        points: quantiles of the u distinct ones: those at `j * u // n` for j from 0 to below n,
            which is as many as were asked for, or u if that is less.
    """

    distinct: Distinct
    lowest: int
    highest: int
    points: list[int]


class Union(NamedTuple):
    """Several sorted runs of indices united.

    Attributes:
        indices: sorted and unique, `[U]`.
        slots: for each run int32 of its length: the place in the union of each of its indices, as
            `place` if an earlier run has the index too, as `~place` if this is the first.
        below: how many of `indices` are below each number that was asked for.
    """

    indices: Tensor
    slots: list[Tensor]
    below: Sequence[int] = ()


def there(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Numbers in the dtype and on the device of a tensor, for which the host does not wait."""
    made = torch.tensor(numbers, dtype=like.dtype, pin_memory=not like.is_cpu)
    return made.to(like.device, non_blocking=True)


def read(numbers: Tensor) -> list[int]:
    """Integers of a device, on the host: one copy, for which the host waits.

    Nothing else in the kernels makes the host wait, so tests can count.

    Args:
        numbers: int64, 1-D.
    """
    found: list[int] = numbers.tolist()
    return found


def distinct(indices: Tensor) -> Distinct:
    """See `weft.kernels.distinct`; on the host, where nobody has to wait."""
    if bool((indices[1:] > indices[:-1]).all()):
        return Distinct(indices, None, None)
    order = None
    if not bool((indices[1:] >= indices[:-1]).all()):
        indices, order = torch.sort(indices, stable=True)
    unique, counts = torch.unique_consecutive(indices, return_counts=True)
    if len(unique) == len(indices):
        return Distinct(indices, order, None)
    starts = counts.new_zeros(len(unique) + 1)
    torch.cumsum(counts, 0, out=starts[1:])
    return Distinct(unique, order, starts)


def survey(tables: Sequence[Tensor], points: int) -> list[Survey]:
    """See `weft.kernels.survey`."""
    found = [_described(each, points) for each in tables]
    numbers = [said for said, _ in found if said.numel()]
    told = iter(read(torch.cat(numbers)) if numbers else ())
    return [
        _surveyed(given, distinct, list(islice(told, said.numel())))
        for given, (said, distinct) in zip(tables, found, strict=True)
    ]


def _described(given: Tensor, points: int) -> tuple[Tensor, Distinct]:
    """What the host is told of a table; and its distinct indices, with others behind them."""
    if not given.numel():
        return given.long(), Distinct(given, None, None)
    ascending, order = torch.sort(given, stable=True)
    first, starts = _heads(ascending)
    count, length = first.sum(), given.numel()
    unique = ascending[starts[:-1].clamp(max=length - 1)]  # the greatest again behind them
    ids = unique.long()
    said = (given[1:] < given[:-1]).any(), count, starts.diff().max(), ids[0], ids[-1]
    quantiles = torch.arange(points, device=given.device) * count // count.clamp(max=max(1, points))
    points_of = ids[quantiles.clamp(max=length - 1)]
    return torch.cat([_stacked(*said), points_of]), Distinct(unique, order, starts)


def _surveyed(given: Tensor, padded: Distinct, told: list[int]) -> Survey:
    """The survey of a table, from `_described` and the numbers that the host has read."""
    if not told:
        return Survey(padded, 0, -1, [])
    falls, count, most, low, high, *quantiles = told
    order = padded.order if falls else None
    if count == given.numel():
        distinct = Distinct(padded.indices if falls else given, order, None, 1)
    else:
        assert padded.starts is not None
        distinct = Distinct(padded.indices[:count], order, padded.starts[: count + 1], most)
    return Survey(distinct, low, high, quantiles[:count])


def _stacked(*numbers: Tensor) -> Tensor:
    return torch.stack([each.long() for each in numbers])


def _heads(ascending: Tensor) -> tuple[Tensor, Tensor]:
    """Of sorted indices: which are the first of their kind, and where those are: see `_set`."""
    first = torch.ones_like(ascending, dtype=torch.bool)
    torch.ne(ascending[1:], ascending[:-1], out=first[1:])
    return first, _set(first, first.numel())


def _set(mask: Tensor, count: int) -> Tensor:
    """Where a mask is set, in at most `count` places: int64 `[count + 1]`, ascending, the mask's
    length behind them."""
    length = mask.numel()
    found = torch.full((count + 2,), length, device=mask.device)  # the last is for all others
    to = torch.where(mask, torch.cumsum(mask, 0) - 1, count + 1)
    return found.scatter_(0, to, torch.arange(length, device=mask.device))[:-1]


def ascends(indices: Tensor, last: int) -> bool:
    """See `weft.kernels.ascends`."""
    falls = (indices[1:] <= indices[:-1]).any()
    is_wrong, first, greatest = read(_stacked(falls, indices[0], indices[-1]))
    return not is_wrong and first >= 0 and greatest <= last


def reduce(values: Tensor, distinct: Distinct, op: Op, out: Tensor) -> Tensor:
    """See `weft.kernels.reduce`."""
    _, order, starts, most = distinct
    if starts is None:
        return out.copy_(values) if order is None else _rows(values, order, out)
    dtype = op.accumulator(values.dtype)
    if op.builtin and op.name in ("sum", "avg") and dtype.is_floating_point and not on_host(values):
        where = torch.arange(len(values), device=starts.device) if order is None else order
        flat = values.to(dtype).reshape(len(values), -1)
        sums = embedding_bag(where, flat, starts, mode="sum", include_last_offset=True)
        return out.copy_(sums.view(out.shape))
    rows = (values if order is None else values.index_select(0, order)).to(dtype)
    if op.builtin and op.name in ("sum", "avg", "prod") and dtype.is_floating_point:
        # one-dimensional data CUDA would add in another order
        rows = rows.reshape(len(rows), -1)
        name, neutral = ("prod", 1) if op.name == "prod" else ("sum", -0.0)
        lengths = starts.diff()
        sums = torch.segment_reduce(rows, name, lengths=lengths, initial=neutral, unsafe=True)
    else:
        sums = _paired(rows, starts, op, most or read(starts.diff().max().view(1))[0])
    return out.copy_(sums.view(out.shape))


def _paired(rows: Tensor, starts: Tensor, op: Op, most: int) -> Tensor:
    """Combine neighbours of each segment two and two until one row of each is left, in order.

    How many rows a round leaves only the device knows; at most half of an odd one more for each
    segment. Behind those are copies of others.
    """
    segments = starts.numel() - 1
    while most > 1:
        count = rows.shape[0]
        ends = torch.cumsum((starts.diff() + 1) // 2, 0)
        place = torch.arange((count + segments) // 2, device=rows.device)
        which = torch.searchsorted(ends, place, right=True).clamp_(max=segments - 1)
        halves = torch.nn.functional.pad(ends, (1, 0))
        left = (starts[which] + 2 * (place - halves[which])).clamp_(max=count - 1)
        both = left + 1 < starts[which + 1]
        first, second = rows[left], rows[left + both]
        rows = torch.where(_column(both, rows), op.function(first, second), first)
        starts, most = halves, (most + 1) // 2
    return rows[:segments]


def _column(mask: Tensor, rows: Tensor) -> Tensor:
    """A mask of rows, as `torch.where` wants it for their numbers."""
    return mask.view(-1, *[1] * (rows.dim() - 1))


def union(runs: Sequence[Tensor], below: Sequence[int] = (), highest: int | None = None) -> Union:
    """See `weft.kernels.union`."""
    ascending, order = torch.sort(torch.cat(list(runs)), stable=True)  # equal ones by their run
    first, starts = _heads(ascending)
    count = torch.cumsum(first, 0)
    place = (count - 1).int()
    slots = torch.empty_like(place).index_copy_(0, order, torch.where(first, ~place, place))
    wrong = [run[1:] <= run[:-1] for run in runs]
    if highest is not None:
        wrong += [ascending[:1] < 0, ascending[-1:] > highest]
    numbers = [torch.cat(wrong).any().view(1), first.sum().view(1)]
    if below:
        last = torch.iinfo(ascending.dtype).max
        ends = there([min(each - 1, last) for each in below], ascending)
        at = torch.searchsorted(ascending, ends, right=True)
        numbers.append(torch.nn.functional.pad(count, (1, 0))[at])
    is_wrong, united, *counts = read(torch.cat(numbers).long())
    if is_wrong:
        name_unsorted(runs)
    indices = ascending[starts[:-1].clamp_(max=max(0, order.numel() - 1))]
    parts = list(torch.split(slots, [run.numel() for run in runs]))
    return Union(indices[:united], parts, counts)


def name_unsorted(runs: Sequence[Tensor]) -> None:
    """Raise ValueError, since some run is not sorted and unique."""
    for number, run in enumerate(runs):
        if not bool((run[1:] > run[:-1]).all()):
            raise ValueError(f"run {number} of {len(runs)} is not sorted and unique: sort it")
    raise ValueError(
        "an index is out of bounds, or changed while they were united: wait for their writer"
    )


def combine(out: Tensor, slots: Tensor, values: Tensor, op: Op, base: int) -> None:
    """See `weft.kernels.combine`."""
    blocks, dtype = _blocks(values), op.accumulator(out.dtype)
    for some, to in zip(blocks, torch.split(slots, blocks[0].shape[0]), strict=True):
        first, places, wide = _column(to < 0, some), _places(to) - base, some.to(dtype)
        before = out.index_select(0, places).to(dtype)
        if not op.builtin:  # where a row is the first, nobody knows what is in its place
            before = torch.where(first, wide, before)
        total = torch.where(first, wide, op.function(before, wide))
        out.index_copy_(0, places, total.to(out.dtype))


def _places(slots: Tensor) -> Tensor:
    return (slots ^ (slots >> 31)).long()


def finish(values: Tensor, out: Tensor, divisor: int) -> None:
    """See `weft.kernels.finish`."""
    if divisor == 1:
        if out is not values:
            out.copy_(values)
        return
    # a tensor on the device: by a Python number CUDA multiplies with the rounded reciprocal
    wide = torch.promote_types(values.dtype, torch.float32)
    by = torch.full((), divisor, dtype=wide, device=out.device)
    if out.dtype.itemsize > 2:
        torch.div(values, by.to(values.dtype), out=out)
        return
    for some, target in zip(_blocks(values), _blocks(out), strict=True):
        target.copy_(some.to(wide) / by)


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of a tensor of whole rows, so that what is made of one stays in a processor's cache."""
    if not tensor.is_cpu:
        return (tensor,)
    row = max(1, tensor[:1].numel())
    return torch.split(tensor, max(1, _BLOCK // row))


def _rows(values: Tensor, places: Tensor, out: Tensor) -> Tensor:
    if out.dtype == values.dtype and values.dim() and out.is_contiguous():
        return torch.index_select(values, 0, places, out=out)
    return out.copy_(values.index_select(0, places))
