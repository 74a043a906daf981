"""Dense all-reduce in posts alone: for wires whose transport has none, or a slow one.

Small tensors go from each to all and every rank reduces them itself: one round. Larger ones are
cut into one part for each rank; part p of every rank goes to rank p, which reduces it; the result
goes to all, round the ring of ranks if parts are large and there are several hosts. A rank
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
import weakref

import torch
from torch import Tensor

from ..errors import WeftError
from .arithmetic import OPS, Reduce, arithmetic, cut, grain, reduce, refuses
from .base import Pending, Wire, flattened, peers
from .hosts import Hosts, known_hosts

__all__ = [
    "OPS",
    "SCRATCH",
    "SMALL",
    "all_reduce",
    "messages",
    "received_bytes",
    "reduce",
    "reduced_bytes",
    "refuses",
    "ring_chunk",
]

SMALL = 1 << 13  # bytes that every rank rather sends whole to all others
SCRATCH = 6 << 20  # bytes of others' contributions that a rank collects at once
_CHUNK = 1 << 17  # bytes of a part that are worth a message of their own, and the ring
_CHUNKS = 16  # of a part, where they are worth it: the last one goes all the way round alone

_SCATTER, _GATHER = (1 << 16, 1 << 19), (1 << 17, 1 << 20)
# = channels that nobody else uses, two of each: reductions in parts take turns
_lanes: weakref.WeakKeyDictionary[Wire, int] = weakref.WeakKeyDictionary()  # the last one taken


def all_reduce(wire: Wire, tensor: Tensor, op: str) -> Pending:
    """Start reducing `tensor` (contiguous, CPU) over all ranks of `wire`, in place.

    Ranks begin reductions in the same order, and wait for them in the same order; up to two may be
    under way.

    Raises:
        WeftError: the op is unknown, or torch cannot apply it to this dtype.
    """
    if reason := refuses(op, tensor.dtype):
        raise WeftError(f"rank {wire.rank}: {reason}")
    combine, flat = arithmetic(op, flattened(tensor))
    if wire.size == 1 or not len(flat):
        return _Done(tensor)
    if len(flat) * flat.element_size() <= SMALL:
        return _Whole(wire, tensor, flat, combine)
    return _Parts(wire, tensor, flat, combine)


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
    """Nothing is left to be waited for, once `_run` has done it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._done = tensor, False

    def wait(self) -> list[Tensor]:
        if not self._done:
            self._run()
            self._done = True
        return [self._tensor]

    def _run(self) -> None:
        return None

    def release(self) -> None:
        return None


class _Whole(_Done):
    """From each to all, then everyone reduces the same."""

    def __init__(self, wire: Wire, tensor: Tensor, flat: Tensor, combine: Reduce) -> None:
        super().__init__(tensor)
        self._flat, self._combine = flat, combine
        own = flat.view(torch.uint8)
        self._pending = wire.small_all_gather(own, len(own))

    def _run(self) -> None:
        self._combine([part.view(self._flat.dtype) for part in self._pending.wait()], self._flat)
        self._pending.release()


class _Parts(_Done):
    """Each rank reduces its part and sends it to all, chunk by chunk.

    On the ring that goes in steps. In step t a rank reduces its own chunk t and sends it to the
    right. It posts receives for what the left neighbour sends in step t (its chunk t, chunk t-1 of
    the one before that, and so on), no sooner, since until then the memory they go to was still
    being sent; and it sends on what came of those of the step before.
    """

    def __init__(self, wire: Wire, tensor: Tensor, flat: Tensor, combine: Reduce) -> None:
        super().__init__(tensor)
        self._wire, self._flat, self._combine = wire, flat, combine
        self._part, aligned = cut(flat, wire.size), grain(flat)
        ring = ring_chunk(wire.size, len(flat) * flat.element_size(), known_hosts(wire))
        self._rings = ring is not None
        chunk = ring or SCRATCH // (wire.size - 1)
        self._step = max(aligned, chunk // flat.element_size() // aligned * aligned)
        self._chunks = -(-self._part // self._step)
        # those of one lane match in the order in which they are begun, which is the same on all
        # ranks; so two may be under way
        self._lane = _lanes[wire] = 1 - _lanes.get(wire, 1)
        self._scatter: Pending | None = self._scatter_chunk(0)

    def _run(self) -> None:
        if self._rings:
            self._round_the_ring()
        else:
            self._to_all()

    def _piece(self, rank: int, start: int) -> Tensor:
        """The chunk that begins `start` elements into rank's part; it may be empty."""
        first, end = rank * self._part, min((rank + 1) * self._part, len(self._flat))
        return self._flat[min(first + start, end) : min(first + start + self._step, end)]

    def _scatter_chunk(self, start: int) -> Pending | None:
        """Send a chunk of each part to whom it belongs; collect one's own from all."""
        if start >= self._part:
            return None
        nbytes, others = self._piece(self._wire.rank, start).nbytes, peers(self._wire)
        sends = [(peer, self._piece(peer, start)) for peer in others]
        return self._wire.post(sends, [(peer, nbytes) for peer in others], _SCATTER[self._lane])

    def _reduced(self, start: int) -> Tensor:
        """One's own chunk, reduced; the next is on its way meanwhile."""
        pending = self._scatter
        assert pending is not None
        self._scatter = self._scatter_chunk(start + self._step)
        wire, own = self._wire, self._piece(self._wire.rank, start)
        heard = [each.view(own.dtype) for each in pending.wait()]
        parts = dict(zip(peers(wire), heard, strict=True)) | {wire.rank: own}
        self._combine([parts[rank] for rank in range(wire.size)], own)
        pending.release()
        return own

    def _to_all(self) -> None:
        pending = []
        for start in range(0, self._part, self._step):
            own, others = self._reduced(start), peers(self._wire)
            sends = [(peer, own) for peer in others]
            recvs = [(peer, self._piece(peer, start)) for peer in others]
            pending.append(self._wire.post(sends, recvs, _GATHER[self._lane]))
        for each in pending:
            each.wait()

    def _round_the_ring(self) -> None:
        sent: list[Pending] = []
        coming: list[tuple[int, int, Pending]] = []
        right = (self._wire.rank + 1) % self._wire.size
        for step in range(self._chunks + self._wire.size - 1):
            if step < self._chunks:
                sent.append(self._post_right(self._reduced(step * self._step)))
            here, coming = coming, self._post_left(step)
            for origin, start, pending in here:
                pending.wait()
                if origin != right:
                    sent.append(self._post_right(self._piece(origin, start)))
        for pending in sent:
            pending.wait()

    def _post_left(self, step: int) -> list[tuple[int, int, Pending]]:
        """Receive what the left neighbour sends in a step, in its order; whose it is, and where."""
        coming, wire = [], self._wire
        for distance in range(1, wire.size):
            chunk = step - (distance - 1)
            if 0 <= chunk < self._chunks:
                origin, start = (wire.rank - distance) % wire.size, chunk * self._step
                recvs = [((wire.rank - 1) % wire.size, self._piece(origin, start))]
                coming.append((origin, start, wire.post((), recvs, _GATHER[self._lane])))
        return coming

    def _post_right(self, piece: Tensor) -> Pending:
        sends = [((self._wire.rank + 1) % self._wire.size, piece)]
        return self._wire.post(sends, (), _GATHER[self._lane])
