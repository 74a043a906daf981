"""A benchmark behind a claim: `holders.py` counts what its note says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("case", "ranks"), [("uniform", 4), ("one has all", 8)])
def test_what_holders_sends_is_what_the_note_says(
    script: Callable[[str], ModuleType], case: str, ranks: int
) -> None:
    """All of it: also what leads, and lists that come in the opening of the call."""
    note = (ROOT / "benchmarks" / "notes" / "holders.md").read_text(encoding="utf-8")
    cells = script("benchmarks/holders.py").line(case, ranks).strip("| ").split(" | ")
    assert f"| {' | '.join(cells[:2] + cells[5:])} |" in note.splitlines()
