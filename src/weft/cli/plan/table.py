"""The predictions as tables: a line for each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .predict import Prediction, groups_of

_WIDE = 200  # columns of output that goes to no terminal, so that nothing is cut off


def show(found: Sequence[Prediction], names: Sequence[str]) -> None:
    """Print two tables for each case and link: what is chosen, and the time of each of `names`."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    for lines in groups_of(found):
        first = lines[0]
        console.print(
            f"{first.sizes.name}: {first.answer.load.most} rows a rank of "
            f"{first.sizes.height or 'unknown'}, {first.sizes.values.row} bytes each; "
            f"link {first.link.name}: {first.link.link}",
            style="dim",
            soft_wrap=True,
        )
        titles = ("ranks", "union", "chosen", "ms", "MB", "messages", "xbound")
        console.print(_table(titles, [_chosen(one) for one in lines]))
        console.print(_table(("ranks", *names), [_times(one, names) for one in lines]), "")
    console.print(
        "ms, and the figures under the algorithms' names: milliseconds after the opening exchange, "
        "of all ranks; -: cannot serve, or needs more workspace than auto allows; MB and messages "
        "of a rank",
        style="dim",
        soft_wrap=True,
    )


def _chosen(one: Prediction) -> list[Text]:
    """What was chosen, and its figures."""
    best = next(line for line in one.answer.lines if line.algorithm == one.answer.chosen)
    figures = (_number(best.milliseconds), _number(best.bytes * 1e-6), f"{best.messages}")
    plain = [Text(f"{one.ranks}"), Text(f"{one.answer.load.union}"), Text(best.algorithm, "bold")]
    return [*plain, *map(Text, figures), Text(f"{best.of_bound:.2f}")]


def _times(one: Prediction, names: Sequence[str]) -> list[Text]:
    """The time of each algorithm that serves."""
    by_name = {line.algorithm: line for line in one.answer.lines}
    cells = [Text(f"{one.ranks}")]
    for name in names:
        line, chosen = by_name[name], name == one.answer.chosen
        serves = chosen or line.verdict.startswith("predicted")
        cells.append(Text(_number(line.milliseconds) if serves else "-", "bold" if chosen else ""))
    return cells


def _table(titles: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    """Where it is too wide for a terminal, words are folded and nothing is lost."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float) -> str:
    """Three figures or so."""
    if value >= 1e7:
        return f"{value:.2e}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
