"""Run one program on several ranks that are threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..bootstrap.outcome import Outcome, place
from ..wire import default
from ..wire.base import Wire


def outcome_on(
    wire: Wire, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Outcome:
    """Run a body with its wire, which is also the default wire; abort the wire if it raises."""
    default.set(wire)
    outcome = Outcome.of(wire.rank, body, wire, *args, **kwargs)
    default.clear("the body has ended")
    if outcome.error is not None:
        wire.abort(f"{type(outcome.error).__name__}: {outcome.error}")
    return outcome


def on_wires(
    wires: Sequence[Wire],
    body: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    limit: float = 180.0,
) -> list[Outcome]:
    """Run `body(wire, *args, **kwargs)` with each of the wires, on a thread for each.

    If a body raises, its wire is aborted, so that the other ranks end, too. A rank that has not
    ended after `limit` seconds is left running on its daemon thread, and reported as hanging.
    """
    outcomes: dict[int, Outcome] = {}

    def program(wire: Wire) -> None:
        outcomes[wire.rank] = outcome_on(wire, body, args, kwargs or {})
        wire.close()

    deadline, threads = time.monotonic() + limit, default.begun(program, wires)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {number: place(thread) for number, thread in enumerate(threads) if thread.is_alive()}
    if late:
        wires[0].abort(f"the ranks had {limit} s")
    for number, where in late.items():
        threads[number].join(0.2)
        outcomes[number] = Outcome(number, hangs=where)
    return [outcomes[wire.rank] for wire in wires]
