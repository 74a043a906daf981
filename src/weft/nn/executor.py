"""Carries a plan out: every rank sends what others want of its tensor, and gathers its own result.

A message holds all boxes that go from one rank to another. What lies together in memory is sent
from where it is, and received where it belongs; the rest is packed into leased workspaces. What
stays on a rank is copied. Nothing is padded, and no zeros travel.

Plans that are well-known collectives have schedules of their own:

* broadcast and sum_reduce of more than 64 KiB: along a chain, chunk by chunk. Every link carries
  the tensor once, however many ranks there are; a sum grows on its way to the root.
* all_reduce: the group's own.

Tensors that the wire does not carry, such as those of accelerators, go by one verb of all ranks of
the call, also of those that send and receive nothing: a broadcast, a reduction, which serves
sum_reduce, too, or an exchange, in which each message lies behind the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..base.memory import fresh, typed
from ..base.tensors import Shape
from ..group.channels import LAYERS
from ..group.group import Group
from ..group.pending import Pending
from ..schedules import dense_all_reduce
from ..schedules.chain import Chain
from ..verbs.interface import Verbs
from ..wire.interface import Lease
from .grid import Box
from .plan import Local, Plan, Write

DIRECT = 64 << 10  # bytes of a rank's tensor up to which every plan goes by direct messages

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
"""The dtypes in which values of narrow dtypes are added."""

_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def has_addition(dtype: torch.dtype) -> bool:
    """Whether torch sums values of this type: most integers, floating point but float8, complex.

    Example:
        >>> has_addition(torch.int8), has_addition(torch.uint16), has_addition(torch.float8_e5m2)
        (True, False, False)
    """
    float8 = dtype.is_floating_point and dtype.itemsize == 1
    return dtype in _INTEGERS or dtype.is_complex or (dtype.is_floating_point and not float8)


def execute(
    plan: Plan, x: Tensor, group: Group, ranks: tuple[int, ...], verbs: Verbs | None
) -> Tensor:
    """Carry out a plan; return this rank's result, a new tensor. Collective among the ranks.

    Args:
        plan: the same on all of them; ranks as the group counts.
        x: this rank's tensor, of the shape that the plan has for it; ignored, but for its dtype
            and device, if that has none.
        group: of all ranks.
        ranks: that take part, ascending.
        verbs: of these, by which the tensor goes; None: the wire carries it.
    """
    hint = plan.hint if len(plan.ranks) == len(ranks) else None
    if hint == "all_reduce" or (verbs is not None and hint == "sum_reduce"):
        return _reduced(plan, x, group, ranks)
    if verbs is not None:
        carry_out = _broadcast if hint == "broadcast" else _by_an_exchange
        return carry_out(plan, x, ranks, verbs)
    if hint is not None and math.prod(_shape(plan)) * x.dtype.itemsize > DIRECT:
        return _along_a_chain(plan, x, group)
    return _directly(plan, x, group)


def among(group: Group, ranks: tuple[int, ...]) -> Group:
    """The group of some ranks: itself if these are all."""
    return group if ranks == tuple(range(group.size)) else group.subset(ranks)


def _shape(plan: Plan) -> Shape:
    """That of all tensors of a plan which a collective carries out."""
    return next(iter(plan.have.shapes.values()))


def _reduced(plan: Plan, x: Tensor, group: Group, ranks: tuple[int, ...]) -> Tensor:
    """The sum of all tensors, on every rank. Who has none adds zeros."""
    wide = torch.complex64 if x.dtype is torch.complex32 else x.dtype  # which has no sums
    total = fresh(_shape(plan), wide, x.device)
    if group.rank in plan.have.shapes:
        total.copy_(x)
    else:
        total.zero_()
    dense_all_reduce(among(group, ranks), total, "sum").wait()
    return total.to(x.dtype)


def _broadcast(plan: Plan, x: Tensor, ranks: Sequence[int], verbs: Verbs) -> Tensor:
    """The tensor of the one rank that has one, on all."""
    (root,) = plan.have.shapes
    y = fresh(_shape(plan), x.dtype, x.device)
    if ranks[verbs.rank] == root:
        y.copy_(x)
    verbs.broadcast(y, ranks.index(root))
    return y


def _by_an_exchange(plan: Plan, x: Tensor, ranks: Sequence[int], verbs: Verbs) -> Tensor:
    """Carry out a plan by one exchange, whose lengths all ranks know from it."""
    own = ranks[verbs.rank]
    local = plan.local(own)
    takes = [local.sends.get(peer, ()) for peer in ranks]
    sources = [local.sources.get(peer, []) if peer != own else [] for peer in ranks]
    puts = [[put for _, put in moves] for moves in sources]
    goes = [_volume(boxes) for boxes in takes]
    comes = [_volume(boxes) for boxes in puts]
    mine = fresh((sum(goes),), x.dtype, x.device)
    _pack(x, [take for boxes in takes for take in boxes], mine)
    messages = torch.split(verbs.exchange(mine, goes, comes), comes)
    came: dict[int, Tensor | list[Tensor]] = dict(
        zip(ranks, map(_split, messages, puts), strict=True)
    )
    came[own] = x
    return assemble(plan, came, own, x.dtype, x.device)


def assemble(
    plan: Plan,
    came: Mapping[int, Tensor | list[Tensor]],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The result of a rank, once it has what comes from the others; nothing is sent.

    Args:
        plan: whose ranks they are.
        came: from each rank its whole tensor, or the values of its moves.
        rank: whose result it is.
        dtype, device: of the tensors.
    """
    local = plan.local(rank)
    y = _room(local, dtype, device)
    for source, writes in local.writes.items():
        _write(y, writes, came[source])
    return y.to(dtype)


