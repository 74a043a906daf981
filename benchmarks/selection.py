"""Count what a rank of `weft.ddp.TopK` sends, with `total_density` and without, to 1,024 ranks.

    python benchmarks/selection.py
    python benchmarks/selection.py --ranks 1024 --ways total --density 0.2  # an hour, and 12 GB

The ranks are simulated, so the code that runs is weft's own, and nothing depends on the machine.
Each has a tensor of independent normal numbers; k of them are sent, and k are shared. A word has 4
bytes; on average a rank receives what it sends. *mean* and *most* are of the average rank and of
the one that sends most. They include *opening*, the statements of the first opening exchange, whose
size does not depend on k. The bound is Ok-Topk's, 6k words (Li and Hoefler, PPoPP'22).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from unittest import mock

import torch
import typer

import simulated
import weft
from weft.call.opening import opened
from weft.group.group import Group
from weft.sparse import run
from weft.sparse.rate import rate_of, set_rate

LINK = simulated.Link(alpha=20e-6, beta=0.8e-9, work=5e-6)  # 10 Gbit/s: lists are not packed


@contextmanager
def openings() -> Iterator[dict[int, int]]:
    """Bytes that each rank sends in the last opening of a step meanwhile."""
    sent: dict[int, int] = {}

    @contextmanager
    def counted(group: Group, name: str, *given: Any, **more: Any) -> Iterator[Any]:
        before = group.traffic.bytes
        with opened(group, name, *given, **more) as opening:
            if name == "sync_sparsified":
                sent[group.rank] = group.traffic.bytes - before
            yield opening

    with mock.patch.object(run, "opened", counted):
        yield sent


def sent_in_a_step(
    group: Group,
    entries: int,
    density: float,
    total: float | None,
    steps: int,
    opened: dict[int, int],
) -> tuple[int, int, int]:
    """Bytes that this rank sends in the last step, and in its opening; entries of the result."""
    set_rate(group, rate_of(1 / LINK.beta))
    state = weft.ddp.TopK(density, total_density=total, min_numel=1, group=group)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(steps):
        tensor = torch.randn(round(entries / density), generator=generator)
        before = group.traffic.bytes
        weft.sync_sparsified([tensor], state)
    opening = opened.get(group.rank, 0)
    return group.traffic.bytes - before, opening, int(tensor.count_nonzero())


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "8,16,64,256",
    entries: Annotated[
        int, typer.Option(help="k: that a rank sends, and the result has.")
    ] = 40_000,
    density: Annotated[float, typer.Option(help="k over all entries of the tensor.")] = 0.05,
    steps: Annotated[
        int, typer.Option(help="The last is counted; the first has no residuals.")
    ] = 3,
    ways: Annotated[str, typer.Option(help="all, total or plain.")] = "all",
) -> None:
    """Print a line for each number of ranks, with `total_density` and without."""
    torch.set_num_threads(1)
    print(f"# k {entries} of {round(entries / density)} entries; words over k")
    print("ranks  total_density  entries    mean    most  opening KB   took s")
    for count in map(int, ranks.split(",")):
        for total in {"all": (density, None), "total": (density,), "plain": (None,)}[ways]:
            start = time.perf_counter()
            with openings() as opened:
                done = simulated.run(
                    count, LINK, sent_in_a_step, entries, density, total, steps, opened
                )
            sent, opening, found = zip(*done, strict=True)
            words = [each / 4 / entries for each in sent]
            took = time.perf_counter() - start
            print(
                f"{count:5}  {total or '-':>13}  {found[0]:7}  {sum(words) / count:6.2f}  "
                f"{max(words):6.2f}  {max(opening) / 1e3:10.1f}  {took:7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
