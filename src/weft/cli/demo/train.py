"""One rank of the demo's training: skip-gram with negative sampling, with sparse gradients.

The model and its loss are those of Mikolov et al., Distributed Representations of Words and
Phrases and their Compositionality (2013), section 2.2: two embedding tables, whose rows for a word
and for a true context word are to have a large dot product, and small ones with random words. The
update is Adagrad, the same arithmetic on a sparse gradient and on a dense one, so all ways compute
the same thing.

A batch is a pure function of (seed, rank, step), so every way trains on the same ones.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.bootstrap import local
from weft.bootstrap.init import init
from weft.wire.base import Wire

from .record import Outcome, Step
from .settings import NEGATIVES, WINDOW
from .ways import START, Started, stop_together

__all__ = ["Batches", "Job", "SkipGram", "train"]

_LEARNING_RATE = 0.1
_REPORT_SECONDS = 0.2
_CHECK_LIMIT_STEPS = 10


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank of one way is told.

    Attributes:
        way: a key of `START`.
        steps, batch, dim, seed: see `Settings`.
        limit: seconds after which to stop at the next check, or None.
        vocabulary: number of words.
        tokens, negatives: `.npy` files, int32.
        vectors: file to keep the word table in, so that it is there whatever becomes of us.
    """

    way: str
    steps: int
    batch: int
    dim: int
    seed: int
    limit: float | None
    vocabulary: int
    tokens: Path
    negatives: Path
    vectors: Path


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of one rank.

    Attributes:
        tokens: this rank's part of the text, int32; at least `2 * WINDOW + 1` of them.
        negatives: a table to draw random words from, int32.
    """

    tokens: npt.NDArray[np.int32]
    negatives: npt.NDArray[np.int32]
    batch: int
    seed: int
    rank: int

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The words `[batch]`, and for each its context and random words `[batch, 1 + NEGATIVES]`.

        Each is int64. The distance to the context word is the smaller of two draws from 1 to
        `WINDOW`, so near words count more.
        """
        random = np.random.default_rng((self.seed, self.rank, step))
        at = random.integers(WINDOW, len(self.tokens) - WINDOW, self.batch)
        distance = random.integers(1, WINDOW + 1, (2, self.batch)).min(axis=0)
        distance *= random.integers(0, 2, self.batch) * 2 - 1
        others = np.empty((self.batch, 1 + NEGATIVES), np.int64)
        others[:, 0] = self.tokens[at + distance]
        others[:, 1:] = self.negatives[
            random.integers(0, len(self.negatives), (self.batch, NEGATIVES))
        ]
        return torch.from_numpy(self.tokens[at].astype(np.int64)), torch.from_numpy(others)


class SkipGram(nn.Module):
    """Two tables and the loss; `word` holds the vectors that one keeps."""

    def __init__(self, vocabulary: int, dim: int, *, seed: int, kept: Path | None) -> None:
        super().__init__()
        first = torch.empty(vocabulary, dim).uniform_(
            -0.5 / dim, 0.5 / dim, generator=torch.Generator().manual_seed(seed)
        )
        if kept is not None:
            mapped = torch.from_file(str(kept), shared=True, size=first.numel())
            first = mapped.view(vocabulary, dim).copy_(first)
        self.word = nn.Embedding(vocabulary, dim, sparse=True, _weight=first)
        self.context = nn.Embedding(
            vocabulary, dim, sparse=True, _weight=torch.zeros(vocabulary, dim)
        )

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        """The loss, summed over a word's true and random contexts, mean over the words."""
        scores = torch.bmm(self.context(others), self.word(words).unsqueeze(2)).squeeze(2)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1.0
        loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        return loss / len(words)


def train(job: Job) -> None:
    """Train as one rank of the group in the environment.

    Sends the launcher lists of `Step` as they come, and an `Outcome` at the end, also if that end
    is a Ctrl-C.
    """
    # PyTorch warns where the checks of sparse tensors are neither on nor off
    unchecked = torch.sparse.check_sparse_tensor_invariants(False)  # type: ignore[no-untyped-call]  # torch has no types here
    with unchecked, init() as wire:
        tokens = np.load(job.tokens, mmap_mode="r")
        part = np.array_split(tokens, wire.size)[wire.rank]
        batches = Batches(part, np.load(job.negatives), job.batch, job.seed, wire.rank)
        model = SkipGram(
            job.vocabulary, job.dim, seed=job.seed, kept=job.vectors if wire.rank == 0 else None
        )
        start = _peak_bytes()
        try:
            _loop(job, model, batches, wire, local.send)
        finally:
            local.send(Outcome(_peak_bytes(), start))


def _loop(
    job: Job,
    model: SkipGram,
    batches: Batches,
    wire: Wire,
    send: Callable[[list[Step]], None],
) -> None:
    tables = [model.context.weight, model.word.weight]
    updates = [torch.optim.Adagrad([table], lr=_LEARNING_RATE) for table in tables]
    started: dict[Tensor, Started] = {}
    handing_over = 0.0

    def hand_over(table: Tensor) -> None:
        """Runs in the backward pass, as soon as the gradient of one table is there."""
        nonlocal handing_over
        began = time.perf_counter()
        assert table.grad is not None
        started[table] = START[job.way](table.grad, wire, buffers.get(table))
        handing_over += time.perf_counter() - began

    buffers = {table: torch.zeros_like(table) for table in tables if job.way == "dense"}
    for table in tables:
        table.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]  # nor here

    batch = batches(0)
    unsent: list[Step] = []
    stop_together(False)  # all are here, so the clocks start together
    clock, sent_at = 0.0, time.perf_counter()
    for number in range(job.steps):
        handing_over = 0.0
        begin = time.perf_counter()
        loss = model(*batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if number + 1 < job.steps:
            batch = batches(number + 1)
        now = prepared = time.perf_counter()
        waited = 0.0
        for table, update in zip(tables, updates, strict=True):
            table.grad = started[table].wait()
            waited += time.perf_counter() - now
            update.step()
            table.grad = None
            now = time.perf_counter()
        clock += now - begin
        unsent.append(
            Step(
                number=number,
                clock=clock,
                loss=loss.item(),
                forward=forward - begin,
                backward=backward - forward - handing_over,
                hand_over=handing_over,
                prepare=prepared - backward,
                wait=waited,
                update=now - prepared - waited,
                in_flight=_covered(list(started.values())),
                reductions=tuple(
                    one.reduction for one in started.values() if one.reduction is not None
                ),
            )
        )
        started.clear()
        if now - sent_at > _REPORT_SECONDS or number + 1 == job.steps:
            send(unsent)
            unsent, sent_at = [], now
        # not part of any step's time: the same for every way, and no part of training
        checks = job.limit is not None and (number + 1) % _CHECK_LIMIT_STEPS == 0
        if checks and stop_together(job.limit is not None and clock > job.limit):
            break
    if unsent:
        send(unsent)


def _covered(sums: list[Started]) -> float:
    """Seconds in which at least one of the sums was under way."""
    covered, end = 0.0, float("-inf")
    for one in sorted(sums, key=lambda one: one.began):
        assert one.ended is not None
        covered += max(0.0, one.ended - max(one.began, end))
        end = max(end, one.ended)
    return covered


def _peak_bytes() -> int:
    """Highest resident memory of this process so far."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass  # not Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
