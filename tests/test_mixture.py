"""Calls of all kinds one after the other on one wire: what one leaves behind is no other's trouble.

Sizes are drawn from both sides of every threshold: what travels in an opening, on either lane, and
what is read where it lies.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import weft
from weft.testing import spmd

SIZES = (0, 1, 100, 5000, 20_000, 40_000, 70_000, 140_000, 300_000)
HEIGHT = 20_000


@pytest.mark.parametrize("seed", range(3))
@spmd(2, 3, 4)
def test_calls_of_all_kinds_follow_each_other(wire, seed):
    drawn = random.Random(seed)  # the same on all ranks
    layers = layers_among(wire.size)
    calls: tuple[Callable[..., None], ...] = (all_to_all, sparse, tables, dense, later, moved)
    for _ in range(40):
        call = drawn.choice(calls)
        if call is moved:
            moved(wire, drawn, drawn.choice(layers))
        else:
            call(wire, drawn)


def layers_among(ranks: int) -> list[torch.nn.Module]:
    rows, columns = weft.Partition((ranks, 1)), weft.Partition((1, ranks))
    return [
        weft.nn.AllGather(rows, dims=0),
        weft.nn.AllSumReduce(rows, dims=0),
        weft.nn.Repartition(rows, columns),
        weft.nn.HaloExchange(rows, ((1, 1), (0, 0))),
    ]


def moved(wire, drawn, layer):
    shape = drawn.choice((1, 4, 64)) * wire.size, drawn.choice((1, 16, 512)) * wire.size
    for _ in range(drawn.choice((1, 4))):  # the third time it is a habit
        x = torch.full(shape, float(wire.rank + 1), requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert x.grad.shape == shape
        if isinstance(layer, weft.nn.AllSumReduce):
            assert bool((y == wire.size * (wire.size + 1) / 2).all())
        if isinstance(layer, weft.nn.AllGather):
            assert y.unique(sorted=True).tolist() == [rank + 1.0 for rank in range(wire.size)]


def all_to_all(wire, drawn):
    ranks = range(wire.size)
    sizes = [[drawn.choice(SIZES) for _ in ranks] for _ in ranks]
    came = weft.all_to_all([torch.full((sizes[wire.rank][to],), wire.rank) for to in ranks])
    for rank in ranks:
        assert came[rank].tolist() == [rank] * sizes[rank][wire.rank]


def rows_of(wire, drawn) -> tuple[tuple[Tensor, Tensor], int]:
    counts = [drawn.choice(SIZES) // 20 for _ in range(wire.size)]
    generator = torch.Generator().manual_seed(wire.rank)
    indices = torch.randint(HEIGHT, (counts[wire.rank],), generator=generator)
    return (indices, torch.ones(len(indices), 8)), sum(counts)


def sparse(wire, drawn):
    rows, total = rows_of(wire, drawn)
    assert weft.sparse_all_reduce(rows)[1][:, 0].sum() == total


def tables(wire, drawn):
    several = [rows_of(wire, drawn) for _ in range(drawn.choice((2, 5)))]
    results = weft.sparse_all_reduce([rows for rows, _ in several])
    for (_, total), (_, values) in zip(several, results, strict=True):
        assert values[:, 0].sum() == total


def later(wire, drawn):
    several = [rows_of(wire, drawn) for _ in range(2)]
    works = [weft.sparse_all_reduce(rows, async_op=True) for rows, _ in several]
    dense(wire, drawn)
    for (_, total), work in zip(several, works, strict=True):
        assert work.wait()[1][:, 0].sum() == total


def dense(wire, drawn):
    summed = weft.all_reduce(torch.full((drawn.choice(SIZES),), wire.rank + 1.0))
    assert bool((summed == wire.size * (wire.size + 1) / 2).all())
    weft.barrier()
