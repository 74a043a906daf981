"""Time the layers of weft.nn and PyTorch's ways of doing the same, forward and backward.

    python benchmarks/partition.py [--ranks 4] [--rounds 10] [--only all_gather,halo]
    tools/netlab -n 4 --rate 1gbit --raw -- python benchmarks/partition.py

The input of a rank is `--mib` MiB of float32. The peers are `torch.distributed.nn.functional`, the
functional collectives that DTensor uses, `all_to_all_single`, and send and receive in an autograd
function written by hand, all on the gloo group on which weft was started. The values and gradients
of each contender are checked first. Then they take turns, with a barrier before each pass; a pass
takes as long as its slowest rank.

Times are medians. The ratio is the time of the fastest peer over weft's. A second table has the
same for tensors of 1 KiB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from torch import Tensor

import weft
from turns import on_ranks

TINY_REPEAT = 20  # calls that are timed together

Way = Callable[[Tensor], Tensor]
"""What a contender does to a rank's tensor; autograd knows its backward."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation.

    Attributes:
        name: of the row.
        shape: of the tensor that this rank brings.
        weft: its way of doing it.
        peers: other ways, by name.
        forward: this rank's result, from what all ranks bring.
        backward: this rank's gradient, from the gradients of all ranks' results.
    """

    name: str
    shape: tuple[int, ...]
    weft: Way
    peers: dict[str, Way]
    forward: Callable[[Sequence[Tensor]], Tensor]
    backward: Callable[[Sequence[Tensor]], Tensor]


@dataclass(slots=True)
class Figures:
    """Seconds of a contender's passes, those of the slowest rank."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float, float]:
        both = [a + b for a, b in zip(self.forward, self.backward, strict=True)]
        return tuple(statistics.median(each) for each in (self.forward, self.backward, both))  # type: ignore[return-value]  # three


