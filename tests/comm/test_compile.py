"""Calls inside of what torch.compile compiles: the graph breaks there, and they go on as ever."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import weft
from weft.testing import spmd

CALLS = {
    "all_reduce": lambda x: weft.all_reduce(2 * x) + 1,
    "all_to_all": lambda x: sum(weft.all_to_all([2 * x] * 2)) + 1,
    "exchange": lambda x: sum(weft.exchange(2 * x, [torch.tensor([0, 1])] * 2)) + 1,
    "sparse": lambda x: weft.sparse_all_reduce((torch.tensor([0, 1]), 2 * x))[1] + 1,
}


@pytest.mark.parametrize("name", CALLS)
@spmd(2, on=("processes",))
def test_collectives(group, name):
    compiled = torch.compile(CALLS[name], backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert compiled(torch.ones(2)).tolist() == [5, 5]
    weft.barrier()


@spmd(2, on=("processes",))
def test_gradients(group):
    compiled = torch.compile(CALLS["all_reduce"], backend="eager")
    x = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():  # torch's own, of a graph that breaks behind a gradient
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        compiled(x).sum().backward()
    assert x.grad.tolist() == [4, 4]


@spmd(2, on=("processes",))
def test_a_whole_step(group):
    module = nn.Linear(2, 1)

    def step(x):
        weft.sync_params(module)
        module(x).sum().backward()
        weft.sync_grads(module, average=False)
        weft.barrier()
        return weft.clip_grad_norm_(module, 100.0)

    norm = torch.compile(step, backend="eager")(torch.ones(1, 2))
    torch.testing.assert_close(norm, torch.tensor(12.0).sqrt())
    assert module.weight.grad.tolist() == [[2, 2]]
