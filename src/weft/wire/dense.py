"""Dense all-reduce in posts alone: for wires whose transport has none, or a slow one.

Small tensors go from each to all and every rank reduces them itself: one round. Larger ones are
cut into one part for each rank; part p of every rank goes to rank p, which reduces it; the result
goes to all, round the ring of ranks if parts are large and nothing else is under way. A rank
receives 2 (P-1)/P of the tensor's bytes, whatever P is. They go in chunks, so that one chunk is
reduced while the next is on its way, and goes on to the right while the next is reduced.

Source: reduce-scatter followed by all-gather, Rabenseifner, "Optimization of Collective Reduction
Operations", ICCS 2004, with a direct exchange and a ring in place of the butterflies. Rank order
wants the direct exchange; for the rest, one stream into each host and one out of it share links
more evenly than streams between all.

Contributions are combined in rank order by one rank (or alike by all), so every rank gets the same
bits; half precision is accumulated in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import WeftError
from .arithmetic import OPS, Reduce, arithmetic, cut, grain, reduce, reduce_parts, refuses
from .base import Pending, Wire, flattened
from .hosts import Hosts

__all__ = [
    "OPS",
    "SCRATCH",
    "SMALL",
    "Reduction",
    "Stage",
    "all_reduce",
    "cut",
    "in_parts",
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
_BESIDE = 1 << 20  # = where another reduction is under way: what leaves soon, and evenly
_CHUNK = 1 << 17  # bytes of a part that are worth a message of their own, and the ring
_LANE = "dense lane"  # of the last reduction in parts, by which name the wire keeps it
_CHUNKS = 16  # of a part, where they are worth it: the last one goes all the way round alone

_SCATTER, _GATHER = (1 << 16, 1 << 19), (1 << 17, 1 << 20)
# = channels that nobody else uses, two of each: reductions in parts take turns


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


class Reduction(Pending):
    """A dense all-reduce under way.

    Attributes:
        done: whether nothing is left to be waited for.
        awaited: what it waits for next, if others may go on meanwhile.
    """

    done = False
    awaited: Pending | None = None

    def step(self) -> None:
        """Wait for what it waits for next, and go on from there.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """
        self.wait()

    def proceed(self) -> None:
        """Go on as far as nothing has to be waited for. Raises as `step`."""


class _Job(NamedTuple):
    """What is to be done, as `all_reduce` is told it.

    Attributes:
        wire: among whom.
        tensor: that is returned.
        flat: the same, 1-D, as `combine` takes it.
        combine: how.
        given: this rank's contribution, or `flat`.
        stage: of the elements.
        beside: as `all_reduce` is told.
    """

    wire: Wire
    tensor: Tensor
    flat: Tensor
    combine: Reduce
    given: Tensor
    stage: Stage
    beside: bool


def all_reduce(
    wire: Wire,
    tensor: Tensor,
    op: str,
    *,
    source: Tensor | None = None,
    stage: Stage = _NOWHERE,
    beside: bool = False,
) -> Reduction:
    """Start reducing `tensor` (contiguous, CPU) over all ranks of `wire`, in place.

    Ranks begin reductions in the same order, and `wait` for them in the same order. Of two that go
    `in_parts`, one after the other, either may also go on by itself as soon as it can.

    Args:
        wire: among whom.
        tensor: this rank's contribution, and where the result comes.
        op: how two of them combine.
        source: this rank's contribution, if it shall be left as it is; of the same shape and
            dtype, contiguous. Then `tensor` may hold anything.
        stage: is asked to `load` each element before it is sent, and to `store` it, once, before
            the wait ends. Then `tensor` may hold anything, too.
        beside: whether others are under way meanwhile. Then sums go to all directly, in smaller
            chunks, which is quicker than the ring of ranks; the same on every rank.

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
    job = _Job(wire, tensor, flat, combine, given, stage, beside)
    if small:
        return _Whole(job)
    return _Parts(job)


def in_parts(wire: Wire, nbytes: int) -> bool:
    """Whether a tensor of so many bytes is cut into parts that are sent; the same on every rank."""
    return wire.size > 1 and nbytes > SMALL


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


class _Done(Reduction):
    done = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> list[Tensor]:
        return [self._tensor]

    def release(self) -> None:
        return None


