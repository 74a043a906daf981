"""Time whole steps of training with weft, and the same steps by PyTorch alone.

    python benchmarks/trainings.py [--ranks 4] [--rounds 9] [--way tables,graph]
    tools/netlab -n 4 --rate 1gbit --raw -- python benchmarks/trainings.py
    PYTHONPATH=OTHER/src python benchmarks/trainings.py                       # of another checkout

Both begin with the same weights and train on the same batches, in turns in one run:

* `tables`: a recommender with 26 sparse tables under DistributedDataParallel, with
  `weft.ddp.register` and without. gloo has one thread there: with two, its default, the process may
  end by a defect of torch's (docs/ddp.md);
* `graph`: GraphSAGE on a graph that is cut over the ranks. Neighbours' states go by SAR's
  `all_to_all`, and gradients by its `gather_grads`; in PyTorch by `all_to_all_single`, and by one
  `all_reduce` of all gradients;
* `unet`: a U-Net on images that are cut in 2 x 2 parts (4 ranks), with `weft.nn.HaloExchange` and
  `weft.sync_grads`; in PyTorch with edges sent by hand, first rows and then columns;
* `ddp`, `fsdp2`, `dtensor`: a perceptron of 25 MB over the backend `weft` and over gloo, with
  nothing of weft's in the model;
* `broadcast`: not a training, but `dist.broadcast` of 4 MB over both.

The losses of a way must be the same to rounding, and go down, before it is timed. A time is that of
the slowest rank, for one step; the ratio is PyTorch's time divided by weft's in each round: their
median, and the range of the middle half of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import weft
import weft.ddp
import weft.nn
from turns import on_ranks
from weft.compat.sar import comm as sar
from weft.testing import gloo_of_one_thread

STEPS = 3  # in a turn

Step = Callable[[], float]
"""Takes a step; its loss, averaged over the ranks."""

Contenders = tuple[Step, Step]
"""weft's, and PyTorch's."""


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


def training(
    model: nn.Module, loss_of: Callable[[], Tensor], rate: float, sync: Callable[[], object]
) -> Step:
    """Steps of SGD. `sync` sums gradients that backward leaves as they are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        sync()
        optimizer.step()
        return mean_over_ranks(loss)

    return step


def sum_gradients(model: nn.Module) -> None:
    """As a person would write it: one all_reduce of all."""
    gradients = [each.grad for each in model.parameters()]
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


# 26 tables

TABLES, HEIGHT, COLUMNS, BATCH = 26, 20_000, 16, 512


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(
            nn.Embedding(HEIGHT, COLUMNS, sparse=True) for _ in range(TABLES)
        )
        self.dense = nn.Sequential(
            nn.Linear(TABLES * COLUMNS, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0)
        )

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(column) for table, column in zip(self.tables, ids.T, strict=True)]
        return self.dense(torch.cat(rows, dim=1))


def tables() -> Contenders:
    draw = torch.Generator().manual_seed(dist.get_rank())
    # the k-th row is looked up with a probability of 1/k
    ids = torch.rand(BATCH, TABLES, generator=draw).mul(torch.tensor(HEIGHT).log()).exp().long() - 1
    clicked = (ids % 3 == 0).float().mean(1).round()

    def contender(model: DistributedDataParallel) -> Step:
        def loss() -> Tensor:
            return functional.binary_cross_entropy_with_logits(model(ids), clicked)

        return training(model, loss, 0.5, lambda: None)

    ours = DistributedDataParallel(Recommender())
    weft.ddp.register(ours)
    one_thread = dist.new_group(backend=gloo_of_one_thread())
    return contender(ours), contender(
        DistributedDataParallel(Recommender(), process_group=one_thread)
    )


# a graph

NODES, NEAR, FEATURES, FAR = 8_000, 8, 64, 0.1


class Fetched(torch.autograd.Function):
    """Rows of other ranks: each gets those that it asked for, and gives their gradients back."""

    @staticmethod
    def forward(ctx, own, move, wanted, counts):  # type: ignore[no-untyped-def]  # as torch's
        """`wanted`: the rows that each rank wants of these; `counts`: how many this one gets."""
        ctx.move, ctx.wanted, ctx.counts, ctx.height = move, wanted, counts, len(own)
        return move([own[rows] for rows in wanted], counts)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]  # as torch's
        back = ctx.move(list(gradient.split(ctx.counts)), [len(rows) for rows in ctx.wanted])
        total = gradient.new_zeros(ctx.height, gradient.shape[1])
        return total.index_add_(0, torch.cat(ctx.wanted), back), None, None, None


def moved_by_sar(parts: list[Tensor], counts: list[int]) -> Tensor:
    out = torch.empty(sum(counts), parts[0].shape[1])
    sar.all_to_all(list(out.split(counts)), parts)
    return out


