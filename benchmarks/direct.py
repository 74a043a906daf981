"""Time `gather` between distant hosts, sent directly to all and round the ring, and other ways.

    tools/netlab -n 8 --rate 100mbit --delay 25 --raw -- python benchmarks/direct.py
    tools/netlab -n 16 --rate 100mbit --delay 25 --raw -- python benchmarks/direct.py --rows 200,400

Each rank draws so many of a million rows of 64 floats. All ranks begin together, and the last one's
time counts. One way is timed after the other: connections whose links one way overflowed are slow
for some time, also for the next. Printed are the medians and quartiles, in ms, and the time of the
bytes that a rank receives, in latencies: what weft decides by (`Load.sends_directly` in
src/weft/sparse/cost.py).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from unittest import mock

import torch
import torch.distributed as dist

import weft
from weft.cli.bench.measure import meet
from weft.sparse import cost
from weft.sparse.link import set_link
from weft.wire.link import MERGE, Link

HEIGHT = 1_000_000
WIDTH = 64
WAYS = {  # algorithm, and latencies of bytes up to which it sends directly
    "auto": ("auto", cost.HELD),
    "doubling": ("doubling", 0.0),
    "round the ring": ("gather", 0.0),
    "directly": ("gather", math.inf),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="400,800,2000", help="of a rank, each in turn")
    parser.add_argument("--latency", type=float, default=25.0, help="of a round, in ms")
    parser.add_argument("--rate", type=float, default=0.1, help="of a host's link, in Gbit/s")
    parser.add_argument("--calls", type=int, default=8, help="of each way; the first is not timed")
    asked = parser.parse_args()

    torch.set_num_threads(1)
    with weft.init(timeout=120) as group:
        set_link(group, Link(asked.latency * 1e-3, 8e-9 / asked.rate, MERGE, 10e-6))
        for count in map(int, asked.rows.split(",")):
            times = timed(group, drawn(group.rank, count), asked.calls)
            if group.rank == 0:
                seconds = (group.size - 1) * count * WIDTH * 4 * 8e-9 / asked.rate
                print(f"{count} rows, {1e3 * seconds / asked.latency:.1f} latencies of bytes")
                for way, each in times.items():
                    low, median, high = statistics.quantiles(each, n=4)
                    print(f"  {way:14} {median:6.0f} ms  {low:.0f}..{high:.0f}", flush=True)


def drawn(rank: int, count: int) -> weft.Rows:
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randperm(HEIGHT, generator=generator)[:count].sort().values
    return weft.Rows(indices, torch.ones(count, WIDTH), HEIGHT)


def timed(group: weft.Group, rows: weft.Rows, calls: int) -> dict[str, list[float]]:
    """The ms of each call of each way, but for the first."""
    times: dict[str, list[float]] = {}
    for way, (algorithm, held) in WAYS.items():
        with mock.patch.object(cost, "HELD", held):
            times[way] = [slowest(group, rows, algorithm) for _ in range(calls)][1:]
    return times


def slowest(group: weft.Group, rows: weft.Rows, algorithm: str) -> float:
    """The ms of the slowest rank."""
    meet(group)
    start = time.perf_counter()
    weft.sparse_all_reduce(rows, algorithm=algorithm)
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return 1e3 * float(seconds)


if __name__ == "__main__":
    main()
