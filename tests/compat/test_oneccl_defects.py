"""What oneCCL's sparse_allreduce got wrong, as seen in 2021.3 and its source: each is right here.

The calls are made as a C++ program would make them, through the third generation, with every
algorithm that oneCCL had and weft has.
"""

from __future__ import annotations

import pytest
import torch

import weft
from weft.compat.oneccl import event
from weft.kernels.ops import DTYPES
from weft.sparse import ALGORITHMS, Load
from weft.testing import expected, run, spmd

UNUSED = [None] * 4
CHOICES = ["auto", *ALGORITHMS]
FUNCTION = Load(3, 90, 30, 30, 40, 40, 12, 12, 4, places=40, in_order=True)
IN_ORDER = [name for name in CHOICES if name == "auto" or not ALGORITHMS[name].applies(FUNCTION)]


def reduced(indices, values, rtype="sum", mode="regular"):
    """The result of one call with a completion callback: indices, values."""
    result = []
    attr = event.create_sparse_allreduce_attr(
        completion_fn=lambda idx, *rest: result.extend((idx, rest[2])), coalesce_mode=mode
    )
    counts = indices.numel(), values.numel()
    event.sparse_allreduce(
        indices,
        counts[0],
        values,
        counts[1],
        *UNUSED,
        rtype,
        event.create_communicator(),
        attr=attr,
    ).wait()
    return result


def under(monkeypatch, algorithm, size, body):
    monkeypatch.setenv("CCL_SPARSE_ALLREDUCE", algorithm)
    return run(size, body)


@pytest.mark.parametrize("algorithm", CHOICES)
def test_every_rank_has_the_same_bits(monkeypatch, algorithm):
    """The ring added in another order on each rank."""

    def program(wire):
        draw = torch.Generator().manual_seed(wire.rank)
        indices = torch.randint(40, (60,), generator=draw)
        values = torch.randn(60, 3, generator=draw) * torch.logspace(-8, 8, 60).unsqueeze(1)
        return reduced(indices, values)

    first, *others = under(monkeypatch, algorithm, 4, program)
    assert len(first[0]) > 30
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1].view(torch.int32), other[1].view(torch.int32))


@pytest.mark.parametrize("algorithm", CHOICES)
def test_max_of_negative_values(monkeypatch, algorithm):
    """The mask algorithm put the smallest positive float where a rank has no such row."""

    def program(wire):
        return [
            each.tolist()
            for each in reduced(
                torch.tensor([wire.rank, 9]), torch.tensor([-3.0, -5.0 - wire.rank]), "max"
            )
        ]

    assert (
        under(monkeypatch, algorithm, 3, program) == [[[0, 1, 2, 9], [-3.0, -3.0, -3.0, -5.0]]] * 3
    )


@pytest.mark.parametrize("algorithm", CHOICES)
@pytest.mark.parametrize("empty", [{1}, {0, 1, 2}])
def test_a_rank_may_have_no_rows(monkeypatch, algorithm, empty):
    """It was refused: and so is every batch that touches no row of a table."""

    def program(wire):
        count = 0 if wire.rank in empty else 2
        indices, values = reduced(torch.arange(count) + wire.rank, torch.ones(count, 2))
        return indices.tolist(), values.tolist()

    there = [
        weft.Rows(torch.arange(2) + rank, torch.ones(2, 2))
        for rank in range(3)
        if rank not in empty
    ]
    want = expected(there) if there else None
    flat = ([], []) if want is None else (want.indices.tolist(), want.values.view(-1).tolist())
    assert under(monkeypatch, algorithm, 3, program) == [flat] * 3


@spmd(2, on=("threads",))
def test_values_must_divide_among_indices(wire):
    """The rest of the values was silently left out."""
    odd = wire.rank == 1
    with pytest.raises(weft.WeftError, match="rank 1: 7 values do not divide among 3 indices"):
        reduced(torch.arange(3), torch.ones(7 if odd else 6))
    with pytest.raises(weft.WeftError, match="rank 1: 2 values do not divide among 0 indices"):
        reduced(torch.arange(0 if odd else 1), torch.ones(2))


