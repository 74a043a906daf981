"""The types that weft promises: mypy reads right and wrong uses of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from weft.base.pace import patient

ROOT = Path(__file__).resolve().parent.parent
USES = ROOT / "tests/typing_uses.py"

# weft, and of torch what the uses name: to read all that either imports takes half a minute. What
# mypy does not read is Any, which no `assert_type` takes for a class.
READ = """
[mypy]
follow_imports = skip
[mypy-weft.*,torch,torch._C.*,torch._tensor,torch.distributed,torch.distributed.distributed_c10d]
follow_imports = normal
[mypy-torch.distributed.*]
implicit_reexport = true
"""


def test_mypy_takes_right_uses_and_refuses_each_wrong_one(tmp_path):
    (tmp_path / "mypy.ini").write_text(READ)
    line = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", f"--cache-dir={os.devnull}"]
    line += ["--config-file", str(tmp_path / "mypy.ini"), str(USES)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=patient(450.0))
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
