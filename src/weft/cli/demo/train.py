"""One rank of the demo's training: skip-gram with negative sampling, with sparse gradients.

The model and its loss are those of Mikolov et al., Distributed Representations of Words and
Phrases and their Compositionality (2013), section 2.2: two embedding tables, whose rows for a word
and for a true context word are to have a large dot product, and small ones with random words. The
update is Adagrad, the same arithmetic on a sparse gradient and on a dense one, so all ways compute
the same thing.

A batch is a pure function of (rank, step), so all ways train on the same ones.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft import Group
from weft.testing import send

from .figures import WAYS, Numbers
from .text import WINDOW

DIM = 64
"""Floats in a row of a table."""

BATCH = 2048
"""Pairs of a word and its context that a rank takes in a step."""

NEGATIVES = 5
"""Random words that each true (word, context) pair is told apart from."""

FREQUENT = 5000
"""Words among which near ones are looked for; rarer ones have hardly been trained."""

_LEARNING_RATE = 0.1
# Adagrad's first step for a number is the sign of its gradient. Where the ranks' gradients cancel,
# that sign is rounding, and differs with the order of adding: this is above such rounding, and far
# below true gradients (1e-7 and more).
_EPS = 1e-8
TURN = 10
"""Steps that a way trains before it is the next one's turn."""


def batch(tokens: Numbers, noise: Numbers, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch: words `[BATCH]`, and each one's context and random words `[BATCH, 1 + NEGATIVES]`.

    Args:
        tokens: this rank's part of the text; at least `2 * WINDOW + 1` of them.
        noise: the distribution function of random words.
    """
    draw = np.random.default_rng((rank, step))
    at = draw.integers(WINDOW, len(tokens) - WINDOW, BATCH)
    near = at + draw.integers(1, WINDOW + 1, BATCH) * draw.choice([-1, 1], BATCH)
    random = noise.searchsorted(draw.random((BATCH, NEGATIVES)), side="right")
    others = np.column_stack([tokens[near], random])
    return torch.from_numpy(tokens[at]).long(), torch.from_numpy(others)


class SkipGram(nn.Module):
    """Two tables and the loss; `word` holds the vectors that one keeps."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(vocabulary, DIM, sparse=True)
        nn.init.uniform_(self.word.weight, -0.5 / DIM, 0.5 / DIM)
        self.context = nn.Embedding(vocabulary, DIM, sparse=True)
        nn.init.zeros_(self.context.weight)

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        """The loss, summed over a word's true and random contexts, mean over the words."""
        scores = torch.bmm(self.context(others), self.word(words)[:, :, None])[:, :, 0]
        signs = torch.tensor([1.0] + [-1.0] * NEGATIVES)
        return -F.logsigmoid(signs * scores).sum(1).mean()


def train(text: str, vocabulary: int, steps: int, asked: list[int]) -> Any:
    """Train all ways as one rank of the group in the environment; returns the nearest words.

    The ways take turns of some steps, so that whatever else the machine does meets them alike.
    After each turn rank 0 sends `(way, figures)` to the launcher, means over the ranks.

    Args:
        text: a file with the `tokens`, and with the distribution function of random words, `noise`.
        vocabulary: number of words.
        steps: to train, each way, a multiple of `TURN`.
        asked: words whose neighbours are wanted.
    """
    # checks of sparse tensors are off: PyTorch warns where they are neither on nor off
    with torch.sparse.check_sparse_tensor_invariants(False), weft.init() as group:  # type: ignore[no-untyped-call]
        models = {way: SkipGram(vocabulary) for way in WAYS}
        trainings = {way: training(text, way, model, group) for way, model in models.items()}
        for _ in range(0, steps, TURN):
            for way, run in trainings.items():
                turn = torch.tensor([*itertools.islice(run, TURN)], dtype=torch.float64)
                mean = weft.all_reduce(turn, "avg")
                if group.rank == 0:
                    send((way, mean.numpy()))
    rows = F.normalize(models["weft"].word.weight.detach()[:FREQUENT])
    return (rows[asked] @ rows.T).topk(6).indices.tolist()


def training(text: str, way: str, model: SkipGram, group: Group) -> Iterator[list[float]]:
    """One way's training on one rank: the `FIGURES` of each step."""
    corpus = np.load(text)
    tokens = np.array_split(corpus["tokens"], group.size)[group.rank]
    tables = [model.word.weight, model.context.weight]
    update = torch.optim.Adagrad(tables, lr=_LEARNING_RATE, eps=_EPS)
    # kept from step to step: fresh pages would make the dense way slower
    dense = [torch.zeros_like(table) for table in tables if way == "dense"]
    clock = 0.0
    for number in itertools.count():
        counted, began = group.traffic.bytes, time.perf_counter()
        pairs = batch(tokens, corpus["noise"], group.rank, number)
        loss = model(*pairs)
        loss.backward()
        summing = time.perf_counter()
        means = mean_over_ranks(way, [cast(Tensor, table.grad) for table in tables], dense)
        sums = time.perf_counter() - summing
        for table, mean in zip(tables, means, strict=True):
            table.grad = mean
        update.step()
        seconds = time.perf_counter() - began
        clock += seconds
        rows = sum(len(np.unique(ids)) for ids in pairs)
        sent = {
            "weft": group.traffic.bytes - counted,
            # what gloo is known to do: a ring all-gather of each rank's rows, with int64 indices
            "torch": (group.size - 1) * rows * (8 + 4 * DIM),
            # a ring all-reduce of both tables
            "dense": 2 * (group.size - 1) / group.size * sum(table.nbytes for table in tables),
        }
        length = weft.clip_grad_norm_(tables, math.inf)  # after the clock: no part of training
        update.zero_grad()
        yield [clock, loss.item(), length.item(), seconds, sums, sent[way]]


def mean_over_ranks(way: str, gradients: list[Tensor], dense: list[Tensor]) -> list[Tensor]:
    """The mean of the sparse gradients over all ranks; `dense` are buffers of the dense way."""
    if way == "weft":
        return weft.sparse_all_reduce(gradients, op="avg")
    if way == "dense":
        for buffer, gradient in zip(dense, gradients, strict=True):
            buffer.zero_().index_add_(0, gradient._indices()[0], gradient._values())
        gradients = dense
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return gradients
