"""DTensors to partitioned tensors and back: placements, gradients, what PyTorch gets wrong."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

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
from weft.nn.dtensor import Cut, FromDTensorSpec, Layout
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
        if isinstance(each, _StridedShard):
            firsts = local.chunk(each.split_factor, each.dim)
            chunks = [first.tensor_split(2, each.dim) for first in firsts]
            local = torch.cat([chunk[at] for chunk in chunks], each.dim)
        elif isinstance(each, Shard):
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
    for number, pair in enumerate([*pairs, (STRIDED, Shard(0))]):
        shape = [(10, 7), (3, 1), (0, 4)][number % 3] if pair[0] != STRIDED else (12, 3)
        whole, weight = numbers(shape), numbers(shape, 1)
        grid = grids[number % 2]
        x = made(mesh, whole, pair)
        y = nn.from_dtensor(x, grid)
        assert torch.equal(y, part(grid, whole)), (pair, y)
        y.backward(part(grid, weight))
        grads = tuple(Replicate() if each.is_partial() else each for each in pair)
        assert x.grad.placements == grads and x.grad.shape == x.shape
        assert torch.equal(x.grad.to_local(), held(mesh, weight, grads)), pair

        y = y.detach().requires_grad_()
        z = nn.to_dtensor(y, grid, mesh, pair)
        assert z.placements == pair and z.shape == x.shape and z.stride() == whole.stride()
        assert torch.equal(nn.from_dtensor(z, first), part(first, whole)), pair
        if any(each.is_partial() for each in pair):
            assert torch.equal(z.full_tensor(), whole), pair
        else:
            assert torch.equal(z.to_local(), held(mesh, whole, pair)), pair
        other = pairs[-1 - number % len(pairs)]
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
    mesh = DeviceMesh("cpu", torch.tensor([1, 3]))
    grid = weft.Partition(2, ranks=[2, 1])
    whole = numbers((7, 2))
    x = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    x = x.detach().requires_grad_()
    y = nn.from_dtensor(x if group.rank else torch.empty(0), grid)
    assert torch.equal(y, part(grid, whole)) if grid.active else not y.numel()
    if group.rank:
        (y * y).sum().backward()
    if group.rank in (1, 3):
        assert torch.equal(x.grad.to_local(), 2 * x.to_local())
    y = y.detach().requires_grad_()
    z = nn.to_dtensor(y, grid, mesh, [Shard(-1)])
    if group.rank == 0:
        assert type(z) is torch.Tensor and not z.numel()
        DeviceMesh("cpu", torch.tensor([3, 1]))  # which is collective
        return
    assert z.shape == (7, 2) and z.placements == (Shard(1),)
    if group.rank != 2:
        assert torch.equal(z.to_local(), whole[:, :1] if group.rank == 1 else whole[:, 1:])
    z.backward(torch.ones_like(z) * 3)
    assert torch.equal(y.grad, torch.full_like(y, 3))

    # of a product PyTorch gives rank 2, which is not in the mesh, other placements
    for placements in ([Shard(0)], [Replicate()]):
        for loss in (
            lambda z: z.pow(2).sum(),
            lambda z: nn.from_dtensor(z * z, grid).sum(),
        ):
            y = part(grid, whole).clone().requires_grad_()
            loss(nn.to_dtensor(y, grid, mesh, placements)).backward()
            assert torch.equal(y.grad, 2 * y)
    for placements in ([Partial()], [Partial("avg")]):  # rank 2 learns whether to divide
        z = nn.to_dtensor(y.detach(), grid, mesh, placements)
        assert torch.equal(nn.from_dtensor(z, grid), y)
    y = y.detach().requires_grad_()

    down = DeviceMesh("cpu", torch.tensor([3, 1]))
    for program in (
        lambda: nn.from_dtensor(distribute_tensor(whole.clone(), down, [Shard(0)]), grid),
        lambda: nn.to_dtensor(y, grid, down, [Shard(0)]),
    ):
        with pytest.raises(weft.WeftError, match="ranks 3 and 1 follow each other"):
            program()
    z = nn.to_dtensor(y, grid, down, [Replicate()])
    assert torch.equal(nn.from_dtensor(z, grid), y)


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
        r"rank 0 holds \(1, 2\) of a DTensor of shape \(10, 2\) with placements .Shard\(0\). "
        r"on a mesh of \(4,\), by which it should hold \(3, 2\)"
    )
    x = DTensor.from_local(uneven, line, [Shard(0)], shape=(10, 2), stride=(2, 1))
    fails(text, nn.from_dtensor, x, grid)
    nested = distribute_tensor(torch.arange(10), mesh, [Shard(0), Shard(0)])
    x = DTensor.from_local(nested.to_local(), line, [Shard(0)], shape=(10,), stride=(1,))
    fails(r"rank 1 holds \(2,\) of", nn.from_dtensor, x, grid)  # as on the flattened mesh

    x = distribute_tensor(torch.arange(4), line, [Shard(0)])
    some = x if group.rank != 1 else x.to_local()
    fails("rank 1: from_dtensor takes a DTensor, not a Te", nn.from_dtensor, some, grid)
    text = "rank 1: AllGather takes .* this one is a DTensor: pass the shard that weft.nn.from_dt"
    fails(text, nn.AllGather(grid, 0), x if group.rank == 1 else x.to_local())
    text = "dimension 0 has 4 and is cut into 4 parts, which lengths"
    fails(text, nn.from_dtensor, x, grid, lengths=[(1, 1, 1, 2)])
    text = "from_dtensor: lengths are given for 2 dimensions, and the tensor has 1"
    fails(text, nn.from_dtensor, x, grid, lengths=[None, (5,)])
    text = "rank 3: lengths is 'abc': pass for each dimension"
    fails(text, nn.from_dtensor, x, grid, lengths="abc" if group.rank == 3 else None)
    for reduction, dtype, text in (
        ("max", torch.float32, r"Partial\('max'\) is no linear map"),
        ("avg", torch.int64, "torch.int64 has no average"),
        ("sum", torch.bool, "torch.bool has no addition"),
    ):
        x = DTensor.from_local(torch.ones(2, dtype=dtype), line, [Partial(reduction)])
        fails(text, nn.from_dtensor, x, grid)

    one, wide = torch.ones(1), torch.ones(1, 2 + (group.rank == 2))
    other = [Shard(0) if group.rank < 3 else Replicate()]
    for shard, placements, text in (
        (one, [Shard(1)], "Shard.1. of a tensor of 1 dimensions"),
        (one, [Shard(0), Shard(0)], "2 placements for a mesh of 1"),
        (one, [Partial("product")], "made Partial.'product'"),
        (one, other, "ranks 0, 1, 2 have placements .Shard.0.* rank 3 has placements .Replicate"),
        (wide, [Replicate()], "in dimension 1 rank 2 has 3"),
    ):
        fails(text, nn.to_dtensor, shard, grid, line, placements)
    for placements, text in (
        ([Shard(0), Shard(0)], "rank 1: 2 placements for a mesh of 1"),
        ([None], "rank 1: placements has a NoneType"),
        (None, "rank 1: TypeError: object of type 'NoneType' has no len"),
    ):
        ours = placements if group.rank == 1 else [Shard(0)]
        fails(text, nn.to_dtensor, one, grid, line, ours)
    ours = None if group.rank == 1 else line
    fails("rank 1: a NoneType is no DeviceMesh", nn.to_dtensor, one, grid, ours, [Shard(0)])
    assert (nn.to_dtensor(one, grid, line, [Partial("max")]).to_local() == 1).all()


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
@given(
    SHAPES, st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(1, 3)), max_size=3)
)
def test_layouts_cut_as_torch_does(shape, cuts):
    """Every cell holds what cutting the numbers of a whole tensor gives it."""
    cuts = [(parts, dim % len(shape), factor) for parts, dim, factor in cuts]
    mesh = tuple(parts for parts, *_ in cuts)
    layout = Layout(mesh, tuple(Cut(dim, at, f) for at, (_, dim, f) in enumerate(cuts)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = []
    for cell in product(*map(range, mesh)):
        local = whole
        for (parts, dim, factor), at in zip(cuts, cell, strict=True):
            taken = [piece.chunk(parts, dim)[at : at + 1] for piece in local.chunk(factor, dim)]
            taken = [chunk for chunks in taken for chunk in chunks]
            local = torch.cat(taken, dim) if taken else local.narrow(dim, 0, 0)
        assert layout.local_shape(shape, cell) == local.shape
        mine = torch.full(local.shape, -1)
        for piece in layout.pieces(shape, cell, rank=0):
            mine[piece.local(piece.box).slices] = whole[piece.box.slices]
        assert torch.equal(mine, local)
        seen.append(local.flatten())
    assert torch.equal(torch.cat(seen).sort().values, whole.flatten())


def test_a_shard_order_is_kept():
    """PyTorch may cut along the mesh dimensions in another order than the placements'."""
    mesh = type("Mesh", (), {"mesh": torch.arange(4).view(2, 2)})
    layout = Layout.of(mesh, (Shard(0), Shard(0)), [(0, (1, 0))])
    cells = list(product(range(2), range(2)))
    assert [layout.ranges((8,), cell)[0] for cell in cells] == [
        [(0, 2)],
        [(4, 6)],
        [(2, 4)],
        [(6, 8)],
    ]
    strided = Layout.of(mesh, (STRIDED, Shard(0)))
    assert [strided.ranges((8,), cell) for cell in cells] == [
        layout.ranges((8,), cell) for cell in cells
    ]
    assert "Shard(0, cut later), Shard(0)" in str(layout) and "factor 2" in str(strided)


def test_what_a_rank_has_it_does_not_ask_for():
    """A replica is read where it is; others are shared out among the ranks that have none."""

    def sources(layout, ranks):
        mesh, grid = weft.Partition(layout.mesh), weft.Partition(len(ranks), ranks=ranks)
        shapes = {rank: layout.local_shape((8,), cell) for rank, cell in mesh.cells.items()}
        plan = FromDTensorSpec(mesh, layout, (8,), grid).plan(shapes)
        return {rank: {m.source for m in plan.moves if m.destination == rank} for rank in ranks}

    def program(group):
        assert sources(Layout((2, 2)), (0, 1, 2, 3)) == {rank: {rank} for rank in range(4)}
        rows = Layout((2, 2), (Cut(0, 1),))  # rows 0 1 and 2 3 are replicas
        assert sources(rows, (1, 2)) == {1: {0}, 2: {3}}
        assert sources(Layout((2,)), (3, 2)) == {3: {1}, 2: {0}}

    run(4, program)
