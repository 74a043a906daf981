"""What the ranks tell each other at a store, before there is a wire."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from .failure import watch
from .failure.verdict import names

_GROWTH = 1.5  # from one pause to the next

Late = tuple[int, Callable[[], str]] | None
"""Who waits, if it may be told, and what says who keeps it waiting; "" if they came just now."""


class AbsentError(TimeoutError):
    """Some ranks were not there when others connected.

    Attributes:
        ranks: those, in order.
    """

    def __init__(self, ranks: Sequence[int], what: str) -> None:
        super().__init__(f"{names(ranks)} {what}")
        self.ranks = list(ranks)


def told(
    store: dist.Store, what: str, own: object, rank: int, size: int, timeout: float, missing: str
) -> list[Any]:
    """What each rank says, in JSON, in rank order; collective.

    Args:
        store: where they meet.
        what: the name of what is told, the same on every rank.
        own: what this rank says.
        rank, size: which rank that is, of how many.
        timeout: seconds in which all must have come.
        missing: what is said of ranks that have not, as the end of a clause.

    Raises:
        AbsentError: some rank said nothing in time.
        RuntimeError: from the store.
    """
    deadline = time.monotonic() + timeout
    store.set(f"{what}/{rank}", json.dumps(own))
    keys = [f"{what}/{each}" for each in range(size)]

    def late() -> list[int]:
        return [each for each, key in enumerate(keys) if not store.check([key])]

    slow = rank, lambda: f"{names(found)} {missing} so far" if (found := late()) else ""
    if not all(has(store, key, deadline, size, slow) for key in keys) and (absent := late()):
        raise AbsentError(absent, missing)
    return [json.loads(said) for said in store.multi_get(keys)]


def has(store: dist.Store, key: str, deadline: float, ranks: int, late: Late = None) -> bool:
    """Wait for a key, and say whether it is there in time.

    Without `store.wait`, during which no other thread of this process could use a TCPStore, not
    even to say what a peer waits for; it also prints warnings when the time is over. Of many ranks
    each asks less often.

    Args:
        store: that has it, or will.
        key: its name.
        deadline: as `time.monotonic` tells it.
        ranks: how many may be waiting.
        late: as for `pauses`.

    Raises:
        RuntimeError: from the store.
    """
    longest = max(0.02, 0.0005 * ranks)
    return any(store.check([key]) for _ in pauses(deadline, 0.001, longest, late))


def pauses(
    deadline: float, first: float = 0.01, last: float = 1.0, late: Late = None
) -> Iterator[None]:
    """Once, and again after longer and longer pauses, until the deadline; then a last time.

    No two processes pause alike, so that a thousand of them do not storm a server. After the
    seconds of `weft.init(watch=)` one line tells of the wait, if `late` says whose it is.
    """
    began = time.monotonic()
    slow = watch.chosen() if late else math.inf
    while True:
        yield
        now = time.monotonic()
        if late and now - began >= slow:
            slow = math.inf
            if why := late[1]():
                watch.tell(late[0], now - began, (0, ""), why)
        left = deadline - now
        if left <= 0:
            return
        time.sleep(min(left, first * random.uniform(0.5, 1.0)))
        first = min(last, first * _GROWTH)
