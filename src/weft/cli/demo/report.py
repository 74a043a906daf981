"""The report: one HTML file that needs no other, with its plots as SVG."""

from __future__ import annotations

import base64
import io
import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import psutil
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from .. import pictures
from ..show import listed, ms, number, versions
from .figures import COLUMNS, PARTS, RECORDED, TOLERANCE, Floats, Run, speedups
from .text import WINDOW, Corpus
from .train import NEGATIVES, Job

COLOURS = {"weft": "#0b7285", "torch": "#c2571a", "dense": "#7a4fb5"}
_OF_PARTS = ("#c9d1da", "#aab5c2", "#f0a868", "#dfe4ea", "#d9480f", "#8e9bab")
_OF_ROWS = (
    ("total", "all ranks together", "#9aa6b4"),
    ("union", "in the sum (union)", "#3b6fb6"),
    ("rows", "one rank", "#2f9e6e"),
)


def write_report(
    corpus: Corpus,
    job: Job,
    runs: Sequence[Run],
    checks: Sequence[tuple[bool, str]],
    neighbours: Mapping[str, Sequence[tuple[str, float]]],
) -> str:
    """The page; every run has at least one step, the first is weft's."""
    loader, weft = jinja2.PackageLoader("weft.cli.demo", ""), runs[0]
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        corpus=corpus,
        job=job,
        runs=runs,
        weft=weft,
        checks=checks,
        neighbours=neighbours,
        faster=speedups(runs),
        algorithms=Counter(weft.algorithms).most_common(),
        median={name: float(np.median(weft.values(name))) for name in RECORDED},
        pictures={
            "losses": _picture(lambda axes: _losses(axes, runs), 9.6),
            "parts": _picture(lambda axes: _parts(axes, runs)),
            "bytes": _picture(lambda axes: _bytes(axes, runs)),
            "rows": _picture(lambda axes: _rows(axes, weft)),
        },
        constants={"window": WINDOW, "negatives": NEGATIVES, "tolerance": f"{TOLERANCE:.0e}"},
        columns=COLUMNS,
        colours=COLOURS,
        ms=ms,
        number=number,
        command=shlex.join(["weft", *sys.argv[1:]]),
        versions=listed(versions() | {"numpy": np.__version__}),
        machine=f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.platform()}, "
        f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}",
    )


def _picture(draw: Callable[[Axes], None], width: float = 5.4) -> str:
    """Draw on one pair of axes; the picture as a URL that holds it."""

    def whole(figure: Figure) -> None:
        draw(axes := figure.subplots())
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=3, fontsize=8)

    file = io.BytesIO()
    pictures.write(file, "svg", width, 3.4, whole)
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _losses(axes: Axes, runs: Sequence[Run]) -> None:
    for order, run in enumerate(runs):
        seconds, losses = run.values("clock"), _smooth(run.values("loss"))
        name, over = f"{run.name}, {seconds[-1]:.0f} s", 4 - order / 10  # weft's lies on top
        axes.plot(seconds, losses, color=COLOURS[run.way], label=name, zorder=over)
        axes.plot(seconds[-1], losses[-1], "o", color=COLOURS[run.way], zorder=over)
    axes.set_xlim(left=0)
    axes.set(xlabel="seconds of training", ylabel="loss (mean of ten steps)")


def _smooth(values: Floats, width: int = 10) -> Floats:
    """The mean of the last `width` values at each place, of fewer at the start."""
    sums = np.convolve(values, np.ones(width))[: len(values)]
    return sums / np.minimum(np.arange(len(values)) + 1, width)


def _parts(axes: Axes, runs: Sequence[Run]) -> None:
    places, left = np.arange(len(runs))[::-1], np.zeros(len(runs))
    for part, colour in zip(PARTS, _OF_PARTS, strict=True):
        widths = np.array([run.typical(part) * 1e3 for run in runs])
        axes.barh(places, widths, 0.56, left=left, color=colour, label=part)
        left += widths
    for place, end, run in zip(places, left, runs, strict=True):
        words = f"  {ms(run.typical('seconds'))}, {run.share:.0%} for sums"
        axes.text(end, place, words, va="center")
    axes.set_xlim(0, left.max() * 1.5)
    axes.set_yticks(places, [run.name for run in runs])
    axes.grid(False, axis="y")
    axes.set_xlabel("milliseconds of a step")


def _bytes(axes: Axes, runs: Sequence[Run]) -> None:
    for run, width in zip(runs, (4, 2.5, 1.5), strict=False):
        name = run.name + ("" if run.way == "weft" else ", computed")
        # the first line is wide, so that none hides another
        _line(axes, run.sent / 2**20, color=COLOURS[run.way], linewidth=width, label=name)
    bound = runs[0].values("bound_bytes") / 2**20
    _line(axes, bound, color="#14181f", linestyle="--", linewidth=1.2, label="least")
    axes.set(xlabel="step", ylabel="MiB sent by a rank")
    if bound.any():  # one rank alone sends nothing, which a logarithm cannot show
        axes.set_yscale("log")
        pictures.logarithmic(axes.yaxis)
        axes.set_ylabel("MiB sent by a rank, logarithmic")
        axes.margins(y=0.1)  # no line along the edge


def _rows(axes: Axes, weft: Run) -> None:
    for name, label, colour in _OF_ROWS:
        _line(axes, weft.values(name), color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="step", ylabel="distinct rows, both tables")


def _line(axes: Axes, values: Floats, **style: Any) -> None:
    axes.plot(range(1, len(values) + 1), values, **style)
