"""Time models under DistributedDataParallel on backend cpu:weft and on gloo; check gradients first.

    python benchmarks/models.py [--ranks 4] [--rounds 20] [--model dense]
    tools/netlab -n 4 --rate 1gbit -- python benchmarks/models.py

Each model has the same weights and batches on both backends, which take turns in one run. `sparse`
is the model of `weft demo`: two tables of 56,000 rows of 64 floats. In a step each rank looks up
2,048 words, drawn from a Zipf distribution, each with a context word and 5 random words, drawn by
frequency to the power 3/4. `dense` is a perceptron of 2.1 million parameters. In the first step the
gradients of the two backends are compared.

Times are medians over the rounds, of the slowest rank: of a step (forward and backward, with its
all-reduces), of the same step without communication (`no_sync`), and of the all-reduces of its
gradients alone.

gloo has one thread a group here: with two, its default, the step of `sparse` may end the process by
a defect of torch's (docs/ddp.md). `--threads 2` times it nevertheless, and starts all ranks again
where that happens; it says how often.

Goals: dense at least as fast as gloo (within 5 %), sparse at least twice as fast.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from weft.testing import RankFailure, gloo_of_one_thread, processes

BACKENDS = ("gloo", "cpu:weft")
TIMED = ("step", "no_sync", "all_reduce")
VOCABULARY, WIDTH, WORDS, NEGATIVES = 56_000, 64, 2048, 5
TRIES = 10
SHARE = 0.05  # by which dense may seem slower where it is not: the noise of a quiet machine


class SkipGram(nn.Module):
    """The demo's model: the dot products of words and of others, true and random."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.context = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        scores = torch.bmm(self.context(others), self.word(words).unsqueeze(2)).squeeze(2)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1.0
        loss = nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        return loss / len(words)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs)
        return out.square().mean()


def sparse_batch(rank: int, step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    draws = torch.rand(WORDS, 2 + NEGATIVES, generator=generator)
    # the k-th word of all is drawn with a probability of 1/k; for the noise, of k to the power -3/4
    words = draws[:, :2].mul(math.log(VOCABULARY)).exp()
    noise = draws[:, 2:].mul(VOCABULARY**0.25 - 1).add(1).pow(4)
    both = torch.cat([words, noise], dim=1).long().clamp(1, VOCABULARY) - 1
    return both[:, 0], both[:, 1:]


def dense_batch(rank: int, step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(32, 512, generator=generator),)


MODELS: dict[str, tuple[type[nn.Module], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "dense": (Perceptron, dense_batch),
    "sparse": (SkipGram, sparse_batch),
}


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


def slowest(act: Callable[[], object]) -> float:
    """Seconds that the slowest rank takes."""
    dist.barrier()
    start = time.perf_counter()
    act()
    took = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def reduce_all(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    works = [dist.all_reduce(each, group=group, async_op=True) for each in tensors]
    for work in works:
        work.wait()


def rank(
    names: list[str], rounds: int, threads: int
) -> list[tuple[str, dict[str, dict[str, float]]]]:
    """One rank: for each model the median seconds of what is timed, on each backend."""
    dist.init_process_group("cpu:weft")
    me = dist.get_rank()
    gloo = gloo_of_one_thread() if threads == 1 else "gloo"
    kinds = {"gloo": gloo, "cpu:weft": "weft"}
    groups = {name: dist.new_group(backend=kinds[name]) for name in BACKENDS}
    results = []
    for name in names:
        kind, batch = MODELS[name]
        torch.manual_seed(0)
        model = kind()
        models = {
            backend: DistributedDataParallel(copy.deepcopy(model), process_group=group)
            for backend, group in groups.items()
        }
        times: dict[str, dict[str, list[float]]] = {
            what: {backend: [] for backend in BACKENDS} for what in TIMED
        }
        for step in range(rounds + 2):
            inputs = batch(me, step)

            def train(wrapped: nn.Module, inputs: tuple[Tensor, ...] = inputs) -> None:
                wrapped(*inputs).backward()

            # what comes first finds the caches and the allocator as the other left them
            turns = list(models.items())[:: -1 if step % 2 else 1]
            for backend, wrapped in turns:
                wrapped.zero_grad()
                times["step"][backend].append(slowest(functools.partial(train, wrapped)))
            if step == 0:
                for left, right in zip(*map(gradients, models.values()), strict=True):
                    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-7)
            for backend, wrapped in turns:
                wrapped.zero_grad()
                with wrapped.no_sync():
                    act = functools.partial(train, wrapped)
                    times["no_sync"][backend].append(slowest(act))
                given = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
                if name == "dense":  # as DistributedDataParallel does
                    given = [torch.cat([each.view(-1) for each in given])]
                act = functools.partial(reduce_all, given, groups[backend])
                times["all_reduce"][backend].append(slowest(act))
        medians = {
            what: {backend: statistics.median(each[2:]) for backend, each in found.items()}
            for what, found in times.items()
        }
        results.append((name, medians))
    dist.destroy_process_group()
    return results


def again_where_it_dies(ranks: int, *arguments: Any) -> tuple[Any, int]:
    """What rank 0 returns, and how often the ranks had to be started again."""
    died = 0
    while True:
        try:
            return processes(ranks, rank, *arguments, timeout=600.0)[0], died
        except RankFailure:
            if died == TRIES:
                raise
            died += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", choices=sorted(MODELS), action="append")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1, help="of a gloo group")
    given = parser.parse_args()
    names = given.model or list(MODELS)
    died = 0
    if "RANK" in os.environ:  # in a netlab, or under torchrun: this process is a rank
        first = os.environ["RANK"] == "0"
        results = rank(names, given.rounds, given.threads)
    else:
        first = True
        results, died = again_where_it_dies(given.ranks, names, given.rounds, given.threads)
    if not first:
        return
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    table = Table("model", "", "gloo, ms", "cpu:weft, ms", "ratio", "goal", title=f"load {load}")
    for name, medians in results:
        for what in TIMED:
            ours, theirs = medians[what]["cpu:weft"], medians[what]["gloo"]
            ratio, verdict = theirs / ours, ""
            if what == "step":
                goal = 2.0 if name == "sparse" else 1.0
                met = ratio >= goal * (1 - SHARE * (name == "dense"))
                verdict = f"at least {goal:g}: {'met' if met else 'missed'}"
            row = f"{theirs * 1e3:.1f}", f"{ours * 1e3:.1f}", f"{ratio:.2f}"
            table.add_row(name, what, *row, verdict)
    Console().print(table)
    if died:
        print(f"started {died + 1} times: a process died of torch's defect {died} times")


if __name__ == "__main__":
    main()
