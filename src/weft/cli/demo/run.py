"""The demo from the text to the report: the process that the person started.

The ranks are processes of their own (`weft.bootstrap.local`) and train all ways in turns. They send
their steps here as they go; the word table of the first rank lies in a file, so vectors can be
written whatever becomes of the ranks. Each way's memory is measured afterwards, alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from weft.bootstrap import local

from .attempt import Attempt, refusing
from .corpus import Corpus, negative_table, read, subsample
from .live import Display, display, figures_table, verdict
from .record import Run, Step, agreement, speedups
from .settings import WINDOW, Refused, Settings, check_memory
from .train import Job, measure_memory, train
from .vectors import choose_words, nearest, write_vectors

__all__ = ["run", "say", "terminal"]

_WIDTH = 120  # columns of what is printed where there is no terminal


def run(settings: Settings, command: Sequence[str]) -> int:
    """Do all of it; returns the exit status, 0, 1 (the ways do not agree) or 130 (Ctrl-C).

    Raises:
        Refused: it cannot be done; what was trained before that is written nevertheless.
        KeyboardInterrupt: Ctrl-C, before there was anything to keep.
    """
    console = terminal()
    say(console, f"reading {', '.join(map(str, settings.text)) or 'the standard library'}")
    corpus = read(settings.text, min_count=settings.min_count, ranks=settings.ranks)
    say(console, _about(corpus, settings))
    check_memory(settings, len(corpus.words))
    runs = [Run(way, settings.steps, settings.ranks) for way in settings.ways]
    attempt = Attempt()
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as name:
        job = _lay_out(corpus, settings, Path(name))
        trained = len(np.load(job.tokens, mmap_mode="r"))
        with attempt.going(), display(console, settings) as shown:
            _train(runs, job, shown)
        attempt.made(runs)
        runs = [one for one in runs if one.done]
        shape = (len(corpus.words), settings.dim)
        table = np.fromfile(job.vectors, np.float32).reshape(shape)
    return attempt.status(_write(console, settings, corpus, trained, runs, table, command))


def _lay_out(corpus: Corpus, settings: Settings, folder: Path) -> Job:
    """Put what the ranks read into files, and say what they are to do."""
    tokens = subsample(corpus, seed=settings.seed, at_least=settings.ranks * (2 * WINDOW + 2))
    job = Job(
        ways=settings.ways,
        steps=settings.steps,
        batch=settings.batch,
        dim=settings.dim,
        seed=settings.seed,
        limit=settings.limit,
        vocabulary=len(corpus.words),
        tokens=folder / "tokens.npy",
        negatives=folder / "negatives.npy",
        vectors=folder / "table",
    )
    try:
        np.save(job.tokens, tokens)
        np.save(job.negatives, negative_table(corpus.counts))
    except OSError as error:
        raise Refused(f"cannot write into {folder}: {error.strerror}; set TMPDIR") from None
    return job


def _train(runs: list[Run], job: Job, shown: Display) -> None:
    """Train, then measure each way's memory in processes that do nothing else."""
    by_way = {run.way: run for run in runs}
    ranks = runs[0].ranks

    def hear(rank: int, message: tuple[str, list[Step]]) -> None:
        way, steps = message
        by_way[way].add(rank, steps)
        shown.arrived(by_way[way])

    local.preload(local.COMPILER)  # as the optimizer of each rank would
    shown.begin(runs)
    try:
        with refusing():
            local.launch(ranks, train, (job,), on_message=hear)
    finally:
        shown.end()
    for run in runs:
        shown.say(f"measuring the memory of {run.name}, in processes of its own")
        with refusing():
            run.outcomes = local.launch(ranks, measure_memory, (job, run.way))


def _write(
    console: Console,
    settings: Settings,
    corpus: Corpus,
    trained: int,
    runs: list[Run],
    table: npt.NDArray[np.float32],
    command: Sequence[str],
) -> bool:
    """Print and write all that was found; returns whether the ways agree."""
    from .report import Result, table_note, write_report  # here: matplotlib takes a second

    asked = choose_words(corpus.words, corpus.counts, 8)
    agreements = [
        one for one in (agreement(runs[0], other) for other in runs[1:]) if one is not None
    ]
    vectors, report = settings.out / "vectors.txt", settings.out / "report.html"
    result = Result(
        settings=settings,
        corpus=corpus,
        trained_tokens=trained,
        runs=runs,
        neighbours=nearest(corpus.words, corpus.counts, table, asked),
        agreements=agreements,
        command=command,
        vectors=vectors,
    )
    summaries = result.summaries()
    console.print()
    console.print(figures_table(summaries))
    console.print(Text(table_note(), "dim"), width=min(console.width, 100))
    console.print()
    for line in verdict(agreements):
        console.print(line)
    if len(summaries) > 1:
        say(console, f"a step with weft is {' and '.join(speedups(summaries))}")
    for one in summaries:
        if one.note:
            say(console, f"{one.name}: {one.note}")
    try:
        write_vectors(vectors, corpus.words, table)
        write_report(report, result)
    except OSError as error:
        raise Refused(f"cannot write into {settings.out}: {error.strerror}") from None
    say(console, f"vectors: {vectors}\nreport:  {report}")
    return all(one.agrees for one in agreements)


def _about(corpus: Corpus, settings: Settings) -> str:
    text = (
        f"{corpus.files:,} files, {len(corpus.tokens):,} tokens, {len(corpus.words):,} words; "
        f"{corpus.rare_words:,} words rarer than {settings.min_count} "
        f"({corpus.rare_tokens:,} tokens) left out"
    )
    return text + (f"; {corpus.skipped} files skipped, not text" if corpus.skipped else "")


def terminal() -> Console:
    """Where the demo prints, wide enough for its tables if that is a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, soft_wrap=True)
