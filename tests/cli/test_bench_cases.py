"""The data of `weft bench`, and the right answer: against a sum written out row by row."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.cli.bench.cases import (
    CASES,
    Answer,
    Case,
    answer,
    answer_of_weft,
    differs,
    indices,
    sizes,
    values,
)
from weft.sparse import Hosts

SMALL = {name: case.scaled(0.01) for name, case in CASES.items()}


@pytest.mark.parametrize("name", SMALL)
def test_the_same_again_and_different_elsewhere(name: str) -> None:
    case = SMALL[name]
    drawn, numbers = indices(case, 1, 7), values(case, 1, 7)
    assert torch.equal(indices(case, 1, 7), drawn) and torch.equal(values(case, 1, 7), numbers)
    assert torch.equal(indices(case, 2, 7), drawn) == (case.distribution == "identical")
    assert not torch.equal(values(case, 2, 7), numbers)
    assert not torch.equal(indices(case, 1, 8), drawn)
    assert drawn.shape == (case.rows,) and drawn.dtype is torch.int64
    assert drawn.min() >= 0 and drawn.max() < case.height
    assert numbers.shape == (case.rows, *case.row_shape) and numbers.dtype is torch.float32
    assert case.distribution == "zipf" or len(drawn.unique()) == case.rows  # type: ignore[no-untyped-call]


def test_zipf_halves_from_the_first_to_the_second_index() -> None:
    case = Case("z", 200_000, 1000, distribution="zipf", width=1)
    count = torch.bincount(indices(case, 0, 0), minlength=1000).double()
    weight = 1 / torch.arange(1, 1001, dtype=torch.float64)
    expected = case.rows * weight / weight.sum()
    # six standard deviations of a Poisson count
    assert ((count - expected).abs() <= 6 * expected.sqrt()).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int64"])
def test_values_are_whole_and_small_signs_or_real(dtype: str) -> None:
    case = Case("x", 50, 100, dtype=dtype, index_dtype="int32")
    drawn = values(case, 0, 0)
    assert drawn.dtype is getattr(torch, dtype) and indices(case, 0, 0).dtype is torch.int32
    assert set(drawn.flatten().tolist()) == set(range(-8, 9))
    assert set(values(replace(case, op="prod"), 0, 0).flatten().tolist()) == {-1, 1}
    if drawn.is_floating_point():
        real = values(replace(case, values="normal"), 0, 0)
        assert (real != real.round()).float().mean() > 0.99


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("x", 11, 10), "11 distinct rows do not fit in a height of 10"),
        (Case("x", 0, 10), "rows 0"),
        (Case("x", 1, 2**32, index_dtype="int32"), "int64"),
        (Case("x", 1, 2, dtype="int8", values="normal"), "floating point"),
        (Case("x", 1, 2, op="prod", values="normal"), "prod"),
        (Case("x", 1, 2, dtype="int32", wire_dtype="bfloat16"), "--wire-dtype is for floating"),
    ],
)
def test_faults(case: Case, words: str) -> None:
    assert words in str(case.fault())
    assert [case.fault() for case in CASES.values()] == [None] * len(CASES)


# The right answer.

TINY = Case("tiny", 12, 15, width=3, distribution="zipf")
STEP = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def row_by_row(case: Case, ranks: int) -> tuple[list[int], Tensor]:
    found: dict[int, Tensor] = {}
    for rank in range(ranks):
        drawn = indices(case, rank, 3).tolist(), values(case, rank, 3)
        for index, row in zip(*drawn, strict=True):
            found[index] = STEP[case.op](found[index], row) if index in found else row
    rows = torch.stack([found[index] for index in sorted(found)])
    return sorted(found), rows / ranks if case.op == "avg" else rows


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("op", STEP)
def test_equals_the_sum_row_by_row(op: str, width: int, ranks: int) -> None:
    dtype = "int32" if op.startswith("b") else "float64"
    case = replace(TINY, op=op, dtype=dtype, width=width)
    union, rows = row_by_row(case, ranks)
    right = answer(case, ranks, 3)
    assert right.indices.tolist() == union
    assert torch.equal(right.exact.to(case.torch_dtype), rows)
    assert differs(rows, right) is None


def test_one_wrong_bit_is_seen_and_so_are_shape_and_dtype() -> None:
    right = answer(TINY, 2, 3)
    got = right.exact.float()
    assert differs(got, right) is None
    assert "float64" in str(differs(right.exact, right))
    assert "shape" in str(differs(got[:-1], right))
    got[4, 1] = torch.nextafter(got[4, 1], torch.tensor(1e9))
    fault = str(differs(got, right))
    assert "1 of" in fault and "[4, 1]" in fault


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.125])
def test_slack_is_for_rounding_only(bad: float) -> None:
    right = answer(replace(TINY, values="normal"), 2, 3)
    got = right.exact.float()
    assert differs(got, right) is None
    got[0, 0] += bad
    assert differs(got, right) is not None


HOT = Case("hot", 9_000, 20, width=2, distribution="zipf")


def of_weft(case: Case, ranks: int = 3) -> Answer:
    return answer_of_weft(answer(case, ranks, 0), ranks, 0)


def rounded(case: Case, ranks: int, once: bool = False) -> Tensor:
    """The sum of all ranks' rows, rounded to bfloat16 where weft does."""
    table = torch.zeros(case.height, case.width)
    for rank in range(ranks):
        own = torch.zeros(case.height, case.width, dtype=torch.float64)
        own.index_add_(0, indices(case, rank, 0), values(case, rank, 0).double())
        table += own.float() if once else own.bfloat16().float()
    return table.bfloat16()


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "once"),
    [("float32", "bfloat16", False), ("bfloat16", None, False), ("bfloat16", "float32", True)],
)
def test_sums_of_whole_numbers_are_known_to_the_bit_also_rounded(
    dtype: str, wire_dtype: str | None, once: bool
) -> None:
    case = replace(HOT, dtype=dtype, wire_dtype=wire_dtype)
    right = of_weft(case)
    got = rounded(case, 3, once).to(case.torch_dtype)
    assert differs(got, right) is None
    assert differs(rounded(case, 3, not once).to(case.torch_dtype), right) is not None
    got[4, 1] += 8
    assert "1 of" in str(differs(got, right))


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_real_numbers_may_be_off_by_the_proven_bound(op: str) -> None:
    case = replace(TINY, values="normal", op=op, wire_dtype="bfloat16")
    right = of_weft(case, 2)
    assert right.slack is not None
    plain = answer(replace(case, wire_dtype=None), 2, 0)  # of the same rows
    assert torch.equal(right.exact, plain.exact)

    # u·|s| + u·(1 + u)·Σ|x| + (P + 1)·η, and what float32 adds to it
    unit, tiny = 2.0**-8, 2.0**-134
    bound = unit * plain.exact.abs() + tiny
    if op != "max":  # which is rounded once
        table = torch.zeros(case.height, case.width, dtype=torch.float64)
        for rank in range(2):
            own = torch.zeros_like(table)
            own.index_add_(0, indices(case, rank, 0), values(case, rank, 0).double())
            table += own.abs() / (2 if op == "avg" else 1)
        bound += unit * (1 + unit) * table[plain.indices] + 2 * tiny
    assert (right.slack >= bound).all()
    assert (right.slack <= bound + 1e-4).all()
    assert differs((right.exact + right.slack).float() * 1.01, right) is not None


