"""Time many small tables in one call, and other ways of reducing as many rows.

    python benchmarks/tables.py [--ranks 4] [--rounds 30] [--width 64]  # ranks on this machine
    tools/netlab -n 4 --rate 1gbit -- python benchmarks/tables.py

There are 26 tables, as in a recommender with 26 categorical features: each has 500 tokens a rank,
Zipf-distributed over 1,000,000 rows of `--width` floats. The contenders:

* *list*: all tables in one call;
* *one*: one of the tables;
* *stacked*: one table that has the rows of all, one table's after the other's;
* *tall*: one table of 26 times as many tokens. More of its indices are equal, so its result is
  smaller by a third;
* *26 calls*: a call for each table;
* *torch, 26 calls*: a sparse `torch.distributed.all_reduce` for each table.

Results are checked first: those of the list must equal those of 26 calls bit for bit, and torch's.
All contenders take turns in one run. Times are medians over the rounds, of the slowest rank.

*read* and *written* are the bytes that a rank must move in memory. It reads its own rows and what
it must receive of others' by the bound. It writes its result and, on average, as many bytes for
others as it receives. *copy* is the time in which all ranks at once, each in its own memory, copy
the larger of the two numbers of bytes. No call can be faster than that, but for what the caches
save.
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
from torch import Tensor

import weft
from turns import turns
from weft.sparse import last_call
from weft.testing import processes

TABLES, TOKENS, HEIGHT = 26, 500, 1_000_000

Pair = tuple[Tensor, Tensor]


def table(rank: int, number: int, tokens: int, width: int) -> Pair:
    """Tokens of a Zipf distribution: their rows, with duplicates; whole numbers, added exactly."""
    draw = torch.Generator().manual_seed(1000 * rank + number)
    indices = (HEIGHT ** torch.rand(tokens, generator=draw, dtype=torch.float64)).long() - 1
    return indices, torch.randint(-8, 9, (tokens, width), generator=draw).float()


def coo(rows: Pair) -> Tensor:
    """Rows as a sparse COO tensor."""
    return torch.sparse_coo_tensor(
        rows[0][None], rows[1], (HEIGHT, rows[1].shape[1]), check_invariants=False
    )


Moved = dict[str, tuple[float, float]]
"""The bytes that a call must read and write, by contender."""


def rank(rounds: int, width: int) -> tuple[dict[str, list[float]], dict[str, str], Moved]:
    """One rank's program: times, algorithms, and bytes that a call must move, by contender."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    with weft.init() as group:
        many = [table(group.rank, number, TOKENS, width) for number in range(TABLES)]
        tall = table(group.rank, TABLES, TABLES * TOKENS, width)
        stacked = (
            torch.cat([rows[0] + number * HEIGHT for number, rows in enumerate(many)]),
            torch.cat([rows[1] for rows in many]),
        )
        tensors = [coo(rows) for rows in many]

        def theirs() -> list[Tensor]:
            totals = [tensor.clone() for tensor in tensors]
            for total in totals:
                dist.all_reduce(total)
            return totals

        contenders: dict[str, Callable[[], object]] = {
            "list": lambda: weft.sparse_all_reduce(many),
            "one": lambda: weft.sparse_all_reduce(many[0]),
            "stacked": lambda: weft.sparse_all_reduce(stacked),
            "tall": lambda: weft.sparse_all_reduce(tall),
            "26 calls": lambda: [weft.sparse_all_reduce(rows) for rows in many],
            "torch, 26 calls": theirs,
        }
        listed = weft.sparse_all_reduce(many)
        for rows, mine, total in zip(many, listed, theirs(), strict=True):
            alone = weft.sparse_all_reduce(rows)
            assert torch.equal(mine[0], alone[0]) and torch.equal(mine[1], alone[1])
            assert torch.equal(coo(mine).to_dense(), total.to_dense())
        ran, moved = {}, {}
        given = {"list": stacked, "one": many[0], "stacked": stacked, "tall": tall}
        for name, contender in list(contenders.items()):
            contender()
            record = last_call()
            ran[name] = "" if record is None or name not in given else record.algorithm
            if record is not None and name in given:
                own, result = given[name][1].nbytes, 4 * width * record.union
                moved[name] = (
                    float(own + record.bound_bytes),
                    float(result + record.bound_bytes),
                )
                contenders |= {f"copy {name}": copy(round(max(moved[name])))}
        times = turns(group, rounds, contenders, warmup=2)
    dist.destroy_process_group()
    return times, ran, moved


def copy(nbytes: int) -> Callable[[], object]:
    """A function that copies so many bytes in memory."""
    source, target = torch.ones(2, nbytes, dtype=torch.uint8)
    return lambda: target.copy_(source)


def show(
    times: dict[str, list[float]], ran: dict[str, str], moved: Moved, ranks: int, width: int
) -> None:
    title = f"{TABLES} tables of {TOKENS} tokens, rows of {width} floats, {ranks} ranks"
    table = Table(title=title, title_justify="left")
    for column in ("call", "ran", "ms", "quartiles", "list / this", "MB read", "written", "copy"):
        table.add_column(column, justify="left" if column in ("call", "ran") else "right")
    ours = statistics.median(times["list"])
    for name, each in times.items():
        if name.startswith("copy "):
            continue
        bytes_ = ("", "", "")
        if name in moved:
            took = 1e3 * statistics.median(times[f"copy {name}"])
            bytes_ = *(f"{each / 1e6:.1f}" for each in moved[name]), f"{took:.2f}"
        low, median, high = (1e3 * value for value in statistics.quantiles(each, n=4))
        table.add_row(
            *(name, ran[name], f"{median:.2f}", f"{low:.2f} - {high:.2f}"),
            f"{1e3 * ours / median:.2f}",
            *bytes_,
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=64, help="floats of a row")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        found = rank(arguments.rounds, arguments.width)
        if os.environ["RANK"] == "0":
            show(*found, int(os.environ["WORLD_SIZE"]), arguments.width)
    else:
        found = processes(arguments.ranks, rank, arguments.rounds, arguments.width, timeout=600)[0]
        show(*found, arguments.ranks, arguments.width)


if __name__ == "__main__":
    main()
