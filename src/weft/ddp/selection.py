"""The largest entries of a mean, which the ranks own together: the second selection of top-k.

Ranks that select their largest entries independently seldom select the same ones, so the union of
what they send fills the tensor as ranks are added: 1 % of the entries at 256 ranks is 92 % of them.
If the owners of the sums share only the largest of them, a rank receives about 4k words, whatever
the number of ranks, for k entries that it sends and k that are shared: below the 6k of Ok-Topk.

1. Each rank sends its entries to their owners, which sum them (`sparse_reduce_scatter`).
2. All owners agree on the last entry that is shared, by counting entries digit by digit.
3. Owners send what is shared to all (`sparse_all_gather`).

Sources: Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning" (PPoPP'22),
sections 3 and 4; it estimates its threshold from earlier steps, while this one is exact in each.
The digits are those of a radix selection: Alabi et al., "Fast k-selection algorithms for graphics
processing units" (ACM JEA 2012), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..base.tensors import as_bytes
from ..call.opening import opened
from ..call.statement import BODY
from ..group.group import Group
from ..sparse import last_call
from ..sparse.family import all_gather, reduce_scatter
from ..sparse.record import note
from ..sparse.request import Request
from ..sparse.rows import Rows

_EAGER_RANKS = 3  # up to which entries may go to all with the opening exchange, in 2k words each
_LONG = 8  # bits of a digit, for fewer exchanges
_SHORT = 4  # the same for fewer counts in each
_FEW = 64  # entries to select for each count: with fewer the counts would be much of the traffic
_NAME = "sync_sparsified"  # the call that this is part of
_COUNT = torch.int32  # the dtype of a count as it travels


def mean_of_largest(
    group: Group, request: Request, starts: Sequence[int], most: Sequence[int]
) -> Rows:
    """Average rows of numbers over the ranks, and share the largest means of each tensor.

    Collective; runs in a call whose turn it is. Afterwards `last_call` has all three steps.

    Args:
        group: the ranks that take part.
        request: an "avg" of rows of shape `()`, whose indices are those of several tensors, one
            after the other.
        starts: the first index of each tensor, and the end of the last.
        most: how many entries of each tensor to share; the same on every rank.

    Returns:
        The same rows on every rank, sorted by index. Of equal means the one of the lowest index
        is taken.

    Raises:
        WeftError: as `sparse_reduce_scatter`.
    """
    if group.size > _EAGER_RANKS:
        request.algorithm = "reduce_scatter"  # one that is asked for by name opens without entries
    # a name of its own: it must not be taken for another rank's call of `sparse_reduce_scatter`
    owned = reduce_scatter.job_of(group, request, name=_NAME).run()
    summed = last_call(group)
    assert summed is not None
    shared = _largest_of_all(group, owned, starts, most)
    chosen = Rows(owned.indices[shared], owned.values[shared], owned.height)
    result: Rows = all_gather.job_of(group, Request.to_move(chosen, request.rounded)).run()
    gathered = last_call(group)
    assert gathered is not None
    note(
        group,
        f"{summed.algorithm} and {gathered.algorithm}",
        why="",
        rows=summed.rows,
        total=summed.total,
        union=len(result),
        bound=summed.bound_bytes + gathered.bound_bytes,
    )
    return result


def _largest_of_all(
    group: Group, owned: Rows, starts: Sequence[int], most: Sequence[int]
) -> Tensor:
    """Which of this rank's means are among the largest of all: `[rows]`, bool."""
    cuts = torch.searchsorted(owned.indices, owned.indices.new_tensor(starts)).tolist()
    bits = _digit_bits(most)
    together = BODY // (_COUNT.itemsize << bits)  # tensors whose counts fit in one exchange
    found = []
    for first in range(0, len(most), together):
        end = min(first + together, len(most))
        rows = slice(cuts[first], cuts[end])
        keys = _Keys.of(owned.values[rows], owned.indices[rows], starts[-1])
        counts = torch.tensor(cuts[first : end + 1]).diff()
        part = torch.arange(end - first).repeat_interleave(counts).to(keys.size.device)
        found.append(_selected(group, keys, part, most[first:end], bits))
    return torch.cat([owned.indices.new_empty(0, dtype=torch.bool), *found])


