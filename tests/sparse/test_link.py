"""A link's figures are the same on every rank, whether they are measured or said."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

import weft
from weft.sparse import link
from weft.sparse.link import link_of, measure
from weft.testing import processes, round_wire, run, spmd
from weft.wire import register_wire
from weft.wire.interface import Features, LinkFigures
from weft.wire.link import MERGE, Link
from weft.wire.tcp import wire as tcp


@spmd(1, 2, 4, 8)
def test_all_ranks_measure_the_same_figures(group):
    found = measure(group)
    assert isinstance(found, Link)
    figures = [found.alpha, found.beta, found.gamma, found.work]
    mine = torch.tensor(figures, dtype=torch.float64).view(torch.uint8)
    pending = group.small_all_gather(mine, 32)
    assert all(torch.equal(other, mine) for other in pending.wait())
    pending.release()
    assert min(figures) > 0


def test_a_busy_moment_is_no_link(monkeypatch):
    """The first two calls measure, and each figure is the better of theirs, on all ranks."""
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.setenv("WEFT_CACHE_DIR", "/nonexistent")

    def program(group):
        seen = iter([1e-4, 1e-9, 1e-3])
        monkeypatch.setitem(RATES, threading.current_thread(), seen)
        first, second = link_of(group), link_of(group)
        before = group.traffic.messages
        assert link_of(group) == second and group.traffic.messages == before
        assert next(seen) == 1e-3  # nobody measured a third time
        return first.beta, second.beta

    monkeypatch.setattr(
        link, "measure_rate", lambda *_: (next(RATES[threading.current_thread()]), 0.0)
    )
    for first, second in run(3, program):
        assert first == pytest.approx(1e-4, rel=0.15) and second == pytest.approx(1e-9, rel=0.15)


RATES = {}


@pytest.mark.parametrize(("burst", "latency"), [(0, 0.0), (1 << 19, 0.0), (0, 2e-3)])
def test_a_first_burst_is_no_rate(monkeypatch, burst, latency):
    rate = 16e-9
    monkeypatch.setattr(
        link, "time_round", lambda _, ring, size: (latency + max(0, size - burst) * rate, 0.0)
    )
    for found in run(2, measure):
        assert found.beta == pytest.approx(rate, rel=0.15)  # to a quarter of an octave


def test_a_host_that_begins_late_does_not_hide_the_latency(monkeypatch):
    """Of 25 ms, if the other host begins 24 ms earlier."""
    times = itertools.cycle([1e-3, 49e-3])
    clock = SimpleNamespace(read=lambda: (next(times), 1e-5))
    monkeypatch.setattr(link, "_Clock", lambda: clock)
    monkeypatch.setattr(link, "wait_on_host", lambda *_: None)
    group = SimpleNamespace(size=2, peers=[1], device="cpu", post=lambda *_: None)
    latency, work = link.measure_latency(group)
    assert latency == pytest.approx(25e-3)
    assert work == 1e-5


def test_a_latency_is_no_rate(monkeypatch):
    """Between distant hosts half a megabyte takes as long to arrive as to be sent."""
    rate, latency = 80e-9, 26e-3
    monkeypatch.setattr(link, "measure_latency", lambda _: (latency, 1e-5))
    monkeypatch.setattr(link, "time_round", lambda _, ring, size: (latency + size * rate, 0.0))
    for found in run(2, measure):
        assert found.beta == pytest.approx(rate, rel=0.15)


def test_a_rank_that_begins_late_is_not_in_the_time_of_the_one_before(monkeypatch):
    """Of many distant ranks the next one may begin latencies later: rank 1 does here."""
    stopped = threading.Event()  # the clock of rank 0
    began_in_time = []

    class Clock(link._Clock):
        def read(self):
            if threading.current_thread() is first[0]:
                stopped.set()
            return super().read()

    first = []

    def program(group):
        if group.rank == 0:
            first.append(threading.current_thread())
        if group.rank == 1:
            began_in_time.append(stopped.wait(15))
        return link.time_round(group, range(3), 1 << 19)

    monkeypatch.setattr(link, "_Clock", Clock)
    run(3, program)
    assert began_in_time == [True]


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_what_bytes_cost_the_cores_of_a_host(monkeypatch, cores):
    def took(group, ring, size):
        return size * 4e-9, size * group.rank * 1e-9

    monkeypatch.setattr(link.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(link, "time_round", took)
    for found in run(4, measure):
        assert found.carry == pytest.approx(3e-9 * 4 / cores, rel=0.15)  # that of the last rank
        assert found.share == max(1, 4 / cores)


@pytest.mark.parametrize(
    ("hosts", "rings"),
    [
        ("aaaa", {(0, 1, 2, 3)}),
        ("abcd", {(0, 1, 2, 3)}),
        ("abab", {(0, 2, 1, 3), (0, 2), (1, 3)}),
        ("aaba", {(0, 1, 3, 2), (0, 1, 3), (2,)}),
    ],
)
def test_bytes_go_round_all_hosts_and_round_each(monkeypatch, hosts, rings):
    """One stream enters each host, whatever ranks share it; then as many as it has ranks."""
    measured = set()

    def took(group, ring, size):
        measured.add(tuple(ring))
        return size * (4e-9 if len(ring) == 4 else 1e-9 * (1 + group.rank)), 0.0

    monkeypatch.setattr(link, "time_round", took)

    def program(group):
        group.session.hosts = tuple(hosts)
        return measure(group)

    found = run(4, program)
    assert measured == rings
    for one in found:
        assert one.beta == pytest.approx(4e-9, rel=0.15)
        shared = len(rings) > 1
        assert one.within == (pytest.approx(4e-9, rel=0.15) if shared else 0)  # of the slowest
        assert ("within a host" in str(one)) == shared


def test_many_ranks_find_the_figures_with_few_connections(monkeypatch):
    """Each sends to the ranks 1, 2, 4, 8 and 16 places before it and behind it."""
    monkeypatch.setattr(link, "_ENOUGH", 0.0)
    monkeypatch.setattr(link, "_LATENCIES", 0)

    def program(group):
        found = measure(group), link_of(group)
        return found, {(peer - group.rank) % group.size for peer in group.traffic.to}

    found = run(24, program)
    assert len({figures for figures, _ in found}) == 1
    for _, places in found:
        assert places == {1, 2, 4, 8, 16, 20, 22, 23}


@spmd(4)
def test_what_a_host_does_within_is_measured_with_its_link(group):
    before = group.session.hosts
    group.session.hosts = tuple("abab")
    found = measure(group)
    group.session.hosts = before
    assert 0 < found.within < 1e-6


def test_the_environment_may_say_them(monkeypatch):
    monkeypatch.setenv("WEFT_LINK", "100,1")
    (found,) = run(1, link_of)
    assert found.alpha == pytest.approx(1e-4, rel=0.1)  # to a quarter of an octave
    assert found.beta == pytest.approx(8e-9, rel=0.1)
    assert found.carry == found.within == 0  # not known
    assert "1 Gbit/s" in str(Link(1e-4, 8e-9, 1e-9, 1e-5))


def split_on_three_hosts(group):
    """The sums of the same rows on two ranks a host, by a split."""
    group.session.hosts = tuple("aabbcc")
    draw = torch.Generator().manual_seed(group.rank)
    rows = weft.Rows(torch.arange(4000), torch.randn(4000, 64, generator=draw), 8000)
    return weft.sparse_all_reduce(rows, algorithm="split").values


@pytest.mark.parametrize(
    ("setting", "value", "repeats"),
    [
        ("WEFT_LINK", "50,1", True),
        ("WEFT_LINK", "50,100", True),
        ("WEFT_FACTORS", "6", True),  # flat
        ("WEFT_FACTORS", "2x3", False),  # what runs between the blocks depends on the link
        ("WEFT_ALGORITHM", "split", False),  # so do its factors
    ],
)
def test_settings_with_which_bits_repeat_whatever_is_measured(monkeypatch, setting, value, repeats):
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.setenv(setting, value)
    sums = []
    for gbit in (1, 100):
        measured = Link(50e-6, 8e-9 / gbit, MERGE, 5e-6, within=0.25e-9)
        monkeypatch.setattr("weft.sparse.link.measure", lambda group, found=measured: found)
        sums.append(run(6, split_on_three_hosts)[0])
    assert torch.equal(*sums) == repeats


def rows_of(rank):
    return weft.Rows(torch.arange(5000), torch.ones(5000, 8) * rank, 5000)


APART = 1 << 30  # channels from here on are those of rounds


@pytest.mark.parametrize("on", ["rounds", "device"])
def test_the_figures_are_those_of_what_carries_the_rows(monkeypatch, on):
    monkeypatch.delenv("WEFT_LINK", raising=False)

    def program(group):
        beside, apart, post = [], [], group.wire.post

        def watched(sends=(), recvs=(), channel=0):
            # rounds travel over the same wire
            (apart if channel >= APART else beside).extend(sent.nbytes for _, sent in sends)
            return post(sends, recvs, channel)

        group.wire.post = watched
        group.session.hosts = tuple("aab")
        found = [weft.explain(rows_of(group.rank)).link for _ in range(2)]
        assert max(beside) < 1 << 16 and max(apart) >= 1 << 19
        return found

    first, *others = run(3, program, on=on)
    assert others == [first] * 2
    assert 0 < first[0].within < 1e-4


STATED = LinkFigures(1e-3, 1e-8, 1e-5)
WITHIN = LinkFigures(1e-5, 1e-9, 1e-6)


@pytest.mark.parametrize(
    ("hosts", "within", "wanted"),
    [
        ("aaa", None, (1e-3, 1e-8, 0.0)),
        ("aaa", WITHIN, (1e-5, 1e-9, 0.0)),
        ("abc", WITHIN, (1e-3, 1e-8, 0.0)),
        ("aab", WITHIN, (1e-3, 1e-8, 1e-9)),
        ("aab", None, (1e-3, 1e-8, 0.0)),
    ],
)
def test_a_wire_may_state_them(monkeypatch, hosts, within, wanted):
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.setattr(link, "time_round", lambda *_: 1 / 0)  # nobody measures

    def program(group):
        group.session.hosts = tuple(hosts)
        group.features = replace(group.features, between=STATED, within=within)
        return link_of(group), link_of(group)

    for found in run(3, program):
        for one in found:
            assert [one.alpha, one.beta] == pytest.approx(wanted[:2], rel=0.15)
            assert one.within == pytest.approx(wanted[2], rel=0.15)
            assert one.work > 0


def stating(start):
    """A wire of a program's own, whose figures are constants."""
    wire = tcp.make(start)
    wire.features = Features(between=STATED, within=WITHIN)
    return wire


