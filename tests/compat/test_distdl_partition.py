"""Partitions under DistDL's names, and the arithmetic of cuts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import weft
from weft.compat import distdl
from weft.compat.distdl import MPI, MPICartesianPartition, MPIPartition, TensorStructure
from weft.testing import run, spmd


@spmd(6, on=("threads",))
def test_attributes(group):
    P_world = MPIPartition(MPI.COMM_WORLD)
    assert (P_world.rank, P_world.size, P_world.index) == (group.rank, 6, group.rank)
    assert P_world.active and P_world.dim == 1 and P_world.shape.tolist() == [6]
    P_base = P_world.create_partition_inclusive(np.array([5, 3, 1, 0]))
    P_x = P_base.create_cartesian_topology_partition(np.array([2, 2]), periods=[False, False])
    if group.rank in (5, 3, 1, 0):
        place = [5, 3, 1, 0].index(group.rank)
        assert P_base.active and P_x.active
        assert P_base.rank == P_base.index == P_x.rank == place
        assert P_x.index.tolist() == [place // 2, place % 2]
        assert (P_x._comm.Get_rank(), P_x._comm.Get_size()) == (place, 4)
        P_x._comm.Barrier()
    else:
        assert not P_base.active and not P_x.active
        assert P_base.rank == P_x.rank == MPI.PROC_NULL == -1
        assert P_base.index is P_x.index is P_x._comm is None
    assert (P_x.size, P_x.dim, P_x.shape.tolist()) == (4, 2, [2, 2])
    assert P_x.shape.dtype == np.int64 and P_x.device == "cpu"
    assert P_x.neighbor_ranks(1) == [(-1, 3), (0, -1)]
    assert P_x.cartesian_index(2).tolist() == [1, 0]
    with pytest.raises(weft.WeftError, match="there is no rank 4 in a partition of size 4"):
        P_x.cartesian_index(4)
    P_world.comm.Barrier()
    MPI.COMM_WORLD.Barrier()
    assert MPI.COMM_WORLD.Get_size() == 6 and MPI.COMM_WORLD.Get_rank() == group.rank
    assert MPI.Wtime() <= MPI.Wtime()


@spmd(6, on=("threads",))
def test_partitions_of_partitions(group):
    P_world = MPIPartition()
    P_a, P_b = (P_world.create_partition_inclusive(ranks) for ranks in ([4, 1], [1, 0, 2]))
    assert P_a.create_partition_union(P_b).grid.ranks == (4, 1, 0, 2)
    again = P_world.create_partition_inclusive([4, 1])
    assert (P_a == again) == P_a.active and (P_a != P_b)
    assert P_a != "a" and hash(P_a) == hash(again)
    P_x = P_world.create_cartesian_topology_partition([2, 3])
    row = P_x.create_cartesian_subtopology_partition([False, True])
    assert isinstance(row, MPICartesianPartition)
    assert row.shape.tolist() == [3] and row.rank == group.rank % 3
    assert row.grid.ranks == tuple(
        range(group.rank - group.rank % 3, group.rank - group.rank % 3 + 3)
    )
    column = P_x.create_allreduction_partition((-2,))
    assert column.shape.tolist() == [2, 1] and column.rank == group.rank // 3
    with pytest.raises(weft.WeftError, match=r"a grid of \(2, 2\) does not take the 6 workers"):
        P_world.create_cartesian_topology_partition([2, 2])
    with pytest.raises(weft.WeftError, match=r"positions are \[0, 0\]"):
        P_a.create_partition_inclusive([0, 0])
    with pytest.raises(weft.WeftError, match="make it of another partition"):
        MPICartesianPartition()
    layer = distdl.AllGather(P_x, (0,))
    P_x.deactivate()
    assert not P_x.active and P_x.index is None and P_x.rank == -1
    with pytest.raises(weft.WeftError, match="2x3 of ranks 0 to 5, was deactivated"):
        distdl.AllGather(P_x, (0,))
    assert layer(torch.ones(1, 1)).shape == (2, 1)
    assert "deactivated" in repr(P_x)


@spmd(3, on=("threads",))
def test_a_partition_of_a_group(group):
    assert MPIPartition(group, device="cpu").grid.group is group
    part = MPIPartition(MPIPartition().create_partition_inclusive([2, 0])._comm or group)
    assert part.size == (3 if group.rank == 1 else 2)
    with pytest.raises(weft.WeftError):
        MPIPartition("world")


def test_a_partition_of_an_mpi4py_communicator():
    """One that speaks as mpi4py's does, whose ranks are in another order than weft's."""
    said, meet = {}, threading.Barrier(3)

    class Comm:
        def __init__(self, rank, same=False):
            self.rank, self.same = rank, same

        def Get_rank(self):
            return self.rank

        def __bool__(self):
            return self.rank >= 0

        def allgather(self, value):
            said[self.rank] = (value[0], 0) if self.same else value
            meet.wait(20)
            found = [said[rank] for rank in range(3)]
            meet.wait(20)
            return found

    def program(group):
        P = MPIPartition(Comm((group.rank + 1) % 3))
        with pytest.raises(weft.WeftError, match=r"are ranks \[0, 0, 0\] of weft's group: start"):
            MPIPartition(Comm(group.rank, same=True))
        with pytest.raises(weft.WeftError, match=r"MPI.COMM_NULL tells nothing"):
            MPIPartition(Comm(-1))
        assert P._comm.rank == P.rank  # mpi4py's own
        return P.rank, P.grid.ranks

    assert run(3, program) == [(1, (2, 0, 1)), (2, (2, 0, 1)), (0, (2, 0, 1))]


@spmd(4)
def test_data_of_scripts(group):
    P_world = MPIPartition()
    P_a, P_b = (P_world.create_partition_inclusive(ranks) for ranks in ([3, 1], [0, 1, 3]))
    data = np.array([[1.5, 2.5]]) * group.rank
    found = P_b.broadcast_data(data if group.rank == 3 else None, P_data=P_a)
    assert (found is None) == (group.rank == 2)
    assert found is None or found.tolist() == [[4.5, 7.5]]
    assert P_world.broadcast_data(7 if group.rank == 1 else None, root=1).tolist() == [7]
    with pytest.raises(weft.WeftError, match=r"the root, .* is not in"):
        P_a.broadcast_data(data, P_data=P_b)
    gathered = P_world.allgather_data(np.array([group.rank, 5], dtype=np.int16))
    assert gathered.tolist() == [[rank, 5] for rank in range(4)] and gathered.dtype == np.int16
    for op, value in (("sum", 6), ("prod", 0), ("min", 0), ("max", 3)):
        assert P_world.allreduce_data(np.array([[group.rank]]), op).tolist() == [[value]]
    with pytest.raises(weft.WeftError, match="op is 'mean': use sum, prod, min, max"):
        P_world.allreduce_data(data, "mean")

    P_x = P_world.create_partition_inclusive([0, 1]).create_cartesian_topology_partition([2, 1])
    local = TensorStructure(torch.empty(3 + group.rank, 2))
    shapes = distdl.compute_subtensor_shapes_unbalanced(local, P_x, P_world)
    assert shapes.tolist() == [[[3, 2]], [[4, 2]]]
    alone = distdl.compute_subtensor_shapes_unbalanced(local, P_x)
    assert (alone is None) == (group.rank > 1)


def test_ranks_that_have_no_place_to_meet_all_hear_why(monkeypatch):
    class Comm:
        said = None

        def __init__(self, rank):
            self.Get_rank = lambda: rank

        def bcast(self, told, root):
            Comm.said = Comm.said or told
            return Comm.said

    def refused():
        raise OSError("too many open files")

    monkeypatch.setattr(distdl.communicator, "host_store", refused)
    for rank in (0, 1):
        with pytest.raises(weft.WeftError, match=r"^rank 0: no store can .*: too many open files$"):
            distdl.communicator.meet(Comm(rank))


@spmd(3)
def test_a_communicator_without_mpi(group):
    comm, rank = MPI.COMM_WORLD, group.rank
    sent, found = np.array([rank, 5], np.int16), np.zeros((1, 2), np.int16)
    for op, right in ((MPI.SUM, [3, 15]), (MPI.MAX, [2, 5]), (max, [2, 5]), (MPI.PROD, [0, 125])):
        comm.Allreduce([sent, "MPI.SHORT"], found, op=op)
        assert found.tolist() == [right]
    place = torch.ones(2, dtype=torch.int16)
    wrong = (torch.ones(2, requires_grad=True) * place).sum()
    comm.Allreduce([sent, "MPI.SHORT"], [place, "MPI.SHORT"])
    assert place.tolist() == [3, 15]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wrong.backward()  # which would read it
    comm.Reduce(sent, found if rank == 1 else None, op=MPI.MIN, root=1)
    assert found.tolist() == [[0, 5] if rank == 1 else [0, 125]]
    told = torch.full((2,), float(rank))
    comm.Bcast(told, root=2)
    assert told.tolist() == [2, 2]
    if rank == 2:
        comm.Send(sent, dest=0, tag=7)
    elif rank == 0:
        comm.Recv(found, source=2)
        assert found.tolist() == [[2, 5]]
        comm.Send(sent, dest=MPI.PROC_NULL)  # as a worker at the border of a grid may
        comm.Recv(found, source=MPI.PROC_NULL)
        assert found.tolist() == [[2, 5]]
    part = comm.Split(rank == 1, key=-rank)
    assert (part.rank, part.size) == ([1, 0, 0][rank], [2, 1, 2][rank])
    assert MPIPartition(part).grid.ranks == ((1,) if rank == 1 else (2, 0))


class Scaled(distdl.Module):
    """By how many elements it has seen when it was set up."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def _distdl_module_setup(self, input):
        self._distdl_is_setup, self.count = True, input[0].numel()
        self.calls.append("setup")

    def _distdl_module_teardown(self, input):
        self._distdl_is_setup = False
        self.calls.append("teardown")

    def _distdl_input_changed(self, input):
        return input[0].numel() != self.count

    def forward(self, input):
        return input * self.count


