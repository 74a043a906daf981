"""Count what `weft.init` opens at each rank, and what the first calls open besides.

    python benchmarks/start.py [--ranks 8,16,32,64] [--per-host 1]

The ranks are processes of this machine that take themselves for ranks of several hosts (WEFT_HOST),
so that they connect as distant ranks do: control links in `weft.init`, connections for messages
when a schedule first needs them. 64 ranks take less than a minute on two cores.

For each number of ranks, of the rank with most:

* connections, files (descriptors) and threads: more than before `weft.init`; threads are those of
  Python and those of libraries;
* MiB: growth of the resident set. What the system's kernel holds for a socket is not in it;
* core s: seconds of a core that `weft.init` keeps this rank's threads busy;
* s: seconds of `weft.init`, with everybody at once on the cores of this machine;
* split: connections after a first sparse all-reduce, by `split`.
"""

from __future__ import annotations

import argparse
import os
import socket
import stat
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

import weft
from weft.testing import processes

ROWS, WIDTH, HEIGHT = 4096, 16, 1 << 20  # of the split
COLUMNS = ("connections", "files", "threads", "MiB", "core s", "s", "split")


@dataclass(frozen=True, slots=True)
class Opened:
    """What one rank has more than before `weft.init`, in the order of `COLUMNS`."""

    connections: float
    files: float
    threads: float
    mib: float
    core_seconds: float
    seconds: float
    after_split: float


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def connections() -> int:
    """Sockets over IP that are connected."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    copy.getpeername()
                    found += 1
        except OSError:  # it listens, or was closed meanwhile
            continue
    return found


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident() -> float:
    """MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def rank(per_host: int) -> Opened:
    """One rank's program."""
    torch.set_num_threads(1)
    me = int(os.environ["RANK"])
    os.environ["WEFT_HOST"] = f"host {me // per_host}"
    connections_before = connections()
    files_before = files()
    threads_before = threads()
    mib_before = resident()
    start = time.perf_counter()
    busy_before = time.process_time()
    with weft.init(timeout=600):
        seconds = time.perf_counter() - start
        core_seconds = time.process_time() - busy_before
        found = Opened(
            connections() - connections_before,
            files() - files_before,
            threads() - threads_before,
            resident() - mib_before,
            core_seconds,
            seconds,
            after_split() - connections_before,
        )
        weft.barrier()
    return found


def after_split() -> int:
    """Connections after a first split."""
    indices = torch.arange(ROWS) + int(os.environ["RANK"])
    rows = weft.Rows(indices, torch.ones(ROWS, WIDTH), height=HEIGHT)
    weft.sparse_all_reduce(rows, algorithm="split")
    return connections()


def most(ranks: list[Opened]) -> Opened:
    """Of each figure the largest."""
    return Opened(*map(max, zip(*map(astuple, ranks), strict=True)))


def show(counted: dict[int, Opened]) -> None:
    print("more than before, at the rank with most")
    print(f"{'ranks':>6}" + "".join(f"{column:>13}" for column in COLUMNS))
    for ranks, opened in counted.items():
        cells = map(spelled, COLUMNS, astuple(opened))
        print(f"{ranks:6}" + "".join(f"{cell:>13}" for cell in cells))


def spelled(column: str, figure: float) -> str:
    return f"{figure:,.2f}" if column in ("core s", "s") else f"{figure:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="8,16,32,64", help="numbers, divided by commas")
    parser.add_argument("--per-host", type=int, default=1)
    arguments = parser.parse_args()
    counted = {}
    for ranks in map(int, arguments.ranks.split(",")):
        counted[ranks] = most(processes(ranks, rank, arguments.per_host, timeout=600))
    show(counted)


if __name__ == "__main__":
    main()
