"""How commands print: one console, one kind of table, one way to write a number."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata

from rich.console import Console
from rich.table import Table

import weft

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


def number(value: float | None, scale: float = 1.0) -> str:
    """`scale` times the value in three figures, more before the point; "-": it is not known.

    Example:
        >>> [number(value) for value in (0.12345, 12.345, 12345.6, None)]
        ['0.12', '12.3', '12346', '-']
    """
    if value is None:
        return "-"
    value *= scale
    if value >= 1e7:
        return f"{value:.2e}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def ms(seconds: float) -> str:
    """A time in milliseconds, with its unit."""
    return f"{number(seconds, 1e3)} ms"


def mib(nbytes: float) -> str:
    """A size in MiB, with its unit."""
    return f"{number(nbytes, 2**-20)} MiB"


def versions() -> dict[str, str]:
    """What computes here, each with its version."""
    return {
        "weft": weft.__version__,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "kernels": weft.kernels.describe(),
    }


def listed(facts: Mapping[str, object]) -> str:
    """Names with what belongs to them, in a line."""
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())
