"""One rank of the demo's training: skip-gram with negative sampling, with sparse gradients.

The model and its loss are those of Mikolov et al., Distributed Representations of Words and
Phrases and their Compositionality (2013), section 2.2: two embedding tables, whose rows for a word
and for a true context word are to have a large dot product, and small ones with random words. The
update is Adagrad, the same arithmetic on a sparse gradient and on a dense one, so all ways compute
the same thing.

A batch is a pure function of (seed, rank, step), so all ways train on the same ones.
"""

from __future__ import annotations

import itertools
import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft import Group
from weft.testing import gloo_of_one_thread, send

from .figures import FIGURES, PARTS, RECORDED, Floats
from .text import WINDOW

Tokens = npt.NDArray[np.int32]

NEGATIVES = 5
"""Random words that each true (word, context) pair is told apart from."""

_LEARNING_RATE = 0.1
# Adagrad's first step for a number is the sign of its gradient. Where the ranks' gradients cancel,
# that sign is rounding, and differs with the order of adding: this is above such rounding, and far
# below true gradients (1e-7 and more).
_EPS = 1e-8
_TURN = 10  # steps that a way trains before it is the next one's turn
_MEMORY_STEPS = 8  # by then every buffer is there
_UNTIMED, _ALONE = 2, 12  # sums that are made alone: first untimed ones, then timed ones


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is told.

    Attributes:
        ways: keys of `WAYS`.
        steps: to train, each way.
        batch: (word, context) pairs that a rank takes in one step.
        dim: floats in a row of an embedding table.
        seed: of the first weights and of every batch.
        limit: seconds of training after which to stop, all ways together, or None.
        vocabulary: number of words.
        folder: with `tokens.npy` and `noise.npy`; the first way's word table is kept there
            in `table`, so that it is there whatever becomes of the ranks. Both are known when the
            text has been read.
    """

    ways: tuple[str, ...]
    steps: int
    batch: int
    dim: int
    seed: int
    limit: float | None
    vocabulary: int = 0
    folder: Path = Path()


def batch(
    tokens: Tokens, noise: Floats, size: int, seed: int, rank: int, step: int
) -> tuple[Tensor, Tensor]:
    """A batch: words `[size]`, and each one's context and random words `[size, 1 + NEGATIVES]`.

    Both are int64. The distance to the context word is the smaller of two draws from 1 to `WINDOW`,
    so near words count more.

    Args:
        tokens: this rank's part of the text; at least `2 * WINDOW + 1` of them.
        noise: the distribution function of random words.
    """
    random = np.random.default_rng((seed, rank, step))
    at = random.integers(WINDOW, len(tokens) - WINDOW, size)
    distance = random.integers(1, WINDOW + 1, (2, size)).min(axis=0)
    distance *= random.integers(0, 2, size) * 2 - 1
    others = np.empty((size, 1 + NEGATIVES), np.int64)
    others[:, 0] = tokens[at + distance]
    others[:, 1:] = noise.searchsorted(random.random((size, NEGATIVES)), side="right")
    return torch.from_numpy(tokens[at].astype(np.int64)), torch.from_numpy(others)


class SkipGram(nn.Module):
    """Two tables and the loss; `word` holds the vectors that one keeps, in the file `kept`."""

    def __init__(self, vocabulary: int, dim: int, *, seed: int, kept: Path | None) -> None:
        super().__init__()
        first = torch.empty(vocabulary, dim).uniform_(
            -0.5 / dim, 0.5 / dim, generator=torch.Generator().manual_seed(seed)
        )
        if kept is not None:
            mapped = torch.from_file(str(kept), shared=True, size=first.numel())
            first = mapped.view(vocabulary, dim).copy_(first)
        zeros = torch.zeros(vocabulary, dim)
        self.word = nn.Embedding(vocabulary, dim, sparse=True, _weight=first)
        self.context = nn.Embedding(vocabulary, dim, sparse=True, _weight=zeros)

    @property
    def tables(self) -> list[Tensor]:
        """Both, in the order in which their gradients come."""
        return [self.context.weight, self.word.weight]

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        """The loss, summed over a word's true and random contexts, mean over the words."""
        scores = torch.bmm(self.context(others), self.word(words).unsqueeze(2)).squeeze(2)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1.0
        loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        return loss / len(words)


def training(
    job: Job, way: str, group: Group, kept: Path | None = None
) -> Iterator[tuple[str, list[float]]]:
    """One way's training on one rank: for each step what weft chose in it, and its `FIGURES`."""
    draw = _batches(job, group)
    model = SkipGram(job.vocabulary, job.dim, seed=job.seed, kept=kept)
    tables = model.tables
    start = _starter(way, group, tables)
    updates = [torch.optim.Adagrad([one], lr=_LEARNING_RATE, eps=_EPS) for one in tables]
    sums: dict[Tensor, _Sum] = {}  # under way
    spent: dict[str, float] = {}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        spent[part] += time.perf_counter() - began

    def hand_over(table: Tensor) -> None:
        """Runs in the backward pass, as soon as the gradient of one table is there."""
        with timed("start sums"):
            sums[table] = start(table)

    for table in tables:
        table.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]  # torch has no types here
    clock, now = 0.0, draw(0)
    for number in itertools.count(1):
        spent.update(dict.fromkeys(PARTS, 0.0))
        with timed("forward"):
            loss = model(*now)
        with timed("backward"):
            loss.backward()
        spent["backward"] -= spent["start sums"]
        with timed("next batch"):
            now = draw(number)
        gradients = []
        for table, update in zip(tables, updates, strict=True):
            with timed("wait for sums"):
                gradient = table.grad = sums[table].wait()
            gradients.append(gradient)
            with timed("update"):
                update.step()
                table.grad = None
        clock += sum(spent.values())
        records = [one.record() for one in sums.values() if way == "weft"]
        figures = {"clock": clock, "loss": loss.item(), **spent}
        figures["gradient"] = _length(gradients)  # after the clock: it is no part of training
        figures |= {name: sum(getattr(one, name) for one in records) for name in RECORDED}
        algorithm = " + ".join(dict.fromkeys(one.algorithm for one in records))
        yield algorithm, [figures[name] for name in FIGURES]