def _digit_bits(most: Sequence[int]) -> int:
    """Bits of the digits by which so many entries of each tensor are selected."""
    if len(most) << _LONG <= sum(most) // _FEW:
        return _LONG
    return _SHORT


class _Keys:
    """Numbers that order entries: by magnitude and, of equal ones, by index, the lowest first.

    Attributes:
        size: magnitudes, as whole numbers in the same order.
        place: as whole numbers in the opposite order of the indices.
    """

    def __init__(self, size: Tensor, place: Tensor, widths: tuple[int, int]) -> None:
        self.size = size
        self.place = place
        self._widths = widths

    @classmethod
    def of(cls, values: Tensor, indices: Tensor, end: int) -> _Keys:
        """The keys of values at indices below `end`. NaN counts as infinity."""
        wide = torch.promote_types(values.dtype, torch.float32)
        size = values.abs().to(wide).nan_to_num_(math.inf, math.inf)
        # of numbers that are not negative, a larger one is larger as a whole number, too
        bits = size.view(torch.int64 if wide is torch.float64 else torch.int32).long()
        return cls(bits, end - 1 - indices.long(), (8 * wide.itemsize, max(1, end).bit_length()))

    def digits(self, bits: int) -> Iterator[Tensor]:
        """Digits of so many bits, the most significant one first."""
        for number, width in zip((self.size, self.place), self._widths, strict=True):
            for shift in range(-(-width // bits) * bits - bits, -1, -bits):
                yield number >> shift & (1 << bits) - 1


def _selected(group: Group, keys: _Keys, part: Tensor, most: Sequence[int], bits: int) -> Tensor:
    """Which of this rank's entries are among the `most[t]` largest of each part t; collective.

    From digit to digit, entries with a larger digit than that of the last entry that fits are
    selected, and those with a smaller one are not. All ranks know the counts, so all know when it
    is decided of every entry.
    """
    radix = 1 << bits
    left = torch.tensor(most)
    selected = torch.zeros_like(part, dtype=torch.bool)
    undecided = torch.ones_like(selected)
    for digit in keys.digits(bits):
        own = torch.bincount((part * radix + digit)[undecided], minlength=len(most) * radix)
        counts = _summed(group, own.to(_COUNT).cpu().view(len(most), radix))
        # [part, digit]: entries of this digit or a larger one
        above = counts.flip(1).cumsum(1).flip(1)
        # the largest digit of which not all entries fit; -1: all fit
        border = (above > left[:, None]).sum(1) - 1
        beyond = torch.nn.functional.pad(above, (0, 1)).gather(1, border[:, None] + 1)[:, 0]
        left -= beyond
        decided = (border < 0) | (left == 0)
        limit = border.to(part.device)[part]
        selected |= undecided & (digit > limit)
        undecided &= (digit == limit) & ~decided.to(part.device)[part]
        if bool(decided.all()):
            break
    return selected


def _summed(group: Group, counts: Tensor) -> Tensor:
    """The sums of the ranks' counts, which fit in a statement; collective.

    Above 16 ranks they travel in log2 P rounds, each of as many bytes.
    """

    def read(body: memoryview) -> Tensor:
        found = np.frombuffer(body, np.int32).reshape(counts.shape)
        return torch.from_numpy(found.astype(np.int64))

    def added(lower: memoryview, upper: memoryview) -> bytes:
        first, second = (np.frombuffer(each, np.int32) for each in (lower, upper))
        return (first + second).tobytes()

    body = as_bytes(counts).numpy().data
    with opened(group, "the selection of entries", {}, None, body, added) as opening:
        return torch.stack(opening.read(read)).sum(0)
