"""A default device, or another mode of torch's, is the caller's: weft's own memory is not in it."""

from __future__ import annotations

import functools
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import weft
from weft import nn
from weft.base.pace import patient
from weft.compat.distdl import HaloExchange, MPIPartition
from weft.compat.oneccl import request
from weft.testing import processes, spmd


def kept(_context, _operation, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE


@spmd(2)
def test_selective_checkpoints_do_not_look_into_layers(group):
    layer = nn.AllGather(weft.Partition(2), 0)
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    x = torch.arange(3.0).requires_grad_()
    y = checkpoint(lambda t: layer(t.sin()) ** 2, x, use_reentrant=False, context_fn=contexts)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(found, 2 * 2 * x.sin() * x.cos())


@spmd(2)
def test_a_rank_with_fake_tensors_is_told_so(group):
    with FakeTensorMode(allow_non_fake_inputs=True) if group.rank else nullcontext():
        rows = torch.tensor([1]), ones(1)
        with pytest.raises(weft.WeftError, match="rank 1: the tensor of indices is a FakeTensor"):
            weft.sparse_all_reduce(rows)
    assert weft.all_reduce(ones(1)) == 2


def ones(*shape):
    return torch.ones(shape, device="cpu")


@pytest.mark.parametrize("rows", [2, 3000])
@spmd(3)
def test_layers(group, rows):
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
def test_calls(group):
    indices = torch.tensor([group.rank, 7])
    unsorted = indices.repeat(200).flip(0), ones(400, 3)
    with torch.device("meta"):
        for call in (weft.sparse_all_reduce, weft.sparse_reduce_scatter):
            assert call(unsorted)[1].device.type == "cpu"
        assert weft.sparse_all_gather(unsorted)[0].numel() == 1200
        weft.explain(unsorted)
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


@spmd(2)
def test_the_calls_of_oneccl(group):
    """A rank without rows passes None."""
    indices, values = torch.tensor([0, 1]), ones(4)
    found, sums = torch.zeros(2, dtype=torch.int64), torch.zeros(4)
    with torch.device("meta"):
        rows = (None, 0, None, 0) if group.rank else (indices, 2, values, 4)
        dtypes = torch.int64, torch.float32
        request.sparse_allreduce(*rows, found, None, sums, None, *dtypes, "sum").wait()
    assert found.tolist() == [0, 1] and sums.tolist() == [1, 1, 1, 1]


def program():
    torch.set_default_device("meta")
    with weft.init() as group:
        found, _ = weft.sparse_all_reduce((torch.tensor([group.rank], device="cpu"), ones(1)))
        return found.tolist()


def test_starting():
    assert processes(2, program) == [[0, 1], [0, 1]]


def test_imported_behind_it():
    """What is not imported before its first use."""
    program = "import torch, weft; torch.set_default_device('meta'); weft.init(); "
    program += "weft.sparse_all_reduce(5)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=patient(120.0)
    )
    assert b"rank 0: rows is a int" in ended.stderr
