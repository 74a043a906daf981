"""What a link is measured like while ranks are busy with their start does not last, nor decides."""

from __future__ import annotations

import threading

import pytest
import torch

import weft
from weft.sparse import believed
from weft.testing import run, spmd
from weft.wire import link
from weft.wire.link import Link, rough

ROUGH = Link(1e-2, 8e-9, 1e-9, 1e-2, measured=True, early=True)
FIRST = Link(1e-2, 8e-9, 1e-9, 1e-2, measured=True)
LATER = Link(1e-4, 9e-9, 1e-9, 1e-5, measured=True)
BEST = Link(LATER.alpha, FIRST.beta, FIRST.gamma, LATER.work, measured=True)


class Compiler:
    """Stands in for that of each rank, which is a thread here."""

    here = threading.local()

    @property
    def busy(self):
        return self.here.calls > 0


@pytest.fixture
def figures(monkeypatch):
    """Each measurement takes the next of these; at the end the last, again and again."""
    found = [FIRST, LATER]
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.setattr(believed, "compiler", Compiler())
    monkeypatch.setattr(believed, "rough", lambda wire, near: ROUGH)

    def measured(wire):
        Compiler.here.measured += 1
        return found[min(Compiler.here.measured, len(found)) - 1]

    monkeypatch.setattr(believed, "figures", measured)


def seen(wire, calls, busy):
    """The link after each of so many calls; machine code is made in the first ones, or `busy`."""
    rows = torch.arange(3000) + wire.rank, torch.ones(3000, 20)
    Compiler.here.calls, Compiler.here.measured, links = busy, 0, []
    for _ in range(calls):
        weft.sparse_all_reduce(rows)
        Compiler.here.calls -= 1
        links.append(wire.link)
    return links


def test_what_was_measured_at_a_busy_moment_does_not_last(figures):
    assert run(2, seen, 8, 0) == [[FIRST] * 7 + [BEST]] * 2


@pytest.mark.parametrize("busy, rough", [(1, 1), (2, 3), (4, 7), (7, 7), (8, 15)])
def test_figures_are_rough_until_no_rank_is_busy(figures, busy, rough):
    def program(wire):
        return seen(wire, 16, busy if wire.rank == 1 else 0)

    first, *others = run(3, program)
    assert others == [first] * 2  # one of them alone was busy
    assert first[:rough] == [ROUGH] * rough
    assert first[rough] == FIRST
    assert first[15] == (FIRST if rough >= 7 else BEST)


def test_all_is_measured_again_later(figures):
    links = run(2, seen, 64, 9)
    assert links == [[ROUGH] * 15 + [FIRST] * 48 + [BEST]] * 2


def test_what_is_known_is_never_asked_about(figures, monkeypatch):
    monkeypatch.setenv("WEFT_LINK", "100,1")
    for links in run(2, seen, 8, 9):
        assert not links[0].measured and not links[0].early and links == [links[0]] * 8


@spmd(2, 3)
def test_rough_figures_of_ranks_that_share_memory_are_not_measured(wire):
    before = wire.traffic.bytes
    found = rough(wire, near=True)
    assert wire.traffic.bytes - before < 1 << 10
    assert found.measured and found.early and "roughly" in str(found)
    assert 8e-9 / found.beta == pytest.approx(16, rel=0.1)  # Gbit/s; to a quarter of an octave
    said = wire.all_gather_bytes(str(found).encode(), 200)
    assert len({text.rstrip(b"\0")[: len(str(found))] for text in said}) == 1


@pytest.mark.parametrize("rate", [4e-10, 8e-9, 32e-9])
def test_what_holds_up_any_message_is_no_rate(monkeypatch, rate):
    """A core that is busy answers late, however short a message is."""
    monkeypatch.setattr(link, "_round", lambda _, size: (0.013 + size * rate, 0.0))
    for found in run(2, lambda wire: rough(wire, near=False)):
        assert rate / 1.2 < found.beta < 6 * rate
    for found in run(2, link.figures):
        assert found.beta > 1.5 * rate  # as it would be without
