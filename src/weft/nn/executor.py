"""Carries a plan out: every rank sends what others want of its tensor, and gathers its own result.

A message holds all boxes that go from one rank to another. What lies together in memory is sent
from where it is, and received where it belongs; the rest is packed into leased workspaces. What
stays on a rank is copied. Nothing is padded, and no zeros travel.

A plan that is a well-known collective, of much data, takes a schedule of its own:

* all_gather: round a ring. Each rank hears its left neighbour and tells its right one; a chunk is
  sent on as soon as it is there, so one stream fills each link.
* broadcast and sum_reduce: along a chain, chunk by chunk. Every link carries the tensor once,
  however many ranks there are; a sum grows on its way to the root.
* all_reduce: the wire's own.

Ring and chain: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 2009); the
pipelined chain is folklore of MPI libraries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..grid import Box
from ..plan import Hint, Local, Plan
from ..wire.base import Lease, Pending, Wire, fresh, peers, typed
from .handshake import among

_CHANNEL = 8  # that no other room uses
_DIRECT = 64 << 10  # bytes of a rank's tensor up to which every plan goes by direct messages
_CHUNK = 512 << 10  # bytes
_AHEAD = 4  # chunks of a sum that a chain is ahead at the most

_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""What unsigned integers are seen as: torch cannot add these, but to the same bits."""

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
"""In what values of a narrow type are added up."""

_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_BITS}


def has_addition(dtype: torch.dtype) -> bool:
    """Whether values of this type can be summed: numbers of more than one byte's precision.

    Example:
        >>> has_addition(torch.bfloat16), has_addition(torch.bool)
        (True, False)
    """
    float8 = dtype.is_floating_point and dtype.itemsize == 1
    return dtype in _INTEGERS or dtype.is_complex or (dtype.is_floating_point and not float8)


def execute(plan: Plan, x: Tensor, wire: Wire, *, hinted: bool = True) -> Tensor:
    """This rank's result, fresh; collective among the ranks of the plan.

    Args:
        plan: the same on all of them; ranks as the wire counts.
        x: this rank's tensor on the CPU, of the shape that the plan has for it; ignored, but for
            its dtype, if that has none.
        wire: of the group.
        hinted: whether the plan's hint may be followed.
    """
    dtype = x.dtype
    x = x.view(_BITS.get(dtype, dtype))
    # only `_Result` adds complex32
    hint = plan.hint if hinted and dtype is not torch.complex32 else None
    schedule = _SCHEDULES.get(hint) if hint is not None else None
    if hint == "all_reduce":
        y = fresh(tuple(x.shape), x.dtype).copy_(x)
        among(wire, tuple(plan.ranks)).dense_all_reduce(y, "sum").wait()
    elif schedule is not None and plan.have.largest * x.element_size() > _DIRECT:
        shape = plan.local(wire.rank).result
        result = None if shape is None else fresh(shape, x.dtype)
        schedule(plan, x, result, wire)
        y = x.new_empty(0) if result is None else result
    else:
        y = _directly(plan, x, wire)
    return y.view(dtype)


def assemble(plan: Plan, tensors: Mapping[int, Tensor], rank: int, dtype: torch.dtype) -> Tensor:
    """The result of a rank that has everybody's tensor already; nothing is sent.

    Contributions add up in rank order, so ranks with the same sum have the same bits.
    """
    local = plan.local(rank)
    if local.result is None:
        return torch.empty(0, dtype=dtype)
    bits = _BITS.get(dtype, dtype)
    into = _Result(local, bits, local.sources[0][2] if local.sources else None)
    for source, take, put in local.sources:
        into.write(put, tensors[source].view(bits)[take.slices])
    return into.done(dtype)


