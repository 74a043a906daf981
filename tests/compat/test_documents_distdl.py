"""DistDL's "AllGather Layer": each name, and each sentence that can be held.

What is held elsewhere:

| section, claim | where |
|---|---|
| Assumptions: not in place, a clone where nothing moves | test_distdl_defects.py: as it came |
| Assumptions: a single dimension (here also several) | test_distdl_defects.py: several axes |
| Examples: the example, word for word | test_distdl_example.py |
| Examples: who is a worker; `np.arange`, a list | test_distdl_partition.py: attributes |
| Examples: a zero-volume tensor | test_distdl_partition.py |
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
import torch.nn.functional as F

from weft.compat import distdl
from weft.compat.distdl import MPIPartition, zero_volume_tensor
from weft.compat.distdl.nn import AllGather
from weft.testing import spmd


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grid(*shape, first=0):
    """Some of the ranks, in a Cartesian topology."""
    P_base = MPIPartition().create_partition_inclusive(first + np.arange(np.prod(shape)))
    return P_base.create_cartesian_topology_partition(shape)


def test_the_names():
    """Examples and API, whose module is `distdl.nn`."""
    assert distdl.nn.AllGather is distdl.AllGather is AllGather
    for name in ("create_partition_inclusive", "create_cartesian_topology_partition"):
        assert callable(getattr(MPIPartition, name))
    assert isinstance(MPIPartition.active, property)
    first, second = [*inspect.signature(AllGather).parameters.values()][:2]
    assert (first.name, second.name) == ("P_x", "axes_all_gather")
    assert first.default is inspect.Parameter.empty
    assert issubclass(AllGather, torch.nn.Module) and callable(AllGather.forward)


@spmd(6)
def test_subtensors_are_collected_along_slices_of_a_partition(group):
    """Overview: along one dimension of 2 x 3, in each slice by itself; subtensors of two, or of
    more dimensions than the partition."""
    P_x, (row, column) = grid(2, 3), divmod(group.rank, 3)
    whole = draw(0, 4, 9, 2)
    x = whole[2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
    assert torch.equal(AllGather(P_x, (1,))(x), whole[2 * row : 2 * row + 2])
    assert torch.equal(AllGather(P_x, (0,))(x), whole[:, 3 * column : 3 * column + 3])


@spmd(4, on=("threads",))
def test_partitions_with_and_without_a_topology(group):
    """Overview, of the all-sum-reduce; the all-gather alike."""
    P_line = MPIPartition()
    x = draw(group.rank, 1, 2)
    for P in (P_line, P_line.create_cartesian_topology_partition([4])):
        total = distdl.nn.AllSumReduce(P, (0,))(x)
        torch.testing.assert_close(total, sum(draw(rank, 1, 2) for rank in range(4)))
        gathered = AllGather(P, (0,))(x)
        assert torch.equal(gathered, torch.cat([draw(rank, 1, 2) for rank in range(4)]))


@spmd(2, on=("threads",))
def test_weights_that_are_partitioned_are_gathered_for_a_while(group):
    """Motivation, of fully sharded data parallelism: forward has the whole weight, and backward
    leaves this worker its part of the sum of all gradients."""
    shards = [draw(rank, 3, 5) for rank in range(2)]
    inputs = [draw(10 + rank, 4, 5) for rank in range(2)]
    own = shards[group.rank].clone().requires_grad_()
    y = F.linear(inputs[group.rank], AllGather(grid(2, 1), (0,))(own))
    whole = torch.cat(shards).requires_grad_()
    assert torch.equal(y, F.linear(inputs[group.rank], whole))
    (y**2).sum().backward()
    sum((F.linear(x, whole) ** 2).sum() for x in inputs).backward()
    torch.testing.assert_close(own.grad, whole.grad[3 * group.rank : 3 * group.rank + 3])


@spmd(2, on=("threads",))
def test_inputs_that_are_partitioned_are_gathered_before_a_product(group):
    """Motivation, of linear layers."""
    x, weight = draw(0, 3, 8), draw(1, 2, 8)
    part = x[:, 4 * group.rank : 4 * group.rank + 4]
    assert torch.equal(F.linear(AllGather(grid(1, 2), (1,))(part), weight), F.linear(x, weight))


@spmd(3, on=("threads",))
def test_forward(group):
    """Forward: who is active has a copy of the global tensor, others a clone of what they brought;
    the layer's function `forward` calls it."""
    P_x = grid(2, first=1)
    layer = AllGather(P_x, (0,))
    x = draw(group.rank, 2) if P_x.active else zero_volume_tensor()
    for y in (layer(x), layer.forward(x)):
        assert y is not x
        if P_x.active:
            assert torch.equal(y, torch.cat([draw(1, 2), draw(2, 2)]))
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        else:
            assert y.shape == (0,)


@spmd(6)
def test_the_adjoint_is_the_reduce_scatter(group):
    """Adjoint: autograd makes it; it sums and partitions along the same dimension."""
    P_x = grid(2, 3)
    x, dy = draw(group.rank, 2, 2).requires_grad_(), draw(10 + group.rank, 2, 6)
    y = AllGather(P_x, (1,))(x)
    assert y.grad_fn is not None
    y.backward(dy)
    assert torch.equal(x.grad, distdl.nn.ReduceScatter(P_x, (1,))(dy))
    row = range(group.rank - group.rank % 3, group.rank - group.rank % 3 + 3)
    column = 2 * (group.rank % 3)
    total = sum(draw(10 + rank, 2, 6) for rank in row)
    torch.testing.assert_close(x.grad, total[:, column : column + 2])
