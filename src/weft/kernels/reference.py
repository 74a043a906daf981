"""The kernels as torch operations, on any device: what the results are by definition.

Duplicates are combined one occurrence at a time, the j-th of every segment at once, so no two
adds of a step meet in one row: no atomics, and the order is that of the input, on CUDA too.
Whatever is compiled agrees with this file bit for bit, payloads of NaNs excepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import WeftError
from .ops import Op

_BLOCK = 1 << 17  # numbers that are divided at once
_GOLDEN = 2654435769  # 2**32 divided by the golden ratio
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xD6E8FEB86659FD93 - 2**64  # as int64


class Distinct(NamedTuple):
    """The distinct indices among some, and where in the input each occurs.

    Attributes:
        indices: sorted and unique, `[u]`, of the input's dtype; the input itself where it was so.
        order: int64 `[k]`, the permutation that sorts the input stably; None if it is sorted.
        starts: int64 `[u + 1]`: distinct index s occurs at `order[starts[s]:starts[s + 1]]`; None
            if there are no duplicates.
    """

    indices: Tensor
    order: Tensor | None
    starts: Tensor | None

    def at(self, which: Tensor) -> Distinct:
        """Some of the distinct indices, in any order; their inputs are numbered as before.

        Raises:
            IndexError: there are not so many.
        """
        if len(which) and int(which.min()) < 0:
            raise IndexError(f"row {int(which.min())} is not among the distinct ones")
        indices, which = self.indices[which], which.long()
        if self.starts is None:
            return Distinct(indices, which if self.order is None else self.order[which], None)
        lengths = self.starts[which + 1] - self.starts[which]
        starts = lengths.new_zeros(len(which) + 1)
        torch.cumsum(lengths, 0, out=starts[1:])
        inputs = torch.repeat_interleave(self.starts[which] - starts[:-1], lengths)
        inputs += torch.arange(len(inputs), device=inputs.device)
        return Distinct(indices, inputs if self.order is None else self.order[inputs], starts)


class Union(NamedTuple):
    """Several sorted runs of indices united.

    Attributes:
        indices: sorted and unique, `[U]`.
        slots: for each run int32 of its length: the place in the union of each of its indices, as
            `place` if an earlier run has the index too, as `~place` if this is the first.
    """

    indices: Tensor
    slots: list[Tensor]


class Shares(NamedTuple):
    """The places of a union shared out: each is given to one of the runs that have it.

    Attributes:
        keys: int32 `[U]`: twice the run that a place was given to, plus 1 if several runs have it.
        order: int32 `[U]`, the places by key: first those that run 0 has alone, then the others
            given to it, then run 1's, and so on; ascending among equals.
        at: int32 `[U]`: where in `order` each place stands.
        starts: where in `order` each key starts, and its end: twice the number of runs, and one.
    """

    keys: Tensor
    order: Tensor
    at: Tensor
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


def distinct(indices: Tensor) -> Distinct:
    """See `weft.kernels.distinct`."""
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


def scan(indices: Tensor) -> tuple[int, ...]:
    """As `cpu.scan`."""
    now, before = indices[1:], indices[:-1]
    found = (now < before).sum(), (now == before).sum(), *indices.aminmax()
    return tuple(map(int, found))


def reduce(values: Tensor, distinct: Distinct, op: Op, out: Tensor) -> Tensor:
    """See `weft.kernels.reduce`."""
    _, order, starts = distinct
    if starts is None:
        if order is None:
            return out.copy_(values)
        return _rows(values, order, out)
    heads, lengths = starts[:-1], starts.diff()
    _rows(values, heads if order is None else order[heads], out)
    if not len(heads) or int(lengths.max()) == 1:
        return out
    # segments with duplicates, the longest first, so those with a j-th row are always a prefix
    lengths, segments = torch.sort(lengths, descending=True, stable=True)
    several = int((lengths > 1).sum())
    segments, heads = segments[:several], heads[segments[:several]]
    active = several - torch.cumsum(torch.bincount(lengths[:several]), 0)  # longer than j
    total = values[heads if order is None else order[heads]].to(op.accumulator(values.dtype))
    for j, count in enumerate(active.tolist()[1:-1], start=1):
        at = heads[:count] + j
        row = values[at if order is None else order[at]].to(total.dtype)
        total[:count] = _apply(op, total[:count], row)
    out[segments] = total.to(out.dtype)
    return out


def union(runs: Sequence[Tensor]) -> Union:
    """See `weft.kernels.union`."""
    indices = torch.unique(torch.cat(list(runs)))
    met = torch.zeros(len(indices), dtype=torch.bool, device=indices.device)
    slots = []
    for run in runs:
        place = torch.searchsorted(indices, run, out_int32=True)
        slots.append(torch.where(met[place], place, ~place))
        met[place] = True
    return Union(indices, slots)


def bitmap(indices: Tensor, places: int) -> Tensor:
    """See `weft.kernels.bitmap`."""
    present = torch.zeros(-(-places // 64) * 8, 8, dtype=torch.uint8, device=indices.device)
    present.view(-1)[indices.long()] = 1
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=indices.device)
    return (present * weights).sum(1, dtype=torch.uint8).view(torch.int64)


def unite_bitmap(bits: Tensor, indices: Tensor) -> Union:
    """See `weft.kernels.unite_bitmap`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    present = (bits.view(torch.uint8).unsqueeze(1) >> shifts) & 1
    united = present.view(-1).nonzero().view(-1).to(indices.dtype)
    return Union(united, [~torch.searchsorted(united, indices, out_int32=True)])


