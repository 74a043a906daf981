"""New processes, as a launcher starts them, to test what a process can do only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..base.pace import patient
from ..bootstrap.local import launch

T = TypeVar("T")


def processes(
    size: int,
    function: Callable[..., T],
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 50.0,
) -> list[T]:
    """Run `function(*args)` in `size` new processes; return their results in rank order.

    Each process has `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and so on in its environment, as under
    torchrun, and `OMP_NUM_THREADS=1`. Neither weft nor torch.distributed is initialised. So it
    serves tests of `weft.init`, of DistributedDataParallel and of faults. The store at which the
    ranks meet is in the calling process, so any rank may die.

    Args:
        size: the number of ranks.
        function: what each rank runs; a function at the top of a module, so that it can be pickled.
        args: its arguments. They and the results are pickled.
        env: further environment variables.
        timeout: seconds for all of it on an idle machine; up to four times as many on a busy one.

    Raises:
        RankFailure: a process was killed, or did not end in time. It is a `WireError`.
        Exception: what a rank raised, with a note that says which rank.

    Example:
        >>> import os
        >>> processes(2, os.getenv, "RANK")
        ['0', '1']
    """
    environment = {"OMP_NUM_THREADS": "1", **(env or {})}
    return launch(size, function, args, timeout=patient(timeout), env=environment)
