"""A default device is the caller's: it is not where weft makes what it needs for itself."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import nn
from weft.compat.distdl import HaloExchange, MPIPartition
from weft.testing import processes, spmd


def ones(*shape):
    return torch.ones(shape, device="cpu")


@pytest.mark.parametrize("rows", [2, 3000])
@spmd(3)
def test_layers(wire, rows):
    grid = weft.Partition(3)
    layers = [
        nn.AllGather(grid, 0),
        nn.ReduceScatter(grid, 0),
        nn.AllSumReduce(grid, 0),
        nn.HaloExchange(grid, 1),
        nn.Repartition(grid, weft.Partition((1, 3))),
    ]
    for layer in layers:
        x = ones(rows, 4).requires_grad_()
        right = layer(x)
        (expected,) = torch.autograd.grad(right.sum(), x)
        for _ in range(4):
            with torch.device("meta"):
                y = layer(x)
                (found,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(y, right) and torch.equal(found, expected)


@spmd(3)
def test_calls(wire):
    indices = torch.tensor([wire.rank, 7])
    with torch.device("meta"):
        found, sums = weft.sparse_all_reduce((indices, ones(2, 3)))
        total = weft.all_reduce(ones(2))
        shares = weft.all_to_all([ones(1).requires_grad_() for _ in range(3)])
        weft.barrier()
        partition = MPIPartition().create_cartesian_topology_partition([3])
        partition._comm.Barrier()
        filled = HaloExchange(partition, [[1, 1]])(ones(4))
    assert found.tolist() == [0, 1, 2, 7] and sums[:, 0].tolist() == [1, 1, 1, 3]
    assert total.tolist() == [3, 3] and len(shares) == 3
    assert filled.tolist() == [1, 1, 1, 1]


def program():
    torch.set_default_device("meta")
    with weft.init() as wire:
        found, _ = weft.sparse_all_reduce((torch.tensor([wire.rank], device="cpu"), ones(1)))
        return found.tolist()


def test_starting():
    assert processes(2, program) == [[0, 1], [0, 1]]
