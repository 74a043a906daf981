"""The report: one HTML file that needs no other, with its picture as SVG."""

from __future__ import annotations

import io
import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
import numpy as np
import psutil
from markupsafe import Markup
from matplotlib.figure import Figure

from .. import pictures
from ..wording import listed, mib, ms, number, versions
from .figures import (
    COLUMNS,
    COMPUTING,
    PARTS,
    RECORDED,
    TOLERANCE,
    Floats,
    Run,
    faster,
    step_of,
    sums_of,
)
from .text import WINDOW, Corpus
from .train import NEGATIVES, Job

COLOURS = {"weft": "#0b7285", "torch": "#c2571a", "dense": "#7a4fb5"}
"""Of the ways, on light pages; `pictures.ON_DARK` has the others."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A line of figures: its name, pieces of (what, value, class), and the figure in words."""

    name: str
    pieces: tuple[tuple[str, float, str], ...]
    words: str

    @property
    def value(self) -> float:
        return sum(value for _, value, _ in self.pieces)


def write_report(
    corpus: Corpus,
    job: Job,
    runs: Sequence[Run],
    checks: Sequence[tuple[bool, str]],
    neighbours: Mapping[str, Sequence[tuple[str, float]]],
) -> str:
    """The page; every run has at least one step, the first is weft's."""
    loader = jinja2.PackageLoader("weft.cli.demo", "")
    weft = runs[0]
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
        sums=faster(runs, sums_of),
        steps=faster(runs, step_of),
        algorithms=Counter(weft.algorithms).most_common(),
        median={name: float(np.median(weft.values(name))) for name in RECORDED},
        losses=_losses(runs),
        bars_of={
            "parts": [_parts(run) for run in runs],
            "alone": _alone(runs),
            "bytes": _bytes(runs),
            "rows": _rows(weft),
        },
        cores=psutil.cpu_count(),
        constants={"window": WINDOW, "negatives": NEGATIVES, "tolerance": f"{TOLERANCE:.0e}"},
        columns=COLUMNS,
        computing=COMPUTING,
        colours={way: (light, pictures.ON_DARK[light]) for way, light in COLOURS.items()},
        ms=ms,
        number=number,
        command=shlex.join(["weft", *sys.argv[1:]]),
        versions=listed(versions() | {"numpy": np.__version__}),
        machine=f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.platform()}, "
        f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}",
    )


def _losses(runs: Sequence[Run]) -> Markup:
    """The losses against time, as an SVG element."""

    def draw(figure: Figure) -> None:
        figure.patch.set_visible(False)  # the card is its paper
        axes = figure.subplots()
        for order, run in enumerate(runs):
            seconds, losses = run.values("clock"), _smooth(run.values("loss"))
            name, over = f"{run.name}, {seconds[-1]:.0f} s", 4 - order / 10  # weft's lies on top
            axes.plot(seconds, losses, color=COLOURS[run.way], label=name, zorder=over)
            axes.plot(seconds[-1], losses[-1], "o", color=COLOURS[run.way], zorder=over)
        axes.set_xlim(left=0)
        axes.set(xlabel="seconds of training", ylabel="loss (mean of ten steps)")
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=3, fontsize=8)

    file = io.BytesIO()
    pictures.write(file, "svg", 9.6, 3.4, draw)
    svg = file.getvalue().decode()
    return Markup(svg[svg.index("<svg") :])  # matplotlib has escaped what others wrote


def _smooth(values: Floats, width: int = 10) -> Floats:
    """The mean of the last `width` values at each place, of fewer at the start."""
    sums = np.convolve(values, np.ones(width))[: len(values)]
    return sums / np.minimum(np.arange(len(values)) + 1, width)


def _parts(run: Run) -> Bar:
    """Where a step's time goes."""
    pieces = []
    for part in PARTS:
        kind = "computing" if part in COMPUTING else "summing"
        pieces.append((f"{part}, {ms(run.typical(part))}", run.typical(part), kind))
    words = f"{ms(run.typical('seconds'))}, {run.share:.0%} for sums"
    return Bar(run.name, tuple(pieces), words)


def _alone(runs: Sequence[Run]) -> list[Bar]:
    """Times of the sums, as far as they were measured."""
    found = []
    for run in runs:
        if run.sums_alone is not None:
            piece = (run.name, run.sums_alone, run.way)
            found.append(Bar(run.name, (piece,), ms(run.sums_alone)))
    return found


def _bytes(runs: Sequence[Run]) -> list[Bar]:
    """What a rank sends in a step, beside the least that it can be."""
    found = []
    for run in runs:
        sent = float(np.median(run.sent))
        counted = "counted" if run.way == "weft" else "computed"
        found.append(Bar(run.name, ((run.name, sent, run.way),), f"{mib(sent)}, {counted}"))
    least = float(np.median(runs[0].values("bound_bytes")))
    if least:  # one rank alone sends nothing
        found.append(Bar("the least", (("the least", least, "least"),), mib(least)))
    return found


def _rows(weft: Run) -> list[Bar]:
    """Distinct rows of both tables in a step."""
    found = []
    for name, words in (
        ("rows", "one rank has"),
        ("total", "all ranks together"),
        ("union", "the sum has"),
    ):
        count = float(np.median(weft.values(name)))
        found.append(Bar(words, ((words, count, "least"),), f"{count:,.0f}"))
    return found
