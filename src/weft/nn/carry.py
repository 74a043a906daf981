"""Carrying a plan out: every rank sends what others want of its tensor, and gathers its own result.

A message holds all boxes that go from one rank to another. What lies together in memory is sent
from where it is, and received where it belongs; the rest is packed into leased workspaces. What
stays on a rank is copied. Nothing is padded, and no zeros travel.

Plans with a hint that are large enough take a schedule of their own (`schedules`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..grid import Box, Shape, beyond, whole
from ..kernels import copy
from ..plan import Local, Plan
from ..wire.base import Wire
from ..wire.memory import Lease, fresh, typed
from . import schedules

__all__ = ["assembled", "execute", "has_addition"]

_CHANNEL = 8  # that no other room uses
_DIRECT = 64 << 10  # bytes of a rank's part up to which every hint goes by direct messages

_WORTH = 64 << 10  # bytes of a result from which on what is written first is not zeroed before

_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""What unsigned integers are seen as: torch cannot add these, but to the same bits."""

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


def has_addition(dtype: torch.dtype) -> bool:
    """Whether values of this type can be summed: numbers of more than one byte's precision.

    Example:
        >>> has_addition(torch.bfloat16), has_addition(torch.bool)
        (True, False)
    """
    narrow = dtype.is_floating_point and dtype.itemsize == 1  # float8
    plain = dtype in _BITS or dtype.is_floating_point or dtype.is_complex
    return not narrow and (plain or dtype in _INTEGERS)


_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


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
    hinted = hinted and dtype is not torch.complex32  # which only `_Result` adds
    schedule = schedules.BY_HINT.get(plan.hint) if hinted and plan.hint else None
    if schedule is not None and _is_large(plan, dtype):
        local = plan.local(wire.rank)
        result = None if local.result is None else fresh(local.result, x.dtype)
        schedule(plan, x, result, wire, schedules.CHUNK)
        y = _nothing(x) if result is None else result
    elif plan.hint == "all_reduce" and hinted:
        y = fresh(tuple(x.shape), x.dtype)
        schedules.all_reduce(plan, x, y, wire)
    else:
        y = _directly(plan, x, wire)
    return y.view(dtype)


def assembled(plan: Plan, tensors: Mapping[int, Tensor], rank: int, like: Tensor) -> Tensor:
    """The result of a rank that has everybody's tensor already; nothing is sent.

    Contributions add up in rank order, so ranks with the same sum have the same bits.
    """
    local = plan.local(rank)
    if local.result is None:
        return _nothing(like)
    bits = _BITS.get(like.dtype)
    if not local.sources:
        return torch.zeros(local.result, dtype=like.dtype)
    if bits is None and (result := _at_once(local, tensors, like.dtype)) is not None:
        return result
    into = _Result(local, like.dtype if bits is None else bits, local.sources[0][2])
    for source, take, put in local.copied:
        tensor = tensors[source] if bits is None else tensors[source].view(bits)
        into.write(put, tensor[take] if take else tensor)
    return into.done(like.dtype)


def _at_once(local: Local, tensors: Mapping[int, Tensor], dtype: torch.dtype) -> Tensor | None:
    """`assembled` in as few operations as it takes, where nothing is left blank; else None.

    A small call costs about as much as the operations it makes.
    """
    if local.joined is not None:
        dim, ranks = local.joined
        return torch.cat([tensors[rank] for rank in ranks], dim)
    if not local.covered or (dtype in _WIDE and local.adds):
        return None
    values = [tensors[rank][take] if take else tensors[rank] for rank, take, _ in local.copied]
    if len(values) == 1:
        return values[0].clone(memory_format=torch.contiguous_format)
    result = torch.add(values[0], values[1])
    for each in values[2:]:
        result.add_(each)
    return result


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype)


