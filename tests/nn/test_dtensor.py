"""DTensors to partitioned tensors and back: placements, gradients, what PyTorch gets wrong."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import weft
from weft import nn
from weft.base.devices import as_device
from weft.nn import dtensor
from weft.testing import run

STRIDED = _StridedShard(0, split_factor=2)


def started(group, program, path, staying):
    """A program in torch's default group and weft's, of the ranks of a test."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank, world_size=group.size
    )
    try:
        with weft.init(), as_device() if staying else nullcontext():
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
            share = {"sum": (0.25, 0.75), "avg": (0.5, 1.5)}[each.reduce_op]
            local = local * share[at]
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
    plain = (Shard(0), Shard(1), Replicate(), Partial(), Partial("avg"))
    pairs = [pair for pair in product(plain, plain) if {*pair} != {Partial(), Partial("avg")}]
    first = weft.Partition(1)
    grids = weft.Partition((2, 2)), weft.Partition((1, 3), ranks=[3, 1, 0])
    cases = [(pair, shape) for pair in pairs for shape in ((10, 7), (3, 1), (0, 4))]
    lines = [(pair, (10,)) for pair in pairs if Shard(1) not in pair]  # where cuts are nested
    for number, (pair, shape) in enumerate([*cases, *lines]):
        whole, weight = numbers(shape), numbers(shape, 1)
        grid = grids[number % 2] if len(shape) > 1 else weft.Partition(3, ranks=[2, 0, 3])
        x = made(mesh, whole, pair)
        y = nn.from_dtensor(x, grid)
        assert torch.equal(y, part(grid, whole)), (pair, y)
        y.backward(part(grid, weight))
        grads = tuple(Replicate() if each.is_partial() else each for each in pair)
        assert x.grad.placements == grads and x.grad.shape == x.shape
        assert torch.equal(x.grad.to_local(), held(mesh, weight, grads)), pair

        y = y.detach().requires_grad_()
        z = nn.to_dtensor(y, grid, mesh, grads)
        assert z.placements == grads and z.shape == x.shape and z.stride() == whole.stride()
        assert torch.equal(nn.from_dtensor(z, first), part(first, whole)), pair
        assert torch.equal(z.to_local(), held(mesh, whole, grads)), pair
        other = [each for each in pairs if len(shape) > 1 or Shard(1) not in each][-1 - number % 9]
        z.backward(made(mesh, weight, other).detach())  # gradients are placed as they like
        assert torch.equal(y.grad, part(grid, weight)), pair


