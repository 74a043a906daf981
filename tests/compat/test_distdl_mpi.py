"""Partitions of communicators of mpi4py, under mpirun: only their own processes take part."""

from __future__ import annotations

import subprocess

from weft.base.pace import patient

PROGRAM = """
import sys, numpy as np, torch
from mpi4py import MPI
from weft.compat.distdl import AllGather, MPIPartition

world = MPI.COMM_WORLD
for count in (2, 1, 2, 3):
    comm = world.Split(world.rank < count)
    if world.rank >= count:
        continue  # which makes no partition at all
    P_world, total = MPIPartition(comm), np.zeros(1)
    P_x = P_world.create_cartesian_topology_partition([count])
    y = AllGather(P_x, (0,))(torch.tensor([10 * count + P_x.rank]))
    assert P_world._comm is comm
    P_world._comm.Reduce(np.ones(1), total, op=MPI.SUM, root=0)
    P_x._comm.Allreduce(total, total, op=MPI.MAX)
    # in one write: ranks share the pipe
    sys.stdout.write(f"{world.rank}: {y.tolist()} {total.item():g}\\n")
    P_world.deactivate()
"""


def test_a_partition_starts_on_the_ranks_of_its_communicator(tmp_path, mpirun):
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    job = mpirun(3, str(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, wrong = job.communicate(timeout=patient(55))
    finally:
        job.kill()
    assert job.returncode == 0, wrong
    right = {
        count: f"{[10 * count + place for place in range(count)]} {count}" for count in (1, 2, 3)
    }
    there = [(rank, count) for count in (2, 1, 2, 3) for rank in range(count)]
    assert sorted(said.splitlines()) == sorted(f"{rank}: {right[count]}" for rank, count in there)
