"""DTensors to partitioned tensors and back: placements, gradients, what PyTorch gets wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

import weft
from weft import nn
from weft.nn import dtensor
from weft.testing import run

STRIDED = _StridedShard(0, split_factor=2)


def started(group, program, path, wire):
    """A program in torch's default group and weft's, of the ranks of a test."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank, world_size=group.size
    )
    try:
        with weft.init(wire=wire):
            mesh = DeviceMesh("cpu", torch.arange(group.size).view(2, -1))
            dist.barrier()  # a rank that left would end the making of its groups at the others
            globals()[program](group, mesh)
    finally:
        dist.destroy_process_group()


def held(mesh, whole, placements):
    """The local tensor of a rank: torch's own cuts; addends that differ where it is Partial."""
    local = whole
    for dim, each in enumerate(placements):
        at = mesh.get_local_rank(dim)
        if isinstance(each, Shard):
            chunks = local.chunk(mesh.size(dim), each.dim)
            empty = local.narrow(each.dim, 0, 0)
            local = chunks[at] if at < len(chunks) else empty
        elif isinstance(each, Partial):
            local = local * (0.25, 0.75)[at]
    return local.contiguous()


def made(mesh, whole, placements):
    local = held(mesh, whole, placements)
    x = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
    return x.detach().requires_grad_(whole.is_floating_point())


def part(grid, whole):
    return whole[grid.box(whole.shape).slices] if grid.active else torch.empty(0, dtype=whole.dtype)


def numbers(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).double() * 4  # halves are exact


def everything(group, mesh):
    """Each pair of placements: values, the DTensor again, gradients and what they are placed as."""
    pairs = [*product((Shard(0), Shard(1)), repeat=2)]
    others = [*product((Shard(0), Shard(1), Replicate()), repeat=2), (Partial(), Shard(0))]
    grids = weft.Partition((2, 2)), weft.Partition((1, 4), ranks=[3, 1, 0, 2])
    cases = [(pair, shape) for pair in pairs for shape in ((10, 7), (3, 1), (0, 4))]
    lines = [(pairs[0], (10,))] * 5
    for number, (pair, shape) in enumerate([*cases, *lines]):
        whole, weight = numbers(shape), numbers(shape, 1)
        grid = grids[number % 2] if len(shape) > 1 else weft.Partition(4, ranks=[2, 0, 3, 1])
        x = made(mesh, whole, pair)
        y = nn.from_dtensor(x, grid)
        assert torch.equal(y, part(grid, whole)), (pair, y)
        y.backward(part(grid, weight))
        assert x.grad.placements == pair and x.grad.shape == x.shape
        assert torch.equal(x.grad.to_local(), held(mesh, weight, pair)), pair

        y = y.detach().requires_grad_()
        z = nn.to_dtensor(y, grid, mesh, pair)
        assert z.placements == pair and z.shape == x.shape and z.stride() == whole.stride()
        assert torch.equal(nn.from_dtensor(z, grid), y), pair
        assert torch.equal(z.to_local(), held(mesh, whole, pair)), pair
        fitting = [each for each in others if len(shape) > 1 or Shard(1) not in each]
        other = fitting[number % len(fitting)]
        z.backward(made(mesh, weight, other).detach())  # gradients are placed as they like
        assert torch.equal(y.grad, part(grid, weight)), pair


