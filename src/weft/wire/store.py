"""How ranks exchange values at a store, before there is a wire."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ..errors import AbsentError, names
from . import watch

_GROWTH = 1.5  # from one pause to the next

Late = tuple[int, Callable[[], str]] | None
"""For the line about a slow wait (`weft.init(watch=)`): the rank that waits, and a function that
says who is missing, or "" if nobody is any more. None: print no line."""


def exchange(
    store: dist.Store, what: str, own: object, rank: int, size: int, timeout: float, missing: str
) -> list[Any]:
    """Exchange a value between all ranks, as JSON; the values in rank order. Collective.

    Args:
        store: that all ranks share.
        what: the name of the keys, the same on every rank.
        own: this rank's value.
        rank, size: this rank, and how many there are.
        timeout: seconds in which all must have come.
        missing: what the error says of the others: "did not join".

    Raises:
        AbsentError: some ranks wrote nothing in time.
        RuntimeError: from the store.
    """
    deadline = time.monotonic() + timeout
    store.set(f"{what}/{rank}", json.dumps(own))
    keys = [f"{what}/{each}" for each in range(size)]

    def absent() -> list[int]:
        return [each for each, key in enumerate(keys) if not store.check([key])]

    def who_is_absent() -> str:
        ranks = absent()
        return f"{names(ranks)} {missing} so far" if ranks else ""

    late = (rank, who_is_absent)
    all_came = all(has(store, key, deadline, size, late) for key in keys)
    if not all_came:
        ranks = absent()
        if ranks:  # else the last one came just now
            raise AbsentError(ranks, missing)
    return [json.loads(value) for value in store.multi_get(keys)]


def has(store: dist.Store, key: str, deadline: float, ranks: int, late: Late = None) -> bool:
    """Wait for a key; whether it was there in time.

    `store.wait` is not used: no other thread of the process could use a TCPStore meanwhile, not
    even to write what a peer waits for, and it prints warnings at the deadline.

    Args:
        store: where the key will be.
        key: its name.
        deadline: by `time.monotonic`.
        ranks: how many may be waiting; with more of them each asks less often.
        late: as for `pauses`.

    Raises:
        RuntimeError: from the store.
    """
    longest = max(0.02, 0.0005 * ranks)
    return any(store.check([key]) for _ in pauses(deadline, 0.001, longest, late))


def pauses(
    deadline: float, first: float = 0.01, last: float = 1.0, late: Late = None
) -> Iterator[None]:
    """Yield once, then after longer and longer pauses, and a last time at the deadline.

    Pauses are random, so that a thousand processes do not ask a server at the same moment. After
    the seconds of `weft.init(watch=)` a line about the wait is printed, if `late` is given.
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
