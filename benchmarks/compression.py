"""A language model trained with compressed gradients: loss, time and bytes of a step, side by side.

    tools/netlab -n 4 --rate 100mbit --raw -- python benchmarks/compression.py --steps 300
    python benchmarks/compression.py --ranks 4 --steps 20 [--contender topk] [--width 320]

A transformer (5.7 million parameters) predicts the next word of the demo's text, the source of the
Python standard library. Each contender begins with the same weights, and sees the same batches:
DistributedDataParallel on gloo, PyTorch's PowerSGD, and `weft.ddp.TopK` with 1 % and 0.1 % of the
entries, with and without error feedback. The loss is of text that no rank trained on, after so many
steps, in nats a word. Times are of a step with its optimizer, the median of the slowest rank's.
Bytes are those that left a rank's network interface, in a step, and so are only told under netlab,
where each rank has one of its own. Prints the table of docs/compression.md.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

import weft
from turns import on_ranks
from weft.cli.demo.text import read

BATCH, LENGTH, WORDS = 8, 32, 10_000
HELD_OUT = 40_000  # words, of which as many batches are tested as `TESTED`
TESTED = 16
PLAIN = 10  # steps before PowerSGD begins
Register = Callable[[DistributedDataParallel], object]


def top_k(model: DistributedDataParallel, **settings: object) -> None:
    model.register_comm_hook(weft.ddp.TopK(**settings), weft.ddp.topk_hook)


def power_sgd(model: DistributedDataParallel, rank: int) -> None:
    # as its documentation has it: plain for some steps, since the first gradients are large
    state = power.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=PLAIN)
    model.register_comm_hook(state, power.powerSGD_hook)


REGISTER: dict[str, Register] = {
    "dense": lambda model: None,
    "PowerSGD, rank 1": functools.partial(power_sgd, rank=1),
    "PowerSGD, rank 4": functools.partial(power_sgd, rank=4),
    "topk 1 %": functools.partial(top_k, density=0.01),
    "topk 0.1 %": functools.partial(top_k, density=0.001),
    "topk 1 %, no feedback": functools.partial(top_k, density=0.01, error_feedback=False),
    "topk 0.1 %, no feedback": functools.partial(top_k, density=0.001, error_feedback=False),
}


class Transformer(nn.Module):
    """Two blocks, causal; the table of words is that of the output, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        blocks = [
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in "ab"
        ]
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        scores = self.norm(hidden) @ self.words.weight.t()
        return nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def batch(text: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


def sent() -> int:
    """Bytes that left this rank's own interface so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def train(
    model: nn.Module,
    register: Register,
    text: Tensor,
    arguments: argparse.Namespace,
    bucket: float | None = None,
) -> list[str]:
    """Train one contender: loss, milliseconds and kilobytes of a step."""
    ours = DistributedDataParallel(
        copy.deepcopy(model), gradient_as_bucket_view=True, bucket_cap_mb=bucket
    )
    register(ours)
    optimizer = torch.optim.Adam(ours.parameters(), lr=arguments.rate)
    own = text[HELD_OUT:].tensor_split(dist.get_world_size())[dist.get_rank()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    counts = "NETLAB_HOST" in os.environ
    # the steps that are measured: behind what a contender does at first
    last = max(1, min(arguments.steps // 2, arguments.steps - PLAIN - 2))
    seconds, before = [], 0
    for step in range(arguments.steps):
        if step == arguments.steps - last:
            before = sent() if counts else 0
        words = batch(own, generator)
        start = time.perf_counter()
        optimizer.zero_grad()
        ours(words).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    bytes_ = (sent() - before) / last if counts else 0.0
    tested = torch.Generator().manual_seed(99)
    with torch.no_grad():
        losses = [ours.module(batch(text[:HELD_OUT], tested)).item() for _ in range(TESTED)]
    told = torch.tensor([statistics.median(seconds[-last:]), bytes_], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    took, most = told.tolist()
    size = f"{most / 1e3:,.0f}" if counts else "-"
    return [f"{statistics.mean(losses):.3f}", f"{took * 1e3:,.0f}", size]


def rank(arguments: argparse.Namespace) -> list[list[str]]:
    """One rank's program."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    corpus = read([], min_count=1, ranks=dist.get_world_size())
    text = torch.from_numpy(corpus.tokens).long().clamp_(max=WORDS - 1)  # rarer ones are one word
    torch.manual_seed(0)
    model = Transformer(arguments.width)
    rows = []
    with weft.init() as wire:
        for name, register in REGISTER.items():
            if arguments.contender in name:
                # of several buckets PowerSGD's calls meet in another order on each rank, and gloo
                # ends the process: "Received data size doesn't match expected size"
                bucket = 1000.0 if "PowerSGD" in name else None
                rows.append([name, *train(model, register, text, arguments, bucket)])
                if wire.rank == 0:
                    print(*rows[-1], flush=True)
    dist.destroy_process_group()
    return rows


def show(rows: list[list[str]], ranks: int) -> None:
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(
        f"{ranks} ranks, load {load}\n\n| way | loss | ms a step | KB a step |\n|---|---|---|---|"
    )
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--contender", default="", help="those whose names have this in them")
    on_ranks(rank, parser.parse_args(), show)


if __name__ == "__main__":
    main()
