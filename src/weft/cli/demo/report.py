"""The report: one HTML file that needs no other, light or dark as the reader's screen is."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import jinja2

from . import plots
from .corpus import Corpus
from .live import COLUMNS, cells
from .record import TOLERANCE, Agreement, Run, Summary, speedups, step_bytes
from .settings import NEGATIVES, WINDOW, Settings
from .vectors import Neighbours

__all__ = ["Result", "machine", "table_note", "write_page", "write_report"]


@dataclass(frozen=True, slots=True)
class Result:
    """All there is to report; every run has at least one step, and the first is weft's."""

    settings: Settings
    corpus: Corpus
    trained_tokens: int
    runs: Sequence[Run]
    neighbours: Sequence[Neighbours]
    agreements: Sequence[Agreement]
    command: Sequence[str]
    vectors: Path

    def sent(self, run: Run) -> list[float]:
        """Bytes of each of a run's steps; see `step_bytes`."""
        return step_bytes(
            run, self.runs[0], vocabulary=len(self.corpus.words), dim=self.settings.dim
        )

    def summaries(self) -> list[Summary]:
        """One for each run, in order."""
        return [Summary.of(run, self.sent(run), self.settings.batch) for run in self.runs]


def write_report(path: Path, result: Result) -> None:
    """Write the report; the file appears whole or not at all."""
    write_page(path, _values(result))


def write_page(path: Path, values: Mapping[str, object]) -> None:
    """Fill the page with values; the file appears whole or not at all."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    source = files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(source).render(values)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(page, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _values(result: Result) -> dict[str, object]:
    runs, summaries = result.runs, result.summaries()
    named = [(run.way, one) for run, one in zip(runs, summaries, strict=True)]
    sent = {run.way: result.sent(run) for run in runs}
    weft = summaries[0]
    drawn = [
        plots.loss_against_time(runs),
        plots.step_parts(named),
        plots.overlap(named),
        plots.bytes_per_step(runs, sent),
        plots.rows_per_step(runs[0]),
    ]
    return {
        "headline": _headline(summaries),
        "lead": _lead(result),
        "interrupted": any(run.interrupted and run.note for run in runs),
        "facts": _facts(runs[0], weft),
        "checks": result.agreements,
        "tolerance_note": (
            f"Equal means: within {TOLERANCE:.0e} at every step. The ways add the same numbers in "
            "another order, so their sums differ in the last bit of a 32-bit float, and each "
            "step starts from what the one before left. A way that lost or doubled a "
            "rank's rows would differ by more than 1e-2 at once, in the length of the gradient."
        ),
        "columns": COLUMNS,
        "rows": [
            {"way": run.way, "name": one.name, "note": one.note, "cells": cells(one)}
            for run, one in zip(runs, summaries, strict=True)
        ],
        "table_note": table_note(),
        "plots": drawn,
        "words_note": (
            "The nearest words by cosine, among those that occur 50 times or more. All "
            f"{len(result.corpus.words):,} vectors are in {result.vectors.name}, in the word2vec "
            "text format."
        ),
        "neighbours": result.neighbours,
        "details": _details(result),
    }


def table_note() -> str:
    """What the figures of the table are."""
    return (
        "Times are medians over the steps, of the mean over the ranks; the ways took turns of ten "
        "steps. Synchronisation is what the "
        "training spends on starting and on waiting for sums, slower ranks included. Sent: bytes a "
        "rank sends in a step, counted for weft, computed from the known algorithm for PyTorch "
        "(ring all-gather of int64 indices and values; ring all-reduce of both tables). Peak "
        "memory: highest resident memory (RSS) of a process that trained this way only, for a few "
        "steps; in parentheses what is beyond a process that has only started."
    )


def _headline(summaries: Sequence[Summary]) -> str:
    one, others = summaries[0], speedups(summaries)
    if others:
        return f"A step with weft takes {one.step * 1e3:.0f} ms: {' and '.join(others)}"
    return f"weft trained {one.tokens:,.0f} words a second, {one.steps} steps"


def _lead(result: Result) -> str:
    settings, corpus = result.settings, result.corpus
    ways = "each way" if len(result.runs) > 1 else "weft"
    return (
        f"Skip-gram with negative sampling on {corpus.source}: {corpus.tokens.size:,} tokens, "
        f"{len(corpus.words):,} words of {settings.dim} floats in two tables, "
        f"{settings.ranks} ranks with {settings.batch:,} pairs a step. "
        f"Sparse gradients are summed over the ranks by {ways} on the same batches from the same "
        "start."
    )


def _facts(run: Run, weft: Summary) -> list[tuple[str, str]]:
    figures = run.reductions()
    facts = [
        (f"{weft.tokens:,.0f}", "words a second, all ranks"),
        (f"{weft.synchronisation / weft.step:.0%}", "of a step is synchronisation"),
    ]
    if figures:
        bound = statistics.median(one.bound for one in figures)
        rows = statistics.median(one.rows for one in figures)
        union = statistics.median(one.union for one in figures)
        facts.append((f"{rows:,.0f} → {union:,.0f}", "rows of one rank → of the sum"))
        if bound and weft.sent:
            facts.append((f"{weft.sent / bound:.2f}x", "of the least bytes possible"))
    return facts


def _details(result: Result) -> list[tuple[str, str]]:
    settings, corpus = result.settings, result.corpus
    chosen = ", ".join(
        f"{name} ({count})" for name, count in result.runs[0].algorithms.most_common()
    )
    skipped = f", {corpus.skipped} files skipped as not text" if corpus.skipped else ""
    return [
        ("Command", shlex.join(result.command)),
        ("Text", f"{corpus.source}: {corpus.files:,} files{skipped}"),
        (
            "Vocabulary",
            f"{len(corpus.words):,} words that occur {settings.min_count} times or more; "
            f"{corpus.rare_words:,} rarer ones, {corpus.rare_tokens:,} tokens, left out",
        ),
        (
            "Training",
            f"{result.trained_tokens:,} tokens after thinning out frequent words, window {WINDOW}, "
            f"{NEGATIVES} random words a pair, Adagrad, seed {settings.seed}",
        ),
        ("Algorithms", f"{chosen or 'no figure'}, by number of sums"),
        *machine(settings.ranks),
    ]


def machine(ranks: int) -> list[tuple[str, str]]:
    """Versions, the machine, and threads of each rank, for the page."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))
    return [
        ("Versions", ", ".join(_versions())),
        ("Machine", _machine()),
        ("Threads", f"{threads} for each rank"),
    ]


def _versions() -> list[str]:
    found = [f"Python {platform.python_version()}"]
    for name in ("weft", "torch", "numpy", "numba"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return found


def _machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {_cores()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1
