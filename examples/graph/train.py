"""Train a graph network on a real graph that is cut over the ranks; compare it with one process.

The model is GraphSAGE (Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large
Graphs", NIPS 2017, algorithm 1, with the mean of all neighbours) with two layers. Every step uses
all training nodes. Each rank has its own nodes. Once, at the start, each rank says by
`weft.remote_rows` which nodes its own have as neighbours. In every forward the plan fetches the
hidden states of those that other ranks have; its adjoint sends the gradients back and adds them.
`weft.sync_grads` sums the gradients of the weights.

The loss is the mean over all training nodes of all ranks. So it does not depend on the cut, and one
process that trains on the whole graph must have the same losses, to rounding.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from graphs import Graph, cut, imports
from torch import Tensor, nn
from torch.nn import functional

import weft

HELD_OUT = 0.3  # of the nodes
HIDDEN = 64
STEPS = 100
TOLERANCE = 1e-3  # sums are added in another order, and each step starts from the last


@dataclass(frozen=True)
class Data:
    """A graph that is cut over the ranks: nodes are numbered part by part.

    Attributes:
        bounds: rank r has the nodes from `bounds[r]` to `bounds[r + 1]`.
        edges: ends of each edge; int64 `[e, 2]`.
        starts, near: the neighbours of node n are `near[starts[n]:starts[n + 1]]`.
        features, labels, trained: of each node; `trained` is whether it is not held out.
    """

    bounds: list[int]
    edges: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    near: npt.NDArray[np.int64]
    features: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, graph: Graph, ranks: int) -> Data:
        """Cut a graph. Which nodes are held out does not depend on the cut."""
        part = cut(*graph.neighbours(), ranks)
        order = np.argsort(part, kind="stable")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        names = [graph.names[node] for node in order]
        ordered = Graph(graph.source, names, graph.labels[order], [], number[graph.edges])
        trained = np.random.default_rng(0).random(len(order))[order] >= HELD_OUT
        bounds = [0, *np.bincount(part, minlength=ranks).cumsum().tolist()]
        features = ordered.features()
        return cls(bounds, ordered.edges, *ordered.neighbours(), features, ordered.labels, trained)

    def crossing(self) -> npt.NDArray[np.bool_]:
        """For each edge, whether its ends are on different ranks."""
        ends = np.searchsorted(self.bounds, self.edges, side="right")
        crossing: npt.NDArray[np.bool_] = ends[:, 0] != ends[:, 1]
        return crossing


class Part:
    """The nodes of one rank, and what it needs of the others."""

    def __init__(self, data: Data, bounds: list[int], rank: int) -> None:
        low, high = bounds[rank], bounds[rank + 1]
        starts = data.starts[low : high + 1]
        self.near = torch.from_numpy(data.near[starts[0] : starts[-1]])
        self.plan = None
        if len(bounds) > 2:  # else there is no other rank
            self.plan = weft.remote_rows(self.near, high - low)
            self.near = self.plan.places
        self.begins = torch.from_numpy(starts[:-1] - starts[0])
        self.features = torch.from_numpy(data.features[low:high])
        self.labels = torch.from_numpy(data.labels[low:high])
        self.trained = torch.from_numpy(data.trained[low:high])
        self.total = int(data.trained.sum())

    def mean(self, own: Tensor) -> Tensor:
        """The mean of the states of each node's neighbours on all ranks; zero if it has none.

        It sends the states that other ranks need.
        """
        states = own if self.plan is None else self.plan.fetch(own)
        return functional.embedding_bag(self.near, states, self.begins, mode="mean")


class Sage(nn.Module):
    """GraphSAGE with two layers; all ranks begin with the same weights."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.own_first = nn.Linear(features, HIDDEN)
        self.near_first = nn.Linear(features, HIDDEN, bias=False)
        self.own_second = nn.Linear(HIDDEN, classes)
        self.near_second = nn.Linear(HIDDEN, classes, bias=False)
        generator = torch.Generator().manual_seed(0)
        for each in self.parameters():
            scale = each.shape[-1] ** -0.5 if each.dim() == 2 else 0.0
            nn.init.uniform_(each, -scale, scale, generator=generator)

    def forward(self, part: Part, near: Tensor) -> Tensor:
        """The scores of each class; `near` is the mean of the neighbours' features."""
        hidden = functional.relu(self.own_first(part.features) + self.near_first(near))
        scores: Tensor = self.own_second(hidden) + self.near_second(part.mean(hidden))
        return scores


