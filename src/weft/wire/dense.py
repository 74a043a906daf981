"""Dense all-reduce in posts alone: for wires whose transport has none, or a slow one.

Small tensors go from each to all and every rank reduces them itself: one round. Larger ones are
cut into one part for each rank; part p of every rank goes to rank p, which reduces it and sends
the result to all: 2 (P-1)/P of the tensor's bytes are received by each rank, whatever P is. They
go in chunks, so that one chunk is reduced while the next is on its way.

Source: reduce-scatter followed by all-gather, Rabenseifner, "Optimization of Collective Reduction
Operations", ICCS 2004, with direct exchanges in place of the butterfly.

Contributions are combined in rank order by one rank (or alike by all), so every rank gets the same
bits; half precision is accumulated in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import WeftError
from .base import Pending, Wire
from .memory import Lease, typed

__all__ = ["OPS", "SCRATCH", "all_reduce", "messages", "received_bytes", "reduce", "refuses"]

_SMALL = 1 << 13  # bytes that every rank rather sends whole to all others
SCRATCH = 6 << 20  # bytes of others' contributions that a rank collects at once
_BLOCK = 1 << 14  # elements that are widened at once, in memory that stays in the cache
_ALIGN = 64  # bytes that parts are multiples of

_SCATTER, _GATHER = 1 << 16, 1 << 17  # channels that nobody else uses

_Combine = Callable[..., Tensor]

OPS: dict[str, _Combine] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

# torch's arithmetic lacks these; seen as signed integers they add and multiply to the same bits
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def all_reduce(wire: Wire, tensor: Tensor, op: str) -> Pending:
    """Start reducing `tensor` (contiguous, CPU) over all ranks of `wire`, in place.

    Raises:
        WeftError: the op is unknown, or torch cannot apply it to this dtype.
    """
    if reason := refuses(op, tensor.dtype):
        raise WeftError(f"rank {wire.rank}: {reason}")
    combine, flat = _arithmetic(op, tensor.view(-1))
    if wire.size == 1 or not len(flat):
        return _Done(tensor)
    if len(flat) * flat.element_size() <= _SMALL:
        return _Whole(wire, tensor, flat, combine)
    return _Parts(wire, tensor, flat, combine)


def refuses(op: str, dtype: torch.dtype) -> str | None:
    """Why tensors of this dtype cannot be reduced by this op, or None if they can."""
    if op not in OPS:
        return f"op {op!r} is unknown: use one of {', '.join(OPS)}"
    combine, nothing = _arithmetic(op, torch.empty(0, dtype=dtype))
    try:
        combine(nothing, nothing)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"op {op} does not apply to {dtype}: {error}"
    return None


def reduce(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """What `all_reduce` makes of contributions, where they all are here.

    Args:
        parts: 1-D, of the dtype and size of `out`, in rank order; the first is overwritten.
        op: one of `OPS`.
        out: contiguous; may be one of the parts.
    """
    combine, flat = _arithmetic(op, out.view(-1))
    seen = [part.view(flat.dtype) for part in parts]
    if len(seen) == 1:
        flat.copy_(seen[0])
    else:
        _reduce(seen, combine, flat)


def messages(ranks: int, nbytes: float) -> int:
    """Messages that a rank sends while so many bytes are reduced."""
    if not nbytes:
        return 0
    if nbytes <= _SMALL:
        return ranks - 1
    return 2 * (ranks - 1) * math.ceil(nbytes / ranks / (SCRATCH // (ranks - 1)))


def received_bytes(ranks: int, nbytes: float) -> float:
    """Bytes that a rank receives while so many are reduced."""
    return nbytes * (ranks - 1) * (1 if nbytes <= _SMALL else 2 / ranks)


def _arithmetic(op: str, flat: Tensor) -> tuple[_Combine, Tensor]:
    """How two contributions combine, and the tensor seen in the dtype in which they do."""
    combine, dtype = OPS[op], flat.dtype
    if dtype in _SIGNED:
        signed = flat.view(_SIGNED[dtype])
        if op not in ("min", "max"):
            return combine, signed
        top = torch.iinfo(signed.dtype).min  # flipping the top bit turns one order into the other

        def ordered(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
            return torch.bitwise_xor(combine(left ^ top, right ^ top), top, out=out)

        return ordered, signed
    if dtype is torch.bool:
        combine = {"sum": torch.logical_or, "prod": torch.logical_and}.get(op, combine)
    return combine, flat


def _reduce(parts: Sequence[Tensor], combine: _Combine, out: Tensor) -> None:
    """Combine in the order given, into `out`, which may be one of the parts; overwrites the first.

    In place, since memory that is fresh for each step costs more than the arithmetic.
    """
    if out.dtype.is_floating_point and out.dtype.itemsize <= 2:
        for start in range(0, len(out), _BLOCK):
            target, *blocks = (each[start : start + _BLOCK] for each in (out, *parts))
            wide = blocks[0].float()
            for block in blocks[1:]:
                combine(wide, block.float(), out=wide)
            target.copy_(wide)
        return
    for part in parts[1:-1]:
        combine(parts[0], part, out=parts[0])
    combine(parts[0], parts[-1], out=out)


class _Done(Pending):
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> list[Tensor]:
        return [self._tensor]

    def release(self) -> None:
        return None


class _Whole(Pending):
    """From each to all, then everyone reduces the same."""

    def __init__(self, wire: Wire, tensor: Tensor, flat: Tensor, combine: _Combine) -> None:
        self._tensor, self._flat, self._combine, self._done = tensor, flat, combine, False
        self._own = flat.view(torch.uint8)
        self._pending = wire.small_all_gather(self._own, len(self._own))

    def wait(self) -> list[Tensor]:
        if not self._done:
            parts = [part.view(self._flat.dtype) for part in self._pending.wait()]
            _reduce(parts, self._combine, self._flat)
            self._pending.release()
            self._done = True
        return [self._tensor]

    def release(self) -> None:
        return None


class _Parts(Pending):
    """Each rank reduces its part and sends it to all, chunk by chunk."""

    def __init__(self, wire: Wire, tensor: Tensor, flat: Tensor, combine: _Combine) -> None:
        self._wire, self._tensor, self._flat, self._combine = wire, tensor, flat, combine
        grain = max(1, _ALIGN // flat.element_size())
        each = -(-len(flat) // wire.size)
        self._part = -(-each // grain) * grain
        chunk = SCRATCH // (wire.size - 1) // flat.element_size()
        self._step = max(grain, chunk // grain * grain)
        self._gathers: list[Pending] = []
        self._scatter: tuple[Pending, Lease] | None = self._scatter_chunk(0)

    def _piece(self, rank: int, start: int) -> Tensor:
        """The chunk that begins `start` elements into rank's part; it may be empty."""
        first, end = rank * self._part, min((rank + 1) * self._part, len(self._flat))
        return self._flat[min(first + start, end) : min(first + start + self._step, end)]

    def _scatter_chunk(self, start: int) -> tuple[Pending, Lease] | None:
        """Send a chunk of each part to whom it belongs; collect one's own from all."""
        if start >= self._part:
            return None
        wire, own = self._wire, self._piece(self._wire.rank, start)
        lease = wire.lease((wire.size - 1) * own.numel() * own.element_size())
        slots = typed(lease.tensor, (wire.size - 1, len(own)), own.dtype)
        sends = [(peer, self._piece(peer, start)) for peer in wire.peers]
        recvs = [(peer, slot) for peer, slot in zip(wire.peers, slots, strict=True)]
        return wire.post(sends, recvs, _SCATTER), lease

    def wait(self) -> list[Tensor]:
        start = 0
        while self._scatter is not None:
            pending, lease = self._scatter
            ahead = self._scatter_chunk(start + self._step)
            self._share(start, pending.wait())
            lease.release()
            self._scatter, start = ahead, start + self._step
        for gather in self._gathers:
            gather.wait()
        self._gathers.clear()
        return [self._tensor]

    def _share(self, start: int, received: list[Tensor]) -> None:
        """Reduce one's own chunk, send it to all and post the receives of theirs."""
        wire, own = self._wire, self._piece(self._wire.rank, start)
        parts = dict(zip(wire.peers, received, strict=True))
        parts[wire.rank] = own
        _reduce([parts[rank] for rank in range(wire.size)], self._combine, own)
        sends = [(peer, own) for peer in wire.peers]
        recvs = [(peer, self._piece(peer, start)) for peer in wire.peers]
        self._gathers.append(wire.post(sends, recvs, _GATHER))

    def release(self) -> None:
        return None
