"""Predictions are held against the real schedules, on clocks that only count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft.kernels import meter
from weft.sparse import ALGORITHMS
from weft.sparse.simulation import simulate
from weft.testing import expected
from weft.wire import simulated
from weft.wire.link import MERGE, Link

SLOW = Link(alpha=50e-6, beta=8e-9, gamma=MERGE, work=10e-6)
BUSY = Link(alpha=20e-6, beta=0.8e-9, gamma=30 * MERGE, work=5e-6)  # arithmetic decides
ONES = torch.ones(6000, 64)


def spread(rank, count=100, height=4000):
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randperm(height, generator=generator)[:count].sort().values
    return weft.Rows(indices, ONES[:count], height)


def check(done):
    assert done.predicted == pytest.approx(done.seconds, rel=0.15)
    assert done.messages == pytest.approx(done.cost.messages, rel=0.1)
    assert done.bytes == pytest.approx(done.cost.bytes, rel=0.1)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_64_ranks_take_what_was_predicted(name):
    check(simulate(name, spread, 64, SLOW))


@pytest.mark.parametrize("name", ["doubling", "hierarchical"])
def test_256_ranks_take_what_was_predicted(name):
    check(simulate(name, spread, 256, SLOW))


def test_mask_where_all_ranks_have_the_same_rows():
    rows = weft.Rows(torch.arange(4000) * 2, ONES[:4000], 8000)
    check(simulate("mask", lambda _: rows, 8, replace(SLOW, beta=1e-10)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_numbers_in_fewer_bytes_on_a_slow_link_take_what_was_predicted(name, dtype):
    """Wide rows, whose messages are long enough to be packed, and narrow ones, which are not."""
    hosts, within = [f"{rank // 2}" for rank in range(8)], replace(SLOW, beta=4 * SLOW.gamma)
    shared = {"hosts": hosts, "within": within} if name == "hierarchical" else {}

    def took(count, link):
        values = torch.ones(count, 64, dtype=dtype)

        def rows(rank):
            return weft.Rows(spread(rank, count, 4 * count).indices, values, 4 * count)

        done = simulate(name, rows, 8, link, **shared)
        assert done.predicted == pytest.approx(done.seconds, rel=0.15)
        return done

    for count in (6000, 60):
        plain, packed = (took(count, replace(SLOW, packing=each)) for each in (False, True))
        ratios = packed.seconds / plain.seconds, packed.predicted / plain.predicted
        # packing takes cores a while, which the simulation leaves out
        assert ratios[0] - 0.01 < ratios[1] < ratios[0] + 0.06
        assert packed.bytes == plain.bytes and packed.cost.bytes == plain.cost.bytes
        if count == 6000:
            assert ratios[0] < 0.9
        elif name not in ("doubling", "hierarchical"):  # what these send grows
            assert ratios[0] == 1 and packed.cost.spared == 0
    quicker = replace(SLOW, beta=3e-9, packing=True)
    assert simulate(name, spread, 8, quicker, **shared).cost.spared == 0


@pytest.mark.parametrize("slowly", [4, 16])
@pytest.mark.parametrize("name", ["gather", "holders"])
def test_what_is_merged_while_chunks_come_takes_time_once_that_is_too_much(name, slowly):
    link = replace(SLOW, gamma=slowly * MERGE)

    def rows(rank):
        return spread(rank, count=6000, height=24_000)

    done = simulate(name, rows, 8, link)
    assert done.predicted == pytest.approx(done.seconds, rel=0.08)
    late = sum(merged for merged, _ in done.cost.meanwhile)
    at_last = replace(done.cost, merged=done.cost.merged + late, meanwhile=())
    assert at_last.seconds(link) > 1.1 * done.seconds


@pytest.mark.parametrize("name", ["doubling", "holders"])
def test_64_ranks_that_merge_slowly(name):
    check(simulate(name, spread, 64, BUSY))


@pytest.mark.parametrize(("each", "link"), [(4, SLOW), (8, BUSY), (64, SLOW)])
def test_64_ranks_on_hosts_of_several(each, link):
    # a host's own network is its cores: to hand a byte on costs them four that are merged
    within = replace(link, beta=4 * link.gamma)
    hosts = [f"{rank // each}" for rank in range(64)]
    check(simulate("hierarchical", spread, 64, link, hosts=hosts, within=within))


def test_a_number_of_ranks_that_is_no_power_of_two():
    check(simulate("doubling", spread, 72, SLOW))


def test_headers_combine_and_the_sums_are_right():
    parts = [spread(rank, count=20, height=300) for rank in range(24)]
    right = expected(parts)

    def program(wire):
        rows = weft.sparse_all_reduce(parts[wire.rank])
        return torch.equal(rows.indices, right.indices) and torch.equal(rows.values, right.values)

    assert all(simulated.run(24, SLOW, program))


def test_arithmetic_is_reported_where_somebody_asks():
    seen = []
    with meter.metered(seen.append):
        weft.kernels.take(torch.ones(4, 8), torch.tensor([1, 2]))
    weft.kernels.take(torch.ones(4, 8), torch.tensor([1, 2]))
    assert seen == [64]


def test_what_is_summed_in_float64_and_rounded_to_half_precision_is_reported_once():
    values, seen = torch.ones(4000, 64, dtype=torch.float64), []  # several pieces
    found = weft.kernels.distinct(torch.arange(4000) // 2)
    out = torch.empty(2000, 64, dtype=torch.float16)
    with meter.metered(seen.append):
        weft.kernels.reduce(values, found, weft.kernels.OPS["sum"], out)
    assert sum(seen) == values.nbytes + 2000 * 64 * 8