class _Whole(Reduction):
    """From each to all, then everyone reduces the same."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        job.stage.load(0, len(job.flat))
        own = job.flat.view(torch.uint8)
        self._pending = job.wire.small_all_gather(own, len(own))

    def wait(self) -> list[Tensor]:
        job = self._job
        if not self.done:
            parts = [part.view(job.flat.dtype) for part in self._pending.wait()]
            job.combine(parts, job.flat)
            self._pending.release()
            job.stage.store(0, len(job.flat))
            self.done = True
        return [job.tensor]

    def release(self) -> None:
        return None


class _Parts(Reduction):
    """Each rank reduces its part and sends it to all, chunk by chunk.

    On the ring that goes in steps. In step t a rank reduces its own chunk t and sends it to the
    right. It posts receives for what the left neighbour sends in step t (its chunk t, chunk t-1 of
    the one before that, and so on), no sooner, since until then the memory they go to was still
    being sent; and it sends on what came of those of the step before.
    """

    def __init__(self, job: _Job) -> None:
        self._wire, self._tensor, self._flat, self._combine, self._given, self._stage, _ = job
        wire, flat = job.wire, job.flat
        aligned = grain(flat)
        self._part = cut(flat, wire.size)
        nbytes = flat.numel() * flat.element_size()
        ring = None if job.beside else ring_chunk(wire.size, nbytes, wire.hosts)
        self._rings = ring is not None
        chunk = ring or (_BESIDE if job.beside else SCRATCH) // (wire.size - 1)
        self._step = max(aligned, chunk // flat.element_size() // aligned * aligned)
        self._chunks = -(-self._part // self._step)
        self._left, self._right = (wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size
        # those of one lane match in the order in which they are begun, which is the same on all
        # ranks; so two that are under way may go on in any order
        self._lane = wire.kept[_LANE] = 1 - wire.kept.get(_LANE, 1)
        self._scatter: Pending | None = self._scatter_chunk(0)
        self._steps = self._round_the_ring() if self._rings else self._to_all()
        self.awaited = next(self._steps)
        self._failure: BaseException | None = None

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

    def _scatter_chunk(self, start: int) -> Pending | None:
        """Send a chunk of each part to whom it belongs; collect one's own from all."""
        if start >= self._part:
            return None
        wire, own = self._wire, self._piece(self._flat, self._wire.rank, start)
        for rank in range(wire.size):
            self._stage.load(*self._bounds(rank, start))
        sends = [(peer, self._piece(self._given, peer, start)) for peer in wire.peers]
        recvs = [(peer, own.nbytes) for peer in wire.peers]
        if self._given is not self._flat:
            own.copy_(self._piece(self._given, wire.rank, start))
        return wire.post(sends, recvs, _SCATTER[self._lane])

    def wait(self) -> list[Tensor]:
        while not self.done:
            self.step()
        return [self._tensor]

    def step(self) -> None:
        if self._failure is not None:  # which ended the steps
            raise self._failure
        try:
            self.awaited = next(self._steps, None)
        except BaseException as error:
            self._failure = error
            raise
        self.done = self.awaited is None

    def proceed(self) -> None:
        while self.awaited is not None and self.awaited.is_through():
            self.step()

    def _to_all(self) -> Iterator[Pending]:
        """What is waited for, each before it is; then it goes on."""
        wire, starts, pending = self._wire, range(0, self._part, self._step), []
        for start in starts:
            yield self._coming_chunk()
            own = self._reduced(start)
            sends = [(peer, own) for peer in wire.peers]
            recvs = [(peer, self._piece(self._flat, peer, start)) for peer in wire.peers]
            pending.append(wire.post(sends, recvs, _GATHER[self._lane]))
            self._store(wire.rank, start)
        for start, each in zip(starts, pending, strict=True):
            yield each
            each.wait()
            for peer in wire.peers:
                self._store(peer, start)

    def _round_the_ring(self) -> Iterator[Pending]:
        """As `_to_all`."""
        sent: list[Pending] = []
        coming: list[tuple[int, int, Pending]] = []
        for step in range(self._chunks + self._wire.size - 1):
            if step < self._chunks:
                yield self._coming_chunk()
                sent.append(self._post_right(self._reduced(step * self._step)))
                self._store(self._wire.rank, step * self._step)
            here, coming = coming, self._post_left(step)
            for origin, start, pending in here:
                yield pending
                pending.wait()
                if origin != self._right:
                    sent.append(self._post_right(self._piece(self._flat, origin, start)))
                self._store(origin, start)
        for pending in sent:
            yield pending
            pending.wait()

    def _post_left(self, step: int) -> list[tuple[int, int, Pending]]:
        """Receive what the left neighbour sends in a step, in its order; whose it is, and where."""
        coming = []
        for distance in range(1, self._wire.size):
            chunk = step - (distance - 1)
            if 0 <= chunk < self._chunks:
                origin = (self._wire.rank - distance) % self._wire.size
                piece = self._piece(self._flat, origin, chunk * self._step)
                pending = self._wire.post((), [(self._left, piece)], _GATHER[self._lane])
                coming.append((origin, chunk * self._step, pending))
        return coming

    def _post_right(self, piece: Tensor) -> Pending:
        return self._wire.post([(self._right, piece)], (), _GATHER[self._lane])

    def _coming_chunk(self) -> Pending:
        """What comes of all peers' contributions to the next chunk of one's own."""
        assert self._scatter is not None
        return self._scatter

    def _reduced(self, start: int) -> Tensor:
        """One's own chunk, reduced; the next is on its way meanwhile."""
        assert self._scatter is not None
        pending = self._scatter
        self._scatter = self._scatter_chunk(start + self._step)
        wire, own = self._wire, self._piece(self._flat, self._wire.rank, start)
        heard = [each.view(own.dtype) for each in pending.wait()]
        parts = dict(zip(wire.peers, heard, strict=True)) | {wire.rank: own}
        self._combine([parts[rank] for rank in range(wire.size)], own)
        pending.release()
        return own

    def release(self) -> None:
        return None
