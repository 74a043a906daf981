"""What a rank sent to its peers, and for how long it waited."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence

from torch import Tensor


class Traffic:
    """What one rank sent to its peers since the group was made or since `reset`.

    `WEFT_TRACE=1` in the environment prints a line for every message, on standard error:
    `weft r0 -> r2  131072 B`.

    Attributes:
        messages: number of messages.
        bytes: bytes in them, without the wire's own framing.
        to: bytes to each peer that was sent to.
        waited: seconds in which this rank waited for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._trace = os.environ.get("WEFT_TRACE", "") not in ("", "0")
        self.reset()

    def reset(self) -> None:
        """Begin again at nothing."""
        self.messages = 0
        self.bytes = 0
        self.to: Counter[int] = Counter()
        self.waited = 0.0

    def count(self, sends: Sequence[tuple[int, Tensor]]) -> None:
        """Add messages, each given with the peer it goes to."""
        self.count_bytes([(peer, message.nbytes) for peer, message in sends])

    def count_bytes(self, sends: Sequence[tuple[int, int]]) -> None:
        """Add messages of so many bytes, each given with the peer it goes to."""
        self.messages += len(sends)
        for peer, nbytes in sends:
            self.bytes += nbytes
            self.to[peer] += nbytes
            if self._trace:
                print(f"weft r{self._rank} -> r{peer}  {nbytes} B", file=sys.stderr, flush=True)
