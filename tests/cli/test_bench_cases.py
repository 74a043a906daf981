"""The data of `weft bench`, and the right answer: against a sum written out row by row."""

from dataclasses import replace

import pytest
import torch

import weft
from weft.cli.bench.cases import CASES, Case, answer, indices, values

SMALL = {
    name: replace(case, rows=case.rows // 100, height=case.height // 100)
    for name, case in CASES.items()
}


@pytest.mark.parametrize("name", SMALL)
def test_the_same_again_and_different_elsewhere(name):
    case = SMALL[name]
    drawn, numbers = indices(case, 1), values(case, 1)
    assert torch.equal(indices(case, 1), drawn) and torch.equal(values(case, 1), numbers)
    assert torch.equal(indices(case, 2), drawn) == (case.distribution == "identical")
    assert not torch.equal(values(case, 2), numbers)
    assert drawn.shape == (case.rows,) and drawn.dtype is torch.int64
    assert drawn.min() >= 0 and drawn.max() < case.height
    shape = (case.rows,) if case.width == 1 else (case.rows, case.width)
    assert numbers.shape == shape and numbers.dtype is torch.float32
    assert set(numbers.flatten().tolist()) == set(range(-8, 9))
    assert case.distribution == "zipf" or len(drawn.unique()) == case.rows


def test_the_data_are_those_that_figures_of_before_are_of():
    """Whoever changes them makes the figures of the notes and of design documents incomparable."""
    own, shape = indices(CASES["zipf"], 1), torch.arange(1, 50_001)
    assert int((own * shape).sum()) == 88189720980652
    numbers = values(CASES["zipf"], 1).double().view(-1)
    assert float((numbers * torch.arange(len(numbers))).sum()) == -23799985175.0


def test_zipf_halves_from_the_first_to_the_second_index():
    case = Case("z", 200_000, 1000, distribution="zipf", width=1)
    count = torch.bincount(indices(case, 0), minlength=1000).double()
    weight = 1 / torch.arange(1, 1001, dtype=torch.float64)
    expected = case.rows * weight / weight.sum()
    # six standard deviations of a Poisson count
    assert ((count - expected).abs() <= 6 * expected.sqrt()).all()


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(
        weft.WeftError, match="case x: 11 distinct rows do not fit in a height of 10"
    ):
        indices(Case("x", 11, 10), 0)
    assert len(indices(Case("x", 11, 10, distribution="zipf"), 0)) == 11


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("width", [1, 3])
def test_equals_the_sum_row_by_row(width, ranks):
    case = Case("tiny", 12, 15, width, "zipf")
    found = {}
    for rank in range(ranks):
        for index, row in zip(indices(case, rank).tolist(), values(case, rank), strict=True):
            found[index] = found[index] + row if index in found else row
    right = answer(case, ranks)
    assert right.indices.tolist() == sorted(found)
    assert torch.equal(right.values, torch.stack([found[index] for index in sorted(found)]))
