"""A link's figures are the same on every rank, whether they are measured, read or said."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading

import pytest
import torch

import weft
from weft.sparse import link
from weft.sparse.link import Figures, Profile, link_of, measure, read, write
from weft.testing import run, spmd
from weft.wire.hosts import Hosts, set_hosts
from weft.wire.link import MERGE, Link

HERE = socket.gethostname()
NEAR, FAR = Figures(2**-14, 2**-30, 2**-16), Figures(2**-10, 2**-27, 2**-15)
GOOD = Profile((HERE,), 4, FAR, NEAR, MERGE)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.setenv("WEFT_PROFILE", str(path))
    write(path, GOOD)
    return path


def test_what_is_written_is_read(file):
    assert read(file) == GOOD
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # no draft is left


def test_all_ranks_take_its_figures(file):
    found = run(3, link_of)
    assert len(set(found)) == 1
    assert (found[0].alpha, found[0].beta) == (NEAR.alpha, NEAR.beta)
    assert found[0].gamma >= MERGE and found[0].work >= NEAR.work


def test_auto_reads_it(file):
    def program(wire):
        rows = weft.Rows(torch.arange(3), ROWS, 9)
        weft.explain(rows)
        return link_of(wire).beta

    ROWS = torch.ones(3, 2)
    assert run(2, program) == [NEAR.beta] * 2


def broken(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda path: path.write_text("{"), "is no link profile: write one with weft tune"),
        (lambda path: path.write_text("[]"), "is no link profile"),
        (lambda path: path.write_text("[" * 60_000), "is no link profile"),
        (lambda path: broken(path, ranks=float("inf")), "is broken at cannot convert float inf"),
        (lambda path: path.write_bytes(b" " * 70_000), "is no link profile"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: broken(path, format="other"), "is no link profile"),
        (lambda path: broken(path, version=2), "has version 2, this weft reads 1"),
        (lambda path: broken(path, version="1"), "has version '1', this weft reads 1"),
        (lambda path: broken(path, merge=-1), "is broken at -1, which is no time in seconds"),
        (lambda path: broken(path, merge=True), "is broken"),
        (lambda path: broken(path, within={"alpha": 1}), "is broken at 'beta'"),
        (lambda path: broken(path, hosts="all"), "is broken at hosts"),
        (lambda path: broken(path, hosts=["mars"]), f"was made for mars, not for {HERE}: run weft"),
        (lambda path: broken(path, within=None), "says nothing of ranks of one host"),
    ],
)
def test_one_that_does_not_serve_is_refused_alike_on_every_rank(file, spoil, words):
    spoil(file)

    def program(wire):
        with pytest.raises(weft.WeftError) as caught:
            link_of(wire)
        return str(caught.value)

    texts = run(3, program)
    assert len(set(texts)) == 1 and "\n" not in texts[0]
    assert words in texts[0]


def test_ranks_with_different_profiles_are_refused(file, monkeypatch):
    """On processes the environment may differ; here one rank reads another file by that name."""
    read = link.read

    def program(wire):
        found = dataclasses.replace(read(file), ranks=4 - wire.rank // 2)
        monkeypatch.setitem(PROFILES, threading.current_thread(), found)
        with pytest.raises(weft.WeftError, match=r"link profile: ranks 0, 1 have .* rank"):
            link_of(wire)

    monkeypatch.setattr(link, "read", lambda path: PROFILES[threading.current_thread()])
    run(3, program)


PROFILES = {}


def test_any_host_and_several(file):
    assert GOOD.serves([HERE]) is None and GOOD.of(1) == NEAR and GOOD.of(2) == FAR
    assert Profile((), 4, FAR, None, MERGE).serves(["mars", "venus"]) is None
    assert "venus" in GOOD.serves([HERE, "venus"])


def test_the_one_that_was_kept_is_found(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.delenv("WEFT_PROFILE", raising=False)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    path = link.default_path([HERE])
    slow = Figures(2.0, 2**-30, 2**-16)  # no round takes two seconds
    write(path, Profile((HERE,), 2, None, slow, MERGE))
    assert [found.alpha for found in run(2, link_of)] == [slow.alpha] * 2
    broken(path, version=9)  # nobody named it: it is told, and the link is measured
    assert max(found.alpha for found in run(2, link_of)) < slow.alpha
    assert "has version 9" in caplog.text and "the link is measured instead" in caplog.text


def test_tune_measures_all_ranks_alike():
    first, *others = run(3, link.tune)
    assert all(other == first for other in others)
    assert first.hosts == (HERE,) and first.ranks == 3 and first.between is None
    assert first.within.alpha > 0 and first.within.beta > 0 and first.merge > 0


def test_virtual_hosts_are_told_apart():
    def program(wire):
        set_hosts(wire, Hosts.named(range(wire.size)))
        return link.tune(wire), link.hosts_of(wire)

    (found, (names, first)), *_ = run(2, program)
    assert found.within is None and found.between.beta > 0
    assert names == [HERE, HERE] and first


@spmd(1, 2, 4, 8)
def test_all_ranks_measure_the_same_figures(wire):
    found = measure(wire)
    assert isinstance(found, Link)
    figures = [found.alpha, found.beta, found.gamma, found.work]
    mine = torch.tensor(figures, dtype=torch.float64).view(torch.uint8)
    pending = wire.small_all_gather(mine, 32)
    assert all(torch.equal(other, mine) for other in pending.wait())
    pending.release()
    assert min(figures) > 0


def test_a_busy_moment_is_no_link(monkeypatch):
    """The first two calls measure, and each figure is the better of theirs, on all ranks."""
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.delenv("WEFT_PROFILE", raising=False)
    monkeypatch.setenv("WEFT_CACHE_DIR", "/nonexistent")

    def program(wire):
        seen = iter([1e-4, 1e-9, 1e-3])
        monkeypatch.setitem(RATES, threading.current_thread(), seen)
        first, second = link_of(wire), link_of(wire)
        before = wire.traffic.messages
        assert link_of(wire) == second and wire.traffic.messages == before
        assert next(seen) == 1e-3  # nobody measured a third time
        return first.beta, second.beta

    monkeypatch.setattr(link, "_rate", lambda _: (next(RATES[threading.current_thread()]), 0.0))
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


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_what_bytes_cost_the_cores_of_a_host(monkeypatch, cores):
    monkeypatch.setattr(link.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(link, "_round", lambda wire, size: (size * 4e-9, size * wire.rank * 1e-9))
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
