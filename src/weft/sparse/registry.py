"""The algorithms by name: what `algorithm=` may be, and what `auto` chooses from.

To add an algorithm, write `sparse/x.py` with one decorated function, import it in
`sparse/__init__.py` and describe it in `docs/algorithms.md`. Tests, selector, bench and `explain`
find it here. An algorithm outside of weft registers in the same way by `weft.algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import WeftError
from ..rows import Rows
from .cost import Cost, Load

if TYPE_CHECKING:
    from .call import Call
    from .local_rows import LocalRows

__all__ = ["ALGORITHMS", "Algorithm", "Schedule", "algorithm", "find"]

Schedule = Callable[["LocalRows", "Call"], Rows]
"""One rank's program: its rows in, the canonical sum out, in memory from `call.result`."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One registered algorithm.

    Attributes:
        name: what `algorithm=` says.
        run: the schedule.
        cost: what it costs for a load.
        applies: None, or why it cannot serve a load.
        pays: None, or why `auto` leaves it where it could serve.
    """

    name: str
    run: Schedule
    cost: Callable[[Load], Cost]
    applies: Callable[[Load], str | None]
    pays: Callable[[Load], str | None]


def _always(load: Load) -> None:
    return None


ALGORITHMS: dict[str, Algorithm] = {}


def algorithm(
    *,
    cost: Callable[[Load], Cost],
    applies: Callable[[Load], str | None] = _always,
    pays: Callable[[Load], str | None] = _always,
) -> Callable[[Schedule], Schedule]:
    """Register the decorated function as an algorithm, under its own name."""

    def register(schedule: Schedule) -> Schedule:
        name = schedule.__name__
        ALGORITHMS[name] = Algorithm(name, schedule, cost, applies, pays)
        return schedule

    return register


def find(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        WeftError: there is none; the text lists what there is.
    """
    if name not in ALGORITHMS:
        raise WeftError(
            f"algorithm {name!r} is unknown: use auto or one of {', '.join(sorted(ALGORITHMS))}"
        )
    return ALGORITHMS[name]
