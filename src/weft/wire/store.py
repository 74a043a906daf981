"""What the ranks tell each other at a store, before there is a wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .failure.verdict import names


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
    store.set(f"{what}/{rank}", json.dumps(own))
    keys = [f"{what}/{each}" for each in range(size)]
    try:
        store.wait(keys, timedelta(seconds=max(timeout, 0.001)))
    except RuntimeError:
        if late := [each for each, key in enumerate(keys) if not store.check([key])]:
            raise AbsentError(late, missing) from None
        raise
    return [json.loads(store.get(key)) for key in keys]
