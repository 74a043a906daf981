"""The command line of `weft demo`, and the demo from the text to the report.

The ranks are processes of their own and train all ways in turns. They send their steps here as
they go; the word table of the first rank lies in a file, so vectors can be written whatever
becomes of the ranks. Each way's memory is measured afterwards, alone.

Exit status 0: done, and all ways agree. 1: the ways do not agree. 2: what was asked cannot be done.
130: Ctrl-C. Any other error is a defect of weft and shows its traceback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

import weft
from weft.testing import launch

from .figures import COLUMNS, WAYS, Run, Step, agreement, speedups
from .live import Display
from .text import WINDOW, Corpus, Refused, choose_words, nearest, noise, read, subsample
from .text import vector_lines as lines_of
from .train import NEGATIVES, Job, measure_memory, train

_LIMIT = 210.0  # seconds of training if --steps is left to us, so that all is done in five minutes
_STEPS = 600
_WIDTH = 120  # columns of what is printed where there is no terminal


def demo(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="More files or folders, as with --text.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or folder to train on, may be repeated; if there is none, the source of the "
            "Python standard library."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start on this machine.")] = 4,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Steps to train, each way; if not given, {_STEPS}, or what the machine does in "
            f"{_LIMIT / 60:.1f} minutes.",
        ),
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Floats of a word's vector.")] = 64,
    batch: Annotated[
        int,
        typer.Option(
            min=1,
            help=f"Pairs of word and context a rank takes in a step; each looks up "
            f"{NEGATIVES + 2} rows.",
        ),
    ] = 2048,
    min_count: Annotated[int, typer.Option(min=1, help="Leave rarer words out.")] = 2,
    compare: Annotated[
        Literal["all", "torch", "dense", "none"],
        typer.Option(help="What to train beside weft; torch is PyTorch's sparse sum."),
    ] = "all",
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights and of the batches.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for report.html and vectors.txt.")] = Path(
        "weft-demo"
    ),
) -> None:
    """Train word vectors on real text, on several processes, and show what weft does there.

    Sparse gradients are summed by weft, by PyTorch's sparse all-reduce and by a dense one, all on
    the same batches from the same start. Ctrl-C ends it and keeps what was made.
    """
    limit = _LIMIT if steps is None else None
    ways = {"all": tuple(WAYS), "none": ("weft",)}.get(compare, ("weft", compare))
    job = Job(ways, steps or _STEPS, batch, dim, seed, limit)
    try:
        _check_report_extra()
        _make_folder(out)
        status = _run(job, ranks, (*(text or ()), *(paths or ())), min_count, out)
    except Refused as refusal:
        typer.echo(f"weft demo: {refusal}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("weft demo: interrupted before anything was made", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(status)


def _run(job: Job, ranks: int, text: Sequence[Path], min_count: int, out: Path) -> int:
    """All of it, after the options; returns the exit status.

    Raises:
        Refused: it cannot be done; what was trained before that is written nevertheless.
        KeyboardInterrupt: Ctrl-C, before there was anything to keep.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"reading {', '.join(map(str, text)) or 'the standard library'}")
    corpus = read(text, min_count=min_count, ranks=ranks)
    say(_about(corpus, min_count))
    early: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as name:
        job = replace(job, vocabulary=len(corpus.words), folder=Path(name))
        _check_memory(job, ranks)
        trained = subsample(corpus, seed=job.seed, at_least=ranks * (2 * WINDOW + 2))
        np.save(job.folder / "tokens.npy", trained)
        np.save(job.folder / "noise.npy", noise(corpus.counts))
        runs = [Run(way, job.steps, ranks, ranks * job.batch) for way in job.ways]
        try:
            _train(console, runs, job)
        except (KeyboardInterrupt, Refused) as error:
            early = error
        runs = [run for run in runs if run.done]
        if early is not None and not runs:
            raise early
        for run in runs:
            run.interrupted = early is not None
        table = np.fromfile(job.folder / "table", np.float32).reshape(-1, job.dim)

    from .report import table_note, write_report  # here: matplotlib takes a second

    checks = [agreement(runs[0], other) for other in runs[1:]]
    sent = [run.sent(runs[0], job.vocabulary, job.dim) for run in runs]
    console.print("", _table(runs, sent, console.width), f"[dim]{table_note()}[/]", "", sep="\n")
    for agrees, words in checks:
        console.print(f"[green]✓[/] {words}" if agrees else f"[bold red]✗[/] {words}")
    if len(runs) > 1:
        say(f"a step with weft is {speedups(runs)}")
    for run in runs:
        if run.note:
            say(f"{run.name}: {run.note}")
    near = nearest(corpus, table, choose_words(corpus, 8))
    try:
        _write(out / "vectors.txt", lines_of(corpus.words, table))
        page = write_report(corpus, min_count, len(trained), job, runs, sent, checks, near)
        _write(out / "report.html", [page])
    except OSError as error:
        raise Refused(f"cannot write into {out}: {error.strerror}") from None
    say(f"vectors: {out / 'vectors.txt'}\nreport:  {out / 'report.html'}")
    if isinstance(early, Refused):
        raise early
    return 130 if early else 0 if all(agrees for agrees, _ in checks) else 1


