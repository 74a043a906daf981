"""`benchmarks/choice.py`: a choice that is not the quickest is called so, here and in the page."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import typer

MEASURED = "2026-11-21 with commit 4b15643, torch 2.13"


@pytest.fixture
def choice(benchmark_file: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_file("choice")


def a_file(out: Path, link: str, case: str, chosen: str, auto: float, **others: float) -> None:
    rows = [{"name": "weft:auto", "chosen": chosen, "median": auto, "status": "ok"}]
    rows += [
        {"name": f"weft:{name}", "chosen": name, "median": seconds, "status": "ok"}
        for name, seconds in others.items()
    ]
    rows.append({"name": "weft:mask", "status": "refused", "why": "no height", "median": None})
    (out / f"{link}-{case}.json").write_text(json.dumps({"rows": rows, "measured": MEASURED}))


def test_the_best_is_what_was_quickest(choice: ModuleType, tmp_path: Path) -> None:
    a_file(tmp_path, "4x1gbit", "zipf", "split", 1.05, split=1.04, gather=1.0)
    a_file(tmp_path, "one-host", "wide", "split", 2.4, split=2.5, gather=2.0)
    a_file(tmp_path, "one-host", "small", "eager", 0.5, split=0.6)
    small, wide, zipf = choice.choices(tmp_path)  # in the order of links, then of cases
    assert zipf.best == "gather" and zipf.ratio == pytest.approx(1.05)
    assert "MORE" not in zipf.line()
    assert wide.ratio == pytest.approx(1.2) and "MORE THAN 1.10" in wide.line()
    assert small.best == "eager" and small.ratio == 1.0


def test_the_page_says_where_it_is_not_good(choice: ModuleType, tmp_path: Path) -> None:
    a_file(tmp_path, "4x1gbit", "zipf", "split", 1.05, split=1.04, gather=1.0)
    a_file(tmp_path, "4x1gbit", "uniform", "split", 1.08, split=1.04, gather=1.0)
    a_file(tmp_path, "one-host", "wide", "split", 2.4, split=2.5, gather=2.0)
    words = choice.summary(choice.choices(tmp_path)).splitlines()
    assert words == [
        "`auto` is within 5 % of the best in 1 of the 3 cases, and within 10 % in 2.",
        "Beyond that: `wide` on one-host (1.20 of `gather`).",
        f"Measured {MEASURED}: one-host, 4x1gbit.",
    ]


def test_a_wrong_result_ends_it(choice: ModuleType, tmp_path: Path) -> None:
    row = {"name": "weft:ring", "status": "wrong", "why": "rank 2: off", "median": None}
    (tmp_path / "one-host-zipf.json").write_text(json.dumps({"rows": [row], "measured": MEASURED}))
    with pytest.raises(typer.Exit):
        choice.choices(tmp_path)


def test_the_page_gets_tables_and_a_picture(choice: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    a_file(tmp_path, "4x1gbit", "zipf", "split", 1.05, split=1.04, gather=1.0)
    page = tmp_path / "choice.md"
    page.write_text("before\n<!-- figures -->\nold\n<!-- /figures -->\nafter\n")
    choice.publish(choice.choices(tmp_path), page)
    text = page.read_text()
    assert "| zipf | 1.05e+03 | **1.04e+03** | 1e+03 | 1.05 |" in text
    assert "best in 1 of the 1 cases, and within 10 % in 1.\nMeasured 2026-11-21 with" in text
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "</svg>" in (tmp_path / "images" / "choice.svg").read_text()
