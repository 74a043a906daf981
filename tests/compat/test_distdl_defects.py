"""What DistDL 0.6 did wrong when it was run: a case for each."""

from __future__ import annotations

import warnings

import pytest
import torch

from weft.compat.distdl import (
    AllGather,
    AllSumReduce,
    Broadcast,
    HaloExchange,
    MPIPartition,
    ReduceScatter,
    Repartition,
    SumReduce,
    zero_volume_tensor,
)
from weft.testing import spmd


def grid(*shape):
    size = int(torch.tensor(shape).prod())
    base = MPIPartition().create_partition_inclusive(range(size))
    return base.create_cartesian_topology_partition(shape)


def draw(rank, *shape, **options):
    seed = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=seed, **options)


@spmd(4, on=("threads",))
def test_several_axes_at_once(group):
    shards = [draw(rank, 2 + rank // 2, 3 - rank % 2) for rank in range(4)]
    expected = torch.cat([torch.cat(shards[:2], 1), torch.cat(shards[2:], 1)])
    assert torch.equal(AllGather(grid(2, 2), (0, 1))(shards[group.rank]), expected)


@spmd(4, on=("threads",))
def test_axes_to_keep_and_negative_axes(group):
    P_x, x = grid(2, 2), draw(group.rank, 2, 2)
    for layer, kind in (
        (AllGather, "axes_all_gather"),
        (ReduceScatter, "axes_reduce_scatter"),
        (AllSumReduce, "axes_reduce"),
    ):
        expected = layer(P_x, (1,))(x)
        for options in ({"axes_keep": (0,)}, {"axes_keep": [-2]}, {kind: (-1,)}, {kind: 1}):
            made = layer(P_x, **options)
            assert torch.equal(made(x), expected), options


@pytest.mark.parametrize("scale", [None, 4])
@spmd(2, on=("threads",))
def test_second_gradients(group, scale):
    """Of y³ with y the gathered or summed x; each way through the layer is scaled."""
    xs = [draw(rank, 2, dtype=torch.float64) for rank in range(2)]
    s = scale or 1
    for layer, y, factor in ((AllGather, xs[group.rank], 1), (AllSumReduce, xs[0] + xs[1], 2)):
        x = xs[group.rank].clone().requires_grad_()
        z = layer(grid(2), (0,), scale_backward=scale)(x) ** 3
        (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        torch.testing.assert_close(first, 2 * 3 * y**2 / s)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        torch.testing.assert_close(second, factor * 144 * y**3 / s**3)


@pytest.mark.parametrize("layer", [AllGather, ReduceScatter, AllSumReduce])
@spmd(2, on=("threads",))
def test_scaling_leaves_the_callers_gradient_alone(group, layer):
    P_x, x = grid(2, 1), draw(group.rank, 2, 3).requires_grad_()
    y = layer(P_x, (0,))(x)
    y.backward(draw(9, *y.shape))
    expected, x.grad = x.grad / 2, None
    for scale in (2, 2.0, slice(0, 1), slice(None)):
        y = layer(P_x, (0,), scale_backward=scale)(x)
        y.retain_grad()
        dy = draw(9, *y.shape)
        y.backward(dy)
        assert torch.equal(dy, draw(9, *y.shape))
        assert torch.equal(y.grad, dy)
        torch.testing.assert_close(x.grad, expected)
        x.grad = None
    y = layer(P_x, (0,), scale_backward=2)(x)
    (y.relu_() * 2).sum().backward()  # the result may be changed in place


@spmd(2, on=("threads",))
def test_scaling_of_a_broadcast(group):
    x = torch.ones(1, 2, requires_grad=True) if group.rank == 0 else zero_volume_tensor()
    P_0, P_x = grid(1), grid(2)
    y = Broadcast(P_0, P_x, scale_backward=4)(x)
    y.backward(dy := torch.full((1, 2), 6.0))
    assert dy.tolist() == [[6.0, 6.0]]
    if group.rank == 0:
        assert x.grad.tolist() == [[3.0, 3.0]]


@spmd(3, on=("threads",))
def test_no_grad_is_heard(group):
    P_x, P_y = grid(2), MPIPartition().create_partition_inclusive([1, 2])
    x = (torch.ones(2) if P_x.active else zero_volume_tensor()).requires_grad_()
    with torch.no_grad():
        for layer in (AllGather(P_x, (0,), scale_backward=2), Repartition(P_x, P_y)):
            assert not layer(x).requires_grad


@spmd(3, on=("threads",))
def test_nothing_is_returned_as_it_came(group):
    P_x, P_one = grid(2), grid(1)
    x = torch.ones(2) if P_x.active else zero_volume_tensor()
    for layer in (
        AllGather(P_x, ()),
        AllSumReduce(P_x, ()),
        ReduceScatter(P_x, ()),
        Repartition(P_x, P_x),
        Broadcast(P_x, P_x),
        SumReduce(P_x, P_x),
        HaloExchange(P_x, [[0, 0]]),
    ):
        y = layer(x)
        assert torch.equal(y, x) and y is not x, layer
        assert not x.numel() or y.data_ptr() != x.data_ptr(), layer
    x = torch.ones(2) if P_one.active else zero_volume_tensor()
    assert AllGather(P_one, (0,))(x) is not x


@spmd(2, on=("processes",), timeout=40.0)
def test_it_compiles(group):
    P_x, P_0 = grid(2), grid(1)
    gather = AllGather(P_x, (0,), scale_backward=2)
    move = Repartition(P_x, P_0)

    def model(x):
        return move(gather(x)[:2] * 3).square().sum()

    x = draw(group.rank, 2, 3).requires_grad_()
    (expected,) = torch.autograd.grad(model(x), x)
    with warnings.catch_warnings():  # Dynamo's own at a break of a graph, of what is no leaf
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        y = torch.compile(model, backend="aot_eager")(x)
    assert torch.equal(y, model(x))
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    assert expected.any() == (group.rank == 0)


# "A shape that changes on one rank" is, in tests/nn/test_bad_input.py,
# test_a_shape_that_changes_on_one_rank_is_right_or_an_error and
# test_everybody_who_takes_part_is_told.
