"""Where each algorithm wins: a picture with two panels for each case and link.

Left, predicted time against ranks, a line for each algorithm. Right, which one is predicted to be
the quickest, over ranks and rows a rank, rows drawn independently; the case itself is the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from .predict import Prediction, groups_of, predict

_COLOURS = ("#8a8f98", "#2a78b5", "#d9822b", "#2f9e6e", "#b5485d", "#7a5aa8", "#b79b1d", "#3aa6b9",
            "#8c5b3f", "#d46fb0", "#5b7f2a", "#4b4f8f")  # fmt: skip
_ROWS = tuple(10.0**power for power in np.linspace(1, 6, 41))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weft plan",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


def draw(path: Path, found: Sequence[Prediction], names: Sequence[str]) -> None:
    """Draw predictions into a file whose ending says PNG or SVG; `names` has all algorithms."""
    groups = groups_of(found)
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10.5, 3.1 * len(groups) + 0.6), layout="constrained")
        panels = figure.subplots(len(groups), 2, squeeze=False)
        for (left, right), lines in zip(panels, groups, strict=True):
            _times(left, lines, colours)
            _map(right, lines, colours)
        shown = [Patch(color=colour, label=name) for name, colour in colours.items()]
        figure.legend(handles=shown, loc="outside upper center", ncols=min(len(names), 8))
        date = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=date)


def _times(axes: Axes, lines: Sequence[Prediction], colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        points = [
            (one.ranks, line.milliseconds)
            for one in lines
            for line in one.answer.lines
            if line.algorithm == name
            and (line.verdict == "chosen" or line.verdict.startswith("predicted"))
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3)
    first = lines[0]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True)
    axes.set(
        xlabel="ranks",
        ylabel="predicted ms, logarithmic",
        title=f"{first.sizes.name}, {first.link.name}",
    )
    axes.set_xticks(ranks := [one.ranks for one in lines], [str(count) for count in ranks])
    axes.xaxis.set_minor_locator(NullLocator())


def _map(axes: Axes, lines: Sequence[Prediction], colours: dict[str, str]) -> None:
    first, ranks = lines[0], [one.ranks for one in lines]
    order = list(colours)
    height = first.sizes.height
    rows = [count for count in _ROWS if height is None or count <= height] or [1.0]
    winners = [
        [
            order.index(one.answer.chosen)
            for one in predict([sizes], [first.link], ranks, first.per_host)
        ]
        for sizes in (first.sizes.times(count / first.sizes.rows) for count in rows)
    ]
    axes.pcolormesh(
        np.arange(len(ranks)),
        rows,
        winners,
        cmap=ListedColormap([colours[name] for name in order]),
        norm=BoundaryNorm(np.arange(len(order) + 1) - 0.5, len(order)),
        shading="nearest",
        rasterized=True,  # an element for each cell would make a file of half a megabyte
    )
    axes.axhline(first.sizes.rows, color="white", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_xticks(range(len(ranks)), [str(count) for count in ranks])
    axes.set(
        xlabel="ranks",
        ylabel="rows a rank, logarithmic",
        title="predicted quickest, independent rows",
    )
