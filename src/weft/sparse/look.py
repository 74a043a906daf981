"""What a rank finds of its indices before it opens a call by verbs: of a device with one read.

It sorts them, unless they only move, and finds how many there are without duplicates, and which is
the largest. Where one is out of bounds, that is known before anything is sent.
Tables of a list that are of one kind are sorted as one: by table, and then by index.

Those of the CPU the kernels sort; they were checked as they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor

from .. import kernels
from ..base.errors import WeftError
from ..base.tensors import there
from ..kernels import Distinct
from ..kernels.kinds import Kinds
from ..verbs.interface import Verbs
from .request import Request
from .tall import Tall, shifted


def look_at(verbs: Verbs, request: Request) -> None:
    """Check the indices of a table, and sort them unless they only move; one read.

    Raises:
        WeftError: an index is out of bounds.
    """
    indices = request.rows.indices
    if request.moves:
        request.look_at_ends(verbs.read)
    elif indices.numel() and not kernels.on_host(indices):  # else they are sorted
        (request.distinct,) = looks_at(verbs, [[request]])


def looks_at(verbs: Verbs, kinds: Sequence[Sequence[Request]]) -> list[Distinct]:
    """Check and sort the indices of tables, those of a kind together; one read.

    Args:
        verbs: that carry them.
        kinds: for each kind its tables; none of these is empty.

    Returns:
        For each kind the distinct keys, in some space; those of a single table are its indices.

    Raises:
        WeftError: an index is out of bounds.
    """
    if not kinds or kernels.on_host(kinds[0][0].rows.indices):
        return [_by_kernels(tables) for tables in kinds]
    begun = [_sorted(tables) for tables in kinds]
    numbers = iter(verbs.read(torch.cat([asked for _, asked in begun])))
    return [
        _seen(tables, sorted_, numbers) for tables, (sorted_, _) in zip(kinds, begun, strict=True)
    ]


def _by_kernels(tables: Sequence[Request]) -> Distinct:
    """The look at tables on the CPU, of which the largest indices are known."""
    tall = Tall.of(tables, (), [each.highest for each in tables])
    return kernels.distinct(tall.keys())


def _sorted(tables: Sequence[Request]) -> tuple[Kinds, Tensor]:
    """The keys of tables on a device, sorted, and what the host has to read of them."""
    ends: Sequence[Tensor]
    if len(tables) == 1:
        kinds = Kinds.of(tables[0].rows.indices)
        ends = kinds.ascending[:1], kinds.ascending[-1:]
    else:
        indices = torch.cat([each.rows.indices for each in tables])
        counts = [len(each.rows) for each in tables]
        room = _room(tables)
        # what is outside becomes -1 or `room - 1`, which are no keys of indices: it stays with its
        # table, as the sort is stable, before or behind all others
        inside = indices.long().clamp(-1, room - 1)
        kinds = Kinds.of(shifted(inside, counts, range(0, room * len(tables), room)))
        stops = [*accumulate(counts)]
        places = there([0, *stops[:-1], *(stop - 1 for stop in stops)], kinds.order)
        ends = (indices.index_select(0, kinds.order.index_select(0, places)),)
    most = kinds.starts(len(kinds.order)).diff().max().view(1)
    return kinds, torch.cat([kinds.total, most, *ends])  # promotes to int64


def _seen(tables: Sequence[Request], kinds: Kinds, numbers: Iterator[int]) -> Distinct:
    """The look at tables on a device, once the host has those numbers."""
    count, most, *ends = islice(numbers, 2 + 2 * len(tables))
    for request, low, high in zip(tables, ends, ends[len(tables) :], strict=False):
        request.take_ends(low, high)
        if high > _room(tables) - 2:
            where = "a list: pass it alone" if len(tables) > 1 else "a device: pass .cpu()"
            raise WeftError(f"{request.naming}index {high} is too large for {where}")
    if count == len(kinds.order):
        return Distinct(kinds.ascending, kinds.order, None, 1)
    return kinds.distinct(count, most)


def _room(tables: Sequence[Request]) -> int:
    """How many keys each of some tables on a device has; the last one is of no index."""
    return 2**63 // len(tables)
