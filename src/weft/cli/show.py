"""How commands print: one console, one kind of table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WIDE = 200  # columns of output that goes to no terminal, so that nothing is cut off


def console() -> Console:
    """Of the standard output."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table whose first columns stand to the left; where it is too wide, words are folded."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for place, title in enumerate(titles):
        made.add_column(title, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
