"""Margins of any width for each rank, against the whole tensor: values and gradients."""

from __future__ import annotations

import math
from itertools import accumulate
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft import nn
from weft.nn import autograd
from weft.nn.grid import cells
from weft.testing import run

WAYS = [("threads", -1), ("threads", autograd.EAGER), ("verbs", autograd.EAGER)]
"""What ranks are, and the bytes of tensors that go with the opening: none, few, none by verbs."""

MODES = {"zero": "constant", "periodic": "wrap"}
WIDEST = 9


@st.composite
def halos(draw):
    """(grid, ranks, lengths of the parts, widths by cell, boundary)."""
    grid = draw(st.sampled_from([(4,), (3,), (2, 2), (1, 3), (4, 1)]))
    ranks = draw(st.permutations(range(4)))[: math.prod(grid)]
    boundary = draw(st.sampled_from(list(MODES)))
    # a shard may be empty, and a margin wider than all of the tensor
    lengths = [draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)) for n in grid]
    top = draw(st.sampled_from([2, WIDEST]))
    widths = {
        cell: [tuple(draw(st.integers(0, top)) for _ in "ab") for _ in grid] for cell in cells(grid)
    }
    return grid, ranks, lengths, widths, boundary


def places(case, cell):
    """Where in the whole tensor, flat, each number of a rank's result is from; -1: nowhere."""
    _, _, lengths, widths, boundary = case
    extents = [sum(each) for each in lengths]
    flat = np.arange(math.prod(extents)).reshape(extents)
    more = {} if boundary != "zero" else {"constant_values": -1}
    around = [(WIDEST * any(map(any, each)),) * 2 for each in margins(case)]
    flat = np.pad(flat, around, MODES[boundary], **more)
    box = []
    for (origin, _), each, at, (before, after) in zip(
        around, lengths, cell, widths[cell], strict=True
    ):
        start = origin + ([0, *accumulate(each)])[at]
        box.append(slice(start - before, start + each[at] + after))
    return torch.from_numpy(flat[tuple(box)].copy())


def margins(case):
    """The widths of all ranks' margins in each dimension."""
    return list(zip(*case[3].values(), strict=True))


def is_of_nothing(case):
    """Whether a margin is to hold images of a tensor without elements."""
    dims = zip(case[2], margins(case), strict=True)
    return case[4] != "zero" and any(not sum(each) and any(map(any, width)) for each, width in dims)


def inner(case, cell):
    """A rank's own part of its result."""
    return tuple(
        slice(before, before + each[at])
        for each, at, (before, _) in zip(case[2], cell, case[3][cell], strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(
    halos().filter(lambda case: not is_of_nothing(case)),
    st.sampled_from(WAYS),
)
def test_margins_differ_from_rank_to_rank(case, way):
    grid, ranks, lengths, widths, boundary = case
    generator = torch.Generator().manual_seed(1)
    size = math.prod(sum(each) for each in lengths)
    whole = torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_()
    by_rank = dict(zip(ranks, cells(grid), strict=True))
    seen = {rank: places(case, cell) for rank, cell in by_rank.items()}
    with_zero = torch.cat([whole, torch.zeros(1, dtype=torch.float64)])  # at -1
    right = {rank: with_zero[at] for rank, at in seen.items()}
    grads = {
        rank: torch.randn(each.shape, dtype=torch.float64, generator=generator)
        for rank, each in right.items()
    }
    sum((right[rank] * grads[rank]).sum() for rank in ranks).backward()

    def program(group):
        partition = weft.Partition(grid, ranks=ranks)
        layer = nn.HaloExchange(partition, widths.__getitem__, boundary)
        if group.rank not in by_rank:
            return
        own = inner(case, by_rank[group.rank])
        mine = seen[group.rank][own]
        x = whole.detach()[mine].requires_grad_()
        y = layer(x)
        assert torch.equal(y, right[group.rank])
        y.backward(grads[group.rank])
        torch.testing.assert_close(x.grad, whole.grad[mine], rtol=1e-12, atol=1e-12)

    on, eager = way
    with mock.patch.object(autograd, "EAGER", eager):
        run(4, program, on=on)


@pytest.mark.parametrize(("on", "eager"), WAYS)
@pytest.mark.parametrize(
    ("ndim", "memory_format"), [(4, torch.channels_last), (5, torch.channels_last_3d)]
)
def test_a_memory_format_stays(ndim, memory_format, on, eager):
    whole = torch.randn(2, 3, 6, *(4,) * (ndim - 3))

    def program(group):
        grid = weft.Partition((1, 1, group.size))
        x = whole[grid.box(whole.shape).slices].to(memory_format=memory_format).requires_grad_()
        found = []
        for layer in (nn.HaloExchange(grid, 1), nn.AllSumReduce(grid, 2)):
            y = layer(x)
            dy = torch.ones_like(y)
            assert y.is_contiguous(memory_format=memory_format) and not y.is_contiguous()
            (dx,) = torch.autograd.grad(y, x, dy)
            assert dx.is_contiguous(memory_format=memory_format) and not dx.is_contiguous()
            same = layer(x.detach().contiguous())
            assert same.is_contiguous() and torch.equal(same, y)
            found.append(y)
        return found[0]

    with mock.patch.object(autograd, "EAGER", eager):
        first, second, third = run(3, program, on=on)
    assert torch.equal(second, whole[:, :, 1:5])
    assert torch.equal(first[:, :, 1:], whole[:, :, :3])
    assert torch.equal(third[:, :, :3], whole[:, :, 3:])
