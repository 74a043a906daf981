"""The command line of `weft bench`: what it takes, what it refuses, and its exit status."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from weft.base.pace import patient
from weft.cli.bench import command
from weft.cli.bench.cases import CASES, Case
from weft.cli.bench.measure import Job
from weft.cli.commands import app
from weft.testing import launch


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def invoke(options: str = "") -> Result:
    return CliRunner().invoke(app, ["bench", *options.split()])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, int]]:
    """The jobs that would have been launched, and on how many ranks."""
    jobs: list[tuple[Job, int]] = []

    def launched(
        ranks: int, target: object, args: tuple[Job, object], **more: object
    ) -> list[bool]:
        jobs.append((args[0], ranks))
        return [True] * ranks

    monkeypatch.setattr(command, "launch", launched)
    return jobs


def test_the_usual_job(asked: list[tuple[Job, int]]) -> None:
    assert invoke().exit_code == 0
    [(job, ranks)] = asked
    assert [case.name for case in job.cases] == ["zipf", "small", "full"] and ranks == 4
    assert job.algorithms == ("auto",) and job.peers == ("torch", "horovod", "dense")
    assert job.checked and job.link is None and job.iters == 5
    assert invoke("--case all").exit_code == 0
    assert asked[1][0].cases == tuple(CASES.values())


def test_options_reach_the_job(asked: list[tuple[Job, int]]) -> None:
    given = "--case zipf,full --size 0.1 --ranks 3 --algorithm all --peers none --link 250mbit"
    more = "--ids shuffled --no-check --seed 5 --iters 2 --warmup 0 --timeout 9 --op avg"
    assert invoke(f"{given} {more}").exit_code == 0
    [(job, ranks)] = asked
    assert ranks == 3 and job.peers == ()
    assert [case.name for case in job.cases] == ["zipf", "full"]
    assert [(case.rows, case.height) for case in job.cases] == [(5000, 100_000), (6000, 10_000)]
    assert all(case.ids == "shuffled" and case.op == "avg" for case in job.cases)
    assert {"auto", "gather", "split", "doubling", "holders"} <= set(job.algorithms)
    assert (job.link, job.seed, job.iters, job.warmup, job.timeout) == (250e6, 5, 2, 0, 9.0)
    assert not job.checked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--rows 7 --height 70", Case("own", 7, 70)),
        ("--height 70 --density 0.1 --width 1", Case("own", 7, 70, width=1)),
        ("--rows 7 --density 0.1", Case("own", 7, 70)),
        (
            "--rows 9 --height 5 --distribution zipf --dtype int8 --index-dtype int32",
            Case("own", 9, 5, distribution="zipf", dtype="int8", index_dtype="int32"),
        ),
        ("--case wide --rows 7 --values normal", Case("wide", 7, 100_000, 1024, values="normal")),
        ("--rows 7 --height 9 --wire-dtype bfloat16", Case("own", 7, 9, wire_dtype="bfloat16")),
    ],
)
def test_own_sizes(given: str, expected: Case, asked: list[tuple[Job, int]]) -> None:
    assert invoke(given).exit_code == 0
    assert asked[0][0].cases == (expected,)


def test_wrong_results_are_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "launch", lambda *_, **__: [True, False])
    assert invoke().exit_code == 1


def test_it_launches_measures_prints_and_writes(tmp_path: Path) -> None:
    file, sheet = tmp_path / "found.json", tmp_path / "found.csv"
    given = "--ranks 2 --case small,full --size 0.02 --iters 2 --warmup 0 --algorithm auto,split"
    result = invoke(f"{given} --wire-dtype bfloat16 --json {file} --csv {sheet}")
    assert result.exit_code == 0, result.output
    assert "# wire_dtype bfloat16: of weft's calls; peers send values as they are" in result.stdout
    # where there is no terminal, a line for each case says what goes on and how long it will take
    [small, full] = re.findall(r"^weft bench: (.*)$", result.stderr, re.MULTILINE)
    assert small == "small, 0% done"
    assert re.fullmatch(r"full, \d+% done, about \d+ s left", full)
    lines = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == ["small"] * 5 + ["full"] * 5
    by = ["weft:auto", "weft:split", "torch", "horovod", "dense"]
    assert [line[3] for line in lines] == by * 2
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["version"] == 3
    assert [(row["ranks"], row["status"]) for row in found["rows"]] == [(2, "ok")] * 10
    assert {row["wire_dtype"] for row in found["rows"]} == {"bfloat16"}
    with sheet.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["version"], row["by"]) for row in rows] == [("3", name) for name in by * 2]
    for text, row in zip(rows, found["rows"], strict=True):
        assert {"version", *row} == set(text)
        assert all(
            text[name] == ("" if value is None else str(value)) for name, value in row.items()
        )


def as_a_rank(given: str) -> tuple[int, str, str]:
    """The command in a process that a launcher has told its rank."""
    result = invoke(given)
    return result.exit_code, result.stdout, result.stderr


def test_under_a_launcher_each_process_is_a_rank(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    given = "--case small --size 0.02 --iters 1 --peers torch --json"
    zero, one = launch(2, as_a_rank, (f"{given} {file}",), timeout=patient(50.0))
    assert zero[0] == 0 and one == (0, "", "")  # only rank 0 speaks
    lines = [line.split() for line in zero[1].splitlines() if not line.startswith("#")]
    assert [line[3] for line in lines] == ["weft:auto", "torch"]
    assert len(json.loads(file.read_text())["rows"]) == 2
