"""One rank of the training: GraphSAGE over all nodes of its part, in every step.

The model is that of Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large
Graphs" (NIPS 2017), algorithm 1 with the mean of the neighbours, all of them; two layers. What a
rank needs of others' nodes is asked for once (`weft.all_to_all`); their hidden states come by
`weft.exchange` in every forward, and its adjoint takes the gradients back and adds them up. Their
features never change, and come once. Gradients of the weights are summed by `weft.sync_grads`.

The loss is the mean over all nodes that are trained on, whichever rank has them: so it does not
depend on the cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.bootstrap import local
from weft.wire.base import Wire

from ..demo.record import Outcome, Step
from ..demo.train import peak_bytes

__all__ = ["Ended", "Job", "Part", "Sage", "Sent", "train"]

_LEARNING_RATE = 0.01
_REPORT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is told.

    Attributes:
        bounds: rank r has the nodes from `bounds[r]` to `bounds[r + 1]`.
        classes: how many.
        steps, dim, seed: see `GraphSettings`.
        folder: with `features`, `labels`, `trained` (bool), `starts` and `neighbours`, as `.npy`.
    """

    bounds: tuple[int, ...]
    classes: int
    steps: int
    dim: int
    seed: int
    folder: Path

    def load(self, name: str) -> Any:
        """One of the arrays, mapped: ranks share its pages."""
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that a rank sends to each other in one step."""

    to: dict[int, int]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a rank says at the end: held-out nodes, how many of them it got right, its memory."""

    held_out: int
    right: int
    memory: Outcome


class Part:
    """The nodes of one rank and what it needs of the others.

    Attributes:
        features: of its own nodes.
        labels, trained: of its own nodes.
        total: nodes that are trained on, of all ranks.
        to: which of its nodes each rank needs: what `weft.exchange` takes.
        halo: nodes of other ranks that it needs.
    """

    def __init__(self, job: Job, wire: Wire) -> None:
        low, high = job.bounds[wire.rank], job.bounds[wire.rank + 1]
        starts = job.load("starts")[low : high + 1]
        near = np.array(job.load("neighbours")[starts[0] : starts[-1]])
        own = (near >= low) & (near < high)
        remote = np.unique(near[~own])  # sorted, so those of one rank are together
        at = np.where(own, near - low, high - low + np.searchsorted(remote, near))
        cuts = np.searchsorted(remote, job.bounds)
        wanted = [
            torch.from_numpy(remote[cuts[rank] : cuts[rank + 1]] - job.bounds[rank])
            for rank in range(wire.size)
        ]
        self.to = weft.all_to_all(wanted)
        self.halo = len(remote)
        self._near = torch.from_numpy(at)
        self._begins = torch.from_numpy(starts[:-1] - starts[0])
        self.features = torch.from_numpy(np.array(job.load("features")[low:high]))
        self.labels = torch.from_numpy(np.array(job.load("labels")[low:high]))
        everywhere = job.load("trained")
        self.trained = torch.from_numpy(np.array(everywhere[low:high]))
        self.total = int(everywhere.sum())

    def mean(self, own: Tensor, remote: list[Tensor]) -> Tensor:
        """Of each node's neighbours; zero where there are none."""
        return F.embedding_bag(
            self._near, torch.cat([own, *remote]), self._begins, mode="mean", sparse=False
        )


class Sage(nn.Module):
    """Two layers; the same first weights for the same seed, whatever the number of ranks."""

    def __init__(self, features: int, dim: int, classes: int, seed: int) -> None:
        super().__init__()
        self.own_first = nn.Linear(features, dim)
        self.near_first = nn.Linear(features, dim, bias=False)
        self.own_second = nn.Linear(dim, classes)
        self.near_second = nn.Linear(dim, classes, bias=False)
        draws = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter, generator=draws)
            else:
                nn.init.zeros_(parameter)

    def hidden(self, features: Tensor, near: Tensor) -> Tensor:
        return F.relu(self.own_first(features) + self.near_first(near))

    def scores(self, hidden: Tensor, near: Tensor) -> Tensor:
        scores: Tensor = self.own_second(hidden) + self.near_second(near)
        return scores


class Training:
    """One rank's training, step by step."""

    def __init__(self, job: Job, wire: Wire) -> None:
        self.part = part = Part(job, wire)
        self._wire = wire
        self._model = Sage(part.features.shape[1], job.dim, job.classes, job.seed)
        weft.sync_params(self._model)
        self._near = part.mean(part.features, weft.exchange(part.features, part.to))
        self._update = torch.optim.Adam(self._model.parameters(), lr=_LEARNING_RATE)
        self._number, self._clock = 0, 0.0
        self._marks: dict[str, float] = {}

    def _mark(self, name: str) -> None:
        self._marks[name] = time.perf_counter()

    def _scores(self) -> Tensor:
        hidden = self._model.hidden(self.part.features, self._near)
        self._mark("ask")
        remote = weft.exchange(hidden, self.part.to)
        self._mark("got")
        if hidden.requires_grad:  # when the adjoint of the exchange begins, and when it is done
            for tensor in remote:
                _when_differentiated(tensor, lambda: self._mark("return"))
            _when_differentiated(hidden, lambda: self._mark("returned"))
        return self._model.scores(hidden, self.part.mean(hidden, remote))

    def step(self) -> Step:
        """Train one step."""
        part, marks = self.part, self._marks
        begin = time.perf_counter()
        scores = self._scores()
        losses = F.cross_entropy(scores[part.trained], part.labels[part.trained], reduction="sum")
        loss: Any = losses / part.total  # its backward is untyped
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        weft.sync_grads(self._model, average=False)
        summed = time.perf_counter()
        self._update.step()
        end = time.perf_counter()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        length = float(torch.stack([g.norm() for g in gradients]).norm())
        self._update.zero_grad()
        asked, returned = marks["got"] - marks["ask"], marks["returned"] - marks["return"]
        self._clock += end - begin
        self._number += 1
        return Step(
            number=self._number - 1,
            clock=self._clock,
            loss=loss.item() * self._wire.size,  # the mean over the ranks is the loss
            gradient=length,
            forward=forward - begin - asked,
            backward=backward - forward - returned,
            hand_over=asked + returned,
            prepare=0.0,
            wait=summed - backward,
            update=end - summed,
            in_flight=asked + returned + summed - backward,
        )

    def judge(self) -> tuple[int, int]:
        """How many nodes of this rank were held out, and how many of those it gets right."""
        with torch.no_grad():
            right = self._scores().argmax(1) == self.part.labels
        return int((~self.part.trained).sum()), int(right[~self.part.trained].sum())


def _when_differentiated(tensor: Any, do: Callable[[], None]) -> None:
    """Call it when the gradient of a tensor is there, in each backward."""
    tensor.register_hook(lambda gradient: do())


def train(job: Job) -> None:
    """Train as one rank of the group in the environment; sends what comes of it as it comes."""
    idle = peak_bytes()
    with weft.init() as wire:
        training = Training(job, wire)
        weft.barrier()  # all are here, so the clocks start together
        unsent: list[Step] = []
        sent = time.monotonic()
        for number in range(job.steps):
            wire.traffic.reset()
            unsent.append(training.step())
            if number == 0:
                local.send(Sent(dict(wire.traffic.to)))
            if time.monotonic() - sent > _REPORT_SECONDS:
                local.send(unsent)
                unsent, sent = [], time.monotonic()
        local.send(unsent)
        held_out, right = training.judge()
        local.send(Ended(held_out, right, Outcome(peak_bytes(), idle)))
