"""What DistDL's scripts and its own layers rely on, beside the data movement layers themselves."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import weft
from weft.compat import distdl
from weft.compat.distdl import (
    MPI,
    AllGather,
    AllSumReduce,
    Broadcast,
    BufferManager,
    HaloExchange,
    InterpolateMixin,
    MPIPartition,
    ReduceScatter,
    Repartition,
    SumReduce,
    TensorStructure,
    assemble_global_tensor_structure,
    zero_volume_tensor,
)
from weft.testing import spmd

PATHS = {
    "backends": "backend",
    "backends.common": "assemble_global_tensor_structure",
    "backends.common.partition": "MPIPartition MPICartesianPartition",
    "backends.common.tensor_comm": "assemble_global_tensor_structure "
    "assemble_global_tensor_structure_along_axis",
    "backends.common.tensor_decomposition": "compute_subtensor_shapes_unbalanced",
    "backends.mpi": "BufferManager ExpandableBuffer",
    "backends.mpi.partition": "MPIPartition MPICartesianPartition",
    "config": "set_backend get_default_comm get_default_array",
    "functional": "ZeroVolumeCorrectorFunction",
    "functional.zero_volume_corrector": "ZeroVolumeCorrectorFunction",
    "mixins": "ConvMixin HaloMixin InterpolateMixin PoolingMixin",
    "nn": "AllGather DistributedTranspose HaloExchange Module",
    "nn.all_gather": "AllGather",
    "nn.all_sum_reduce": "AllSumReduce",
    "nn.broadcast": "Broadcast",
    "nn.halo_exchange": "HaloExchange",
    "nn.mixins": "ConvMixin HaloMixin PoolingMixin",
    "nn.mixins.conv_mixin": "ConvMixin",
    "nn.mixins.halo_mixin": "HaloMixin",
    "nn.mixins.interpolate_mixin": "InterpolateMixin",
    "nn.mixins.pooling_mixin": "PoolingMixin",
    "nn.module": "Module",
    "nn.reduce_scatter": "ReduceScatter",
    "nn.repartition": "Repartition",
    "nn.sum_reduce": "SumReduce",
    "nn.transpose": "DistributedTranspose",
    "utilities": "",
    "utilities.debug": "print_sequential",
    "utilities.index_tricks": "cartesian_index_c cartesian_index_f",
    "utilities.misc": "Bunch DummyContext stream_barrier",
    "utilities.slicing": "compute_subshape assemble_slices worker_layout range_index "
    "compute_start_index compute_stop_index filtered_range_index get_rearrange_ordering",
    "utilities.tensor_decomposition": "compute_subtensor_shapes_balanced "
    "compute_subtensor_start_indices compute_subtensor_stop_indices "
    "compute_subtensor_intersection_slice",
    "utilities.torch": "TensorStructure zero_volume_tensor distdl_padding_to_torch_padding",
}


@pytest.mark.parametrize("path", PATHS)
def test_modules_are_where_distdl_has_them(path):
    module = importlib.import_module(f"weft.compat.distdl.{path}")
    for name in PATHS[path].split():
        assert getattr(module, name) is getattr(distdl, name)


def cut(P_world, ranks, shape):
    """A grid as DistDL's layers make it: who is not in it does not know its shape."""
    P = P_world.create_partition_inclusive(ranks)
    return P.create_cartesian_topology_partition(shape if P.active else [])


