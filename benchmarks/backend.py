"""Models under DistributedDataParallel, on backend cpu:weft beside gloo: step times, checked first.

    python benchmarks/backend.py [--ranks 4] [--rounds 20] [--model dense]
    tools/netlab -n 4 --rate 1gbit -- python benchmarks/backend.py

The same model, weights and batches on a group of each backend, in turns in the same run. `sparse`
is like the demo's: two embedding tables of 50,000 rows of 64 floats, looked up at Zipf-distributed
words; `dense` is a perceptron of 2.1 million parameters. Before it is timed, each model's gradients
are compared between the backends. Times are medians of the slowest rank's.

The goals: dense no slower than gloo, sparse at least twice as fast.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from weft.testing import processes

BACKENDS = ("gloo", "cpu:weft")
VOCABULARY, WIDTH, WORDS, NEGATIVES = 50_000, 64, 4096, 5
SHARE = 0.05  # by which dense may seem slower where it is not: the noise of a quiet machine


class SkipGram(nn.Module):
    """The demo's model: the dot products of words and of others, true and random."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.context = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        scores = torch.bmm(self.context(others), self.word(words).unsqueeze(2))
        return nn.functional.softplus(scores).mean()


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
    ranks = torch.rand(WORDS, 2 + NEGATIVES, generator=generator).mul(
        torch.log(torch.tensor(float(VOCABULARY)))
    )
    words = ranks.exp().long().clamp(max=VOCABULARY) - 1  # Zipf's law, exponent 1
    return words[:, 0], words[:, 1:]


def dense_batch(rank: int, step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(32, 512, generator=generator),)


MODELS: dict[str, tuple[type[nn.Module], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "dense": (Perceptron, dense_batch),
    "sparse": (SkipGram, sparse_batch),
}


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


def rank(names: list[str], rounds: int) -> list[tuple[str, dict[str, float]]]:
    """One rank: for each model the median seconds of a step on each backend."""
    dist.init_process_group("cpu:weft")
    me = dist.get_rank()
    groups = {name: dist.new_group(backend=name.removeprefix("cpu:")) for name in BACKENDS}
    results = []
    for name in names:
        kind, batch = MODELS[name]
        torch.manual_seed(0)
        model = kind()
        models = {
            backend: DistributedDataParallel(copy.deepcopy(model), process_group=group)
            for backend, group in groups.items()
        }
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for step in range(rounds + 2):
            inputs = batch(me, step)
            for backend, wrapped in models.items():
                wrapped.zero_grad()
                dist.barrier()
                start = time.perf_counter()
                wrapped(*inputs).backward()
                took = torch.tensor([time.perf_counter() - start])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[backend].append(took.item())
            if step == 0:
                for left, right in zip(*map(gradients, models.values()), strict=True):
                    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-7)
        medians = {key: statistics.median(each[2:]) for key, each in times.items()}
        results.append((name, medians))
    dist.destroy_process_group()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", choices=sorted(MODELS), action="append")
    given = parser.parse_args()
    names = given.model or list(MODELS)
    if "RANK" in os.environ:  # in a netlab, or under torchrun: this process is a rank
        first = os.environ["RANK"] == "0"
        results = rank(names, given.rounds)
    else:
        first = True
        results = processes(given.ranks, rank, names, given.rounds, timeout=600.0)[0]
    if not first:
        return
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    table = Table("model", "gloo, ms", "cpu:weft, ms", "ratio", "goal", title=f"load {load}")
    for name, seconds in results:
        ours, theirs = seconds["cpu:weft"], seconds["gloo"]
        ratio, goal = theirs / ours, 2.0 if name == "sparse" else 1.0
        met = ratio >= goal * (1 - SHARE * (name == "dense"))
        verdict = f"at least {goal:g}: {'met' if met else 'missed'}"
        table.add_row(name, f"{theirs * 1e3:.1f}", f"{ours * 1e3:.1f}", f"{ratio:.2f}", verdict)
    Console().print(table)


if __name__ == "__main__":
    main()
