"""The types that weft promises: mypy reads right and wrong uses of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USES = ROOT / "tests/typing_uses.py"


def test_mypy_takes_right_uses_and_refuses_each_wrong_one() -> None:
    line = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", str(USES)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=450)
    found = set(re.findall(rf"{USES.name}:(\d+): error: .*\[([\w-]+)\]", done.stdout))
    lines = enumerate(USES.read_text("utf-8").splitlines(), 1)
    wanted = {
        (str(number), text.rpartition("# error: ")[2])
        for number, text in lines
        if "# error: " in text
    }
    # for an unknown argument mypy has two errors, in one line
    assert wanted <= found and len({line for line, _ in found}) == len(wanted), done.stdout
    assert len(wanted) >= 10
