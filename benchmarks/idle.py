"""When, in a call, the link of a host is idle: what a schedule, or busy cores, leave of it.

    tools/netlab -n 8 --per-host 2 --rate 250mbit --raw -- \\
        python benchmarks/idle.py --case identical --link 250mbit
    tools/netlab -n 8 --rate 1gbit --raw -- python benchmarks/idle.py --case full --link 1gbit

A process beside rank 0 reads every millisecond how many bytes the host's interface has sent.
Printed are medians over the calls:

* `before`: milliseconds until a hundredth of the call's bytes has left the host. The ranks open the
  call, tell each other what they have, and make the first sums.
* `after`: milliseconds from when all but a hundredth has left to the end of the call.
* `used`: of what the link could carry in the time between `before` and `after`, the part that left.
"""

from __future__ import annotations

import argparse
import multiprocessing
import operator
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

import weft
from turns import on_ranks, sent
from weft.cli import options
from weft.cli.bench.cases import CASES, indices, values
from weft.cli.bench.measure import meet, tables_of

LITTLE = 0.01  # of the call's bytes


class Count(NamedTuple):
    """The bytes that a network interface had sent at a time."""

    when: float  # seconds, as `time.time`
    sent: int


def watch(pipe: Connection) -> None:
    """Count every millisecond until told to stop, and once more; then send all counts."""
    counts = [Count(time.time(), sent())]
    pipe.send("it has begun, which takes a process some seconds")
    is_told = False
    while not is_told:
        is_told = pipe.poll(1e-3)
        counts.append(Count(time.time(), sent()))
    pipe.send(counts)


time_of = operator.attrgetter("when")


def figures(counts: Sequence[Count], start: float, end: float, room: float) -> list[float]:
    """A call's milliseconds, and what is printed of it.

    Args:
        counts: of all calls.
        start, end: when the call began and ended.
        room: bytes a second that the link could carry.
    """
    first = max(0, bisect_left(counts, start, key=time_of) - 1)
    last = bisect_left(counts, end, key=time_of)
    of_call = counts[first : last + 1]
    begin = of_call[0].sent
    whole = of_call[-1].sent - begin
    used = [each for each in of_call if LITTLE * whole <= each.sent - begin <= whole * (1 - LITTLE)]
    if len(used) < 2:
        raise ValueError("the bytes of a call leave within a millisecond: take a larger case")
    seconds = end - start, used[0].when - start, end - used[-1].when
    rate = (used[-1].sent - used[0].sent) / (used[-1].when - used[0].when)
    return [*(1e3 * each for each in seconds), rate / room]


def rank(arguments: argparse.Namespace) -> str:
    """One rank's program: the table, in Markdown."""
    torch.set_num_threads(1)
    room = options.rate(arguments.link) / 8
    lines = ["| case | ms | before | after | used |", "|---|---|---|---|---|"]
    with weft.init() as group:
        here, there = multiprocessing.get_context("spawn").Pipe()
        watcher = multiprocessing.get_context("spawn").Process(target=watch, args=(there,))
        if group.rank == 0:
            watcher.start()
            there.close()  # so that the end of the watcher ends what waits for it
            here.recv()
        spans = {name: timed(name, arguments, group) for name in arguments.case.split(",")}
        if group.rank == 0:
            here.send(None)
            counts = here.recv()
            watcher.join()
            for name, calls in spans.items():
                found = [figures(counts, start, end, room) for start, end in calls]
                *ms, used = map(statistics.median, zip(*found, strict=True))
                cells = " | ".join([*(f"{each:.0f}" for each in ms), f"{used:.2f}"])
                lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def timed(name: str, arguments: argparse.Namespace, group: weft.Group) -> list[tuple[float, float]]:
    """Beginning and end of each call of a case that counts, as rank 0's `time.time`."""
    case = CASES[name]
    rows = tables_of(case, indices(case, group.rank, 0), values(case, group.rank, 0))
    spans = []
    for number in range(-arguments.warmup, arguments.iters):
        meet(group)
        start = time.time()
        weft.sparse_all_reduce(rows[0], algorithm=arguments.algorithm)
        if number >= 0:
            spans.append((start, time.time()))
    return spans


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", default="identical,zipf", help="of weft bench, by commas")
    parser.add_argument("--link", default="250mbit", help="its speed")
    parser.add_argument("--algorithm", default="auto", help="of weft")
    parser.add_argument("--iters", type=int, default=7, help="calls that count")
    parser.add_argument("--warmup", type=int, default=3, help="calls before those")
    parser.add_argument("--ranks", type=int, default=2, help="without a launcher")
    arguments = parser.parse_args()
    on_ranks(rank, arguments, lambda found, ranks: print(found, flush=True))


if __name__ == "__main__":
    main()
