"""The largest entries of a tensor: which of them a rank sends.

On the CPU nothing is sorted: a threshold is estimated from a sample, so low that somewhat more
entries pass it than are needed, and the exact choice is made among those. An accelerator sorts
fast, and the host would wait for each number of entries: there all are sorted. The choice is the
same.

Source: Lin et al., "Deep gradient compression" (ICLR 2018, arXiv 1712.01887), section 5, has the
threshold from a sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SAMPLED = 64  # about so many entries of a sample reach its threshold
# A threshold aims at this multiple of the entries that are needed; the second is tried if too few
# pass the first. If too few pass that one, too, all entries that are not zero are candidates.
AIMS = (1.5, 5.0)
_GOLDEN = 0.6180339887498949


def entries_to_send(values: Tensor, density: float) -> tuple[Tensor, Tensor]:
    """The places of the entries of a 1-D tensor that are sent, ascending; none of them is zero.

    Args:
        values: the tensor.
        density: the fraction of entries, rounded up to whole ones.

    Returns:
        The places, behind which others may follow, and how many they are.

    Example:
        >>> entries_to_send(torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0, 0.5]), 0.3)
        (tensor([1, 2]), tensor(2))
    """
    # NaN counts as infinity: it is sent, so that every rank sees it
    size = values.abs().nan_to_num_(math.inf, math.inf)
    count = math.ceil(density * len(size))
    if not size.is_cpu:
        return largest_by_sort(size, count)
    places = largest_entries(size, count)
    return places, torch.tensor(len(places), device="cpu")


def largest_by_sort(size: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `largest_entries`, with what `entries_to_send` returns: the host waits for nothing."""
    order = size.sort(descending=True, stable=True).indices[:count]
    is_sent = size[order] > 0
    places = torch.where(is_sent, order, len(size)).sort().values
    return places, is_sent.sum()


def largest_entries(size: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of numbers that are not negative, ascending, without zeros.

    They are on the CPU. Of equal numbers the first are taken, so the result does not depend on
    torch's `topk`.
    """
    for limit in (*(_estimate(size, aim * count) for aim in AIMS), 0.0):
        where = (size >= limit if limit else size > 0).nonzero().view(-1)
        if len(where) >= count or not limit:
            break
    if len(where) <= count:
        return where
    among = size[where]
    least = among.topk(count, sorted=False).values.amin()
    taken = among > least
    equal = (among == least).nonzero().view(-1)
    taken[equal[: count - int(taken.sum())]] = True
    return where[taken]


def _estimate(size: Tensor, count: float) -> float:
    """A threshold that about `count` of the numbers reach, estimated from a sample of them."""
    total = len(size)
    most = min(total, math.ceil(_SAMPLED * total / count))
    sample = size
    if 4 * most < total:
        # a golden-ratio step spreads the sample, whatever the rows and columns of the tensor are
        step = int(total * _GOLDEN)
        while math.gcd(step, total) > 1:
            step += 1
        sample = size[torch.arange(most, device=size.device) * step % total]
    most = len(sample)
    above = sample.topk(min(most, math.ceil(most * count / total)), sorted=False).values
    return float(above.amin())