class _Result:
    """A result under construction, summed in a wider type where values of a narrow one meet."""

    def __init__(self, local: Local, dtype: torch.dtype, first: Box | None) -> None:
        """Room for a result; `first` is the box that is written first, if that is known."""
        assert local.result is not None
        self._adds = local.adds
        self._copies_next = first is not None
        self.tensor = fresh(local.result, _WIDE.get(dtype, dtype) if self._adds else dtype)
        if self._adds or not local.fills:
            _clear_around(self.tensor, first)

    def write(self, put: Box, values: Tensor) -> None:
        place = self.tensor[put.slices]
        if self._adds and not self._copies_next:
            place.add_(values)
        else:
            place.copy_(values)
        self._copies_next = False

    def done(self, dtype: torch.dtype) -> Tensor:
        if self.tensor.dtype == dtype:
            return self.tensor
        return self.tensor.view(dtype) if dtype in _BITS else self.tensor.to(dtype)


def _clear_around(tensor: Tensor, box: Box | None) -> None:
    """Fill a tensor with zeros, but for a box of it."""
    if box is None:
        tensor.zero_()
        return
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        tensor.narrow(dim, 0, start).zero_()
        tensor.narrow(dim, stop, tensor.shape[dim] - stop).zero_()


def _directly(plan: Plan, x: Tensor, wire: Wire) -> Tensor:
    """Each box from its rank to those that want it.

    Contributions add up in rank order, but that what comes from nobody else is there first.
    """
    local = plan.local(wire.rank)
    into: _Result | None = None
    if local.result is not None:
        into = _Result(local, x.dtype, local.own[0][1] if local.own else None)
    coming: dict[int, tuple[Pending, bool]] = {}
    for peer in reversed(peers(wire)):  # as they send
        if puts := local.recvs.get(peer):
            assert into is not None
            place = into.tensor[puts[0].slices]
            apart = len(puts) > 1 or local.adds or not place.is_contiguous()
            size = sum(put.volume for put in puts) * x.element_size()
            recv = (peer, size if apart else place)
            coming[peer] = wire.post((), [recv], _CHANNEL), apart
    leases: list[Lease] = []
    messages: dict[tuple[Box, ...], Tensor] = {}  # the same to several peers is one
    for takes in local.sends.values():
        if takes not in messages:
            messages[takes] = _packed(x, takes, wire, leases)
    sends = [(peer, messages[local.sends[peer]]) for peer in peers(wire) if peer in local.sends]
    going = [wire.post(sends, (), _CHANNEL)] if sends else []
    if into is not None:
        for take, put in local.own:
            into.write(put, x[take.slices])
        for peer in sorted(coming):
            pending, apart = coming[peer]
            (message,) = pending.wait()
            if apart:
                for put, values in _split(message, local.recvs[peer], x.dtype):
                    into.write(put, values)
                pending.release()
    _finish(going, leases)
    return x.new_empty(0) if into is None else into.done(x.dtype)


def _packed(x: Tensor, takes: Sequence[Box], wire: Wire, leases: list[Lease]) -> Tensor:
    """The boxes as one message."""
    first = x[takes[0].slices]
    if len(takes) == 1 and first.is_contiguous():
        return first
    leases.append(wire.lease(sum(take.volume for take in takes) * x.element_size()))
    for take, place in _split(leases[-1].tensor, takes, x.dtype):
        place.copy_(x[take.slices])
    return leases[-1].tensor


def _split(
    memory: Tensor, found: Iterable[Box], dtype: torch.dtype
) -> Iterable[tuple[Box, Tensor]]:
    """The boxes of a message, each with its values."""
    at = 0
    for box in found:
        yield box, typed(memory, box.shape, dtype, at)
        at += box.volume * dtype.itemsize


# The schedules of plans that are a well-known collective


