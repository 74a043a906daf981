"""How contenders are timed side by side on a wire, and on which ranks: what benchmarks share."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from weft.testing import processes
from weft.wire.base import Wire

T = TypeVar("T")


def on_ranks(
    rank: Callable[[argparse.Namespace], T],
    arguments: argparse.Namespace,
    show: Callable[[T, int], None],
) -> None:
    """Run one rank's program on those that a launcher started, else on `arguments.ranks` here.

    Args:
        rank: the program.
        arguments: that it takes.
        show: is given what rank 0 returns, and the number of ranks, once.
    """
    if "RANK" in os.environ:
        found = rank(arguments)
        if os.environ["RANK"] == "0":
            show(found, int(os.environ["WORLD_SIZE"]))
    else:
        show(processes(arguments.ranks, rank, arguments, timeout=600)[0], arguments.ranks)


def turns(
    wire: Wire,
    rounds: int,
    contenders: Mapping[str, Callable[[], object]],
    *,
    warmup: int = 1,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Seconds of a call of each contender in each round, of the slowest rank; they take turns.

    Args:
        wire: among whom; it also serves as the barrier before each turn.
        rounds: that count.
        contenders: by name.
        warmup: rounds before those, which do not.
        calls: made in one turn, and timed together.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + warmup):
        # drawn anew, the same on all ranks: what one leaves in caches is paid for by the next
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            contender = contenders[name]
            wire.dense_all_reduce(torch.zeros(1), "sum").wait()
            start = time.perf_counter()
            for _ in range(calls):
                contender()
            took = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64)
            wire.dense_all_reduce(took, "max").wait()
            times[name].append(took.item())
    return {name: each[warmup:] for name, each in times.items()}