def derivatives(group, mesh):
    grid = weft.Partition((2, 2))
    whole = numbers((5, 3)) / 100
    x = made(mesh, whole, (Shard(0), Shard(1)))
    y = nn.from_dtensor(x, grid)
    (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    shard = nn.from_dtensor(grad, grid)
    assert torch.allclose(shard, part(grid, 3 * whole**2))
    (second,) = torch.autograd.grad(shard.sum(), x)
    assert torch.allclose(second.to_local(), held(mesh, 6 * whole, (Shard(0), Shard(1))))

    # between two layers, one rank alone needs a gradient, and all take part
    y = part(grid, whole).clone().requires_grad_(group.rank == 2)
    z = nn.to_dtensor(nn.AllSumReduce(grid, ())(y), grid, mesh, (Shard(1), Shard(0)))
    assert z.requires_grad
    (z * z).sum().backward()
    assert (y.grad is None) == (group.rank != 2)
    assert group.rank != 2 or torch.allclose(y.grad, 2 * y)

    x = x.detach().requires_grad_(group.rank == 2)
    nn.from_dtensor(x, grid).sum().backward()
    assert (x.grad is None) == (group.rank != 2)

    with torch.no_grad():
        assert not nn.from_dtensor(x, grid).requires_grad
    code = torch.compile(lambda x: nn.from_dtensor(2 * x, grid) + 1, backend="eager")
    plain = x.detach()
    assert torch.equal(code(plain), nn.from_dtensor(2 * plain, grid) + 1)
    late = distribute_tensor(whole, mesh, (Shard(0), Shard(0)))
    late = late.redistribute(placements=(Shard(1), Shard(0)), async_op=True)
    assert torch.equal(nn.from_dtensor(late, grid), part(grid, whole))
    kept = nn.from_dtensor(
        distribute_tensor(torch.arange(10), mesh, (Shard(0), Shard(0))),
        weft.Partition(4),
        lengths=[(3, 2, 3, 2)],
    )
    assert kept.shape == (3 - group.rank % 2,)
    half = made(mesh, whole, (Shard(0), Shard(1))).detach().to(torch.bfloat16)
    assert nn.from_dtensor(half, grid).dtype == torch.bfloat16


def some_ranks(group, mesh):
    """A mesh of some of the ranks, and a grid of these, in another order."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 2, 3]))
    grid = weft.Partition(3, ranks=[3, 1, 2])
    whole = numbers((7, 2))
    x = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    x = x.detach().requires_grad_()
    y = nn.from_dtensor(x if group.rank else torch.empty(0), grid)
    assert torch.equal(y, part(grid, whole)) if grid.active else not y.numel()
    if group.rank:
        (y * y).sum().backward()
        assert torch.equal(x.grad.to_local(), 2 * x.to_local())
    y = y.detach().requires_grad_()
    z = nn.to_dtensor(y, grid, mesh, [Shard(-1)])
    for strange in (weft.Partition(2, ranks=[0, 1]), weft.Partition(2, ranks=[2, 1])):
        text = (
            r"mesh of 3 of ranks 1 to 3, which has not the ranks of the grid, 2 of ranks .*: conv"
        )
        if not strange.active:  # it waits for nobody
            text = f"^rank {group.rank}: .*{text}"
        with pytest.raises(weft.WeftError, match=text):
            nn.from_dtensor(x, strange)
        with pytest.raises(weft.WeftError, match=text):
            nn.to_dtensor(torch.ones(1), strange, mesh, [Shard(0)])
    if group.rank == 0:
        assert type(z) is torch.Tensor and not z.numel()
    else:
        assert z.shape == (7, 2) and z.placements == (Shard(1),)
        at = mesh.get_local_rank()
        assert torch.equal(z.to_local(), whole[:, at : at + 1])
        z.backward(torch.ones_like(z) * 3)
        assert torch.equal(y.grad, torch.full_like(y, 3))
        for placements in ([Shard(0)], [Shard(1)]):
            for loss in (
                lambda z: z.pow(2).sum(),
                lambda z: nn.from_dtensor(z * z, grid).sum(),
            ):
                y = part(grid, whole).clone().requires_grad_()
                loss(nn.to_dtensor(y, grid, mesh, placements)).backward()
                assert torch.equal(y.grad, 2 * y)

    down, pair = DeviceMesh("cpu", torch.tensor([3, 1])), weft.Partition(2, ranks=[3, 1])
    if pair.active:
        for program in (
            lambda: nn.from_dtensor(DTensor.from_local(whole, down, [Shard(0)]), pair),
            lambda: nn.to_dtensor(y, pair, down, [Shard(0)]),
        ):
            with pytest.raises(weft.WeftError, match="2 of ranks 3, 1, whose ranks do not ascend"):
                program()
        assert nn.AllSumReduce(pair, 0)(torch.ones(1)).item() == 2


def cut_from_the_right(mesh, whole):
    """A DTensor that the last mesh dimension cuts first: its order tells it from one cut first."""
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    column, row = mesh.get_coordinate()
    local = whole.chunk(mesh.size(1))[row].chunk(mesh.size(0))[column]
    order = (ShardOrderEntry(0, (1, 0)),)
    return DTensor(local, replace(x._spec, shard_order=order), requires_grad=False)


def faults(group, mesh):
    """What PyTorch computes wrong values of is an error, on every rank, and the next call works."""
    line, grid = DeviceMesh("cpu", torch.arange(4)), weft.Partition(4)
    uneven = torch.ones([1, 4, 3, 2][group.rank], 2)

    def fails(match, program, *args, **kwargs):
        with pytest.raises(weft.WeftError, match=match):
            program(*args, **kwargs)
        x = distribute_tensor(torch.arange(4), line, [Shard(0)])
        assert torch.equal(nn.from_dtensor(x, grid), torch.tensor([group.rank]))

    x = DTensor.from_local(uneven, line, [Shard(0)])  # each rank believes in another shape
    text = "rank 0 has x=a DTensor of shape .4, 2.* rank 1 has x=a DTensor of shape .16, 2."
    fails(text, nn.from_dtensor, x, grid)
    text = (
        r"rank 0: from_dtensor: this rank holds \(1, 2\) of a DTensor of shape \(10, 2\) with "
        r"placements .Shard\(dim=0\). "
        r"on a mesh of 4 of ranks 0 to 3, by which it should hold \(3, 2\)"
    )
    x = DTensor.from_local(uneven, line, [Shard(0)], shape=(10, 2), stride=(2, 1))
    fails(text, nn.from_dtensor, x, grid)
    nested = distribute_tensor(torch.arange(10), mesh, [Shard(0), Shard(0)])
    x = DTensor.from_local(nested.to_local(), line, [Shard(0)], shape=(10,), stride=(1,))
    fails(
        r"rank 1: from_dtensor: this rank holds \(2,\) of", nn.from_dtensor, x, grid
    )  # as on the flattened mesh

    x = distribute_tensor(torch.arange(4), line, [Shard(0)])
    some = x if group.rank != 1 else x.to_local()
    fails("rank 1: from_dtensor takes a DTensor, not a Te", nn.from_dtensor, some, grid)
    text = "rank 1: AllGather takes .* this one is a DTensor: pass the shard that weft.nn.from_dt"
    fails(text, nn.AllGather(grid, 0), x if group.rank == 1 else x.to_local())
    text = "dimension 0 has 4 and is cut into 4 parts, which lengths"
    fails(text, nn.from_dtensor, x, grid, lengths=[(1, 1, 1, 2)])
    text = r"rank 3: lengths: lengths is \('a',\): pass integers"
    fails(text, nn.from_dtensor, x, grid, lengths="abc" if group.rank == 3 else None)
    for placement in (Partial(), Replicate()):
        x = DTensor.from_local(torch.ones(2), line, [placement])
        fails("it takes a Shard .*: redistribute\\(\\) what has other", nn.from_dtensor, x, grid)

    one, wide = torch.ones(1), torch.ones(1, 2 + (group.rank == 2))
    other = [Shard(0) if group.rank < 3 else Replicate()]
    ours = [1.0] if group.rank == 3 else one
    fails("rank 3: to_dtensor takes a tensor, not a list", nn.to_dtensor, ours, grid, line, other)
    for shard, placements, text in (
        *(
            (
                one,
                placements,
                r"to_dtensor: placements .*, of a tensor of shape \(4,\): it takes a S",
            )
            for placements in ([Shard(1)], [Shard(0), Shard(0)], [Partial()], [STRIDED])
        ),
        (
            one,
            other,
            "ranks 0, 1, 2 have placements .Shard.dim=0.* rank 3 has placements .Replicate",
        ),
        (wide, [Shard(0)], "in dimension 1 rank 2 has 3"),
    ):
        fails(text, nn.to_dtensor, shard, grid, line, placements)
    for placements, text in (
        ([None], r"rank 1 has placements \[None\] on a mesh of"),
        (None, "rank 1: to_dtensor: placements is None: pass a list with a Shard for"),
        (Shard(0), r"rank 1: to_dtensor: placements is Shard\(dim=0\): pass a list"),
    ):
        ours = placements if group.rank == 1 else [Shard(0)]
        fails(text, nn.to_dtensor, one, grid, line, ours)
    ours = None if group.rank == 1 else line
    text = "rank 1: to_dtensor: a NoneType is no DeviceMesh: pass one"
    fails(text, nn.to_dtensor, one, grid, ours, [Shard(0)])

    strided = DTensor.from_local(torch.ones(1), mesh, [STRIDED, Shard(0)])
    fails("it takes a Shard of .* for each", nn.from_dtensor, strided, grid)
    from_right = cut_from_the_right(mesh, torch.arange(8))
    assert from_right.to_local().tolist() != nested.to_local().tolist() or group.rank in (0, 3)
    text = r"cut along the mesh dimensions in the order .*1, 0.*: redistribute\(\) to Replicate"
    fails(text, nn.from_dtensor, from_right, grid)
    again = from_right.redistribute(placements=[Replicate()] * 2)
    again = again.redistribute(placements=[Shard(0)] * 2)
    assert torch.equal(nn.from_dtensor(again, grid), part(grid, torch.arange(8)))
    number = distribute_tensor(torch.tensor(1.0), line, [Replicate()])
    fails(r"of a tensor of shape \(\): it takes", nn.from_dtensor, number, grid)


def group_of_its_own(group, mesh):
    pair = dist.new_group([1, 3])
    if group.rank not in (1, 3):
        return
    grid = weft.Partition(2, group=pair)
    x = torch.arange(2) + 2 * grid.rank
    column = DeviceMesh.from_group(pair, "cpu", torch.tensor([1, 3]))
    y = nn.to_dtensor(x, grid, column, [Shard(0)])
    assert torch.equal(y.full_tensor(), torch.arange(4))
    assert torch.equal(nn.from_dtensor(y, grid), x)
    awaited = all_reduce(x, "sum", pair)  # a subclass that can be read
    assert nn.AllGather(grid, 0)(awaited).tolist() == [2, 4, 2, 4]
    text = (
        r"a mesh of 2x2 of ranks 0 to 3, .* 2 of ranks 0 to 1 \(rank 0 of torch's default group is"
    )
    with pytest.raises(weft.WeftError, match=text):
        nn.to_dtensor(x, grid, mesh, [Shard(0), Shard(0)])


PROGRAMS = ["everything", "derivatives", "some_ranks", "faults", "group_of_its_own"]


@pytest.mark.parametrize(
    ("program", "wire"),
    [*((each, "tcp") for each in PROGRAMS), *((each, "group") for each in PROGRAMS)],
)
def test_on_processes(program, wire, tmp_path):
    run(4, started, program, str(tmp_path / "store"), wire, on="processes")


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(length, count):
    chunks = torch.arange(length).chunk(count)
    found = dtensor._chunks(length, count)
    assert len(found) == count and [each for each in found if each] == [
        len(each) for each in chunks if len(each)
    ]
    assert sorted(found, reverse=True) == found