def combine(out: Tensor, slots: Tensor, values: Tensor, op: Op, base: int) -> None:
    """See `weft.kernels.combine`."""
    first = slots < 0
    places = torch.where(first, ~slots, slots).long() - base
    out[places[first]] = values[first].to(out.dtype)
    met = ~first
    places, values = places[met], values[met]
    if len(places) and values.numel():
        total = op.accumulator(out.dtype)
        out[places] = _apply(op, out[places].to(total), values.to(total)).to(out.dtype)


def shares(slots: Sequence[Tensor], total: int, weights: Sequence[int]) -> Shares:
    """See `weft.kernels.shares`."""
    device = slots[0].device
    runs = [_places(slot) for slot in slots]
    holders = torch.zeros(total, dtype=torch.int32, device=device)
    left = torch.zeros(total, dtype=torch.int64, device=device)
    for places, weight in zip(runs, weights, strict=True):
        holders[places] += 1
        left[places] += weight
    several = holders > 1
    fraction = (torch.cumsum(several, 0) - 1) * _GOLDEN & 0xFFFFFFFF
    left = torch.where(several, fraction * left >> 32, 0)
    whose = torch.zeros(total, dtype=torch.int32, device=device)
    for run, (places, weight) in enumerate(zip(runs, weights, strict=True)):
        before = left[places]
        whose[places[(before >= 0) & (before < weight)]] = run
        left[places] = before - weight
    keys = 2 * whose + several
    order = torch.argsort(keys, stable=True)
    at = torch.empty_like(keys)
    at[order] = torch.arange(total, dtype=torch.int32, device=device)
    counts = torch.bincount(keys, minlength=2 * len(slots))
    return Shares(keys, order.int(), at, [0, *torch.cumsum(counts, 0).tolist()])


def pick(slots: Tensor, shares: Shares, to: int) -> Picked:
    """See `weft.kernels.pick`."""
    places = _places(slots)
    rows = torch.nonzero(shares.keys[places] >> 1 == to).view(-1)
    there = shares.at[places[rows]] - shares.starts[2 * to]
    there, order = torch.sort(there)  # places that a run has alone stand first
    rows = rows[order]
    return Picked(rows.int(), torch.where(slots[rows] < 0, ~there, there))


