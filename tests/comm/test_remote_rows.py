"""`remote_rows`: each rank gets the rows that it named; gradients go back to who has the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import weft
from weft.base.tensors import as_bytes
from weft.testing import run, spmd

EVERYWHERE = ("threads", "verbs", "processes", "gloo")

COUNTS = [5, 0, 3, 4, 1, 2, 6]  # rows of each rank, one without any


def needed(rank, total):
    """Two-dimensional, with repeats; some rank needs nothing."""
    if rank == 2 or total == 0:
        return torch.empty(0, 2, dtype=torch.int64)
    return (torch.arange(24) * (3 * rank + 5)).remainder(total).reshape(12, 2)


def whole(total, dtype=torch.float64):
    """The rows of all ranks, one after the other."""
    return (torch.arange(total * 3) % 40).reshape(total, 3).to(dtype)


def sent_by(group):
    """Bytes so far, to all others."""
    return sum(group.traffic.to.values())


def own(tensor, rank):
    first = sum(COUNTS[:rank])
    return tensor[first : first + COUNTS[rank]].clone()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@spmd(1, 2, 4, 7, on=EVERYWHERE)
def test_each_index_gets_its_row(group, dtype):
    total = sum(COUNTS[: group.size])
    indices = needed(group.rank, total).to(dtype)
    plan = weft.remote_rows(indices, COUNTS[group.rank])
    assert plan.places.dtype == dtype and plan.places.shape == indices.shape
    assert plan.first == sum(COUNTS[: group.rank]) and plan.count == COUNTS[group.rank]
    for kind in (torch.float64, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
        rows = whole(total, kind)
        found = plan.fetch(own(rows, group.rank))
        assert found.dtype == kind and len(found) == plan.count + len(plan.remote)
        bits = as_bytes(found.contiguous()).view(len(found), -1)
        expected = as_bytes(rows).view(total, -1)
        assert torch.equal(bits[plan.places.long()], expected[indices.long()])


@spmd(4, on=("threads",))
def test_a_plan_says_what_it_moves(group):
    """Each row once, whatever the repeats; its own rows not at all."""
    plan = weft.remote_rows(torch.tensor([0, 7, 7, 2]), 2)
    remote = [index for index in (0, 2, 7) if index // 2 != group.rank]
    assert plan.remote.tolist() == remote
    assert plan.received == [sum(index // 2 == rank for index in remote) for rank in range(4)]
    assert plan.sent == [0 if rank == group.rank else [1, 1, 0, 1][group.rank] for rank in range(4)]
    shown = f"RemoteRows(first={2 * group.rank}, count=2, received={plan.received}"
    assert repr(plan) == f"{shown}, sent={plan.sent})"
    before = sent_by(group)
    plan.fetch(torch.zeros(2, 100_000))
    assert sent_by(group) - before < sum(plan.sent) * 400_000 + 10_000


@spmd(1, 2, 4, on=EVERYWHERE)
def test_gradients_are_those_of_the_whole_tensor(group):
    """As of one process that has all rows; used twice, and differentiated twice."""
    total = sum(COUNTS[: group.size])
    plan = weft.remote_rows(needed(group.rank, total), COUNTS[group.rank])
    rows = own(whole(total), group.rank).requires_grad_()
    found = plan.fetch(rows)[plan.places]
    again = plan.fetch(found.new_tensor(2.0) * rows)[plan.places]  # its own rows, scaled
    loss = (group.rank + 1) * (found.pow(3).sum() + again.pow(2).sum())
    (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), rows)

    reference = whole(total).requires_grad_()
    losses = []
    for rank in range(group.size):
        picked = reference[needed(rank, total)]
        losses.append((rank + 1) * (picked.pow(3) + (2 * picked).pow(2)).sum())
    (expected,) = torch.autograd.grad(sum(losses), reference, create_graph=True)
    (expected_second,) = torch.autograd.grad(expected.sum(), reference)
    torch.testing.assert_close(gradient, own(expected, group.rank))
    torch.testing.assert_close(second, own(expected_second, group.rank))


@spmd(2, on=EVERYWHERE)
def test_a_fetch_in_the_background_is_as_differentiable(group):
    """Whatever mode its waits are in, and however often it is waited for."""
    plan = weft.remote_rows(torch.tensor([0, 3]), 2)
    rows = torch.tensor([1.0, 2.0]).add(2 * group.rank).requires_grad_()
    first = plan.fetch(rows, async_op=True)
    second = plan.fetch(rows * 10, async_op=True)
    with torch.no_grad() if group.rank else torch.inference_mode():
        assert first.wait()[plan.places].tolist() == [1, 4]
    assert first.wait() is first.result()
    assert second.get_future().wait()[plan.places].tolist() == [10, 40]
    (first.wait()[plan.places].sum() + second.wait()[plan.places].sum()).backward()
    assert rows.grad.tolist() == [[22, 0], [0, 22]][group.rank]
    with torch.no_grad():
        work = plan.fetch(rows, async_op=True)
    assert not work.wait().requires_grad
    wrong = plan.fetch(rows[: 1 + group.rank], async_op=True)
    with pytest.raises(weft.WeftError, match="rank 0: rows has 1 rows: the plan is for the 2"):
        wrong.wait()
    assert plan.fetch(rows.detach()).shape == (3,)


@spmd(2)
def test_rows_and_their_gradients_travel_in_wire_dtype(group):
    """Own rows are not rounded; sums of gradients are made in the dtype of the rows."""
    fine = 1 + 2**-20  # which bfloat16 rounds to 1
    plan = weft.remote_rows(torch.tensor([0, 1, 2, 3]), 2)
    rows = torch.full((2, 40_000), fine, requires_grad=True)
    before = sent_by(group)
    found = plan.fetch(rows, wire_dtype=torch.bfloat16)
    assert sent_by(group) - before < 2 * 40_000 * 2 + 10_000
    assert found.dtype == torch.float32
    assert found[:2].eq(fine).all() and found[2:].eq(1).all()
    before = sent_by(group)
    (found * fine).sum().backward()
    assert sent_by(group) - before < 2 * 40_000 * 2 + 10_000
    assert rows.grad.eq(torch.tensor(fine) + 1).all()  # its own, and the other's as it travelled
    assert torch.tensor(fine) + 1 != torch.tensor(fine + 1).bfloat16()


@spmd(2, on=EVERYWHERE)
def test_under_autocast_hidden_states_are_of_half_precision(group):
    plan = weft.remote_rows(torch.tensor([0, 1]), 1)
    layer = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = plan.fetch(layer(torch.full((1, 2), 1.0 + group.rank)))
        out = layer(hidden)
    assert hidden.dtype == torch.bfloat16
    out.float().sum().backward()
    # each rank has the sum of both ranks' losses, of its own row
    assert layer.weight.grad.dtype == torch.float32
    assert weft.all_reduce(layer.weight.grad).eq(12).all()


@spmd(3, on=("threads", "processes"))
def test_no_rank_has_a_row(group):
    plan = weft.remote_rows(torch.empty(0, dtype=torch.int32), np.int64(0))
    rows = torch.empty(0, 2, requires_grad=True)
    plan.fetch(rows).sum().backward()
    assert rows.grad.shape == (0, 2) and len(plan.remote) == 0


@spmd(20, on=("threads",))
def test_more_ranks_than_state_directly(group):
    indices = torch.tensor([0, 39, 7])
    plan = weft.remote_rows(indices, 2)
    rows = torch.tensor([0.0, 1.0]) + 2 * group.rank
    assert plan.fetch(rows)[plan.places].tolist() == [0, 39, 7]


def test_a_column_of_edges_is_no_reason_for_a_warning():
    edges = torch.tensor([[0, 1], [1, 2], [2, 3]])
    places = run(2, lambda group: weft.remote_rows(edges[:, 1], 2).places.tolist())
    assert places == [[1, 2, 3], [2, 0, 1]]


WRONG = {
    "rank 1: index 9 is outside of the 6 rows": (torch.tensor([0, 9]), 2),
    "rank 1: index -1 is negative": (torch.tensor([0, -1]), 2),
    "rank 1: indices is torch.float32: indices must be int32 or int64": (torch.ones(2), 2),
    "rank 1: indices is a list: pass a tensor": ([1, 2], 2),
    "rank 1: count is -1: pass the number": (torch.tensor([0]), -1),
    "rank 1: count is 1.5: pass the number": (torch.tensor([0]), 1.5),
    f"rank 1: count is {1 << 70}: pass the number": (torch.tensor([0]), 1 << 70),
    r"rank 1: 21474836\d\d rows are more than torch.int32 counts": (
        torch.tensor([0], dtype=torch.int32),
        (1 << 31) - 1,
    ),
}


@pytest.mark.parametrize("text", WRONG)
@spmd(3)
def test_what_is_wrong_on_one_rank_is_told_on_all(group, text):
    given = WRONG[text] if group.rank == 1 else (torch.tensor([0, 5]), 2)
    with pytest.raises(weft.WeftError, match=text):
        weft.remote_rows(*given)
    weft.barrier()


ROWS = {
    "rank 1: rows has 3 rows: the plan is for the 2 of this rank": torch.ones(3, 2),
    "rank 1: rows has no dimension": torch.tensor(1.0),
    "row shape: .* rank 1 has": torch.ones(2, 3),
    "dtype: .* rank 1 has torch.float64": torch.ones(2, 2).double(),
    "rank 1: rows is on the meta device": torch.ones(2, 2, device="meta"),
    "rank 1: rows is a NoneType": None,
}


@pytest.mark.parametrize("text", ROWS)
@spmd(2)
def test_wrong_rows_on_one_rank_are_told_on_all(group, text):
    plan = weft.remote_rows(torch.tensor([0, 3]), 2)
    with pytest.raises(weft.WeftError, match=text):
        plan.fetch(ROWS[text] if group.rank else torch.ones(2, 2))
    with pytest.raises(weft.WeftError, match=r"wire_dtype: .* rank 1 has torch.float32 as"):
        plan.fetch(torch.ones(2, 2), wire_dtype=torch.bfloat16 if group.rank else None)
    with pytest.raises(weft.WeftError, match=r"rank 1: wire_dtype is torch.float64: pass"):
        plan.fetch(torch.ones(2, 2), wire_dtype=torch.float64 if group.rank else None)
    assert plan.fetch(torch.ones(2, 2)).shape == (3, 2)
