"""Layers on random grids, ranks and uneven shards: <A x, y> == <x, A* y>, exactly.

HaloExchange is in `test_halo`.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft import nn
from weft.nn.grid import cells
from weft.testing import run

RANKS = 4
WHOLES = ["ReduceScatter", "AllSumReduce", "SumReduce"]
NAMES = ["AllGather", "Gather", *WHOLES, "Broadcast", "Scatter", "Repartition"]
GRIDS = st.sampled_from([(4,), (2, 2), (1, 3), (2, 1), (1, 1, 2), (2, 1, 2)])


@st.composite
def grids(draw):
    shape = draw(GRIDS)
    ranks = draw(st.permutations(range(RANKS)))
    return shape, ranks[: torch.Size(shape).numel()]


@st.composite
def layers(draw):
    """(name of a layer, its arguments, the shape of each rank's tensor)."""
    shape, ranks = draw(grids())
    lengths = [draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in shape]
    lengths += [[draw(st.integers(1, 2))] for _ in range(3 - len(shape))]
    dims = draw(
        st.lists(st.integers(-len(shape), len(shape) - 1), unique_by=lambda d: d % len(shape))
    )
    kept = [d % len(shape) for d in dims]

    def shapes(whole):
        """Shards along all dimensions but these, along which tensors are whole."""
        return {
            rank: tuple(
                sum(each) if d in whole else each[at] if d < len(shape) else each[0]
                for d, (each, at) in enumerate(zip(lengths, (*cell, 0, 0, 0), strict=False))
            )
            for rank, cell in zip(ranks, cells(shape), strict=True)
        }

    name = draw(st.sampled_from(NAMES))
    if name in ("AllGather", "Gather"):
        return name, (shape, ranks), dims, shapes([])
    if name == "Repartition":
        return name, (shape, ranks), draw(grids()), shapes([])
    found = shapes(kept)
    if name in ("Broadcast", "Scatter"):
        places = dict(zip(ranks, cells(shape), strict=True))
        found = {r: each for r, each in found.items() if not any(places[r][d] for d in kept)}
    return name, (shape, ranks), dims, found


def numbers(rank, shape, seed):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randint(-9, 9, shape, generator=generator).double()


@given(layers(), st.sampled_from(["threads", "verbs"]))
@settings(max_examples=40)
def test_the_adjoint(case, on):
    name, (shape, ranks), argument, shapes = case

    def program(group):
        grid = weft.Partition(shape, ranks=ranks)
        if name == "Repartition":
            layer = nn.Repartition(grid, weft.Partition(argument[0], ranks=argument[1]))
        else:
            layer = getattr(nn, name)(grid, argument)
        x = numbers(group.rank, shapes.get(group.rank, (0,)), 1).requires_grad_()
        y = layer(x)
        w = numbers(group.rank, tuple(y.shape), 2)
        (grad,) = torch.autograd.grad(y, x, w)
        assert grad.shape == x.shape
        return (y * w).sum().item(), (x * grad).sum().item(), y.detach().sum().item()

    found = run(RANKS, program, on=on)
    assert sum(each[0] for each in found) == sum(each[1] for each in found)
    if name in ("Repartition", "Gather", "Scatter") and shapes:
        total = sum(numbers(rank, each, 1).sum().item() for rank, each in shapes.items())
        assert sum(each[2] for each in found) == total
