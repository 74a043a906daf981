"""Run one program on several ranks that are threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..bootstrap.outcome import Outcome, place
from ..wire import default
from ..wire.base import Group


def outcome_on(
    group: Group, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Outcome:
    """Run a body with its group, which is also the default one; abort the group if it raises."""
    default.set(group)
    outcome = Outcome.of(group.rank, body, group, *args, **kwargs)
    default.clear("the body has ended")
    if outcome.error is not None:
        group.abort(f"{type(outcome.error).__name__}: {outcome.error}")
    return outcome


def on_groups(
    groups: Sequence[Group],
    body: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    limit: float = 180.0,
) -> list[Outcome]:
    """Run `body(group, *args, **kwargs)` with each of the groups, on a thread for each.

    If a body raises, its group is aborted, so that the other ranks end, too. A rank that has not
    ended after `limit` seconds is left running on its daemon thread, and reported as hanging.
    """
    outcomes: dict[int, Outcome] = {}

    def program(group: Group) -> None:
        outcomes[group.rank] = outcome_on(group, body, args, kwargs or {})
        group.close()

    deadline, threads = time.monotonic() + limit, default.begun(program, groups)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {number: place(thread) for number, thread in enumerate(threads) if thread.is_alive()}
    if late:
        groups[0].abort(f"the ranks had {limit} s")
    for number, where in late.items():
        threads[number].join(0.2)
        outcomes[number] = Outcome(number, hangs=where)
    return [outcomes[group.rank] for group in groups]
