"""The kernels as torch operations: what the results are by definition.

`reduce` and `finish` serve any device, and on an accelerator the host does not wait for it: no
operation there makes a result whose size depends on data, is indexed by a mask, or takes a number
from the host's memory. The others are for the host.

Where several numbers are scattered to one place, they are equal, or integers that are added: so the
bits are the same each time. Floating-point sums and products are made from left to right, in the
order of the input. The machine code agrees with this file bit for bit, payloads of NaNs excepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .ops import Op


class Distinct(NamedTuple):
    """The distinct indices among some, and where in the input each occurs.

    Attributes:
        indices: sorted and unique, `[u]`, of the input's dtype; the input itself where it was so.
        order: int64 `[k]`, the permutation that sorts the input stably; None if it is sorted.
        starts: int64 `[u + 1]`: distinct index s occurs at `order[starts[s]:starts[s + 1]]`; None
            if there are no duplicates.
        most: how often the most frequent index occurs, or more; 0 where nobody counted.
    """

    indices: Tensor
    order: Tensor | None
    starts: Tensor | None
    most: int = 0

    def of(self, keys: Tensor) -> Distinct:
        """Those of other keys, which are equal where these are, and ascend as these do.

        Example:
            >>> distinct(torch.tensor([7, 2, 7])).of(torch.tensor([9, 4, 9])).indices
            tensor([4, 9])
        """
        first = self.order
        if self.starts is not None:
            first = self.starts[:-1] if first is None else first.index_select(0, self.starts[:-1])
        return self._replace(indices=keys if first is None else keys.index_select(0, first))


class Union(NamedTuple):
    """Several sorted runs of indices united.

    Attributes:
        indices: sorted and unique, `[U]`.
        slots: for each run int32 of its length: the place in the union of each of its indices, as
            `place` if an earlier run has the index too, as `~place` if this is the first.
    """

    indices: Tensor
    slots: list[Tensor]


def distinct(indices: Tensor) -> Distinct:
    """See `weft.kernels.distinct`."""
    if rises(indices):
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


def reduce(values: Tensor, distinct: Distinct, op: Op, out: Tensor) -> Tensor:
    """See `weft.kernels.reduce`."""
    _, order, starts, most = distinct
    if order is not None:
        values = values.index_select(0, order)
    if starts is None:
        return out.copy_(values)
    rows = values.to(op.accumulator(values.dtype))
    if op.builtin and op.name in ("sum", "avg", "prod") and rows.dtype.is_floating_point:
        # one-dimensional data CUDA would add in another order
        rows = rows.reshape(len(rows), -1)
        name, neutral = ("prod", 1) if op.name == "prod" else ("sum", -0.0)
        lengths = starts.diff()
        sums = torch.segment_reduce(rows, name, lengths=lengths, initial=neutral, unsafe=True)
    else:
        sums = _paired(rows, starts, op, most or int(starts.diff().max()))
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
        has_second = both.view(-1, *[1] * (rows.dim() - 1))
        rows = torch.where(has_second, op.function(first, second), first)
        starts, most = halves, (most + 1) // 2
    return rows[:segments]


def union(runs: Sequence[Tensor]) -> Union:
    """See `weft.kernels.union`."""
    check_sorted(runs)
    indices, places = torch.unique(torch.cat(list(runs)), return_inverse=True)
    is_known = torch.zeros_like(indices, dtype=torch.bool)
    slots = []
    for place in torch.split(places, [run.numel() for run in runs]):
        slots.append(torch.where(is_known[place], place, ~place).int())
        is_known[place] = True
    return Union(indices, slots)


def rises(indices: Tensor) -> bool:
    """Whether each index is above the one before it."""
    return bool((indices[1:] > indices[:-1]).all())


def check_sorted(runs: Sequence[Tensor]) -> None:
    """Raise ValueError if some run is not sorted and unique."""
    for number, run in enumerate(runs):
        if not rises(run):
            raise ValueError(f"run {number} of {len(runs)} is not sorted and unique: sort it")


def combine(out: Tensor, slots: Tensor, values: Tensor, op: Op, base: int) -> None:
    """See `weft.kernels.combine`."""
    values = values.to(op.accumulator(out.dtype))
    places = (slots ^ (slots >> 31)).long() - base
    is_first = slots < 0
    out.index_copy_(0, places[is_first], values[is_first].to(out.dtype))
    places = places[~is_first]
    if places.numel():
        sums = op.function(out.index_select(0, places).to(values.dtype), values[~is_first])
        out.index_copy_(0, places, sums.to(out.dtype))
