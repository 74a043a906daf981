"""How pictures look, and how they are written; matplotlib is an extra, and slow to load.

An SVG has two colours for each that it is drawn in, by CSS: one for light pages and one for dark
ones. Which is shown follows the page that the picture is in, or else the reader's setting.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

INK, MUTED, EDGE, GRID, PAPER = "#14181f", "#59636f", "#c5ccd4", "#e1e5ea", "#ffffff"

ON_DARK = {
    INK: "#e8ecf1",
    MUTED: "#98a4b3",
    EDGE: "#3d4651",
    GRID: "#2a313b",
    PAPER: "#161b22",
    "#000000": "#e8ecf1",
    "#0b7285": "#4fc3d5",
    "#c2571a": "#f0a868",
    "#7a4fb5": "#b79bec",
}
"""What stands for a colour on dark pages; those that are not here are seen on both."""

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weft",  # the same figures give the same file
    "font.size": 9,
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": EDGE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
}


def write(
    file: Path | BinaryIO, kind: str, width: float, height: float, draw: Callable[[Figure], None]
) -> None:
    """Write what `draw` draws on a figure of so many inches; `kind`: "png" or "svg"."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
        draw(figure)
        if kind == "png":
            figure.savefig(file, format=kind, dpi=150)
            return
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, metadata=_NO_METADATA)
    svg = for_both(drawn.getvalue().decode()).encode()
    if isinstance(file, Path):
        file.write_bytes(svg)
    else:
        file.write(svg)


def for_both(svg: str) -> str:
    """An SVG of matplotlib's, with its colours for dark pages."""
    rules = [":root { color-scheme: light dark }"]
    for light, dark in ON_DARK.items():
        for what in ("fill", "stroke"):
            if f"{what}: {light}" in svg:
                colours = f"light-dark({light}, {dark})"
                rules.append(f'[style*="{what}: {light}"] {{ {what}: {colours} !important }}')
    return svg.replace("</style>", "\n".join(["", *rules, "</style>"]), 1)


def logarithmic(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers, such as 1, 2, 5, 10."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
