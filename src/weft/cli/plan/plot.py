"""Where each algorithm wins: a picture with two panels for each case and link.

Left, predicted time against ranks, a line for each algorithm, and the least time of any exact
schedule, dashed. Right, which one the rule takes, over ranks and rows a rank, rows
drawn independently; the case itself is the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from .. import pictures
from .predict import Prediction, predict

_COLOURS = ("#8a8f98", "#2a78b5", "#d9822b", "#2f9e6e", "#b5485d", "#7a5aa8", "#b79b1d", "#3aa6b9",
            "#8c5b3f", "#d46fb0", "#5b7f2a", "#4b4f8f")  # fmt: skip
_NOTE = "all of it predicted; measured: the rates of merging and of copies within a host"
_ROWS = tuple(10.0**power for power in np.linspace(1, 6, 41))


def draw(path: Path, groups: Sequence[Sequence[Prediction]], names: Sequence[str]) -> None:
    """Draw groups of predictions into a PNG or SVG; `names` has all algorithms."""
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}

    def panels(figure: Figure) -> None:
        rows = figure.subplots(len(groups), 2, squeeze=False)
        seen: set[str] = set()
        for (left, right), lines in zip(rows, groups, strict=True):
            seen |= _times(left, lines, colours)
            seen |= _map(right, lines, colours)
            left.set(title=f"{lines[0].drawing.case.name}, {lines[0].link.name}")
            right.set(title="what the rule takes, independent rows")
        shown: list[Artist] = [
            Patch(color=colour, label=name) for name, colour in colours.items() if name in seen
        ]
        shown.append(Line2D([], [], color=pictures.INK, linestyle="--", label="least time"))
        figure.legend(handles=shown, loc="outside upper center", ncols=min(len(shown), 9))
        figure.supxlabel(_NOTE, fontsize=8)

    pictures.write(path, path.suffix[1:], 10.5, 3.1 * len(groups) + 0.6, panels)


def _times(axes: Axes, lines: Sequence[Prediction], colours: Mapping[str, str]) -> set[str]:
    """Draw a line for each algorithm that serves some ranks; the names of these."""
    seen = set()
    for name, colour in colours.items():
        points = [
            (one.ranks, one.forecasts[name].milliseconds) for one in lines if name in one.forecasts
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3)
            seen.add(name)
    least = [one.least_ms for one in lines]
    axes.plot([one.ranks for one in lines], least, color=pictures.INK, linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    pictures.logarithmic(axes.yaxis)
    axes.set(xlabel="ranks", ylabel="predicted ms, logarithmic")
    axes.set_xticks(ranks := [one.ranks for one in lines], [str(count) for count in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    return seen


def _map(axes: Axes, lines: Sequence[Prediction], colours: Mapping[str, str]) -> set[str]:
    """Draw which algorithm the rule takes, over ranks and rows; the names of those."""
    first, ranks, order = lines[0], [one.ranks for one in lines], list(colours)
    most = first.drawing.case.height
    rows = [count for count in _ROWS if count <= most] or [1.0]
    winners = []
    for count in rows:
        found = predict([first.drawing.with_rows(count)], [first.link], ranks, first.per_host)
        winners.append([order.index(one.chosen) for one in found])
    axes.pcolormesh(
        np.arange(len(ranks)),
        rows,
        winners,
        cmap=ListedColormap(list(colours.values())),
        vmin=-0.5,
        vmax=len(order) - 0.5,
        shading="nearest",
        rasterized=True,  # an element for each cell would make a file of half a megabyte
    )
    axes.axhline(first.drawing.rows, color="white", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_xticks(range(len(ranks)), [str(count) for count in ranks])
    axes.set(xlabel="ranks", ylabel="rows a rank, logarithmic")
    return {order[place] for found in winners for place in found}
