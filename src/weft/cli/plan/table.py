"""The predictions as a table: a line for each number of ranks, a column for each algorithm.

Where that is too wide for a terminal, it is cut into several, none of which loses a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .predict import Prediction

__all__ = ["show"]

_WIDE = 500  # columns of output that goes to no terminal, so that nothing is cut off


class Column(NamedTuple):
    """A column of a table."""

    title: str
    cells: list[Text]
    justify: Literal["left", "right"] = "right"


def show(found: Sequence[Prediction], names: Sequence[str]) -> None:
    """Print a table for each case and link; `names` are the algorithms, in the order shown."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for one in found:
        groups.setdefault((one.sizes.name, one.link.name), []).append(one)
    for (case, link), lines in groups.items():
        first = lines[0]
        console.print(
            f"{case}: {first.answer.load.most} rows a rank of {first.sizes.height or 'unknown'}, "
            f"{first.sizes.values.row} bytes each; link {link}: {first.link.link}",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )
        for columns in _fitting(_columns(lines), _times(lines, names), console.width):
            console.print(_table(columns))
        console.print()
    console.print(
        "ms: predicted after the opening exchange, of all ranks; -: cannot serve, or needs more "
        "workspace than auto allows; MB and messages of a rank",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _fitting(first: list[Column], rest: list[Column], width: int) -> Iterator[list[Column]]:
    """The columns as tables that are not too wide; the ranks stand first in each."""
    shown, own, paper = first, len(first), Console(width=_WIDE, height=_WIDE)
    for column in rest:
        if len(shown) >= own and paper.measure(_table([*shown, column])).maximum > width:
            yield shown
            shown, own = first[:1], 2
        shown = [*shown, column]
    yield shown


def _columns(lines: Sequence[Prediction]) -> list[Column]:
    """What was chosen, and its figures."""
    best = [
        next(line for line in one.answer.lines if line.algorithm == one.answer.chosen)
        for one in lines
    ]
    bold = Style(bold=True)
    return [
        _ranks(lines),
        Column("union", [Text(f"{one.answer.load.union}") for one in lines]),
        Column("chosen", [Text(line.algorithm, style=bold) for line in best], "left"),
        Column("ms", [Text(_number(line.milliseconds), style=bold) for line in best]),
        Column("MB", [Text(_number(line.bytes * 1e-6)) for line in best]),
        Column("messages", [Text(f"{line.messages}") for line in best]),
        Column("xbound", [Text(f"{line.of_bound:.2f}") for line in best]),
    ]


def _ranks(lines: Sequence[Prediction]) -> Column:
    return Column("ranks", [Text(f"{one.ranks}") for one in lines])


def _times(lines: Sequence[Prediction], names: Sequence[str]) -> list[Column]:
    """The time of each algorithm."""
    found = {name: Column(f"{name} ms", []) for name in names}
    for one in lines:
        by_name = {line.algorithm: line for line in one.answer.lines}
        for name, column in found.items():
            line, chosen = by_name[name], name == one.answer.chosen
            serves = chosen or line.verdict.startswith("predicted")
            text = _number(line.milliseconds) if serves else "-"
            column.cells.append(Text(text, style="bold" if chosen else "dim"))
    return list(found.values())


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def _number(value: float) -> str:
    """Three figures or so."""
    if value >= 1e7:
        return f"{value:.2e}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
