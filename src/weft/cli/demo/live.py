"""The demo while it runs: a live panel on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .figures import Run, ms

_COLOURS = {"weft": "cyan", "torch": "yellow", "dense": "magenta"}
_BARS = "▁▂▃▄▅▆▇█"
_LATELY = 20  # steps that the loss of the moment is a mean of


class Display:
    """What shows the training of some runs, of which weft's is the first."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self._console, self._runs = console, runs
        self._shown = dict.fromkeys((run.way for run in runs), 0)
        self._doing = "processes are starting"
        self._ended = False
        self._began = time.monotonic()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        else:
            first, names = self._runs[0], ", ".join(run.name for run in self._runs)
            turns = ", in turns" if len(self._runs) > 1 else ""
            ranks = f"{first.ranks} rank{'s' if first.ranks > 1 else ''}"
            self._line(f"training {first.wanted} steps on {ranks}{turns}: {names}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def arrived(self, run: Run) -> None:
        """Steps were added to one of the runs."""
        self._doing = ""  # the panel is drawn from the runs, some times a second
        every = max(1, run.wanted // 10)
        if run.done // every > self._shown[run.way] // every:
            self._tell(run)

    def end(self) -> None:
        """The training is over, as far as it came."""
        self._ended = True
        for run in self._runs:
            if run.done > self._shown[run.way]:
                self._tell(run)

    def say(self, text: str) -> None:
        """What is going on besides."""
        self._doing = text
        self._line(text)

    def _tell(self, run: Run) -> None:
        self._shown[run.way] = run.done
        text = (
            f"{run.name:<15} step {run.done:>5}  loss {_loss(run)}  {run.speed():>10,.0f} pairs/s  "
            f"step {ms(run.typical('seconds')):>8}  "
            f"synchronisation {ms(run.typical('synchronisation')):>8}"
        )
        if (last := run.steps[-1]).algorithm:
            text += f"  rows {last.rows:,.0f} of union {last.union:,.0f}  {last.algorithm}"
        self._line(text)

    def _line(self, text: str) -> None:
        if self._live is None:
            # as it is: no markup, no wrapping to a width that a file does not have
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _panel(self) -> Panel:
        ways = Table.grid(padding=(0, 2), expand=True)
        ways.add_column(no_wrap=True)
        ways.add_column(ratio=1)
        titles = ("step", "loss", "a step", "synchronisation")
        for _ in titles:
            ways.add_column(justify="right", no_wrap=True)
        ways.add_row("", "", *(Text(title, "dim") for title in titles))
        for run in self._runs:
            ways.add_row(*self._way(run))
        parts: list[RenderableType] = [ways]
        if self._runs[0].done:
            parts += ["", self._moment(self._runs[0])]
        if self._doing:
            parts += ["", Text(self._doing, "dim")]
        elapsed = _duration(time.monotonic() - self._began)
        return Panel(
            Group(*parts),
            title=f"[bold] weft demo [/][dim]{self._runs[0].ranks} ranks [/]",
            subtitle=Text(f" {elapsed} · Ctrl-C ends and keeps what was made ", "dim"),
            title_align="left",
            subtitle_align="right",
            border_style="dim",
            padding=(1, 2),
        )

    def _way(self, run: Run) -> list[RenderableType]:
        colour = _COLOURS[run.way]
        mark = "▸" if not self._ended else "■" if run.note else "✓"
        name = Text(f"{mark} {run.name}", f"bold {colour}")
        bar = ProgressBar(run.wanted, run.done, complete_style=colour, finished_style=colour)
        if not run.done:
            return [name, bar]
        step, waited = run.typical("seconds"), run.typical("synchronisation")
        progress = f"{run.done}/{run.wanted}"
        return [name, bar, progress, _loss(run), ms(step), f"{ms(waited)} {waited / step:>4.0%}"]

    def _moment(self, weft: Run) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_row("weft's loss", Text(_sparkline(weft.values("loss"), 48), _COLOURS["weft"]))
        grid.add_row("speed", f"{weft.speed():,.0f} pairs/s")
        last = weft.steps[-1]
        rows = f"{last.rows:,.0f} of a rank, {last.union:,.0f} in the union"
        grid.add_row("rows", f"{rows}, {last.sent / 2**20:.2f} MiB sent")
        grid.add_row("algorithm", last.algorithm)
        if not self._ended:
            going = [run for run in self._runs if run.done]
            left = sum((run.wanted - run.done) * run.typical("seconds") for run in going)
            grid.add_row("to go", _duration(left))
        return grid


def _loss(run: Run) -> str:
    return f"{statistics.fmean(run.values('loss')[-_LATELY:]):.4f}"


def _duration(seconds: float) -> str:
    """Minutes and seconds.

    Example:
        >>> _duration(83.4)
        '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _sparkline(values: Sequence[float], width: int) -> str:
    """At most so many of the values, evenly spread, as bars.

    Example:
        >>> _sparkline([0.0, 1.0, 2.0, 3.0], 4)
        '▁▃▆█'
    """
    some = values[:: -(-len(values) // width)]
    low, high = min(some), max(some)
    top = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * top)] for value in some)
