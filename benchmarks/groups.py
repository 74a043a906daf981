"""Time the making of process groups on backend cpu:weft and on gloo, on one host.

    python benchmarks/groups.py [--ranks 2,4,8,32] [--rounds 5]

Each round starts fresh ranks for each backend, in turns. A group of weft's joins its ranks in its
first call, and gloo's in `new_group`: so both are also measured together. Times are of the slowest
rank, in milliseconds, medians of the rounds; the ratio is gloo's time by weft's.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from weft.testing import processes

BACKENDS = ("gloo", "cpu:weft")
MANY = 50  # groups that are alive at once
CALLS = 20  # barriers, of which one's time is taken


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def use(group: dist.ProcessGroup) -> None:
    """A first call, whose result is checked."""
    total = torch.ones(10)
    dist.all_reduce(total, group=group)
    assert total[0] == dist.get_world_size(group), "a sum is wrong"


def measured(backend: str) -> dict[str, float]:
    """The seconds of one rank, by what it did."""

    def start() -> None:
        dist.init_process_group(backend)
        dist.barrier()

    made: list[dist.ProcessGroup] = []

    def make() -> None:
        made.append(dist.new_group())

    def make_many() -> None:
        for _ in range(MANY):
            make()
            use(made[-1])

    def make_mesh() -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        for group in mesh.get_all_groups():
            use(group)

    def meet() -> None:
        for _ in range(CALLS):
            dist.barrier()

    times = {"init_process_group and a barrier": seconds(start)}
    make()
    use(made[-1])  # what a process does once is none of the next group's
    times["new_group"] = seconds(make)
    times["its first call"] = seconds(functools.partial(use, made[-1]))
    times["new_group and its first call"] = times["new_group"] + times["its first call"]
    if dist.get_world_size() <= 8:
        times[f"{MANY} groups, each used"] = seconds(make_many)
    if dist.get_world_size() == 8:
        times["a mesh of 2 x 2 x 2, each used"] = seconds(make_mesh)
    meet()
    times["a barrier"] = seconds(meet) / CALLS
    dist.barrier()
    dist.destroy_process_group()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", default="2,4,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    table = Table("ranks", "", *(f"{name}, ms" for name in BACKENDS), "gloo / weft")
    for ranks in map(int, arguments.ranks.split(",")):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in BACKENDS}
        for _ in range(arguments.rounds):
            for name in BACKENDS:
                of_all = processes(ranks, measured, name, timeout=600)
                found[name].append({what: max(each[what] for each in of_all) for what in of_all[0]})
        for what in found["gloo"][0]:
            gloo, weft = (
                statistics.median(each[what] for each in found[name]) * 1e3 for name in BACKENDS
            )
            table.add_row(str(ranks), what, f"{gloo:.2f}", f"{weft:.2f}", f"{gloo / weft:.2f}")
        table.add_section()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
