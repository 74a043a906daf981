"""Jobs of processes of which some have no Numba: the same sums, and the same bits on all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.base.pace import patient

WITHOUT = Path(__file__).with_name("without_numba")
RANKS = 4

PROGRAM = """
import hashlib, itertools, sys, torch, weft
from weft import kernels
from weft.sparse import ALGORITHMS
from torch.nn.parallel import DistributedDataParallel

def rows_of(rank, count, width, dtype, height):
    draw = torch.Generator().manual_seed(rank)
    values = 10 * torch.randn(count, width, generator=draw)
    return torch.randint(height, (count,), generator=draw), values.to(dtype)

def same_on_all(*tensors):
    bits = b"".join(each.detach().view(torch.uint8).numpy().tobytes() for each in tensors)
    digest = int(hashlib.sha256(bits).hexdigest()[:14], 16)
    said = weft.all_to_all([torch.tensor([digest])] * group.size)
    return len(set(map(int, said))) == 1

with weft.init(timeout=120) as group:
    sizes = [(3, 4, 10), (800, 16, 3000), (20_000, 1, 1 << 20)]
    dtypes = [torch.float32, torch.bfloat16, torch.int32]
    names = ["auto", *(name for name in ALGORITHMS if name != "holders")]
    for name, size, dtype in itertools.product(names, sizes, dtypes):
        count, width, height = size
        case = name, size, dtype
        given = [rows_of(rank, count, width, dtype, height) for rank in range(group.size)]
        indices, sums = weft.sparse_all_reduce(given[group.rank], algorithm=name)
        assert same_on_all(indices, sums), case
        right = torch.zeros(height, width, dtype=torch.float64)
        for each, values in given:
            right.index_add_(0, each, values.double())
        near = 2.0 if dtype == torch.bfloat16 else 1e-4
        assert torch.allclose(right[indices], sums.double(), atol=near), case
        assert len(indices) == len(torch.cat([each for each, _ in given]).unique()), case

    tables = [rows_of(7 * group.rank + k, 400, 8, torch.float32, 3000) for k in range(26)]
    for table in weft.sparse_all_reduce(tables, wire_dtype=torch.bfloat16):
        assert same_on_all(*table)
    for count in (1, 1000, 1_000_000):
        for dtype in (torch.float32, torch.bfloat16):
            own = rows_of(group.rank, count, 1, dtype, 1)[1]
            assert same_on_all(weft.all_reduce(own))

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.EmbeddingBag(5000, 16, sparse=True))
    weft.ddp.register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        words, _ = rows_of(group.rank + 9 * step, 320, 1, torch.float32, 5000)
        model(words.view(32, 10)).sum().backward()
        optimizer.step()
    assert same_on_all(model.module.weight)

    try:
        weft.sparse_all_reduce((torch.tensor([-(group.rank == 2)]), torch.ones(1)))
    except weft.WeftError as error:
        assert str(error).startswith("rank 2: index -1 is negative"), error
    try:
        weft.sparse_all_reduce(rows_of(0, 8, 4, torch.float32, 9), algorithm="holders")
    except weft.WeftError as error:
        assert "some rank has none, as `weft doctor` says" in str(error), error
    else:
        assert False, "holders without machine code"
    weft.barrier()
    print(kernels.describe().split()[0])
"""


@pytest.mark.parametrize("hosts", ["aaaa", "abab"])
def test_one_rank_has_no_numba(hosts, tmp_path):
    ranks = []
    for rank, host in enumerate(hosts):
        environment = {
            **os.environ,
            "RANK": f"{rank}",
            "WORLD_SIZE": f"{RANKS}",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "WEFT_HOST": host,
            "WEFT_LINK": "0.1",  # lists of indices are coded between hosts
            "PYTHONPATH": str(WITHOUT) if rank == 2 else "",
        }
        program = PROGRAM.replace("weft.init(", f"weft.init(rendezvous='file://{tmp_path}/meet', ")
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ranks.append(process)
    ends = [each.communicate(timeout=patient(200.0)) for each in ranks]
    said = [out.strip() for out, _ in ends]
    assert said == ["numba", "numba", "torch", "numba"], "\n".join(err for _, err in ends)
    assert "kernels are torch operations, which take longer" in ends[2][1]
