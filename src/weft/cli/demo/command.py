"""The command line of `weft demo`, and the demo from the text to the report.

The ranks are processes of their own and train all ways in turns. They send their steps here as
they go; the word table of the first rank lies in a file, so vectors can be written whatever
becomes of the ranks. Each way's memory is measured afterwards, alone.

Exit status 0: done, and all ways agree. 1: the ways do not agree. 2: what was asked cannot be done.
130: Ctrl-C. Any other error is a defect of weft and shows its traceback.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.console import Console
from typer import Option

import weft
from weft.testing import launch

from .. import options, show
from .figures import COLUMNS, WAYS, Floats, Run, agreement, faster, step_of, sums_of
from .live import Display
from .text import WINDOW, choose_words, nearest, noise, read, subsample, vector_lines
from .train import Job, measure_memory, train

_LIMIT = 210.0  # seconds of training if --steps is left to us, so that all is done in five minutes
_STEPS = 600
_STEPS_HELP = f"Steps of each way; default: {_STEPS}, or what fits into {_LIMIT / 60:.1f} minutes."
_OUT = Path("weft-demo")

Compared = Literal["all", "torch", "dense", "none"]


def demo(
    text: Annotated[
        list[Path] | None, Option(metavar="PATH", help="File or folder; may be repeated.")
    ] = None,
    ranks: Annotated[int, Option(min=1, metavar="N", help="Processes to start here.")] = 4,
    steps: Annotated[int | None, Option(min=1, metavar="N", help=_STEPS_HELP)] = None,
    dim: Annotated[int, Option(min=1, metavar="N", help="Floats of a word's vector.")] = 64,
    batch: Annotated[
        int, Option(min=1, metavar="N", help="Pairs of words for a rank and step.")
    ] = 2048,
    min_count: Annotated[
        int, Option(min=1, metavar="N", help="Leave out words that are rarer.")
    ] = 2,
    compare: Annotated[Compared, Option(help="What to train beside weft.")] = "all",
    seed: Annotated[int, Option(min=0, metavar="N", help="Of weights and batches.")] = 0,
    out: Annotated[Path, Option(file_okay=False, help="Folder for the report.")] = _OUT,
    save: Annotated[
        Path | None,
        Option(callback=options.writable, help="Write the word vectors there, as word2vec does."),
    ] = None,
) -> None:
    """Train word vectors on several processes, with weft and with PyTorch alone.

    The text is that of --text, or the source of the Python standard library.
    Weft, PyTorch's sparse all-reduce and a dense all-reduce sum the gradients,
    in turns, on the same batches. A report says what a step spends on that.
    Ctrl-C ends the demo and keeps what was made.
    """
    limit = _LIMIT if steps is None else None
    ways = {"all": tuple(WAYS), "none": ("weft",)}.get(compare, ("weft", compare))
    job = Job(ways, steps or _STEPS, batch, dim, seed, limit)
    with options.failing("demo", 2):
        if missing := options.missing_extra():  # better now than after the training
            raise weft.WeftError(f"the report cannot be drawn: {missing}")
        out.mkdir(parents=True, exist_ok=True)
        status = _run(job, ranks, text or [], min_count, out, save)
    raise typer.Exit(status)


def _run(
    job: Job, ranks: int, text: Sequence[Path], min_count: int, out: Path, save: Path | None
) -> int:
    """All of it, after the options; returns the exit status.

    Raises:
        weft.Error: it cannot be done; what was trained before that is written nevertheless.
        KeyboardInterrupt: Ctrl-C, before there was anything to keep.
    """
    console = show.console()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"reading {', '.join(map(str, text)) or 'the standard library'}")
    corpus = read(text, min_count=min_count, ranks=ranks)
    say(corpus.about)
    early: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as name:
        job = replace(job, vocabulary=len(corpus.words), folder=Path(name))
        trained = subsample(corpus, seed=job.seed, at_least=ranks * (2 * WINDOW + 2))
        np.save(job.folder / "tokens.npy", trained)
        np.save(job.folder / "noise.npy", noise(corpus.counts))
        runs = [Run(way, job.steps, ranks, ranks * job.batch) for way in job.ways]
        try:
            _train(console, runs, job)
        except (KeyboardInterrupt, weft.Error) as error:
            early = error
        runs = [run for run in runs if run.done]
        if early is not None and not runs:
            raise early
        table = np.fromfile(job.folder / "table", np.float32).reshape(-1, job.dim)
    for run in runs:
        run.interrupted = early is not None
        run.count_sent(runs[0], job.vocabulary, job.dim)

    from .report import write_report  # here: matplotlib takes a second

    checks = [agreement(runs[0], other) for other in runs[1:]]
    figures = show.table(["", *COLUMNS], [[run.name, *run.cells()] for run in runs])
    console.print("", figures, "", sep="\n")
    for agrees, words in checks:
        console.print(f"[green]✓[/] {words}" if agrees else f"[bold red]✗[/] {words}")
    if sums := faster(runs, sums_of):
        say(f"summing the gradients alone: weft is {sums}")
    if steps := faster(runs, step_of):
        say(f"a whole step, which also computes: weft is {steps}")
    for run in runs:
        if run.note:
            say(f"{run.name}: {run.note}")
    if save is not None:
        with save.open("w", encoding="utf-8") as file:
            file.writelines(vector_lines(corpus.words, table))
        say(f"vectors: {save}")
    report = out / "report.html"
    near = nearest(corpus, table, choose_words(corpus, 8))
    report.write_text(write_report(corpus, job, runs, checks, near), encoding="utf-8")
    say(f"report: {report}")
    if isinstance(early, weft.Error):
        raise early
    return 130 if early else 0 if all(agrees for agrees, _ in checks) else 1


def _train(console: Console, runs: Sequence[Run], job: Job) -> None:
    """Train, then measure each way's memory in processes that do nothing else.

    Raises:
        weft.WeftError: what can go wrong with processes, memory and ports on a machine.
    """
    by_way = {run.way: run for run in runs}

    def hear(rank: int, message: tuple[str, list[str], Floats]) -> None:
        way, algorithms, figures = message
        by_way[way].add(algorithms, figures)
        shown.arrived(by_way[way])

    try:
        with Display(console, runs) as shown:
            alone = launch(runs[0].ranks, train, (job,), on_message=hear)
            for run in runs:
                of_ranks = [of_rank[run.way] for of_rank in alone]
                run.alone = [max(seconds) for seconds in zip(*of_ranks, strict=True)]
            for run in runs:
                shown.say(f"measuring the memory of {run.name}, in processes of its own")
                run.memory = launch(run.ranks, measure_memory, (job, run.way))
    except (OSError, MemoryError, RuntimeError) as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        if type(error) is RuntimeError and "allocate memory" not in line:
            raise
        remedy = "if memory ran out, make --ranks, --dim or --batch smaller"
        raise weft.WeftError(f"{line}; {remedy}") from error
