"""What algorithms say that they send, held against the schedules, on clocks that only count."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import weft
from weft.sparse import Sizes, stages
from weft.sparse.choose import Line
from weft.testing import expected, simulated
from weft.testing.simulation import simulate
from weft.wire.link import Link

SLOW = Link(alpha=50e-6, beta=8e-9, work=10e-6)
FAR = Link(alpha=25e-3, beta=80e-9, work=10e-6)  # a chunk takes 20 ms, a message 25
NEAR = replace(SLOW, alpha=20e-6, beta=0.25e-9)
ONES = torch.ones(6000, 64)


def spread(rank, count=100, height=4000):
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randperm(height, generator=generator)[:count].sort().values
    return weft.Rows(indices, ONES[:count], height)


def check(done, messages=0.1):
    assert done.messages == pytest.approx(done.traffic.messages, rel=messages)
    assert done.bytes == pytest.approx(done.traffic.bytes, rel=0.05)


@pytest.mark.parametrize("name", ["gather", "mask"])
def test_64_ranks_send_what_is_said(name):
    check(simulate(name, spread, 64, SLOW))


def test_64_holders_send_what_is_said():
    """A rank has rows for nearly every other, and less than a message of them for each."""
    check(simulate("holders", partial(spread, count=400), 64, SLOW))


@pytest.mark.parametrize("ranks", [64, 72])  # the latter is no power of two
def test_doubling_sends_no_more_than_is_said(ranks):
    """Which is the most: nobody knows before a call which ranks have the same rows."""
    done = simulate("doubling", spread, ranks, SLOW)
    assert done.messages == pytest.approx(done.traffic.messages, rel=0.1)
    assert 0.7 * done.traffic.bytes < done.bytes <= done.traffic.bytes


def test_144_ranks_send_what_is_said():
    done = simulate("split", partial(spread, count=40, height=1600), 144, SLOW)
    assert len(done.sizes.blocks) == 12
    check(done)


def test_mask_where_all_ranks_have_the_same_rows():
    rows = weft.Rows(torch.arange(4000) * 2, ONES[:4000], 8000)
    check(simulate("mask", lambda _: rows, 8, SLOW))


@pytest.mark.parametrize(("name", "count"), [("split", 100), ("holders", 400), ("gather", 100)])
def test_ranks_on_hosts_of_eight_send_what_is_said(name, count):
    hosts = [f"{rank // 8}" for rank in range(32)]
    rows = partial(spread, count=count, height=2000)
    check(simulate(name, rows, 32, SLOW, hosts=hosts, within=NEAR))


@pytest.mark.parametrize("name", ["holders", "mask", "split"])
def test_whatever_runs_between_hosts_sends_what_is_said(name, monkeypatch):
    monkeypatch.setattr(stages, "first_served", lambda sizes, fitting: Line(name, "tried"))
    hosts = [f"{rank // 8}" for rank in range(32)]
    rows = partial(spread, count=500, height=20_000)
    done = simulate("split", rows, 32, SLOW, hosts=hosts, within=NEAR)
    assert len(done.sizes.blocks) == 4
    check(done)


@pytest.mark.parametrize("hosts", ["aaaabbb", "a" * 8 + "b"])
def test_hosts_of_unequal_ranks_send_what_is_said(hosts):
    rows = partial(spread, count=4000, height=80_000)
    done = simulate("split", rows, len(hosts), SLOW, hosts=hosts, within=NEAR)
    check(done, messages=0.25)  # ranks that have a place have more than the average


def test_chunks_of_distant_ranks_do_not_wait_for_each_other_in_the_ring():
    done = simulate("holders", partial(spread, count=6000, height=24_000), 4, FAR)
    check(done)
    waits = (done.seconds - done.bytes * FAR.beta) / FAR.alpha
    assert waits < 5  # two for the lists, one for the rows, and hardly any in the ring


def test_between_distant_hosts_few_values_go_to_all_together_with_the_lists():
    done = simulate("gather", partial(spread, count=300, height=24_000), 4, FAR)
    check(done)
    waits = (done.seconds - done.bytes * FAR.beta) / FAR.alpha
    assert waits < 1.5  # with one for the lists it were 2, and round the ring three


def test_an_all_gather_goes_directly_where_little_comes_altogether_or_within_a_host():
    sizes = Sizes(4, 24_000, 6000, 6000, 24_000, 256, 256)
    assert sizes.sends_directly(80 << 10)
    assert not sizes.sends_directly(90 << 10)
    assert sizes.but(ranks=2).sends_directly(90 << 10)
    assert sizes.but(hosts=weft.sparse.Hosts((0, 0, 0, 0))).sends_directly(1 << 30)
    assert sizes.but(lengths_known=True).sends_directly(1 << 30)


def test_between_distant_hosts_few_gathered_rows_go_to_all():
    def program(group):
        weft.sparse_all_gather(spread(group.rank, count=300, height=24_000))
        return simulated.clock(group), group.traffic.bytes

    seconds, nbytes = zip(*simulated.run(4, FAR, program), strict=True)
    waits = (max(seconds) - max(nbytes) * FAR.beta) / FAR.alpha
    assert waits < 2.5  # one to open the call, and one for the rows; a ring waits in each hop


@pytest.mark.parametrize("name", ["doubling", "gather", "holders", "split"])
def test_between_distant_hosts_a_call_waits_for_the_rounds_that_are_said_and_its_bytes(name):
    done = simulate(name, partial(spread, count=6000, height=24_000), 4, FAR)
    seconds = done.seconds - done.bytes * FAR.beta
    assert seconds / FAR.alpha < done.traffic.rounds + 1.5


def test_headers_combine_and_the_sums_are_right():
    parts = [spread(rank, count=20, height=300) for rank in range(24)]
    right = expected(parts)

    def program(group):
        rows = weft.sparse_all_reduce(parts[group.rank])
        return torch.equal(rows.indices, right.indices) and torch.equal(rows.values, right.values)

    assert all(simulated.run(24, SLOW, program))


@pytest.mark.parametrize(("name", "ranks"), [("auto", 2), ("split", 1)])
def test_where_no_algorithm_runs_the_error_says_so(name, ranks):
    with pytest.raises(weft.WeftError, match="no algorithm ran"):
        simulate(name, lambda _: spread(0, count=1), ranks, SLOW)
