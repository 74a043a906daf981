"""A link's figures are the same on every rank, whether they are measured or said."""

from __future__ import annotations

import threading

import pytest
import torch

import weft
from weft.sparse import link
from weft.sparse.link import link_of, measure
from weft.testing import run, spmd
from weft.wire.link import Link


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

    monkeypatch.setattr(link, "_rate", lambda *_: (next(RATES[threading.current_thread()]), 0.0))
    for first, second in run(3, program):
        assert first == pytest.approx(1e-4, rel=0.15) and second == pytest.approx(1e-9, rel=0.15)


RATES = {}


@pytest.mark.parametrize(("burst", "latency"), [(0, 0.0), (1 << 19, 0.0), (0, 2e-3)])
def test_a_first_burst_is_no_rate(monkeypatch, burst, latency):
    rate = 16e-9
    monkeypatch.setattr(
        link, "_round", lambda _, size: (latency + max(0, size - burst) * rate, 0.0)
    )
    for found in run(2, measure):
        assert found.beta == pytest.approx(rate, rel=0.15)  # to a quarter of an octave


def test_a_latency_is_no_rate(monkeypatch):
    """Between distant hosts half a megabyte takes as long to arrive as to be sent."""
    rate, latency = 80e-9, 26e-3
    monkeypatch.setattr(link, "_latency", lambda _: (latency, 1e-5))
    monkeypatch.setattr(link, "_round", lambda _, size: (latency + size * rate, 0.0))
    for found in run(2, measure):
        assert found.beta == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_what_bytes_cost_the_cores_of_a_host(monkeypatch, cores):
    monkeypatch.setattr(link.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(link, "_round", lambda group, size: (size * 4e-9, size * group.rank * 1e-9))
    for found in run(4, measure):
        assert found.carry == pytest.approx(3e-9 * 4 / cores, rel=0.15)  # that of the last rank
        assert found.share == max(1, 4 / cores)


def test_the_environment_may_say_them(monkeypatch):
    monkeypatch.setenv("WEFT_LINK", "100,1")
    (found,) = run(1, link_of)
    assert found.alpha == pytest.approx(1e-4, rel=0.1)  # to a quarter of an octave
    assert found.beta == pytest.approx(8e-9, rel=0.1)
    assert found.carry < 1e-12  # not known
    assert "1 Gbit/s" in str(Link(1e-4, 8e-9, 1e-9, 1e-5))


@pytest.mark.parametrize("text", ["fast", "1", "1,0", "-1,5", "1,2,3", "nan,1", "1,inf"])
def test_figures_that_make_no_sense_are_refused(monkeypatch, text):
    monkeypatch.setenv("WEFT_LINK", text)
    with pytest.raises(weft.WeftError, match="latency in µs,rate in Gbit/s"):
        run(1, link_of)