def test_what_peers_do_is_not_rounded() -> None:
    case = replace(HOT, wire_dtype="bfloat16")
    assert differs(rounded(case, 3).float(), answer(case, 3, 0)) is not None
    assert of_weft(replace(HOT, wire_dtype=None)).slack is None


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "op", "sent"),
    [
        ("float32", None, "sum", 4),
        ("float32", "bfloat16", "sum", 2),
        ("float64", "float32", "max", 4),
        ("bfloat16", "float32", "sum", 4),
        ("bfloat16", "float32", "max", 2),
        ("float16", "bfloat16", "sum", 2),
    ],
)
def test_the_bound_counts_bytes_as_weft_sends_them(
    dtype: str, wire_dtype: str | None, op: str, sent: int
) -> None:
    case = Case("x", 5, 10**9, dtype=dtype, wire_dtype=wire_dtype, op=op)
    assert sizes(case, 3, 0).bound == 2 * 5 * (64 * sent + 4)  # (P-1)k rows


def test_sizes_of_no_overlap_full_overlap_and_duplicates() -> None:
    row = 64 * 4 + 4
    same = SMALL["identical"]
    found = sizes(same, 4, 0)
    assert (found.sizes.mean, found.sizes.total, found.union) == (500, 2000, 500)
    assert found.bound == 2 * 3 / 4 * 500 * row  # the dense bound, 2(P-1)/P
    apart = sizes(Case("x", 5, 10**9), 3, 0)
    assert (apart.sizes.total, apart.union, apart.bound) == (15, 15, 2 * 5 * row)  # (P-1)k
    assert sizes(same, 1, 0).bound == 0
    shared = sizes(TINY, 3, 3, Hosts((0, 1, 0)))
    of_ranks = [set(indices(TINY, rank, 3).tolist()) for rank in range(3)]
    first, second = len(of_ranks[0] | of_ranks[2]), len(of_ranks[1])
    assert shared.rows_of_hosts == ((first, second), (second, first))
    twice = sizes(TINY, 2, 3)
    assert (
        twice.sizes.total == sum(len(set(indices(TINY, rank, 3).tolist())) for rank in (0, 1)) < 24
    )
    assert twice.union == len(answer(TINY, 2, 3).indices)
