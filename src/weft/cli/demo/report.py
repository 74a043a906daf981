"""The report: one HTML file that needs no other, with two pictures and ten lines."""

from __future__ import annotations

import html
import io
from pathlib import Path
from string import Template

from matplotlib.figure import Figure

from .figures import Run, headline
from .live import COLOURS
from .train import TURN


def page(runs: list[Run], lines: list[str]) -> str:
    """The page; every run has at least one step, the first is weft's."""
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        headline=headline(runs),
        losses=losses(runs),
        steps=steps(runs),
        lines="".join(f"<li>{html.escape(line)}\n" for line in lines),
    )


def losses(runs: list[Run]) -> str:
    """The loss, a mean of ten steps, against the seconds of training."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for run in reversed(runs):  # weft's lies on top
        clock, loss = (run.values(name).reshape(-1, TURN) for name in ("clock", "loss"))
        label = f"{run.name}, {clock.max():.0f} s"
        axes.plot(clock[:, -1], loss.mean(1), color=COLOURS[run.way], label=label)
    axes.set(xlabel="seconds of training", ylabel="loss", xlim=(0, None))
    axes.legend(frameon=False, reverse=True)
    return svg_of(figure)


def steps(runs: list[Run]) -> str:
    """The time of a step, and the bytes that are sent in it."""
    figure = Figure(figsize=(9, 2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for run in reversed(runs):
        seconds, sums, sent = map(run.typical, ("seconds", "sums", "sent"))
        left.barh(run.name, seconds * 1e3, color=COLOURS[run.way])
        left.barh(run.name, (seconds - sums) * 1e3, color="#c3cbd5")
        right.bar_label(right.barh(run.name, sent / 2**20, color=COLOURS[run.way]), fmt="%.1f")
    left.set_xlabel("ms of a step: computing (grey), and sums")
    right.set_xlabel("MiB that a rank sends in a step")
    return svg_of(figure)


def svg_of(figure: Figure) -> str:
    """A picture as an element of a page."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue().partition("<svg")[2]
