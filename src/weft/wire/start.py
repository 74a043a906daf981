"""What the wire of a group is made from, on each rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from ..base.memory import Pool

_MOMENT = 0.1  # seconds, see `seconds_left`


def check_nothing() -> None:
    """What `Start.check` is where nobody watches the ranks."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a wire is made from; every rank makes its end at the same time.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
        timeout: seconds after which the group gives up a wait; also for what the start waits for.
        host: the name of this rank's host; ranks with equal names share a machine and its network.
        exchange: `exchange(data)` sends some KiB to all ranks, and returns every rank's, in
            rank order. All ranks call it equally often. It raises WireError if one died, or left.
        memory: where to lease memory for what is received by size.
        check: `check()` raises if another rank died, or has left. What waits for other ranks in
            another way than by `exchange` calls it meanwhile, about ten times a second.
        store: that all ranks share, where there is one.
    """

    rank: int
    size: int
    timeout: float
    host: str
    exchange: Callable[[bytes], list[bytes]]
    memory: Pool
    check: Callable[[], None] = check_nothing
    store: dist.Store | None = None


def seconds_left(deadline: float) -> float:
    """Seconds until a deadline by which something has to be made; at least a tenth of one.

    However late the last rank has come, the others then say who is missing, not that no time was
    left to look.

    Args:
        deadline: by `time.monotonic`.

    Example:
        >>> seconds_left(time.monotonic() - 5.0)
        0.1
    """
    return max(deadline - time.monotonic(), _MOMENT)