def _train(console: Console, runs: Sequence[Run], job: Job) -> None:
    """Train, then measure each way's memory in processes that do nothing else."""
    by_way = {run.way: run for run in runs}
    with Display(console, runs) as shown:

        def hear(rank: int, message: tuple[str, list[Step]]) -> None:
            way, steps = message
            before = by_way[way].done
            by_way[way].add(rank, steps)
            if by_way[way].done > before:
                shown.arrived(by_way[way])

        try:
            with _refusing():
                launch(runs[0].ranks, train, (job,), on_message=hear)
        finally:
            shown.end()
        for run in runs:
            shown.say(f"measuring the memory of {run.name}, in processes of its own")
            with _refusing():
                run.memory = launch(run.ranks, measure_memory, (job, run.way))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What can go wrong with processes, memory and ports on a machine, as one line."""
    try:
        yield
    except (weft.WireError, OSError, MemoryError, RuntimeError) as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        if type(error) is RuntimeError and "allocate memory" not in line:
            raise
        remedy = "if memory ran out, make --ranks, --dim or --batch smaller"
        raise Refused(f"{line}; {remedy}") from error


def _check_report_extra() -> None:
    """Refuse if what draws the report is not installed: better now than after the training."""
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(
            f"the report needs {' and '.join(missing)}, not installed here: "
            "pip install 'weft[report]'"
        )


def _make_folder(out: Path) -> None:
    """Make the output folder and see that files can be made in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise Refused(f"cannot write into {out}: {why}; choose another folder with --out") from None


def _check_memory(job: Job, ranks: int) -> None:
    """Refuse what would be ended by the kernel half-way through; estimated from below.

    For each way a rank holds two tables and the optimiser's two; the dense way adds a gradient for
    each table and as much again while it updates; a step holds the rows it looked up some eight
    times over (looked up, scores, gradients, duplicates summed, what comes back). Interpreter and
    libraries count once for each rank as what is not shared, about 150 MiB.
    """
    tables = 4 * len(job.ways) + (4 if "dense" in job.ways else 0)
    rows = 8 * job.batch * (NEGATIVES + 2) + tables * job.vocabulary
    needed = ranks * ((150 << 20) + rows * job.dim * 4)
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or one without a limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, max(limit - int((group / "memory.current").read_text()), 0))
    if needed > free:
        raise Refused(
            f"too little memory: {ranks} ranks with {job.vocabulary:,} words of {job.dim:,} "
            f"floats need about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free; "
            "make --ranks, --dim or --batch smaller"
        )


def _about(corpus: Corpus, min_count: int) -> str:
    text = (
        f"{corpus.files:,} files, {len(corpus.tokens):,} tokens, {len(corpus.words):,} words; "
        f"{corpus.rare_words:,} words rarer than {min_count} "
        f"({corpus.rare_tokens:,} tokens) left out"
    )
    return text + (f"; {corpus.skipped} files skipped, not text" if corpus.skipped else "")


def _table(runs: Sequence[Run], sent: Sequence[Sequence[float]], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    shown = len(COLUMNS) if width >= 100 else -1  # the last would not fit into 80 columns
    table.add_column("")
    for name in COLUMNS[:shown]:
        table.add_column(name, justify="right")
    for run, of_run in zip(runs, sent, strict=True):
        table.add_row(run.name, *run.cells(of_run)[:shown])
    return table


def _write(path: Path, lines: Iterable[str]) -> None:
    """Write a file that appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