@pytest.mark.parametrize("outsiders", [[], [2], [1, 6], [-1, -2], None])
@spmd(6, on=("threads",))
def test_who_is_not_in_a_grid_may_pass_any_shape_for_it(group, outsiders):
    P_world = MPIPartition()

    def grid(ranks, shape):
        P = P_world.create_partition_inclusive(ranks)
        return P.create_cartesian_topology_partition(shape if P.active else outsiders)

    P_x, P_w, P_y = grid([1, 2], [1, 2]), grid([4, 3, 2, 1], [2, 2]), grid([3, 0], [2, 1])
    x = torch.full((1, 2), float(group.rank)) if P_x.active else zero_volume_tensor(1)
    x.requires_grad = True
    w = Broadcast(P_x, P_w)(x)
    if P_w.active:
        assert w.tolist() == [[[1.0, 2.0][group.rank % 2]] * 2]
    y = SumReduce(P_w, P_y)(w * 2)
    assert y.tolist() == ([[6.0, 6.0]] if P_y.active else [[]])
    y.backward(torch.ones_like(y))
    if P_x.active:
        assert x.grad.tolist() == [[4.0, 4.0]]
    z = Repartition(P_x, P_y)(x.detach())
    assert z.numel() == (4 if group.rank == 3 else 0)
    send, receive = P_x.create_broadcast_partition_to(P_w)
    assert (send.active, receive.active) == (P_x.active, P_w.active)
    for layer in (
        AllGather(P_x, (1,)),
        AllSumReduce(P_x, (1,)),
        ReduceScatter(P_x, axes_keep=(0,)),
        HaloExchange(P_x, [[0, 0], [0, 0]] if P_x.active else None),
    ):
        assert layer(x.detach()).numel() == {AllGather: 4, ReduceScatter: 1}.get(type(layer), 2) * (
            P_x.active
        )
    assert P_x.create_cartesian_subtopology_partition([False, True]).active == P_x.active
    assert P_x.create_allreduction_partition((1,)).active == P_x.active
    if group.rank == 5 and outsiders == [2]:
        with pytest.raises(weft.WeftError, match=r"^rank 5 does not know the grid of 4 of ranks"):
            P_w.grid  # noqa: B018


@spmd(4, on=("threads",))
def test_workers_of_a_grid_that_pass_different_shapes_all_hear_so(group):
    P_world = MPIPartition()
    base = P_world.create_partition_inclusive([1, 2])
    P_x = base.create_cartesian_topology_partition([1, 2] if group.rank != 2 else [2, 1])
    P_y = cut(P_world, [0, 1], [2, 1])
    text = r"^rank 1 made a grid of \(1, 2\) of the workers .*, and rank 2 one of \(2, 1\): pass"
    if group.rank < 3:
        for make in (Broadcast, Repartition):
            with pytest.raises(weft.WeftError, match=text):
                make(P_x, P_y)
    else:
        Broadcast(P_x, P_y)  # is in neither, and hears nothing
    y = AllSumReduce(P_world, (0,))(torch.ones(1))
    assert y.item() == 4
    if base.active:
        with pytest.raises(weft.WeftError, match=r"\(3,\) does not take the 2 workers"):
            base.create_cartesian_topology_partition([3])
        with pytest.raises(weft.WeftError, match=r"a grid of None does not take"):
            base.create_cartesian_topology_partition(None)


@spmd(4, on=("threads",))
def test_the_structure_of_a_whole_tensor(group):
    P_world = MPIPartition()
    P_x = cut(P_world, [2, 1], [2, 1])
    x = torch.empty(group.rank + 1, 4, 3, dtype=torch.float16, requires_grad=True)
    whole = assemble_global_tensor_structure(x, P_x)
    if not P_x.active:
        assert whole == TensorStructure()
    else:
        assert isinstance(whole.shape, np.ndarray) and whole.shape.tolist() == [5, 4]
        assert (whole.dtype, whole.requires_grad) == (torch.float16, True)
    # DistDL's layers ask of `_distdl_backend`
    told = distdl.backend.assemble_global_tensor_structure(TensorStructure(x), P_x, P_world)
    assert told.shape.tolist() == [5, 4]
    assert (told.dtype, told.requires_grad) == (torch.float16, True)
    along = distdl.assemble_global_tensor_structure_along_axis(x, P_x, (0,))
    assert along.shape == ((5, 4, 3) if P_x.active else None)


