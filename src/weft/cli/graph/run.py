"""`weft demo --graph` from the graph to the report: the process that the person started."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from weft.bootstrap import local

from ..demo.attempt import Attempt, refusing
from ..demo.live import Display, display, figures_table, verdict
from ..demo.record import Run, Step, Summary, agreement, speedups
from ..demo.run import say, terminal
from ..demo.settings import Refused
from .cut import cut
from .settings import GraphSettings
from .sources import Graph, features, read
from .train import Ended, Job, Sent, train

__all__ = ["Cut", "Trained", "run"]

_HELD_OUT = 0.3  # of the nodes


@dataclass(frozen=True, slots=True)
class Cut:
    """A graph in parts.

    Attributes:
        graph: as it was read.
        part: the part of each node; int64 `[n]`.
        order: the nodes as they are numbered in the training, part by part; int64 `[n]`.
        bounds: where the parts begin in that, and where the last one ends.
    """

    graph: Graph
    part: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph, parts: int) -> Cut:
        part = cut(*graph.neighbours(), parts)
        bounds = np.concatenate([[0], np.bincount(part, minlength=parts).cumsum()])
        return cls(graph, part, np.argsort(part, kind="stable"), tuple(bounds.tolist()))

    def crossing(self) -> npt.NDArray[np.bool_]:
        """Of each edge whether its ends are in different parts."""
        ends = self.part[self.graph.edges]
        crossing: npt.NDArray[np.bool_] = ends[:, 0] != ends[:, 1]
        return crossing


@dataclass(slots=True)
class Trained:
    """A run, and what its ranks told besides.

    Attributes:
        run: the steps.
        sent: bytes of a step, by sender and receiver.
        ended: what each rank said at the end; empty if it did not come to that.
    """

    run: Run
    sent: dict[int, dict[int, int]] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)

    def hear(self, rank: int, message: list[Step] | Sent | Ended) -> None:
        """Take what a rank has sent."""
        if isinstance(message, Sent):
            self.sent[rank] = message.to
        elif isinstance(message, Ended):
            self.ended.append(message)
            self.run.outcomes.append(message.memory)
        else:
            self.run.add(rank, message)

    @property
    def accuracy(self) -> float | None:
        """Share of the held-out nodes whose class was found, if all ranks have said."""
        total = sum(one.held_out for one in self.ended)
        if len(self.ended) < self.run.ranks or not total:
            return None
        return sum(one.right for one in self.ended) / total

    def summary(self) -> Summary:
        """The line in the table."""
        sent = sum(sum(to.values()) for to in self.sent.values()) / self.run.ranks
        return Summary.of(self.run, [sent] if len(self.sent) == self.run.ranks else [], 0)


def run(settings: GraphSettings, command: Sequence[str]) -> int:
    """Do all of it; returns the exit status, 0, 1 (the losses differ) or 130 (Ctrl-C).

    Raises:
        Refused: it cannot be done; what was trained before that is written nevertheless.
        KeyboardInterrupt: Ctrl-C, before there was anything to keep.
    """
    console = terminal()
    graph = read(settings.graph)
    count = len(graph.names)
    say(
        console,
        f"{graph.source}: {count:,} nodes, {len(graph.edges):,} edges, "
        f"{len(graph.classes)} classes",
    )
    if count < 2 * settings.ranks:
        raise Refused(f"--ranks is {settings.ranks}, and the graph has only {count} nodes")
    found = Cut.of(graph, settings.ranks)
    say(console, f"cut into {settings.ranks}: {found.crossing().mean():.1%} of the edges cross")
    runs = [Trained(_run("weft", "weft", settings.ranks, settings.steps, count))]
    if settings.alone:
        runs.append(Trained(_run("torch", "one process", 1, settings.steps, count)))
    attempt = Attempt()
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as name:
        job = _lay_out(found, settings, Path(name))
        with attempt.going(), display(console, settings) as shown:
            _train(runs, job, shown)
    attempt.made([one.run for one in runs])
    runs = [one for one in runs if one.run.done]
    return attempt.status(_write(console, settings, found, runs, command))


def _run(way: str, title: str, ranks: int, steps: int, nodes: int) -> Run:
    return Run(way, steps, ranks, title=title, items=nodes, unit="nodes")


def _lay_out(found: Cut, settings: GraphSettings, folder: Path) -> Job:
    """Put what the ranks read into files, in the order of the parts, and say what they are to do.

    Which nodes are held out is drawn before they are ordered: it does not depend on the cut.
    """
    graph, order = found.graph, found.order
    draws = np.random.default_rng(settings.seed).random(len(order))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    ordered = Graph(graph.source, [], graph.labels, graph.classes, number[graph.edges])
    ordered.names.extend(graph.names[node] for node in order)
    starts, neighbours = ordered.neighbours()
    job = Job(
        bounds=found.bounds,
        classes=len(graph.classes),
        steps=settings.steps,
        dim=settings.dim,
        seed=settings.seed,
        folder=folder,
    )
    arrays: dict[str, npt.NDArray[Any]] = {
        "features": features(ordered),
        "labels": graph.labels[order],
        "trained": draws[order] >= _HELD_OUT,
        "starts": starts,
        "neighbours": neighbours,
    }
    try:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
    except OSError as error:
        raise Refused(f"cannot write into {folder}: {error.strerror}; set TMPDIR") from None
    return job


def _train(runs: Sequence[Trained], job: Job, shown: Display) -> None:
    """Train on all ranks, then on one, which has the whole graph."""
    local.preload(local.COMPILER)  # as the optimizer of each rank would
    shown.begin([one.run for one in runs])
    try:
        for one in runs:
            whole = (0, job.bounds[-1])
            bounds = job.bounds if one.run.ranks > 1 else whole

            def hear(rank: int, message: list[Step] | Sent | Ended, one: Trained = one) -> None:
                one.hear(rank, message)
                if one.run.done:
                    shown.arrived(one.run)

            task = Job(bounds, job.classes, job.steps, job.dim, job.seed, job.folder)
            with refusing("--ranks or --dim"):
                local.launch(one.run.ranks, train, (task,), on_message=hear)
    finally:
        shown.end()


def _write(
    console: Console,
    settings: GraphSettings,
    found: Cut,
    runs: Sequence[Trained],
    command: Sequence[str],
) -> bool:
    """Print and write all that was found; returns whether the losses agree."""
    from ..demo.report import write_page
    from .report import pairs_table, values  # here: matplotlib takes a second

    agreements = [
        one for other in runs[1:] if (one := agreement(runs[0].run, other.run)) is not None
    ]
    summaries = [one.summary() for one in runs]
    console.print()
    console.print(figures_table(summaries))
    console.print()
    for line in verdict(agreements):
        console.print(line)
    if len(summaries) > 1:
        say(console, f"a step with weft is {' and '.join(speedups(summaries))}")
    for trained in runs:
        name, accuracy = trained.run.name, trained.accuracy
        if accuracy is not None:
            say(console, f"{name}: class found for {accuracy:.1%} of held-out nodes")
        if trained.run.note:
            say(console, f"{name}: {trained.run.note}")
    if settings.ranks > 1 and runs[0].sent:
        console.print()
        console.print(pairs_table(runs[0]))
        console.print(Text("KiB that a rank (row) sends to another (column) in a step", "dim"))
    report = settings.out / "report.html"
    try:
        write_page(report, values(settings, found, runs, agreements, command))
    except OSError as error:
        raise Refused(f"cannot write into {settings.out}: {error.strerror}") from None
    say(console, f"report:  {report}")
    return all(one.agrees for one in agreements)
