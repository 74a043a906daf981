"""The data of `weft bench`: what each case promises, from (case, seed, rank) alone."""

from dataclasses import replace

import pytest
import torch

from weft.cli.bench.cases import CASES, Case, indices, values

SMALL = {name: case.scaled(0.01) for name, case in CASES.items()}


@pytest.mark.parametrize("name", SMALL)
def test_the_same_again_and_different_elsewhere(name: str) -> None:
    case = SMALL[name]
    again = indices(case, 1, 7), values(case, 1, 7)
    assert torch.equal(indices(case, 1, 7), again[0])
    assert torch.equal(values(case, 1, 7), again[1])
    same = torch.equal(indices(case, 2, 7), again[0])
    assert same == (case.distribution == "identical")
    assert not torch.equal(values(case, 2, 7), again[1])
    assert not torch.equal(indices(case, 1, 8), again[0])


@pytest.mark.parametrize("name", SMALL)
def test_shapes_and_limits(name: str) -> None:
    case = SMALL[name]
    drawn = indices(case, 0, 0)
    assert drawn.shape == (case.rows,) and drawn.dtype is torch.int64
    assert drawn.min() >= 0 and drawn.max() < case.height
    assert values(case, 0, 0).shape == (case.rows, *case.row_shape)
    assert values(case, 0, 0).dtype is torch.float32
    if case.distribution != "zipf":
        assert len(set(drawn.tolist())) == case.rows


def test_the_table_of_cases_is_the_designs() -> None:
    sizes = {name: (case.rows, case.height, case.width) for name, case in CASES.items()}
    assert sizes == {
        "uniform": (50_000, 1_000_000, 64),
        "zipf": (50_000, 1_000_000, 64),
        "small": (500, 1_000_000, 64),
        "identical": (50_000, 1_000_000, 64),
        "scalar": (1_000_000, 10_000_000, 1),
        "wide": (3_000, 100_000, 1024),
        "full": (60_000, 100_000, 16),
    }
    assert CASES["scalar"].row_shape == ()


def test_zipf_halves_from_the_first_to_the_second_index() -> None:
    case = Case("z", 200_000, 1000, distribution="zipf", width=1)
    count = torch.bincount(indices(case, 0, 0), minlength=1000).double()
    weight = 1 / torch.arange(1, 1001, dtype=torch.float64)
    expected = case.rows * weight / weight.sum()
    # six standard deviations of a Poisson count
    assert ((count - expected).abs() <= 6 * expected.sqrt()).all()


def test_shuffled_ids_keep_the_counts_and_agree_between_ranks() -> None:
    plain = Case("z", 20_000, 1000, distribution="zipf")
    mixed = replace(plain, ids="shuffled")
    for rank in (0, 1):
        one = torch.bincount(indices(plain, rank, 0), minlength=1000)
        other = torch.bincount(indices(mixed, rank, 0), minlength=1000)
        assert not torch.equal(one, other)
        assert torch.equal(one.sort().values, other.sort().values)
    commonest = [int(indices(mixed, rank, 0).mode().values) for rank in (0, 1)]
    assert commonest[0] == commonest[1] != 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int64"])
def test_integers_are_whole_and_small(dtype: str) -> None:
    drawn = values(Case("x", 50, 100, dtype=dtype), 0, 0)
    assert drawn.dtype is getattr(torch, dtype)
    assert set(drawn.flatten().tolist()) <= set(range(-8, 9))
    assert len(drawn.unique()) > 10  # type: ignore[no-untyped-call]  # torch has no types here


def test_products_are_of_signs() -> None:
    drawn = values(Case("x", 50, 100, op="prod"), 0, 0)
    assert set(drawn.flatten().tolist()) == {-1.0, 1.0}


def test_normal_values_are_not_whole() -> None:
    drawn = values(Case("x", 50, 100, values="normal"), 0, 0)
    assert (drawn != drawn.round()).all()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("x", 11, 10), "11 distinct rows do not fit in a height of 10"),
        (Case("x", 0, 10), "rows 0"),
        (Case("x", 1, 2**32, index_dtype="int32"), "int64"),
        (Case("x", 1, 2, dtype="int8", values="normal"), "floating point"),
        (Case("x", 1, 2, op="prod", values="normal"), "prod"),
    ],
)
def test_faults(case: Case, words: str) -> None:
    fault = case.fault()
    assert fault is not None and words in fault


def test_named_cases_have_no_fault() -> None:
    assert [case.fault() for case in CASES.values()] == [None] * len(CASES)


def test_index_dtype() -> None:
    assert indices(Case("x", 5, 10, index_dtype="int32"), 0, 0).dtype is torch.int32
