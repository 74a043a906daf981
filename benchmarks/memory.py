"""Measure what weft holds of a rank's process: memory of calls, descriptors, threads.

    python benchmarks/memory.py [--ranks 4] [--case uniform,zipf] [--algorithm auto,split]
    python benchmarks/memory.py --only held
    PYTHONPATH=OTHER/src python benchmarks/memory.py                       # of another checkout

**held**: descriptors, threads and resident memory of a rank (of the one with most) before
`weft.init`, behind it, behind ten calls of several kinds, and behind `weft.shutdown`; `shm` with
all ranks on one host, `tcp` with each as if on a host of its own.

**calls**: what a call adds to its process, beside what weft promises: at most the result, plus
three times the rows of the rank with fewest (without duplicates), plus 64 MiB. For each case and
algorithm new processes make three calls. The table has the growth of the resident set: its peak
during the call (VmHWM, which writing 5 to /proc/self/clear_refs resets) minus its size before. It
is that of the rank which comes closest to the promise, or exceeds it most:

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
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import weft
from weft.testing import processes

SPARE = 64 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A rank's rows: how many, of which table, and how wide."""

    rows: int
    height: int
    width: int
    skewed: bool = False  # by Zipf's law, with duplicates
    shared: bool = False  # the same on every rank

    def of(self, rank: int) -> weft.Rows:
        draw = torch.Generator().manual_seed(0 if self.shared else rank)
        if self.skewed:
            at = torch.rand(self.rows, generator=draw, dtype=torch.float64)
            indices = (self.height**at).long() - 1
        else:
            indices = torch.randperm(self.height, generator=draw)[: self.rows]
        values = torch.randn(self.rows, self.width, generator=draw)
        return weft.Rows(indices.int(), values, self.height)


CASES = {
    "uniform": Case(50_000, 1_000_000, 64),
    "zipf": Case(50_000, 1_000_000, 64, skewed=True),
    "identical": Case(50_000, 1_000_000, 64, shared=True),
    "wide": Case(2_000, 40_000, 2048),
    "small": Case(100, 10_000, 64),
}
ALGORITHMS = ("auto", "gather", "split", "holders", "doubling")


@dataclass(frozen=True, slots=True)
class Growth:
    """What one rank saw, in bytes."""

    cold: int
    warm: int
    again: int
    kept: int
    result: int
    own: int
    chosen: str

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


def rank_of(case: Case, algorithm: str) -> Growth | None:
    """One rank's program; None: the algorithm cannot serve the call."""
    with weft.init(timeout=120) as group:
        rows = case.of(group.rank)
        result = 0

        def call() -> None:
            nonlocal result
            total = weft.sparse_all_reduce(rows, algorithm=algorithm)
            result = total.indices.nbytes + total.values.nbytes

        before = resident("VmRSS")
        try:
            cold = growth(call)
        except weft.WeftError:
            return None
        group.memory.drain()
        group.wire.segment.drain()
        warm = growth(call)
        again = growth(call)
        ctypes.CDLL(None).malloc_trim(0)
        kept = resident("VmRSS") - before
        chosen = weft.sparse.last_call().algorithm
    own = len(rows.indices.unique()) * (4 * case.width + 4)
    return Growth(cold, warm, again, kept, result, own, chosen)


def held() -> tuple[int, int, int]:
    """Descriptors, threads, and bytes in memory of this process; of threads the system's count."""
    descriptors = len(os.listdir("/proc/self/fd")) - 1  # one is that of the listing
    return descriptors, len(os.listdir("/proc/self/task")), resident("VmRSS")


MOMENTS = ("before", "init", "calls", "shutdown")


def moments() -> list[tuple[int, int, int]]:
    """One rank's program: what it holds at each of the moments."""
    torch.ones(1 << 16).add(1)  # torch starts its own threads
    found = [held()]
    with weft.init(timeout=120) as group:
        found.append(held())
        parts = [torch.ones(40_000) for _ in range(group.size)]
        several = [CASES["small"].of(group.rank) for _ in range(4)]
        for _ in range(10):
            weft.sparse_all_reduce(CASES["small"].of(group.rank))
            weft.sparse_all_reduce(several)
            weft.sparse_all_reduce(CASES["zipf"].of(group.rank), async_op=True).wait()
            weft.all_reduce(torch.ones(100_000))
            weft.all_to_all(parts)
            weft.barrier()
        found.append(held())
    found.append(held())
    return found


def held_lines(ranks: int) -> Iterator[str]:
    yield f"{'wire':6}{'':12}" + "".join(f"{moment:>10}" for moment in MOMENTS)
    for wire in ("shm", "tcp"):
        by_rank = processes(ranks, of_wire, wire, timeout=300)
        for number, (what, unit) in enumerate(
            (("descriptors", 1), ("threads", 1), ("RSS, MiB", MIB))
        ):
            most = [max(rank[at][number] for rank in by_rank) for at in range(len(MOMENTS))]
            yield f"{wire:6}{what:12}" + "".join(f"{each / unit:10.0f}" for each in most)


def of_wire(wire: str) -> list[tuple[int, int, int]]:
    if wire == "tcp":
        os.environ["WEFT_HOST"] = os.environ["RANK"]
    return moments()


def call_lines(ranks: int, cases: list[str], algorithms: list[str]) -> Iterator[tuple[str, bool]]:
    """Lines of the table, and whether each keeps the promise."""
    columns = ("result", "own", "promise", "cold", "warm", "again", "kept")
    yield f"{'case':10}{'algorithm':18}" + "".join(f"{each:>9}" for each in columns), True
    for name in cases:
        for algorithm in algorithms:
            found = processes(ranks, rank_of, CASES[name], algorithm, timeout=300)
            rows = [each for each in found if each is not None]
            if not rows:
                yield f"{name:10}{algorithm:18}    cannot serve it", True
                continue
            worst = max(rows, key=lambda each: each.most - each.promise)
            label = f"auto ({worst.chosen})" if algorithm == "auto" else algorithm
            figures = (getattr(worst, each) / MIB for each in columns)
            is_kept = worst.most <= worst.promise
            text = "".join(f"{figure:9.1f}" for figure in figures)
            yield f"{name:10}{label:18}{text}  {'' if is_kept else 'BROKEN'}", is_kept


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", choices=("held", "calls"))
    parser.add_argument("--case", default=",".join(CASES))
    parser.add_argument("--algorithm", default=",".join(ALGORITHMS))
    given = parser.parse_args()
    print(f"{given.ranks} ranks, {weft.__file__}")
    if given.only != "calls":
        for line in held_lines(given.ranks):
            print(line, flush=True)
    all_kept = True
    if given.only != "held":
        print("MiB:")
        for line, is_kept in call_lines(
            given.ranks, given.case.split(","), given.algorithm.split(",")
        ):
            print(line, flush=True)
            all_kept = all_kept and is_kept
    return 0 if all_kept else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
