"""Time a meeting of ranks of this host, and an exchange of the same bytes by messages.

    python benchmarks/meeting.py [--ranks 4] [--rounds 15]

It prints two tables. The first has, for some lengths of a message, the time that a rank's process
is busy for a meeting and for an exchange of each with each, the time that passes, and the ratio of
both. They take turns in the same processes; figures are medians over the rounds of the rank that
has the most.

The second has how busy a rank is that waits two seconds for another one to come to a meeting, while
other processes take all cores, in percent of that time: it must be below 5.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from weft.testing import ranks_as_processes
from weft.wire.tcp import wire as tcp

LENGTHS = (0, 64, 1504, 65536)
REPEAT = 300  # that are timed together
LATE = 2.0  # seconds that the others wait for rank 0
LIMIT = 5.0  # percent of them that one may be busy

Figures = list[float]


def per_call(call: Callable[[], None]) -> tuple[float, float]:
    """Microseconds of one call: that this process is busy, and that pass."""
    busy, passed = time.process_time(), time.perf_counter()
    for _ in range(REPEAT):
        call()
    scale = 1e6 / REPEAT
    return (time.process_time() - busy) * scale, (time.perf_counter() - passed) * scale


def costs(wire: tcp.TcpWire, rounds: int) -> list[Figures]:
    """For each length: busy and passed of a meeting, then of an exchange, medians of this rank."""
    ranks = [*range(wire.size)]
    peers = [rank for rank in ranks if rank != wire.rank]
    rows = []
    for length in LENGTHS:
        message = bytes([wire.rank]) * length
        sent = torch.full((length,), wire.rank, dtype=torch.uint8)

        def meet(message: bytes = message) -> None:
            messages = wire.meet(message, ranks).wait(60.0)
            assert messages[-1] == bytes([wire.size - 1]) * len(message)

        def exchange(sent: torch.Tensor = sent) -> None:
            sends = [(peer, sent) for peer in peers]
            pending = wire.post(sends, [(peer, len(sent)) for peer in peers])
            messages = pending.wait(60.0)
            assert len(messages[-1]) == len(sent)
            pending.release()

        found: list[list[float]] = []
        for _ in range(rounds):
            meet()
            found.append([*per_call(meet), *per_call(exchange)])
        rows.append([statistics.median(each) for each in zip(*found, strict=True)])
    return rows


def busy_while_late(wire: tcp.TcpWire) -> float:
    """Percent of the wait for rank 0 that this rank is busy."""
    ranks = [*range(wire.size)]
    for _ in range(50):
        wire.meet(b"", ranks).wait(60.0)
    if wire.rank == 0:
        time.sleep(LATE)
    busy = time.process_time()
    wire.meet(b"", ranks).wait(60.0)
    return (time.process_time() - busy) / LATE * 100


def table(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> Table:
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    run = ranks_as_processes(tcp.make, limit=600.0)
    by_rank = run(arguments.ranks, functools.partial(costs, rounds=arguments.rounds))
    rows = []
    for length, of_ranks in zip(LENGTHS, zip(*by_rank, strict=True), strict=True):
        most = [max(each) for each in zip(*of_ranks, strict=True)]
        ratio = most[2] / most[0]
        rows.append([str(length), *(f"{each:.0f}" for each in most), f"{ratio:.1f}"])
    columns = ("bytes", "meeting busy us", "passed us", "exchange busy us", "passed us", "ratio")
    console = Console()
    console.print(table(f"{arguments.ranks} ranks of this host", columns, rows))
    busy_loop = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(busy_loop) for _ in range(os.cpu_count() or 1)]
    try:
        found = run(arguments.ranks, busy_while_late)
    finally:
        for each in others:
            each.kill()
            each.wait()
    waits = [[str(rank), f"{busy:.2f}", f"{LIMIT:g}"] for rank, busy in enumerate(found) if rank]
    title = f"a wait of {LATE:g} s while all cores are taken"
    console.print(table(title, ("rank", "busy %", "limit %"), waits))


if __name__ == "__main__":
    main()
