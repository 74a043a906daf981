"""Time every dense collective of torch.distributed on backend cpu:weft and on gloo.

    python benchmarks/backend.py [--ranks 4] [--verb all_reduce,broadcast] [--size 1024,1048576]
    python benchmarks/backend.py --threads 2          # of each rank, as OMP_NUM_THREADS=2 has it
    python benchmarks/backend.py --memory             # what a sum of 64 MB adds to a rank
    tools/netlab -n 4 --rate 1gbit --raw -- python benchmarks/backend.py
    tools/netlab -n 2 --per-host 4 --rate 1gbit --raw -- python benchmarks/backend.py

A size is what a rank gives, or gets if that is more, in bytes of float32. Each result is checked
before it is timed. The backends take turns in one run, in the same processes. Of each: the time of
the slowest rank, and the CPU time of the average one, medians of the rounds. gloo's medians swing:
so `best` compares with the best fifth of its rounds. Ratios are of times, gloo's by weft's.

`--memory` starts fresh ranks for each backend, and prints by how much a rank's resident and its
proportional memory have grown once a sum is done; pages that ranks share count for each of them in
the first, and divided among them in the second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from weft.testing import processes

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
SECONDS = 0.2  # that a backend's turn takes, about
MOST = 100  # calls in a turn
SUM = 64 << 20  # bytes of the sum whose memory is measured

Call = Callable[[dist.ProcessGroup], list[Tensor]]
"""Calls a collective; what it gave."""


def calls(nbytes: int) -> dict[str, Call]:
    """Each collective with tensors of that size; ranks give their numbers, counted from 1."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = nbytes // 4 // size
    mine = torch.full((count * size,), rank + 1.0)
    part, parts = mine[:count], list(mine.chunk(size))
    out, outs = torch.empty(count), [torch.empty(count) for _ in range(size)]
    whole = torch.empty(count * size)
    at_root = rank == 0

    def all_reduce(group: dist.ProcessGroup) -> list[Tensor]:
        whole.copy_(mine)
        dist.all_reduce(whole, group=group)
        return [whole]

    def reduce(group: dist.ProcessGroup) -> list[Tensor]:
        whole.copy_(mine)
        dist.reduce(whole, 0, group=group)
        return [whole] if at_root else []

    def broadcast(group: dist.ProcessGroup) -> list[Tensor]:
        whole.copy_(mine)
        dist.broadcast(whole, 0, group=group)
        return [whole]

    def all_gather(group: dist.ProcessGroup) -> list[Tensor]:
        dist.all_gather(outs, part, group=group)
        return outs

    def gather(group: dist.ProcessGroup) -> list[Tensor]:
        dist.gather(part, outs if at_root else None, 0, group=group)
        return outs if at_root else []

    def scatter(group: dist.ProcessGroup) -> list[Tensor]:
        dist.scatter(out, parts if at_root else None, 0, group=group)
        return [out]

    def reduce_scatter(group: dist.ProcessGroup) -> list[Tensor]:
        dist.reduce_scatter(out, parts, group=group)
        return [out]

    def all_to_all(group: dist.ProcessGroup) -> list[Tensor]:
        dist.all_to_all_single(whole, mine, group=group)
        return [whole]

    made = (all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all)
    return {call.__name__: call for call in made}