def stating_in_rounds(start):
    wire = round_wire(start)
    wire.features = replace(wire.features, between=STATED, within=WITHIN)
    return wire


def stating_differently(start):
    wire = stating(start)
    if start.rank == 1:
        wire.features = Features(between=WITHIN, within=WITHIN)
    return wire


def link_over(factory, hosts):
    """The figures that a group finds over a wire that is registered, with ranks on these hosts."""
    os.environ["WEFT_HOST"] = hosts[int(os.environ["RANK"])]
    os.environ.pop("WEFT_LINK", None)
    register_wire("mine", factory)
    with pytest.MonkeyPatch.context() as patch, weft.init(wire="mine", timeout=30) as group:
        patch.setattr(link, "time_round", lambda *_: 1 / 0)  # nobody measures
        return link_of(group.on(torch.device("cpu")))


@pytest.mark.parametrize(
    ("factory", "hosts", "wanted"),
    [
        (stating, "aaa", (1e-5, 1e-9, 0.0)),
        (stating, "aab", (1e-3, 1e-8, 1e-9)),
        (stating_in_rounds, "aab", (1e-3, 1e-8, 1e-9)),
    ],
)
def test_what_a_registered_wire_states_are_the_figures_of_its_groups(factory, hosts, wanted):
    first, *others = processes(3, link_over, factory, hosts)
    assert others == [first] * 2
    assert [first.alpha, first.beta, first.within] == pytest.approx(wanted, rel=0.15)


