"""A partition of mpi4py's world, under mpirun."""

from __future__ import annotations

import subprocess

from weft.base.pace import patient

PROGRAM = """
import sys, torch
from mpi4py import MPI
from weft.compat.distdl import AllGather, MPIPartition

P_world = MPIPartition(MPI.COMM_WORLD)
P_world._comm.Barrier()
P_x = P_world.create_cartesian_topology_partition([3])
y = AllGather(P_x, (0,))(torch.tensor([10 + P_x.rank]))
# in one write: ranks share the pipe
sys.stdout.write(f"{MPI.COMM_WORLD.rank}: {y.tolist()}\\n")
"""


def test_a_partition_of_the_world(tmp_path, mpirun):
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    job = mpirun(3, str(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, wrong = job.communicate(timeout=patient(55))
    finally:
        job.kill()
    assert job.returncode == 0, wrong
    assert sorted(said.splitlines()) == [f"{rank}: [10, 11, 12]" for rank in range(3)]
