"""Groups of backend "weft" in a store where groups of the same name have been before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.backend.space import unused
from weft.testing import run
from weft.testing.pace import patient


def test_what_a_process_that_is_gone_has_left_is_not_taken():
    store = dist.HashStore()
    store.set("weft/space/1", "a token that nobody has")  # of a rank 1 that was killed

    def program(group):
        space = unused(store, group.rank, group.size, 20.0)
        fresh = not space.check([f"address {group.rank}"])
        space.set(f"address {group.rank}", "there")
        group.small_all_gather(torch.zeros(1, dtype=torch.uint8), 1).wait()
        return fresh, [space.check([f"address {rank}"]) for rank in range(group.size)]

    for _ in range(2):  # the second time there is what the first has left
        assert run(3, program) == [(True, [True] * 3)] * 3


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_by_all(absent):
    store = dist.HashStore()

    def program(group):
        if group.rank == absent:
            return absent
        with pytest.raises(weft.WireError, match=f"rank {absent} did not come within 1 s") as told:
            unused(store, group.rank, group.size, 1.0)
        return told.value.culprit

    assert run(3, program) == [absent] * 3


def test_a_program_destroys_its_group_and_makes_another(tmp_path: Path) -> None:
    lines = started(tmp_path, AGAIN)
    assert sorted(lines) == [f"rank {rank}: 4 times" for rank in range(2)]


def test_a_program_as_it_is_goes_on_after_a_rank_died(tmp_path: Path) -> None:
    """Under torchrun; gloo alone finds the addresses of the attempt before, and fails."""
    lines = started(tmp_path, DIES, str(tmp_path / "died"))
    assert sorted(lines) == [f"rank {rank}: {[0, 1]}" for rank in range(2)]


AGAIN = """
import sys, torch, torch.distributed as dist, weft

for time in range(4):
    dist.init_process_group("cpu:weft")
    me = dist.get_rank()
    group = dist.new_group()
    for tensor in (torch.ones(1), torch.ones(1).to_sparse()):
        for where in (None, group):
            dist.all_reduce(tensor, group=where)
        assert tensor.to_dense().item() == 4
    dist.destroy_process_group()
sys.stdout.write(f"rank {me}: {time + 1} times\\n")
"""

DIES = """
import os, signal, sys, torch, torch.distributed as dist, weft

dist.init_process_group("cpu:weft")
me = dist.get_rank()
dist.all_reduce(torch.ones(1))
if me == 0 and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
rows = torch.sparse_coo_tensor([[me]], torch.ones(1, 2), (10, 2), check_invariants=True)
dist.all_reduce(rows)
sys.stdout.write(f"rank {me}: {rows.indices()[0].tolist()}\\n")
"""


def started(folder: Path, program: str, *arguments: str) -> list[str]:
    script = folder / "job.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.run(
        [*command, "--max-restarts=1", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=patient(110),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.returncode == 0, job.stderr
    return job.stdout.splitlines()
