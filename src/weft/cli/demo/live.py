"""The demo while it runs: the ways side by side on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from .figures import Numbers, Run
from .train import TURN

COLOURS = {"weft": "#0b7285", "torch": "#c2571a", "dense": "#7a4fb5"}
"""Of the ways, on the terminal and in pictures."""


class Display(Live):
    """Shows the training of some runs, each of so many steps."""

    def __init__(self, runs: dict[str, Run], steps: int) -> None:
        self.runs, self.steps = runs, steps
        super().__init__()  # which shows it

    def get_renderable(self) -> RenderableType:
        """A panel for each way, and below them what is left; nothing where is no terminal."""
        if not self.console.is_terminal:
            return ""
        grid = Table.grid(expand=True)
        grid.add_row(*(self.panel(run) for run in self.runs.values()))
        return Group(grid, f"{self.left()}; Ctrl-C ends it and keeps what was made")

    def panel(self, run: Run) -> Panel:
        """One way: how far it is, and what a step takes."""
        bar = ProgressBar(self.steps, len(run.figures), complete_style=COLOURS[run.way])
        told = run.told() if len(run.figures) else {"starting": ""}
        lines = [f"{title:10}{value:>11}" for title, value in told.items()]
        return Panel(Group(bar, *lines), title=run.name, border_style=COLOURS[run.way])

    def hear(self, rank: int, message: tuple[str, Numbers]) -> None:
        """Take the next steps of one of the runs."""
        way, figures = message
        run = self.runs[way]
        run.add(figures)
        if not self.console.is_terminal and len(run.figures) % (10 * TURN) == 0:
            print(f"{run.line()}; {self.left()}", flush=True)

    def left(self) -> str:
        """What is left, and how busy the machine is."""
        runs = self.runs.values()
        left = "starting"
        if all(len(run.figures) for run in runs):
            seconds = sum(run.typical("seconds") * (self.steps - len(run.figures)) for run in runs)
            left = f"about {seconds:.0f} s left"
        return f"{left}, load {os.getloadavg()[0]:.1f}"
