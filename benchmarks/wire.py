"""Time weft's group of a process group, and torch.distributed's calls for the same.

    python benchmarks/wire.py [--ranks 4] [--rounds 20]     # ranks on this machine
    tools/netlab -n 4 --rate 1gbit -- python benchmarks/wire.py

It prints three tables. The contenders of each check their results and take turns in one run:

* small messages from each rank to each other rank, into tensors and into receives of a size,
  beside `all_gather`;
* 8 MiB to a neighbour, in chunks of several sizes, beside one piece;
* dense all-reduces, beside `torch.distributed.all_reduce` on a gloo group.

Times are medians over the rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from turns import turns
from weft.group.group import Group, Recv, Send
from weft.group.process_group import connect
from weft.schedules import dense_all_reduce
from weft.testing import processes

MESSAGES = (8, 256, 1024, 4096)
CHUNKS = (16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 8 << 20)
EXCHANGE = 8 << 20
REPEAT = 10  # small exchanges that are timed together
DENSE = (4, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)

Rows = list[list[str]]
Sends = list[Send]
Recvs = list[Recv]


def measure(
    group: Group, rounds: int, contenders: dict[str, Callable[[], None]]
) -> dict[str, float]:
    """Median seconds of each contender, of the slowest rank; they take turns."""
    times = turns(group, rounds, contenders)
    return {name: statistics.median(each) for name, each in times.items()}


def small(group: Group, rounds: int) -> Rows:
    rows = []
    for nbytes in MESSAGES:
        message = torch.full((nbytes,), group.rank, dtype=torch.uint8)
        places = [torch.empty_like(message) for _ in range(group.size)]
        sends = [(peer, message) for peer in group.peers]
        into_places = [(peer, places[peer]) for peer in group.peers]
        sized = [(peer, nbytes) for peer in group.peers]

        def tensors(sends: Sends = sends, recvs: Recvs = into_places) -> None:
            for _ in range(REPEAT):
                heard = group.post(sends, recvs).wait()
                assert [int(each[0]) for each in heard] == group.peers

        def views(sends: Sends = sends, recvs: Recvs = sized) -> None:
            for _ in range(REPEAT):
                pending = group.post(sends, recvs)
                assert [int(each[0]) for each in pending.wait()] == group.peers
                pending.release()

        def theirs(message: torch.Tensor = message, places: list[torch.Tensor] = places) -> None:
            for _ in range(REPEAT):
                dist.all_gather(places, message)

        took = measure(group, rounds, {"tensors": tensors, "sized": views, "torch": theirs})
        us = {name: seconds / REPEAT * 1e6 for name, seconds in took.items()}
        ratio = us["torch"] / us["tensors"]
        rows.append([str(nbytes), *(f"{each:.0f}" for each in us.values()), f"{ratio:.2f}"])
    return rows


def exchange(group: Group, rounds: int) -> Rows:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    data = torch.full((EXCHANGE,), group.rank, dtype=torch.uint8)
    place = torch.empty_like(data)

    def swap(chunk: int) -> None:
        posts = [
            group.post([(after, out)], [(before, into)])
            for out, into in zip(data.split(chunk), place.split(chunk), strict=True)
        ]
        for posted in posts:
            posted.wait()
        assert int(place[0]) == int(place[-1]) == before

    took = measure(group, rounds, {str(chunk): lambda chunk=chunk: swap(chunk) for chunk in CHUNKS})
    whole = took[str(EXCHANGE)]
    return [
        [
            f"{chunk >> 10} KiB",
            f"{took[str(chunk)] * 1e3:.1f}",
            f"{EXCHANGE * 8 / took[str(chunk)] / 1e9:.2f}",
            f"{whole / took[str(chunk)]:.2f}",
        ]
        for chunk in CHUNKS
    ]


def dense(group: Group, rounds: int) -> Rows:
    rows = []
    for nbytes in DENSE:
        data = torch.ones(nbytes // 4)

        def ours(data: torch.Tensor = data) -> None:
            dense_all_reduce(group, data.fill_(1), "sum").wait()
            assert int(data[-1]) == group.size

        def theirs(data: torch.Tensor = data) -> None:
            dist.all_reduce(data.fill_(1))
            assert int(data[-1]) == group.size

        took = measure(group, min(rounds, 10), {"weft": ours, "torch": theirs})
        rows.append(
            [
                f"{nbytes / 1024:g} KiB",
                f"{took['weft'] * 1e3:.2f}",
                f"{took['torch'] * 1e3:.2f}",
                f"{took['torch'] / took['weft']:.2f}",
            ]
        )
    return rows


def rank(rounds: int) -> list[Rows]:
    """One rank's program."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    store = dist.PrefixStore("wire", dist.distributed_c10d._get_default_store())
    with connect(store, dist.get_rank(), dist.get_world_size(), 120.0) as group:
        tables = [small(group, rounds), exchange(group, rounds), dense(group, rounds)]
    dist.destroy_process_group()
    return tables


def show(tables: list[Rows], ranks: int) -> None:
    console = Console()
    titles = (
        (
            f"each of {ranks} to each",
            ("bytes", "into tensors us", "sized us", "all_gather us", "ratio"),
        ),
        ("8 MiB to a neighbour", ("chunk", "ms", "Gbit/s", "ratio to one piece")),
        (f"dense all-reduce of {ranks}", ("size", "weft ms", "gloo ms", "ratio")),
    )
    for (title, columns), rows in zip(titles, tables, strict=True):
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        tables = rank(arguments.rounds)
        if os.environ["RANK"] == "0":
            show(tables, int(os.environ["WORLD_SIZE"]))
    else:
        tables = processes(arguments.ranks, rank, arguments.rounds, timeout=600)[0]
        show(tables, arguments.ranks)


if __name__ == "__main__":
    main()
