"""DistDL's rules: which workers are matched, batches that are kept, halos of any width."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import weft
from weft import nn
from weft.compat.distdl import (
    AllGather,
    Broadcast,
    HaloExchange,
    MPIPartition,
    Repartition,
    SumReduce,
    zero_volume_tensor,
)
from weft.compat.distdl.partition import paired
from weft.nn.broadcast import BroadcastSpec
from weft.testing import run, spmd


def grid(shape, first=0):
    size = int(np.prod(shape))
    base = MPIPartition().create_partition_inclusive(np.arange(first, first + size))
    return base.create_cartesian_topology_partition(shape)


def key(P, rank, shape, turned, agree):
    """A worker's number along the dimensions that agree, as DistDL counts it."""
    index = P.grid.cells[P.grid.ranks[rank]]
    index = [0] * (len(shape) - len(index)) + [*(index[::-1] if turned else index)]
    cells, extents = [index[d] for d in agree], [shape[d] for d in agree]
    return int(np.ravel_multi_index(cells, extents, order="F" if turned else "C")) if agree else 0


GRIDS = [
    ((1, 3), (2, 3), False, False),
    ((3,), (2, 3), False, False),
    ((1, 3), (3, 2), True, False),
    ((2, 1), (3, 2), False, True),
    ((2, 3), (3, 2), True, False),  # several cut dimensions: in order, not mirrored
    ((2, 3), (3, 2), False, True),
    ((2, 3), (2, 3), True, True),
    ((2, 2, 1), (3, 2, 2), True, False),
    ((2, 1, 2), (2, 3, 2), True, True),
    ((2, 2), (2, 2, 3), False, True),
]


@pytest.mark.parametrize("small, large, turn_small, turn_large", GRIDS)
def test_workers_are_matched_as_in_distdl(small, large, turn_small, turn_large):
    def program(group):
        P_s, P_l = grid(small, 1), grid(large)
        s = small[::-1] if turn_small else small
        s = (1,) * (len(large) - len(small)) + s
        t = large[::-1] if turn_large else large
        agree = [d for d in range(len(t)) if s[d] == t[d]]
        assert all(s[d] == 1 for d in range(len(t)) if d not in agree)
        expected = {
            P_s.grid.ranks[a]: tuple(
                P_l.grid.ranks[b]
                for b in range(P_l.size)
                if key(P_l, b, t, turn_large, agree) == key(P_s, a, s, turn_small, agree)
            )
            for a in range(P_s.size)
        }
        found = BroadcastSpec(*paired(P_s, P_l, turn_small, turn_large)).copies
        assert {rank: sorted(each) for rank, each in found.items()} == {
            rank: sorted(each) for rank, each in expected.items()
        }
        x = torch.tensor([[float(group.rank)]]) if P_s.active else zero_volume_tensor(1)
        y = Broadcast(P_s, P_l, turn_small, turn_large)(x)
        z = SumReduce(P_l, P_s, turn_large, turn_small)(y)
        return (y.tolist() if P_l.active else None), (z.tolist() if P_s.active else None), expected

    found = run(13, program)
    for rank, each in found[0][2].items():
        assert all(found[copy][0] == [[rank]] for copy in each)
        assert found[rank][1] == [[rank * len(each)]]


@spmd(2, on=("threads",))
def test_grids_that_do_not_match(group):
    with pytest.raises(weft.WeftError, match="does not broadcast"):
        Broadcast(grid((1, 2)), grid((2, 1)))
    Broadcast(grid((1, 2)), grid((2, 1)), transpose_dest=True)
    with pytest.raises(weft.WeftError, match="one of the two"):
        AllGather(grid((2,)))
    with pytest.raises(weft.WeftError, match="one of the two"):
        AllGather(grid((2,)), (0,), (0,))
    with pytest.raises(weft.WeftError, match="dim 1 is out of range"):
        AllGather(grid((2,)), (1,))


@spmd(4, on=("threads",))
def test_batches_are_kept(group):
    P_x, P_y = grid((1, 2)), grid((1, 2), 1)  # ranks 0, 1 and 1, 2; rank 3 is in neither
    x = torch.ones(3, 2) if P_x.active else zero_volume_tensor(3)
    for make in (Repartition, Broadcast, SumReduce):
        y = make(P_x, P_y)(x)
        assert y.shape == ((3, 2) if P_y.active else (3, 0))
        y = make(P_x, P_y, preserve_batch=False)(x)
        assert y.shape == ((3, 2) if P_y.active else (3, 0) if group.rank == 3 else (0,))
    x.requires_grad_()
    y = Repartition(P_x, P_y)(x)
    assert y.requires_grad == (group.rank != 3) or group.rank == 3
    loss = y.sum() if P_y.active else nn.ZeroVolumeCorrector()(y)
    loss.backward()
    assert x.grad.shape == x.shape and bool((x.grad == 1).all())


