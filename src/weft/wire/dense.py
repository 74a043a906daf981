"""Dense all-reduce in posts alone: for wires whose transport has none, or a slow one.

Small tensors go from each to all and every rank reduces them itself: one round. Larger ones are
cut into one part for each rank; part p of every rank goes to rank p, which reduces it; the result
goes to all, round the ring of ranks if parts are large. A rank receives 2 (P-1)/P of the tensor's
bytes, whatever P is. They go in chunks, so that one chunk is reduced while the next is on its way,
and goes on to the right while the next is reduced. Ranks that can read each other's memory need
none of that (`near`).

Source: reduce-scatter followed by all-gather, Rabenseifner, "Optimization of Collective Reduction
Operations", ICCS 2004, with a direct exchange and a ring in place of the butterflies. Rank order
wants the direct exchange; for the rest, one stream into each host and one out of it share links
more evenly than streams between all.

Contributions are combined in rank order by one rank (or alike by all), so every rank gets the same
bits; half precision is accumulated in float32 and rounded once.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import WeftError
from . import near
from .arithmetic import OPS, Reduce, arithmetic, cut, grain, reduce, reduce_parts, refuses
from .base import Pending, Wire, flattened
from .hosts import Hosts
from .memory import Lease, typed

__all__ = [
    "OPS",
    "SCRATCH",
    "SMALL",
    "Stage",
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

SMALL = 1 << 13  # bytes that every rank rather sends whole to all others
SCRATCH = 6 << 20  # bytes of others' contributions that a rank collects at once
_CHUNK = 1 << 17  # bytes of a part that are worth a message of their own, and the ring
_CHUNKS = 16  # of a part, where they are worth it: the last one goes all the way round alone

_SCATTER, _GATHER = 1 << 16, 1 << 17  # channels that nobody else uses


class Stage(Protocol):
    """Where a tensor that is workspace comes from and goes to, in pieces, while others travel."""

    def load(self, first: int, last: int) -> None:
        """Write what this rank contributes to some elements of the tensor there."""

    def store(self, first: int, last: int) -> None:
        """Take the results of some elements of the tensor, which stay where they are."""


class _Nowhere:
    """The stage of a tensor that is where it belongs."""

    def load(self, first: int, last: int) -> None:
        return None

    def store(self, first: int, last: int) -> None:
        return None


_NOWHERE = _Nowhere()


class _Job(NamedTuple):
    """What is to be done, as `all_reduce` is told it.

    Attributes:
        wire: among whom.
        tensor: that is returned.
        flat: the same, 1-D, as `combine` takes it.
        combine: how.
        given: this rank's contribution, or `flat`.
        stage: of the elements.
    """

    wire: Wire
    tensor: Tensor
    flat: Tensor
    combine: Reduce
    given: Tensor
    stage: Stage


def all_reduce(
    wire: Wire,
    tensor: Tensor,
    op: str,
    *,
    source: Tensor | None = None,
    stage: Stage = _NOWHERE,
) -> Pending:
    """Start reducing `tensor` (contiguous, CPU) over all ranks of `wire`, in place.

    Args:
        wire: among whom.
        tensor: this rank's contribution, and where the result comes.
        op: how two of them combine.
        source: this rank's contribution, if it shall be left as it is; of the same shape and
            dtype, contiguous. Then `tensor` may hold anything.
        stage: is asked to `load` each element before it is sent, and to `store` it, once, before
            the wait ends. Then `tensor` may hold anything, too.

    Raises:
        WeftError: the op is unknown, or torch cannot apply it to this dtype.
    """
    if reason := refuses(op, tensor.dtype):
        raise WeftError(f"rank {wire.rank}: {reason}")
    combine, flat = arithmetic(op, flattened(tensor))
    small = wire.size == 1 or len(flat) * flat.element_size() <= SMALL
    if source is not None and small:
        tensor.copy_(source)
    if wire.size == 1 or not len(flat):
        stage.load(0, len(flat))
        stage.store(0, len(flat))
        return _Done(tensor)
    given = flat if source is None or small else flattened(source).view(flat.dtype)
    job = _Job(wire, tensor, flat, combine, given, stage)
    if small:
        return _Whole(job)
    return _Near(job) if wire.near else _Parts(job)


def messages(ranks: int, nbytes: float, hosts: Hosts | None) -> int:
    """Messages that a rank sends while so many bytes are reduced."""
    if not nbytes:
        return 0
    if nbytes <= SMALL:
        return ranks - 1
    chunk = ring_chunk(ranks, nbytes, hosts) or SCRATCH // (ranks - 1)
    return 2 * (ranks - 1) * math.ceil(nbytes / ranks / chunk)


def received_bytes(ranks: int, nbytes: float) -> float:
    """Bytes that a rank receives while so many are reduced."""
    return nbytes * (ranks - 1) * (1 if nbytes <= SMALL else 2 / ranks)


def reduced_bytes(ranks: int, nbytes: float) -> float:
    """Bytes that a rank adds up while so many are reduced."""
    return nbytes * (ranks - 1) / (1 if nbytes <= SMALL else ranks)


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


class _Done(Pending):
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> list[Tensor]:
        return [self._tensor]

    def release(self) -> None:
        return None


class _Whole(Pending):
    """From each to all, then everyone reduces the same."""

    def __init__(self, job: _Job) -> None:
        self._job, self._done = job, False
        job.stage.load(0, len(job.flat))
        own = job.flat.view(torch.uint8)
        self._pending = job.wire.small_all_gather(own, len(own))

    def wait(self) -> list[Tensor]:
        job = self._job
        if not self._done:
            parts = [part.view(job.flat.dtype) for part in self._pending.wait()]
            job.combine(parts, job.flat)
            self._pending.release()
            job.stage.store(0, len(job.flat))
            self._done = True
        return [job.tensor]

    def release(self) -> None:
        return None


class _Near(Pending):
    """All ranks read each other's contributions and sums, if they find that all can."""

    def __init__(self, job: _Job) -> None:
        self._job, self._done = job, False
        job.stage.load(0, len(job.flat))

    def wait(self) -> list[Tensor]:
        job = self._job
        if not self._done:
            places = near.told(job.wire, job.given, job.flat)
            if places is None:
                _Parts(job).wait()
            else:
                near.all_reduce(job.wire, job.flat, job.combine, job.given, places)
                job.stage.store(0, len(job.flat))
            self._done = True
        return [job.tensor]

    def release(self) -> None:
        return None


