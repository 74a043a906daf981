"""Count what `weft.init` opens at each rank, and what the first calls open besides.

    python benchmarks/start.py [--ranks 4,8,16,32] [--per-host 1]

The ranks are processes of this machine that take themselves for ranks of several hosts (WEFT_HOST),
so that they connect as distant ranks do: control links in `weft.init`, connections for messages
when a schedule first needs them. What a rank opens grows with the number of ranks. The last lines
continue the table to 1,024 and 10,240 ranks, by the growth between its two last rows.

For each number of ranks, of the rank with most:

* s: seconds of `weft.init`, with everybody at once on the cores of this machine;
* descriptors and threads: more than before;
* KiB: growth of the resident set;
* called: descriptors after an all-reduce of a small tensor, and after one of rows by `split`.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import weft
from weft.testing import processes

FURTHER = (1024, 10_240)
COLUMNS = ("ranks", "s", "descriptors", "threads", "KiB", "called small", "called split")


@dataclass(frozen=True, slots=True)
class Opened:
    """What one rank has more than before `weft.init`."""

    seconds: float
    descriptors: float
    threads: float
    kib: float
    after_small: float
    after_split: float


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def rank(per_host: int) -> Opened:
    """One rank's program."""
    torch.set_num_threads(1)
    me = int(os.environ["RANK"])
    os.environ["WEFT_HOST"] = f"host {me // per_host}"
    os.environ["WEFT_LINK"] = "100,1"  # else the first call measures it
    open_before = descriptors()
    threads_before = threading.active_count()
    kib_before = resident()
    start = time.perf_counter()
    with weft.init(timeout=120):
        seconds = time.perf_counter() - start
        opened = descriptors() - open_before
        threads = threading.active_count() - threads_before
        kib = resident() - kib_before

        weft.all_reduce(torch.ones(4))
        after_small = descriptors() - open_before

        rows = weft.Rows(torch.arange(4096) + me, torch.ones(4096, 16), height=1 << 20)
        weft.sparse_all_reduce(rows, algorithm="split")
        after_split = descriptors() - open_before
        weft.barrier()
    return Opened(seconds, opened, threads, kib, after_small, after_split)


def most(ranks: list[Opened]) -> Opened:
    """Of each figure the largest."""
    return Opened(*map(max, zip(*map(astuple, ranks), strict=True)))


def continued(few: tuple[int, Opened], many: tuple[int, Opened], ranks: int) -> Opened:
    """The figures of so many ranks, if they go on as between these two numbers of ranks."""
    (low, first), (high, last) = few, many
    steps = (ranks - high) / (high - low)
    pairs = zip(astuple(first), astuple(last), strict=True)
    return Opened(*(after + steps * (after - before) for before, after in pairs))


def show(measured: dict[int, Opened]) -> None:
    table = Table(title="more than before, at the rank with most", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for ranks, opened in measured.items():
        seconds, *counts = astuple(opened)
        table.add_row(str(ranks), f"{seconds:.2f}", *(f"{each:.0f}" for each in counts))
    *_, few, many = measured.items()
    table.add_section()
    for ranks in FURTHER:
        seconds, *counts = astuple(continued(few, many, ranks))
        table.add_row(f"{ranks}, continued", f"{seconds:.1f}", *(f"{each:.0f}" for each in counts))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="4,8,16,32", help="at least two numbers, ascending")
    parser.add_argument("--per-host", type=int, default=1)
    arguments = parser.parse_args()
    measured = {}
    for ranks in map(int, arguments.ranks.split(",")):
        measured[ranks] = most(processes(ranks, rank, arguments.per_host, timeout=600))
    show(measured)


if __name__ == "__main__":
    main()
