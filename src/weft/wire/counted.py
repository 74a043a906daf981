"""Counting what a wire sends: messages and bytes, in all and to each peer.

`WEFT_TRACE=1` in the environment prints a line for every message, on standard error:
`weft r0 -> r2  131072 B`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch import Tensor


class Traffic:
    """What one rank sent over one wire since it was made or since `reset`.

    Attributes:
        messages: number of messages.
        bytes: bytes in them, without the transport's own framing.
        to: bytes to each peer that was sent to.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._trace = os.environ.get("WEFT_TRACE", "") not in ("", "0")
        self.reset()

    def reset(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.to: dict[int, int] = {}

    def count(self, sends: Sequence[tuple[int, Tensor | memoryview]]) -> None:
        """Add messages, each given with the peer it goes to."""
        self.add([(peer, message.nbytes) for peer, message in sends])

    def add(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Add messages of so many bytes, each given with the peer it goes to."""
        to, total = self.to, 0
        for peer, nbytes in sizes:
            total += nbytes
            to[peer] = to.get(peer, 0) + nbytes
        self.bytes += total
        self.messages += len(sizes)
        if self._trace:
            for peer, nbytes in sizes:
                print(f"weft r{self._rank} -> r{peer}  {nbytes} B", file=sys.stderr, flush=True)
