"""What the commands refuse: exit status 2, what is wrong and with which option, and no more."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli.commands import app


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bench --case uniform,nope", "unknown 'nope': choose from uniform, zipf, small"),
        ("bench --case ,", "unknown ',': choose from uniform"),
        ("bench --algorithm nope", "unknown 'nope': choose from auto, "),
        ("bench --peers mpi", "unknown 'mpi': choose from torch, horovod, dense"),
        ("bench --op mean", "--op"),
        ("bench --dtype float", "--dtype"),
        ("bench --distribution flat", "--distribution"),
        ("bench --ranks 0", "--ranks"),
        ("bench --iters 0", "--iters"),
        ("bench --size nan", "--size"),
        ("bench --density -1", "--density"),
        ("bench --density 2", "do not fit"),
        ("bench --rows 5 --height 9 --density 0.1", "two of the three"),
        ("bench --rows 20 --height 10", "20 distinct rows do not fit in a height of 10"),
        ("bench --link fast", "'fast' is not a speed: write it as 1gbit or 250mbit"),
        ("bench --json /nowhere/x.json", "/nowhere/x.json cannot be written"),
        ("demo --ranks 0", "--ranks"),
        ("demo --steps -1", "--steps"),
        ("demo --batch 0", "--batch"),
        ("demo --seed -3", "--seed"),
        ("demo --compare nccl", "--compare"),
        ("demo --text /no/such/text", "weft demo: no such file or folder: /no/such/text"),
        ("demo --text /dev/null", "weft demo: no words in /dev/null: 1 files"),
    ],
)
def test_refused_with_status_2(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 2
    assert words in " ".join(re.sub("[│╭╰╮╯─]", " ", result.stderr).split())
    assert result.stdout == "" or line.startswith("demo --text")
    assert {path.name for path in tmp_path.iterdir()} <= {"weft-demo"}


def test_a_launcher_decides_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = CliRunner().invoke(app, ["bench", "--ranks", "8"])
    assert result.exit_code == 2 and "the launcher started 4" in result.stderr