@spmd(3)
def test_a_communicator_takes_objects(group):
    comm, rank = MPI.COMM_WORLD, group.rank
    assert comm.allgather({"rank": rank}) == [{"rank": each} for each in range(3)]
    assert comm.gather("x" * rank, root=1) == (["", "x", "xx"] if rank == 1 else None)
    assert comm.bcast([7] if rank == 2 else "unread", root=2) == [7]
    assert comm.allreduce(rank + 1, op=MPI.PROD) == 6
    assert comm.allreduce([rank]) == [0, 1, 2]
    assert (comm.allreduce(rank, op=MPI.MAX), comm.allreduce(str(rank), op=min)) == (2, "0")
    with pytest.raises(weft.WeftError, match=r"^rank 1: its object cannot be pickled: .*lambda"):
        comm.allgather(rank if rank != 1 else lambda: 0)
    with pytest.raises(
        weft.WeftError, match=r"^rank 2: root is 5: pass the rank of a worker, 0 to 2"
    ):
        comm.gather(rank, root=0 if rank < 2 else 5)
    array = np.array([rank, 1])
    request = comm.Iallreduce(MPI.IN_PLACE, array)
    assert request.Test() and MPI.Request.Waitall([request])
    assert array.tolist() == [3, 3]
    mine = comm.Get_group()
    assert (mine.Get_rank(), mine.Get_size()) == (mine.rank, mine.size) == (rank, 3)
    other = comm.Dup()
    assert other.allgather(rank) == [0, 1, 2]
    for each in (mine, other):
        each.Free()
    assert MPIPartition(other)._comm.gather(rank, root=2) == ([0, 1, 2] if rank == 2 else None)


@spmd(2, on=("threads",))
def test_partitions_of_nobody_and_of_a_line(group):
    P = distdl.backend.Partition()  # as DistDL's layers begin
    assert (P.active, P.size, P.rank, P.index) == (False, 0, -1, None)
    assert P.broadcast_data(3) is None and "nobody" in repr(P)
    assert distdl.backend.Partition() != P
    with pytest.raises(weft.WeftError, match=r"^nobody is in this partition: make one by"):
        P.create_partition_inclusive([0])
    P.deactivate()
    P_world = distdl.backend.Partition(MPI.COMM_WORLD)
    assert P_world.size == 2
    assert P_world.create_allreduction_partition((0,)).shape.tolist() == [2]
    P_world = MPIPartition(device="meta")
    assert P_world.create_partition_inclusive([0]).device == "meta"
    P_world.set_device()
    assert P_world.device == distdl.get_device() == distdl.set_device(rank=1) == "cpu"


@spmd(4, on=("threads",))
def test_buffer_managers_get_the_buffers_that_distdl_would_use(group):
    """Of a network on grids of 1, 4 and 3 workers: DistDL's own test has these numbers."""
    P_world, manager = MPIPartition(), BufferManager()
    P_1, P_4, P_3 = (
        cut(P_world, ranks, [1, len(ranks)]) for ranks in ([0], [0, 1, 2, 3], [1, 2, 3])
    )
    x = torch.randn(1, 10) if P_1.active else zero_volume_tensor(1)
    for source, target, counts in (
        (P_1, P_4, (3, 1, 1, 1)),
        (P_4, P_4, (3, 1, 1, 1)),
        (P_4, P_3, (3, 2, 2, 1)),
        (P_3, P_1, (3, 2, 2, 1)),
    ):
        x = Repartition(source, target, buffer_manager=manager)(x)
        assert len(manager.buffers_map[np.float32]) == counts[group.rank]
    halos = BufferManager()
    layer = HaloExchange(
        P_4, [[0, 0], [int(group.rank > 0), 2 * (group.rank < 3)]], buffer_manager=halos
    )
    layer(torch.zeros(2, 7, dtype=torch.bfloat16))
    (buffers,) = halos.buffers_map.values()
    widths = [1 if group.rank else 0, 2 if group.rank < 3 else 0]
    assert len(buffers) == 4
    assert {(2, width) for width in widths if width} <= {*buffers[1].views, *buffers[3].views}


