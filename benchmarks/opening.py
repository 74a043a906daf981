"""What the beginning of a call costs a rank: its CPU time, and calls of functions.

    torchrun --standalone --nproc-per-node 4 benchmarks/opening.py
    PYTHONPATH=../before/src torchrun --standalone --nproc-per-node 4 benchmarks/opening.py

The second measures another checkout, which is asked for public names alone. Figures are of rank 0:
the CPU time of its process, and the time that passes, in microseconds, medians of the rounds, in
which the cases take turns; and the calls of functions, Python's and built in, of one warm call, in
the thread that makes it. The rows of a call are checked first.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import weft

ROUNDS = 7
SECONDS = 0.2  # that a case's turn takes, about
MOST = 300  # calls in a turn

Call = Callable[[], object]


def rows(rank: int, count: int, height: int, *, zipf: bool) -> weft.Rows:
    """Distinct rows of 64 floats; of Zipf's law as many as `count` draws find."""
    draw = torch.Generator().manual_seed(rank)
    if zipf:
        weights = 1.0 / (torch.arange(height) + 1.0)
        indices = torch.multinomial(weights, count, replacement=True, generator=draw).unique()
    else:
        indices = torch.randperm(height, generator=draw)[:count]
    return weft.Rows(indices, torch.full((len(indices), 64), rank + 1.0), height)


def cases(group: weft.Group) -> dict[str, Call]:
    """Each call that is measured, by its name."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent, got, one = torch.ones(16), torch.empty(16), torch.ones(10)
    zeros, served = torch.zeros(256), dist.new_group(backend="weft")

    def message() -> None:
        group.post([(right, sent)], [(left, got)]).wait()

    given = {
        "sparse, 500 rows": rows(group.rank, 500, 43_000, zipf=False),
        "sparse, 12,288 of Zipf's law": rows(group.rank, 12_288, 43_000, zipf=True),
        "sparse, 50,000 of Zipf's law": rows(group.rank, 50_000, 1_000_000, zipf=True),
    }
    sparse = {
        name: lambda each=each: weft.sparse_all_reduce(each, group=group)
        for name, each in given.items()
    }
    return {
        "barrier": lambda: weft.barrier(group=group),
        "a message of 64 bytes, sent and one received": message,
        "all_reduce of 40 bytes": lambda: weft.all_reduce(one, group=group),
        "dist.all_reduce of 1 KiB over cpu:weft": lambda: dist.all_reduce(zeros, group=served),
        **sparse,
    }


def check(group: weft.Group) -> None:
    """Raise if a sum is wrong."""
    given = [rows(rank, 500, 43_000, zipf=False) for rank in range(group.size)]
    total = torch.zeros(43_000, 64)
    for each in given:
        total.index_add_(0, each.indices, each.values)
    found = weft.sparse_all_reduce(given[group.rank], group=group)
    assert torch.equal(total[found.indices], found.values), "a sum is wrong"
    assert total.count_nonzero() == found.values.count_nonzero(), "a row is missing"


def turn(call: Call, repeats: int) -> tuple[float, float]:
    """Microseconds of a call: busy, and passed."""
    busy, passed = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        call()
    scale = 1e6 / repeats
    return (time.process_time() - busy) * scale, (time.perf_counter() - passed) * scale


def functions_called(call: Call) -> int:
    """How many functions a call calls, in this thread."""
    counted = 0

    def count(frame: object, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    call()
    sys.setprofile(None)
    return counted


def main() -> None:
    torch.set_num_threads(1)
    with weft.init() as group:
        check(group)
        calls = cases(group)
        repeats = {}
        for name, call in calls.items():
            for _ in range(10):
                call()
            slowest = weft.all_reduce(torch.tensor([turn(call, 5)[1]]), "max", group=group)
            repeats[name] = max(5, min(MOST, int(SECONDS * 1e6 / slowest.item())))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                weft.barrier(group=group)
                times[name].append(turn(call, repeats[name]))
        counts = {name: functions_called(call) for name, call in calls.items()}
        if group.rank != 0:
            return
    print(f"{weft.__file__}\n{'':46}{'busy, us':>12}{'passed, us':>12}{'functions':>12}")
    for name, found in times.items():
        busy, passed = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"{name:46}{busy:12,.0f}{passed:12,.0f}{counts[name]:12,d}")


if __name__ == "__main__":
    main()