def _batches(job: Job, group: Group) -> Callable[[int], tuple[Tensor, Tensor]]:
    """What draws this rank's batch of a step."""
    tokens = np.load(job.folder / "tokens.npy", mmap_mode="r")
    noise = np.load(job.folder / "noise.npy", mmap_mode="r")
    part = np.array_split(tokens, group.size)[group.rank]
    return partial(batch, part, noise, job.batch, job.seed, group.rank)


class _Sum(NamedTuple):
    """A sum under way: what waits for the mean over the ranks, and for what weft noted."""

    wait: Callable[[], Tensor]
    record: Callable[[], Any]


def _starter(way: str, group: Group, tables: list[Tensor]) -> Callable[[Tensor], _Sum]:
    """What starts the sum of a table's gradient, by one way; collective."""
    # the sums of both tables are under way at once: torch's own gloo would corrupt memory
    plain: Any = dist.new_group(backend=gloo_of_one_thread()) if way == "torch" else None
    # kept from step to step: fresh pages would make this way slower
    buffers = {table: torch.zeros_like(table) for table in tables if way == "dense"}

    def by_weft(table: Tensor) -> _Sum:
        assert table.grad is not None
        work = weft.sparse_all_reduce(table.grad, op="avg", async_op=True)
        # calls take turns, so what runs next in the queue finds the record of this one
        return _Sum(work.wait, group.worker.submit("record", weft.sparse.last_call).wait)

    def by_torch(table: Tensor) -> _Sum:
        gradient = table.grad
        assert gradient is not None
        if way == "dense":
            rows, values = gradient._indices()[0], gradient._values()
            gradient = buffers[table].zero_().index_add_(0, rows, values)
        pending = dist.all_reduce(gradient, group=plain, async_op=True)
        assert pending is not None  # as it is on a rank that is not in the group

        def mean() -> Tensor:
            pending.wait()
            return gradient.div_(group.size)

        return _Sum(mean, lambda: None)

    return by_weft if way == "weft" else by_torch


def sums_alone(job: Job, group: Group) -> dict[str, list[float]]:
    """Seconds of each way's sums on this rank, of some steps, while nothing else is done.

    All ranks begin at once, both sums are started, and waited for: in training, the sums of a step
    also share the cores with what is computed, and wait for ranks that compute longer.
    """
    draw = _batches(job, group)
    model = SkipGram(job.vocabulary, job.dim, seed=job.seed, kept=None)
    starts = {way: _starter(way, group, model.tables) for way in job.ways}
    seconds: dict[str, list[float]] = {way: [] for way in job.ways}
    for number in range(-_UNTIMED, _ALONE):
        model.zero_grad()
        model(*draw(number + _UNTIMED)).backward()
        gradients = [cast(Tensor, table.grad) for table in model.tables]
        # in an order that is the same on all ranks
        for way in random.Random(number).sample(job.ways, len(job.ways)):
            for table, gradient in zip(model.tables, gradients, strict=True):
                table.grad = gradient.clone()  # PyTorch's ways change what they are given
            weft.barrier()
            began = time.perf_counter()
            for one in [starts[way](table) for table in model.tables]:
                one.wait()
            if number >= 0:
                seconds[way].append(time.perf_counter() - began)
    return seconds


def train(job: Job) -> dict[str, list[float]]:
    """Train all ways as one rank of the group in the environment; returns `sums_alone`.

    The ways take turns of some steps, so that whatever else the machine does meets them alike.
    After each turn rank 0 sends `(way, algorithms, figures)` to the launcher, means over the ranks.
    """
    with _group() as group:
        kept = {job.ways[0]: job.folder / "table"} if group.rank == 0 else {}
        trainings = {way: training(job, way, group, kept.get(way)) for way in job.ways}
        weft.barrier()  # all are here, so the clocks start together
        began = time.monotonic()
        for first in range(0, job.steps, _TURN):
            for way, steps in trainings.items():
                turn = list(itertools.islice(steps, min(_TURN, job.steps - first)))
                figures = torch.tensor([figures for _, figures in turn], dtype=torch.float64)
                mean = weft.all_reduce(figures, "avg")
                if group.rank == 0:
                    send((way, [algorithm for algorithm, _ in turn], mean.numpy()))
            late = torch.tensor(job.limit is not None and time.monotonic() - began > job.limit)
            if weft.all_reduce(late.int(), "max"):  # they must stop at the same step
                break
        return sums_alone(job, group)


def measure_memory(job: Job, way: str) -> tuple[int, int]:
    """Train one way alone for a few steps, as one rank: the peak memory, and that before."""
    with _group() as group:
        idle = _peak_bytes()
        list(itertools.islice(training(job, way, group), _MEMORY_STEPS))
        return _peak_bytes(), idle


@contextmanager
def _group() -> Iterator[Group]:
    """Checks of sparse tensors are off: PyTorch warns where they are neither on nor off."""
    with torch.sparse.check_sparse_tensor_invariants(False), weft.init() as group:  # type: ignore[no-untyped-call]
        yield group


def _length(gradients: list[Tensor]) -> float:
    """The Euclidean norm of all gradients as one vector, sparse or dense."""
    values = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    return math.hypot(*(float(torch.linalg.vector_norm(one)) for one in values))


def _peak_bytes() -> int:
    """Highest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
