"""benchmarks/stages.py, the model of a split in stages: against formulas, sets, the schedule."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

HEIGHT, ROWS = 4000, 300


@pytest.fixture
def stages(script):
    return script("benchmarks/stages.py")


@pytest.fixture
def case(stages):
    """Rows that each rank draws, without an order among the indices."""

    def draw(rank):
        return np.sort(np.random.default_rng(rank).choice(HEIGHT, ROWS, replace=False))

    return stages.Case("drawn", np.full(HEIGHT, ROWS / HEIGHT), draw)


@pytest.mark.parametrize("ranks", [2, 3, 7, 64])
def test_one_factor_is_the_split_of_the_table(stages, case, ranks):
    found = stages.expected(case, [ranks], 1)
    union = HEIGHT * (1 - (1 - ROWS / HEIGHT) ** ranks)
    received = sum(one.received.mean() for one in found)
    assert received == pytest.approx((ranks - 1) / ranks * (ROWS + union))
    assert sum(one.messages for one in found) == pytest.approx(4 * (ranks - 1), rel=0.01)
    least = (ranks * ROWS + (ranks - 2) * union) / ranks
    assert stages.bound_of(case, ranks, 1) == pytest.approx(least)


@pytest.mark.parametrize(
    ("factors", "per_host"), [((8,), 1), ((8,), 4), ((4, 2), 4), ((2, 4), 2), ((2, 2, 2), 2)]
)
def test_sets_that_are_drawn_have_as_many_rows_as_expected(stages, case, factors, per_host):
    expected = stages.expected(case, factors, per_host)
    sets = stages.sets_of(case, 8)
    drawn = stages.counted(sets, factors, per_host)
    least = stages.bound_of(case, 8, per_host)
    assert stages.bound_of_sets(sets, per_host) == pytest.approx(least, rel=0.03)
    for one, other in zip(expected, drawn, strict=True):
        assert other.received.mean() == pytest.approx(one.received.mean(), rel=0.03)
        assert other.into_hosts.mean() == pytest.approx(one.into_hosts.mean(), rel=0.03)


@pytest.mark.parametrize("factors", [(6,), (2, 3), (3, 2)])
def test_each_rank_ends_with_the_whole_union(stages, case, factors):
    """What it owns, and what is shared with it, are all rows of the union."""
    ranks = math.prod(factors)
    sets = stages.sets_of(case, ranks)
    union = sets.any(0).sum()
    shared = [one for one in stages.counted(sets, factors, 1) if one.is_shared]
    got = sum(one.received for one in shared)
    owned = union - got
    assert owned.sum() == union and owned.min() > 0


def test_stages_within_a_host_send_nothing_into_it(stages, case):
    first, second, third, last = stages.expected(case, (4, 2), 4)
    assert first.into_hosts.max() == last.into_hosts.max() == 0
    rows = HEIGHT * (1 - (1 - ROWS / HEIGHT) ** 4)
    union = HEIGHT * (1 - (1 - ROWS / HEIGHT) ** 8)
    assert second.into_hosts.mean() == pytest.approx(rows / 2)
    assert third.into_hosts.mean() == pytest.approx(union / 2)
    # two hosts must receive each other's union
    assert stages.bound_of(case, 8, 4) == pytest.approx(rows)


def test_factors_have_the_product_of_the_ranks(stages):
    found = list(stages.lists_of(64, 4))
    assert found[:2] == [(64,), (4, 16)]
    assert all(math.prod(factors) == 64 for factors in found)
    assert list(stages.lists_of(13, 1)) == [(13,)]


@pytest.mark.parametrize(
    ("name", "factors", "per_host"), [("uniform", (8,), 1), ("zipf", (4, 2), 4)]
)
def test_the_schedule_sends_and_takes_what_the_model_says(stages, name, factors, per_host):
    case = stages.CASES[name](60, 2400)
    messages, nbytes, taken = stages.of_simulated(case, factors, per_host, rate=1e9)
    assert messages == pytest.approx(1, rel=0.05)
    assert nbytes == pytest.approx(1, rel=0.05)
    assert taken == pytest.approx(1, rel=0.15)


def test_the_model_knows_that_sums_of_some_ranks_are_not_rounded(stages):
    case = dataclasses.replace(stages.CASES["uniform"](60, 2400), is_rounded=True)
    messages, nbytes, taken = stages.of_simulated(case, (4, 2), 4, rate=1e9)
    assert messages == pytest.approx(1, rel=0.05)
    assert nbytes == pytest.approx(1, rel=0.05)
    assert taken == pytest.approx(1, rel=0.15)
