"""Measure the memory that a call adds to its process, and compare it with what weft promises.

    python benchmarks/memory.py [--ranks 4] [--case uniform,zipf] [--algorithm auto,split]

The promise: at most the result, plus three times the rows of the rank with fewest (without
duplicates), plus 64 MiB.

For each case, and each algorithm that can serve it within the workspace that a call may use, new
processes make three calls. The table has the growth of the resident set: its peak during the call
(VmHWM, which writing 5 to /proc/self/clear_refs resets) minus its size before. It is that of the
rank which comes closest to the promise, or exceeds it most:

* cold: the first call of the process. It also loads the machine code of the kernels, and connects
  to the peers;
* warm: that is done, but all workspaces are new;
* again: the same call once more, with the workspaces that were kept;
* kept: what the process has more than before the first call, when the last result is gone.

Linux only. The exit status is 1 if a call breaks the promise.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import weft
from weft.cli.bench.cases import CASES, Case, indices, values
from weft.sparse import ALGORITHMS
from weft.sparse.rows import Rows
from weft.testing import processes

SPARE = 64 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Growth:
    """What one rank saw, in bytes."""

    cold: int
    warm: int
    again: int
    kept: int
    result: int
    own: int

    @property
    def promise(self) -> int:
        return self.result + 3 * self.own + SPARE

    @property
    def most(self) -> int:
        return max(self.cold, self.warm, self.again)


def resident(which: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at the most since `reset`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {which}: this needs Linux")


def growth(call: Callable[[], object]) -> int:
    """Bytes by which the process is larger, at the peak of a call, than it was before."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed must not serve the call unseen
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return resident("VmHWM") - before


def rank_of(case: Case, algorithm: str) -> Growth:
    """One rank's program."""
    with weft.init(timeout=120) as group:
        rows = Rows(indices(case, group.rank, 0), values(case, group.rank, 0), case.height)
        result = 0

        def call() -> None:
            nonlocal result
            total = weft.sparse_all_reduce(rows, case.op, algorithm=algorithm)
            result = total.indices.nbytes + total.values.nbytes

        before = resident("VmRSS")
        cold = growth(call)
        group.memory.drain()
        warm = growth(call)
        again = growth(call)
        ctypes.CDLL(None).malloc_trim(0)
        kept = resident("VmRSS") - before
        distinct = len(rows.indices.unique())
    return Growth(
        cold, warm, again, kept, result, distinct * (case.row_bytes + rows.indices.itemsize)
    )


def eligible(case: Case) -> tuple[list[str], str]:
    """The algorithms that serve a case within its workspace, and what `auto` takes; collective."""
    with weft.init(timeout=120) as group:
        rows = Rows(indices(case, group.rank, 0), values(case, group.rank, 0), case.height)
        said = weft.explain(rows, case.op)
    serving = [line.algorithm for line in said.lines if not line.verdict.startswith("ruled out")]
    return [name for name in serving if name in ALGORITHMS], said.chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--case", default=",".join(CASES))
    parser.add_argument("--algorithm", default=",".join(["auto", *ALGORITHMS]))
    parser.add_argument("--size", type=float, default=1.0, help="times the rows and heights")
    arguments = parser.parse_args()

    table = Table(title=f"{arguments.ranks} ranks, MiB", title_justify="left")
    for column in ("case", "algorithm"):
        table.add_column(column)
    for column in ("result", "own", "promise", "cold", "warm", "again", "kept"):
        table.add_column(column, justify="right")
    table.add_column("")
    kept_all = True
    for name in arguments.case.split(","):
        case = CASES[name].scaled(arguments.size)
        may, chosen = processes(arguments.ranks, eligible, case, timeout=300)[0]
        for algorithm in arguments.algorithm.split(","):
            label = f"auto ({chosen})" if algorithm == "auto" else algorithm
            if algorithm not in ("auto", *may):
                table.add_row(name, label, *[""] * 7, "ruled out")
                continue
            ranks = processes(arguments.ranks, rank_of, case, algorithm, timeout=300)
            worst = max(ranks, key=lambda rank: rank.most - rank.promise)
            kept_all = kept_all and worst.most <= worst.promise
            figures = (worst.result, worst.own, worst.promise)
            figures += (worst.cold, worst.warm, worst.again, worst.kept)
            verdict = "kept" if worst.most <= worst.promise else "BROKEN"
            table.add_row(name, label, *(f"{figure / MIB:.1f}" for figure in figures), verdict)
    Console(width=110).print(table)
    return 0 if kept_all else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
