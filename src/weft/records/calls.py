"""What each call did on this rank: kept while it runs, and then told to who asks (`weft.on_call`).

The worker begins one when a call has its turn and ends it with the call; `sparse.record` adds the
figures of a sparse call.
"""

from __future__ import annotations

import os
import time
from typing import Any, cast

from .traffic import Traffic

_running: list[CallStats] = []  # of this process, whatever the group; the newest is the last
os.register_at_fork(after_in_child=_running.clear)


class CallStats:
    """What one call did, on one rank. Its figures are complete once it has ended.

    Attributes:
        name: of the call, as in errors and in the profiler, such as "sparse_all_reduce".
        group: the name of its group: "world" is torch.distributed's default group.
        rank: this rank's number in the group.
        number: of the call on this rank and group, as in errors; 0: this is where they join.
        seconds: from the call's turn to its end. (Calls of a group take turns.)
        waited: seconds of these in which this rank waited for messages.
        messages: sent by this rank.
        sent_bytes: in those messages.
        error: what the call raised, or "".
        sparse: of a sparse call its `weft.sparse.Record`, which names the algorithm; else None.
    """

    seconds = 0.0
    waited = 0.0
    messages = 0
    sent_bytes = 0
    error = ""
    sparse = cast(Any, None)
    has_met = False  # whether it came to where it meets the other ranks

    def __init__(self, name: str, group: str, rank: int, number: int, traffic: Traffic) -> None:
        self.name = name
        self.group = group
        self.rank = rank
        self.number = number
        self._traffic = traffic
        # messages, bytes and waits before the call, and when it began
        self._before = traffic.messages, traffic.bytes, traffic.waited, time.perf_counter()
        _running.append(self)

    def __repr__(self) -> str:
        return (
            f"CallStats(name={self.name!r}, group={self.group!r}, rank={self.rank}, "
            f"number={self.number}, seconds={self.seconds:.6f}, waited={self.waited:.6f}, "
            f"messages={self.messages}, sent_bytes={self.sent_bytes}, error={self.error!r}, "
            f"sparse={self.sparse!r})"
        )

    def measure(self) -> None:
        """Set the figures to what the call has taken until now."""
        messages, sent_bytes, waited, start = self._before
        self.messages = self._traffic.messages - messages
        self.sent_bytes = self._traffic.bytes - sent_bytes
        self.waited = self._traffic.waited - waited
        self.seconds = time.perf_counter() - start

    def end(self, error: str = "") -> None:
        """Note that the call has ended; once more, if an interrupt comes as it does."""
        self.measure()
        self.error = error
        if self in _running:
            _running.remove(self)


def call_elsewhere(group: str) -> CallStats | None:
    """The newest call of this process that runs, and is on another group; None: there is none.

    Any thread may ask.
    """
    for call in reversed(list(_running)):
        if call.group != group:
            return call
    return None