def train(part: Part, classes: int) -> tuple[list[float], int, float]:
    """Train; return this rank's part of each loss, correct held-out nodes, seconds of a step."""
    model = Sage(part.features.shape[1], classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    near = part.mean(part.features)  # features never change, so they come once
    losses, seconds = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        scores = model(part, near)[part.trained]
        summed = functional.cross_entropy(scores, part.labels[part.trained], reduction="sum")
        loss: Any = summed / part.total
        optimizer.zero_grad()
        loss.backward()
        if part.plan is not None:
            weft.sync_grads(model, average=False)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    with torch.no_grad():
        right = model(part, near).argmax(1) == part.labels
    return losses, int(right[~part.trained].sum()), float(np.median(seconds))


def compare(data: Data, group: weft.Group) -> dict[str, Any]:
    """Train on all ranks, then on rank 0 alone; return the results on rank 0.

    Raises:
        SystemExit: the losses differ by more than rounding.
    """
    torch.set_num_threads(1)
    classes = int(data.labels.max()) + 1
    part = Part(data, data.bounds, group.rank)
    group.traffic.reset()
    losses, right, seconds = train(part, classes)
    sent = torch.zeros(group.size, group.size, dtype=torch.float64)
    for peer, nbytes in group.traffic.to.items():
        sent[group.rank, peer] = nbytes / STEPS
    found = weft.all_reduce(torch.tensor([*losses, right], dtype=torch.float64)).numpy()
    sent = weft.all_reduce(sent)
    if group.rank:
        return {}
    whole = Part(data, [0, data.bounds[-1]], 0)
    expected, right_alone, seconds_alone = train(whole, classes)
    apart = float(np.max(np.abs(found[:-1] - expected) / np.abs(expected)))
    if not apart < TOLERANCE:
        raise SystemExit(f"FAILED: losses differ by {apart:g} from those of one process")
    held_out = int((~data.trained).sum())
    return {
        "first": found[0],
        "last": found[-2],
        "apart": apart,
        "right": found[-1] / held_out,
        "right alone": right_alone / held_out,
        "seconds": seconds,
        "seconds alone": seconds_alone,
        "sent": sent.tolist(),
    }


def picture(data: Data, path: str) -> None:
    """Draw each rank's nodes as a disc, and a sample of the edges within and between them."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    ranks, places = len(data.bounds) - 1, np.empty((data.bounds[-1], 2))
    axes = Figure(figsize=(6, 6), layout="constrained").subplots()
    centres = 1.6 * np.exp(-2j * np.pi * np.arange(ranks) / ranks) * (ranks > 1)
    radius = 1.4 * np.sin(np.pi / max(ranks, 2))
    for rank, centre in enumerate(centres):
        low, high = data.bounds[rank : rank + 2]
        at = np.random.default_rng(rank).permutation(high - low)
        spiral = radius * np.sqrt((at + 0.5) / (high - low)) * np.exp(2.4j * at)
        places[low:high] = np.stack([(centre + spiral).real, (centre + spiral).imag], 1)
        axes.plot(*places[low : high : 1 + (high - low) // 400].T, ".", markersize=3)
        text = f"rank {rank}: {high - low:,} nodes"
        axes.annotate(text, (centre.real, centre.imag + radius), ha="center", backgroundcolor="w")
    step, crossing = 1 + len(data.edges) // 2000, data.crossing()
    for which, colour in ((~crossing, "0.8"), (crossing, "tab:red")):
        lines = list(places[data.edges[::step][which[::step]]])
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.3))
    axes.set_title(f"{crossing.mean():.1%} of {len(crossing):,} edges cross (red)", pad=20)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="a graph network on a graph that is cut")
    parser.add_argument("--picture", metavar="FILE", help="draw the cut")
    options = parser.parse_args()
    with weft.init() as group:
        made: list[Any] = [None]
        if group.rank == 0:  # one rank reads and cuts: files may change meanwhile
            graph = imports()
            made = [Data.of(graph, group.size)]
            print(f"{graph.source}: {len(graph.names):,} nodes, {len(graph.edges):,} edges")
        dist.broadcast_object_list(made, 0)
        data: Data = made[0]
        found = compare(data, group)
        if group.rank:
            return
        if options.picture:
            picture(data, options.picture)
        print(f"cut into {group.size}: {data.crossing().mean():.1%} of the edges cross")
        for rank, row in enumerate(found["sent"]):
            print(f"rank {rank} sends in a step:", *(f"{n / 1024:8,.0f} KiB" for n in row))
        print(
            f"a step takes {found['seconds'] * 1e3:.1f} ms, {found['seconds alone'] * 1e3:.1f} in "
            f"one process; class found for {found['right']:.1%} of the held-out nodes, "
            f"{found['right alone']:.1%}"
        )
        print(
            f"loss {found['first']:.3f} -> {found['last']:.3f} in {STEPS} steps, "
            f"{found['apart']:.1e} from one process"
        )
        print("PASSED")


if __name__ == "__main__":
    main()
