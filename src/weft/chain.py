"""Memory that goes from rank to rank, chunk by chunk, so that every link carries it once.

Each rank hears the one before it, and tells the next a chunk as soon as that is there; where ranks
have something to add, a sum grows on its way. Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms" (JPDC 2009), section 3, has the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .wire.base import Pending, Wire

_CHANNEL = 4  # that no other room uses
_CHUNKS = (128 << 10, 512 << 10)  # bytes of the smallest and the largest chunk


class Chain(Pending):
    """Memory on its way along a chain of ranks; several may be under way, in the same order on all.

    Args:
        wire: among whom.
        ranks: the chain, the same on each of them, this one included.
        memory: 1-D, of the same length and dtype on all; sent by the first, filled on the others.
        own: what the first rank sends in place of what is in the memory, and what others add to
            what came; None: nothing.
    """

    def __init__(
        self, wire: Wire, ranks: Sequence[int], memory: Tensor, own: Tensor | None = None
    ) -> None:
        at, (least, most) = ranks.index(wire.rank), _CHUNKS
        nbytes = max(least, min(most, memory.nbytes // (4 * len(ranks))))
        step = max(1, nbytes // memory.itemsize)
        self._wire, self._memory = wire, memory
        self._chunks = torch.split(memory, step)
        self._own = () if own is None else torch.split(own, step)
        self._next = ranks[at + 1 : at + 2]
        self._coming: list[Pending] = []
        self._going: list[Pending] = []
        if at:
            self._coming = [wire.post((), [(ranks[at - 1], c)], _CHANNEL) for c in self._chunks]
        else:
            for number in range(len(self._chunks)):
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        chunk = self._chunks[number]
        if self._own:
            (chunk.add_ if self._coming else chunk.copy_)(self._own[number])
        self._going += [self._wire.post([(rank, chunk)], (), _CHANNEL) for rank in self._next]

    def wait(self) -> list[Tensor]:
        for number, pending in enumerate(self._coming):
            pending.wait()
            self._pass_on(number)
        for pending in self._going:
            pending.wait()
        return [self._memory]
