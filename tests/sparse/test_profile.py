"""A link profile is read by all ranks or by none, and one that does not serve is refused."""

from __future__ import annotations

import json
import socket

import pytest
import torch

import weft
from weft.sparse import profile
from weft.sparse.profile import Figures, Profile, link, read, write
from weft.testing import run
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
    found = run(3, link)
    assert len(set(found)) == 1
    assert (found[0].alpha, found[0].beta) == (NEAR.alpha, NEAR.beta)
    assert found[0].gamma >= MERGE and found[0].work >= NEAR.work


def test_auto_reads_it(file):
    def program(wire):
        rows = weft.Rows(torch.arange(3), ROWS, 9)
        weft.explain(rows)
        return wire.link.beta

    ROWS = torch.ones(3, 2)
    assert run(2, program) == [NEAR.beta] * 2


def broken(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_tune_waits_until_no_rank_makes_machine_code(monkeypatch):
    """The first run on a machine makes it, and would write a link of a fiftieth of its speed."""
    asked, measured = [], []

    class Compiler:
        @property
        def busy(self):
            asked.append(len(measured))
            return len(asked) < 6

    monkeypatch.setattr(profile, "compiler", Compiler())
    monkeypatch.setattr(profile, "_merging", lambda: 1e-10)

    def figures(wire):
        measured.append(len(asked))
        return Link(1e-4, 1e-9, 1e-10, 1e-5)

    monkeypatch.setattr(profile, "figures", figures)
    run(2, profile.tune)
    # each rank once before, for what that has made, and once for good, when none is busy
    assert [when >= 6 for when in sorted(measured)] == [False, False, True, True]


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
            link(wire)
        return str(caught.value)

    texts = run(3, program)
    assert len(set(texts)) == 1 and "\n" not in texts[0]
    assert words in texts[0]


def test_ranks_with_different_profiles_are_refused():
    said = [{"error": "", "digest": digest} for digest in ("aa", "aa", "bb", "")]
    with pytest.raises(weft.WeftError, match=r"rank 0 has link profile aa .*, rank 2 bb: give"):
        profile._named(said, [HERE])
    said[0]["error"] = "gone"
    with pytest.raises(weft.WeftError, match=r"^rank 0: gone$"):
        profile._named(said, [HERE])


def test_any_host_and_several(file):
    assert GOOD.serves([HERE]) is None and GOOD.of(1) == NEAR and GOOD.of(2) == FAR
    assert Profile((), 4, FAR, None, MERGE).serves(["mars", "venus"]) is None
    assert "venus" in GOOD.serves([HERE, "venus"])


def test_the_one_that_was_kept_is_found(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("WEFT_LINK", raising=False)
    monkeypatch.delenv("WEFT_PROFILE", raising=False)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    path = profile.default_path([HERE])
    write(path, GOOD)
    assert [(found.beta, found.measured) for found in run(2, link)] == [(NEAR.beta, False)] * 2
    broken(path, version=9)  # nobody named it: it is told, and the link is measured
    assert [found.measured for found in run(2, link)] == [True] * 2
    assert "has version 9" in caplog.text and "the link is measured instead" in caplog.text


def test_tune_measures_all_ranks_alike():
    first, *others = run(3, profile.tune)
    assert all(other == first for other in others)
    assert first.hosts == (HERE,) and first.ranks == 3 and first.between is None
    assert first.within.alpha > 0 and first.within.beta > 0 and first.merge > 0


def test_virtual_hosts_are_told_apart(monkeypatch):
    import threading

    monkeypatch.setattr(profile, "_place", lambda: f"box {threading.current_thread().name[-1]}")

    def program(wire):
        return profile.tune(wire), profile.hosts_of(wire)

    (found, (names, first)), *_ = run(2, program)
    assert found.within is None and found.between.beta > 0
    assert names == [HERE, HERE] and first
