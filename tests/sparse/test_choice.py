"""Each algorithm has a case in which it is chosen: those of docs/choice.md."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch

import weft
from weft.schedules.hosts import Hosts
from weft.sparse import ALGORITHMS, EAGER, Load
from weft.sparse.choice import choose
from weft.sparse.cost import MANY, nearly_quickest
from weft.sparse.explanation import explanation, predicted
from weft.sparse.factors import factored, load_between_blocks
from weft.sparse.stages import cost_with, middle
from weft.wire.link import MERGE, WITHIN, Link


def explained(hosts, each, gbit, rows, height, width, same, delay=0.0):
    """What `auto` would do with rows of so many floats, which ranks draw, or all have the same.

    Hosts are `delay` seconds apart.
    """
    ranks = hosts * each
    union = rows if same else round(height * (1 - (1 - rows / height) ** ranks))
    load = Load(
        ranks,
        total=ranks * rows,
        most=rows,
        fewest=rows,
        union=union,
        height=height,
        row=4 * width,
        partial=4 * width,
        index=4,
        places=height,
        identical=same,
        hosts=Hosts(tuple(rank // each for rank in range(ranks))),
    )
    link = Link(
        alpha=delay + (50e-6 if gbit < 5 else 20e-6),
        beta=8e-9 / gbit,
        gamma=MERGE,
        work=10e-6 if gbit < 5 else 5e-6,
        within=WITHIN if 1 < hosts < ranks else 0.0,
    )
    return predicted(load, link)


@contextmanager
def registered(name, cost, **options):
    """An algorithm that is chosen or not, and never runs."""

    def schedule(rows, call):
        raise NotImplementedError

    schedule.__name__ = name
    weft.algorithm(cost=cost, **options)(schedule)
    try:
        yield
    finally:
        weft.sparse.unregister(name)


# hosts, ranks of each, Gbit/s, rows, height, floats of a row, whether all have the same rows;
# seconds from host to host
ONE_EACH = {
    "eager": (4, 1, 1, 60, 1_000_000, 64, False),
    "gather": (3, 1, 1, 100_000, 1_000_000, 4, False),
    "doubling": (256, 1, 1, 60, 1_000_000, 1, False),
    "holders": (4, 1, 1, 50_000, 1_000_000, 64, False),
    "split": (64, 1, 100, 50_000, 1_000_000, 16, False),
    "ring": (8, 1, 0.25, 50_000, 1_000_000, 16, True),
    "mask": (4, 1, 100, 50_000, 1_000_000, 1, True),
    "dense_tail": (16, 1, 1, 60_000, 100_000, 16, False),
}
SEVERAL = {
    "eager": (2, 2, 1, 60, 1_000_000, 64, False),
    "gather": (2, 2, 0.1, 5_000, 1_000_000, 16, False, 25e-3),
    "doubling": (8, 8, 100, 60, 1_000_000, 1, False),
    "holders": (4, 2, 10, 50_000, 1_000_000, 1024, False),
    "split": (2, 4, 100, 50_000, 1_000_000, 1, False),
    "ring": (2, 4, 25, 600, 1_000_000, 1024, True),
    "mask": (8, 2, 100, 50_000, 1_000_000, 1, True),
    "dense_tail": (8, 2, 100, 600, 1_000, 1024, False),
}
BETWEEN = {
    "gather": (2, 4, 10, 50_000, 1_000_000, 1, False),
    "holders": (4, 2, 1, 50_000, 1_000_000, 64, False),
    "ring": (8, 8, 0.25, 5_000, 1_000_000, 1, True),
    "mask": (8, 8, 0.25, 600, 1_000_000, 1, True),
    "split": (32, 8, 1, 5_000, 10_000, 1, False),
}


@pytest.mark.parametrize("name", ONE_EACH)
def test_each_algorithm_is_chosen_with_one_rank_a_host(name):
    assert explained(*ONE_EACH[name]).chosen == name


@pytest.mark.parametrize("name", SEVERAL)
def test_each_algorithm_is_chosen_with_several_ranks_on_several_hosts(name):
    assert explained(*SEVERAL[name]).chosen == name


@pytest.mark.parametrize("name", BETWEEN)
def test_what_runs_between_hosts(name):
    found = explained(*BETWEEN[name])
    between, _ = middle(found.load)
    assert (found.chosen, between.name) == ("split", name)


@pytest.mark.parametrize("rows", [5_000, 20_000, 50_000])
def test_of_many_ranks_nearly_as_quick_with_fewer_messages_is_taken(rows):
    found = explained(256, 1, 1, rows, 1_000_000, 64, False)
    best, *others = found.lines
    assert best.name == "split 16x16"
    flat = ALGORITHMS["split"].cost(found.load.but(stages=()))
    quicker = [each for each in others if each.verdict.endswith("with more messages")]
    assert all(each.messages > best.messages for each in quicker)
    # a ring of 255 hops is predicted to be a little quicker
    assert 0.97 * best.milliseconds < 1e3 * flat.seconds(found.link) < best.milliseconds
    assert flat.messages > best.messages


def test_between_many_hosts_nearly_as_quick_with_fewer_messages_is_taken():
    load = explained(64, 2, 1, 50_000, 1_000_000, 64, False).load
    assert load.factors == (2, 64)
    inner = load_between_blocks(load)
    split, holders = (cost_with(load, ALGORITHMS[name], inner) for name in ("split", "holders"))
    # a ring of 63 hops is predicted to be a little quicker
    assert 0.97 * split.seconds(load.link) < holders.seconds(load.link) < split.seconds(load.link)
    assert split.messages < holders.messages / 2
    assert middle(load)[0].name == "split"


@pytest.mark.parametrize(
    ("hosts", "each", "gbit", "width", "quickest"),
    [(2, 8, 100, 1, "mask"), (2, 2, 25, 16, "split"), (4, 8, 100, 1, "mask")],
)
def test_what_runs_between_hosts_makes_the_whole_call_quick(hosts, each, gbit, width, quickest):
    load = explained(hosts, each, gbit, 50_000, 1_000_000, width, True).load
    load = load.but(stages=factored(load, (each, hosts)).stages)
    algorithm, inner = middle(load)
    seconds = {
        name: cost_with(load, ALGORITHMS[name], inner).seconds(load.link)
        for name in ("gather", "holders", "mask", "ring", "split")
    }
    assert algorithm.name == min(seconds, key=seconds.get) == quickest


def test_more_messages_are_said_only_of_what_has_more():
    def a_byte_less(load):
        cost = ALGORITHMS["split"].cost(load)
        return dataclasses.replace(cost, bytes=cost.bytes - 1)

    with registered("zzz", a_byte_less):
        found = explained(8, 1, 25, 50_000, 1_000_000, 1, False)
    best, equal = found.lines[:2]
    assert (best.name, equal.name) == ("split", "zzz")  # to a microsecond; then the name decides
    assert equal.milliseconds < best.milliseconds and equal.messages == best.messages
    assert equal.verdict == "predicted 1.00x of the time"


def test_calls_of_about_the_same_sizes_are_predicted_once():
    asked = []

    def cost(load):
        asked.append(load.total)
        return weft.sparse.Cost(1, 1, 0.0)

    def chosen(rows):
        total = 4 * rows
        load = Load(4, total, rows, rows, total, 10**6, 256, 256, 4, places=10**6, link=link)
        return choose(load, "auto")

    link = Link(alpha=50e-6, beta=1e-9, gamma=MERGE, work=10e-6)
    with registered("schedule", cost):
        assert [chosen(50_000), chosen(50_100), chosen(49_900)] == ["schedule"] * 3
        assert len(asked) == 1
        chosen(60_000)
        assert len(asked) == 2
    assert chosen(50_000) != "schedule"  # what was remembered of it does not count any more


def test_whether_an_algorithm_can_serve_is_asked_of_the_true_sizes():
    """66,000 places are rounded to 65,536."""

    def applies(load):
        return None if load.places <= 65_536 else "an index takes two bytes"

    def chosen(places):
        load = Load(4, 40_000, 10_000, 10_000, 30_000, places, 4, 4, 4, places=places, link=link)
        assert load.coarse.places == 65_536
        return choose(load, "auto")

    link = Link(alpha=50e-6, beta=1e-9, gamma=MERGE, work=10e-6)
    with registered("schedule", lambda load: weft.sparse.Cost(1, 1, 0.0), applies=applies):
        assert chosen(65_536) == "schedule"
        assert chosen(66_000) != "schedule"


def test_what_is_chosen_by_rounded_sizes_keeps_within_the_memory_of_the_true_ones():
    """Rounded, the rank with fewest rows has more, which allows more workspace; all have fewer."""
    fewest = 1_064_960
    total = 4_259_839
    link = Link(alpha=50e-6, beta=1e-9, gamma=MERGE, work=10e-6)
    sizes = {"most": total - 2 * fewest, "fewest": fewest, "union": total, "height": 10**9}
    load = Load(3, total, row=4096, partial=4096, index=4, places=10**9, link=link, **sizes)
    assert load.coarse.fewest > 1.015 * fewest and load.coarse.total < 0.985 * total
    sorting = 28 * fewest + (8 << 20)  # of every algorithm, beside its copy of the rows
    rest = load.workspace - fewest * load.row - sorting
    for share, is_taken in ((0.8, True), (1.01, False)):

        def cost(load, needed=share * rest / total):
            return weft.sparse.Cost(1, 1, 0.0, memory=needed * load.total)

        with registered("schedule", cost):
            assert (choose(load, "auto") == "schedule") == is_taken


def test_why_what_is_a_little_quicker_is_not_taken_is_told():
    link = Link(alpha=50e-6, beta=1e-9, gamma=MERGE, work=10e-6)
    most = 33_280  # rounded up by 1.5 percent, and three times as many by half a percent
    load = Load(3, 3 * most, most, most, most, 10**9, 4096, 4096, 4, places=10**9, link=link)
    with (
        registered("schedule", lambda load: weft.sparse.Cost(1, 1, 300.0 * load.total)),
        registered("other", lambda load: weft.sparse.Cost(1, 1, 899.0 * load.most)),
    ):
        best, next_one, *_ = explanation(load, "auto", torch.int32).lines
    assert (best.algorithm, next_one.algorithm) == ("schedule", "other")
    assert next_one.verdict == (
        "predicted 1.00x of the time, but not for sizes rounded to a 64th, which decide"
    )


def test_sizes_are_rounded_by_at_most_a_64th():
    sizes = [0, 1, 31, 63, 64, 65, 127, 1299, 16_562, 99_999, 2**31 - 1]
    for size in sizes:
        load = Load(2, 2 * size, size, size, size, size, 4, 4, 4, rows_of_hosts=((size, 1),))
        found = load.coarse
        assert abs(found.total - 2 * size) <= size / 32
        of_host, _ = found.rows_of_hosts[0]
        for each in (found.most, found.fewest, found.union, found.height, of_host):
            assert abs(each - size) <= size / 64
            assert each == size or size > 63
        assert found.coarse == found
    near = {Load(2, 2 * n, n, n, n, n, 4, 4, 4).coarse for n in range(32_768, 65_000)}
    assert len(near) == 32


def test_of_a_few_ranks_the_quickest_is_taken():
    assert nearly_quickest(MANY, [1.00, 1.02, 1.04], [30, 20, 10]) == 1
    assert nearly_quickest(MANY - 1, [1.00, 1.02, 1.04], [30, 20, 10]) == 0


@pytest.mark.parametrize(("ranks", "percent"), [(16, 3), (31, 3), (32, 4), (256, 7), (1024, 9)])
def test_of_more_ranks_half_of_the_messages_may_take_longer(ranks, percent):
    taken = 1 + percent / 100
    longer = taken + 0.01
    assert nearly_quickest(ranks, [1.00, taken], [100, 50]) == 1
    assert nearly_quickest(ranks, [1.00, longer], [100, 50]) == 0
    assert nearly_quickest(ranks, [1.00, taken], [100, 51]) == (percent == 3)
    assert nearly_quickest(ranks, [1.00, 1.03], [100, 99]) == 1


def test_who_asks_for_what_cannot_serve_is_told_what_does():
    load = Load(2, 8, 4, 4, 6, 9, 4, 4, 4, staying=True, lengths_known=True)
    with pytest.raises(weft.WeftError) as caught:
        choose(load, "ring", "cuda (nccl)")
    assert str(caught.value) == (
        "algorithm ring cannot serve this call over cuda (nccl): its schedule is for tensors of "
        "the CPU; use auto, or one of gather, holders, mask, split"
    )
    with pytest.raises(weft.WeftError) as caught:
        choose(dataclasses.replace(load, staying=False, lengths_known=False, in_order=True), "mask")
    assert str(caught.value) == (
        "algorithm mask cannot serve this call: op is a function, which has no neutral element; "
        "use auto, or one of dense_tail, doubling, gather, holders, split"
    )


def test_no_algorithm_is_without_a_case():
    builtin = {name for name, found in ALGORITHMS.items() if found.builtin}
    assert ONE_EACH.keys() == SEVERAL.keys() == {EAGER, *builtin}


def test_small_rows_are_eager_up_to_16_ranks():
    few = 60, 1_000_000, 64, False
    assert explained(8, 2, 1, *few).chosen == explained(16, 1, 1, *few).chosen == EAGER
    assert explained(17, 1, 1, *few).chosen in ALGORITHMS
    assert explained(2, 2, 1, 600, *few[1:]).chosen in ALGORITHMS  # they do not fit


@pytest.mark.parametrize(
    ("ranks", "rows", "chosen", "words"),
    [
        (4, 50_000, "gather", "gather waits for 2 rounds of 25 ms, 1 to open the call"),
        (4, 60, "eager", "eager waits for 1 round of 25 ms, which opens the call"),
        (64, 50, "gather", "gather waits for 8 rounds of 25 ms, 6 to open the call"),
    ],
)
def test_between_distant_hosts_the_rounds_that_a_call_waits_for_are_named(
    ranks, rows, chosen, words
):
    load = Load(ranks, ranks * rows, rows, rows, ranks * rows, 10**7, 256, 256, 4, places=10**7)
    found = predicted(load, Link(alpha=25e-3, beta=80e-9, gamma=MERGE, work=10e-6))
    assert found.chosen == chosen
    assert f"beside the time of its bytes {words}" in str(found).splitlines()
    assert words in found._repr_html_()


def of_zipf(alpha):
    """What `auto` would do with the rows of the case zipf of `weft bench`, at 100 Mbit/s."""
    load = Load(4, 84_260, 21_065, 21_065, 65_180, 10**6, 256, 256, 4, places=10**6)
    return predicted(load, Link(alpha, beta=80e-9, gamma=MERGE, work=10e-6))


def test_between_distant_hosts_rows_to_all_beside_a_ring_are_known_to_be_slow():
    near = of_zipf(alpha=2e-3)
    assert near.chosen == "holders"
    far = of_zipf(alpha=25e-3)
    assert far.chosen == "doubling"
    milliseconds = {line.algorithm: line.milliseconds for line in far.lines}
    assert milliseconds["gather"] < milliseconds["holders"] < milliseconds["split"]


def test_only_what_a_link_cannot_keep_makes_distant_connections_slow():
    load = of_zipf(alpha=25e-3).load
    round_trip = round(2 * load.link.alpha / load.link.beta)
    assert load.recovering(round_trip + 1) > load.recovering(round_trip) == 0
    assert not load.but(ranks=2).recovering(round_trip + 1)  # rows and sums go one way
    assert not load.but(lengths_known=True).recovering(round_trip + 1)  # one after the other
    assert not of_zipf(alpha=2e-3).load.recovering(10 * round_trip)
    for name in ("dense_tail", "holders", "split"):
        assert ALGORITHMS[name].cost(load).recovering == load.recovering(round_trip + 1)
    for name in ("doubling", "gather", "ring"):
        assert not ALGORITHMS[name].cost(load).recovering
