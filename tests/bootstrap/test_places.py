"""Where weft has to run: each rank makes its place, then does what jobs do.

What needs root, or another interpreter, is tried by hand (docs/launch.md).
"""

from __future__ import annotations

import os
import platform

import pytest

JOB = """
import sys, torch, weft
with weft.init(rendezvous=sys.argv[1], timeout=100) as group:
    few = torch.tensor([group.rank]), torch.ones(1, 4)
    many = torch.arange(8000), torch.ones(8000, 64)
    torch.empty(1 << 26)  # the program needs something, too
    for each in (few, many):
        weft.sparse_all_reduce(each)
    (rows, _), (_, sums) = weft.sparse_all_reduce([few, many])
    ones = torch.ones(2, requires_grad=True)
    weft.nn.AllGather(weft.Partition((group.size,)), (0,))(ones).sum().backward()
    weft.barrier()
    print(len(rows), sums.mean().item(), ones.grad.mean().item())
"""
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_{0}, ({1}, {1}))"
# Beside what torch takes alone, which is 0.8 GiB without CUDA and 3.2 GiB with it.
ADDRESSES = "import psutil, torch; taken = psutil.Process().memory_info().vms\n" + LIMIT
# Calls that Docker's default profile refuses, by their numbers; and nobody may look into the rank.
CONTAINER = """
import ctypes, struct
refused = 101, 237, 238, 239, 250, 272, 279, 298, 308, 310, 311, 312, 321, 323, 425, 438, 440
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 435), (0x06, 0, 0, 0x50000 | 38)]
for number in refused:
    steps += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | 1)]
steps.append((0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in steps))
program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
assert prctl(4, 0) == prctl(38, 1, 0, 0, 0) == prctl(22, 2, program) == 0
"""
NO_NUMBA = "import sys; sys.modules.update(dict.fromkeys(['numba', 'llvmlite']))"
PLACES = [
    pytest.param(8, LIMIT.format("NOFILE", 64), id="64 files, 8 ranks"),
    pytest.param(3, ADDRESSES.format("AS", "taken + (9 << 28)"), id="2.25 GiB of addresses"),
    pytest.param(3, NO_NUMBA, id="no numba"),
    pytest.param(
        3,
        CONTAINER,
        id="container",
        marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of that"),
    ),
    pytest.param(16, "", id="16 ranks"),
]


@pytest.mark.parametrize(("size", "place"), PLACES)
def test_a_job_runs(size, place, programs, tmp_path):
    env = {**os.environ, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    url = f"file://{tmp_path}/meet"
    ranks = [programs(place + JOB, url, env={**env, "RANK": str(rank)}) for rank in range(size)]
    said = [each.communicate(150) for each in ranks]
    assert [out for out, _ in said] == [f"{size} {float(size)} {float(size)}\n"] * size, said
