"""A link's figures are measured by all ranks together, and the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft.testing import run, spmd
from weft.wire import link
from weft.wire.in_process import InProcessWire
from weft.wire.link import Link, measure


@spmd(1, 2, 4, 8)
def test_all_ranks_get_the_same_figures(wire):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WEFT_LINK", raising=False)
        found = measure(wire)
    assert isinstance(found, Link)
    figures = [found.alpha, found.beta, found.gamma, found.work]
    mine = torch.tensor(figures, dtype=torch.float64)
    pending = wire.small_all_gather(mine.view(torch.uint8), 32)
    assert all(torch.equal(other, mine.view(torch.uint8)) for other in pending.wait())
    pending.release()
    assert min(figures) > 0


@pytest.mark.parametrize(("burst", "latency"), [(0, 0.0), (1 << 19, 0.0), (0, 2e-3)])
def test_a_first_burst_is_no_rate(monkeypatch, burst, latency):
    monkeypatch.delenv("WEFT_LINK", raising=False)
    rate = 16e-9
    monkeypatch.setattr(
        link, "_round", lambda _, size: (latency + max(0, size - burst) * rate, 0.0)
    )
    for found in run(2, measure):
        assert found.beta == pytest.approx(rate, rel=0.15)  # to a quarter of an octave


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_what_bytes_cost_the_cores_of_a_host(monkeypatch, cores):
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.setattr(link.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(link, "_round", lambda wire, size: (size * 4e-9, size * wire.rank * 1e-9))
    for found in run(4, measure):
        assert found.carry == pytest.approx(3e-9 * 4 / cores, rel=0.15)  # that of the last rank
        assert found.share == max(1, 4 / cores)
    monkeypatch.setenv("WEFT_LINK", "100,1")
    assert run(1, measure)[0].carry < 1e-12  # not known


@pytest.mark.parametrize("without", [None, 0, 2])
@pytest.mark.parametrize("said", [None, "100,1", "100,5"])
def test_numbers_count_as_packed_if_every_rank_packs_and_the_link_is_slow(
    monkeypatch, without, said
):
    """What one rank does with its own messages is its own affair; what is predicted is not."""
    monkeypatch.setattr(InProcessWire, "packs", property(lambda wire: wire.rank != without))
    monkeypatch.setattr(link, "_round", lambda wire, size: (size * 8e-9, 0.0))
    if said is None:
        monkeypatch.delenv("WEFT_LINK", raising=False)
    else:
        monkeypatch.setenv("WEFT_LINK", said)
    for found in run(3, measure):
        assert found.packing == (without is None)
        assert found.packs == (without is None and said != "100,5")


def test_what_is_known_of_packing_is_what_was_heard_last():
    known = Link(1e-4, 8e-9, 1e-9, 1e-5)
    assert known.quicker(replace(known, packing=True)).packs
    assert not replace(known, packing=True).quicker(known).packs


def test_the_environment_may_say_them(monkeypatch):
    monkeypatch.setenv("WEFT_LINK", "100,1")
    (found,) = run(1, measure)
    assert found.alpha == pytest.approx(1e-4, rel=0.1)  # to a quarter of an octave
    assert found.beta == pytest.approx(8e-9, rel=0.1)
    assert "1 Gbit/s" in str(Link(1e-4, 8e-9, 1e-9, 1e-5))


@pytest.mark.parametrize("text", ["fast", "1", "1,0", "-1,5", "1,2,3", "nan,1", "1,inf"])
def test_figures_that_make_no_sense_are_refused(monkeypatch, text):
    monkeypatch.setenv("WEFT_LINK", text)
    with pytest.raises(weft.WeftError, match="latency in µs,rate in Gbit/s"):
        run(1, measure)
