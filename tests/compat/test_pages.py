"""The manual's pages of the three faces work under a launcher as they do alone, where test_docs
runs them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from weft.bootstrap.local import launch

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"(<!-- not run.*-->\n)?```python\n(.*?)```", re.DOTALL)


def run_page(page, folder):
    """A page's blocks, one after the other; how many there are."""
    os.chdir(folder)
    blocks = [
        code for skipped, code in BLOCK.findall((DOCS / page).read_text("utf-8")) if not skipped
    ]
    space = {"__name__": page}
    for code in blocks:
        exec(code, space)
    return len(blocks)


@pytest.mark.parametrize(
    "page", ["coming-from-oneccl.md", "coming-from-sar.md", "coming-from-distdl.md"]
)
def test_a_page_runs_on_two_ranks(page, tmp_path):
    one, other = launch(2, run_page, (page, str(tmp_path)), env={"OMP_NUM_THREADS": "1"})
    assert one == other >= 3
