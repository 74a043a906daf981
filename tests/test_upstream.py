"""What lies ready for other projects (tools/upstream): a text each, and a short program that runs.

Not run here: gloo_names.py, which is to crash, and python_backend.py, for torch 2.14 and later.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "tools/upstream"
TEXTS = sorted(FOLDER.glob("*.md"))


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_a_text_has_a_program_that_is_read_in_a_minute(text):
    program = text.with_suffix(".py")
    assert f"`{program.name}`" in text.read_text("utf-8")
    lines = program.read_text("utf-8").splitlines()
    assert len([line for line in lines if line and not line.startswith('"""')]) <= 20


@pytest.mark.parametrize(
    "name, ranks", [("ddp_divides_in_place", 2), ("sparse_all_reduce", 2), ("uneven_shards", 3)]
)
def test_a_program_prints_what_its_text_says(programs, port, name, ranks):
    place = {"WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    place["CUDA_VISIBLE_DEVICES"] = ""  # as in the texts: on the CPU
    source = (FOLDER / f"{name}.py").read_text("utf-8")
    started = []
    for rank in range(ranks):
        own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "OMP_NUM_THREADS": "1"}
        started.append(programs(source, env={**os.environ, **place, **own}))
    text = (FOLDER / f"{name}.md").read_text("utf-8")
    for each in started:
        out, err = each.communicate()
        assert each.returncode == 0, err
        assert out and all(line in text.splitlines() for line in out.splitlines())
