"""How pictures look, and how they are written; matplotlib is an extra, and slow to load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weft",  # the same figures give the same file
    "font.size": 9,
    "axes.edgecolor": "#c5ccd4",
    "axes.labelcolor": "#59636f",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e1e5ea",
    "xtick.color": "#59636f",
    "ytick.color": "#59636f",
    "legend.frameon": False,
}


def write(
    file: Path | BinaryIO, kind: str, width: float, height: float, draw: Callable[[Figure], None]
) -> None:
    """Write what `draw` draws on a figure of so many inches; `kind`: "png" or "svg"."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)


def logarithmic(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers, such as 1, 2, 5, 10."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
