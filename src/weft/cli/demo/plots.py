"""The report's plots, as SVG that takes its colours from the page.

Each plot is drawn once. It is drawn in stand-in colours, which are then replaced by the page's CSS
variables, so the same picture is light or dark as the page is. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .record import Run, Summary

__all__ = [
    "STAND_INS",
    "Plot",
    "bytes_per_step",
    "loss_against_time",
    "overlap",
    "rows_per_step",
    "step_parts",
    "svg",
]

STAND_INS = {
    name: f"#0102{number:02x}"
    for number, name in enumerate(
        (
            "fg", "muted", "grid", "weft", "torch", "dense", "bound",
            "forward", "backward", "prepare", "update", "hand_over", "wait", "hidden",
            "rows_all", "rows_union", "rows_own",
        ),
        start=16,
    )
}  # fmt: skip
"""The colours to draw in, by the name of the page's."""

_POINTS = 500
PART_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "prepare": "next batch",
    "update": "update",
    "hand_over": "start sums",
    "wait": "wait for sums",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": STAND_INS["fg"],
    "axes.edgecolor": STAND_INS["grid"],
    "axes.labelcolor": STAND_INS["muted"],
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": STAND_INS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": STAND_INS["grid"],
    "ytick.color": STAND_INS["grid"],
    "xtick.labelcolor": STAND_INS["muted"],
    "ytick.labelcolor": STAND_INS["muted"],
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture with its heading and what to see in it; `svg` goes into the page as it is."""

    title: str
    caption: str
    svg: str


def loss_against_time(
    runs: Sequence[Run],
    caption: str = "The ways do the same arithmetic on the same batches, so they reach the same "
    "loss after the same steps; what differs is when.",
) -> Plot:
    """Loss over seconds of training, one line for each way."""

    def draw(axes: Axes) -> None:
        for run in runs:
            seconds, losses = _thin(run.values("clock")), _thin(_smooth(run.values("loss")))
            colour = STAND_INS[run.way]
            above = 4 - len(axes.lines) / 10  # the first way's line lies on top
            name = f"{run.name}, {seconds[-1]:.0f} s"
            axes.plot(seconds, losses, color=colour, label=name, zorder=above)
            axes.plot(seconds[-1], losses[-1], "o", color=colour, markersize=6, zorder=above)
        axes.set_xlim(left=0)
        axes.set(xlabel="seconds of training", ylabel="loss (mean of ten steps)")

    return Plot(
        "Loss against time",
        caption,
        svg(draw, "Loss against seconds of training, by way", legend=3, size=(9.6, 3.5)),
    )


def step_parts(
    summaries: Sequence[tuple[str, Summary]],
    names: Mapping[str, str] = PART_NAMES,
    what: str = "sums",
    caption: str = "Starting the sums and waiting for them is what synchronisation costs the "
    "training. The next batch is made while the sums are under way.",
) -> Plot:
    """Where a step's time goes: a stacked bar for each way."""

    def draw(axes: Axes) -> None:
        places = np.arange(len(summaries))[::-1]
        left = np.zeros(len(summaries))
        for part, name in names.items():
            widths = np.array([one.parts[part] * 1e3 for _, one in summaries])
            axes.barh(places, widths, 0.56, left=left, color=STAND_INS[part], label=name)
            left += widths
        for place, end, (_, one) in zip(places, left, summaries, strict=True):
            share = one.synchronisation / one.step
            axes.annotate(
                f"{end:.0f} ms, {share:.0%} for {what}",
                (end, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axes.set_xlim(0, left.max() * 1.36)
        _bars(axes, places, [one.name for _, one in summaries], "milliseconds a step (medians)")

    return Plot(
        "Where a step's time goes",
        caption,
        svg(draw, "Parts of a step in milliseconds, by way", legend=6),
    )


def bytes_per_step(runs: Sequence[Run], sent: dict[str, list[float]]) -> Plot:
    """Bytes that the average rank sends in a step, by way, and the bound."""
    weft = runs[0]

    def draw(axes: Axes) -> None:
        for run in runs:
            if sent[run.way]:
                note = "" if run.way == "weft" else " (computed)"
                axes.plot(
                    _steps(sent[run.way]),
                    _thin(sent[run.way]) / 2**20,
                    color=STAND_INS[run.way],
                    label=run.name + note,
                )
        bounds = [one.bound / 2**20 for one in weft.reductions()]
        axes.plot(
            _steps(bounds),
            _thin(bounds),
            color=STAND_INS["bound"],
            linestyle=(0, (4, 3)),
            linewidth=1.4,
            label="least possible",
        )
        if any(bounds):  # one rank alone sends nothing, which a logarithm cannot show
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="step", ylabel="MiB sent by a rank")

    return Plot(
        "Bytes per step",
        "Counted on the wire for weft, computed from the known algorithm for PyTorch's. The dashed "
        "line is the least that summing these rows can take, with four bytes for an index.",
        svg(draw, "MiB sent by the average rank in each step, by way", legend=2),
    )


def rows_per_step(weft: Run) -> Plot:
    """Rows of a rank, of all ranks, and of their union, in each step."""

    def draw(axes: Axes) -> None:
        figures = weft.reductions()
        for name, values, colour in (
            ("all ranks together", [one.total for one in figures], "rows_all"),
            ("in the sum (union)", [one.union for one in figures], "rows_union"),
            ("one rank", [one.rows for one in figures], "rows_own"),
        ):
            axes.plot(_steps(values), _thin(values), color=STAND_INS[colour], label=name)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set(xlabel="step", ylabel="distinct rows, both tables")

    return Plot(
        "Rows per step",
        "Ranks share frequent words, so the union is smaller than all their rows together: that "
        "overlap is what need not be sent twice.",
        svg(draw, "Distinct rows in each step", legend=3),
    )


def overlap(summaries: Sequence[tuple[str, Summary]]) -> Plot:
    """How long sums are under way, and how much of that the training waits for."""

    def draw(axes: Axes) -> None:
        places = np.arange(len(summaries))[::-1]
        total = np.array([one.in_flight * 1e3 for _, one in summaries])
        hidden = np.array([one.in_flight * one.hidden * 1e3 for _, one in summaries])
        axes.barh(places, hidden, 0.56, color=STAND_INS["hidden"], label="behind other work")
        axes.barh(
            places, total - hidden, 0.56, left=hidden, color=STAND_INS["wait"], label="waited for"
        )
        for place, end, (_, one) in zip(places, total, summaries, strict=True):
            axes.annotate(
                f"{end:.0f} ms, {one.hidden:.0%} hidden",
                (end, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axes.set_xlim(0, max(total.max(), 1e-3) * 1.36)
        names = [one.name for _, one in summaries]
        _bars(axes, places, names, "milliseconds a step in which a sum is under way")

    return Plot(
        "Overlap",
        "Each table's sum starts as soon as its gradient is there and is waited for when the "
        "update needs it. What lies between is hidden behind the rest of the step.",
        svg(draw, "Time that sums are under way, hidden and waited for, by way", legend=2),
    )


def _bars(axes: Axes, places: npt.NDArray[np.int64], names: list[str], label: str) -> None:
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0, labelcolor=STAND_INS["fg"])
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel(label)


def _smooth(values: Sequence[float], width: int = 10) -> npt.NDArray[np.float64]:
    """The mean of the last `width` values at each place, of fewer at the start."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    means: npt.NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _thin(values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """At most a few hundred points: means of equal stretches of a longer line."""
    array = np.asarray(values, dtype=np.float64)
    stretch = -(-len(array) // _POINTS)
    starts = np.arange(0, len(array), max(stretch, 1))
    ends = np.minimum(starts + stretch, len(array))
    means: npt.NDArray[np.float64] = np.add.reduceat(array, starts) / (ends - starts)
    return means


def _steps(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """The steps, from 1, that belong to `_thin(values)`."""
    return _thin(np.arange(1.0, len(values) + 1))


def svg(
    draw: Callable[[Axes], None],
    label: str,
    *,
    legend: int,
    size: tuple[float, float] = (5.4, 3.3),
) -> str:
    """Draw on one pair of axes; the SVG element, with the page's colours, named for readers."""
    style = {**_STYLE, "svg.hashsalt": label}  # ids that no other plot of the page has
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7))
        draw(axes)
        if legend:
            figure.legend(
                loc="outside upper left",
                ncols=min(legend, 3),
                fontsize=9,
                handlelength=1.2,
                columnspacing=1.4,
            )
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{label}"', text, count=1
    )
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("'DejaVu Sans'", "var(--font)").replace("DejaVu Sans", "var(--font)")
    for name, colour in STAND_INS.items():
        text = text.replace(colour, f"var(--{name.replace('_', '-')})")
    return text