def test_dictionaries_with_attributes(monkeypatch):
    bunch = distdl.Bunch(a=1)
    bunch.b = 2
    assert (bunch.a, bunch["b"], {**bunch}) == (1, 2, {"a": 1, "b": 2})
    with pytest.raises(AttributeError, match=r"^c$"):
        bunch.c  # noqa: B018
    context = distdl.DummyContext()
    context.save_for_backward(torch.ones(2))
    assert context.to_save[0].tolist() == [1, 1]
    distdl.stream_barrier(None)
    monkeypatch.delenv("DISTDL_BACKEND_COMM", raising=False)
    monkeypatch.setenv("DISTDL_BACKEND_ARRAY", "cupy")
    assert (distdl.get_default_comm(), distdl.get_default_array()) == ("mpi", "cupy")


INTERPOLATIONS = [
    (mode, x, y, align, factor)
    for x, y in ((4, 8), (5, 7), (9, 4), (1, 3), (6, 1), (3, 3))
    for mode, align, factor in (
        ("nearest", None, None),
        ("linear", False, None),
        ("linear", False, y / x + 0.01),
        ("linear", True, None),
    )
]


@pytest.mark.parametrize("mode, x_extent, y_extent, align, factor", INTERPOLATIONS)
def test_the_halo_of_an_interpolation_has_what_torch_reads(mode, x_extent, y_extent, align, factor):
    x = torch.randn(1, 1, x_extent, dtype=torch.float64, requires_grad=True)
    if factor is None:
        y = F.interpolate(x, y_extent, mode=mode, align_corners=align)
    else:
        y = F.interpolate(
            x, scale_factor=factor, mode=mode, align_corners=align, recompute_scale_factor=False
        )
    mixin, shapes = InterpolateMixin(), ((1, 1, x_extent), tuple(y.shape))
    options = (factor, mode, bool(align))
    for index in range(y.shape[2]):
        (grad,) = torch.autograd.grad(y[0, 0, index], x, retain_graph=True)
        read = grad[0, 0].nonzero().ravel().tolist()
        start = mixin._compute_needed_start((0, 0, index), *shapes, *options)
        stop = mixin._compute_needed_stop((0, 0, index), *shapes, *options)
        assert start[:2].tolist() == [0, 0] and stop[:2].tolist() == [1, 1]
        assert start[2] <= min(read) and max(read) < stop[2]
        assert stop[2] - start[2] <= (1 if mode == "nearest" else 2)


@spmd(3, on=("threads",))
def test_an_interpolation_in_parts_is_that_of_the_whole(group):
    P_x = MPIPartition().create_cartesian_topology_partition([1, 1, 3])
    x, y = TensorStructure(torch.empty(1, 2, 10)), TensorStructure(torch.empty(1, 2, 23))
    halo, received, sent, used = InterpolateMixin()._compute_exchange_info(
        P_x, x, y, None, "linear", False
    )
    whole = torch.arange(20.0).reshape(1, 2, 10)
    start = distdl.compute_start_index(P_x.shape, P_x.index, x.shape)[2]
    stop = distdl.compute_stop_index(P_x.shape, P_x.index, x.shape)[2]
    part = F.pad(whole[..., start:stop], distdl.distdl_padding_to_torch_padding(halo))
    part = HaloExchange(P_x, halo, received, sent)(part)[..., slice(*used[2])]
    first = distdl.compute_start_index(P_x.shape, P_x.index, y.shape)
    low = InterpolateMixin()._compute_needed_start(first, x.shape, y.shape, None, "linear", False)
    assert torch.equal(part, whole[..., int(low[2]) : int(low[2]) + part.shape[2]])
    with pytest.raises(weft.WeftError, match="interpolation of mode 'cubic' is not known here"):
        InterpolateMixin()._compute_exchange_info(P_x, x, y, None, "cubic", False)
