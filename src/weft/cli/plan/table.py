"""The predictions as a table: a line for each number of ranks, a column for each algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .predict import Prediction

__all__ = ["show"]

_WIDE = 200  # columns of output that goes to no terminal, so that nothing is cut off


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
        if shares := next((one.answer.shares for one in lines if one.answer.shares), ""):
            words = f"{shares}; ms are of what travels, MB and xbound of the numbers themselves"
            console.print(words, style="dim", highlight=False, soft_wrap=True)
        console.print(_table(lines, names))
        console.print()
    console.print(
        "ms: predicted after the opening exchange, of all ranks; -: cannot serve, or needs more "
        "workspace than auto allows; MB and messages of a rank",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _table(lines: Sequence[Prediction], names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    packed = any(one.answer.shares for one in lines)
    for title in ("ranks", "union"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("chosen", no_wrap=True)
    for title in ("ms", "MB", *["MB travel"] * packed, "messages", "xbound"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in names:
        table.add_column(f"{name} ms", justify="right", no_wrap=True)
    for one in lines:
        answer = one.answer
        best = next(line for line in answer.lines if line.algorithm == answer.chosen)
        cells = [
            Text(f"{one.ranks}"),
            Text(f"{answer.load.union}"),
            Text(answer.chosen, style="bold"),
            Text(_number(best.milliseconds), style="bold"),
            Text(_number(best.bytes * 1e-6)),
            *[Text(_number(best.travels * 1e-6))] * packed,
            Text(f"{best.messages}"),
            Text(f"{best.of_bound:.2f}"),
        ]
        by_name = {line.algorithm: line for line in answer.lines}
        for name in names:
            line = by_name[name]
            serves = line is best or line.verdict.startswith("predicted")
            style = "bold" if line is best else "dim"
            cells.append(Text(_number(line.milliseconds) if serves else "-", style=style))
        table.add_row(*cells)
    return table


def _number(value: float) -> str:
    """Three figures or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