@spmd(3, on=("threads",))
def test_the_same_grid_evens_uneven_shards_out(group):
    y = Repartition(grid((2,)), grid((2,)))(
        [torch.arange(3), torch.tensor([3]), zero_volume_tensor()][group.rank]
    )
    assert y.tolist() == [[0, 1], [2, 3], []][group.rank]


def part_of(P, tensor):
    return P.grid.box(tensor.shape).slices


def halo_of(own, out, kernel, stride, dilation):
    """What a worker reads of its neighbours, [dim, 2], and where that begins and ends in its own
    part with this halo."""
    halos, read = [], []
    for mine, made, k, s, d in zip(own, out, kernel, stride, dilation, strict=True):
        first, last = made.start * s, (made.stop - 1) * s + d * (k - 1) + 1
        before, after = max(mine.start - first, 0), max(last - mine.stop, 0)
        halos.append((before, after))
        read.append(slice(first - mine.start + before, last - mine.start + before))
    return halos, read


CONVOLUTIONS = [
    ((9, 8), (2, 2), (3, 3), (1, 1), (1, 1)),
    ((11, 10), (2, 2), (3, 2), (2, 3), (1, 2)),
    ((13,), (4,), (4,), (2,), (1,)),
    ((20,), (4,), (2,), (2,), (1,)),  # some halos are 0, some negative
]


@pytest.mark.parametrize("extents, cells, kernel, stride, dilation", CONVOLUTIONS)
@spmd(4, on=("threads",))
def test_halos_make_a_convolution(group, extents, cells, kernel, stride, dilation):
    conv = {1: F.conv1d, 2: F.conv2d}[len(extents)]
    seed = torch.Generator().manual_seed(3)
    whole = torch.randn((2, 1, *extents), generator=seed, dtype=torch.float64).requires_grad_()
    weight = torch.randn((3, 1, *kernel), generator=seed, dtype=torch.float64)
    expected = conv(whole, weight, stride=stride, dilation=dilation)
    dy = torch.randn(expected.shape, generator=seed, dtype=torch.float64)
    expected.backward(dy)

    P_x = grid((1, 1, *cells))
    own, out = part_of(P_x, whole), part_of(P_x, expected)
    halo, read = halo_of(own[2:], out[2:], kernel, stride, dilation)
    x = whole.detach()[own].clone().requires_grad_()
    padding = [width for pair in halo[::-1] for width in pair]
    padded = F.pad(x, padding, value=float("nan"))  # what halos hold does not count
    layer = HaloExchange(P_x, [(0, 0), (0, 0), *halo])
    seen = layer(padded)[:, :, *read]
    y = conv(seen, weight, stride=stride, dilation=dilation)
    torch.testing.assert_close(y, expected[out])
    y.backward(dy[out])
    torch.testing.assert_close(x.grad, whole.grad[own])


@spmd(3, on=("threads",))
def test_halos_that_are_none(group):
    P_x, last = grid((3,)), group.rank == 2
    for bad in (None, [[1]], [[-1, 0]], [[0.5, 0]], "ab", [[float("nan"), 0]]):
        with pytest.raises(weft.WeftError, match=r"rank 2 of a grid of .* has halos that are no"):
            HaloExchange(P_x, bad if last else [[0, 0]])
    layer = HaloExchange(P_x, [[2 * last, 0]])
    with pytest.raises(weft.WeftError, match=r"^rank 2: .*of shape \(1,\) is smaller than its"):
        layer(torch.ones(1))
    with pytest.raises(weft.WeftError, match="rank 2 has a tensor of 0 dimensions"):
        layer(torch.ones(()) if last else torch.ones(1))
    assert layer(torch.ones(2 if last else 0)).tolist() == [0, 0] * last  # all shards are empty
    assert layer(torch.ones(3)).tolist() == [1, 1, 1]


@spmd(3, on=("threads",))
def test_padding_at_the_edge_is_kept(group):
    P_x = grid((2,))
    if not P_x.active:
        assert HaloExchange(P_x, None)(zero_volume_tensor()).shape == (0,)
        return
    x = torch.tensor([9.0, 1, 0] if group.rank == 0 else [0.0, 2, 8]).requires_grad_()
    y = HaloExchange(P_x, [[1, 1]])(x)
    assert y.tolist() == ([9, 1, 2] if group.rank == 0 else [1, 2, 8])
    y.sum().backward()
    assert x.grad.tolist() == ([1, 2, 0] if group.rank == 0 else [0, 2, 1])


@spmd(2, on=("processes",))
def test_layers_are_modules(group):
    P_x = grid((2,))
    layers = [AllGather(P_x, (0,)), Repartition(P_x, grid((2,), 0)), HaloExchange(P_x, [[0, 0]])]
    model = pickle.loads(pickle.dumps(torch.nn.Sequential(*layers[:1]))).to(torch.float64)
    assert model(torch.ones(1)).shape == (2,)
    for layer in layers:
        assert not layer.state_dict() and not list(layer.parameters())
    assert "2 of ranks 0 to 1, dims=(0,)" in repr(layers[0])
