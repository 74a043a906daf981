"""`weft doctor --wire`: does a registered wire keep the contract of a wire?"""

from __future__ import annotations

import time

from rich.text import Text

import weft
from weft.testing import Outcome, check_wire, ranks_as_processes

from . import options, show

_STYLES = {"ok": "green", "-": "dim", "wrong": "red"}


def contract(name: str, clauses: str | None, *, thorough: bool) -> bool:
    """Print what each clause found on ranks that are processes of this host, as soon as it has.

    Args:
        name: of the wire.
        clauses: the numbers of those to try, divided by commas; None: all.
        thorough: whether clauses are tried, too, that take gigabytes of memory.

    Returns:
        Whether the wire keeps all clauses that are for it.
    """
    try:
        run = ranks_as_processes(name)
    except weft.WeftError as error:  # its text has the names there are
        options.refuse("--wire", str(error))
    numbers = _numbers(clauses)
    table = _Table()
    show.console().print("clause         seconds", style="bold")
    with options.failing("doctor", 1):  # the wire cannot be made at all
        try:
            check_wire(run, clauses=numbers, thorough=thorough, report=table.add)
        except AssertionError:
            if not table.broken:  # it raised before any clause
                raise
    show.console().print(f"\n{_conclusion(name, table)}", soft_wrap=True)
    return not table.broken


def _numbers(clauses: str | None) -> list[int]:
    if clauses is None:
        return []
    try:
        return [int(number) for number in clauses.split(",")]
    except ValueError:
        options.refuse("--clauses", f"{clauses!r}: write numbers, divided by commas, as 1,25")


class _Table:
    """The lines that are printed, one for each clause.

    Attributes:
        tried: the numbers of clauses that were tried.
        broken: the numbers of those that are broken.
    """

    def __init__(self) -> None:
        self.tried: list[int] = []
        self.broken: list[int] = []
        self._began = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        """Print what a clause found."""
        verdict = "ok"
        remark = ""
        if outcome.skipped:
            verdict = "-"
            remark = outcome.skipped
        else:
            self.tried.append(outcome.number)
        if outcome.error:
            verdict = "wrong"
            remark = outcome.error
            self.broken.append(outcome.number)
        now = time.monotonic()
        seconds = now - self._began
        self._began = now
        line = Text.assemble(
            f"{outcome.number:6} ",
            (f"{verdict:5} ", _STYLES[verdict]),
            f"{seconds:9.1f}  {outcome.title}",
        )
        if remark:
            line.append(f"\n{'':24}{remark}")
        show.console().print(line, soft_wrap=True)


def _conclusion(name: str, table: _Table) -> str:
    if table.broken:
        numbers = ", ".join(map(str, table.broken))
        return (
            f"wire {name!r} breaks {len(table.broken)} of {len(table.tried)} clauses: {numbers}; "
            "the manual, To write a wire, says what each demands"
        )
    return f"wire {name!r} keeps the {len(table.tried)} clauses that were tried"