def test_a_module_sets_itself_up_for_its_input(monkeypatch):
    layer = Scaled()
    assert [layer(torch.ones(n)).sum() for n in (2, 2, 3)] == [4, 4, 9]
    assert layer.calls == ["setup", "teardown", "setup"]
    try:
        distdl.set_backend("mpi", "numpy", check_input_changed=False)
        assert layer(torch.ones(1)).item() == 3
        monkeypatch.setenv("DISTDL_CHECK_INPUT_CHANGED", "1")
    finally:
        distdl.set_backend()
    assert layer(torch.ones(1)).item() == 1
    assert layer._distdl_backend.BufferManager is distdl.BufferManager


def test_buffers_grow_and_are_shared():
    manager = distdl.BufferManager()
    buffers = manager.request_buffers(3, np.float32, initial_capacity=2)
    assert manager.request_buffers(2, np.float32) == buffers[:2]
    assert manager.request_buffers(1, np.int32)[0] not in buffers
    assert {dtype: len(held) for dtype, held in manager.buffers_map.items()} == {
        np.float32: 3,
        np.int32: 1,
    }
    buffer = buffers[0]
    before, view = buffer.raw_buffer, buffer.get_view([2, 1])
    assert buffer.get_view((2, 1)) is view and buffer.raw_buffer is before
    view[:] = 15
    buffer.allocate_view((3, 2))
    assert buffer.capacity == len(buffer.raw_buffer) == 6 and buffer.raw_buffer is not before
    assert buffer.get_view((2, 1)).tolist() == [[15], [15]] and (2, 1) in buffer.views
    buffer.expand(4)
    assert buffer.capacity == 6 and buffer.raw_buffer.dtype == buffer.dtype == np.float32


