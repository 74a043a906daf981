"""The report: one HTML file that needs no other, with its plots as SVG."""

from __future__ import annotations

import io
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.resources import files
from typing import Any

import jinja2
import matplotlib
import numpy as np
import numpy.typing as npt
import psutil
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from .figures import COLUMNS, PARTS, TOLERANCE, Run, ms, speedups
from .text import WINDOW, Corpus
from .train import NEGATIVES, Job

COLOURS = {"weft": "#0b7285", "torch": "#c2571a", "dense": "#7a4fb5"}
_OF_PARTS = dict(
    zip(PARTS, ("#c9d1da", "#aab5c2", "#f0a868", "#dfe4ea", "#d9480f", "#8e9bab"), strict=True)
)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.edgecolor": "#e1e5ea",
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


def write_report(
    corpus: Corpus,
    min_count: int,
    trained_tokens: int,
    job: Job,
    runs: Sequence[Run],
    sent: Sequence[Sequence[float]],
    checks: Sequence[tuple[bool, str]],
    neighbours: Mapping[str, Sequence[tuple[str, float]]],
) -> str:
    """The page; every run has at least one step, the first is weft's, `sent` is of each run."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    weft, ranks = runs[0], runs[0].ranks
    skipped = f", {corpus.skipped} files skipped as not text" if corpus.skipped else ""
    chosen = ", ".join(f"{name} ({count})" for name, count in weft.algorithms.most_common())
    return environment.from_string(source).render(
        headline=f"A step with weft takes {ms(weft.typical('seconds'))}"
        + (f": {speedups(runs)}" if len(runs) > 1 else ""),
        lead=f"Skip-gram with negative sampling on {corpus.source}: {corpus.tokens.size:,} tokens, "
        f"{len(corpus.words):,} words of {job.dim} floats in two tables, {ranks} ranks with "
        f"{job.batch:,} pairs a step. Sparse gradients are summed over the ranks by "
        f"{'each way' if len(runs) > 1 else 'weft'} on the same batches from the same start.",
        interrupted=any(run.interrupted and run.note for run in runs),
        facts=_facts(weft),
        checks=checks,
        tolerance=f"{TOLERANCE:.0e}",
        columns=COLUMNS,
        rows=[
            {"run": run, "colour": COLOURS[run.way], "cells": run.cells(of_run)}
            for run, of_run in zip(runs, sent, strict=True)
        ],
        table_note=table_note(),
        plots=_plots(runs, sent),
        words=len(corpus.words),
        neighbours=neighbours,
        details={
            "Command": shlex.join(["weft", *sys.argv[1:]]),
            "Text": f"{corpus.source}: {corpus.files:,} files{skipped}",
            "Vocabulary": f"{len(corpus.words):,} words that occur {min_count} times or more; "
            f"{corpus.rare_words:,} rarer ones, {corpus.rare_tokens:,} tokens, left out",
            "Training": f"{trained_tokens:,} tokens after thinning out frequent words, window "
            f"{WINDOW}, {NEGATIVES} random words a pair, Adagrad, seed {job.seed}",
            "Algorithms": f"{chosen}, by number of steps",
            "Versions": _versions(),
            "Machine": f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, "
            f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.platform()}, "
            f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}",
        },
    )


def table_note() -> str:
    """What the figures of the table are."""
    return (
        "Times are means over the ranks and over the middle half of the steps by length; the ways "
        "took turns of ten steps. Synchronisation is what the training spends on starting and on "
        "waiting for sums, slower ranks included. Sent: bytes a rank sends in a step (median), "
        "counted for weft, computed from the known algorithm for PyTorch (ring all-gather of int64 "
        "indices and values; ring all-reduce of both tables). Pairs: of a word and a context, all "
        "ranks together. Peak memory: highest resident memory (RSS) of a process that trained this "
        "way only, for a few steps; in parentheses what is beyond a process that has only started."
    )


def _facts(weft: Run) -> list[tuple[str, str]]:
    rows, union, sent, bound = (
        statistics.median(weft.values(name)) for name in ("rows", "union", "sent", "bound")
    )
    share = weft.typical("synchronisation") / weft.typical("seconds")
    facts = [
        (f"{weft.speed():,.0f}", "pairs a second, all ranks"),
        (f"{share:.0%}", "of a step is synchronisation"),
        (f"{rows:,.0f} → {union:,.0f}", "rows of one rank → of the sum"),
    ]
    return [*facts, (f"{sent / bound:.2f}x", "of the least bytes possible")] if bound else facts


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in ("weft", "torch", "numpy", "numba"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _plots(runs: Sequence[Run], sent: Sequence[Sequence[float]]) -> list[dict[str, str]]:
    """Each with its title, what to see in it, and the picture; the first is the wide one."""
    return [
        {
            "title": "Loss against time",
            "caption": "The ways do the same arithmetic on the same batches, so they reach the "
            "same loss after the same steps; what differs is when.",
            "svg": _svg(lambda axes: _losses(axes, runs), "Loss against seconds, by way", 9.6),
        },
        {
            "title": "Where a step's time goes",
            "caption": "Starting the sums and waiting for them is what synchronisation costs the "
            "training. The next batch is made while the sums are under way.",
            "svg": _svg(lambda axes: _parts(axes, runs), "Parts of a step in milliseconds, by way"),
        },
        {
            "title": "Bytes per step",
            "caption": "Counted on the wire for weft, computed from the known algorithm for "
            "PyTorch's. The dashed line is the least that summing these rows can take, with four "
            "bytes for an index. The axis is logarithmic.",
            "svg": _svg(lambda axes: _bytes(axes, runs, sent), "MiB sent in each step, by way"),
        },
        {
            "title": "Rows per step",
            "caption": "Ranks share frequent words, so the union is smaller than all their rows "
            "together: that overlap is what need not be sent twice.",
            "svg": _svg(lambda axes: _rows(axes, runs[0]), "Distinct rows in each step"),
        },
    ]


def _losses(axes: Axes, runs: Sequence[Run]) -> None:
    for order, run in enumerate(runs):
        seconds, losses = np.array(run.values("clock")), _smooth(run.values("loss"))
        name, over = f"{run.name}, {seconds[-1]:.0f} s", 4 - order / 10  # weft's lies on top
        axes.plot(seconds, losses, color=COLOURS[run.way], label=name, zorder=over)
        axes.plot(seconds[-1], losses[-1], "o", color=COLOURS[run.way], zorder=over)
    axes.set_xlim(left=0)
    axes.set(xlabel="seconds of training", ylabel="loss (mean of ten steps)")


def _parts(axes: Axes, runs: Sequence[Run]) -> None:
    places, left = np.arange(len(runs))[::-1], np.zeros(len(runs))
    for part, name in PARTS.items():
        widths = np.array([run.typical(part) * 1e3 for run in runs])
        axes.barh(places, widths, 0.56, left=left, color=_OF_PARTS[part], label=name)
        left += widths
    for place, end, run in zip(places, left, runs, strict=True):
        step, waited = run.typical("seconds"), run.typical("synchronisation")
        axes.text(end, place, f"  {ms(step)}, {waited / step:.0%} for sums", va="center")
    axes.set_xlim(0, left.max() * 1.5)
    axes.set_yticks(places, [run.name for run in runs])
    axes.grid(False, axis="y")
    axes.set_xlabel("milliseconds of a step")


def _bytes(axes: Axes, runs: Sequence[Run], sent: Sequence[Sequence[float]]) -> None:
    for run, of_run, width in zip(runs, sent, (4, 2.5, 1.5), strict=False):
        name = run.name + ("" if run.way == "weft" else ", computed")
        mib = np.array(of_run) / 2**20  # the first line is wide, so that none hides another
        axes.plot(_steps(mib), mib, color=COLOURS[run.way], linewidth=width, label=name)
    bound = np.array(runs[0].values("bound")) / 2**20
    axes.plot(_steps(bound), bound, "--", color="#14181f", linewidth=1.2, label="least")
    axes.set(xlabel="step", ylabel="MiB sent by a rank")
    if bound.any():  # one rank alone sends nothing, which a logarithm cannot show
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("MiB sent by a rank, logarithmic")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.3, high * 1.3)  # no line along the edge


def _rows(axes: Axes, weft: Run) -> None:
    for name, label, colour in (
        ("total", "all ranks together", "#9aa6b4"),
        ("union", "in the sum (union)", "#3b6fb6"),
        ("rows", "one rank", "#2f9e6e"),
    ):
        values = weft.values(name)
        axes.plot(_steps(values), values, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="step", ylabel="distinct rows, both tables")


def _steps(values: Sequence[float] | npt.NDArray[np.float64]) -> range:
    return range(1, len(values) + 1)


def _smooth(values: Sequence[float], width: int = 10) -> npt.NDArray[np.float64]:
    """The mean of the last `width` values at each place, of fewer at the start."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - width, 0)
    means: npt.NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _svg(draw: Callable[[Axes], None], label: str, width: float = 5.4) -> str:
    """Draw on one pair of axes; the SVG element, named for those who do not see it."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": label}):  # ids of no other plot
        figure = Figure(figsize=(width, 3.4), layout="constrained")
        draw(axes := figure.subplots())
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=3, fontsize=8)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest}'
