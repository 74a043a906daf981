"""Dense all-reduce in posts alone: for wires whose transport has none, or a slow one.

Small tensors go from each to all and every rank reduces them itself: one round. Larger ones are
cut into one part for each rank; part p of every rank goes to rank p, which reduces it; the result
goes to all, round the ring of ranks if parts are large. A rank receives 2 (P-1)/P of the tensor's
bytes, whatever P is. They go in chunks, so that one chunk is reduced while the next is on its way,
and goes on to the right while the next is reduced.

Source: reduce-scatter followed by all-gather, Rabenseifner, "Optimization of Collective Reduction
Operations", ICCS 2004, with a direct exchange and a ring in place of the butterflies. Rank order
wants the direct exchange; for the rest, one stream into each host and one out of it share links
more evenly than streams between all.

Contributions are combined in rank order by one rank (or alike by all), so every rank gets the same
bits; half precision is accumulated in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import WeftError
from .base import Pending, Wire, flattened
from .hosts import Hosts
from .memory import Lease, typed

__all__ = [
    "OPS",
    "SCRATCH",
    "all_reduce",
    "cut",
    "messages",
    "received_bytes",
    "reduce",
    "reduce_parts",
    "reduced_bytes",
    "refuses",
    "ring_chunk",
]

_SMALL = 1 << 13  # bytes that every rank rather sends whole to all others
SCRATCH = 6 << 20  # bytes of others' contributions that a rank collects at once
_CHUNK = 1 << 17  # bytes of a part that are worth a message of their own, and the ring
_CHUNKS = 16  # of a part, where they are worth it: the last one goes all the way round alone
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


def all_reduce(wire: Wire, tensor: Tensor, op: str, *, source: Tensor | None = None) -> Pending:
    """Start reducing `tensor` (contiguous, CPU) over all ranks of `wire`, in place.

    Args:
        wire: among whom.
        tensor: this rank's contribution, and where the result comes.
        op: how two of them combine.
        source: this rank's contribution, if it shall be left as it is; of the same shape and
            dtype, contiguous. Then `tensor` may hold anything.

    Raises:
        WeftError: the op is unknown, or torch cannot apply it to this dtype.
    """
    if reason := refuses(op, tensor.dtype):
        raise WeftError(f"rank {wire.rank}: {reason}")
    combine, flat = _arithmetic(op, flattened(tensor))
    small = wire.size == 1 or len(flat) * flat.element_size() <= _SMALL
    if source is not None and small:
        tensor.copy_(source)
    if wire.size == 1 or not len(flat):
        return _Done(tensor)
    if small:
        return _Whole(wire, tensor, flat, combine)
    given = flat if source is None else flattened(source).view(flat.dtype)
    return _Parts(wire, tensor, flat, combine, given)


def cut(flat: Tensor, ranks: int) -> int:
    """Elements of the part of a 1-D tensor that each rank reduces; of the last ones it may be
    less."""
    grain = _grain(flat)
    each = -(-len(flat) // ranks)
    return -(-each // grain) * grain


def _grain(flat: Tensor) -> int:
    """Elements of which parts and chunks hold whole multiples, so that they are aligned."""
    return max(1, _ALIGN // flat.element_size())


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
    combine, flat = _arithmetic(op, flattened(out))
    seen = [part.view(flat.dtype) for part in parts]
    if not len(flat):
        return
    if len(seen) == 1:
        flat.copy_(seen[0])
    else:
        reduce_parts(seen, combine, flat)


def messages(ranks: int, nbytes: float, hosts: Hosts | None) -> int:
    """Messages that a rank sends while so many bytes are reduced."""
    if not nbytes:
        return 0
    if nbytes <= _SMALL:
        return ranks - 1
    chunk = ring_chunk(ranks, nbytes, hosts) or SCRATCH // (ranks - 1)
    return 2 * (ranks - 1) * math.ceil(nbytes / ranks / chunk)


def received_bytes(ranks: int, nbytes: float) -> float:
    """Bytes that a rank receives while so many are reduced."""
    return nbytes * (ranks - 1) * (1 if nbytes <= _SMALL else 2 / ranks)


def reduced_bytes(ranks: int, nbytes: float) -> float:
    """Bytes that a rank adds up while so many are reduced."""
    return nbytes * (ranks - 1) / (1 if nbytes <= _SMALL else ranks)


def ring_chunk(ranks: int, nbytes: float, hosts: Hosts | None) -> int | None:
    """Bytes of a chunk of the sums that go round the ring; None if they go to all directly.

    That they do if they are small, and on one host, where there is no link to share; and as long as
    nobody has asked who is on which host.
    """
    part = nbytes / ranks
    apart = hosts is not None and len(hosts.ranks) > 1
    return _chunk(ranks, part) if apart and ranks > 2 and part >= _CHUNK else None


def _chunk(ranks: int, part: float) -> int:
    """Bytes of a chunk of a part of so many."""
    return min(SCRATCH // (ranks - 1), max(_CHUNK, math.ceil(part / _CHUNKS)))


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


def reduce_parts(parts: Sequence[Tensor], combine: _Combine, out: Tensor) -> None:
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
            reduce_parts(parts, self._combine, self._flat)
            self._pending.release()
            self._done = True
        return [self._tensor]

    def release(self) -> None:
        return None


class _Parts(Pending):
    """Each rank reduces its part and sends it to all, chunk by chunk.

    On the ring that goes in steps. In step t a rank reduces its own chunk t and sends it to the
    right. It posts receives for what the left neighbour sends in step t (its chunk t, chunk t-1 of
    the one before that, and so on), no sooner, since until then the memory they go to was still
    being sent; and it sends on what came of those of the step before.
    """

    def __init__(
        self, wire: Wire, tensor: Tensor, flat: Tensor, combine: _Combine, given: Tensor
    ) -> None:
        self._wire, self._tensor, self._flat, self._combine = wire, tensor, flat, combine
        self._given = given
        grain = _grain(flat)
        self._part = cut(flat, wire.size)
        nbytes = flat.numel() * flat.element_size()
        ring = ring_chunk(wire.size, nbytes, wire.hosts)
        self._rings = ring is not None
        chunk = (ring or SCRATCH // (wire.size - 1)) // flat.element_size()
        self._step = max(grain, chunk // grain * grain)
        self._chunks = -(-self._part // self._step)
        self._left, self._right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
        self._scatter: tuple[Pending, Lease] | None = self._scatter_chunk(0)
        self._done = False

    def _piece(self, of: Tensor, rank: int, start: int) -> Tensor:
        """The chunk that begins `start` elements into rank's part; it may be empty."""
        first, end = rank * self._part, min((rank + 1) * self._part, len(of))
        return of[min(first + start, end) : min(first + start + self._step, end)]

    def _scatter_chunk(self, start: int) -> tuple[Pending, Lease] | None:
        """Send a chunk of each part to whom it belongs; collect one's own from all."""
        if start >= self._part:
            return None
        wire, own = self._wire, self._piece(self._flat, self._wire.rank, start)
        lease = wire.lease((wire.size - 1) * own.numel() * own.element_size())
        slots = typed(lease.tensor, (wire.size - 1, len(own)), own.dtype)
        sends = [(peer, self._piece(self._given, peer, start)) for peer in wire.peers]
        recvs = [(peer, slot) for peer, slot in zip(wire.peers, slots, strict=True)]
        if self._given is not self._flat:
            own.copy_(self._piece(self._given, wire.rank, start))
        return wire.post(sends, recvs, _SCATTER), lease

    def wait(self) -> list[Tensor]:
        if not self._done:
            if self._rings:
                self._round_the_ring()
            else:
                self._to_all()
            self._done = True
        return [self._tensor]

    def _to_all(self) -> None:
        wire, pending = self._wire, []
        for start in range(0, self._part, self._step):
            own = self._reduced(start)
            sends = [(peer, own) for peer in wire.peers]
            recvs = [(peer, self._piece(self._flat, peer, start)) for peer in wire.peers]
            pending.append(wire.post(sends, recvs, _GATHER))
        for each in pending:
            each.wait()

    def _round_the_ring(self) -> None:
        sent: list[Pending] = []
        coming: list[tuple[int, Tensor, Pending]] = []
        for step in range(self._chunks + self._wire.size - 1):
            if step < self._chunks:
                sent.append(self._post_right(self._reduced(step * self._step)))
            here, coming = coming, self._post_left(step)
            for origin, piece, pending in here:
                pending.wait()
                if origin != self._right:
                    sent.append(self._post_right(piece))
        for pending in sent:
            pending.wait()

    def _post_left(self, step: int) -> list[tuple[int, Tensor, Pending]]:
        """Receive what the left neighbour sends in a step, in its order; and whose it is."""
        coming = []
        for distance in range(1, self._wire.size):
            chunk = step - (distance - 1)
            if 0 <= chunk < self._chunks:
                origin = (self._wire.rank - distance) % self._wire.size
                piece = self._piece(self._flat, origin, chunk * self._step)
                pending = self._wire.post((), [(self._left, piece)], _GATHER)
                coming.append((origin, piece, pending))
        return coming

    def _post_right(self, piece: Tensor) -> Pending:
        return self._wire.post([(self._right, piece)], (), _GATHER)

    def _reduced(self, start: int) -> Tensor:
        """One's own chunk, reduced; the next is on its way meanwhile."""
        assert self._scatter is not None
        pending, lease = self._scatter
        self._scatter = self._scatter_chunk(start + self._step)
        wire, own = self._wire, self._piece(self._flat, self._wire.rank, start)
        parts = dict(zip(wire.peers, pending.wait(), strict=True))
        parts[wire.rank] = own
        reduce_parts([parts[rank] for rank in range(wire.size)], self._combine, own)
        lease.release()
        return own

    def release(self) -> None:
        return None
