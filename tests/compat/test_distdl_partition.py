"""Partitions under DistDL's names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import weft
from weft.compat.distdl import (
    AllGather,
    AllSumReduce,
    MPICartesianPartition,
    MPIPartition,
    Repartition,
    SumReduce,
    zero_volume_tensor,
)
from weft.testing import run, spmd


@spmd(6, on=("threads",))
def test_attributes(group):
    P_world = MPIPartition()
    assert (P_world.rank, P_world.size, P_world.index) == (group.rank, 6, group.rank)
    assert P_world.active and P_world.dim == 1 and P_world.shape.tolist() == [6]
    P_base = P_world.create_partition_inclusive(np.array([5, 3, 1, 0]))
    P_x = P_base.create_cartesian_topology_partition(np.array([2, 2]), periods=[False, False])
    if group.rank in (5, 3, 1, 0):
        place = [5, 3, 1, 0].index(group.rank)
        assert P_base.active and P_x.active
        assert P_base.rank == P_base.index == P_x.rank == place
        assert P_x.index.tolist() == [place // 2, place % 2]
        P_x._comm.Barrier()
    else:
        assert not P_base.active and not P_x.active
        assert P_base.rank == P_x.rank == -1
        assert P_base.index is P_x.index is P_x._comm is None
    assert (P_x.size, P_x.dim, P_x.shape.tolist()) == (4, 2, [2, 2])
    assert P_x.shape.dtype == np.int64
    assert "2x2 of ranks 5, 3, 1, 0" in repr(P_x)
    P_world._comm.Barrier()


@spmd(4, on=("threads",))
def test_a_barrier_is_among_the_workers_alone(group):
    P_x = MPIPartition().create_partition_inclusive([3, 0, 1])
    before = dict(group.traffic.to)
    if P_x.active:
        P_x._comm.Barrier()
    asked = {peer for peer, nbytes in group.traffic.to.items() if nbytes > before.get(peer, 0)}
    assert asked == ({0, 1, 3} - {group.rank} if P_x.active else set())


@spmd(6, on=("threads",))
def test_partitions_of_partitions(group):
    P_world = MPIPartition()
    P_a, P_b = (P_world.create_partition_inclusive(ranks) for ranks in ([4, 1], [1, 0, 2]))
    assert P_a.create_partition_union(P_b).grid.ranks == (4, 1, 0, 2)
    P_x = P_world.create_cartesian_topology_partition([2, 3])
    row = P_x.create_cartesian_subtopology_partition([False, True])
    assert isinstance(row, MPICartesianPartition)
    assert row.shape.tolist() == [3] and row.rank == group.rank % 3
    assert row.grid.ranks == tuple(
        range(group.rank - group.rank % 3, group.rank - group.rank % 3 + 3)
    )
    P_s = P_b.create_cartesian_topology_partition([3, 1])
    assert P_s.create_cartesian_subtopology_partition([True, False]).active == P_s.active
    for wrong in ([2, 2], [7], [-2, -3], [6, 0], [], None, "six"):
        with pytest.raises(weft.WeftError, match=r"^rank \d: a grid of .* does not take the 6 "):
            P_world.create_cartesian_topology_partition(wrong)
    with pytest.raises(weft.WeftError, match=r"^rank \d: a grid of \[\] does not take the 2 work"):
        P_a.create_cartesian_topology_partition([])  # also on ranks that are not in it
    with pytest.raises(weft.WeftError):
        P_a.create_partition_inclusive([0, 0])
    with pytest.raises(weft.WeftError, match="make it of another partition"):
        MPICartesianPartition()


@spmd(4, on=("threads",))
def test_ranks_that_pass_different_shapes_all_hear_so(group):
    P_world = MPIPartition()
    P_x = P_world.create_cartesian_topology_partition([1, 4] if group.rank != 2 else [4, 1])
    P_y = P_world.create_partition_inclusive([0])
    P_y = P_y.create_cartesian_topology_partition([1, 1])
    for layer in (AllGather(P_x, (0, 1)), Repartition(P_x, P_y), SumReduce(P_x, P_y)):
        with pytest.raises(weft.WeftError, match=r"rank 2 has .*4x1 of ranks 0 to 3"):
            layer(torch.ones(1, 1))
    assert AllSumReduce(P_world, (0,))(torch.ones(1)).item() == 4


@spmd(3, on=("threads",))
def test_a_partition_of_a_group(group):
    assert MPIPartition(group).grid.group is group
    part = group.split([2, 0])
    if part is not None:
        assert (MPIPartition(part).size, MPIPartition(part).rank) == (2, part.rank)
        part.close()
    with pytest.raises(weft.WeftError):
        MPIPartition("world")


class Comm:
    """What speaks as a communicator of mpi4py's does."""

    def __init__(self, rank, size):
        self.Get_rank = lambda: rank
        self.Get_size = lambda: size


def test_a_partition_of_an_mpi4py_communicator():
    def program(group):
        assert MPIPartition(Comm(group.rank, 3)).rank == group.rank
        with pytest.raises(weft.WeftError, match=r"^rank 0: it is rank 1 of the communicator"):
            MPIPartition(Comm([1, 0, 2][group.rank], 3))  # right on the last rank, which is told
        with pytest.raises(weft.WeftError, match=r"has 2 processes, and there are 3 ranks: p"):
            MPIPartition(Comm(0, 2))
        return AllSumReduce(MPIPartition(), (0,))(zero_volume_tensor()).numel()

    assert run(3, program) == [0, 0, 0]


def test_the_first_partition_starts_weft():
    try:
        assert MPIPartition().size == 1
    finally:
        weft.shutdown()


def test_zero_volume_tensors():
    assert zero_volume_tensor().shape == (0,)
    made = zero_volume_tensor(2, dtype=torch.float64, requires_grad=True)
    assert (made.shape, made.dtype, made.requires_grad) == ((2, 0), torch.float64, True)
