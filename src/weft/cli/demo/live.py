"""The demo while it runs: a live panel on a terminal, a line now and then elsewhere.

Both are told the same: a way begins, steps arrive, it ends. Both go to one rich console, which
knows whether it is a terminal.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .record import Agreement, Run, Summary

__all__ = ["COLOURS", "Display", "display", "figures_table", "verdict"]

COLOURS = {"weft": "cyan", "torch": "yellow", "dense": "magenta"}
_BARS = "▁▂▃▄▅▆▇█"
_LATELY = 20  # steps that the figures of the moment are a mean of


class Asked(Protocol):
    """What the display is told of the settings."""

    @property
    def ranks(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def batch(self) -> int: ...


class Display(Protocol):
    """What shows the training."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def begin(self, runs: Sequence[Run]) -> None:
        """The ranks are being started; weft's run is the first."""

    def arrived(self, run: Run) -> None:
        """Steps were added to one of the runs."""

    def end(self) -> None:
        """The training is over, as far as it came."""

    def say(self, text: str) -> None:
        """What is going on besides."""


def display(console: Console, settings: Asked) -> Display:
    """The display that suits the console."""
    return Panels(console, settings) if console.is_terminal else Lines(console, settings)


class Moment:
    """A run's figures at the moment, as text, over the last steps that every rank reported."""

    def __init__(self, run: Run, settings: Asked) -> None:
        lately = run.steps[-_LATELY:]
        seconds = _mean(step.seconds for step in lately)
        synchronisation = _mean(step.synchronisation for step in lately)
        self.done = run.done
        self.loss = f"{_mean(step.loss for step in lately):.4f}"
        self.tokens = f"{(run.items or run.ranks * settings.batch) / seconds:,.0f} {run.unit}/s"
        self.step = f"{seconds * 1e3:.1f} ms"
        self.synchronisation = f"{synchronisation * 1e3:.1f} ms"
        self.share = f"{synchronisation / seconds:.0%}"
        self.elapsed = lately[-1].clock
        self.left = (run.wanted - run.done) * seconds
        self.reduction = lately[-1].reductions[0] if lately[-1].reductions else None


