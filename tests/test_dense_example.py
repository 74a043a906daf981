"""examples/dense_algorithm: an algorithm that a program registers serves what its own do."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.sparse import last_call, unregister
from weft.testing import expected, run

HEIGHT = 40


@pytest.fixture(autouse=True)
def registered(script):
    """For one test: other tests go over all algorithms of weft's own."""
    script("examples/dense_algorithm/dense.py")
    yield
    unregister("dense")


def rows_of(rank, dtype):
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randint(HEIGHT, (9 * rank,), generator=draw)
    values = torch.randint(-4, 5, (9 * rank, 3), generator=draw)
    return weft.Rows(indices, values.to(dtype), HEIGHT)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int64, "max"), (torch.int64, "sum")],
)
def test_it_gives_what_any_algorithm_gives(ranks, dtype, op):
    want = expected([rows_of(rank, dtype) for rank in range(ranks)], op)

    def program(group):
        total = weft.sparse_all_reduce(rows_of(group.rank, dtype), op, algorithm="dense")
        return total, last_call().algorithm

    for total, name in run(ranks, program):
        assert name == ("alone" if ranks == 1 else "dense")
        assert torch.equal(total.indices, want.indices)
        torch.testing.assert_close(total.values, want.values, rtol=2**-7, atol=0)


def test_it_says_what_it_cannot_serve():
    def program(group):
        rows = rows_of(group.rank, torch.float32)
        with pytest.raises(weft.WeftError, match="no neutral element"):
            weft.sparse_all_reduce(rows, lambda a, b: a + b, algorithm="dense")
        lines = {line.algorithm: line for line in weft.explain(rows).lines}
        return lines["dense"].bytes

    assert all(nbytes > 0 for nbytes, _ in run(2, program))
