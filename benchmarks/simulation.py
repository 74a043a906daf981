"""Compare predicted times with simulated ones: the table of docs/plan.md.

    python benchmarks/simulation.py --ranks 64 --rows 500 --height 20000 --width 64
    python benchmarks/simulation.py --ranks 1024 --rows 128 --height 8192 --width 8
    python benchmarks/simulation.py --algorithm split --per-host 8

A simulated message takes less than 0.1 ms of a core, a pair of ranks some ten kilobytes. An
algorithm takes seconds for 64 ranks and half a minute for 256. For 1,024 ranks it takes two to 47
minutes and 11 GiB; `doubling`, which sends few messages, takes a minute at most.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import torch
import typer

import weft
from weft.sparse import ALGORITHMS
from weft.testing.simulation import simulate
from weft.wire.link import MERGE, Link

LINKS = {
    "1gbit": Link(50e-6, 8e-9, MERGE, 10e-6),
    "10gbit": Link(20e-6, 0.8e-9, MERGE, 5e-6),
}


def main(
    ranks: Annotated[int, typer.Option(help="How many.")] = 64,
    rows: Annotated[int, typer.Option(help="Rows of a rank.")] = 500,
    height: Annotated[int, typer.Option(help="Rows they are drawn from, uniformly.")] = 20_000,
    width: Annotated[int, typer.Option(help="Floats of a row.")] = 64,
    algorithm: Annotated[str, typer.Option(help="Names, divided by commas, or all.")] = "all",
    link: Annotated[str, typer.Option(help="1gbit, 10gbit, or both.")] = "1gbit,10gbit",
    per_host: Annotated[int, typer.Option(help="Neighbouring ranks that share a host.")] = 1,
) -> None:
    """Print a line for each algorithm and link."""
    values = torch.ones(rows, width)

    def drawn(rank: int) -> weft.Rows:
        generator = torch.Generator().manual_seed(rank)
        indices = torch.randperm(height, generator=generator)[:rows].sort().values
        return weft.Rows(indices, values, height)

    hosts = [f"{rank // per_host}" for rank in range(ranks)]
    print(f"# {ranks} ranks, {per_host} a host, {rows} rows of {width} floats, of {height}")
    print("# algorithm   link    simulated ms  predicted ms  ratio  messages  opening ms  took s")
    for name in ALGORITHMS if algorithm == "all" else algorithm.split(","):
        for speed in link.split(","):
            start = time.perf_counter()
            between = LINKS[speed]
            # a host's own network is its cores: to hand a byte on costs them four that are merged
            within = replace(between, beta=4 * between.gamma)
            done = simulate(name, drawn, ranks, between, hosts=hosts, within=within)
            took = time.perf_counter() - start
            print(
                f"{name:13} {speed:7} {done.seconds * 1e3:12.3f}  {done.predicted * 1e3:12.3f}  "
                f"{done.predicted / done.seconds:5.2f}  {done.messages:8.0f}  "
                f"{done.opening * 1e3:10.3f}  {took:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