class _Parts(Pending):
    """Each rank reduces its part and sends it to all, chunk by chunk.

    On the ring that goes in steps. In step t a rank reduces its own chunk t and sends it to the
    right. It posts receives for what the left neighbour sends in step t (its chunk t, chunk t-1 of
    the one before that, and so on), no sooner, since until then the memory they go to was still
    being sent; and it sends on what came of those of the step before.
    """

    def __init__(self, job: _Job) -> None:
        self._wire, self._tensor, self._flat, self._combine, self._given, self._stage = job
        wire, flat = job.wire, job.flat
        aligned = grain(flat)
        self._part = cut(flat, wire.size)
        nbytes = flat.numel() * flat.element_size()
        ring = ring_chunk(wire.size, nbytes, wire.hosts)
        self._rings = ring is not None
        chunk = (ring or SCRATCH // (wire.size - 1)) // flat.element_size()
        self._step = max(aligned, chunk // aligned * aligned)
        self._chunks = -(-self._part // self._step)
        self._left, self._right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
        self._scatter: tuple[Pending, Lease] | None = self._scatter_chunk(0)
        self._done = False

    def _bounds(self, rank: int, start: int) -> tuple[int, int]:
        """First element of the chunk that begins `start` elements into rank's part, and its end."""
        first, end = rank * self._part, min((rank + 1) * self._part, len(self._flat))
        return min(first + start, end), min(first + start + self._step, end)

    def _piece(self, of: Tensor, rank: int, start: int) -> Tensor:
        """That chunk; it may be empty."""
        first, end = self._bounds(rank, start)
        return of[first:end]

    def _store(self, rank: int, start: int) -> None:
        self._stage.store(*self._bounds(rank, start))

    def _scatter_chunk(self, start: int) -> tuple[Pending, Lease] | None:
        """Send a chunk of each part to whom it belongs; collect one's own from all."""
        if start >= self._part:
            return None
        wire, own = self._wire, self._piece(self._flat, self._wire.rank, start)
        lease = wire.lease((wire.size - 1) * own.numel() * own.element_size())
        slots = typed(lease.tensor, (wire.size - 1, len(own)), own.dtype)
        for rank in range(wire.size):
            self._stage.load(*self._bounds(rank, start))
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
        wire, starts, pending = self._wire, range(0, self._part, self._step), []
        for start in starts:
            own = self._reduced(start)
            sends = [(peer, own) for peer in wire.peers]
            recvs = [(peer, self._piece(self._flat, peer, start)) for peer in wire.peers]
            pending.append(wire.post(sends, recvs, _GATHER))
            self._store(wire.rank, start)
        for start, each in zip(starts, pending, strict=True):
            each.wait()
            for peer in wire.peers:
                self._store(peer, start)

    def _round_the_ring(self) -> None:
        sent: list[Pending] = []
        coming: list[tuple[int, int, Pending]] = []
        for step in range(self._chunks + self._wire.size - 1):
            if step < self._chunks:
                sent.append(self._post_right(self._reduced(step * self._step)))
                self._store(self._wire.rank, step * self._step)
            here, coming = coming, self._post_left(step)
            for origin, start, pending in here:
                pending.wait()
                if origin != self._right:
                    sent.append(self._post_right(self._piece(self._flat, origin, start)))
                self._store(origin, start)
        for pending in sent:
            pending.wait()

    def _post_left(self, step: int) -> list[tuple[int, int, Pending]]:
        """Receive what the left neighbour sends in a step, in its order; whose it is, and where."""
        coming = []
        for distance in range(1, self._wire.size):
            chunk = step - (distance - 1)
            if 0 <= chunk < self._chunks:
                origin = (self._wire.rank - distance) % self._wire.size
                piece = self._piece(self._flat, origin, chunk * self._step)
                pending = self._wire.post((), [(self._left, piece)], _GATHER)
                coming.append((origin, chunk * self._step, pending))
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
        self._combine([parts[rank] for rank in range(wire.size)], own)
        lease.release()
        return own

    def release(self) -> None:
        return None