def deal(slots: Tensor, shares: Shares) -> list[Tensor]:
    """See `weft.kernels.deal`."""
    to = shares.keys[_places(slots)] >> 1
    counts = torch.bincount(to, minlength=len(shares.starts) // 2)
    return list(torch.split(torch.argsort(to, stable=True).int(), counts.tolist()))


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
    found = torch.zeros(len(places), len(slots), dtype=torch.int64, device=places.device)
    for run, slot in enumerate(slots):
        if len(slot):
            its = _places(slot)
            at = torch.searchsorted(its, places).clamp_(max=len(its) - 1)
            found[:, run] = its[at] == places
    return found


def _places(slots: Tensor) -> Tensor:
    return (slots ^ (slots >> 31)).long()


def finish(values: Tensor, out: Tensor, divisor: int) -> None:
    """See `weft.kernels.finish`."""
    if divisor == 1:
        if out is not values:
            rounded(values, out)
        return
    # a tensor on the device: by a Python number CUDA multiplies with the rounded reciprocal
    if out.dtype.itemsize > 2:
        torch.div(values, torch.tensor(divisor, dtype=values.dtype, device=out.device), out=out)
        return
    # The float32 quotient is rounded again, but no tie comes of it: were it a tie and the true
    # quotient not, divisor * tie would be a float32 less than its last place from the dividend.
    # (It is one for divisors below 4096, and unless the quotient is subnormal.)
    # A float64 quotient loses none to the same argument.
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    by = torch.tensor(divisor, dtype=wide, device=out.device)
    for some, target in zip(_blocks(values), _blocks(out), strict=True):
        rounded(some.to(wide) / by, target)


def rounded(values: Tensor, out: Tensor) -> None:
    """Write values to `out`, rounded to nearest even, once.

    torch rounds float64 to half precision by way of float32, which makes ties of what are none.
    So here the float32 between is rounded to odd, which keeps on which side of a tie it is
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE TC 2008).
    """
    if not (values.dtype is torch.float64 and out.dtype.itemsize == 2):
        out.copy_(values)
        return
    for some, target in zip(_blocks(values), _blocks(out), strict=True):
        near = some.float()
        beyond = near.double() - some
        even = near.view(torch.int32) & 1 == 0
        towards = torch.where(beyond > 0, -torch.inf, torch.inf).to(near.dtype)
        odd = torch.nextafter(near, towards)
        target.copy_(torch.where(even & (beyond.abs() > 0), odd, near))


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of a tensor of whole rows, so that what is made of one stays in the cache."""
    row = max(1, tensor[:1].numel())
    return torch.split(tensor, max(1, _BLOCK // row))


def sketch(indices: Tensor, count: int) -> Tensor:
    """See `weft.kernels.sketch`."""
    ids = indices.long()
    if len(ids) <= count:
        return ids[torch.argsort(hashed(ids))]
    return ids[torch.topk(hashed(ids), count, largest=False, sorted=True).indices]


def hashed(ids: Tensor) -> Tensor:
    """The hashes by which `sketch` samples: of int64 ids, as int64 that order like the hashes.

    A bijection, two rounds of multiply and xor-shift as the mixers of Vigna's generators; add 2**63
    for the hash as a number from 0 up.

    Example:
        >>> hashed(torch.tensor([0])).item() + 2**63
        0
    """
    word = ids * _FIRST
    word = (word ^ (word >> 32 & 0xFFFFFFFF)) * _SECOND
    return word ^ (word >> 32 & 0xFFFFFFFF) ^ -(2**63)


def _rows(values: Tensor, places: Tensor, out: Tensor) -> Tensor:
    if out.dtype == values.dtype and values.dim() and out.is_contiguous():
        return torch.index_select(values, 0, places, out=out)
    return out.copy_(values.index_select(0, places))


def _apply(op: Op, left: Tensor, right: Tensor) -> Tensor:
    """The op on rows, whose result must be rows like them."""
    result = op.function(left, right)
    if op.builtin:
        return result
    if not isinstance(result, Tensor):
        raise WeftError(
            f"op {op.name} returned {type(result).__name__}: return a tensor like its operands"
        )
    if result.shape != left.shape or result.dtype != left.dtype:
        raise WeftError(
            f"op {op.name} made {tuple(result.shape)} {result.dtype} of two tensors "
            f"{tuple(left.shape)} {left.dtype}: it must keep shape and dtype"
        )
    return result
