"""Run one program on several ranks that are threads of this process."""

from __future__ import annotations

import contextvars
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..wire import default
from ..wire.base import Wire
from ..wire.threads import group
from .outcome import Outcome, place


def on_threads(
    size: int,
    body: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    timeout: float,
    limit: float,
) -> list[Outcome]:
    """Run `body(wire, *args, **kwargs)` on the threads of one group; what became of each rank."""
    return on_wires(group(size, timeout), body, args, kwargs, limit=limit)


def on_wires(
    wires: Sequence[Wire],
    body: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    limit: float = 180.0,
) -> list[Outcome]:
    """Run `body(wire, *args, **kwargs)` with each of the wires, one thread for each.

    A rank whose body raises aborts its wire, so that the others end too. A rank that has not ended
    after `limit` seconds is left behind as a daemon thread and reported as hanging.
    """
    outcomes: list[Outcome | None] = [None] * len(wires)

    def program(index: int, wire: Wire) -> None:
        default.set(wire)
        try:
            outcomes[index] = Outcome(wire.rank, body(wire, *args, **(kwargs or {})))
        except BaseException as error:
            outcomes[index] = Outcome(wire.rank, error=error, trace=traceback.format_exc())
            wire.abort(f"{type(error).__name__}: {error}")
        finally:
            wire.close()

    threads = [
        threading.Thread(
            # a context of its own, in which the default wire is this rank's
            target=contextvars.copy_context().run,
            args=(program, index, wire),
            name=f"rank {wire.rank}",
            daemon=True,
        )
        for index, wire in enumerate(wires)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        wires[0].abort(f"the ranks had {limit} s")
        for thread in threads:
            thread.join(0.2)
    return [
        Outcome(wire.rank, hangs=place(thread, __file__)) if outcome is None else outcome
        for wire, thread, outcome in zip(wires, threads, outcomes, strict=True)
    ]
