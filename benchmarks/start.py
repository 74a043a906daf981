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

The lines below continue the table to 1,024 and 10,240 ranks. The last line says by which law, with
n other ranks: its numbers are fitted to all counted lines. Which law it is follows from the source:

* for each other rank gloo makes a connection, and weft a control link (`group.control`);
* threads are the same, whoever else is there: one reads all links (`group.failure.links`);
* each rank reads what each other rank says at the store, and works as much for each connection:
  so memory and seconds of a core have a part that grows with n. Seconds on the clock are those of
  all ranks on a few cores here, and are not continued;
* a flat `split` sends to all others, one in stages to those of its block and of its place
  (`weft.sparse.stages`). Openings need log2 P others on each side, most of which are among these;
  below 17 ranks openings are direct, to all.
"""

from __future__ import annotations

import argparse
import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import weft
from weft.call.combining import DIRECT, partners
from weft.sparse import Hosts, Sizes
from weft.sparse.stages import between, in_stages
from weft.testing import processes

FURTHER = (1024, 10_240)
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


@dataclass(frozen=True, slots=True)
class Law:
    """How a figure grows with n, the number of other ranks.

    Attributes:
        powers: of n, each of which has a factor that is fitted.
        decimals: of the factors, as they are shown.
        more: what is known besides, of so many ranks, of which so many share a host.
    """

    powers: tuple[int, ...]
    decimals: int
    more: Callable[[int, int], float] | None = None

    def fitted(self, counted: dict[int, float], per_host: int) -> list[float]:
        """The factors with which it is nearest to what was counted, in parts of each count."""
        others = np.array([ranks - 1.0 for ranks in counted])
        found = np.array(list(counted.values()))
        if self.more is not None:
            found = found - [self.more(ranks, per_host) for ranks in counted]
        terms = np.stack([others**power for power in self.powers], axis=1)
        factors, *_ = np.linalg.lstsq(terms / found[:, None], np.ones(len(found)), rcond=None)
        return [float(each) for each in factors]

    def at(self, ranks: int, per_host: int, factors: list[float]) -> float:
        more = 0.0 if self.more is None else self.more(ranks, per_host)
        terms = zip(factors, self.powers, strict=True)
        return more + sum(factor * (ranks - 1.0) ** power for factor, power in terms)

    def spelled(self, factors: list[float]) -> str:
        names = {0: "", 1: " n", 2: " n²"}
        terms = [
            f"{factor:.{self.decimals}f}{names[power]}"
            for factor, power in zip(factors, self.powers, strict=True)
        ]
        return " + ".join(terms + ["peers"] * (self.more is not None))


def peers_of_split(ranks: int, per_host: int) -> float:
    """To how many others the rank with most has a connection for messages: see the file's head."""
    hosts = Hosts(tuple(rank // per_host for rank in range(ranks)))
    row = WIDTH * 4
    sizes = Sizes(ranks, ranks * ROWS, ROWS, ROWS, HEIGHT, row, row, places=HEIGHT, hosts=hosts)
    peers = [opening_peers(rank, ranks) for rank in range(ranks)]
    add_peers(peers, [*range(ranks)], sizes)
    return max(map(len, peers))


def opening_peers(rank: int, ranks: int) -> set[int]:
    """Whom a rank tells its statement."""
    if ranks <= DIRECT:
        return {*range(ranks)} - {rank}
    partner, others = partners(rank, ranks)
    return {*others} | ({partner} - {None})


def add_peers(peers: list[set[int]], members: list[int], sizes: Sizes) -> None:
    """Add those with which each of some ranks exchanges messages in a split among them."""
    blocks = in_stages(sizes).blocks
    if not blocks:
        for rank in members:
            peers[rank].update(other for other in members if other != rank)
        return
    blocks_of_ranks = [[members[place] for place in block] for block in blocks]
    for block in blocks_of_ranks:
        add_peers(peers, block, sizes.but(ranks=len(block), hosts=Hosts((0,) * len(block))))
    inner = between(in_stages(sizes)).sizes
    for place in zip(*blocks_of_ranks, strict=False):  # as many as the smallest block has
        add_peers(peers, [*place], inner)


LAWS = {
    "connections": Law((0, 1), 0),
    "files": Law((0, 1), 0),
    "threads": Law((0,), 0),
    "MiB": Law((0, 1), 3),
    "core s": Law((0, 1), 4),
    "split": Law((0, 1), 0, peers_of_split),
}


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


def show(counted: dict[int, Opened], per_host: int) -> None:
    table = Table(title="more than before, at the rank with most", title_justify="left")
    table.add_column("ranks", justify="right")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for ranks, opened in counted.items():
        table.add_row(f"{ranks:,}, counted", *map(spelled, COLUMNS, astuple(opened)))
    table.add_section()
    names = [field.name for field in fields(Opened)]
    factors = {}
    for column, name in zip(COLUMNS, names, strict=True):
        if column in LAWS:
            of_ranks = {ranks: getattr(opened, name) for ranks, opened in counted.items()}
            factors[column] = LAWS[column].fitted(of_ranks, per_host)
    for ranks in FURTHER:
        cells = []
        for column in COLUMNS:
            is_continued = column in LAWS
            figure = LAWS[column].at(ranks, per_host, factors[column]) if is_continued else 0.0
            cells.append(spelled(column, figure) if is_continued else "-")
        table.add_row(f"{ranks:,}, continued", *cells)
    laws = [LAWS[c].spelled(factors[c]) if c in LAWS else "-" for c in COLUMNS]
    table.add_row("law", *laws)
    Console(width=160).print(table)


def spelled(column: str, figure: float) -> str:
    return f"{figure:,.2f}" if column in ("core s", "s") else f"{figure:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="8,16,32,64", help="at least two numbers, ascending")
    parser.add_argument("--per-host", type=int, default=1)
    arguments = parser.parse_args()
    counted = {}
    for ranks in map(int, arguments.ranks.split(",")):
        counted[ranks] = most(processes(ranks, rank, arguments.per_host, timeout=600))
        print(f"# {ranks} ranks: {counted[ranks]}", flush=True)
    show(counted, arguments.per_host)


if __name__ == "__main__":
    main()
