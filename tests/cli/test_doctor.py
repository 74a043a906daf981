"""`weft doctor`: what it finds, and that it says what to type."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import weft
from weft import cli
from weft.bootstrap import look_ahead
from weft.cli import doctor
from weft.cli.doctor import links, look, network
from weft.sparse import Hosts
from weft.testing import launch, run


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    names = "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"
    for name in (*names.split(), "WEFT_INTERFACE", "SAR_SOCKET_NAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def ends(capsys):
    """The exit status and what was printed."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    return ended.value.code, capsys.readouterr().out


def wrong():
    return [text for level, text in look(look_ahead()) if level == "WRONG"]


def weft_package():
    return next(finding for finding in look(look_ahead()) if "imported from" in finding[1])


def test_alone_all_is_well(capsys):
    status, out = ends(capsys)
    assert status == 0, out
    for text in (
        "ok    weft 0.",
        "weft.init of 1 ranks took",
        "meeting at no place: it is alone",
        "ok    a call waits for other ranks for 300 s, unless weft.init(timeout=)",  # the default
        "in force:\nweft ",
    ):
        assert text in out
    assert re.search("^launched by +no launcher ", out, re.M)
    assert "WRONG" not in out


def test_what_is_wrong_ends_with_what_to_type(monkeypatch, capsys):
    assert not wrong()
    monkeypatch.setenv("WEFT_INTERFACE", "nothing7")
    (text,) = wrong()
    assert text.startswith("WEFT_INTERFACE=nothing7")
    assert text.endswith(": unset WEFT_INTERFACE, or name another")
    monkeypatch.delenv("WEFT_INTERFACE")
    monkeypatch.setenv("RANK", "0")
    (text,) = wrong()
    assert text.startswith("the environment has RANK=0 but no WORLD_SIZE: start with torchrun")
    status, out = ends(capsys)
    assert status == 1 and "WRONG the environment has RANK=0" in out


def test_what_an_installation_lacks_is_told_with_the_extra(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    notes = [text for level, text in look(look_ahead()) if level == "note"]
    assert "no rich, for weft demo: pip install 'weft-collectives[demo]'" in notes
    assert any(note.startswith("no numba, for ") for note in notes)


def installed(folder, summary, url):
    """A folder of packages, with a distribution called `weft` in it."""
    info = folder / "weft-0.9.118.dist-info"
    info.mkdir()
    lines = "Metadata-Version: 2.1", "Name: weft", "Version: 0.9.118", f"Summary: {summary}"
    (info / "METADATA").write_text("\n".join([*lines, f"Project-URL: Repository, {url}"]) + "\n")
    return str(folder)


def test_another_projects_package_of_the_name_is_told_of(monkeypatch, tmp_path):
    ours = weft_package()
    assert ours[0] == "ok" and str(Path(weft.__file__).parent) in ours[1]
    tasks = installed(tmp_path, "Durable tasks", "https://example.com/weft")
    monkeypatch.setattr(sys, "path", [tasks, *sys.path])
    level, text = weft_package()
    assert level == "WRONG"
    assert "weft 0.9.118 is installed, which is another project's (Durable tasks)" in text
    assert ": pip uninstall weft weft-collectives" in text


def test_a_checkout_that_was_installed_by_the_old_name_is_no_strangers(monkeypatch, tmp_path):
    before = installed(tmp_path, "Sparse", "https://github.com/weft-collectives/weft")
    monkeypatch.setattr(sys, "path", [before, *sys.path])
    assert weft_package()[0] == "ok"


def test_every_pair_is_measured_and_all_know_it():
    everywhere = run(3, lambda group: list(links(group)))
    assert everywhere[0] == everywhere[1] == everywhere[2]
    for (level, text), pair in zip(everywhere[0], ["(0, 1)", "(0, 2)", "(1, 2)"], strict=True):
        assert level in ("ok", "note")
        assert re.match(rf"ranks {re.escape(pair)}, one host: \S+ ms, \S+ Gbit/s", text)


def slow_pair(group, hosts):
    """What is said where ranks 0 and 2 take ten times as long to send much."""
    now = [0.0]

    def all_to_all(parts):
        to = [peer for peer, part in enumerate(parts) if len(part)]
        if to and len(parts[to[0]]) > 1:
            now[0] += 10.0 if {group.rank, *to} == {0, 2} else 1.0
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "hosts_of", lambda group: hosts)
        patch.setattr(doctor.time, "perf_counter", lambda: now[0])
        patch.setattr(weft, "all_to_all", all_to_all)
        patch.setattr(doctor, "_ROUNDS", 1)
        return list(links(group))


@pytest.mark.parametrize(
    ("hosts", "words", "others"),
    [
        (Hosts((0, 1, 2)), "two hosts: .* slow; see load, cables", ("keeps the host busy",)),
        (Hosts((0, 0, 0)), "one host: .* slow; see what keeps the host busy", ("cable", "INTERF")),
    ],
)
def test_a_slow_pair_is_pointed_out_and_no_cable_is_blamed_within_a_host(hosts, words, others):
    found = run(3, slow_pair, hosts, on="processes")[0]
    assert [level for level, _ in found] == ["ok", "note", "ok"]
    assert re.match(rf"ranks \(0, 2\), {words}", found[1][1])
    assert not any(word in found[1][1] for word in others)


def test_a_network_is_not_called_slow_beside_memory():
    """Ranks 0 and 1 share a host: the pairs of two hosts are compared with each other alone."""
    found = run(3, slow_pair, Hosts((0, 1, 0)), on="processes")[0]
    assert [level for level, _ in found] == ["ok"] * 3


def of_network():
    return list(network(None))


def test_under_a_launcher_the_ranks_meet_and_are_measured():
    findings = launch(2, of_network)[1]
    assert {level for level, _ in findings} == {"ok"}
    assert findings[0][1].startswith("weft.init of 2 ranks took")
    assert findings[1][1].startswith("ranks (0, 1), one host: ")


def test_who_does_not_come_is_told_of(monkeypatch):
    def init(**settings):
        assert settings["watch"] == 10.0  # says for whom it waits, long before it gives up
        raise weft.WireError("rank 1 did not come")

    monkeypatch.setattr(weft, "init", init)
    assert list(network(None)) == [("WRONG", "rank 1 did not come")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd is Linux's")
def test_whether_ranks_of_this_host_share_memory_is_said():
    ahead = look_ahead()
    (finding,) = [each for each in look(ahead) if each[1].startswith("memory")]
    assert finding[0] == "ok" and "share up to" in finding[1]
    ahead.shared = 0
    (finding,) = [each for each in look(ahead) if each[1].startswith("memory")]
    assert finding[0] == "note" and "seccomp" in finding[1]
