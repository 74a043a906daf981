"""weft.init under launchers as they are: torchrun on two hosts, srun's environment, mpirun."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from weft.base.pace import patient

HERE = Path(__file__).parent
JOB = HERE / "launch_job.py"
PYTHON = shlex.quote(sys.executable)
NETLAB = HERE.parents[1] / "tools" / "netlab"

# netlab sets a launcher's variables; here each launcher shall set its own
CLEAR = "H=$RANK; unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
CLEAR = f"{CLEAR} GLOO_SOCKET_IFNAME; export TEST_LATER_GROUPS=eth0"

on_hosts = [
    pytest.mark.network,
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]


def run(*command):
    done = subprocess.run(
        [*map(str, command)],
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
        timeout=patient(200.0),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def on_two_hosts(script):
    netlab = [sys.executable, NETLAB, "-n", "2", "--rate", "none", "--timeout", patient(180.0)]
    return run(*netlab, "--", "sh", "-ec", f"{CLEAR}; {script}")


def results(lines):
    return sorted(line[line.index("rank") :] for line in lines if "[0, 1, 5]" in line)


EXPECTED = [f"rank {rank} of 2 [0, 1, 5] 2.0 True" for rank in range(2)]


class TestOnTwoHosts:
    pytestmark = on_hosts

    def test_torchrun_restarts_an_attempt_that_failed(self, tmp_path):
        lines = on_two_hosts(
            f"{PYTHON} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 "
            "--rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29401 --rdzv-id x "
            "--rdzv-conf is_host=$((1-H)) --local-addr $NETLAB_HOST --max-restarts 1 "
            f"{shlex.quote(str(JOB))} {shlex.quote(str(tmp_path))}"
        )
        assert results(lines) == EXPECTED
        assert any("launched by torchrun (job x): rank 1 of 2" in line for line in lines)

    def test_srun_s_environment_and_a_shared_file(self, tmp_path):
        lines = on_two_hosts(
            "export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$H "
            "SLURM_LOCALID=0 SLURM_NODEID=$H 'SLURM_STEP_TASKS_PER_NODE=1(x2)' "
            "SLURM_STEP_NODELIST=10.77.0.[1-2]; "
            f"{PYTHON} {shlex.quote(str(JOB))} {shlex.quote(str(tmp_path))} - "
            f"{shlex.quote(f'file://{tmp_path}/')}"
        )
        assert results(lines) == sorted([*EXPECTED, *EXPECTED])
        assert any("launched by srun (job 7.0): rank 1 of 2" in line for line in lines)
        assert not list(tmp_path.iterdir())


def test_mpirun(tmp_path, mpirun):
    job = mpirun(2, str(JOB), str(tmp_path), stdout=PIPE, stderr=STDOUT, text=True)
    out, _ = job.communicate(timeout=patient(200.0))
    assert job.returncode == 0, out
    lines = out.splitlines()
    assert [line[:26] for line in results(lines)] == [line[:26] for line in EXPECTED]
    assert any("launched by mpirun" in line for line in lines)
