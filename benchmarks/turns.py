"""What benchmarks share: they start ranks, and time contenders in turns on a group."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

import weft
from weft.testing import processes

T = TypeVar("T")


def on_ranks(
    rank: Callable[[argparse.Namespace], T],
    arguments: argparse.Namespace,
    show: Callable[[T, int], None],
) -> None:
    """Run a program on the ranks that a launcher started, else on `arguments.ranks` new processes.

    Args:
        rank: the program of one rank.
        arguments: its argument.
        show: called once, with what rank 0 returned and the number of ranks.
    """
    if "RANK" in os.environ:
        found = rank(arguments)
        if os.environ["RANK"] == "0":
            show(found, int(os.environ["WORLD_SIZE"]))
    else:
        show(processes(arguments.ranks, rank, arguments, timeout=600)[0], arguments.ranks)


def sent() -> int:
    """Bytes that this host's network interface has sent so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def turns(
    group: weft.Group,
    rounds: int,
    contenders: Mapping[str, Callable[[], object]],
    *,
    warmup: int = 1,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Time contenders in turns; return the seconds of a call in each round, by contender.

    A time is that of the slowest rank. Before each turn there is a barrier.

    Args:
        group: of the ranks that take part. Every rank calls this function.
        rounds: the number of rounds that count.
        contenders: what is called, by name; the same names on every rank.
        warmup: the number of rounds before those, which do not count.
        calls: the number of calls in one turn, whose mean time counts.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + warmup):
        # in random order, the same on all ranks: a contender pays for the caches of the one before
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            contender = contenders[name]
            weft.barrier(group=group)
            start = time.perf_counter()
            for _ in range(calls):
                contender()
            took = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64)
            times[name].append(weft.all_reduce(took, "max", group=group).item())
    return {name: each[warmup:] for name, each in times.items()}