def refusal_of(factory):
    register_wire("mine", factory)
    with pytest.raises(weft.WeftError) as caught:
        weft.init(wire="mine", timeout=30)
    return str(caught.value)


def test_ranks_whose_wires_state_different_figures_have_no_wire():
    (text,) = set(processes(2, refusal_of, stating_differently))
    assert text.startswith(
        "wire 'mine' cannot be used: on rank 1 its features have between {'latency': 1e-05, "
        "'seconds_a_byte': 1e-09, 'work': 1e-06}, on rank 0 {'latency': 0.001, 'seconds_a_byte': "
        "1e-08, 'work': 1e-05}; all ranks need the same"
    )


def test_the_host_waits_for_a_stream_that_is_measured(monkeypatch):
    asked = MagicMock()
    monkeypatch.setattr(torch, "Event", asked.event)
    monkeypatch.setattr(torch.accelerator, "current_stream", asked.stream)
    group = SimpleNamespace(features=Features(streams=True), device=torch.device("cuda", 1))
    stream = asked.stream.return_value
    link.wait_on_host(group, asked.pending)
    assert asked.mock_calls == [
        call.pending.wait(),
        call.event(group.device),
        call.stream(group.device),
        call.event().record(stream),
        call.event().synchronize(),
        call.pending.release(),
    ]


@pytest.mark.parametrize("text", ["fast", "1", "1,0", "-1,5", "1,2,3", "nan,1", "1,inf", "1,1e30"])
def test_figures_that_make_no_sense_are_refused(monkeypatch, text):
    monkeypatch.setenv("WEFT_LINK", text)
    with pytest.raises(weft.WeftError, match="latency in µs,rate in Gbit/s"):
        run(1, link_of)
