"""Train word vectors with tables that are cut over the ranks, and with whole tables.

The text is the source of Python's library, the training skip-gram with negative sampling. Each rank
draws a batch of its own, so the gradients of the ranks are averaged. There are four ways, which
must have the same losses:

* replicated: every rank has both tables, and `weft.sync_grads` averages their sparse gradients;
* sharded: `weft.nn.shard_embeddings` cuts the tables; the training needs no code for gradients;
* shuffled: the same, with words numbered at random instead of by frequency;
* by hand: the code that one would write with `torch.distributed.all_to_all_single`.
"""

from __future__ import annotations

import re
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import weft

DIM = 64
BATCH = 4096
STEPS = 50
WINDOW, NEGATIVES = 5, 5  # words to either side of a word; random words beside each true one
WAYS = ("replicated", "sharded", "shuffled", "by hand")


class Text(NamedTuple):
    """A rank's part of the words as numbers, how many words there are, and how often each is."""

    part: np.ndarray
    words: int
    noise: np.ndarray


def read(group: weft.Group) -> Text:
    """The source of Python's library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & {*path.parts}:
            lines = path.read_text(encoding="utf-8", errors="replace")
            found += re.findall(r"\b[^\W\d]\w*", lines.lower())
    counts = Counter(found).most_common()
    number = {word: place for place, (word, _) in enumerate(counts)}
    tokens = np.array([number[word] for word in found])
    often = np.array([count for _, count in counts])
    ratio = 1e-4 * len(tokens) / often  # frequent words are thinned out, as is usual
    kept = np.random.default_rng(0).random(len(tokens)) < (np.sqrt(ratio) + ratio)[tokens]
    noise = np.cumsum(often**0.75)
    return Text(
        np.array_split(tokens[kept], group.size)[group.rank], len(counts), noise / noise[-1]
    )


def batch(text: Text, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Words `[BATCH]`, and of each a word near it and random ones `[BATCH, 1 + NEGATIVES]`."""
    draw = np.random.default_rng((rank, step))
    at = draw.integers(WINDOW, len(text.part) - WINDOW, BATCH)
    distance = draw.integers(1, WINDOW + 1, BATCH) * draw.choice([-1, 1], BATCH)
    random = text.noise.searchsorted(draw.random((BATCH, NEGATIVES)), side="right")
    others = np.concatenate([text.part[at + distance][:, None], random], axis=1)
    return torch.from_numpy(text.part[at]), torch.from_numpy(others)


class SkipGram(nn.Module):
    """Two tables, and the loss: true words are to be told from random ones."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words, DIM, sparse=True)
        seeded = torch.Generator().manual_seed(0)  # the same on every rank
        nn.init.uniform_(self.word.weight, -0.5 / DIM, 0.5 / DIM, generator=seeded)
        self.context = nn.Embedding(words, DIM, sparse=True, _weight=torch.zeros(words, DIM))

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        scores = torch.bmm(self.context(others), self.word(words).unsqueeze(2)).squeeze(2)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1.0
        loss = functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        return loss / len(words)


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


def train(group: weft.Group, way: str, text: Text) -> dict[str, Any]:
    """Train one way; return losses (means over the ranks), memory, bytes sent and time.

    Returns:
        "losses": of each step; "kept": MiB of weights and optimizer state of this rank; "sent" and
        "most": MiB that a rank sends in a step, the mean and the maximum over the ranks; "ms":
        milliseconds of a step.
    """
    model: nn.Module = SkipGram(text.words)
    numbers = torch.arange(text.words)
    if way == "shuffled":  # alike on every rank
        numbers = torch.randperm(text.words, generator=torch.Generator().manual_seed(0))
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
        now = batch(text, group.rank, step + 2)
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


def compare(group: weft.Group, ways: Sequence[str] = WAYS) -> dict[str, dict[str, Any]]:
    """Train in each way; return the results by way.

    Raises:
        SystemExit: their losses differ by more than rounding.
    """
    torch.set_num_threads(1)
    text = read(group)
    found = {way: train(group, way, text) for way in ways}
    for way, one in found.items():
        apart = float((one["losses"] - found[ways[0]]["losses"]).abs().max())
        if not apart < 1e-3:
            raise SystemExit(f"FAILED: rank {group.rank}: the losses of {way} differ by {apart:g}")
        one |= {"apart": apart, "words": text.words}
    return found


def main() -> None:
    with torch.sparse.check_sparse_tensor_invariants(False), weft.init() as group:
        found = compare(group)
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
