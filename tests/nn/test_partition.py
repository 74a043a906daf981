"""Partitions: who is where, other grids, balanced cuts; and DeviceMesh."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
import torch.distributed as dist

import weft
from weft import nn
from weft.nn.grid import Box
from weft.testing import run, spmd

P = weft.Partition


@spmd(6, on=("threads",))
def test_who_is_where(group):
    grid = P((2, 2), ranks=[5, 0, 3, 1])
    assert (grid.dim, grid.size, grid.rank) == (2, 4, group.rank)
    assert grid.index == {5: (0, 0), 0: (0, 1), 3: (1, 0), 1: (1, 1)}.get(group.rank)
    assert grid.active == (group.rank in (0, 1, 3, 5))
    if group.rank == 5:
        assert grid.keep(0).ranks == (5, 3) and grid.keep((1, 0)).ranks == (5, 3, 0, 1)
    if group.rank == 2:
        assert not grid.keep(1).active
    if group.rank == 1:
        assert grid.keep(1) == P(2, ranks=[3, 1]) and grid.keep(()).ranks == (1,)


@spmd(6, on=("threads",))
def test_grids_of_grids(group):
    world = P(6)
    base = world.subset([4, 2, 0, 5])
    assert base == P(4, ranks=[4, 2, 0, 5])
    grid = base.reshape((2, 2))
    assert grid == P((2, 2), ranks=[4, 2, 0, 5]) and hash(grid) == hash(P((2, 2), ranks=grid.ranks))
    assert grid != base and grid != P((2, 2)) and grid != "grid"
    assert world.reshape(3).ranks == (0, 1, 2)
    assert grid.union(P(2, ranks=[5, 1]), P(1)).ranks == (4, 2, 0, 5, 1)
    with pytest.raises(AttributeError, match="cannot assign to field"):
        grid.shape = (4,)
    many = grid.like((40,), range(0, 80, 2))
    assert re.search(r"40 of ranks 0, 2, .*, 28, 30, \.\.\. \(digest", many.brief), many.brief
    assert P(2, group=group).union(P(2)).ranks == (0, 1)  # the default group is this one
    with (
        group.split(range(6)) as twin,
        pytest.raises(weft.WeftError, match="union: the two grids count ranks in different"),
    ):
        P(2, group=twin).union(P(2))


@spmd(6, on=("threads",))
def test_balanced_cuts(group):
    grid = P((2, 3))
    found = grid.boxes((5, 7, 2))
    assert list(found) == list(range(6))
    assert found[4] == Box((3, 3, 0), (5, 5, 2))
    assert grid.box((5, 7, 2)) == found[group.rank] and grid.boxes((5, 7))[5].shape == (2, 2)
    assert P((2, 1)).boxes((3,)) == {0: Box((0,), (2,)), 1: Box((2,), (3,))}


def test_a_grid_can_be_seen():
    texts = run(4, lambda group: repr(P((2, 2), ranks=[3, 1, 0, 2])))
    assert texts[0] == "Partition(2x2 of ranks 3, 1, 0, 2)\n[[3 1]\n [0 2]]"
    (text,) = run(1, lambda group: repr(nn.ReduceScatter(P((1,)), 0, lengths=[(3,)])))
    assert text == "ReduceScatter(1 of rank 0, dims=(0,), lengths=((3,),))"


@spmd(4, on=("threads",))
def test_ranks_are_called_as_the_group_calls_them(group):
    layer = nn.AllSumReduce(P(2, ranks=[3, 1]), 0)
    x = torch.ones(2, dtype=torch.float64 if group.rank == 3 else torch.float32)
    if group.rank in (1, 3):
        with pytest.raises(weft.WeftError, match=r"rank 1 has torch.float32, rank 3 has torch.flo"):
            layer(x)
        with pytest.raises(weft.WeftError, match=r"rank 3: AllSumReduce takes a tensor, not a str"):
            layer("x" if group.rank == 3 else x)


@spmd(4, on=("threads",))
def test_grids_that_overlap(group):
    """Grids in any order, one layer after the other, on sets of ranks that overlap."""
    x = torch.tensor([float(group.rank)])
    pairs = nn.AllSumReduce(P((2, 2), ranks=[0, 2, 3, 1]), 1)
    others = nn.AllSumReduce(P((2, 2), ranks=[1, 2, 0, 3]), 1)
    y = others(pairs(x))
    assert y.item() == {0: 6.0, 1: 6.0, 2: 6.0, 3: 6.0}[group.rank]


@spmd(18, on=("threads",))
def test_a_large_grid(group):
    """Beyond the number of ranks whose openings go directly to each other."""
    grid = P((3, 6))
    x = torch.full((2,), float(group.rank), requires_grad=group.rank == 7)
    y = nn.AllSumReduce(grid, (0, 1))(x)
    assert torch.equal(y, torch.full((2,), 153.0)) and y.requires_grad
    y.sum().backward()
    assert group.rank != 7 or torch.equal(x.grad, torch.full((2,), 18.0))
    with pytest.raises(weft.WeftError, match="in dimension 0 rank 11 has 3, and rank 0 has 2"):
        nn.AllSumReduce(grid, (0, 1))(torch.ones(3 if group.rank == 11 else 2))


DTYPES = "bool uint8 int8 int16 uint16 int64 uint64 float16 bfloat16 float64 complex64 complex128"


@pytest.mark.parametrize("name", [*DTYPES.split(), "float8_e5m2"])
@spmd(3, on=("threads",))
def test_every_dtype(group, name):
    """A rank without elements may have any."""
    grid, dtype = P(3), getattr(torch, name)
    x = (torch.arange(3) + group.rank).to(dtype) if group.rank else torch.empty(0)
    expected = torch.tensor([1, 2, 3, 2, 3, 4]).to(dtype)
    y = nn.AllGather(grid, 0)(x)
    assert y.dtype == dtype
    assert torch.equal(y.to(torch.complex128), expected.to(torch.complex128))
    layer = nn.ReduceScatter(grid, 0)
    x = (torch.arange(4) + group.rank).to(dtype)
    if dtype in (torch.bool, torch.uint16, torch.uint64, torch.float8_e5m2):
        with pytest.raises(weft.WeftError, match=f"{dtype} has no addition in torch: pass"):
            layer(x)
        return
    y = layer(x)
    wanted = torch.tensor({0: [3, 6], 1: [9], 2: [12]}[group.rank])
    assert y.dtype == dtype
    assert torch.equal(y.to(torch.complex128), wanted.to(torch.complex128))


MOVES = {
    "all_gather": lambda: nn.AllGather(P(3), 0),
    "halo_exchange": lambda: nn.HaloExchange(P(3), 2),
    "repartition": lambda: nn.Repartition(P((3, 1)), P((1, 3))),
    "all_to_all": lambda: nn.AllToAll(P(3), (0, 1)),
    "broadcast": lambda: nn.Broadcast(P(3), 0),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("side", [3, 300])  # with the opening, and by itself
@spmd(3, on=("threads", "verbs"))
def test_what_torch_cannot_copy_is_an_error_on_every_rank(group, move, side):
    layer = MOVES[move]()
    square = torch.arange(side * side).to(torch.uint8).view(side, side) + group.rank
    if move == "broadcast" and group.rank:
        square = torch.empty(0, dtype=torch.uint8)
    expected = layer(square)
    for x in (square, square.t()):
        text = r"rank \d: .* of torch.uint4, which torch does not copy: pass x.view\(torch.uint8"
        with pytest.raises(weft.WeftError, match=text):
            layer(x.view(torch.uint4))
    assert torch.equal(layer(square), expected)


def meshes(group, path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank, world_size=group.size
    )
    try:
        with weft.init():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            grid = P.from_mesh(mesh)
            assert grid == P((2, 2))
            columns = P((2, 2), ranks=[0, 2, 1, 3])
            back = columns.to_mesh(names=("b", "a"))
            assert back.mesh.tolist() == [[0, 2], [1, 3]] and back.mesh_dim_names == ("b", "a")
            assert P.from_mesh(back) == columns
            row = P(2, group=mesh["b"])
            y = nn.AllSumReduce(row, 0)(torch.tensor([float(group.rank)]))
            assert y.item() == {0: 1.0, 1: 5.0}[group.rank // 2]
            again = pickle.loads(pickle.dumps(P(2, group=mesh["b"].get_group())))
            assert again.ranks == (0, 1) and again.group_handle is mesh["b"].get_group()
            with pytest.raises(
                weft.WeftError, match=r"a partition of a weft\.Group cannot be pick"
            ):
                pickle.dumps(P(2, group=group))
    finally:
        dist.destroy_process_group()


def test_device_meshes(tmp_path):
    run(4, meshes, str(tmp_path / "store"), on="processes")


@spmd(4, on=("threads",))
def test_the_plan_of_a_layer_can_be_asked_for(group):
    layer = nn.AllGather(P((2, 1)), 0)
    if group.rank > 1:
        with pytest.raises(weft.WeftError, match=f"rank {group.rank}: AllGather does not concern"):
            layer.plan({0: (3, 2), 1: (2, 2)})
        return
    plan = layer.plan({0: (3, 2), 1: (2, 2)})
    assert dict(plan.want.shapes) == {0: (5, 2), 1: (5, 2)}
    with pytest.raises(weft.WeftError, match=r"of ranks \[0, 1\], and those of \[1\] are not"):
        layer.plan({0: (3, 2)})
    shapes = {rank: box.shape for rank, box in P((2, 1)).boxes((5, 2)).items()}
    assert nn.HaloExchange(P((2, 1)), (1, 0)).plan(shapes).want.shapes[0] == (5, 2)
