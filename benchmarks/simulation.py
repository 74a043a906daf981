"""Compare what algorithms say that they send with what they send on simulated ranks.

    python benchmarks/simulation.py --ranks 64 --rows 500 --height 20000 --width 64
    python benchmarks/simulation.py --ranks 1024 --rows 128 --height 8192 --width 8 \\
        --algorithm auto --link 1gbit,10gbit
    python benchmarks/simulation.py --algorithm split --per-host 8
    python benchmarks/simulation.py --ranks 8 --per-host 4 --rows 4000 --height 80000 \\
        --algorithm auto --case uniform,zipf,identical,wide --link 1gbit,10gbit,25gbit,100gbit

A simulated message takes less than 0.1 ms of a core, a pair of ranks some ten kilobytes. An
algorithm takes seconds for 64 ranks and half a minute for 256. For 1,024 ranks it takes two to 47
minutes and 11 GiB; `doubling` and `split`, which send few messages, take up to three.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch

import weft
from simulated import Link, simulate
from weft.sparse import ALGORITHMS

WITHIN = 0.25e-9  # seconds for a byte that a rank receives from its own host: one mapped copy
LINKS = {
    "1gbit": Link(50e-6, 8e-9, 10e-6),
    "10gbit": Link(20e-6, 0.8e-9, 5e-6),
    "25gbit": Link(20e-6, 0.32e-9, 5e-6),
    "100gbit": Link(20e-6, 0.08e-9, 5e-6),
}


def uniform(rank: int, rows: int, height: int, width: int) -> weft.Rows:
    """Distinct rows, each as likely as any other."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randperm(height, generator=generator)[:rows].sort().values
    return weft.Rows(indices, torch.ones(rows, width), height)


def zipf(rank: int, rows: int, height: int, width: int) -> weft.Rows:
    """So many tokens: index i is drawn with a probability proportional to 1 / (i + 1)."""
    generator = torch.Generator().manual_seed(rank)
    chances = 1 / torch.arange(1, height + 1, dtype=torch.float64)
    indices = torch.multinomial(chances, rows, replacement=True, generator=generator).unique()
    return weft.Rows(indices, torch.ones(len(indices), width), height)


def identical(rank: int, rows: int, height: int, width: int) -> weft.Rows:
    """The same rows on all ranks, evenly spread."""
    indices = torch.arange(rows) * (height // rows)
    return weft.Rows(indices, torch.ones(rows, width), height)


def wide(rank: int, rows: int, height: int, width: int) -> weft.Rows:
    """As uniform, with rows 16 times as wide, and so many fewer."""
    return uniform(rank, rows // 16, height // 16, 16 * width)


CASES: dict[str, Callable[[int, int, int, int], weft.Rows]] = {
    "uniform": uniform,
    "zipf": zipf,
    "identical": identical,
    "wide": wide,
}


def main() -> None:
    """Print a line for each case, algorithm and link, of the average rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rows", type=int, default=500, help="of a rank")
    parser.add_argument("--height", type=int, default=20_000, help="rows they are drawn from")
    parser.add_argument("--width", type=int, default=64, help="floats of a row")
    parser.add_argument("--algorithm", default=",".join(ALGORITHMS), help="divided by commas")
    parser.add_argument("--link", default="1gbit,10gbit", help=f"some of {', '.join(LINKS)}")
    parser.add_argument("--per-host", type=int, default=1, help="neighbours that share a host")
    parser.add_argument("--case", default="uniform", help=f"some of {', '.join(CASES)}")
    given = parser.parse_args()
    ranks, sizes = given.ranks, (given.rows, given.height, given.width)
    hosts = [f"{rank // given.per_host}" for rank in range(ranks)]
    print(f"# {ranks} ranks, {given.per_host} a host, {sizes[0]} rows of {sizes[2]} floats")
    print("# case     algorithm   link      messages            bytes")
    for kind in given.case.split(","):
        parts = [CASES[kind](rank, *sizes) for rank in range(ranks)]
        for name in given.algorithm.split(","):
            for speed in given.link.split(","):
                between = LINKS[speed]
                within = replace(between, beta=WITHIN)
                start = time.perf_counter()
                done = simulate(name, parts.__getitem__, ranks, between, hosts=hosts, within=within)
                took = time.perf_counter() - start
                print(
                    f"{kind:10} {done.algorithm:11} {speed:8} {done.messages:9.1f} "
                    f"{done.bytes:16.0f}  "
                    f"{done.seconds * 1e3:.3f} ms simulated, took {took:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
