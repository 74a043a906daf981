"""An entry that is added to `OPS` serves everywhere: in each algorithm, and in dense reductions."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.kernels.ops import DTYPES, OPS, Op
from weft.sparse import ALGORITHMS
from weft.testing import run

TAKES = tuple(dtype for dtype in DTYPES if dtype.is_signed)


def larger(left, right):
    """Of two numbers the one that is further from 0, or above it."""
    is_larger = (right.abs() > left.abs()) | ((right == -left) & (right > 0))
    return torch.where(is_larger, right, left)


@pytest.fixture
def added(monkeypatch):
    with pytest.raises(weft.WeftError, match="op 'furthest' is unknown"):  # nobody remembers that
        run(1, lambda group: weft.all_reduce(torch.ones(1), "furthest"))
    op = Op("furthest", larger, TAKES, "signed numbers, the values are {dtype}")
    monkeypatch.setitem(OPS, "furthest", op)


def values(rank, dtype=torch.float32):
    drawn = torch.randint(-99, 99, (20_000, 2), generator=torch.Generator().manual_seed(rank))
    return drawn.to(dtype)


def expected(ranks, dtype=torch.float32):
    result = values(0, dtype)
    for rank in range(1, ranks):
        result = larger(result, values(rank, dtype))
    return result


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_each_algorithm_has_it(added, algorithm):
    def program(group):
        rows = weft.Rows(torch.arange(20_000), values(group.rank), height=20_000)
        return weft.sparse_all_reduce(rows, "furthest", algorithm=algorithm).values

    for found in run(4, program):
        assert torch.equal(found, expected(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_dense_reductions_have_it(added, dtype):
    for found in run(3, lambda group: weft.all_reduce(values(group.rank, dtype), "furthest")):
        assert torch.equal(found, expected(3, dtype))


def test_what_it_does_not_take_and_its_gradient_are_refused(added):
    def program(group):
        texts = []
        for wrong in (torch.ones(2, dtype=torch.uint16), torch.ones(2, dtype=torch.uint8)):
            with pytest.raises(weft.WeftError) as caught:
                weft.all_reduce(wrong, "furthest")
            texts.append(str(caught.value))
        with pytest.raises(weft.WeftError, match="op furthest has no gradient here"):
            weft.all_reduce(torch.ones(2, requires_grad=True), "furthest")
        return texts

    first, second = run(2, program)[1]
    assert "values of torch.uint16 are not supported" in first
    assert "op furthest is for signed numbers, the values are torch.uint8" in second
