"""The demo while it runs: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..wording import mib, ms
from .figures import Run

_LATELY = 20  # steps that the loss of the moment is a mean of


class Display(Progress):
    """What shows the training of some runs, of which weft's is the first."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self._doing = "processes are starting"
        super().__init__(
            TextColumn("[bold]{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._bars = {
            run.way: self.add_task(run.name, total=run.wanted, figures="") for run in runs
        }
        names, turns = ", ".join(run.name for run in runs), ", in turns" if len(runs) > 1 else ""
        self._line(f"training {runs[0].wanted} steps, ranks {runs[0].ranks}{turns}: {names}")

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, and below them what goes on."""
        yield from super().get_renderables()
        yield f"[dim]{self._doing}; Ctrl-C ends and keeps what was made[/]"

    def arrived(self, run: Run) -> None:
        """Steps were added to one of the runs."""
        loss = f"loss {run.values('loss')[-_LATELY:].mean():.4f}"
        step, summed = ms(run.typical("seconds")), ms(run.typical("for sums"))
        words = f"{run.name:<15} step {run.done:>5}  {loss}  {run.speed:>10,.0f} pairs/s  "
        words += f"step {step:>8}  for sums {summed:>8}"
        if algorithm := run.algorithms[-1]:
            rows, union, sent = (run.values(name)[-1] for name in ("rows", "union", "sent_bytes"))
            of_rows = f"rows {rows:,.0f} of union {union:,.0f}  {algorithm}"
            words += f"  {of_rows}"
            self._doing = f"weft: {run.speed:,.0f} pairs/s, {of_rows}, {mib(sent)} sent"
        bar, every = self._bars[run.way], max(1, run.wanted // 10)
        if run.done // every > self.tasks[bar].completed // every:
            self._line(words)
        figures = f"{loss}  {step}, {run.share:.0%} for sums"
        self.update(bar, completed=run.done, figures=figures)
        if self.finished:
            self.say("timing the sums alone")

    def say(self, text: str) -> None:
        """What is going on besides."""
        self._doing = text
        self._line(text)

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            # as it is: no markup, no wrapping to a width that a file does not have
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
