"""Benchmarks behind claims of the docs: `holders.py` counts what it says, `tables.py` judges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("case", "ranks"), [("uniform", 3), ("one has all", 4)])
def test_what_holders_sends_is_what_the_page_says(
    benchmark_file: Callable[[str], ModuleType], case: str, ranks: int
) -> None:
    """All of it: also what leads, and lists that come in the opening of the call."""
    page = (ROOT / "docs" / "holders.md").read_text(encoding="utf-8")
    assert benchmark_file("holders").line(case, ranks) in page.splitlines()


@pytest.mark.parametrize(
    ("ours", "said"), [(1.9, "1.90, at most 2.00: reached"), (2.1, "2.10, at most 2.00: NOT")]
)
def test_a_list_is_held_against_one_of_its_tables(
    benchmark_file: Callable[[str], ModuleType], ours: float, said: str
) -> None:
    line, reached = benchmark_file("tables").verdict({"list": [9.0, ours, 0.1], "one": [1.0]})
    assert said in line and reached == (ours < 2)
