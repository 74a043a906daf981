"""What the ranks tell each other at a store, before there is a wire."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from .failure.verdict import names

_GROWTH = 1.5  # from one pause to the next


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
    if not all(has(store, key, deadline, size) for key in keys) and (
        late := [each for each, key in enumerate(keys) if not store.check([key])]
    ):
        raise AbsentError(late, missing)
    return [json.loads(said) for said in store.multi_get(keys)]


def has(store: dist.Store, key: str, deadline: float, ranks: int) -> bool:
    """Wait for a key, and say whether it is there in time.

    Without `store.wait`, during which no other thread of this process could use a TCPStore, not
    even to say what a peer waits for; it also prints warnings when the time is over. Of many ranks
    each asks less often.

    Args:
        store: that has it, or will.
        key: its name.
        deadline: as `time.monotonic` tells it.
        ranks: how many may be waiting.

    Raises:
        RuntimeError: from the store.
    """
    return any(store.check([key]) for _ in pauses(deadline, 0.001, max(0.02, 0.0005 * ranks)))


def pauses(deadline: float, first: float = 0.01, last: float = 1.0) -> Iterator[None]:
    """Once, and again after longer and longer pauses, until the deadline; then a last time.

    No two processes pause alike, so that a thousand of them do not storm a server.
    """
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, first * random.uniform(0.5, 1.0)))
        first = min(last, first * _GROWTH)
