"""A space in a store that nobody has used before, for the ranks of a group to meet in.

A store may outlive a group: torchrun's does, when it starts failed workers again, and any does,
when a program destroys its group and makes another. What the ranks of the group before have left
there, addresses at which nobody listens any more, has the same names. So rank 0 draws the name of a
new space and tells it to the others: each has left a token of its own that was never there before,
and is answered under that. What rank 0 tells a token of a process that is gone is heard by nobody;
it looks again until all have said that they are in its space.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import torch.distributed as dist

from ..errors import WireError
from ..wire.base import names

_FIRST, _LAST = 0.001, 0.02  # seconds between two looks at the store
_LATE = 1.0  # seconds after the deadline in which rank 0 may still say who is missing


def unused(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """That space; collective among the ranks of a group.

    Args:
        store: that all of them share, also if others have used it for the same before.
        rank: this one's.
        size: how many there are.
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
    deadline = time.monotonic() + timeout
    token = secrets.token_hex(8)
    if rank == 0:
        late = _gather(store, size, token, deadline)
        said = ",".join(map(str, late))
        store.set(f"weft/space/{token}/late", said)
    else:
        store.set(f"weft/space/{rank}", token)
        answer = f"weft/space/{token}"
        if not _comes(deadline, lambda: store.check([answer])):
            raise _absent(rank, size, [0], timeout)
        token = store.get(answer).decode()
        store.set(f"weft/space/{token}/{rank}", "")
        ended = f"weft/space/{token}/late"
        if not _comes(deadline + _LATE, lambda: store.check([ended])):
            raise _absent(rank, size, [0], timeout)
        said = store.get(ended).decode()
    if said:
        raise _absent(rank, size, list(map(int, said.split(","))), timeout)
    return dist.PrefixStore(f"weft/space/{token}/group", store)


def _gather(store: dist.Store, size: int, space: str, deadline: float) -> list[int]:
    """Tell all others of the space until they are in it; who has not come in time."""
    missing = set(range(1, size))

    def all_in() -> bool:
        for rank in sorted(missing):
            if store.check([f"weft/space/{rank}"]):
                token = store.get(f"weft/space/{rank}").decode()
                store.set(f"weft/space/{token}", space)
            if store.check([f"weft/space/{space}/{rank}"]):
                missing.discard(rank)
        return not missing

    _comes(deadline, all_in)
    return sorted(missing)


def _comes(deadline: float, there: Callable[[], bool]) -> bool:
    """Look again and again, a last time at the deadline, until it is there."""
    pause = _FIRST
    while not there():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, pause))
        pause = min(_LAST, pause * 1.5)
    return True


def _absent(rank: int, size: int, late: list[int], timeout: float) -> WireError:
    return WireError(
        f"rank {rank}: group of {size} ranks: {names(late)} did not come within {timeout:g} s; see "
        "that all ranks make the same groups in the same order, and that none has ended",
        rank=rank,
        culprit=late[0],
    )
