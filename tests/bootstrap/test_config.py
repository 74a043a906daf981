"""`weft.config` says what is in force; `weft.init` says which variables mean nothing."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import weft
from weft.bootstrap.config import VARIABLES

ROOT = Path(__file__).resolve().parents[2]


def sources():
    return {each.name: each.source for each in weft.config().settings}


def test_it_knows_the_variables_that_the_manual_describes():
    table = (ROOT / "docs/sharp-bits.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(WEFT_[A-Z_]+)` \|", table, re.MULTILINE)) == VARIABLES


@pytest.mark.parametrize(
    ("variable", "said", "name", "value"),
    [
        ("WEFT_WIRE", "tcp", "wire", "tcp"),
        ("WEFT_WATCH", "30", "watch", "after 30 s"),
        ("WEFT_WATCH", "soon", "watch", "wrong: .*'soon'"),
        ("WEFT_INTERFACE", "lo", "listens at", r"127\.0\.0\.1 \(lo\)"),
        ("WEFT_INTERFACE", "none9", "listens at", "wrong: .*none9"),
        ("WEFT_ALGORITHM", "split", "algorithm", "split"),
        ("WEFT_KEEP", "7", "kept results", "7"),
    ],
)
def test_a_value_comes_from_its_variable(variable, said, name, value, monkeypatch):
    for each in VARIABLES:
        monkeypatch.delenv(each, raising=False)
    assert sources()[name] in ("default", "route")
    monkeypatch.setenv(variable, said)
    assert re.match(value, weft.config()[name])
    assert sources()[name] == variable
    with pytest.raises(KeyError):
        weft.config()["no such setting"]


def test_a_value_comes_from_an_argument_and_the_group_from_init():
    assert weft.config()["group"] == "none"
    with weft.init(timeout=7, wire="tcp", watch=30):
        found = weft.config()
        assert found["group"].startswith("rank 0 of 1, timeout 7 s, backend ")
        assert (found["wire"], found["watch"]) == ("tcp", "after 30 s")
        assert sources()["watch"] == "weft.init(watch=)"
    assert weft.config()["wire"] == "tcp"
    assert "wire " in str(weft.config())


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_mistyped_variable_is_told_of_by_one_rank_of_a_host(local_rank, monkeypatch, caplog):
    monkeypatch.setenv("WEFT_WRIE", "torch")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with weft.init():
        assert sources()["WEFT_WRIE"] == "unknown to weft: WEFT_WIRE was meant?"
    told = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    expected = "weft reads no variable WEFT_WRIE: WEFT_WIRE was meant?"
    assert told == ([expected] if local_rank == "0" else [])


def test_an_algorithm_that_is_none_is_refused_before_the_first_call(monkeypatch):
    monkeypatch.setenv("WEFT_ALGORITHM", "splt")
    with pytest.raises(weft.WeftError, match="WEFT_ALGORITHM=splt: algorithm 'splt' is unknown"):
        weft.init()
