"""Arguments of DistDL's face that are wrong on one worker: all are told; the next call works."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import weft
from weft.compat.distdl import MPI, MPIPartition
from weft.testing import run, spmd

COMM = MPI.COMM_WORLD
HALVES = np.array([0.5, 1.5])


def read_only():
    place = np.zeros(2)
    place.flags.writeable = False
    return place


def allreduce(sendbuf, recvbuf, op=MPI.SUM):
    COMM.Allreduce(sendbuf, recvbuf, op=op)


WRONG = {
    "rank 0: its receive buffer has 2 elements of int32, and the result has 2 of float64: pass one "
    "of the same dtype and size": lambda rank: allreduce(HALVES, np.zeros(2, np.int32)),
    "rank 1: its receive buffer has 3 elements of float64, and the result has 2 of float64: pass "
    "one of the same dtype and size": lambda rank: allreduce(
        HALVES, np.zeros(3 if rank == 1 else 2)
    ),
    "rank 2: its receive buffer is read-only: pass one that can be written": lambda rank: allreduce(
        HALVES, read_only() if rank == 2 else np.zeros(2)
    ),
    "rank 1: elements of its receive buffer share memory: pass a copy": lambda rank: COMM.Bcast(
        torch.zeros(1).expand(2) if rank == 1 else torch.zeros(2), root=0
    ),
    "rank 0: its buffer is a float, whose memory NumPy cannot share: pass an array, or a tensor on "
    "the CPU": lambda rank: allreduce([1.0], [0.0]),
    "rank 1: its buffer is a NoneType, whose memory NumPy cannot share: pass an array, or a tensor "
    "on the CPU": lambda rank: allreduce(None if rank == 1 else HALVES, np.zeros(2)),
    "rank 2: its buffer has a count: pass that part of the array, array[:count]": (
        lambda rank: allreduce([HALVES, 1, MPI.SUM] if rank == 2 else HALVES, np.zeros(2))
    ),
    "rank 0: its buffer has a count: pass that part of the array, array[:count]": (
        lambda rank: COMM.Bcast([np.zeros(2), (1, 0)] if rank == 0 else np.zeros(2))
    ),
    "rank 2: its buffer has dtype object: pass an array of numbers": lambda rank: allreduce(
        HALVES.astype(object) if rank == 2 else HALVES, np.zeros(2)
    ),
    "rank 1: Allreduce has op maximum here, and op add on rank 0: pass the same on all workers": (
        lambda rank: allreduce(HALVES, np.zeros(2), MPI.MAX if rank == 1 else MPI.SUM)
    ),
    "rank 2: op is 'sum': pass one of MPI's, or a function of two numbers": lambda rank: allreduce(
        HALVES, np.zeros(2), "sum" if rank == 2 else MPI.SUM
    ),
    "rank 1: Allreduce has shape (3,) here, and shape (2,) on rank 0: pass the same on all "
    "workers": lambda rank: allreduce(
        np.ones(3 if rank == 1 else 2), np.zeros(3 if rank == 1 else 2)
    ),
    "rank 1: it calls Bcast, and rank 0 calls Allreduce: make the same call on all workers": (
        lambda rank: COMM.Bcast(np.zeros(2)) if rank == 1 else allreduce(HALVES, np.zeros(2))
    ),
    "rank 1: Reduce has root 1 here, and root 0 on rank 0: pass the same on all workers": (
        lambda rank: COMM.Reduce(HALVES, np.zeros(2), root=rank)
    ),
    "rank 0: root is 9: pass the rank of a worker, 0 to 2": lambda rank: COMM.Reduce(
        HALVES, np.zeros(2), root=9
    ),
    "rank 1: Bcast has dtype int32 here, and dtype float64 on rank 0: pass the same on all "
    "workers": lambda rank: COMM.Bcast(HALVES if rank == 0 else np.zeros(2, np.int32)),
    "rank 2: Bcast has elements 3 here, and elements 2 on rank 0: pass the same on all workers": (
        lambda rank: COMM.Bcast(np.zeros(3 if rank == 2 else 2))
    ),
    "rank 1: root is 'x': pass the rank of a worker, 0 to 2": lambda rank: COMM.bcast(
        1, root="x" if rank == 1 else 0
    ),
    "rank 1: color is 'a': pass an integer": lambda rank: COMM.Split("a" if rank == 1 else 0),
    "rank 2: color is 0.7: pass an integer": lambda rank: COMM.Split(0.7 if rank == 2 else 0),
    "rank 1: key is None: pass an integer": lambda rank: COMM.Split(0, None if rank == 1 else 0),
    "rank 1: allreduce has op max here, and op min on rank 0: pass the same on all workers": (
        lambda rank: COMM.allreduce(rank, max if rank == 1 else min)
    ),
    "rank 2: allreduce_data has op max here, and op sum on rank 0: pass the same on all workers": (
        lambda rank: MPIPartition().allreduce_data(HALVES, "max" if rank == 2 else "sum")
    ),
    "rank 1: op is 'mean': use sum, prod, min, max": lambda rank: MPIPartition().allreduce_data(
        HALVES, "mean" if rank == 1 else "sum"
    ),
    "rank 1: allgather_data has dtype float64 here, and dtype int64 on rank 0: pass the same on "
    "all workers": lambda rank: MPIPartition().allgather_data([1.0 if rank == 1 else 1]),
    "rank 1: its data has dtype <U1: pass an array of numbers": lambda rank: (
        MPIPartition().allgather_data(["a"] if rank == 1 else [1])
    ),
    "rank 2: broadcast_data has root 1 here, and root 0 on rank 0: pass the same on all workers": (
        lambda rank: MPIPartition().broadcast_data([1], root=1 if rank == 2 else 0)
    ),
    "rank 0: its data has dtype object: pass an array of numbers": lambda rank: (
        MPIPartition().broadcast_data(None, root=0)
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_every_worker_raises_the_same_and_the_next_call_works(text):
    def program(group):
        with pytest.raises(weft.WeftError) as raised:
            WRONG[text](group.rank)
        found = np.zeros(1)
        allreduce(np.ones(1), found)
        assert found.item() == group.size
        return str(raised.value)

    assert run(3, program, timeout=10) == [text] * 3


def test_an_op_that_raises_does_so_on_every_worker():
    def fails(left, right):
        raise KeyError("of the op")

    def program(group):
        with pytest.raises(KeyError, match="of the op"):
            COMM.Reduce(np.ones(2), np.zeros(2), fails, root=1)
        with pytest.raises(KeyError, match="of the op"):
            COMM.Allreduce(np.ones(2), np.zeros(2), fails)
        COMM.Barrier()

    run(3, program, timeout=10)


def test_two_workers_tell_each_other_what_does_not_fit():
    def program(group):
        place = np.zeros(2, np.int64)
        with pytest.raises(weft.WeftError) as raised:
            if group.rank == 0:
                COMM.Recv(place, source=1)
            else:
                COMM.Send(HALVES, dest=0)
        assert place.tolist() == [0, 0]
        COMM.Barrier()
        return str(raised.value)

    text = "rank 1: Send or Recv has dtype float64 here, and dtype int64 on rank 0"
    assert run(2, program, timeout=10) == [f"{text}: pass the same on all workers"] * 2


@pytest.mark.parametrize("array", [HALVES[::-1], HALVES.astype(">f8"), HALVES.astype("g")[::-1]])
@spmd(2, on=("threads",))
def test_an_array_may_have_any_strides_and_order_of_bytes(group, array):
    place = array.copy() if group.rank == 0 else np.zeros_like(array)
    COMM.Bcast(array if group.rank == 0 else place, root=0)
    assert place.tolist() == array.tolist()
    allreduce(array if group.rank == 0 else array.astype(array.dtype.newbyteorder("=")), place)
    assert place.tolist() == (2 * array).tolist()
    P_world = MPIPartition()
    assert P_world.broadcast_data(array).tolist() == array.tolist()
    assert P_world.allgather_data(array).tolist() == [array.tolist()] * 2
    assert P_world.allreduce_data(array, "max").tolist() == array.tolist()


@spmd(4, on=("threads",))
def test_a_half_tells_its_own_workers_alone(group):
    half, place = COMM.Split(group.rank % 2), np.zeros(2)
    if group.rank % 2:
        with pytest.raises(weft.WeftError, match=r"^rank 3: its receive buffer has 1 elements"):
            half.Allreduce(HALVES, np.zeros(1) if group.rank == 3 else place)
    half.Allreduce(HALVES, place)
    assert place.tolist() == [1, 3]
