"""`benchmarks/choice.py`: a choice that is not the quickest is called so."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

MEASURED = "2026-11-21 with commit 4b15643, torch 2.13"


@pytest.fixture
def choice(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("benchmarks/choice.py")


def a_file(out: Path, link: str, case: str, chosen: str, auto: float, **others: float) -> None:
    rows = [{"by": "weft:mask", "status": "refused", "why": "no height", "median_seconds": None}]
    for name, seconds in {"auto": auto, **others}.items():
        ran = chosen if name == "auto" else name
        row = {"by": f"weft:{name}", "algorithm": ran, "median_seconds": seconds}
        rows.append(row | {"status": "ok"})
    (out / f"{link}-{case}.json").write_text(json.dumps({"rows": rows, "measured": MEASURED}))


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    a_file(tmp_path, "4x1gbit", "zipf", "split", 1.1, split=1.04, gather=1.0)
    a_file(tmp_path, "one-host", "wide", "split", 2.4, split=2.5, gather=2.0)
    a_file(tmp_path, "one-host", "small", "eager", 0.5, split=0.6)
    return tmp_path


def test_the_best_is_what_was_quickest(choice: ModuleType, measured: Path) -> None:
    small, wide, zipf = choice.choices(measured)  # in the order of links, then of cases
    assert zipf.best == "gather" and zipf.ratio == pytest.approx(1.1)
    assert wide.ratio == pytest.approx(1.2) and small.best == "eager" and small.ratio == 1.0
    assert "MORE" not in zipf.line() and "MORE THAN 1.15" in wide.line()


def test_a_table_has_the_ratios_and_the_words_what_is_beyond(
    choice: ModuleType, measured: Path
) -> None:
    found = choice.choices(measured)
    assert choice.summary(found).splitlines() == [
        "`auto` is within 5 % of the best in 1 of the 3 cases, and within 15 % in 2.",
        "Beyond that: `wide` on one-host (1.20 of `gather`).",
        f"Measured {MEASURED}: one-host, 4x1gbit.",
    ]
    assert choice.table(found).splitlines() == [
        "| | one-host | 4x1gbit |",
        "|---|---|---|",
        "| small | eager 1.00 | - |",
        "| wide | split 1.20 | - |",
        "| zipf | - | split 1.10 |",
    ]