def _chunks(tensor: Tensor) -> list[Tensor]:
    """The chunks of a contiguous tensor; one at least."""
    flat, step = tensor.view(-1), max(1, _CHUNK // tensor.element_size())
    return [flat[start : start + step] for start in range(0, max(1, len(flat)), step)]


def _after(root: int, ranks: Iterable[int]) -> list[int]:
    """The other ranks, from the one after the root on."""
    return sorted((rank for rank in ranks if rank != root), key=lambda rank: (rank < root, rank))


def _all_gather(plan: Plan, x: Tensor, y: Tensor | None, wire: Wire) -> None:
    have, want = plan.have.whole, plan.want.whole
    assert have is not None and want is not None and y is not None
    ranks = [wire.rank, *_after(wire.rank, plan.ranks)]
    left, right = ranks[-1], ranks[1]
    places = {rank: y[have[rank].seen_from(want[wire.rank].start).slices] for rank in ranks}
    parts, leases = dict(places), []
    for rank, place in places.items():
        if not place.is_contiguous():  # it is put together elsewhere
            leases.append(wire.lease(place.numel() * place.element_size()))
            parts[rank] = typed(leases[-1].tensor, tuple(place.shape), place.dtype)
    before = [rank for rank in reversed(ranks[1:]) if parts[rank].numel()]  # as they come
    chunks = {rank: _chunks(parts[rank]) for rank in (wire.rank, *before)}
    coming = {
        rank: [wire.post((), [(left, chunk)], _CHANNEL) for chunk in chunks[rank]]
        for rank in before
    }
    parts[wire.rank].copy_(x)
    going = []
    for rank in (wire.rank, *before):
        for number, chunk in enumerate(chunks[rank]):
            if rank != wire.rank:
                coming[rank][number].wait()
            if rank != right and chunk.numel():
                going.append(wire.post([(right, chunk)], (), _CHANNEL))
        if parts[rank] is not places[rank]:
            places[rank].copy_(parts[rank])
    _finish(going, leases)


def _broadcast(plan: Plan, x: Tensor, y: Tensor | None, wire: Wire) -> None:
    (root,) = plan.have.shapes
    chain = [root, *(rank for rank in _after(root, plan.ranks) if rank in plan.want.shapes)]
    at = chain.index(wire.rank)
    then = chain[at + 1 : at + 2]
    if not at and y is not None:
        y.copy_(x)
    chunks = _chunks(x.contiguous() if y is None else y)
    coming = [wire.post((), [(chain[at - 1], each)], _CHANNEL) for each in chunks] if at else []
    going = []
    for number, chunk in enumerate(chunks):
        if at:
            coming[number].wait()
        if then:
            going.append(wire.post([(then[0], chunk)], (), _CHANNEL))
    _finish(going, [])


def _sum_reduce(plan: Plan, x: Tensor, y: Tensor | None, wire: Wire) -> None:
    (root,) = plan.want.shapes
    chain = [*(rank for rank in _after(root, plan.ranks) if rank in plan.have.shapes), root]
    at = chain.index(wire.rank)
    wide = _WIDE.get(x.dtype, x.dtype)
    mine = _chunks(x.contiguous()) if wire.rank in plan.have.shapes else None
    into = [] if y is None else _chunks(y)
    sizes = [len(chunk) for chunk in mine or into]
    coming: deque[Pending] = deque()
    going: deque[tuple[Pending, Lease]] = deque()

    def expect(number: int) -> None:
        if at and number < len(sizes):
            recv = (chain[at - 1], sizes[number] * wide.itemsize)
            coming.append(wire.post((), [recv], _CHANNEL))

    for number in range(_AHEAD):
        expect(number)
    for number, size in enumerate(sizes):
        lease = wire.lease(size * wide.itemsize)
        total = typed(lease.tensor, (size,), wide)
        if at:
            pending = coming.popleft()
            total.copy_(typed(pending.wait()[0], (size,), wide))
            pending.release()
            expect(number + _AHEAD)
        if mine is not None:
            (total.add_ if at else total.copy_)(mine[number])
        if wire.rank == root:
            into[number].copy_(total)
            lease.release()
            continue
        going.append((wire.post([(chain[at + 1], total)], (), _CHANNEL), lease))
        if len(going) > _AHEAD:
            pending, lease = going.popleft()
            _finish([pending], [lease])
    for pending, lease in going:
        _finish([pending], [lease])


def _finish(going: Iterable[Pending], leases: Iterable[Lease]) -> None:
    for pending in going:
        pending.wait()
    for lease in leases:
        lease.release()


_Schedule = Callable[[Plan, Tensor, Tensor | None, Wire], None]
"""(plan, this rank's tensor, its result to be written, the wire of the group)"""

_SCHEDULES: dict[Hint, _Schedule] = {
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "sum_reduce": _sum_reduce,
}
