"""Every layer against one process that has all tensors: values, gradients, second gradients.

HaloExchange is in `test_halo`. The data are random, so that no permutation of blocks passes. A case
says what each rank brings and what all get, in torch operations on the list of all tensors; rank 4
is outside of most grids.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import weft
from weft import nn
from weft.nn import autograd, executor
from weft.schedules import chain
from weft.testing import run, spmd

P = weft.Partition
N = None  # a rank that brings nothing, or gets nothing


def cat(xs, dim=0):
    return torch.cat(list(xs), dim)


def square(x):
    """Four tensors on a 2 x 2 grid, put together."""
    return cat([cat(x[:2], 1), cat(x[2:4], 1)])


def parts(x, lengths, dim=0):
    return list(torch.split(x, list(lengths), dim))


def quarters(x, rows, columns):
    return [piece for row in parts(x, rows) for piece in parts(row, columns, 1)]


# name: (layer, shape of each rank's tensor, what each gets of all tensors)
CASES = {
    "all_gather": (
        lambda: nn.AllGather(P((2, 2)), 0),
        [(1, 3), (2, 2), (4, 3), (3, 2)],
        lambda x: [cat(x[0:4:2]), cat(x[1:4:2]), cat(x[0:4:2]), cat(x[1:4:2])],
    ),
    "all_gather two dims": (
        lambda: nn.AllGather(P((2, 2)), (1, 0)),
        [(1, 3, 2), (1, 2, 2), (4, 3, 2), (4, 2, 2)],
        lambda x: [square(x)] * 4,
    ),
    "all_gather empty": (
        lambda: nn.AllGather(P(4, ranks=[3, 0, 4, 1]), 0),
        [(4, 2), (0, 2), N, (4, 2), (0, 2)],
        lambda x: [cat([x[3], x[0]])] * 2 + [N] + [cat([x[3], x[0]])] * 2,
    ),
    "all_gather of few dimensions": (
        lambda: nn.AllGather(P((2, 2)), 0),
        [(3,), (2,), (1,), (4,)],
        lambda x: [cat(x[0:4:2]), cat(x[1:4:2]), cat(x[0:4:2]), cat(x[1:4:2])],
    ),
    "all_gather nowhere": (
        lambda: nn.AllGather(P((2, 1)), ()),
        [(3,), (2,)],
        lambda x: [x[0].clone(), x[1].clone()],
    ),
    "reduce_scatter": (
        lambda: nn.ReduceScatter(P((2, 2)), -1),
        [(3, 5), (3, 5), (2, 1), (2, 1)],
        lambda x: [*parts(x[0] + x[1], [3, 2], 1), *parts(x[2] + x[3], [1, 0], 1)],
    ),
    "reduce_scatter lengths": (
        lambda: nn.ReduceScatter(P((2, 2)), (0, 1), lengths=[(1, 4), None]),
        [(5, 3)] * 4,
        lambda x: quarters(sum(x[:4]), (1, 4), (2, 1)),
    ),
    "broadcast": (
        lambda: nn.Broadcast(P((2, 2)), 0),
        [(3, 2), (4,), N, N],
        lambda x: [x[0].clone(), x[1].clone(), x[0].clone(), x[1].clone()],
    ),
    "broadcast to another grid": (
        lambda: nn.Broadcast(P((1, 2), ranks=[4, 0]), P((2, 2), ranks=[1, 2, 3, 0])),
        [(3,), N, N, N, (2, 2)],
        lambda x: [x[0].clone(), x[4].clone(), x[0].clone(), x[4].clone(), N],
    ),
    "broadcast in a circle": (
        lambda: nn.Broadcast(P(2, ranks=[0, 1]), P((2, 2), ranks=[1, 2, 3, 0])),
        [(3,), (2, 2)],
        lambda x: [x[1].clone(), x[0].clone(), x[1].clone(), x[0].clone()],
    ),
    "sum_reduce": (
        lambda: nn.SumReduce(P((2, 2)), (0, 1)),
        [(3, 2)] * 4,
        lambda x: [sum(x[:4]), N, N, N],
    ),
    "sum_reduce to another grid": (
        lambda: nn.SumReduce(P((2, 2), ranks=[1, 2, 3, 0]), P((2, 1), ranks=[4, 1])),
        [(2,), (3,), (3,), (2,)],
        lambda x: [N, x[3] + x[0], N, N, x[1] + x[2]],
    ),
    "all_sum_reduce": (
        lambda: nn.AllSumReduce(P((2, 2)), 0),
        [(2, 3), (5,), (2, 3), (5,)],
        lambda x: [x[0] + x[2], x[1] + x[3]] * 2,
    ),
    "all_sum_reduce of scalars": (
        lambda: nn.AllSumReduce(P(5), 0),
        [()] * 5,
        lambda x: [sum(x)] * 5,
    ),
    "scatter": (
        lambda: nn.Scatter(P((2, 2)), (0, 1), lengths=[None, (3, 1)]),
        [(3, 4), N, N, N],
        lambda x: quarters(x[0], (2, 1), (3, 1)),
    ),
    "gather": (
        lambda: nn.Gather(P((2, 2)), 1),
        [(2, 1), (2, 3), (1, 0), (1, 2)],
        lambda x: [cat(x[:2], 1), N, cat(x[2:4], 1), N],
    ),
    "all_to_all": (
        lambda: nn.AllToAll(P((1, 3), ranks=[0, 2, 4]), (-2, 1), along=-1),
        [(2, 4), N, (3, 4), N, (0, 4)],
        lambda x: (lambda y: [y[0], N, y[1], N, y[2]])(
            parts(cat([x[0], x[2], x[4]]), (2, 1, 1), 1)
        ),
    ),
    "repartition": (
        lambda: nn.Repartition(P((4, 1)), P((1, 4))),
        [(2, 5), (1, 5), (0, 5), (3, 5)],
        lambda x: parts(cat(x[:4]), (2, 1, 1, 1), 1),
    ),
    "repartition to other ranks": (
        lambda: nn.Repartition(P(2, ranks=[1, 0]), P((3, 1), ranks=[4, 2, 3])),
        [(3, 2), (4, 2)],
        lambda x: (lambda y: [N, N, y[1], y[2], y[0]])(parts(cat([x[1], x[0]]), (3, 2, 2))),
    ),
    "repartition to lengths": (
        lambda: nn.Repartition(P((2, 2)), P(3, ranks=[4, 0, 1]), lengths=[(1, 0, 4)]),
        [(3, 1), (3, 2), (2, 1), (2, 2)],
        lambda x: (lambda y: [y[1], y[2], N, N, y[0]])(parts(square(x), (1, 0, 4))),
    ),
}


def tensors(shapes, seed, dtype=torch.float64):
    """One for each of five ranks, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [*shapes, *[N] * (5 - len(shapes))]
    return [
        torch.randn((0,) if shape is None else shape, generator=generator, dtype=dtype)
        for shape in shapes
    ]


