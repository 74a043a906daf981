"""Reductions of what each rank has for a rank: in chunks, in rank order, or each host's first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..base.memory import typed
from ..base.tensors import extent, share_addresses
from ..comm.staging import swapped
from ..group.group import Group
from ..schedules import dense
from ..schedules.hosts import Grid, grid_of
from .exchanges import exchange, open_and_exchange, open_call
from .tensors import flat_of, place_for, put


def open_and_reduce(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    out: Tensor,
    parts: Sequence[Tensor],
    op: str,
) -> None:
    """Open a call, and reduce every rank's `parts[p]` on rank p, into its `out`, in chunks."""
    flats, place = [flat_of(part) for part in parts], place_for(out)
    span = extent(place)
    if any(share_addresses(span, each) and each != span for each in map(extent, flats)):
        place = torch.empty_like(place)  # chunks of the result would be written before others go
    step = max(1, dense.SCRATCH // group.size // max(1, out.element_size()))
    is_large = max(flat.nbytes for flat in flats) > dense.SMALL
    grid = grid_of(group) if is_large else None
    if grid is not None:
        open_call(group, call, fields, None)
        for start in range(0, max(map(len, flats)), step):
            chunks = [flat[start : start + step] for flat in flats]
            _reduce_by_hosts(group, grid, chunks, op, place[start : start + step])
        put(place, out)
        return
    for start in range(0, max(1, *map(len, flats)), step):
        chunks = [flat[start : start + step] for flat in flats]
        mine = len(chunks[group.rank])
        with group.lease(group.size * chunks[group.rank].nbytes) as memory:
            slots = list(typed(memory, (group.size, mine), out.dtype))
            takes = [None if rank == group.rank else slot for rank, slot in enumerate(slots)]
            if start == 0:
                open_and_exchange(group, call, fields, chunks, takes)
            else:
                exchange(group, chunks, takes)
            slots[group.rank] = chunks[group.rank]
            if mine:
                dense.reduce(slots, op, place[start : start + step], grid)
    put(place, out)


def _reduce_by_hosts(
    group: Group, grid: Grid, parts: Sequence[Tensor], op: str, out: Tensor
) -> None:
    """Reduce every rank's `parts[p]` on rank p: on each host what its ranks have, then the rest.

    So a host's link carries a part once.
    """
    column = grid.column(group.rank)
    mine = [parts[rank] for rank in column]  # what this rank reduces of its host's
    given = {peer: [parts[rank] for rank in grid.column(peer)] for peer in grid.row}
    taken = {peer: _like(mine) if peer != group.rank else mine for peer in grid.row}
    swapped(group, given, taken).wait()
    totals = [dense.partial(each, op, out.dtype) for each in zip(*taken.values(), strict=True)]
    by_host = {peer: [total] for peer, total in zip(column, totals, strict=True)}
    own = by_host[group.rank]
    others = {peer: _like(own) if peer != group.rank else own for peer in column}
    swapped(group, by_host, others).wait()
    (hosts,) = zip(*others.values(), strict=True)
    dense.complete(dense.partial(hosts, op, own[0].dtype), op, group.size, out)


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for as many tensors of these kinds."""
    return [torch.empty_like(each) for each in tensors]