def _is_large(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether the largest box that is moved as one is worth a schedule, as all ranks know."""
    side = plan.have if plan.hint in ("all_gather", "sum_reduce", "broadcast") else plan.want
    return max(piece.box.volume for piece in side.pieces) * dtype.itemsize > _DIRECT


def _blanks(local: Local, first: Box | None, nbytes: int) -> tuple[list[Box], bool]:
    """What to fill with zeros before a result of so many bytes is written, `first` first.

    And whether what comes first is then copied, where values add up.
    """
    assert local.result is not None
    if not local.adds:
        return local.gaps, False
    if first is not None and first.shape != local.result and nbytes < _WORTH:
        first = None
    return _around(local.result, first), first is not None


@functools.lru_cache(maxsize=512)
def _around(shape: Shape, box: Box | None) -> list[Box]:
    """What a box leaves of a tensor."""
    return beyond(whole(shape), () if box is None else (box,))


class _Result:
    """A result under construction, summed in a wider type where values of a narrow one meet."""

    def __init__(self, local: Local, dtype: torch.dtype, first: Box | None) -> None:
        """Room for a result; `first` is the box that is written first, if that is known."""
        assert local.result is not None
        self._adds = local.adds
        self.tensor = fresh(local.result, _WIDE.get(dtype, dtype) if self._adds else dtype)
        gaps, self._blank = _blanks(local, first, self.tensor.nbytes)
        for gap in gaps:
            self.tensor[gap.slices] = 0

    def write(self, put: tuple[slice, ...], values: Tensor) -> None:
        place = self.tensor[put] if put else self.tensor
        if self._adds and not self._blank:
            place.add_(values)
        else:
            copy(place, values, self.tensor.nbytes)
        self._blank = False

    def done(self, dtype: torch.dtype) -> Tensor:
        if self.tensor.dtype == dtype:
            return self.tensor
        return self.tensor.view(dtype) if dtype in _BITS else self.tensor.to(dtype)


def _directly(plan: Plan, x: Tensor, wire: Wire) -> Tensor:
    """Each box from its rank to those that want it.

    Contributions add up in rank order, but that what comes from nobody else is there first.
    """
    local = plan.local(wire.rank)
    into: _Result | None = None
    if local.result is not None:
        into = _Result(local, x.dtype, local.own[0][1] if local.own else None)
    leases: list[Lease] = []
    coming = []
    for peer in sorted(local.recvs, key=lambda peer: (wire.rank - peer) % wire.size):
        place, apart = _place_for(local, peer, into, x.dtype, wire, leases)
        coming.append((peer, place, apart, wire.post((), [(peer, place)], _CHANNEL)))
    going = [
        wire.post([(peer, _packed(x, local.sends[peer], wire, leases))], (), _CHANNEL)
        for peer in wire.peers
        if peer in local.sends
    ]
    if into is not None:
        for take, put in local.own:
            into.write(put.slices, x[take.slices])
        for peer, place, apart, pending in sorted(coming, key=lambda each: each[0]):
            pending.wait()
            if apart:
                for put, values in _split(place, local.recvs[peer], x.dtype):
                    into.write(put.slices, values)
    for pending in going:
        pending.wait()
    for lease in leases:
        lease.release()
    return _nothing(x) if into is None else into.done(x.dtype)


def _place_for(
    local: Local,
    peer: int,
    into: _Result | None,
    dtype: torch.dtype,
    wire: Wire,
    leases: list[Lease],
) -> tuple[Tensor, bool]:
    """Where what comes from a peer is received, and whether that is a workspace."""
    assert into is not None
    puts = local.recvs[peer]
    if len(puts) == 1 and not local.adds:
        place = into.tensor[puts[0].slices]
        if place.is_contiguous():
            return place, False
    leases.append(wire.lease(sum(put.volume for put in puts) * dtype.itemsize))
    return leases[-1].tensor, True


def _packed(x: Tensor, takes: Sequence[Box], wire: Wire, leases: list[Lease]) -> Tensor:
    """The boxes as one message."""
    if len(takes) == 1:
        values = x[takes[0].slices]
        if values.is_contiguous():
            return values
    leases.append(wire.lease(sum(take.volume for take in takes) * x.element_size()))
    memory = leases[-1].tensor
    for take, place in _split(memory, takes, x.dtype):
        copy(place, x[take.slices], x.nbytes)
    return memory


def _split(memory: Tensor, found: Sequence[Box], dtype: torch.dtype) -> list[tuple[Box, Tensor]]:
    """The boxes of a message, each with its values."""
    at, each = 0, []
    for box in found:
        shape: Shape = box.shape
        each.append((box, typed(memory, shape, dtype, at)))
        at += box.volume * dtype.itemsize
    return each
