"""`all_reduce`: every op and dtype, the same bits on every rank, and gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import weft
from cases import in_case
from weft.testing import spmd

EVERYWHERE = ("threads", "verbs", "processes", "gloo")


def mine(rank, count, dtype=torch.float32):
    return ((torch.arange(count) * (rank + 2) + rank) % 5 + 1).to(dtype)


def wanted(size, count, op, dtype):
    parts = torch.stack([mine(rank, count, torch.float64) for rank in range(size)])
    total = {
        "sum": parts.sum(0),
        "avg": parts.mean(0),
        "min": parts.amin(0),
        "max": parts.amax(0),
        "prod": parts.prod(0),
    }
    return total[op].to(dtype)


@pytest.mark.parametrize("count", [1, 5000])
@spmd(1, 2, 3, 8, on=EVERYWHERE)
def test_sums_of_every_kind(group, count):
    cases = [
        ("sum", torch.float32),
        ("avg", torch.float64),
        (dist.ReduceOp.MAX, torch.int16),
        ("min", torch.uint16),
        ("prod", torch.float64),
        ("max", torch.bfloat16),
        ("sum", torch.complex64),
        ("avg", torch.float16),
    ]
    for op, dtype in cases:
        with in_case(op, dtype):
            tensor = mine(group.rank, count, dtype)
            copy = tensor.clone()
            result = weft.all_reduce(tensor, op)
            name = "max" if isinstance(op, dist.ReduceOp.RedOpType) else op
            torch.testing.assert_close(result, wanted(group.size, count, name, dtype))
            assert torch.equal(tensor, copy)


@pytest.mark.parametrize("count", [1, 50_000])
@spmd(1, 3, 4, on=EVERYWHERE)
def test_float8_is_combined_wide_and_rounded_once(group, count):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for op in ("sum", "avg", "min", "max", "prod"):
            with in_case(op, dtype):
                result = weft.all_reduce(mine(group.rank, count, dtype), op)
                assert result.dtype == dtype
                total = wanted(group.size, count, op, torch.float32).to(dtype)
                assert torch.equal(result.float(), total.float()), (op, dtype)


@spmd(20, on=("threads",))
def test_more_ranks_than_state_directly(group):
    for count in (3, 5000):
        result = weft.all_reduce(mine(group.rank, count))
        assert torch.equal(result, wanted(group.size, count, "sum", torch.float32))


@spmd(3, on=EVERYWHERE)
def test_bits_and_shapes(group):
    tensor = torch.tensor([[1 << group.rank, 7], [group.rank, 5]], dtype=torch.int32).t()
    assert weft.all_reduce(tensor, "bor").tolist() == [[7, 3], [7, 5]]
    assert weft.all_reduce(torch.tensor(group.rank == 1), "bor").item() is True
    assert weft.all_reduce(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("op", ["sum", "avg"])
@spmd(1, 3, on=EVERYWHERE)
def test_gradients_of_sums(group, op):
    part = 1 / group.size if op == "avg" else 1.0
    tensor = torch.tensor([1.0, 2.0 + group.rank], dtype=torch.float64, requires_grad=True)
    result = weft.all_reduce(tensor, op)
    weight = group.rank + 1
    total = group.size * (group.size + 1) // 2
    (grad,) = torch.autograd.grad((weight * result.pow(3)).sum(), tensor, create_graph=True)
    torch.testing.assert_close(grad, part * total * 3 * result.pow(2))
    # d/dx of the sum over all ranks of grad: each of them depends on the result
    (second,) = torch.autograd.grad(grad.sum(), tensor)
    torch.testing.assert_close(second, part * part * total * group.size * 6 * result.detach())


@pytest.mark.parametrize("op", ["min", "max"])
@spmd(1, 2, 4, on=EVERYWHERE)
def test_the_gradient_of_an_extremum_is_shared_by_those_that_attain_it(group, op):
    values = torch.tensor([group.rank, 1.0, group.rank // 2])  # one rank, all, some
    tensor = values.clone().requires_grad_()
    (weft.all_reduce(tensor, op) * (group.rank + 1)).sum().backward()
    everyone = torch.tensor([[r, 1.0, r // 2] for r in range(group.size)])
    best = everyone.amax(0) if op == "max" else everyone.amin(0)
    share = values.eq(best) / everyone.eq(best).sum(0)
    torch.testing.assert_close(tensor.grad, share * (group.size * (group.size + 1) // 2))


@pytest.mark.parametrize("op", ["min", "max"])
@spmd(2, on=EVERYWHERE)
def test_an_extremum_that_is_nan_is_attained_where_it_is(group, op):
    tensor = torch.tensor([math.nan if group.rank == 0 else 1.0, math.nan], requires_grad=True)
    weft.all_reduce(tensor, op).sum().backward()
    assert tensor.grad.tolist() == [2.0 if group.rank == 0 else 0.0, 1.0]


@spmd(2, on=EVERYWHERE)
def test_a_rank_without_gradients_takes_part_in_backward(group):
    for op in ("sum", "max"):
        tensor = torch.full((2,), float(group.rank), requires_grad=group.rank == 1)
        result = weft.all_reduce(tensor, op)
        result.sum().backward()
        if group.rank == 1:
            assert tensor.grad.eq(2).all()
        with torch.no_grad():
            assert not weft.all_reduce(tensor, op).requires_grad


@spmd(2)
def test_a_tensor_of_more_dimensions_than_numpy_has(group):
    for count in (1, 100_000):
        shape = (*[1] * 70, count)
        assert torch.equal(weft.all_reduce(torch.ones(shape)), torch.full(shape, 2.0))
