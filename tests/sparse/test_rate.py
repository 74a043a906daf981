"""The rate of a link: a guess, the best that calls reached, and of all ranks the least."""

from __future__ import annotations

import pytest
import torch

import weft
from cases import on_hosts, set_rate
from weft.schedules.hosts import Hosts
from weft.sparse import Sizes
from weft.sparse.rate import GUESS, fitted, known_rate, learn, rate_of
from weft.testing import run, threads

SIZES = Sizes(2, 8000, 4000, 4000, 10**6, 256, 256, end=10**6, hosts=Hosts((0, 1)))


@pytest.fixture
def group(monkeypatch):
    """One rank's group of two on hosts of their own; nobody has said a rate."""
    monkeypatch.delenv("WEFT_LINK", raising=False)
    first, _ = threads.group(2, hosts="ab")
    return first


def test_before_a_call_the_rate_is_a_guess(group, monkeypatch):
    assert known_rate(group) == GUESS
    monkeypatch.setenv("WEFT_LINK", "1")
    assert known_rate(group) == rate_of(1.25e8) == 16


def test_the_best_rate_that_a_call_reached_is_kept(group, monkeypatch):
    monkeypatch.setenv("WEFT_LINK", "10")
    nbytes = SIZES.bound(8000)
    # the first replaces the guess, which was higher; a slower one does not replace it
    for bytes_a_second, rate in ((17e6, 14), (9e6, 14), (140e6, 17)):
        learn(group, SIZES, 8000, nbytes / bytes_a_second)
        assert known_rate(group) == rate


@pytest.mark.parametrize(
    "changes",
    [
        {"total": 6000, "most": 3000, "fewest": 3000},  # less than a megabyte comes
        {"hosts": Hosts((0, 0))},
    ],
)
def test_what_says_nothing_of_the_link_is_not_kept(group, changes):
    learn(group, SIZES.but(**changes), 6000, 1e-6)
    assert known_rate(group) == GUESS


def test_a_call_between_hosts_is_learned_from():
    rows = weft.Rows(torch.arange(8000), torch.ones(8000, 64), 8000)

    def program(group):
        set_rate(group, 1)  # two megabytes a second
        with on_hosts(group, "abc"):
            weft.sparse_all_reduce(rows, algorithm="split")
        return known_rate(group)

    assert min(run(3, program)) > 1


@pytest.mark.parametrize("size", [3, 18])  # told to all, and passed on
def test_the_least_rate_that_ranks_state_counts(size):
    rows = weft.Rows(torch.arange(4000), torch.ones(4000, 64), 4000)

    def program(group):
        set_rate(group, 14 if group.rank == 1 else 30)
        with on_hosts(group, range(size)):
            sizes = weft.explain(rows).sizes
            total = weft.sparse_all_reduce(rows, algorithm="gather")  # whose chunks must be alike
        assert total.values.eq(size).all()
        return sizes.chunk, sizes.gaps

    assert set(run(size, program)) == {(1 << 17, True)}


@pytest.mark.parametrize(
    ("rate", "chunk", "gaps"),
    [
        (1, 1 << 16, True),
        (13, 1 << 16, True),
        (GUESS, 1 << 18, True),
        (16, 1 << 19, True),
        (17, 1 << 20, True),
        (18, 1 << 20, True),
        (19, 1 << 20, False),
        (40, 1 << 20, False),
    ],
)
def test_chunks_and_packing_follow_from_the_rate(rate, chunk, gaps):
    found = fitted(SIZES, rate)
    assert (found.chunk, found.gaps) == (chunk, gaps)


@pytest.mark.parametrize(("ranks", "chunk"), [(2, 1 << 23), (3, 1 << 22), (8, 1 << 21)])
def test_within_a_host_they_do_not(ranks, chunk):
    sizes = SIZES.but(ranks=ranks, hosts=Hosts((0,) * ranks))
    for rate in (1, 40):
        found = fitted(sizes, rate)
        assert (found.chunk, found.gaps) == (chunk, False)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "inf", "nan", "50,10", ""])
def test_a_variable_that_says_no_rate_raises_on_every_rank(text, monkeypatch):
    monkeypatch.setenv("WEFT_LINK", text)

    def program(group):
        with pytest.raises(weft.WeftError, match=f"WEFT_LINK='{text}' is no rate in Gbit/s"):
            weft.sparse_all_reduce((torch.arange(3), torch.ones(3)))

    run(3, program)
