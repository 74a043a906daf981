"""Values that travel rounded: once for each rank, once for the result, within the bound."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from cases import alike, same
from weft.sparse import ALGORITHMS, last_call
from weft.testing import expected, run, spmd

NAMES = ["auto", "plain", *sorted(ALGORITHMS)]
WIRE = [torch.bfloat16, torch.float16]
IN_RANK_ORDER = ("auto", "gather", "split")
LOCK = threading.Lock()
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}  # half of the smallest number


def part(rank, dtype=torch.float32, count=150, height=200):
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randint(height, (count,), generator=draw)
    values = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    return weft.Rows(indices, values.to(dtype), height)


@functools.cache
def _world(ranks, op, wire_dtype, options):
    parts = [part(rank, *options) for rank in range(ranks)]
    return parts, expected(parts, op, wire_dtype)


def world(ranks, op, wire_dtype, *options):
    """Everybody's rows and what they come to: made once, by one of the ranks that are threads."""
    with LOCK:
        return _world(ranks, op, wire_dtype, options)


@pytest.mark.parametrize("name", NAMES)
@spmd(3, on=("threads", "stand-in"))
def test_every_algorithm_rounds_once_and_once(group, name):
    for dtype, wire_dtype in zip((torch.float32, torch.float64), WIRE, strict=True):
        for op in ("sum", "avg", "min", "max", "prod"):
            parts, want = world(group.size, op, wire_dtype, dtype)
            total = weft.sparse_all_reduce(
                parts[group.rank], op, algorithm=name, wire_dtype=wire_dtype
            )
            assert torch.equal(total.indices, want.indices)
            assert total.values.dtype is dtype
            assert torch.equal(total.values, total.values.to(wire_dtype).to(dtype))
            alike(group, total.values)
            if name in IN_RANK_ORDER:
                assert torch.equal(total.values, want.values), (dtype, op)
            else:  # another order of additions may end on the other side of a tie
                unit = 2 * UNIT[wire_dtype]
                torch.testing.assert_close(total.values, want.values, rtol=unit, atol=0)