def moved_by_torch(parts: list[Tensor], counts: list[int]) -> Tensor:
    out = torch.empty(sum(counts), parts[0].shape[1])
    dist.all_to_all_single(out, torch.cat(parts), counts, [len(part) for part in parts])
    return out


class Sage(nn.Module):
    """GraphSAGE with the mean of all neighbours."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.near = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))

    def forward(self, states: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        for own, near in zip(self.own, self.near, strict=True):
            states = torch.tanh(own(states) + near(mean(states)))
        return states


def graph() -> Contenders:
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    # neighbours by rank and number there: most are of the same rank
    ranks = torch.where(
        torch.rand(NODES, NEAR, generator=draw) < FAR,
        torch.randint(size, (NODES, NEAR), generator=draw),
        rank,
    )
    numbers = torch.randint(NODES, (NODES, NEAR), generator=draw)
    far = ranks != rank
    asked = [numbers[far & (ranks == peer)].unique() for peer in range(size)]
    wanted: list[list[Tensor]] = [[] for _ in range(size)]
    dist.all_gather_object(wanted, asked)
    given = [wanted[peer][rank] for peer in range(size)]
    counts = [len(rows) for rows in asked]
    places = numbers.clone()
    for peer in range(size):
        here = far & (ranks == peer)
        start = NODES + sum(counts[:peer])
        places[here] = start + torch.searchsorted(asked[peer], numbers[here])
    features = torch.randn(NODES, FEATURES, generator=draw)
    goal = torch.tanh(features.roll(1, 1))

    def contender(move: Callable[..., Tensor], sync: Callable[[nn.Module], object]) -> Step:
        model = Sage()

        def mean(states: Tensor) -> Tensor:
            others = Fetched.apply(states, move, given, counts)
            both = torch.cat([states, others])
            return functional.embedding_bag(places, both, mode="mean")

        def loss() -> Tensor:
            return (model(features, mean) - goal).square().sum() / (size * NODES)

        return training(model, loss, 0.01, lambda: sync(model))

    return contender(moved_by_sar, sar.gather_grads), contender(moved_by_torch, sum_gradients)


# a U-Net

IMAGES, EDGE, CHANNELS = 2, 192, 12


class Extended(torch.autograd.Function):
    """A part with the edges of its neighbours in a dimension, or zeros where there is none."""

    @staticmethod
    def forward(ctx, x, dim, peers):  # type: ignore[no-untyped-def]  # as torch's
        ctx.dim, ctx.peers = dim, peers
        edges = [x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)]
        before, after = swapped(edges, peers)
        return torch.cat([before, x, after], dim)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]  # as torch's
        dim, length = ctx.dim, gradient.shape[ctx.dim] - 2
        edges = [gradient.narrow(dim, 0, 1), gradient.narrow(dim, length + 1, 1)]
        own = gradient.narrow(dim, 1, length).clone()
        before, after = swapped(edges, ctx.peers)
        own.narrow(dim, 0, 1).add_(before)
        own.narrow(dim, length - 1, 1).add_(after)
        return own, None, None


def swapped(edges: list[Tensor], peers: list[int | None]) -> list[Tensor]:
    """What the ranks before and after have sent, to which the edges go; zeros of nobody."""
    sent = [edge.contiguous() for edge in edges]
    came = [torch.zeros_like(edge) for edge in sent]
    works = []
    for peer, edge, into in zip(peers, sent, came, strict=True):
        if peer is not None:
            works += [dist.isend(edge, peer), dist.irecv(into, peer)]
    for work in works:
        work.wait()
    return came


class UNet(nn.Module):
    """Two levels; `extend` gives a part the edges that a 3 x 3 convolution needs."""

    def __init__(self, extend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.extend = extend
        self.down = nn.Conv2d(1, CHANNELS, 3)
        self.below = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3)
        self.up = nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 2, stride=2)
        self.last = nn.Conv2d(2 * CHANNELS, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(self.extend(x)).relu()
        coarse = self.below(self.extend(functional.max_pool2d(fine, 2))).relu()
        return self.last(self.extend(torch.cat([fine, self.up(coarse)], 1)))


def unet() -> Contenders:
    if dist.get_world_size() != 4:
        raise SystemExit("unet is cut in 2 x 2 parts: use 4 ranks, or other ways")
    row, column = divmod(dist.get_rank(), 2)
    whole = torch.randn(IMAGES, 1, EDGE, EDGE, generator=torch.Generator().manual_seed(0))
    goal = functional.avg_pool2d(whole, 3, 1, 1)
    own = [each.chunk(2, 2)[row].chunk(2, 3)[column].contiguous() for each in (whole, goal)]
    rows = [dist.get_rank() - 2 if row else None, None if row else dist.get_rank() + 2]
    columns = [dist.get_rank() - 1 if column else None, None if column else dist.get_rank() + 1]

    def extended(x: Tensor) -> Tensor:
        return Extended.apply(Extended.apply(x, 2, rows), 3, columns)

    def contender(model: UNet, sync: Callable[[nn.Module], object]) -> Step:
        def loss() -> Tensor:
            return (model(own[0]) - own[1]).square().sum() / (IMAGES * EDGE * EDGE)

        return training(model, loss, 0.02, lambda: sync(model))

    alone = UNet(lambda x: functional.pad(x, (1, 1, 1, 1)))
    expected = (alone(whole) - goal).square().mean().item()
    halo = weft.nn.HaloExchange(weft.Partition((1, 1, 2, 2)), (0, 0, 1, 1))
    ours = contender(UNet(halo), lambda model: weft.sync_grads(model, average=False))
    by_hand = contender(UNet(extended), sum_gradients)
    found = (UNet(halo)(own[0]) - own[1]).square().sum() / (IMAGES * EDGE * EDGE)
    torch.testing.assert_close(4 * mean_over_ranks(found), expected, rtol=1e-4, atol=0)
    return ours, by_hand


# the backend

WIDTH, LAYERS, SAMPLES = 1024, 6, 32


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers)


def over_both(wrap: Callable[[dist.ProcessGroup], nn.Module], shared: bool = False) -> Contenders:
    """A model that learns to give back what it gets; `shared`: all ranks have the same batch."""
    draw = torch.Generator().manual_seed(0 if shared else dist.get_rank())
    batch = torch.randn(SAMPLES, WIDTH, generator=draw).tanh()

    def contender(model: nn.Module) -> Step:
        return training(model, lambda: (model(batch) - batch).square().mean(), 20.0, lambda: None)

    ours, gloo = (contender(wrap(dist.new_group(backend=kind))) for kind in ("weft", "gloo"))
    return ours, gloo


def ddp() -> Contenders:
    return over_both(lambda group: DistributedDataParallel(perceptron(), process_group=group))


def fsdp2() -> Contenders:
    def wrap(group: dist.ProcessGroup) -> nn.Module:
        mesh = DeviceMesh.from_group(group, "cpu")
        model = perceptron()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return over_both(wrap)


def dtensor() -> Contenders:
    """Pairs of layers are cut by columns and by rows."""
    plan = {
        str(number): RowwiseParallel() if number % 4 else ColwiseParallel()
        for number in range(0, 2 * LAYERS, 2)
    }

    def wrap(group: dist.ProcessGroup) -> nn.Module:
        return parallelize_module(perceptron(), DeviceMesh.from_group(group, "cpu"), plan)

    return over_both(wrap, shared=True)


def broadcast() -> Contenders:
    """Not a training: the "loss" is what is left to come, and that is nothing."""

    def contender(kind: str) -> Step:
        group = dist.new_group(backend=kind)
        tensor = torch.zeros(1 << 20)

        def step() -> float:
            tensor.fill_(float(dist.get_rank() == 0))
            dist.broadcast(tensor, 0, group=group)
            return float(tensor[-1] != 1)

        return step

    return contender("weft"), contender("gloo")


WAYS = {each.__name__: each for each in (tables, graph, unet, ddp, fsdp2, dtensor, broadcast)}


def slowest(seconds: float) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def measured(way: str, rounds: int) -> list[str]:
    """A row of the table: weft's and PyTorch's milliseconds of a step, and how often as long."""
    contenders = dict(zip(("weft", "torch"), WAYS[way](), strict=True))
    losses = {name: [step() for _ in range(5)] for name, step in contenders.items()}
    torch.testing.assert_close(losses["weft"], losses["torch"], rtol=1e-3, atol=0)
    first, *_, last = losses["weft"]
    assert last < first or way == "broadcast", losses
    passed: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                contenders[name]()
            passed[name].append(slowest(time.perf_counter() - began) / STEPS * 1e3)
    ratios = [theirs / ours for ours, theirs in zip(*passed.values(), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    times = [f"{statistics.median(each):.1f}" for each in passed.values()]
    return [way, f"{first:.4f} -> {last:.4f}", *times, f"{middle:.2f} ({low:.2f} to {high:.2f})"]


def rank(given: argparse.Namespace) -> list[list[str]]:
    """One rank: the rows of the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with weft.init():
        rows = [measured(way, given.rounds) for way in given.way.split(",")]
    dist.destroy_process_group()
    return rows


def show(rows: list[list[str]], ranks: int) -> None:
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{ranks} ranks, load {load}, {weft.__file__}")
    print(f"{'':10}{'losses':20}{'weft, ms':>10}{'torch, ms':>10}  ratio")
    for way, losses, ours, theirs, ratio in rows:
        print(f"{way:10}{losses:20}{ours:>10}{theirs:>10}  {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9, help="two at least: there are quartiles")
    parser.add_argument("--way", default=",".join(WAYS))
    on_ranks(rank, parser.parse_args(), show)


if __name__ == "__main__":
    main()