def right(verb: str, nbytes: int) -> list[Tensor]:
    """What a collective has to give this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = nbytes // 4 // size
    numbers = torch.arange(1.0, size + 1)
    total = float(numbers.sum())
    at_root = [True] if rank == 0 else []
    return {
        "all_reduce": [torch.full((count * size,), total)],
        "reduce": [torch.full((count * size,), total) for _ in at_root],
        "broadcast": [torch.ones(count * size)],
        "all_gather": [each.expand(count) for each in numbers],
        "gather": [each.expand(count) for each in numbers] if at_root else [],
        "scatter": [torch.ones(count)],
        "reduce_scatter": [torch.full((count,), total)],
        "all_to_all": [numbers.repeat_interleave(count)],
    }[verb]


@dataclass
class Timed:
    """Microseconds of the calls of one backend: of each round, of this rank."""

    passed: list[float]
    busy: list[float]


def turn(call: Call, group: dist.ProcessGroup, repeats: int, timed: Timed) -> None:
    """Call it so often, after a call that warms it up."""
    call(group)
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call(group)
    timed.passed.append((time.perf_counter() - began) / repeats * 1e6)
    timed.busy.append((time.process_time() - busy) / repeats * 1e6)


def measured(
    verb: str, nbytes: int, groups: dict[str, dist.ProcessGroup], rounds: int
) -> list[str]:
    """A row of the table."""
    made = {name: calls(nbytes)[verb] for name in groups}  # each with memory of its own
    for name, group in groups.items():
        for _ in range(2):  # the second finds what the first has left
            for found, wanted in zip(made[name](group), right(verb, nbytes), strict=True):
                assert torch.equal(found, wanted), f"{verb} of {nbytes} bytes is wrong over {name}"
    began = time.perf_counter()
    made["gloo"](groups["gloo"])
    repeats = torch.tensor([SECONDS / (time.perf_counter() - began)])
    dist.all_reduce(repeats, dist.ReduceOp.MIN)
    times = {name: Timed([], []) for name in groups}
    for number in range(rounds):
        for name in list(groups)[:: -1 if number % 2 else 1]:
            turn(made[name], groups[name], max(1, min(MOST, int(repeats))), times[name])
    figures = {}
    for name, timed in times.items():
        best = sorted(timed.passed)[rounds // 5]
        slowest = torch.tensor([statistics.median(timed.passed), best])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        busy = torch.tensor([statistics.median(timed.busy)])
        dist.all_reduce(busy, dist.ReduceOp.AVG)
        figures[name] = (*slowest.tolist(), busy.item())
    (ours, _, ours_busy), (theirs, best, theirs_busy) = figures["cpu:weft"], figures["gloo"]
    row = f"{ours:,.0f}", f"{ours_busy:,.0f}", f"{theirs:,.0f}", f"{theirs_busy:,.0f}"
    return [verb, f"{nbytes:,d}", *row, f"{theirs / ours:.2f}", f"{best / ours:.2f}"]


def rank(verbs: list[str], sizes: list[int], rounds: int, threads: int) -> list[list[str]]:
    """One rank: the rows of the table."""
    torch.set_num_threads(threads)
    dist.init_process_group("cpu:weft")
    groups = {name: dist.new_group(backend=kind) for name, kind in BACKENDS.items()}
    rows = [measured(verb, nbytes, groups, rounds) for nbytes in sizes for verb in verbs]
    dist.destroy_process_group()
    return rows


BACKENDS = {"gloo": "gloo", "cpu:weft": "weft"}
VERBS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)


def memory() -> tuple[int, int]:
    """Resident and proportional bytes of this process."""
    with open("/proc/self/smaps_rollup") as file:
        lines = dict(line.split(":") for line in file.readlines()[1:])
    resident, proportional = (int(lines[name].split()[0]) << 10 for name in ("Rss", "Pss"))
    return resident, proportional


def growth(backend: str) -> tuple[int, int]:
    """One rank: by how much its memory grows with a sum, its own tensor left out."""
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    total = torch.ones(SUM // 4)
    dist.all_reduce(torch.ones(1))
    before = memory()
    dist.all_reduce(total)
    dist.barrier()
    after = memory()
    dist.destroy_process_group()
    return after[0] - before[0], after[1] - before[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--verb", default=",".join(VERBS))
    parser.add_argument("--size", default=",".join(map(str, SIZES)))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args()
    if given.memory:
        for backend in BACKENDS:
            found = processes(given.ranks, growth, backend, timeout=300.0)
            resident, proportional = (
                statistics.mean(each) / 2**20 for each in zip(*found, strict=True)
            )
            print(f"{backend}: {resident:.0f} MiB resident, {proportional:.0f} proportional")
        return
    verbs, sizes = given.verb.split(","), [*map(int, given.size.split(","))]
    arguments = verbs, sizes, given.rounds, given.threads
    if "RANK" in os.environ:  # in a netlab, or under torchrun: this process is a rank
        rows = rank(*arguments)
        if os.environ["RANK"] != "0":
            return
    else:
        rows = processes(given.ranks, rank, *arguments, timeout=3600.0)[0]
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    columns = ("", "bytes", "weft, us", "busy", "gloo, us", "busy", "ratio", "best")
    table = Table(*columns, title=f"load {load}")
    for row in rows:
        table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