@pytest.mark.parametrize("name", NAMES)
@spmd(4, on=("processes",))
def test_between_processes(group, name):
    parts, want = world(group.size, "avg", torch.bfloat16, torch.float32, 3000, 4000)
    total = weft.sparse_all_reduce(
        parts[group.rank], "avg", algorithm=name, wire_dtype=torch.bfloat16
    )
    alike(group, total.values)
    torch.testing.assert_close(total.values, want.values, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(
    wire_dtype=st.sampled_from(WIRE),
    seed=st.integers(0, 2**32),
    ranks=st.sampled_from([2, 3, 5]),
    exponents=st.integers(0, 8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    op=st.sampled_from(["sum", "avg"]),
)
def test_the_error_is_within_the_bound(name, wire_dtype, seed, ranks, exponents, dtype, op):
    """u·|s| + u·(1+u)·Σ|x| + (P+1)·η as in docs/wire-dtype.md, and what fp32 sums add to that."""
    draw = torch.Generator().manual_seed(seed)
    height = 40
    scale = 10.0 ** torch.randint(-exponents, exponents // 2 + 1, (ranks, 30, 2), generator=draw)
    values = (torch.randn(ranks, 30, 2, generator=draw).double() * scale).to(dtype)
    indices = torch.stack([torch.randperm(height, generator=draw)[:30] for _ in range(ranks)])
    parts = [weft.Rows(indices[rank], values[rank], height) for rank in range(ranks)]
    exact = torch.zeros(height, 2, dtype=torch.float64)
    size = torch.zeros(height, 2, dtype=torch.float64)
    for rows in parts:
        exact[rows.indices] += rows.values.double()
        size[rows.indices] += rows.values.double().abs()
    if op == "avg":
        exact, size = exact / ranks, size / ranks

    def body(group):
        return weft.sparse_all_reduce(parts[group.rank], op, algorithm=name, wire_dtype=wire_dtype)

    unit, tiny = UNIT[wire_dtype], TINY[wire_dtype]
    for total in run(ranks, body):
        there = total.indices
        error = (total.values.double() - exact[there]).abs()
        bound = unit * exact[there].abs() + unit * (1 + unit) * size[there] + (ranks + 1) * tiny
        assert (error <= bound + (1 + unit) ** 2 * ranks * 2**-24 * size[there]).all()


@pytest.mark.parametrize("name", ["auto", "plain"])
@spmd(3, on=("threads", "stand-in"))
def test_a_function_sees_rounded_values_in_their_own_dtype(group, name):
    seen = []

    def widest(left, right):
        seen.append((left.dtype, right.dtype))
        return torch.where(right.abs() >= left.abs(), right, left)

    for dtype in (torch.float32, torch.float64):
        parts = [part(rank, dtype) for rank in range(group.size)]
        seen.clear()
        total = weft.sparse_all_reduce(
            parts[group.rank], widest, algorithm=name, wire_dtype=torch.float16
        )
        assert set(seen) == {(dtype, dtype)}
        assert torch.equal(total.values, expected(parts, widest, torch.float16).values)


@pytest.mark.parametrize("dtype", WIRE)
@spmd(3, on=("threads", "stand-in"))
def test_halves_travel_as_they_are(group, dtype):
    parts = [part(rank, dtype) for rank in range(group.size)]
    want = expected(parts)
    for wire_dtype in WIRE:
        total = weft.sparse_all_reduce(parts[group.rank], wire_dtype=wire_dtype)
        assert torch.equal(total.values, want.values)
        nothing = weft.Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, 2), 9)
        assert len(weft.sparse_all_reduce(nothing, wire_dtype=wire_dtype)) == 0


@pytest.mark.parametrize("name", NAMES)
@spmd(3, on=("threads", "stand-in"))
def test_the_result_is_widened_in_its_own_memory(group, name):
    count = 9000  # more than are copied at once
    values = torch.linspace(-3, 3, 3 * count).view(count, 3)
    rows = weft.Rows(torch.arange(count), values, count)
    want = 3 * rows.values.bfloat16().float()  # exact, but for the rounding of the result
    for dtype in (torch.float32, torch.float64):
        mine = weft.Rows(rows.indices, rows.values.bfloat16().to(dtype), count)
        total = weft.sparse_all_reduce(mine, algorithm=name, wire_dtype=torch.bfloat16)
        assert total.values.dtype is dtype
        assert torch.equal(total.values, want.bfloat16().to(dtype))


@pytest.mark.parametrize("name", NAMES)
@spmd(4, on=("threads", "stand-in"))
def test_nan_infinity_and_overflow(group, name):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 65519.0, 65520.0, 4e-9])
    rows = weft.Rows(torch.arange(7) + 7 * group.rank, values[:, None], 28)
    total = weft.sparse_all_reduce(rows, algorithm=name, wire_dtype=torch.float16).values
    got = total.view(4, 7)
    assert got[:, 0].isnan().all()
    want = torch.tensor([float("inf"), -float("inf"), -0.0, 65504.0, float("inf"), 0.0])
    assert torch.equal(
        got[:, 1:].contiguous().view(torch.int32), want.view(torch.int32).expand(4, 6)
    )


@spmd(1, 4, on=("threads",))
def test_an_average_overflows_only_if_it_is_too_large_itself(group):
    rows = weft.Rows(torch.arange(3), torch.full((3, 1), 60000.0), 3)
    for name in NAMES:
        total = weft.sparse_all_reduce(rows, "avg", algorithm=name, wire_dtype=torch.float16)
        assert total.values.eq(torch.tensor(60000.0).half().float()).all()


