"""The rule: each of its lines decides a case, and falls to the next where it cannot be served."""

from __future__ import annotations

import pytest
import torch

import weft
from cases import on_hosts
from weft.schedules.hosts import Hosts
from weft.sparse import ALGORITHMS, Sizes, choose
from weft.sparse.choose import Line, chosen, first_served, lines, serves
from weft.sparse.header import Header
from weft.testing import run


def of(ranks=8, rows=50_000, hosts=None, **changes):
    """Ranks with so many rows of 256 bytes each, by default on hosts of their own."""
    names = range(ranks) if hosts is None else hosts
    sizes = Sizes(ranks, ranks * rows, rows, rows, 10**6, 256, 256, end=10**6)
    return sizes.but(hosts=Hosts.named(names), **changes)


# what decides: sizes, the algorithm, and the line in words
LINES = {
    "near": (of(rows=4096, hosts="aaaaaaaa"), "gather", "ranks of one host bring up to 8 MiB"),
    "near and large": (of(rows=4097, hosts="aaaaaaaa"), "split", "all ranks share a host"),
    "several a host": (of(hosts="aaaabbbb"), "split", "ranks share hosts"),
    "two": (of(2), "gather", "there are two ranks"),
    "little": (of(16, rows=2048), "doubling", "up to 16 ranks bring up to 512 KiB of rows each"),
    "little of many": (of(17, rows=2048), "holders", "there are up to 32 ranks"),
    "not so little": (of(rows=2049), "holders", "there are up to 32 ranks"),
    "narrow": (of(rows=100_000, row=8), "split", "a row has up to 8 bytes"),
    "narrow and slight": (of(rows=32_768, row=8), "gather", "up to 2 MiB of narrow rows"),
    "narrow and not so slight": (of(rows=32_769, row=8), "split", "a row has up to 8 bytes"),
    "narrow of many": (of(17, rows=100, row=8), "split", "a row has up to 8 bytes"),
    "not so narrow": (of(rows=100_000, row=12), "holders", "there are up to 32 ranks"),
    "full": (of(height=200_000), "split", "at least twice as many rows as the table has"),
    "not so full": (of(height=200_001), "holders", "there are up to 32 ranks"),
    "no height": (of(height=None), "holders", "there are up to 32 ranks"),
    "some": (of(32, rows=5000), "holders", "there are up to 32 ranks"),
    "large of some": (of(32), "holders", "there are up to 32 ranks"),
    "many": (of(33, rows=5000), "split", "there are more than 32 ranks"),
}
# what is passed over: sizes, the algorithm of the line that fits, and what runs
PASSED_OVER = {
    "all rows of one of two": (of(2, most=600_000, total=600_000, fewest=0), "gather", "split"),
    "some without machine code": (of(32, rows=5000, compiled=False), "holders", "split"),
    "all rows of one of some": (of(most=400_000, fewest=0), "holders", "split"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_decides(case):
    sizes, algorithm, why = LINES[case]
    line = first_served(sizes, lines(sizes))
    assert line.algorithm == algorithm and why in line.why
    assert next(lines(sizes)) == line


@pytest.mark.parametrize("case", PASSED_OVER)
def test_a_line_whose_algorithm_cannot_serve_is_passed_over(case):
    sizes, first, runs = PASSED_OVER[case]
    assert next(lines(sizes)).algorithm == first
    assert not serves(sizes, first)
    assert first_served(sizes, lines(sizes)).algorithm == runs


def test_split_always_serves():
    changes = {"most": 10**6, "fewest": 0, "total": 10**9}  # more than may be leased
    for sizes in (of(**changes), of(hosts="aabbccdd", **changes), of(100, **changes)):
        *_, last = lines(sizes)
        assert last.algorithm == "split" and serves(sizes, "split")


def test_rows_that_fit_in_the_opening_are_eager_over_every_wire():
    # 80 bytes, 527 rows with indices of 8 bytes, and 16: in 136 KiB
    assert Header.fits(527, 8, 256, 8) and not Header.fits(528, 8, 256, 8)
    assert Header.fits(7, 8, 256, 17) and not Header.fits(8, 8, 256, 17)  # of many ranks in 2 KiB
    for wire in ({}, {"chunk": 1 << 16, "gaps": True}):
        assert chosen(of().but(**wire), "auto", is_eager=True).algorithm == "eager"


def test_what_is_asked_for_runs_or_the_error_says_what_could():
    assert chosen(of(), "doubling", is_eager=False) == Line("doubling", "it was asked for")
    able = ", ".join(sorted(ALGORITHMS.keys() - {"holders"}))
    with pytest.raises(weft.WeftError, match=f"some rank has none, .* one of {able}$"):
        chosen(of(compiled=False), "holders", is_eager=False)
    assert chosen(of(compiled=False), "doubling", is_eager=False).algorithm == "doubling"


def test_explain_and_the_record_say_which_line_decided():
    def program(group):
        rows = weft.Rows(torch.arange(1000), torch.ones(1000, 64), 1000)
        with on_hosts(group, "abc"):
            without_height = weft.explain((rows.indices, rows.values))
            weft.sparse_all_reduce(rows)
            return weft.explain(rows), weft.sparse.last_call(), without_height

    said, record, without_height = run(3, program)[0]
    assert without_height.sizes == said.sizes  # all rows lie below the highest index
    assert (said.chosen, said.why) == next(choose.lines(said.sizes))
    assert (record.algorithm, record.why) == (said.chosen, said.why)
    first, second = str(said).split("\n")
    assert first == "doubling: up to 16 ranks bring up to 512 KiB of rows each"
    assert second == "bound: 346667 bytes a rank"