def derivatives(group, mesh):
    grid = weft.Partition((2, 2))
    whole = numbers((5, 3)) / 100
    x = made(mesh, whole, (Shard(0), Partial()))
    y = nn.from_dtensor(x, grid)
    (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    shard = nn.from_dtensor(grad, grid)
    assert torch.allclose(shard, part(grid, 3 * whole**2))
    (second,) = torch.autograd.grad(shard.sum(), x)
    assert torch.allclose(second.to_local(), held(mesh, 6 * whole, (Shard(0), Replicate())))

    # between two layers, one rank alone needs a gradient, and all take part
    y = part(grid, whole).clone().requires_grad_(group.rank == 2)
    z = nn.to_dtensor(nn.AllSumReduce(grid, ())(y), grid, mesh, (Replicate(), Shard(1)))
    assert z.requires_grad
    (z * z).sum().backward()
    assert (y.grad is None) == (group.rank != 2)
    assert group.rank != 2 or torch.allclose(y.grad, 2 * y)

    with torch.no_grad():
        assert not nn.from_dtensor(x, grid).requires_grad
    code = torch.compile(lambda x: nn.from_dtensor(2 * x, grid) + 1, backend="eager")
    plain = x.detach()
    assert torch.equal(code(plain), nn.from_dtensor(2 * plain, grid) + 1)
    late = distribute_tensor(whole, mesh, (Shard(0), Shard(0)))
    late = late.redistribute(placements=(Replicate(), Replicate()), async_op=True)
    assert torch.equal(nn.from_dtensor(late, grid), part(grid, whole))
    kept = nn.from_dtensor(
        distribute_tensor(torch.arange(10), mesh, (Shard(0), Shard(0))),
        weft.Partition(4),
        lengths=[(3, 2, 3, 2)],
    )
    assert kept.shape == (3 - group.rank % 2,)
    half = made(mesh, whole, (Partial(), Shard(1))).detach().to(torch.bfloat16)
    assert nn.from_dtensor(half, grid).dtype == torch.bfloat16


def some_ranks(group, mesh):
    """A mesh of some of the ranks, and a grid of some of these, in another order."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 2, 3]))
    grid = weft.Partition(2, ranks=[3, 1])
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
    strange = weft.Partition(2, ranks=[0, 1])
    calls = (
        lambda: nn.from_dtensor(x, strange),
        lambda: nn.to_dtensor(torch.ones(1), strange, mesh, [Shard(0)]),
    )
    for call in calls:  # a rank of the grid alone is told, too
        with pytest.raises(weft.WeftError, match=r"ranks \[0\] of the grid are not in the mesh"):
            call()
    if group.rank == 0:
        assert type(z) is torch.Tensor and not z.numel()
    else:
        assert z.shape == (7, 2) and z.placements == (Shard(1),)
        at = mesh.get_local_rank()
        assert torch.equal(z.to_local(), whole[:, at : at + 1])
        z.backward(torch.ones_like(z) * 3)
        assert torch.equal(y.grad, torch.full_like(y, 3))
        for placements in ([Shard(0)], [Replicate()]):
            for loss in (
                lambda z: z.pow(2).sum(),
                lambda z: nn.from_dtensor(z * z, grid).sum(),
            ):
                y = part(grid, whole).clone().requires_grad_()
                loss(nn.to_dtensor(y, grid, mesh, placements)).backward()
                assert torch.equal(y.grad, 2 * y)

    down = DeviceMesh("cpu", torch.tensor([3, 1]))
    if group.rank in (1, 3):
        for program in (
            lambda: nn.from_dtensor(DTensor.from_local(whole, down, [Shard(0)]), grid),
            lambda: nn.to_dtensor(y, grid, down, [Replicate()]),
        ):
            with pytest.raises(weft.WeftError, match=r"the mesh \[3, 1\] do not ascend in dim"):
                program()
        assert nn.AllSumReduce(grid, 0)(torch.ones(1)).item() == 2


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
    text = "rank 0 has a DTensor of shape .4, 2.* rank 1 has a DTensor of shape .16, 2."
    fails(text, nn.from_dtensor, x, grid)
    text = (
        r"rank 0: from_dtensor: this rank holds \(1, 2\) of a DTensor of shape \(10, 2\) with "
        r"placements .Shard\(dim=0\). "
        r"on a mesh of \(4,\), by which it should hold \(3, 2\)"
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
    text = "Repartition: lengths are given for 2 dimensions, and the tensor has 1"
    fails(text, nn.from_dtensor, x, grid, lengths=[None, (5,)])
    text = "rank 3: lengths is 'abc': pass for each dimension"
    fails(text, nn.from_dtensor, x, grid, lengths="abc" if group.rank == 3 else None)
    for reduction, dtype, text in (
        ("max", torch.float32, r"does not take Partial\(max\) of placements"),
        ("sum", torch.bool, "torch.bool has no addition"),
        ("avg", torch.bool, "torch.bool has no addition"),
    ):
        x = DTensor.from_local(torch.ones(2, dtype=dtype), line, [Partial(reduction)])
        fails(text, nn.from_dtensor, x, grid)

    x = DTensor.from_local(torch.ones(4, dtype=torch.int64), line, [Partial("avg")])
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        nn.from_dtensor(x, grid)  # torch's own, on every rank

    one, wide = torch.ones(1), torch.ones(1, 2 + (group.rank == 2))
    other = [Shard(0) if group.rank < 3 else Replicate()]
    ours = [1.0] if group.rank == 3 else one
    fails("rank 3: to_dtensor takes a tensor, not a list", nn.to_dtensor, ours, grid, line, other)
    for shard, placements, text in (
        (one, [Shard(1)], "Shard.dim=1.* of a tensor of 1 dimensions"),
        (one, [Shard(0), Shard(0)], "2 placements for a mesh of 1"),
        (one, [Partial()], r"to_dtensor does not take Partial\(sum\) of"),
        (one, [STRIDED], r"does not take _StridedShard.* redistribute\(\) to Shard"),
        (
            one,
            other,
            "ranks 0, 1, 2 have placements .Shard.dim=0.* rank 3 has placements .Replicate",
        ),
        (wide, [Replicate()], "in dimension 1 rank 2 has 3"),
    ):
        fails(text, nn.to_dtensor, shard, grid, line, placements)
    for placements, text in (
        ([Shard(0), Shard(0)], "rank 1: 2 placements for a mesh of 1"),
        ([None], "rank 1: to_dtensor does not take None of placements"),
        (None, "rank 1: TypeError: object of type 'NoneType' has no len"),
    ):
        ours = placements if group.rank == 1 else [Shard(0)]
        fails(text, nn.to_dtensor, one, grid, line, ours)
    ours = None if group.rank == 1 else line
    fails("rank 1: a NoneType is no DeviceMesh", nn.to_dtensor, one, grid, ours, [Shard(0)])

    # a placement that lies in pieces is refused, and one that would be taken for another
    strided = DTensor.from_local(torch.ones(1), mesh, [STRIDED, Shard(0)])
    text = r"from_dtensor does not take _StridedShard.* redistribute\(\) to Shard"
    fails(text, nn.from_dtensor, strided, grid)
    nested = distribute_tensor(torch.arange(10), mesh, [Shard(0), Shard(0)])
    with (
        mock.patch.object(dtensor, "shard_order", lambda _: [(0, (1, 0))]),
        pytest.raises(weft.WeftError, match=r"in the order .*: redistribute"),
    ):
        nn.from_dtensor(nested, grid)
    number = distribute_tensor(torch.tensor(1.0), line, [Replicate()])
    fails("a number has no dimension to cut", nn.from_dtensor, number, grid)
    x = distribute_tensor(torch.ones(4), line, [Shard(0)]).requires_grad_(group.rank == 2)
    fails("differ in gradient: ranks 0, 1, 3 have False, rank 2 has True", nn.from_dtensor, x, grid)


def group_of_its_own(group, mesh):
    pair = dist.new_group([1, 3])
    if group.rank not in (1, 3):
        return
    grid = weft.Partition(2, group=pair)
    x = torch.arange(2) + 2 * grid.rank
    column = DeviceMesh.from_group(pair, "cpu", torch.tensor([1, 3]))
    y = nn.to_dtensor(x, grid, column, [Replicate()])
    assert torch.equal(y.to_local(), torch.arange(4))
    assert torch.equal(nn.from_dtensor(y, grid), x)
    awaited = all_reduce(x, "sum", pair)  # a subclass that can be read
    assert nn.AllGather(grid, 0)(awaited).tolist() == [2, 4, 2, 4]
    with pytest.raises(weft.WeftError, match="ranks 0 and 2 of the default group"):
        nn.to_dtensor(x, grid, mesh, [Replicate(), Replicate()])


PROGRAMS = ["everything", "derivatives", "some_ranks", "faults", "group_of_its_own"]


@pytest.mark.parametrize(
    ("program", "staying"),
    [*((each, False) for each in PROGRAMS), ("everything", True), ("derivatives", True)],
)
def test_on_processes(program, staying, tmp_path):
    run(4, started, program, str(tmp_path / "store"), staying, on="processes")


# how DTensor cuts, against torch itself

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=3, max_size=3))
def test_cuts_are_those_of_torch(shape, counts):
    """One after the other, as a mesh's dimensions cut."""
    counts = [tuple(each) for each in counts][: len(shape)]
    for extent, each, found in zip(shape, counts, dtensor._chunks(shape, counts), strict=True):
        parts = [torch.arange(extent)]
        for count in each:
            cut = [(*part.chunk(count), *[part[:0]] * count)[:count] for part in parts]
            parts = [part for chunks in cut for part in chunks]
        assert found == tuple(map(len, parts))