@spmd(2, 3, on=("threads",))
def test_what_is_sent_is_half(group):
    rows = part(group.rank, count=4000, height=100_000)
    wide = weft.Rows(rows.indices, rows.values.repeat(1, 100), rows.height)
    few = weft.Rows(rows.indices[:50], wide.values[:50], rows.height)
    for mine, name in ((wide, "gather"), (wide, "split"), (few, "auto")):
        sent = []
        for wire_dtype in (None, torch.bfloat16):
            weft.sparse_all_reduce(mine, algorithm=name, wire_dtype=wire_dtype)
            record = last_call()
            assert record.algorithm == ("eager" if name == "auto" else name)
            sent.append(record.sent_bytes)
            said = weft.explain(mine, algorithm=name, wire_dtype=wire_dtype)
            assert said.sizes.row == (1200 if wire_dtype is None else 600)
            assert record.bound_bytes == round(said.sizes.bound(record.union))
        assert sent[1] == pytest.approx(sent[0] / 2, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
@spmd(2, 3, on=("threads",))
def test_float64_travels_as_float32(group, name):
    rows = weft.Rows(torch.tensor([group.rank, 5]), torch.tensor([0.1, 0.1]).double(), 6)
    total = weft.sparse_all_reduce(rows, algorithm=name, wire_dtype=torch.float32)
    tenth = torch.tensor(0.1)  # rounded
    assert total.values.dtype is torch.float64
    assert total.values[0] == tenth.double()
    assert total.values[-1] == (group.size * tenth.double()).float().double()


# half precision with wire_dtype=torch.float32: rounded once, in the result


def halves(rank, dtype):
    """Small integers with many repeats, whose sums are exact in float32; none on rank 1."""
    draw = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else 400
    indices = (60 * torch.rand(count, generator=draw) ** 3).long()
    values = torch.randint(-255, 256, (count, 2), generator=draw)
    return weft.Rows(indices, values.to(dtype), 60)


def rounded_once(parts, dtype, mean=False):
    """The sums in float64, of which each is rounded to half precision once."""
    sums = torch.zeros(60, 2, dtype=torch.float64)
    for rows in parts:
        sums.index_add_(0, rows.indices, rows.values.double())
    indices = torch.cat([rows.indices for rows in parts]).unique()
    if mean:
        sums /= len(parts)
    return weft.Rows(indices, sums[indices].to(dtype), 60)


@pytest.mark.parametrize("dtype", WIRE)
@pytest.mark.parametrize("name", NAMES)
@spmd(3, 8, on=("threads",))
def test_half_precision_is_rounded_once_if_asked(group, name, dtype):
    parts = [halves(rank, dtype) for rank in range(group.size)]
    want = rounded_once(parts, dtype)
    mine = parts[group.rank]
    total = weft.sparse_all_reduce(mine, algorithm=name, wire_dtype=torch.float32)
    assert total.values.dtype is dtype
    same(total, want)
    tensor = weft.sparse_all_reduce(mine.to_coo(), algorithm=name, wire_dtype=torch.float32)
    same(weft.Rows.from_coo(tensor), want)
    same(expected(parts, "sum", torch.float32), want)


@spmd(2, on=("processes",))
def test_258_is_no_longer_256(group):
    """Of 256, 1 on one rank and 1 on the other; the default rounds 257 before it is sent."""
    ones = torch.ones(2 - group.rank)
    if group.rank == 0:
        ones[0] = 256.0
    rows = torch.zeros(len(ones), dtype=torch.int64), ones.bfloat16()
    assert weft.sparse_all_reduce(rows)[1].item() == 256.0
    assert weft.sparse_all_reduce(rows, wire_dtype=torch.float32)[1].item() == 258.0


@pytest.mark.parametrize("dtype", WIRE)
@spmd(1, 2, 3, 4, on=("threads", "stand-in"))
def test_all_that_reduces_rounds_once_if_asked(group, dtype):
    parts = [halves(rank, dtype) for rank in range(group.size)]
    mine, want = parts[group.rank], rounded_once(parts, dtype)
    wide = {"wire_dtype": torch.float32}

    same(weft.sparse_all_reduce(mine, "avg", **wide), rounded_once(parts, dtype, mean=True))

    part = weft.sparse_reduce_scatter(mine, **wide)
    there = torch.isin(want.indices, part.indices)
    assert torch.equal(part.values, want.values[there])

    total = weft.sparse_reduce(mine, group_dst=0, **wide)
    if group.rank == 0:
        assert torch.equal(total.values, want.values)

    floats = weft.Rows(mine.indices, mine.values.float(), mine.height)
    first, between, last = weft.sparse_all_reduce([mine, floats, mine], **wide)
    assert between.values.dtype is torch.float32
    (alone,) = weft.sparse_all_reduce([mine], **wide)
    later = weft.sparse_all_reduce(mine, async_op=True, **wide).wait()
    for total in (first, last, alone, later):
        assert total.values.dtype is dtype
        same(total, want)

    moved = weft.sparse_all_gather(mine, **wide)
    assert torch.equal(moved.values, torch.cat([each.values for each in parts]))


@spmd(2, on=("threads",))
def test_a_function_gets_float32_if_asked(group):
    def total(left, right):
        assert left.dtype is right.dtype is torch.float32
        return left + right

    parts = [halves(rank, torch.bfloat16) for rank in (0, 2)]
    mine = weft.sparse_all_reduce(parts[group.rank], total, wire_dtype=torch.float32)
    assert torch.equal(mine.values, rounded_once(parts, torch.bfloat16).values)


@spmd(2, on=("threads",))
def test_ranks_differ_in_half_precision(group):
    mine = halves(0, WIRE[group.rank])
    with pytest.raises(weft.WeftError, match=r"value dtype: rank 0 has torch.bfloat16, rank 1"):
        weft.sparse_all_reduce(mine, wire_dtype=torch.float32)
    with pytest.raises(weft.WeftError, match=r"table 0: rank 0 has torch.bfloat16, rank 1 has"):
        weft.sparse_all_reduce([mine], wire_dtype=torch.float32)
