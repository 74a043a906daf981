"""Count what the algorithm `holders` sends, over the bound: on average and at the worst rank.

    python benchmarks/holders.py

It prints the table of notes/holders.md. The ranks are threads, so it needs no network, and the load
of the machine changes nothing. All columns but *indices* are bytes of values over the bound:

* *average*: what the average rank sends;
* *worst*: the most that a rank sends or receives;
* *equally*: the same, if each rank that has a row were chosen as its holder equally often;
* *least*: the least that any schedule can reach for the worst rank. A rank must send all its rows,
  and receive all rows that others have;
* *indices*: bytes of the index lists, in percent of the bound.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor

import weft
from weft.base.memory import Lease, Pool
from weft.bootstrap.outcome import results
from weft.group.group import Group
from weft.group.pending import Pending
from weft.sparse import codec
from weft.sparse.bound import rows_of_average, rows_of_busiest
from weft.sparse.rate import rate_of, set_rate
from weft.sparse.stream import SUMS, VALUES
from weft.testing import threads
from weft.wire import Recv, Send

T = TypeVar("T")

HEIGHT, WIDTH = 1_000_000, 64
GIGABIT = rate_of(125e6)  # at which index lists are packed


def zipf(tokens: int, draw: torch.Generator) -> Tensor:
    """The distinct ones among tokens of a Zipf distribution over all rows."""
    return ((HEIGHT ** torch.rand(tokens, generator=draw)).long() - 1).unique()


def index_sets(case: str, ranks: int) -> list[Tensor]:
    """What each rank has."""
    draw, every = torch.Generator().manual_seed(0), range(ranks)
    if case == "uniform":
        return [torch.randint(HEIGHT, (10_000,), generator=draw).unique() for _ in every]
    if case == "zipf":
        return [zipf(50_000, draw) for _ in every]
    if case == "identical":
        return [torch.randint(HEIGHT, (10_000,), generator=draw).unique()] * ranks
    if case == "one has most":
        return [zipf(50_000 if rank == 1 else 2000, draw) for rank in every]
    if case == "one to P":
        return [zipf(50_000 * (rank + 1) // ranks, draw) for rank in every]
    if case == "half have all":
        return [torch.arange(10_000 if rank < ranks // 2 else 0) for rank in every]
    if case == "every other has all":
        return [torch.arange(10_000 if rank % 2 else 0) for rank in every]
    assert case == "one has all"
    return [torch.arange(16_000) if rank == 0 else torch.arange(rank, 16_000, 8) for rank in every]


@contextmanager
def packed_lists() -> Iterator[Counter[int]]:
    """Bytes of the index lists that ranks pack meanwhile, by what `id` says of their memory.

    A list goes to every peer.
    """
    pack, found = codec.pack, Counter[int]()

    def counted(indices: Tensor, memory: Pool, *, gaps: bool) -> Lease:
        lease = pack(indices, memory, gaps=gaps)
        found[id(memory)] += lease.tensor.numel()
        return lease

    with mock.patch.object(codec, "pack", counted):
        yield found


def moved(group: Group, indices: Tensor) -> tuple[int, int, int]:
    """Bytes of values that this rank sent, and received; what `packed_lists` has of it."""
    set_rate(group, GIGABIT)
    values, post = [0, 0], group.post

    def posted(sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0) -> Pending:
        if channel in (SUMS, VALUES):
            values[0] += sum(tensor.nbytes for _, tensor in sends)
            values[1] += sum(one if isinstance(one, int) else one.nbytes for _, one in recvs)
        return post(sends, recvs, channel)

    rows = weft.Rows(indices, torch.ones(len(indices), WIDTH), HEIGHT)
    with mock.patch.object(group, "post", posted):
        weft.sparse_all_reduce(rows, algorithm="holders")
    return values[0], values[1], id(group.memory)


def on_hosts(ranks: int, program: Callable[[Group], T]) -> list[T]:
    """Run a program on ranks of which each has a host of its own."""
    groups = threads.group(ranks, hosts=[f"host {rank}" for rank in range(ranks)])
    return results(threads.on_groups(groups, program), "threads")


def line(case: str, ranks: int) -> str:
    sets = index_sets(case, ranks)
    total, union = sum(map(len, sets)), len(torch.cat(sets).unique())
    bound = rows_of_average(total, union, ranks) * WIDTH * 4
    with packed_lists() as lists:
        done = on_hosts(ranks, lambda group: moved(group, sets[group.rank]))
    sent, received, memory = zip(*done, strict=True)
    algorithm = importlib.import_module("weft.sparse.algorithms.holders")
    with mock.patch.object(algorithm, "weights", lambda slots, union: [1] * len(slots)):
        equally = on_hosts(ranks, lambda group: max(moved(group, sets[group.rank])[:2]))
    elsewhere = [
        len(torch.cat([one for rank, one in enumerate(sets) if rank != me]).unique())
        for me in range(ranks)
    ]
    least = rows_of_busiest([*map(len, sets)], elsewhere, union) * WIDTH * 4 / bound
    figures = (sum(sent) / ranks, max(*sent, *received), max(equally))
    average, worst, chosen_equally = (figure / bound for figure in figures)
    indices = (ranks - 1) * sum(lists[each] for each in memory) / ranks / bound
    return (
        f"| {case} | {ranks} | {total // ranks} | {union} | {average:.4f} | {worst:.3f} "
        f"| {chosen_equally:.3f} | {least:.3f} | {100 * indices:.2f} % |"
    )


if __name__ == "__main__":
    print("| case | ranks | k̄ | U | average | worst | equally | least | indices |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in ("uniform", "zipf", "identical"):
        for ranks in (3, 4, 8):
            print(line(case, ranks), flush=True)
    for case in (
        "one has most",
        "one to P",
        "one has all",
        "half have all",
        "every other has all",
    ):
        for ranks in (4, 8):
            print(line(case, ranks), flush=True)
