"""The wires of `examples/`, installed as packages: groups run over what they offer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft
from weft.base.pace import patient
from weft.sparse import ALGORITHMS
from weft.testing import RankFailure, expected, processes

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", params=["streams", "ucx"])
def env(request, tmp_path_factory):
    """With the package installed into a folder of its own; ranks use its wire."""
    if request.param == "ucx":
        pytest.importorskip("libucx", reason="UCX is not installed: pip install libucx-cu12")
    folder = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"]
    place = ["--no-build-isolation", "--target", str(folder)]
    example = str(EXAMPLES / f"wire_{request.param}")
    done = subprocess.run([*install, *place, example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {"PACKAGES": str(folder), "WEFT_WIRE": request.param}


def init(**options):
    """`weft.init` where the package is installed: ranks are forked from a server that has begun."""
    sys.path.insert(0, os.environ["PACKAGES"])
    return weft.init(**options)


def rows_of(rank):
    """Duplicates, skew, and no rows at all on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else 500 * (rank + 1)
    indices = torch.randint(0, 2_000, (count,), generator=generator)
    return weft.Rows(indices, torch.ones(count, 8), 2_000)


def sparse_calls():
    with init(timeout=60) as group:
        everyones = [rows_of(rank) for rank in range(group.size)]
        total = expected(everyones, "sum")
        for name in ("auto", *ALGORITHMS):
            result = weft.sparse_all_reduce(rows_of(group.rank), algorithm=name)
            assert torch.equal(result.indices, total.indices), name
            assert torch.equal(result.values, total.values), name
        work = weft.sparse_all_reduce(rows_of(group.rank), async_op=True)
        assert torch.equal(work.wait().values, total.values)
        return weft.config()["wire"]


@pytest.mark.parametrize("size", [2, 4, 7])
def test_every_algorithm_runs_over_it(env, size):
    assert processes(size, sparse_calls, env=env) == [env["WEFT_WIRE"]] * size


def layers_and_routines():
    with init(timeout=60) as group:
        rank = group.rank
        size = group.size
        grid = weft.Partition((1, size))
        part = torch.full((3, rank + 1), float(rank), requires_grad=True)
        whole = weft.nn.AllGather(grid, dims=1)(part)
        assert whole.shape == (3, size * (size + 1) // 2)
        whole.sum().backward()
        assert torch.equal(part.grad, torch.full_like(part, float(size)))

        sent = [torch.full((rank + 1, 2), float(10 * rank + peer)) for peer in range(size)]
        for peer, came in enumerate(weft.all_to_all(sent)):
            assert torch.equal(came, torch.full((peer + 1, 2), float(10 * peer + rank)))

        large = weft.all_reduce(torch.full((600_000,), float(rank + 1)))
        assert torch.equal(large, torch.full_like(large, size * (size + 1) / 2))
        weft.barrier()
        with group.split(range(size)) as other:
            assert weft.all_reduce(torch.ones(1), group=other).item() == size


def test_layers_and_routines_run_over_it(env):
    processes(4, layers_and_routines, env=env)


# Bodies that run on ranks as processes, of every kind of call.
SUITES = [
    "tests/sparse/test_algorithms.py",
    "tests/sparse/test_root.py",
    "tests/nn/test_autograd.py",
    "tests/comm/test_overlap.py",
    "tests/comm/test_sync_grads.py",
    "tests/comm/test_wire_dtype.py",
]


PYTEST = """
import os, sys, pytest
sys.path.insert(0, os.environ["PYTHONPATH"])
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_the_tests_of_sparse_nn_and_comm_run_over_it(programs, env):
    """As a user's own tests do, by WEFT_WIRE alone."""
    everywhere = {**os.environ, "PYTHONPATH": env["PACKAGES"], "WEFT_WIRE": env["WEFT_WIRE"]}
    root = EXAMPLES.parent
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={root}"]
    arguments += ["-k", "processes-3"]  # on other numbers every algorithm runs above
    done = programs(PYTEST, *arguments, *(str(root / suite) for suite in SUITES), env=everywhere)
    said = "".join(done.communicate(timeout=patient(300.0)))
    assert done.returncode == 0 and " passed" in said, said


def until_one_dies():
    group = init(timeout=60)
    with pytest.raises(weft.WireError) as caught:
        weft.barrier()  # whose last message from rank 2 may be lost with it
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            weft.sparse_all_reduce(rows_of(group.rank))
    said = f"culprit {caught.value.culprit}"
    Path(os.environ["PACKAGES"], f"raised.{group.rank}").write_text(said, encoding="utf-8")


def test_who_is_killed_is_named_by_all(env):
    """By the control links: the wire itself says no more than that a connection has ended."""
    with pytest.raises(RankFailure, match="rank 2"):
        processes(3, until_one_dies, env=env)
    raised = {path.name: path.read_text() for path in Path(env["PACKAGES"]).glob("raised.*")}
    assert raised == {"raised.0": "culprit 2", "raised.1": "culprit 2"}


def wrong_arguments():
    with init(timeout=60) as group:
        with pytest.raises(weft.WeftError, match="rank 1"):
            weft.sparse_all_reduce(
                weft.Rows(torch.tensor([0]), torch.ones(1, 2 + (group.rank == 1)), 5)
            )
        assert weft.all_reduce(torch.ones(1)).item() == group.size


def test_a_wrong_argument_raises_on_all_and_the_next_call_works(env):
    processes(3, wrong_arguments, env=env)
