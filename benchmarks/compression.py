"""Train a language model with compressed gradients: its loss, and the time and bytes of a step.

    python benchmarks/compression.py                   # 4 ranks here, 1,000 steps: 20 minutes
    python benchmarks/compression.py --seed 1 --way "TopK 1 %"
    tools/netlab -n 4 --rate 100mbit --raw -- python benchmarks/compression.py --steps 40

An LSTM (5.2 million parameters) predicts the next word of the source of the Python standard
library. The ways are DistributedDataParallel on gloo, PyTorch's PowerSGD, and `weft.ddp.TopK` with
1 % and 0.1 % of the entries. With one seed all begin with the same weights and get the same
batches. The optimizer is SGD with a momentum of 0.9; the learning rate rises for some steps and
then falls to zero.

The loss is that of text which is not trained on, in nats a word; it depends neither on the link nor
on the load. Milliseconds are the median of the second half of the steps, of the slowest rank, with
the optimizer. KB are what left a rank's network interface in a step, of the rank that sent most:
under netlab each rank has one, here nothing leaves.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

import weft
from turns import on_ranks, sent

BATCH, LENGTH, WORDS, WIDTH = 4, 16, 8_000, 448
BLOCK, HELD_OUT = 2_000, 25  # words; one block of so many is not trained on
TESTED = 128  # sequences of each rank
PLAIN = 10  # steps before PowerSGD begins


@dataclass(frozen=True)
class Way:
    """A way to reduce gradients.

    Attributes:
        state: makes the state of the hook; None: there is none.
        hook: the communication hook; None: DistributedDataParallel without a hook.
        rate: the highest learning rate. With 5 the loss of one seed of PowerSGD stayed high.
    """

    state: Callable[[], Any] | None = None
    hook: Any = None
    rate: float = 4.0


def power_sgd(rank: int) -> Way:
    # as its documentation has it: plain for some steps, since the first gradients are large
    return Way(
        lambda: power.PowerSGDState(None, rank, start_powerSGD_iter=PLAIN), power.powerSGD_hook
    )


def top_k(density: float, **settings: Any) -> Way:
    return Way(lambda: weft.ddp.TopK(density, **settings), weft.ddp.topk_hook, 5.0)


WAYS = {
    "dense": Way(),
    "PowerSGD, rank 4": power_sgd(4),
    "TopK 1 %": top_k(0.01),
    "TopK 1 %, bfloat16": top_k(0.01, wire_dtype=torch.bfloat16),
    "TopK 0.1 %": top_k(0.001),
    "TopK 0.1 %, no feedback": top_k(0.001, error_feedback=False),
}


class Model(nn.Module):
    """An LSTM language model; the input and the output layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(WORDS))
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.words(words[:, :-1]))
        scores = hidden @ self.words.weight.t() + self.bias
        return nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def text() -> tuple[Tensor, Tensor]:
    """The text to train on, and the held-out text, as numbers; all rare words are one word."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = re.findall(r"\w+", " ".join(file.read_text("utf-8", "replace") for file in files))
    counted = sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))
    numbers = {word: number for number, (word, _) in enumerate(counted)}
    every = torch.tensor([numbers[word] for word in words]).clamp_(max=WORDS - 1)
    blocks = every[: len(every) // BLOCK * BLOCK].view(-1, BLOCK)
    held = torch.arange(len(blocks)) % HELD_OUT == 0
    return blocks[~held].flatten(), blocks[held].flatten()


def batch(words: Tensor, generator: torch.Generator, size: int) -> Tensor:
    starts = torch.randint(len(words) - LENGTH - 1, (size,), generator=generator)
    return words[starts[:, None] + torch.arange(LENGTH + 1)]


def of_ranks(value: float, op: Any) -> float:
    told = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(told, op)
    return told.item()


def trained(way: Way, given: argparse.Namespace, words: Tensor, held: Tensor) -> list[float]:
    """Train; the loss of the held-out text, milliseconds and KB of a step."""
    torch.manual_seed(given.seed)
    # of several buckets PowerSGD's calls meet in another order on each rank, and gloo ends the
    # process: "Received data size doesn't match expected size"
    model = DistributedDataParallel(Model(), gradient_as_bucket_view=True, bucket_cap_mb=1000)
    if way.hook is not None:
        model.register_comm_hook(way.state(), way.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    own = torch.Generator().manual_seed(dist.get_rank() + dist.get_world_size() * given.seed)
    took: list[float] = []
    before = 0
    for step in range(given.steps):
        if step == given.steps // 2:
            before = sent()
            took.clear()
        began = time.perf_counter()
        rise = min(1.0, (step + 1) / given.rise)
        optimizer.param_groups[0]["lr"] = way.rate * rise * (1 - step / given.steps)
        optimizer.zero_grad()
        model(batch(words, own, BATCH)).backward()
        optimizer.step()
        took.append(of_ranks(time.perf_counter() - began, dist.ReduceOp.MAX) * 1e3)
    size = of_ranks(sent() - before, dist.ReduceOp.MAX) / len(took) / 1e3
    tests = torch.Generator().manual_seed(99 + dist.get_rank())
    with torch.no_grad():
        loss = statistics.mean(
            model.module(batch(held, tests, 32)).item() for _ in range(TESTED // 32)
        )
    return [of_ranks(loss, dist.ReduceOp.AVG), statistics.median(took), size]


def rank(given: argparse.Namespace) -> None:
    """One rank's program."""
    torch.set_num_threads(1)
    words, held = text()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    with weft.init():
        for name in given.way or WAYS:
            loss, took, size = trained(WAYS[name], given, words, held)
            if dist.get_rank() == 0:
                print(f"{name:26}{loss:8.3f}{took:10.1f} ms{size:12,.0f} KB", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="a launcher's go before it")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rise", type=int, default=50, help="steps until the rate is the highest")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--way", action="append", choices=WAYS, help="else all")
    on_ranks(rank, parser.parse_args(), lambda found, ranks: None)


if __name__ == "__main__":
    main()
