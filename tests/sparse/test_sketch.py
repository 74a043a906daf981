"""The size of a union from samples: exact for small sets, close for large ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft import kernels
from weft.sparse import sketch


def estimate(runs):
    return sketch.union_size(
        sketch.merge([kernels.sketch(run, sketch.SIZE).numpy() for run in runs])
    )


@given(st.lists(st.sets(st.integers(0, 99)), min_size=1, max_size=5))
def test_exact_for_whole_sets(sets):
    runs = [torch.tensor(sorted(some), dtype=torch.int64) for some in sets]
    assert estimate(runs) == len(set().union(*sets))


@pytest.mark.parametrize("sizes", [(5000, 5000), (5000,) * 4, (20_000, 40, 3, 0)])
@pytest.mark.parametrize("height", [6000, 50_000, 10**7])
def test_close_for_large_sets(sizes, height):
    """Five standard deviations; a small set must not spoil it."""
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        runs = [torch.randint(height, (size,), generator=draw).unique() for size in sizes]
        truth = len(torch.cat(runs).unique())
        assert abs(estimate(runs) / truth - 1) < 5 / (sketch.SIZE - 1) ** 0.5


def test_merging_in_any_order_is_the_same():
    runs = [torch.arange(step, 30_000, step) for step in (3, 5, 7)]
    one, two, three = (kernels.sketch(run, sketch.SIZE).numpy() for run in runs)
    left = sketch.merge([sketch.merge([one, two]), three])
    right = sketch.merge([one, sketch.merge([three, two])])
    assert np.array_equal(left, right)
    assert sketch.union_size(left) == GOLDEN  # the same on every machine


GOLDEN = 17855
