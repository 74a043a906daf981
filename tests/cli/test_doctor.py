"""`weft doctor`: what it finds, and that it says what to type."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from weft.bootstrap.local import launch
from weft.cli import app
from weft.cli.doctor import Pair, _network, apart, look, measure, slow
from weft.testing import run
from weft.testing.threads import on_wires
from weft.wire import lent
from weft.wire.threads import group


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_INTERFACE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SAR_SOCKET_NAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def wrong():
    return [finding for finding in look() if finding.level == "wrong"]


def test_alone_all_is_well():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    for text in ("versions: weft ", "interface lo: 127.0.0.1", "backend gloo: gloo", "1 ranks"):
        assert text in done.output
    assert "wrong" not in done.output


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


def test_every_pair_is_measured_and_all_know_it():
    everywhere = run(3, lambda wire: measure(wire, 10_000))
    assert everywhere[0] == everywhere[1] == everywhere[2]
    assert [(pair.low, pair.high) for pair in everywhere[0]] == [(0, 1), (0, 2), (1, 2)]
    assert all(pair.round_trip > 0 and pair.bandwidth > 0 for pair in everywhere[0])


def test_a_slow_pair_is_pointed_out():
    pairs = [Pair(0, 1, 1e-4, 1e9), Pair(0, 2, 1e-4, 1e8), Pair(1, 2, 1e-4, 1e9)]
    (finding,) = slow(pairs)
    assert (finding.what, finding.text) == (
        "ranks 0 and 2",
        "0.8 Gbit/s, where pairs usually have 8 Gbit/s",
    )
    assert slow(pairs[:2]) == []


def test_under_a_launcher_the_ranks_meet_and_are_measured():
    findings, rank, pairs = launch(2, _network, [None, 20.0, 10_000])[1]
    assert [finding.level for finding in findings[:2]] == ["ok", "ok"]
    assert findings[1].text == "host 0: ranks [0, 1]"
    assert (rank, len(pairs)) == (1, 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Yama is Linux's")
@pytest.mark.parametrize(
    ("scope", "capabilities", "level", "said", "remedy"),
    [
        (None, 0, "ok", "(no kernel.yama)", ""),
        (0, 0, "ok", "(kernel.yama.ptrace_scope=0)", ""),
        (1, 0, "note", "kernel.yama.ptrace_scope=1 keeps ranks", "sudo sysctl kernel.yama."),
        (1, 1 << 19, "ok", "=1, and this process has CAP_SYS_PTRACE", ""),
        (2, ~(1 << 19) & 0xFFFFFFFF, "note", "over TCP", "--cap-add SYS_PTRACE"),
        (2, 1 << 19, "ok", "CAP_SYS_PTRACE", ""),
        (3, 0xFFFFFFFF, "note", "=3 keeps ranks", "start the host again"),
    ],
)
def test_a_kernel_that_forbids_reading_other_ranks_is_noted(
    tmp_path, monkeypatch, scope, capabilities, level, said, remedy
):
    setting, status = tmp_path / "ptrace_scope", tmp_path / "status"
    monkeypatch.setattr(lent, "_YAMA", setting)
    monkeypatch.setattr(lent, "_STATUS", status)
    if scope is not None:
        setting.write_text(f"{scope}\n")
    status.write_text(f"Name:\tpython\nCapPrm:\tffffffff\nCapEff:\t{capabilities:016x}\n")
    (finding,) = [each for each in look() if each.what == "memory"]
    assert finding.level == level
    assert said in finding.text
    assert remedy in finding.remedy and bool(remedy) == bool(finding.remedy)


def test_ranks_of_one_host_that_cannot_read_each_other_are_named(monkeypatch):
    for hosts, named in ((["here"] * 4, "ranks 0, 1, 2, 3"), (["a", "b", "a", "c"], "ranks 0, 2")):
        assert on_wires(group(4, hosts=hosts), apart)[0].value == []
        with monkeypatch.context() as patched:
            patched.setattr(lent.Reach, "of", lambda card, host: None)
            outcomes = on_wires(group(4, hosts=hosts), apart)
        assert [[each.what for each in outcome.value] for outcome in outcomes] == [[named]] * 4
