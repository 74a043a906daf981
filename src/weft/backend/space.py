"""A space in a store that nobody has used before, where the ranks of a group meet.

A store may outlive a group. torchrun's does when it starts failed workers again; any store does
when a program destroys its group and makes another. The keys of the earlier group are still there,
under the same names, with addresses where nobody listens any more. So rank 0 draws a random name
for a new space, and tells it to each other rank: that rank writes a random token to the store, and
rank 0 answers under the token. A token of a process that is gone is answered, too, but nobody reads
that. Rank 0 goes on looking for tokens until every rank has written that it is in the space.
"""

from __future__ import annotations

import json
import secrets
import time

import torch.distributed as dist

from ..base.errors import WireError, names
from ..base.pace import patient
from ..rendezvous.store import has, pauses

_FIRST, _LAST = 0.001, 0.02  # seconds between two looks of rank 0 at the store
LATE = 1.0  # seconds after the deadline in which rank 0 may still say who is missing


def unused(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """A new space in the store; collective among the ranks of a group.

    Args:
        store: which all of these ranks share; others may have used it in the same way before.
        rank: this rank.
        size: how many ranks there are.
        timeout: seconds in which all must have come.

    Raises:
        WireError: somebody did not come in time; the same on every rank that did.
        RuntimeError: from the store.

    Example:
        >>> store = dist.HashStore()
        >>> unused(store, 0, 1, 5.0).set("key", "value")
        >>> unused(store, 0, 1, 5.0).check(["key"])
        False
    """
    deadline, late = time.monotonic() + timeout, [0]
    space = token = secrets.token_hex(8)
    if rank == 0:
        late = _gather(store, size, space, deadline)
        store.set(f"weft/space/{space}/late", json.dumps(late))
    else:
        store.set(f"weft/space/{rank}", token)
        if has(store, f"weft/space/{token}", deadline, size):
            space = store.get(f"weft/space/{token}").decode()
            store.set(f"weft/space/{space}/{rank}", "")
            if has(store, f"weft/space/{space}/late", deadline + patient(LATE), size):
                late = json.loads(store.get(f"weft/space/{space}/late"))
    if late:
        raise WireError(
            f"rank {rank}: group of {size} ranks: {names(late)} did not come within {timeout:g} s; "
            "see that all ranks make the same groups in the same order, and that none has ended",
            rank=rank,
            culprit=late[0],
        )
    return dist.PrefixStore(f"weft/space/{space}/group", store)


def _gather(store: dist.Store, size: int, space: str, deadline: float) -> list[int]:
    """Tell the other ranks the name of the space until all are in it; who did not come in time."""
    missing = set(range(1, size))
    for _ in pauses(deadline, _FIRST, _LAST):
        for rank in sorted(missing):
            if store.check([f"weft/space/{rank}"]):
                token = store.get(f"weft/space/{rank}").decode()
                store.set(f"weft/space/{token}", space)
            if store.check([f"weft/space/{space}/{rank}"]):
                missing.discard(rank)
        if not missing:
            break
    return sorted(missing)
