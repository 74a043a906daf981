"""Schedules for plans that are a well-known collective, when there is much to move.

* all_gather: round a ring. Each rank hears its left neighbour and tells its right one; a chunk is
  sent on as soon as it is there, so one stream fills each link.
* broadcast and sum_reduce: along a chain, chunk by chunk. Every link carries the tensor once,
  however many ranks there are; a sum grows on its way to the root.
* reduce_scatter: each part straight to its owner, which adds up in rank order, chunk by chunk.
* all_reduce: parts to their owners, sums to all (`wire.dense`).

Ring and chain: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 2009); the
pipelined chain is folklore of MPI libraries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

import torch
from torch import Tensor

from ..grid import Box
from ..plan import Hint, Plan
from ..wire import dense
from ..wire.base import Pending, Wire
from ..wire.dense import SCRATCH, reduce_parts
from ..wire.memory import Lease, typed
from .opening import among

__all__ = ["BY_HINT", "CHUNK", "all_reduce"]

_CHANNEL = 9  # that no other room uses
CHUNK = 512 << 10  # bytes
_AHEAD = 3  # chunks of each peer that an owner of a sum has room for
_SLOTS = 8  # chunks that a chain is ahead at the most

Schedule = Callable[[Plan, Tensor, Tensor | None, Wire, int], None]
"""(plan, this rank's tensor, its result to be written, the wire of the group, bytes of a chunk)"""


def _boxes(plan: Plan) -> tuple[Mapping[int, Box], Mapping[int, Box]]:
    have, want = plan.have.whole, plan.want.whole
    assert have is not None and want is not None
    return have, want


def _chunks(flat: Tensor, nbytes: int) -> list[Tensor]:
    """The chunks of a contiguous tensor; one at least."""
    flat = flat.view(-1)
    step = max(1, nbytes // flat.element_size())
    return [flat[start : start + step] for start in range(0, max(1, len(flat)), step)]


def all_gather(plan: Plan, x: Tensor, y: Tensor | None, wire: Wire, nbytes: int) -> None:
    have, want = _boxes(plan)
    assert y is not None
    ranks, origin = plan.ranks, want[wire.rank].start
    me, count = ranks.index(wire.rank), len(ranks)
    left, right = ranks[me - 1], ranks[(me + 1) % count]
    places = {rank: y[box.seen_from(origin).slices] for rank, box in have.items()}
    leases: list[Lease] = []

    def flat(place: Tensor) -> Tensor:
        """Where a part is received: its place, or a workspace."""
        if place.is_contiguous():
            return place
        leases.append(wire.lease(place.numel() * place.element_size()))
        return typed(leases[-1].tensor, tuple(place.shape), place.dtype)

    before = [ranks[(me - distance) % count] for distance in range(1, count)]  # as they come
    parts = {rank: flat(places[rank]) for rank in before}
    coming = {
        rank: [(c, wire.post((), [(left, c)], _CHANNEL)) for c in _chunks(parts[rank], nbytes)]
        for rank in before
        if parts[rank].numel()
    }
    own = x if x.is_contiguous() else flat(places[wire.rank])
    if own is not x:
        own.copy_(x)
    mine = _chunks(own, nbytes) if own.numel() else []
    going = [wire.post([(right, chunk)], (), _CHANNEL) for chunk in mine]
    if own is not places[wire.rank]:
        places[wire.rank].copy_(own)
    for rank, chunks in coming.items():
        for chunk, pending in chunks:
            pending.wait()
            if rank != right:
                going.append(wire.post([(right, chunk)], (), _CHANNEL))
        if parts[rank] is not places[rank]:
            places[rank].copy_(parts[rank])
    _finish(going, leases)


def broadcast(plan: Plan, x: Tensor, y: Tensor | None, wire: Wire, nbytes: int) -> None:
    have, want = _boxes(plan)
    (root,) = have
    chain = [root, *(rank for rank in _after(root, plan.ranks) if rank in want)]
    at = chain.index(wire.rank)
    then = chain[at + 1] if at + 1 < len(chain) else None
    going: list[Pending] = []
    if at == 0:
        source = x.contiguous()
        if then is not None:
            going = [wire.post([(then, chunk)], (), _CHANNEL) for chunk in _chunks(source, nbytes)]
        if y is not None:
            y.copy_(x)
    else:
        assert y is not None
        coming = [(c, wire.post((), [(chain[at - 1], c)], _CHANNEL)) for c in _chunks(y, nbytes)]
        for chunk, pending in coming:
            pending.wait()
            if then is not None:
                going.append(wire.post([(then, chunk)], (), _CHANNEL))
    _finish(going, [])


def sum_reduce(plan: Plan, x: Tensor, y: Tensor | None, wire: Wire, nbytes: int) -> None:
    have, want = _boxes(plan)
    (root,) = want
    chain = [rank for rank in _after(root, plan.ranks) if rank in have] + [root]
    at = chain.index(wire.rank)
    before = chain[at - 1] if at else None
    then = chain[at + 1] if at + 1 < len(chain) else None
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    mine = _chunks(x.contiguous(), nbytes) if wire.rank in have else None
    into = _chunks(y, nbytes) if y is not None else None
    sizes = [len(chunk) for chunk in (mine or into or ())]
    count, room = len(sizes), max(sizes)
    with wire.lease(_SLOTS * room * wide.itemsize) as memory:
        slots = typed(memory, (_SLOTS, room), wide)
        coming: list[Pending] = []
        going: list[Pending] = []

        def receive(number: int) -> None:
            if before is not None and number < count:
                slot = slots[number % _SLOTS][: sizes[number]]
                coming.append(wire.post((), [(before, slot)], _CHANNEL))

        for number in range(_SLOTS // 2):
            receive(number)
        for number, size in enumerate(sizes):
            if number >= _SLOTS // 2 and going:
                going[number - _SLOTS // 2].wait()  # so that its slot is free again
            receive(number + _SLOTS // 2)
            slot = slots[number % _SLOTS][:size]
            if before is not None:
                coming[number].wait()
                if mine is not None:
                    slot.add_(mine[number])
            elif mine is not None:
                slot.copy_(mine[number])
            if then is not None:
                going.append(wire.post([(then, slot)], (), _CHANNEL))
            elif into is not None:
                into[number].copy_(slot)
        _finish(going, [])


def reduce_scatter(plan: Plan, x: Tensor, y: Tensor | None, wire: Wire, nbytes: int) -> None:
    have, want = _boxes(plan)
    assert y is not None
    origin, ranks = have[wire.rank].start, plan.ranks
    peers = [rank for rank in wire.peers if rank in want]
    leases: list[Lease] = []

    def flat(rank: int) -> Tensor:
        """What goes to a rank, in one piece of memory."""
        part = x[want[rank].seen_from(origin).slices]
        if part.is_contiguous():
            return part.view(-1)
        leases.append(wire.lease(part.numel() * part.element_size()))
        packed = typed(leases[-1].tensor, tuple(part.shape), part.dtype)
        return packed.copy_(part).view(-1)

    mine = y.view(-1)
    step = max(1, min(SCRATCH // len(peers), nbytes) // x.element_size())
    coming: deque[tuple[Pending, Lease]] = deque()
    starts = iter(range(0, len(mine), step))

    def expect() -> None:
        """Post the receives of the next chunk, from each peer."""
        for start in islice(starts, 1):
            here = mine[start : start + step]
            lease = wire.lease(len(peers) * here.numel() * here.element_size())
            slots = typed(lease.tensor, (len(peers), len(here)), here.dtype)
            recvs = list(zip(peers, slots, strict=True))
            coming.append((wire.post((), recvs, _CHANNEL), lease))

    for _ in range(_AHEAD):
        expect()
    outgoing = {peer: flat(peer) for peer in peers if want[peer].volume}
    longest = max(box.volume for box in want.values())
    going = [
        wire.post([(peer, part[start : start + step])], (), _CHANNEL)
        for start in range(0, longest, step)
        for peer, part in outgoing.items()
        if start < len(part)
    ]
    y.copy_(x[want[wire.rank].seen_from(origin).slices])
    for start in range(0, len(mine), step):
        pending, lease = coming.popleft()
        here = mine[start : start + step]
        values = dict(zip(peers, pending.wait(), strict=True))
        values[wire.rank] = here
        reduce_parts([values[rank] for rank in ranks], here)
        lease.release()
        expect()
    _finish(going, leases)


def all_reduce(plan: Plan, x: Tensor, y: Tensor | None, wire: Wire) -> None:
    assert y is not None
    flat, source = y.view(-1), x.contiguous().view(-1)
    if y.is_complex():
        flat, source = torch.view_as_real(flat).view(-1), torch.view_as_real(source).view(-1)
    dense.all_reduce(among(wire, tuple(plan.ranks)), flat, "sum", source=source).wait()


def _after(root: int, ranks: list[int]) -> list[int]:
    """The other ranks, from the one after the root on."""
    return [r for r in ranks if r > root] + [r for r in ranks if r < root]


def _finish(going: list[Pending], leases: list[Lease]) -> None:
    for pending in going:
        pending.wait()
    for lease in leases:
        lease.release()


BY_HINT: dict[Hint, Schedule] = {
    "all_gather": all_gather,
    "broadcast": broadcast,
    "sum_reduce": sum_reduce,
    "reduce_scatter": reduce_scatter,
}
