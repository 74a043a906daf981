"""Memory that goes from rank to rank, chunk by chunk, so that every link carries it once.

Each rank receives from the one before it, and sends a chunk to the next as soon as it is there;
where ranks have something to add, a sum grows on its way.

The linear tree of Patarasuk, Yuan and Faraj, "Techniques for pipelined broadcast on Ethernet
switched clusters" (JPDC 2008).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ..group.channels import CHAIN
from ..group.group import Group
from ..group.pending import Pending

CHUNKS = (128 << 10, 512 << 10)  # bytes of the smallest (but for the last) and the largest chunk


class Chain(Pending):
    """Memory on its way along a chain of ranks: `start` it, then `wait`.

    Several may be under way at once, if all ranks start and wait for them in the same order.

    Example:
        >>> import torch, weft
        >>> from weft.schedules import Chain
        >>> from weft.testing import run
        >>> def program(group):
        ...     total = torch.empty(1)
        ...     Chain(group, [0, 1, 2], total, torch.tensor([float(group.rank)])).start().wait()
        ...     return total.item()
        >>> run(3, program)
        [0.0, 1.0, 3.0]
    """

    def __init__(
        self, group: Group, ranks: Sequence[int], memory: Tensor, own: Tensor | None = None
    ) -> None:
        """
        Args:
            group: the group of these ranks.
            ranks: the chain, the same on each of them, this one included.
            memory: 1-D, of the same length and dtype on all; sent by the first, filled on the
                others.
            own: of the length and dtype of `memory`: the first rank copies it there before it
                sends, each of the others adds it to what it received. None: nothing is added.
        """
        position = ranks.index(group.rank)
        is_last = position == len(ranks) - 1
        smallest, largest = CHUNKS
        chunk_bytes = max(smallest, min(largest, memory.nbytes // (4 * len(ranks))))
        length = max(1, chunk_bytes // memory.itemsize)
        self._group = group
        self._memory = memory
        self._chunks = torch.split(memory, length)
        self._own = None if own is None else torch.split(own, length)
        self._previous = ranks[position - 1] if position else None
        self._next = None if is_last else ranks[position + 1]
        self._receives: deque[tuple[int, Pending]] = deque()  # of chunks, by their numbers
        self._sends: list[Pending] = []

    def start(self) -> Self:
        """Begin: the first rank sends all chunks, the others post their receives."""
        if self._previous is None:
            for number, chunk in enumerate(self._chunks):
                if self._own is not None:
                    chunk.copy_(self._own[number])
                self._send(chunk)
            return self
        for number, chunk in enumerate(self._chunks):
            pending = self._group.post((), [(self._previous, chunk)], CHAIN)
            self._receives.append((number, pending))
        return self

    def wait(self) -> list[Tensor]:
        while self._receives:
            number, pending = self._receives.popleft()
            pending.wait()
            chunk = self._chunks[number]
            if self._own is not None:
                chunk.add_(self._own[number])
            self._send(chunk)
        for pending in self._sends:
            pending.wait()
        return [self._memory]

    def _send(self, chunk: Tensor) -> None:
        """Send a chunk to the next rank, if there is one."""
        if self._next is not None:
            self._sends.append(self._group.post([(self._next, chunk)], (), CHAIN))
