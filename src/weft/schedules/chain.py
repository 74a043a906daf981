"""Memory that goes from rank to rank, chunk by chunk, so that every link carries it once.

Each rank receives from the one before it, and sends a chunk to the next as soon as it is there;
where ranks have something to add, a sum grows on its way.

The linear tree of Patarasuk, Yuan and Faraj, "Techniques for pipelined broadcast on Ethernet
switched clusters" (JPDC 2008).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..group.group import Group
from ..group.pending import Pending

_CHANNEL = 4  # that no other room uses
_CHUNKS = (128 << 10, 512 << 10)  # bytes of the smallest (but for the last) and the largest chunk


class Chain(Pending):
    """Memory on its way along a chain of ranks.

    Several may be under way at once, if all ranks made them in the same order.

    Args:
        group: the group of these ranks.
        ranks: the chain, the same on each of them, this one included.
        memory: 1-D, of the same length and dtype on all; sent by the first, filled on the others.
        own: of the length and dtype of `memory`: the first rank copies it there before it sends,
            each of the others adds it to what it received. None: nothing is added.
    """

    def __init__(
        self, group: Group, ranks: Sequence[int], memory: Tensor, own: Tensor | None = None
    ) -> None:
        at, (least, most) = ranks.index(group.rank), _CHUNKS
        nbytes = max(least, min(most, memory.nbytes // (4 * len(ranks))))
        step = max(1, nbytes // memory.itemsize)
        self._group, self._memory = group, memory
        self._chunks = torch.split(memory, step)
        self._own = () if own is None else torch.split(own, step)
        self._next = ranks[at + 1 : at + 2]
        self._coming: list[Pending] = []
        self._going: list[Pending] = []
        if at:
            self._coming = [group.post((), [(ranks[at - 1], c)], _CHANNEL) for c in self._chunks]
        else:
            for number in range(len(self._chunks)):
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        chunk = self._chunks[number]
        if self._own:
            (chunk.add_ if self._coming else chunk.copy_)(self._own[number])
        self._going += [self._group.post([(rank, chunk)], (), _CHANNEL) for rank in self._next]

    def wait(self) -> list[Tensor]:
        for number, pending in enumerate(self._coming):
            pending.wait()
            self._pass_on(number)
        for pending in self._going:
            pending.wait()
        return [self._memory]