@spmd(1, 3)
def test_rows_of_different_widths_are_told_to_all(wire):
    """They aborted the processes."""
    odd = wire.size > 1 and wire.rank == 2
    rows = torch.ones(2, 5 if odd else 4)
    if wire.size > 1:
        text = r"row shape: ranks 0, 1 have \(4,\), rank 2 has \(5,\)"
        with pytest.raises(weft.WeftError, match=text):
            reduced(torch.arange(2), rows)
    assert len(reduced(torch.arange(2), torch.ones(2, 4))[0]) == 2


@pytest.mark.parametrize("mode", ["regular", "disable", "keep_precision"])
@spmd(2, on=("threads",))
def test_negative_indices_are_refused(wire, mode):
    """They were taken, and came out last."""
    for dtype in (torch.int8, torch.int64):
        indices = torch.tensor([3, -2 if wire.rank else 2], dtype=dtype)
        with pytest.raises(weft.WeftError, match="rank 1: index -2 is negative"):
            reduced(indices, torch.ones(2), mode=mode)
    high = torch.tensor([2**64 - 2 if wire.rank else 2], dtype=torch.uint64)  # which is not
    assert reduced(high, torch.ones(1), mode=mode)[0].tolist() == [2, 2**64 - 2]


@spmd(2, on=("threads",))
def test_both_callbacks_are_refused(wire):
    """The check combined the two pointers bit by bit, so it found some pairs and missed others."""
    attr = event.create_sparse_allreduce_attr(completion_fn=print, alloc_fn=print)
    one = torch.tensor([1])
    with pytest.raises(weft.WeftError, match="attr has both completion_fn and alloc_fn"):
        event.sparse_allreduce(one, 1, one, 1, *UNUSED, "sum", None, attr=attr)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@spmd(2, on=("threads",))
def test_values_of_every_type(wire, dtype):
    """Reduction of values served float and bfloat16."""
    values = torch.tensor([[1, 2], [3, 4]]).to(dtype)
    rtype = "max" if dtype is torch.bool else "sum"
    rows = weft.Rows(torch.tensor([4, wire.rank]), values)
    parts = [weft.Rows(torch.tensor([4, rank]), values) for rank in range(2)]
    want = expected(parts, rtype)
    indices, found = reduced(rows.indices, rows.values, rtype)
    assert found.dtype == dtype
    assert indices.tolist() == want.indices.tolist()
    assert found.tolist() == want.values.view(-1).tolist()


INDICES = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("mode", ["regular", "disable"])
@pytest.mark.parametrize("dtype", INDICES, ids=str)
@spmd(1, 2, on=("threads",))
def test_indices_of_every_type(wire, dtype, mode):
    highest = torch.iinfo(dtype).max
    indices, values = reduced(torch.tensor([highest, 5], dtype=dtype), torch.ones(2), mode=mode)
    assert indices.dtype == dtype
    if mode == "regular":
        assert indices.tolist() == [5, highest]
        assert values.tolist() == [wire.size] * 2
    else:
        assert indices.tolist() == [highest, 5] * wire.size


@pytest.mark.parametrize("algorithm", IN_ORDER)
def test_a_reduction_of_ones_own(monkeypatch, algorithm):
    """There was none, with any algorithm: it was "supported for allreduce only"."""

    def later(a, b):  # associative, not commutative: the operand of the higher rank
        return b

    def program(wire):
        return [
            each.tolist()
            for each in reduced(torch.tensor([7, 7]), torch.tensor([1.0, 2.0]) + wire.rank, later)
        ]

    assert under(monkeypatch, algorithm, 3, program) == [[[7], [4.0]]] * 3


# "alloc_fn with one algorithm only" is test_alloc_fn_is_filled_by_every_algorithm, in
# test_oneccl_event.py.
