"""The table: plain columns for pipes and files, rich ones for a terminal.

Plain output is one row a line, columns split by white space, `-` where there is nothing to say,
and lines that begin with `#` around it; so `grep -v '^#'`, awk and a spreadsheet read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .results import Head, Row

__all__ = ["Plain", "Rich", "Sink", "sink"]


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    cell: Callable[[Row], str]
    right: bool = True


def _columns(peers: Sequence[str], link: bool) -> list[_Column]:
    columns = [
        _Column("case", 10, lambda row: row.case, right=False),
        _Column("k", 8, lambda row: _number(row.distinct, 0)),
        _Column("union", 8, lambda row: str(row.union)),
        _Column("by", 14, lambda row: row.name, right=False),
        _Column("algorithm", 9, lambda row: row.chosen or "-", right=False),
        _Column("ms", 9, _time),
        _Column("spread", 15, _spread),
        _Column("MB", 8, lambda row: _number(row.sent_bytes, 2, 1e-6)),
        _Column("xbound", 7, lambda row: _number(row.bytes_ratio, 2)),
    ]
    if link:
        columns.append(_Column("xlink", 7, lambda row: _number(row.time_ratio, 2)))
    for peer in peers:
        columns.append(_Column(f"{peer}/x", max(8, len(peer) + 2), _versus(peer)))
    return columns


def _versus(peer: str) -> Callable[[Row], str]:
    return lambda row: _number(row.times.get(peer), 2)


def _time(row: Row) -> str:
    return _number(row.median, 2, 1e3) if row.status == "ok" else row.status.upper()


def _spread(row: Row) -> str:
    if row.quartiles is None:
        return "-"
    first, third = row.quartiles
    return f"{_number(first, 2, 1e3)}..{_number(third, 2, 1e3)}"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    """At most `digits` decimals, fewer for large numbers: four figures are enough."""
    if value is None:
        return "-"
    value *= scale
    if value >= 1000:
        digits = 0
    elif value >= 100:
        digits = min(digits, 1)
    return f"{value:.{digits}f}"


class Sink(Protocol):
    """Where heads, rows and words on what goes on are shown, as they come."""

    def __enter__(self) -> Sink: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, found: Head | Row | str) -> None: ...


class Plain:
    """Lines, each written out at once; what goes on is not told."""

    def __init__(self, console: Console, peers: Sequence[str], link: bool) -> None:
        self._console, self._columns = console, _columns(peers, link)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, found: Head | Row | str) -> None:
        if isinstance(found, Head):
            for line in found.lines():
                self._write(f"# {line}")
            self._write("#" + self._line([column.title for column in self._columns])[1:])
        elif isinstance(found, Row):
            self._write(self._line([column.cell(found) for column in self._columns]))
            if found.why:
                self._write(f"# {found.case} {found.name} {found.status}: {found.why}")

    def _line(self, cells: list[str]) -> str:
        padded = [
            cell.rjust(column.width) if column.right else cell.ljust(column.width)
            for cell, column in zip(cells, self._columns, strict=True)
        ]
        return " " + " ".join(padded).rstrip()

    def _write(self, line: str) -> None:
        print(line, file=self._console.file, flush=True)


class Rich:
    """A table that grows on the terminal, and a line below it that says what goes on."""

    def __init__(self, console: Console, peers: Sequence[str], link: bool) -> None:
        self._columns = _columns(peers, link)
        self._console = console
        self._table = Table(box=None, pad_edge=False, header_style="bold")
        for column in self._columns:
            self._table.add_column(
                column.title, justify="right" if column.right else "left", no_wrap=True
            )
        self._notes: list[str] = []
        self._spinner = Spinner("dots", "starting the ranks", style="dim")
        self._last = ""
        self._live = Live(self._view(), console=console, refresh_per_second=8)

    def __enter__(self) -> Rich:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(self._view(done=True))
        self._live.__exit__(None, None, None)

    def show(self, found: Head | Row | str) -> None:
        if isinstance(found, Head):
            for line in found.lines():
                self._console.print(Text(line, style="dim"), highlight=False)
        elif isinstance(found, Row):
            if self._last not in ("", found.case):
                self._table.add_row()
            cells = [Text(column.cell(found), style=_style(found)) for column in self._columns]
            if found.case == self._last:
                cells[:3] = [Text(""), Text(""), Text("")]
            self._last = found.case
            self._table.add_row(*cells)
            if found.why:
                self._notes.append(f"{found.case} {found.name} {found.status}: {found.why}")
        else:
            self._spinner.update(text=found)
        self._live.update(self._view())

    def _view(self, done: bool = False) -> Group:
        notes = [Text(note, style="yellow") for note in self._notes]
        table = [self._table] if self._last else []
        return Group(*table, *notes, *([] if done else [self._spinner]))


def _style(row: Row) -> str:
    if row.status == "wrong":
        return "bold red"
    return "bold" if row.own and row.status == "ok" else "dim"


def sink(console: Console, peers: Sequence[str], link: bool) -> Sink:
    """The terminal's table where it fits, else plain lines."""
    needed = sum(column.width + 1 for column in _columns(peers, link))
    if console.is_terminal and console.width >= needed:
        return Rich(console, peers, link)
    return Plain(console, peers, link)