def _room(local: Local, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a result, of a wider type where values of a narrow one are added up."""
    y = fresh(local.result, _WIDE.get(dtype, dtype) if local.adds else dtype, device)
    for box in local.blank:
        y[box.slices].zero_()
    return y


def _write(y: Tensor, writes: Iterable[Write], given: Tensor | Sequence[Tensor]) -> None:
    """Write or add to a result what one rank sent: its whole tensor, or the values of its moves.

    Every rank does so in ascending order of the senders, so equal sums have equal bits.
    """
    for move, of, take, put, first in writes:
        value = given[take] if isinstance(given, Tensor) else given[move][of]
        (y[put].copy_ if first else y[put].add_)(value)


def _directly(plan: Plan, x: Tensor, group: Group) -> Tensor:
    """Carry out a plan by direct messages: each rank sends its boxes to those that need them."""
    local = plan.local(group.rank)
    y = _room(local, x.dtype, x.device)
    coming: dict[int, Pending] = {}
    in_place = set()
    for peer in reversed(group.peers):  # as they send
        if peer not in local.sources:
            continue
        place: Tensor | int | None = _place(y, local.writes[peer], x.dtype)
        if place is not None:
            in_place.add(peer)
        else:  # bytes, to be split
            place = _volume(put for _, put in local.sources[peer]) * x.element_size()
        coming[peer] = group.post((), [(peer, place)], LAYERS)
    leases: list[Lease] = []
    messages: dict[tuple[Box, ...], Tensor] = {}  # the same to several peers is one
    for takes in local.sends.values():
        if takes not in messages:
            messages[takes] = _packed(x, takes, group, leases)
    sends = [(peer, messages[local.sends[peer]]) for peer in group.peers if peer in local.sends]
    going = [group.post(sends, (), LAYERS)] if sends else []
    for source, moves in local.sources.items():
        if source == group.rank:
            _write(y, local.writes[source], x)
            continue
        (message,) = coming[source].wait()
        if source not in in_place:
            values = _split(message.view(x.dtype), [put for _, put in moves])
            _write(y, local.writes[source], values)
            coming[source].release()
    for pending in going:
        pending.wait()
    for lease in leases:
        lease.release()
    return y.to(x.dtype)


def _place(y: Tensor, writes: Sequence[Write], dtype: torch.dtype) -> Tensor | None:
    """The part of the result that a message fills as it is; None if it must be split or added."""
    if len(writes) > 1 or not writes[0].first or y.dtype is not dtype:
        return None
    place = y[writes[0].put]
    return place if place.is_contiguous() else None


def _packed(x: Tensor, takes: Sequence[Box], group: Group, leases: list[Lease]) -> Tensor:
    """The boxes as one message."""
    first = x[takes[0].slices]
    if len(takes) == 1 and first.is_contiguous():
        return first
    lease = group.lease(_volume(takes) * x.element_size())
    leases.append(lease)
    message = lease.tensor.view(x.dtype)
    _pack(x, takes, message)
    return message


def _pack(x: Tensor, takes: Sequence[Box], message: Tensor) -> None:
    """Write the values of these boxes to a message, 1-D, one after the other."""
    for take, place in zip(takes, _split(message, takes), strict=True):
        place.copy_(x[take.slices])


def _split(message: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """The values of each box of a message, 1-D."""
    parts = torch.split(message, [box.volume for box in boxes])
    return [part.view(box.shape) for part, box in zip(parts, boxes, strict=True)]


def _volume(boxes: Iterable[Box]) -> int:
    """How many values boxes have together."""
    return sum(box.volume for box in boxes)


def _along_a_chain(plan: Plan, x: Tensor, group: Group) -> Tensor:
    """Carry out a broadcast or a sum_reduce along a chain of ranks."""
    shape = _shape(plan)
    dtype = x.dtype
    if plan.hint == "sum_reduce":
        dtype = _WIDE.get(dtype, dtype)
        (root,) = plan.want.shapes
    else:
        (root,) = plan.have.shapes
    # behind the root come the ranks above it, then those below
    others = sorted({*plan.ranks} - {root}, key=lambda rank: (rank < root, rank))
    chain = [*others, root] if plan.hint == "sum_reduce" else [root, *others]
    y = fresh(shape, x.dtype) if group.rank in plan.want.shapes else x.new_empty(0)
    lease = None
    total = y
    if group.rank not in plan.want.shapes or dtype != x.dtype:
        lease = group.lease(math.prod(shape) * dtype.itemsize)
        total = typed(lease.tensor, shape, dtype)
    own = x.reshape(-1) if group.rank in plan.have.shapes else None
    Chain(group, chain, total.view(-1), own).start().wait()
    if lease is not None:
        if group.rank in plan.want.shapes:
            y.copy_(total)
        lease.release()
    return y
