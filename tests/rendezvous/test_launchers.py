"""`weft.rendezvous.launchers`: who launched a process, from environments as launchers set them."""

from __future__ import annotations

import pytest

from weft.base.errors import WeftError
from weft.rendezvous.launchers import Launch, detect

OF_TWO = {"RANK": "1", "WORLD_SIZE": "2"}
# as seen under Open MPI 5.0.11 from its wheel
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-9248@1",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
PART = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}  # of what srun sets
BATCH = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"}
# srun starts the daemons of an mpirun, one on each host
DAEMON = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, Launch("alone", 0, 1, 0, 1)),
        (BATCH, Launch("alone", 0, 1, 0, 1)),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0"}, Launch("alone", 0, 1, 0, 1)),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, Launch("alone", 0, 1, 0, 1)),
        ({**PART, "SLURM_NTASKS": "2"}, Launch("srun", 1, 2, 1, 2)),
        ({**PART, "SLURM_NPROCS": "2"}, Launch("srun", 1, 2, 1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, Launch("srun", 0, 2, 0, 2)),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}, Launch("alone", 0, 1, 0, 1)),
        ({**PART, **OF_TWO}, Launch("environment", 1, 2, 1, 2)),
        (OF_TWO, Launch("environment", 1, 2, 1, 2)),
        ({**OF_TWO, "TORCHELASTIC_RUN_ID": "x"}, Launch("torchrun", 1, 2, 1, 2, "x")),
        (OPEN_MPI, Launch("mpirun", 3, 4, 1, 2, "prterun-vm-9248@1", known=True)),
        (SRUN, Launch("srun", 4, 5, 0, 1, "12.0", "node08", known=True)),
        ({**SRUN, **OF_TWO}, Launch("environment", 1, 2, 1, 2)),
        (
            {**DAEMON, **OPEN_MPI},
            Launch("mpirun", 3, 4, 1, 2, "prterun-vm-9248@1", known=True),
        ),
        (
            {**SRUN, "PMI_RANK": "4", "PMI_SIZE": "5"},
            Launch("srun", 4, 5, 0, 1, "12.0", "node08", known=True),
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_NAMESPACE": "x"},
            Launch("mpirun", 0, 1, 0, 1, "x"),
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODELIST": "a"},
            Launch("srun", 1, 2, 1, 2),
        ),
        (  # how many tasks a node has is not told: it is not taken for all of them
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "a,b"},
            Launch("srun", 1, 2, 0, 1, "", "a"),
        ),
    ],
)
def test_environments(env, launch):
    assert detect(env) == launch


@pytest.mark.parametrize("env", [HYDRA, {**DAEMON, **HYDRA}, {**PART, **HYDRA}])
def test_hydra_s_job_is_named_after_whatever_started_it(env):
    launch = detect(env)
    assert (launch.kind, launch.rank, launch.size) == ("mpirun", 3, 4)
    assert (launch.local_rank, launch.local_size) == (1, 2)
    assert launch.job.startswith("process-")


def test_it_is_said_who_launched(caplog):
    with caplog.at_level("INFO", "weft"):
        detect(SRUN)
    assert caplog.messages == ["launched by srun (job 12.0): rank 4 of 5"]


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"RANK": "0"}, "has RANK=0 but no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 but no RANK"),
        ({**OF_TWO, "RANK": "2"}, "RANK=2 and WORLD_SIZE=2: ranks start at 0"),
        ({**OF_TWO, "RANK": "-1"}, "RANK='-1', which is no whole number"),
        ({**OF_TWO, "WORLD_SIZE": "two"}, "WORLD_SIZE='two', which is no whole number"),
        ({**OF_TWO, "RANK": "1" * 5000}, r"RANK=1{20}\.\.\., a number of 5000 digits"),
        (
            {**OF_TWO, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK=1, LOCAL_WORLD_SIZE=1 and",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "has no OMPI_COMM_WORLD_RANK"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "has no SLURM_PROCID"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 and .*_SIZE=4: ranks"),
        ({**HYDRA, "PMI_RANK": "x"}, "PMI_RANK='x', which is no whole number"),
        ({**SRUN, "SLURM_PROCID": "5"}, "SLURM_PROCID=5 and SLURM_STEP_NUM_TASKS=5: ranks start"),
        ({"PMI_SIZE": "4"}, "no PMI_RANK"),
        (PART, "PROCID=1 but no SLURM_STEP_NUM_TASKS or SLURM_NTASKS or SLURM_NPROCS, which says"),
        ({**PART, "SLURM_PROCID": "0", "SLURM_JOB_ID": "12"}, "SLURM_PROCID=0 but no SLURM_STEP"),
        ({"SLURM_PROCID": "0"}, "SLURM_PROCID=0 but no .* unset SLURM_PROCID for a group of one"),
        ({**BATCH, "SLURM_PROCID": "3"}, "SLURM_PROCID=3 but no SLURM_STEP_NUM_TASKS, which says"),
        ({**PART, "SLURM_NTASKS": "1"}, "SLURM_PROCID=1 and SLURM_NTASKS=1: ranks start"),
    ],
)
def test_what_cannot_be(env, complaint):
    with pytest.raises(WeftError, match=complaint):
        detect(env)


@pytest.mark.parametrize(
    ("nodes", "first", "several"),
    [
        ("a", "a", False),
        ("n[7]", "n7", False),
        ("n[1-3]", "n1", True),
        ("gpu-7", "gpu-7", False),
        ("n[099-101],m", "n099", True),
        ("login,node[08-10,12]-ib", "login", True),
        ("r1n[1,3]-ib,r2n7-ib", "r1n1-ib", True),
        ("rack[0-1]node[4-7]", "rack0node4", True),
    ],
)
def test_the_first_node_is_where_rank_0_is(nodes, first, several):
    tasks = {**PART, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": nodes}
    launch = detect({**tasks, "SLURM_LOCALID": "0"})
    assert (launch.head, launch.local_size) == (first, 1 if several else 2)