def filled(ys):
    ys = [*ys, *[N] * (5 - len(ys))]
    return [torch.empty(0, dtype=torch.float64) if y is None else y for y in ys]


WAYS = {
    "eager": {},
    "moves": {(autograd, "EAGER"): -1},
    "schedules": {
        (autograd, "EAGER"): -1,
        (executor, "DIRECT"): -1,
        (chain, "CHUNKS"): (16, 16),
    },
    "verbs": {(executor, "_directly"): None, (autograd, "assemble"): None},
}
"""How tensors travel: with the opening; as messages; by the hint's schedule, in chunks; by verbs
alone, where tensors of the group do."""


@contextmanager
def travelling(way):
    before = {(module, name): getattr(module, name) for module, name in WAYS[way]}
    for (module, name), value in WAYS[way].items():
        setattr(module, name, value)
    yield
    for (module, name), value in before.items():
        setattr(module, name, value)


@pytest.mark.parametrize(
    ("way", "on"),
    [("eager", "threads"), ("moves", "threads"), ("schedules", "threads"), ("verbs", "verbs")],
)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, way, on):
    with travelling(way):
        run(5, check, name, on=on)


@pytest.mark.parametrize(
    "name", ["all_gather two dims", "sum_reduce to another grid", "repartition"]
)
@spmd(5, on=("processes",))
def test_on_processes(group, name):
    with travelling("schedules"):
        check(group, name)


@spmd(5, on=("gloo",))
def test_over_gloo(group):
    with travelling("verbs"):
        for name in CASES:
            check(group, name)


def check(group, name):
    make, shapes, reference = CASES[name]
    layer, me = make(), group.rank

    everything = [x.requires_grad_() for x in tensors(shapes, 1)]
    expected = filled(reference(everything))
    weights = tensors([tuple(y.shape) for y in expected], 2)
    cubes = [(y**3 * w).sum() for y, w in zip(expected, weights, strict=True)]
    firsts = torch.autograd.grad(sum(cubes), everything, create_graph=True, allow_unused=True)
    others = tensors(shapes, 3)
    seconds = torch.autograd.grad(
        sum((g * v).sum() for g, v in zip(firsts, others, strict=True) if g is not None),
        everything,
        allow_unused=True,
    )

    x = tensors(shapes, 1)[me].requires_grad_()
    y = layer(x)
    assert y.shape == expected[me].shape
    assert torch.equal(y, expected[me]) or torch.allclose(y, expected[me], rtol=1e-12)
    (first,) = torch.autograd.grad((y**3 * weights[me]).sum(), x, create_graph=True)
    assert first.shape == x.shape
    (second,) = torch.autograd.grad((first * others[me]).sum(), x)
    for found, wanted in ((first, firsts[me]), (second, seconds[me])):
        wanted = torch.zeros_like(x) if wanted is None else wanted
        assert torch.allclose(found, wanted, rtol=1e-10), name