def test_printing_in_order(capsys):
    def program(group):
        P = MPIPartition().create_partition_inclusive([2, 0])
        P.print_sequential(f"rank {group.rank}, ü" if group.rank else "two\nlines")

    run(3, program)
    assert capsys.readouterr().out == "rank 2, ü\ntwo\nlines\n"


def test_integers():
    assert distdl.compute_subshape(4, 1, 10).tolist() == [3]
    assert distdl.compute_stop_index([4, 1], [3, 0], [10, 2]).tolist() == [10, 2]
    assert distdl.compute_nd_slice_volume((slice(1, 3), slice(0, 4))) == 8
    assert distdl.worker_layout(np.array([2, 3])).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert list(distdl.range_index([2, 1])) == [(0, 0), (1, 0)]
    assert distdl.cartesian_index_c((2, 3), (1, 0)) == 3
    assert distdl.cartesian_index_f((2, 3), (1, 0)) == 1
    assert distdl.compute_partition_intersection([2], [0], [2], [1], [6]) is None
    assert distdl.compute_partition_intersection([2, 1], [1, 0], [1, 2], [0, 1], [5, 5]) == (
        slice(0, 2),
        slice(3, 5),
    )
    assert distdl.compute_subtensor_intersection_slice([0], [2], [2], [4]) is None
    shapes = distdl.compute_subtensor_shapes_balanced(torch.empty(5, 4), [2, 2])
    starts, stops = (
        distdl.compute_subtensor_start_indices(shapes),
        distdl.compute_subtensor_stop_indices(shapes),
    )
    for index in distdl.range_index([2, 2]):
        assert starts[index].tolist() == distdl.compute_start_index([2, 2], index, [5, 4]).tolist()
        assert stops[index].tolist() == distdl.compute_stop_index([2, 2], index, [5, 4]).tolist()
    assert distdl.get_rearrange_ordering(2, -1) == ("p a b", "a (p b)")
    a, b = TensorStructure(torch.empty(2)), TensorStructure()
    assert a != b and a == TensorStructure(torch.empty(2)) and a != 1
    assert distdl.zero_volume_tensor(2, dtype=torch.float64, requires_grad=True).shape == (2, 0)


def test_every_name_is_exported():
    for module in (distdl.slicing, distdl.tensor_decomposition, distdl.mixins, distdl.backend):
        named = {name for name, each in vars(module).items() if each_is_of(module, each)}
        named -= {"Partition"}  # of nobody, for DistDL's own layers
        assert {name for name in named if name[0] != "_"} <= set(vars(distdl))
    layers = {name for name in vars(distdl.nn) if name[0].isupper()}
    assert "Module" in layers and layers <= set(vars(distdl))


def each_is_of(module, thing):
    return getattr(thing, "__module__", None) == module.__name__