class SentHalo(torch.autograd.Function):
    """A halo of one row, by hand: the edge rows go to the neighbours, zeros beyond the edges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        y = x.new_empty((len(x) + 2, *x.shape[1:]))
        works = []
        if rank > 0:
            works += [dist.irecv(y[0], rank - 1), dist.isend(x[0], rank - 1)]
        else:
            y[0].zero_()
        if rank < ranks - 1:
            works += [dist.irecv(y[-1], rank + 1), dist.isend(x[-1], rank + 1)]
        else:
            y[-1].zero_()
        y[1:-1] = x
        for work in works:
            work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        above, below = torch.empty_like(grad[0]), torch.empty_like(grad[0])
        works = []
        if rank > 0:
            works += [dist.irecv(above, rank - 1), dist.isend(grad[0], rank - 1)]
        if rank < ranks - 1:
            works += [dist.irecv(below, rank + 1), dist.isend(grad[-1], rank + 1)]
        back = grad[1:-1].clone()
        for work in works:
            work.wait()
        if rank > 0:
            back[0] += above
        if rank < ranks - 1:
            back[-1] += below
        return back


class SentColumns(torch.autograd.Function):
    """From rows to columns by hand: each block of columns to its rank, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = len(x)
        ranks = dist.get_world_size()
        y = x.new_empty((ranks * len(x), x.shape[1] // ranks))
        _swapped(list(x.chunk(ranks, 1)), list(y.chunk(ranks)))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        parts = [torch.empty_like(each) for each in grad.chunk(ranks)]
        _swapped(list(grad.chunk(ranks)), parts)
        return torch.cat(parts, 1)


def _swapped(out: list[Tensor], into: list[Tensor]) -> None:
    rank = dist.get_rank()
    works = [dist.irecv(into[peer], peer) for peer in range(len(into)) if peer != rank]
    sent = [out[peer].contiguous() for peer in range(len(out))]
    works += [dist.isend(sent[peer], peer) for peer in range(len(out)) if peer != rank]
    into[rank].copy_(out[rank])
    for work in works:
        if work is not None:
            work.wait()


def cases(rank: int, ranks: int, elements: int, row: dist.ProcessGroup) -> list[Case]:
    """All of them, for tensors of about so many elements; `row` has this rank's row of a grid."""
    group = dist.group.WORLD
    columns = max(ranks * 2, 1 << (elements.bit_length() // 2))
    columns -= columns % ranks
    shape = (max(ranks, elements // columns) // ranks * ranks, columns)
    line, flat = weft.Partition(ranks), weft.Partition((1, ranks))
    grid = weft.Partition((ranks // 2, 2))
    one = weft.Partition(1, ranks=[0])
    beside = [rank // 2 * 2, rank // 2 * 2 + 1]
    upright = weft.Partition((ranks, 1))
    gather, gather_last = weft.nn.AllGather(line, 0), weft.nn.AllGather(flat, -1)
    gather_grid, scatter = weft.nn.AllGather(grid, -1), weft.nn.ReduceScatter(line, 0)
    all_sum, spread = weft.nn.AllSumReduce(line, 0), weft.nn.Broadcast(one, line)
    collect = weft.nn.SumReduce(line, 0)
    turn, halo = weft.nn.Repartition(upright, flat), weft.nn.HaloExchange(upright, (1, 0))
    whole = ranks * shape[0], shape[1]
    at, wide = rank * shape[0], shape[1] // ranks

    def gathered(dim: int, among: dist.ProcessGroup | None) -> dict[str, Way]:
        found: dict[str, Way] = {
            "funcol": lambda x: funcol.all_gather_tensor_autograd(x, dim, among)
        }
        if among is group:  # its backward fails in a group that is not all ranks
            found["nn.functional"] = lambda x: torch.cat(dnn.all_gather(x, among), dim)
        return found

    def sum_of(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(tensors)).sum(0)

    def grown(tensors: Sequence[Tensor]) -> Tensor:
        edge = torch.zeros(1, shape[1])
        return torch.cat((edge, *tensors, edge))[at : at + shape[0] + 2]

    def shrunk(grads: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(whole[0] + 2, whole[1])
        for each, grad in enumerate(grads):
            total[each * shape[0] : (each + 1) * shape[0] + 2] += grad
        return total[at + 1 : at + 1 + shape[0]]

    def packed(x: Tensor) -> Tensor:
        return x.view(shape[0], ranks, wide).permute(1, 0, 2).reshape(whole[0], wide)

    nothing = torch.empty(0)
    column = rank % 2 * shape[1]
    return [
        Case(
            "all_gather, dim 0",
            shape,
            gather,
            gathered(0, group),
            lambda xs: torch.cat(list(xs)),
            lambda gs: sum_of(gs)[at : at + shape[0]],
        ),
        Case(
            f"all_gather, last dim of 1 x {ranks}",
            shape,
            gather_last,
            gathered(1, group),
            lambda xs: torch.cat(list(xs), 1),
            lambda gs: sum_of(gs)[:, rank * shape[1] : (rank + 1) * shape[1]],
        ),
        Case(
            f"all_gather, last dim of {ranks // 2} x 2",
            shape,
            gather_grid,
            gathered(1, row),
            lambda xs: torch.cat([xs[each] for each in beside], 1),
            lambda gs: sum_of([gs[each] for each in beside])[:, column : column + shape[1]],
        ),
        Case(
            "reduce_scatter",
            whole,
            scatter,
            {
                "nn.functional": lambda x: dnn.reduce_scatter(
                    torch.empty(shape), list(x.chunk(ranks)), group=group
                ),
                "funcol": lambda x: funcol.reduce_scatter_single_autograd(x, "sum", 0, group),
            },
            lambda xs: sum_of([x[at : at + shape[0]] for x in xs]),
            lambda gs: torch.cat(list(gs)),
        ),
        Case(
            "all_sum_reduce",
            shape,
            all_sum,
            {"nn.functional": lambda x: dnn.all_reduce(x, group=group)},
            sum_of,
            sum_of,
        ),
        Case(
            "broadcast",
            shape,
            lambda x: spread(x if rank == 0 else nothing),
            {"nn.functional": lambda x: dnn.broadcast(x, 0, group)},
            lambda xs: xs[0],
            lambda gs: sum_of(gs) if rank == 0 else torch.zeros(shape),
        ),
        Case(
            "sum_reduce",
            shape,
            collect,
            {"nn.functional": lambda x: dnn.reduce(x, 0, group=group)},
            lambda xs: sum_of(xs) if rank == 0 else nothing,
            lambda gs: gs[0],
        ),
        Case(
            f"repartition, {ranks} x 1 to 1 x {ranks}",
            shape,
            turn,
            {
                "all_to_all_single": lambda x: dnn.all_to_all_single(
                    torch.empty(whole[0], wide), packed(x), group=group
                ),
                "funcol": lambda x: funcol.all_to_all_single_autograd(packed(x), None, None, group),
                "send/recv": SentColumns.apply,
            },
            lambda xs: torch.cat([x[:, rank * wide : (rank + 1) * wide] for x in xs]),
            lambda gs: torch.cat([g[at : at + shape[0]] for g in gs], 1),
        ),
        Case(
            f"halo of width 1, {ranks} x 1",
            shape,
            halo,
            {"send/recv": SentHalo.apply},
            grown,
            shrunk,
        ),
    ]


def data(shape: Sequence[int], seed: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, tuple(shape), generator=generator, dtype=torch.int8).float()


def check(case: Case, name: str, way: Way, rank: int, ranks: int) -> None:
    """Values and gradients of one contender.

    Raises:
        AssertionError: they are not what they should be.
    """
    brought = [data(case.shape, each) for each in range(ranks)]
    right = case.forward(brought)
    x = brought[rank].clone().requires_grad_()
    y = way(x)
    root_only = not right.numel()  # what peers leave on the others is undefined
    if not root_only:
        assert torch.equal(_there(y), right), f"{case.name}: {name} is wrong on rank {rank}"
    del right, brought
    shapes: list[tuple[int, ...]] = [()] * ranks
    dist.all_gather_object(shapes, tuple(y.shape))
    grads = [data(shape, 100 + each) for each, shape in enumerate(shapes)]
    y.backward(grads[rank])
    right = case.backward(grads)
    found = torch.zeros(case.shape) if x.grad is None else x.grad
    assert torch.equal(found, right), f"{case.name}: the gradient of {name} is wrong on rank {rank}"


def _there(tensor: Tensor | None) -> Tensor | None:
    """The same, once it has come: functional collectives return before."""
    if isinstance(tensor, funcol.AsyncCollectiveTensor):
        tensor.trigger_wait()
    return tensor


def measure(group: weft.Group, case: Case, rounds: int, repeat: int) -> dict[str, Figures]:
    """Seconds a call of each contender; they take turns."""
    ways = {"weft": case.weft, **case.peers}
    figures = {name: Figures() for name in ways}
    brought = data(case.shape, group.rank)
    inputs = [brought.requires_grad_() for _ in range(repeat)]

    def slowest(since: float) -> float:
        took = torch.tensor([time.perf_counter() - since], dtype=torch.float64)
        return weft.all_reduce(took, "max", group=group).item() / repeat

    for number in range(rounds + 1):
        for name, way in ways.items():
            brought.grad = None
            weft.barrier(group=group)
            start = time.perf_counter()
            made = [_there(way(x)) for x in inputs]
            forward = slowest(start)
            grads = torch.ones_like(made[0])
            weft.barrier(group=group)
            start = time.perf_counter()
            for y in made:
                y.backward(grads)
                _there(brought.grad)
            backward = slowest(start)
            del made, grads
            if number:
                figures[name].forward.append(forward)
                figures[name].backward.append(backward)
    return figures


Result = list[tuple[Case, int, dict[str, Figures]]]


def rank(options: argparse.Namespace) -> list[list[str]]:
    """One rank's program: the rows of both tables."""
    torch.set_num_threads(1)
    with weft.init(timeout=120) as group:
        me, ranks = group.rank, group.size
        rows = [dist.new_group([at, at + 1]) for at in range(0, ranks, 2)]
        tables = []
        for elements, repeat in ((options.mib << 18, 1), (256, TINY_REPEAT)):
            if options.size not in ("both", "tiny" if repeat > 1 else "large"):
                tables.append([])
                continue
            table = []
            for case in cases(me, ranks, elements, rows[me // 2]):
                if not any(word in case.name for word in options.only.split(",")):
                    continue
                for name, way in {"weft": case.weft, **case.peers}.items():
                    check(case, name, way, me, ranks)
                figures = measure(group, case, options.rounds, repeat)
                table += lines(case, figures)
            tables.append(table)
    return tables


def lines(case: Case, figures: dict[str, Figures]) -> list[str]:
    """The lines of one case: forward, backward, both."""
    found = {name: each.medians() for name, each in figures.items()}
    rows = []
    for at, name in enumerate(("forward", "backward", "both")):
        ours = found["weft"][at]
        best = min((way for way in found if way != "weft"), key=lambda way: found[way][at])
        theirs = found[best][at]
        times = f"{ours * 1e3:9.2f}{theirs * 1e3:9.2f}  {best:18}{theirs / ours:6.2f}"
        rows.append(f"{case.name if not at else '':32}{name:9}{times}")
    return rows


def show(tables: list[list[str]], options: argparse.Namespace) -> None:
    for title, rows in zip((f"{options.mib} MiB a rank", "tiny tensors"), tables, strict=True):
        if rows:
            print(f"{title}\n{'':41}{'weft ms':>9}{'peer ms':>9}  {'peer':18}{'ratio':>6}")
            print(*rows, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher; even")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--only", default="", help="words of the operations to measure")
    parser.add_argument("--size", choices=("both", "large", "tiny"), default="both")
    options = parser.parse_args()
    on_ranks(rank, options, lambda tables, _: show(tables, options))


if __name__ == "__main__":
    main()
