"""What a person may ask of the demo, checked before anything starts, and how it refuses.

Plain values only: this file is imported when the command line starts, so it imports neither torch
nor NumPy.
"""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "NEGATIVES",
    "WAYS",
    "WINDOW",
    "Refused",
    "Settings",
    "available_memory",
    "check_memory",
    "check_report_extra",
    "make_folder",
    "needed_memory",
]

WAYS = {"weft": "weft", "torch": "PyTorch sparse", "dense": "PyTorch dense"}
"""The ways to sum the gradients, in the order of their turns, and how they are called in print."""

COMPARE = {
    "all": ("weft", "torch", "dense"),
    "torch": ("weft", "torch"),
    "dense": ("weft", "dense"),
    "none": ("weft",),
}

WINDOW = 5
"""Words to either side of a word that count as its context."""

NEGATIVES = 5
"""Random words that each true (word, context) pair is told apart from."""

LIMIT = 210.0
"""Seconds of training if --steps is left to us, so that everything is done in five minutes."""

STEPS = 600
"""Steps when the person does not say."""


class Refused(Exception):
    """What was asked cannot be done: one line for the person, exit status 2."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked options of one demo.

    Attributes:
        ranks: processes to start.
        steps: steps to train, each way.
        limit: seconds after which the training stops early; None: never.
        dim: floats in a row of an embedding table.
        batch: (word, context) pairs a rank takes in one step.
        ways: which ways to train, keys of `WAYS`.
        seed: of the first weights and of every batch.
        min_count: words rarer than this are left out of the vocabulary.
        text: files and folders to read; empty: the Python standard library.
        out: folder that the report and the vectors go to.
    """

    ranks: int
    steps: int
    limit: float | None
    dim: int
    batch: int
    ways: tuple[str, ...]
    seed: int
    min_count: int
    text: tuple[Path, ...]
    out: Path

    @classmethod
    def checked(
        cls,
        *,
        ranks: int,
        steps: int | None,
        dim: int,
        batch: int,
        compare: str,
        seed: int,
        min_count: int,
        text: tuple[Path, ...],
        out: Path,
    ) -> Settings:
        """The settings, or `Refused` that names the first option that cannot be served.

        Example:
            >>> from pathlib import Path
            >>> given = dict(steps=None, dim=64, batch=2048, compare="all", seed=0, min_count=2,
            ...              text=(), out=Path("weft-demo"))
            >>> Settings.checked(ranks=4, **given).ways
            ('weft', 'torch', 'dense')
            >>> Settings.checked(ranks=0, **given)
            Traceback (most recent call last):
            ...
            weft.cli.demo.settings.Refused: --ranks is 0, it must be at least 1
        """
        for name, value in (
            ("--ranks", ranks),
            ("--steps", STEPS if steps is None else steps),
            ("--dim", dim),
            ("--batch", batch),
            ("--min-count", min_count),
        ):
            if value < 1:
                raise Refused(f"{name} is {value}, it must be at least 1")
        if seed < 0:
            raise Refused(f"--seed is {seed}, it must not be negative")
        if compare not in COMPARE:
            raise Refused(f"--compare is {compare!r}, it takes one of: {', '.join(COMPARE)}")
        return cls(
            ranks=ranks,
            steps=STEPS if steps is None else steps,
            limit=LIMIT if steps is None else None,
            dim=dim,
            batch=batch,
            ways=COMPARE[compare],
            seed=seed,
            min_count=min_count,
            text=text,
            out=out,
        )


def check_report_extra() -> None:
    """Refuse if what draws the report is not installed: better now than after the training."""
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(
            f"the report needs {' and '.join(missing)}, not installed here: "
            "pip install 'weft[report]'"
        )


def make_folder(out: Path) -> None:
    """Make the output folder and see that files can be made in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise Refused(f"cannot write into {out}: {why}; choose another folder with --out") from None


def needed_memory(settings: Settings, vocabulary: int) -> int:
    """Bytes that all ranks together will need at their peak, estimated from below.

    For each way a rank holds two tables and the optimiser's two; the dense way adds a gradient for
    each table and as much again while it updates; a step holds the rows it looked up some eight
    times over (looked up, scores, gradients, duplicates summed, what comes back). Interpreter and
    libraries count once for each rank as what is not shared, about 150 MiB.
    """
    table = vocabulary * settings.dim * 4
    tables = 4 * len(settings.ways) + (4 if "dense" in settings.ways else 0)
    rows = settings.batch * (NEGATIVES + 2) * settings.dim * 4
    return settings.ranks * ((150 << 20) + tables * table + 8 * rows)


def available_memory() -> int | None:
    """Bytes this machine, or the container we are in, can still give; None if it does not say."""
    figures = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                figures.append(int(line.split()[1]) << 10)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            figures.append(max(int(limit) - used, 0))
    except (OSError, ValueError):
        pass  # not Linux, or no such cgroup: what was found so far is what is known
    return min(figures, default=None)


def check_memory(settings: Settings, vocabulary: int) -> None:
    """Refuse what would be ended by the kernel half-way through."""
    needed, free = needed_memory(settings, vocabulary), available_memory()
    if free is not None and needed > free:
        raise Refused(
            f"too little memory: {settings.ranks} ranks with {vocabulary:,} words of "
            f"{settings.dim:,} floats need about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} "
            "GiB are free; make --ranks, --dim or --batch smaller"
        )
