"""`weft doctor`: what it finds, and that it says what to type."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.bootstrap import look_ahead
from weft.cli.commands import app
from weft.cli.doctor import Pair, crowded, look, measure, network, slow
from weft.testing import launch, run


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    names = "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"
    for name in (*names.split(), "WEFT_INTERFACE", "SAR_SOCKET_NAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def wrong():
    return [finding for finding in look(look_ahead()) if finding.level == "wrong"]


def weft_package():
    (finding,) = [each for each in look(look_ahead()) if each.what == "package"]
    return finding


def test_alone_all_is_well():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    ok = "versions: weft ", "interface lo: 127.0.0.1", "backend gloo: gloo", "of 1 rank "
    group = "rank 0 of 1, timeout"  # while it stood
    for text in (*ok, "launched by: no launcher, rank 0 of 1", group):
        assert text in done.output
    assert "wrong" not in done.output
    for line in done.output.splitlines():  # what is not here is not called ok
        assert not (line.startswith("ok") and ("not here" in line or "needs" in line)), line
    absent = [name for name, found in look_ahead().backends.items() if not isinstance(found, str)]
    assert f"-     backends that are not here: {', '.join(absent)}: tensors" in done.output
    assert "torchrun --nproc-per-node 4 -m weft doctor" in done.output.splitlines()[-1]


def test_what_is_wrong_ends_with_what_to_type(monkeypatch):
    assert not wrong()
    monkeypatch.setenv("WEFT_INTERFACE", "nothing7")
    (finding,) = wrong()
    assert (finding.what, finding.remedy) == ("interface", "unset WEFT_INTERFACE")
    monkeypatch.delenv("WEFT_INTERFACE")
    monkeypatch.setenv("RANK", "0")
    (finding,) = wrong()
    assert finding.text == "the environment has RANK=0 but no WORLD_SIZE"
    assert finding.remedy.startswith("start with torchrun")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "-> start with torchrun" in done.output


def installed(folder, summary, url):
    """A folder of packages, with a distribution called `weft` in it."""
    info = folder / "weft-0.9.118.dist-info"
    info.mkdir()
    lines = "Metadata-Version: 2.1", "Name: weft", "Version: 0.9.118", f"Summary: {summary}"
    (info / "METADATA").write_text("\n".join([*lines, f"Project-URL: Repository, {url}"]) + "\n")
    return str(folder)


def test_another_projects_package_of_the_name_is_told_of(monkeypatch, tmp_path):
    ours = weft_package()
    assert ours.level == "ok" and str(Path(weft.__file__).parent) in ours.text
    tasks = installed(tmp_path, "Durable tasks", "https://example.com/weft")
    monkeypatch.setattr(sys, "path", [tasks, *sys.path])
    theirs = weft_package()
    assert theirs.level == "wrong"
    assert "weft 0.9.118 is installed, which is another project's (Durable tasks)" in theirs.text
    assert theirs.remedy.startswith("pip uninstall weft weft-collectives")


def test_a_checkout_that_was_installed_by_the_old_name_is_no_strangers(monkeypatch, tmp_path):
    before = installed(tmp_path, "Sparse", "https://github.com/weft-collectives/weft")
    monkeypatch.setattr(sys, "path", [before, *sys.path])
    assert weft_package().level == "ok"


def test_a_device_that_is_not_there_is_not_called_ok(monkeypatch):
    """torch's build for CUDA names one on a machine without a GPU, unless it is asked to look."""

    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert not [each for each in look(look_ahead()) if each.what.startswith("device")]


def test_every_pair_is_measured_and_all_know_it():
    everywhere = run(3, lambda group: measure(group, 10_000))
    assert everywhere[0] == everywhere[1] == everywhere[2]
    assert [(pair.low, pair.high) for pair in everywhere[0]] == [(0, 1), (0, 2), (1, 2)]
    assert all(pair.round_trip > 0 and pair.bandwidth > 0 for pair in everywhere[0])


def of_kind(near, slow_one, *others):
    speeds = [1e9 * slow_one, 1e9, 1e9]
    return [Pair(*ranks, 1e-4, speed, near) for ranks, speed in zip(others, speeds, strict=True)]


def test_a_slow_pair_is_pointed_out():
    pairs = of_kind(False, 0.1, (0, 2), (0, 1), (1, 2))
    (finding,) = slow(pairs)
    assert (finding.what, finding.text) == (
        "ranks 0 and 2",
        "0.80 Gbit/s, where pairs of two hosts usually have 8.00 Gbit/s",
    )
    assert "cables and switch" in finding.remedy and "WEFT_INTERFACE" in finding.remedy
    assert not [*slow(pairs[:2])]


def test_no_cable_is_blamed_for_ranks_of_one_host():
    (finding,) = slow(of_kind(True, 0.1, (0, 2), (0, 1), (1, 2)))
    assert "where pairs of one host usually have 8.00 Gbit/s" in finding.text
    for word in ("cable", "switch", "INTERFACE"):
        assert word not in finding.remedy
    assert "no network is between them" in finding.remedy and "cores" in finding.remedy


def test_a_network_is_not_called_slow_beside_memory():
    near = [pair._replace(bandwidth=1e11) for pair in of_kind(True, 1, (0, 1), (0, 2), (1, 2))]
    assert not [*slow([*near, *of_kind(False, 1, (0, 3), (1, 3), (2, 3))])]


def test_more_ranks_than_cores_are_told_of():
    (few,), (many,) = crowded(1), crowded(100_000)
    assert few.level == "ok" and many.level == "note"
    assert "for the 100000 ranks of this host" in many.text and "start at most" in many.remedy


def test_under_a_launcher_the_ranks_meet_and_are_measured():
    findings, pairs, in_force = launch(2, network, [None, 20.0, 10_000])[1]
    assert "rank 1 of 2, timeout" in in_force
    assert [finding.level for finding in findings[:2]] == ["ok", "ok"]
    assert findings[1].text == "host 0: ranks [0, 1]"
    assert findings[2].what == "cores" and "the 2 ranks of this host" in findings[2].text
    assert len(pairs) == 1 and pairs[0].near


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd is Linux's")
def test_whether_ranks_of_this_host_share_memory_is_said():
    ahead = look_ahead()
    (finding,) = [each for each in look(ahead) if each.what == "memory"]
    assert finding.level == "ok" and "share up to" in finding.text
    ahead.shared = 0
    (finding,) = [each for each in look(ahead) if each.what == "memory"]
    assert finding.level == "note" and "seccomp" in finding.remedy