class Lines:
    """Plain lines, for a file or a pipe."""

    def __init__(self, console: Console, settings: Asked) -> None:
        self._console, self._settings = console, settings
        self._every = max(1, settings.steps // 10)
        self._shown: dict[str, int] = {}
        self._runs: Sequence[Run] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def begin(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        names = ", ".join(run.name for run in runs)
        same = len({run.ranks for run in runs}) == 1
        how = ", in turns" if same else ", one after the other"
        ranks = f"{runs[0].ranks} rank{'s' if runs[0].ranks > 1 else ''}"
        self.say(
            f"training {runs[0].wanted} steps on {ranks}{how if len(runs) > 1 else ''}: {names}"
        )

    def arrived(self, run: Run) -> None:
        if run.done // self._every > self._shown.get(run.way, 0) // self._every:
            self._line(run)

    def end(self) -> None:
        for run in self._runs:
            if run.done > self._shown.get(run.way, 0):
                self._line(run)

    def _line(self, run: Run) -> None:
        now = Moment(run, self._settings)
        self._shown[run.way] = now.done
        text = (
            f"{run.name:<15} step {now.done:>5}  loss {now.loss}  {now.tokens:>18}  "
            f"step {now.step:>8}  synchronisation {now.synchronisation:>8}"
        )
        if now.reduction is not None:
            one = now.reduction
            text += f"  rows {one.rows:,} of union {one.union:,}  {one.algorithm}"
        self.say(text)

    def say(self, text: str) -> None:
        # as it is: no markup, no wrapping to a width that a file does not have
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Panels:
    """A panel with a line for each way, and the figures of the moment below."""

    def __init__(self, console: Console, settings: Asked) -> None:
        self._settings = settings
        self._runs: Sequence[Run] = ()
        self._doing = "processes are starting"
        self._ended = False
        self._began = time.monotonic()
        self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def begin(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def arrived(self, run: Run) -> None:
        self._doing = ""  # the panel is drawn from the runs, some times a second

    def end(self) -> None:
        self._ended = True

    def say(self, text: str) -> None:
        self._doing = text

    def _panel(self) -> Panel:
        settings = self._settings
        ways = Table.grid(padding=(0, 2), expand=True)
        ways.add_column(no_wrap=True)
        ways.add_column(ratio=1)
        for _ in range(4):
            ways.add_column(justify="right", no_wrap=True)
        ways.add_row(
            *(Text(name, "dim") for name in ("", "", "step", "loss", "a step", "synchronisation"))
        )
        for run in self._runs:
            ways.add_row(*self._line(run))
        parts: list[ConsoleRenderable] = [ways]
        if self._runs and self._runs[0].done:
            parts += [Text(), self._moment(self._runs[0])]
        if self._doing:
            parts += [Text(), Text(self._doing, "dim")]
        elapsed = _duration(time.monotonic() - self._began)
        return Panel(
            Group(*parts),
            title=Text.assemble((" weft demo ", "bold"), (f"{settings.ranks} ranks ", "dim")),
            subtitle=Text(f" {elapsed} · Ctrl-C ends and keeps what was made ", "dim"),
            title_align="left",
            subtitle_align="right",
            border_style="dim",
            padding=(1, 2),
        )

    def _line(self, run: Run) -> list[ConsoleRenderable]:
        colour = COLOURS[run.way]
        mark = "▸" if not self._ended else "■" if run.note else "✓"
        name = Text(f"{mark} {run.name}", f"bold {colour}")
        bar = ProgressBar(
            total=run.wanted, completed=run.done, complete_style=colour, finished_style=colour
        )
        if not run.done:
            return [name, bar, *[Text()] * 4]
        now = Moment(run, self._settings)
        return [
            name,
            bar,
            Text(f"{now.done}/{run.wanted}"),
            Text(now.loss),
            Text(now.step),
            Text(f"{now.synchronisation} {now.share:>4}"),
        ]

    def _moment(self, weft: Run) -> ConsoleRenderable:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True)
        now = Moment(weft, self._settings)
        loss = Text(_sparkline(_some(weft.values("loss"), 480), 48), COLOURS["weft"])
        grid.add_row("weft's loss", loss)
        grid.add_row("speed", now.tokens)
        if now.reduction is not None:
            one = now.reduction
            sent = f"{one.sent / 2**20:.2f} MiB sent"
            grid.add_row("rows", f"{one.rows:,} of a rank, {one.union:,} in the union, {sent}")
            grid.add_row("algorithm", one.algorithm)
        left = sum(Moment(run, self._settings).left for run in self._runs if run.done)
        if not self._ended:
            grid.add_row("to go", _duration(left))
        return grid


def _duration(seconds: float) -> str:
    """Minutes and seconds.

    Example:
        >>> _duration(83.4)
        '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _some(values: list[float], number: int) -> list[float]:
    """About so many of the values, evenly spread: a long run is drawn as often as a short one."""
    return values[:: max(1, len(values) // number)]


def _sparkline(values: list[float], width: int) -> str:
    """The values as bars, each the mean of an equal stretch.

    Example:
        >>> _sparkline([0.0, 1.0, 2.0, 3.0], 4)
        '▁▃▆█'
    """
    width = min(width, len(values))
    cuts = [len(values) * at // width for at in range(width + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if not high > low:
        return _BARS[0] * width
    top = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / (high - low) * top)] for mean in means)


def verdict(agreements: Iterable[Agreement]) -> list[Text]:
    """The losses' check, a line for each other way."""
    return [
        Text.assemble(("✓ ", "green") if one.agrees else ("✗ ", "bold red"), str(one))
        for one in agreements
    ]


def figures_table(summaries: Iterable[Summary]) -> Table:
    """The table of all ways, for the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in COLUMNS[:-1]:  # the last would not fit into 80 columns
        table.add_column(name, justify="right")
    for one in summaries:
        table.add_row(one.name, *cells(one)[:-1])
    return table


COLUMNS = ("steps", "step", "synchronisation", "sent a step", "peak memory", "tokens/s")


def cells(one: Summary) -> list[str]:
    """A summary's figures as they are printed under `COLUMNS`, here and in the report."""
    sent = "no figure"
    if one.sent is not None:
        sent = f"{one.sent / 2**20:.2f} MiB" + (" computed" if one.computed else "")
    peak = "no figure"
    if one.peak is not None and one.growth is not None:
        peak = f"{one.peak / 2**20:,.0f} MiB (+{one.growth / 2**20:,.0f})"
    return [
        str(one.steps),
        f"{one.step * 1e3:.1f} ms",
        f"{one.synchronisation * 1e3:.1f} ms ({one.synchronisation / one.step:.0%})",
        sent,
        peak,
        f"{one.tokens:,.0f}",
    ]
