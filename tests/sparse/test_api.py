"""What may be passed to the call and what comes back."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import weft
from cases import same
from weft.sparse import last_call
from weft.testing import expected, spmd

LOCK = threading.Lock()


def part(rank, height=30):
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randint(height, (20,), generator=draw)
    return weft.Rows(indices, torch.randint(-4, 5, (20, 2), generator=draw).float(), height)


@spmd(1, 4, on=("threads", "stand-in", "processes"))
def test_what_you_give_is_what_you_get(group):
    rows, want = part(group.rank), expected([part(rank) for rank in range(group.size)])

    pair = weft.sparse_all_reduce((rows.indices, rows.values))
    assert isinstance(pair, tuple)
    same(pair, want)

    coo = weft.sparse_all_reduce(rows.to_coo())
    assert coo.is_coalesced()
    assert coo.shape == (30, 2)
    assert torch.equal(coo.to_dense(), want.dense())

    tables = weft.sparse_all_reduce([rows, (rows.indices, rows.values[:, 0].contiguous())])
    assert isinstance(tables[0], weft.Rows)
    assert torch.equal(tables[0].values, want.values)
    assert torch.equal(tables[1][1], want.values[:, 0])


@spmd(1, 3, on=("threads", "stand-in", "processes"))
def test_several_sparse_dimensions_are_restored(group):
    draw = torch.Generator().manual_seed(group.rank)
    indices = torch.stack([torch.randint(3, (9,), generator=draw) for _ in range(2)])
    for values in (torch.ones(9), torch.ones(9, 2)):
        coo = torch.sparse_coo_tensor(
            indices, values, (3, 3, *values.shape[1:]), check_invariants=True
        )
        total = weft.sparse_all_reduce(coo)
        assert total.sparse_dim() == 2
        assert torch.equal(total.to_dense(), weft.all_reduce(coo.to_dense()))


@spmd(1, 3, on=("threads", "stand-in", "processes"))
def test_values_that_are_not_what_their_memory_says(group):
    """A sign that torch has not yet applied, and a row of stride 0."""
    turned = torch.full((2, 3), 1 + 2j).conj()
    _, total = weft.sparse_all_reduce((torch.tensor([4, 2]), turned.imag))
    assert total.eq(-2 * group.size).all()
    with pytest.raises(weft.WeftError, match="complex64 are not supported"):
        weft.sparse_all_reduce((torch.tensor([4, 2]), turned))
    _, total = weft.sparse_all_reduce((torch.tensor([4]), torch.tensor(2.0).expand(1, 1)))
    assert total.tolist() == [[2.0 * group.size]]
    turned = torch._neg_view(torch.tensor([-4, -2]))
    for call in (weft.sparse_all_reduce, weft.sparse_all_gather):
        assert call((turned, torch.ones(2, 3)))[0].unique().tolist() == [2, 4]


@spmd(1, 2, on=("threads", "stand-in", "processes"))
def test_torch_names_of_operations(group):
    rows = part(group.rank)
    names = {"SUM": "sum", "AVG": "avg", "MIN": "min", "MAX": "max", "PRODUCT": "prod"}
    for theirs, ours in names.items():
        op = getattr(dist.ReduceOp, theirs)
        same(weft.sparse_all_reduce(rows, op), weft.sparse_all_reduce(rows, ours))


@spmd(4, on=("processes",))
def test_a_link_of_nonsense_is_told_to_all(group):
    weft.sparse_all_reduce(part(group.rank))  # the environment is read in every call
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 2:
            patch.setenv("WEFT_LINK", 2000 * "fast")  # longer than what a rank can say of itself
        with pytest.raises(weft.WeftError, match="rank 2: WEFT_LINK='fastfast"):
            weft.sparse_all_reduce(part(group.rank))
    weft.sparse_all_reduce(part(group.rank))


@spmd(1, 2, 4, on=("threads", "stand-in", "processes"))
def test_asynchronous_calls_keep_their_order(group):
    works = [
        weft.sparse_all_reduce(
            (torch.tensor([number, 9]), torch.tensor([1.0, float(number)])), async_op=True
        )
        for number in range(5)
    ]
    between = weft.sparse_all_reduce((torch.tensor([3]), torch.tensor([2.0])))
    assert between[1].item() == 2.0 * group.size
    for number, work in enumerate(works):
        indices, values = work.wait()
        assert work.is_completed()
        assert indices.tolist() == [number, 9]
        assert values.tolist() == [group.size, number * group.size]
        assert work.get_future().wait()[1].tolist() == values.tolist()


@spmd(2, on=("threads", "stand-in", "processes"))
def test_asynchronous_errors_come_out_of_wait(group):
    bad = torch.tensor([-1 if group.rank else 1])
    work = weft.sparse_all_reduce((bad, torch.ones(1)), async_op=True)
    with pytest.raises(weft.WeftError, match="rank 1: index -1 is negative"):
        work.wait()
    weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1)))


@spmd(4, on=("processes",))  # threads share one environment
def test_the_environment_may_choose(group):
    rows = part(group.rank)
    weft.sparse_all_reduce(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_ALGORITHM", "doubling")
        group.all_gather_bytes(b"here", bytes)  # all have set it
        weft.sparse_all_reduce(rows)
        assert last_call().algorithm == "doubling"
        weft.sparse_all_reduce(rows, algorithm="split")
        assert last_call().algorithm == "split"
        patch.setenv("WEFT_ALGORITHM", "foo")
        with pytest.raises(weft.WeftError, match="WEFT_ALGORITHM=foo: algorithm 'foo' is unknown"):
            weft.sparse_all_reduce(rows)
        group.all_gather_bytes(b"here", bytes)  # before it is unset


@spmd(1, 2, 3, 4, 7, 8)
def test_a_call_is_recorded(group):
    rows = part(group.rank)
    want = expected([part(rank) for rank in range(group.size)])
    weft.sparse_all_reduce(rows)
    record = last_call()
    assert record.algorithm == ("eager" if group.size > 1 else "alone")
    assert record.rows == rows.indices.unique().numel()
    assert record.union == len(want)
    assert record.messages == group.size - 1
    total = sum(part(rank).indices.unique().numel() for rank in range(group.size))
    assert record.total == total
    bound = (total + (group.size - 2) * len(want)) / group.size * (2 * 4 + 4)
    assert record.bound_bytes == round(bound)


@spmd(2, on=("threads", "processes"))
def test_tensors_of_a_call_under_way_may_get_other_memory(group):
    indices, values = torch.arange(1000), torch.ones(1000, 64)
    weft.barrier()
    work = weft.sparse_all_reduce((indices, values), async_op=True)
    indices.data = torch.zeros(1, dtype=torch.int64)
    values.data = torch.zeros(1)
    found, total = work.wait()
    assert torch.equal(found, torch.arange(1000))
    assert total.eq(2).all()
