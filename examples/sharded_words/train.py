"""Train word vectors with tables that are cut over the ranks, and with whole tables.

It is the training of `weft demo`, skip-gram with negative sampling, on the same batches. Each rank
draws a batch of its own, so the gradients of the ranks are averaged. There are four ways, which
must have the same losses:

* replicated: every rank has both tables, and `weft.sync_grads` averages their sparse gradients;
* sharded: `weft.nn.shard_embeddings` cuts the tables; the training needs no code for gradients;
* shuffled: the same, with words numbered at random instead of by frequency;
* by hand: the code that one would write with `torch.distributed.all_to_all_single`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.cli.demo.text import noise, read, subsample
from weft.cli.demo.train import SkipGram, batch

DIM = 64
BATCH = 4096
STEPS = 50
WAYS = ("replicated", "sharded", "shuffled", "by hand")


class ByHand(nn.Module):
    """A sharded table by hand: three `all_to_all_single` in forward, one in backward; no checks."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.height = -(-table.num_embeddings // self.ranks)
        whole = table.weight.detach()
        self.weight = nn.Parameter(whole[rank * self.height :][: self.height].clone())
        self.sent = 0  # bytes to other ranks

    def swapped(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        found = x.new_empty(sum(taken), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), list(taken), list(given))
        self.sent += (sum(given) - given[dist.get_rank()]) * x[:1].nbytes
        return found

    def forward(self, ids: Tensor) -> Tensor:
        distinct, place = torch.unique(ids, return_inverse=True)
        counts = torch.bincount(distinct // self.height, minlength=self.ranks)
        ones = [1] * self.ranks
        wanted, asked = counts.tolist(), self.swapped(counts, ones, ones).tolist()
        indices = self.swapped(distinct % self.height, wanted, asked)
        rows = _Rows.apply(self, indices, wanted, asked, self.weight)
        return functional.embedding(place, rows)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: ByHand, indices: Tensor, wanted: Any, asked: Any, weight: Tensor
    ) -> Tensor:
        ctx.taken = table, indices, wanted, asked
        return table.swapped(weight[indices], asked, wanted)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        table, indices, wanted, asked = ctx.taken
        came = table.swapped(gradient, wanted, asked) / table.ranks
        size, flags = table.weight.shape, {"check_invariants": False}
        return *[None] * 4, torch.sparse_coo_tensor(indices[None], came, size, **flags)


def train(group: weft.Group, way: str, text: dict[str, Any]) -> dict[str, Any]:
    """Train one way; return losses (means over the ranks), memory, bytes sent and time.

    Returns:
        "losses": of each step; "kept": MiB of weights and optimizer state of this rank; "sent" and
        "most": MiB that a rank sends in a step, the mean and the maximum over the ranks; "ms":
        milliseconds of a step.
    """
    model: nn.Module = SkipGram(text["words"], DIM, seed=0, kept=None)
    numbers = torch.arange(text["words"])
    if way == "shuffled":  # alike on every rank
        numbers = torch.randperm(text["words"], generator=torch.Generator().manual_seed(0))
        for table in model.children():
            table.weight.data = table.weight.data[numbers.argsort()]
    if way in ("sharded", "shuffled"):
        weft.nn.shard_embeddings(model, min_rows=1)
    elif way == "by hand":
        model.word, model.context = ByHand(model.word), ByHand(model.context)
    update = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-8)
    losses = []
    for step in range(-2, STEPS):  # two to warm up
        weft.barrier()
        if step == 0:
            began, sent = time.perf_counter(), group.traffic.bytes
        now = batch(text["part"], text["noise"], BATCH, 0, group.rank, step + 2)
        loss = model(*(numbers[ids] for ids in now))
        update.zero_grad()
        loss.backward()
        if way == "replicated":
            weft.sync_grads(model)
        update.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - began
    sent = group.traffic.bytes - sent
    if way == "by hand":
        sent = sum(table.sent for table in model.children()) * STEPS // (STEPS + 2)
    kept = [each for one in update.state.values() for each in one.values()]
    kept += model.parameters()
    return {
        "losses": weft.all_reduce(torch.stack(losses), "avg"),
        "kept": sum(each.nbytes for each in kept) / 2**20,
        "sent": int(weft.all_reduce(torch.tensor(sent))) / group.size / STEPS / 2**20,
        "most": int(weft.all_reduce(torch.tensor(sent), "max")) / STEPS / 2**20,
        "ms": seconds / STEPS * 1000,
    }


def compare(
    group: weft.Group, paths: Sequence[Path] = (), ways: Sequence[str] = WAYS
) -> dict[str, dict[str, Any]]:
    """Train in each way; return the results by way.

    Raises:
        SystemExit: their losses differ by more than rounding.
    """
    torch.set_num_threads(1)
    corpus = read(paths, min_count=1, ranks=group.size)
    tokens = subsample(corpus, seed=0, at_least=group.size * 1000)
    text = {"words": len(corpus.words), "noise": noise(corpus.counts)}
    text["part"] = np.array_split(tokens, group.size)[group.rank]
    found = {way: train(group, way, text) for way in ways}
    for way, one in found.items():
        apart = float((one["losses"] - found[ways[0]]["losses"]).abs().max())
        if not apart < 1e-3:
            raise SystemExit(f"FAILED: rank {group.rank}: the losses of {way} differ by {apart:g}")
        one |= {"apart": apart, "words": text["words"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="word vectors whose tables are cut")
    parser.add_argument("text", nargs="*", type=Path, help="files or folders; else Python's own")
    options = parser.parse_args()
    with torch.sparse.check_sparse_tensor_invariants(False), weft.init() as group:
        found = compare(group, options.text)
        if group.rank == 0:
            print(f"{found['sharded']['words']:,} words, {group.size} ranks")
            for way, one in found.items():
                losses = f"loss {one['losses'][0]:.4f} -> {one['losses'][-1]:.4f}"
                print(
                    f"{way:>10}: a rank keeps {one['kept']:5.2f} MiB, sends {one['sent']:5.2f} a "
                    f"step (the busiest {one['most']:5.2f}) of {one['ms']:5.1f} ms; {losses}, "
                    f"{one['apart']:.1e} apart"
                )
            print("PASSED")


if __name__ == "__main__":
    main()
