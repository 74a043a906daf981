"""The command line of `weft bench`: what it takes, what it prints and writes, its exit status."""

import json
import shlex
from typing import Any

import pytest

from weft import cli
from weft.cli.bench import command
from weft.cli.bench.cases import CASES, Case
from weft.cli.bench.measure import Result
from weft.testing import launch


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def invoke(options=""):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *shlex.split(options)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


Asked = list[tuple[int, tuple[Any, ...]]]


@pytest.fixture
def asked(monkeypatch):
    """What would have been launched: on how many ranks, and with what."""
    jobs = []

    def launched(ranks, target, args):
        jobs.append((ranks, args))
        return [[]] * ranks

    monkeypatch.setattr(command, "launch", launched)
    return jobs


def test_the_usual_job(asked):
    assert invoke() == 0
    [(ranks, (cases, names, iters, _, unprivileged))] = asked
    assert [case.name for case in cases] == ["zipf", "small", "full"] and ranks == 4
    assert names == ("weft:auto", "torch", "horovod", "dense")
    assert iters == 5 and not unprivileged
    assert invoke("--case all") == 0
    assert asked[1][1][0] == tuple(CASES.values())


def test_options_reach_the_job(asked):
    given = "--case zipf,full --ranks 3 --algorithm all --peers none --iters 2 --unprivileged"
    assert invoke(given) == 0
    [(ranks, (cases, names, iters, _, unprivileged))] = asked
    assert ranks == 3 and iters == 2 and unprivileged
    assert [case.name for case in cases] == ["zipf", "full"]
    assert {"weft:auto", "weft:gather", "weft:split", "weft:doubling"} <= {*names}
    assert not {"torch", "dense"} & {*names}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--case uniform --rows 7 --height 70", Case("uniform", 7, 70)),
        ("--case zipf --rows 9 --height 5 --width 1", Case("zipf", 9, 5, 1, "zipf")),
        ("--case wide --rows 7", Case("wide", 7, 100_000, 1024)),
    ],
)
def test_own_sizes(given, expected, asked):
    assert invoke(given) == 0
    assert asked[0][1][0] == (expected,)


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 0), ("refused", 0), ("wrong", 1), ("failed", 1)]
)
def test_the_exit_status_tells_whether_weft_failed(monkeypatch, status, code):
    found = [Result("zipf", "weft:auto", status)]
    monkeypatch.setattr(command, "launch", lambda *_: [found, found])
    assert invoke() == code


def cells(line):
    return line.split()


def test_columns_are_split_by_white_space(capsys):
    ours = Result("zipf", "weft:auto", seconds=[0.1, 0.2, 0.4], algorithm="split")
    ours.sent_bytes, ours.bound_bytes = 51e6, 34_000_000
    torch = Result("zipf", "torch", seconds=[0.5, 0.6, 0.7])
    dense = Result("zipf", "dense", "refused", "too large")
    command.show([ours, torch, dense])
    first, second, third, why = capsys.readouterr().out.splitlines()
    assert cells(first) == ["zipf", "weft:auto", "split", "200", "51.0", "1.50", "3.00", "-", "-"]
    assert cells(second) == ["zipf", "torch", "600", "-", "-", "1.00", "-", "-"]
    assert cells(third) == ["zipf", "dense", "REFUSED", *"-----"]
    assert why == "# zipf dense refused: too large"
    assert max(map(len, (first, second, third))) <= 88


def test_it_launches_measures_prints_and_writes(tmp_path, programs):
    file = tmp_path / "found.json"
    given = "--ranks 2 --case small,full --rows 20 --height 900 --iters 2 --algorithm auto,split"
    code = "import runpy; runpy.run_module('weft', run_name='__main__')"
    program = programs(code, "bench", *given.split(), "--json", str(file))
    out, err = program.communicate()
    assert (program.returncode, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if not line.startswith("#")]
    by = ["weft:auto", "weft:split", "torch", "horovod", "dense"]
    assert [line[:2] for line in lines] == [[case, one] for case in ("small", "full") for one in by]
    (title,) = [line for line in out.splitlines() if line.startswith("#case")]
    assert title[1:].split()[-3:] == ["torch/x", "horovod/x", "dense/x"]
    assert "cores, load" in out.splitlines()[0]
    found = json.loads(file.read_text())
    assert found["version"] == command.VERSION == 4 and "torch" in found["about"]
    assert [(row["case"], row["by"], row["status"]) for row in found["rows"]] == [
        (case, one, "ok") for case in ("small", "full") for one in by
    ]
    fields = "case by status why digest seconds algorithm sent_bytes bound_bytes"
    assert [*found["rows"][0]] == fields.split()  # who changes one also changes the version


def as_a_rank(given):
    """The command in a process that a launcher has told its rank."""
    return invoke(given)


def test_under_a_launcher_each_process_is_a_rank(tmp_path, programs):
    file = tmp_path / "found.json"
    place = shlex.quote(str(file))
    given = f"--case small --rows 20 --height 900 --iters 1 --peers torch --json {place}"
    assert launch(2, as_a_rank, (given,)) == [0, 0]
    assert len(json.loads(file.read_text())["rows"]) == 2  # which one of them wrote
