"""Time trainings over backend cpu:weft and over gloo: DDP, FSDP2, DTensor, and DCP's checkpoints.

    python benchmarks/trainings.py [--ranks 4] [--rounds 7] [--way ddp,fsdp2]
    tools/netlab -n 4 --rate 1gbit --raw -- python benchmarks/trainings.py

Over both backends the same weights are trained on the same batches, in turns in one run, with
nothing of weft's in the model. It is a perceptron of 25 MB but for `sparse`:

* `ddp`: DistributedDataParallel;
* `sparse`: the same with the model of `weft demo`: two tables of 56,000 rows of 64 floats, in which
  a step of a rank looks up 2,048 words of a Zipf distribution, with their context and 5 words each
  that are drawn by frequency to the power 3/4. gloo has one thread there: with two, its default,
  the process may end by a defect of torch's (docs/ddp.md);
* `fsdp2`: `fully_shard` of each layer, and of the whole;
* `dtensor`: pairs of layers cut by columns and by rows (`parallelize_module`);
* `dcp`: a checkpoint of the `fsdp2` model is written to a folder in memory, and read again.

The losses of a way must be the same over both backends, to rounding, and go down. Times are of a
step (for `dcp` of a checkpoint): medians of the slowest rank, and the CPU time of the average one.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from turns import on_ranks
from weft.testing import gloo_of_one_thread

WIDTH, LAYERS = 1024, 6
BATCH = 32  # samples of a rank; of `dtensor`, whose ranks share them, of all
VOCABULARY, COLUMNS, WORDS, NEGATIVES = 56_000, 64, 2048, 5
STEPS = 3  # in a turn

Step = Callable[[], float]
"""Takes a step; its loss, averaged over the ranks."""


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers)


def training(model: nn.Module, loss_of: Callable[[], Tensor], rate: float) -> Step:
    """Steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        return mean.item()

    return step


def to_give_back(model: nn.Module, seed: int) -> Step:
    """A training in which a model learns to give back what it gets."""
    draw = torch.Generator().manual_seed(seed)
    batch = torch.randn(BATCH, WIDTH, generator=draw).tanh()
    return training(model, lambda: (model(batch) - batch).square().mean(), 20.0)


def ddp(group: dist.ProcessGroup) -> Step:
    return to_give_back(DistributedDataParallel(perceptron(), process_group=group), group.rank())


class SkipGram(nn.Module):
    """The model of `weft demo`: the dot products of words and of others, true and random."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(VOCABULARY, COLUMNS, sparse=True)
        self.context = nn.Embedding(VOCABULARY, COLUMNS, sparse=True)

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        scores = torch.bmm(self.context(others), self.word(words).unsqueeze(2)).squeeze(2)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1.0
        loss = nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        return loss / len(words)


def sparse(group: dist.ProcessGroup) -> Step:
    draws = torch.rand(WORDS, 2 + NEGATIVES, generator=torch.Generator().manual_seed(group.rank()))
    # the k-th word of all is drawn with a probability of 1/k; for the noise, of k to the power -3/4
    words = draws[:, :2].mul(math.log(VOCABULARY)).exp()
    noise = draws[:, 2:].mul(VOCABULARY**0.25 - 1).add(1).pow(4)
    both = torch.cat([words, noise], dim=1).long().clamp(1, VOCABULARY) - 1
    model = DistributedDataParallel(SkipGram(), process_group=group)
    return training(model, lambda: model(both[:, 0], both[:, 1:]), 0.1)


def sharded(group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = perceptron()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2(group: dist.ProcessGroup) -> Step:
    return to_give_back(sharded(group), group.rank())


def dtensor(group: dist.ProcessGroup) -> Step:
    model = perceptron()
    plan = {
        str(number): RowwiseParallel() if number % 4 else ColwiseParallel()
        for number in range(0, 2 * LAYERS, 2)
    }
    cut = parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    return to_give_back(cut, 0)


def checkpoints(group: dist.ProcessGroup) -> Step:
    """Steps that write and read a checkpoint; the "loss" is how far what was read is off."""
    model = sharded(group)

    def step() -> float:
        folder = [tempfile.mkdtemp(dir="/dev/shm") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        state = model.state_dict()
        dcp.save(state, checkpoint_id=folder[0], process_group=group)
        wanted = [weight.to_local().clone() for weight in state.values()]
        for weight in state.values():
            weight.to_local().zero_()
        dcp.load(state, checkpoint_id=folder[0], process_group=group)
        off = sum(
            float((weight.to_local() - want).abs().sum())
            for weight, want in zip(state.values(), wanted, strict=True)
        )
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
        return off

    return step


WAYS = {"ddp": ddp, "sparse": sparse, "fsdp2": fsdp2, "dtensor": dtensor, "dcp": checkpoints}


def over_ranks(value: float, op: dist.ReduceOp.RedOpType) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op)
    return float(found.item())


def measured(way: str, groups: dict[str, dist.ProcessGroup], rounds: int) -> list[str]:
    """A row of the table."""
    steps = {name: WAYS[way](group) for name, group in groups.items()}
    losses = {name: [step() for _ in range(5)] for name, step in steps.items()}
    torch.testing.assert_close(losses["gloo"], losses["cpu:weft"], rtol=1e-4, atol=0)
    first, *_, last = losses["cpu:weft"]
    assert last < first or (way == "dcp" and last == 0), losses
    passed: dict[str, list[float]] = {name: [] for name in groups}
    busy: dict[str, list[float]] = {name: [] for name in groups}
    for number in range(rounds):
        for name in list(groups)[:: -1 if number % 2 else 1]:
            dist.barrier()
            began, at = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                steps[name]()
            passed[name].append((time.perf_counter() - began) / STEPS * 1e3)
            busy[name].append((time.process_time() - at) / STEPS * 1e3)
    row = [way, f"{first:.4f} -> {last:.4f}"]
    slowest = {}
    for name in ("cpu:weft", "gloo"):
        slowest[name] = over_ranks(statistics.median(passed[name]), dist.ReduceOp.MAX)
        average = over_ranks(statistics.median(busy[name]), dist.ReduceOp.AVG)
        row += [f"{slowest[name]:.1f}", f"{average:.1f}"]
    return [*row, f"{slowest['gloo'] / slowest['cpu:weft']:.2f}"]


def rank(given: argparse.Namespace) -> list[list[str]]:
    """One rank: the rows of the table."""
    torch.set_num_threads(1)
    dist.init_process_group("cpu:weft")
    ours, gloo, one = (
        dist.new_group(backend=kind) for kind in ("weft", "gloo", gloo_of_one_thread())
    )
    rows = [
        measured(way, {"gloo": one if way == "sparse" else gloo, "cpu:weft": ours}, given.rounds)
        for way in given.way.split(",")
    ]
    dist.destroy_process_group()
    return rows


def show(rows: list[list[str]], ranks: int) -> None:
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    columns = ("", "losses", "weft, ms", "busy", "gloo, ms", "busy", "ratio")
    table = Table(*columns, title=f"{ranks} ranks, load {load}", title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--way", default=",".join(WAYS))
    on_ranks(rank, parser.parse_args(), show)


if __name__ == "__main__":
    main()
