"""Fresh processes as a launcher would start them: for what cannot be tried twice in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..bootstrap.local import launch
from .pace import patient

T = TypeVar("T")


def processes(
    size: int,
    function: Callable[..., T],
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 50.0,
) -> list[T]:
    """Run `function(*args)` in `size` new processes; their results, in rank order.

    Each has `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and the like in its environment, as under torchrun,
    and nothing is set up yet: for tests of `weft.init`, of DistributedDataParallel, of faults. The
    rendezvous store lives in this process, so any rank may die.

    Args:
        size: how many ranks.
        function: what each runs; a function at the top of a module.
        args: its arguments, which are pickled.
        env: further environment variables.
        timeout: seconds for all of it, on an idle machine: more where it is busy.

    Raises:
        WireError: a process was killed, or has not ended in time.
        Exception: what a rank raised, with a note that says which rank.

    Example:
        >>> import os
        >>> processes(2, os.getenv, "RANK")
        ['0', '1']
    """
    environment = {"OMP_NUM_THREADS": "1", **(env or {})}
    return launch(size, function, args, timeout=patient(timeout), env=environment)
