"""`weft plan`: what it predicts, and what it refuses."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from weft.cli.bench.cases import Case
from weft.cli.plan.command import plan
from weft.cli.plan.predict import Sizes, drawn, recorded
from weft.sparse import ALGORITHMS
from weft.sparse.link import Figures, Profile, write

APP = typer.Typer()
APP.command()(plan)


def invoke(*given: str) -> Result:
    return CliRunner().invoke(APP, list(given))


def lines(result: Result) -> list[list[str]]:
    """Of the tables that say what is chosen."""
    words = [line.split() for line in result.stdout.splitlines()]
    return [line for line in words if len(line) == 7 and line[2] in {"eager", *ALGORITHMS}]


def said(result: Result) -> str:
    return " ".join(re.sub("[│╭╰╮╯─]", " ", result.stderr).split())


def test_a_line_for_each_number_of_ranks_to_thousands() -> None:
    result = invoke("--case", "uniform,zipf", "--link", "1gbit,100gbit")
    assert result.exit_code == 0, result.output
    assert [line[0] for line in lines(result)] == [str(2**power) for power in range(1, 13)] * 4
    titles = [line.split() for line in result.stdout.splitlines() if line.startswith("ranks")]
    assert titles[1::2] == [["ranks", *ALGORITHMS]] * 4


def test_ranks_of_a_host_share_its_link() -> None:
    given = ("--case", "identical", "--ranks", "4096", "--link", "1gbit")
    [alone], [shared] = lines(invoke(*given)), lines(invoke(*given, "--per-host", "8"))
    assert alone[2] != "hierarchical" and shared[2] == "hierarchical"


WINS = {  # a case of each algorithm: the case, the link, ranks, ranks of a host
    "dense_tail": ("full", "1gbit", "8", "1"),
    "doubling": ("full", "10gbit", "2048", "1"),
    "gather": ("uniform", "1gbit", "2", "1"),
    "hierarchical": ("identical", "10gbit", "512", "8"),
    "holders": ("uniform", "1gbit", "16", "1"),
    "mask": ("identical", "1gbit", "256", "1"),
    "ring": ("identical", "1gbit", "8", "1"),
    "split": ("uniform", "10gbit", "16", "1"),
}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_each_algorithm_is_planned_where_the_manual_says(name: str) -> None:
    case, link, ranks, per_host = WINS[name]
    given = ("--case", case, "--link", link, "--ranks", ranks, "--per-host", per_host)
    [line] = lines(invoke(*given))
    assert line[2] == name


def test_where_nothing_keeps_within_the_workspace_what_needs_least_is_planned() -> None:
    wide = ("--rows", "100", "--height", "8192", "--width", "100000", "--ranks", "65536")
    [line] = lines(invoke(*wide, "--link", "1gbit"))
    assert line[2] in ALGORITHMS


def test_few_rows_are_eager_and_many_ranks_take_few_messages() -> None:
    result = invoke("--rows", "10", "--height", "1000", "--ranks", "4,256", "--link", "1gbit")
    assert [line[2] for line in lines(result)] == ["eager", "doubling"]


def test_figures_and_a_plot_are_written(tmp_path: Path) -> None:
    figures = tmp_path / "plan.json"
    for picture, begins in (("plan.svg", b"<?xml"), ("plan.png", b"\x89PNG")):
        result = invoke(
            *("--ranks", "2,64", "--link", "1gbit", "--json", str(figures)),
            *("--plot", str(tmp_path / picture)),
        )
        assert result.exit_code == 0, result.output
        assert (tmp_path / picture).read_bytes().startswith(begins)
    few, many = json.loads(figures.read_text())
    assert (few["ranks"], many["ranks"]) == (2, 64)
    assert few["union"] < many["union"] <= 1_000_000
    for one in (few, many):
        assert {line["algorithm"] for line in one["algorithms"]} >= set(ALGORITHMS)
        [chosen] = [line for line in one["algorithms"] if line["verdict"] == "chosen"]
        assert chosen["algorithm"] == one["chosen"]
        serving = [line for line in one["algorithms"] if line["verdict"].startswith("predicted")]
        assert all(chosen["milliseconds"] <= line["milliseconds"] for line in serving)


def of(distribution: str, rows: int, height: int) -> Sizes:
    return drawn(Case("own", rows, height, width=1, distribution=distribution))


def test_expected_unions() -> None:
    uniform = of("uniform", 100, 1000)
    assert uniform.union(1) == pytest.approx(100)
    assert uniform.union(2) == pytest.approx(190)
    same = of("identical", 100, 1000)
    assert same.union(64) == 100
    text = of("zipf", 100, 1000)
    assert text.rows < 100  # duplicates
    assert text.rows < text.union(4) < 4 * text.rows
    assert text.union(100_000) == pytest.approx(1000, rel=0.01)
    two = of("zipf", 2, 2)  # of chances 2/3 and 1/3
    assert two.rows == pytest.approx(1 - 1 / 9 + 1 - 4 / 9)
    chances = 1 / torch.arange(1, 3_000_001, dtype=torch.float64)
    chances = -torch.log1p(-chances / chances.sum())
    for draws in (1000, 3_000_000):  # rare rows are put together: a table may be larger than memory
        large = of("zipf", draws, 3_000_000)
        for ranks in (1, 64):
            exact = -torch.expm1(-draws * ranks * chances).sum().item()
            assert large.union(ranks) == pytest.approx(exact, rel=1e-6)
    assert 900 < of("zipf", 1000, 1 << 62).rows < 1000
    load = text.load(8)
    assert load.most <= load.union <= load.total == 8 * load.most


MINE = asdict(Case("mine", 400, 5000, width=8, dtype="bfloat16"))
ROW = {"case": "mine", "distinct": 400.0, "total": 1600, "union": 1000, "setting": MINE}


def test_a_recorded_run_says_the_overlap(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"head": {"ranks": 4}, "rows": [ROW, ROW]}))
    [sizes] = recorded(file)
    assert (sizes.row, sizes.partial, sizes.rows) == (16, 32, 400.0)
    assert sizes.union(4) == pytest.approx(1000, rel=1e-3)
    assert 400 < sizes.union(2) < 1000 < sizes.union(16)
    result = invoke("--record", str(file), "--ranks", "4,32")
    assert result.exit_code == 0, result.output
    assert [line[0] for line in lines(result)] == ["4", "32"] * 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"distinct": -4.0}, "do not go together"),
        ({"union": 300}, "do not go together"),
        ({"union": 5001, "total": 5100}, "do not go together"),
        ({"total": 100_000}, "do not go together"),
        ({"distinct": float("nan")}, "do not go together"),
        ({"distinct": None}, "TypeError"),
        ({"setting": MINE | {"dtype": "nope", "width": 8, "op": "sum"}}, "nope"),
        ({"setting": MINE | {"dtype": "Tensor", "width": 8, "op": "sum"}}, "TypeError"),
        ({"setting": MINE | {"dtype": "float32", "width": 8, "op": "nope"}}, "nope"),
        ({"setting": MINE | {"dtype": "float32", "width": 0, "op": "sum"}}, "do not go together"),
        ({"union": 10**400}, "do not go together"),
        ({"distinct": 10**400}, "OverflowError"),
        ({"ranks": 0}, "of 0 ranks"),
        ({"ranks": 1}, "says nothing of how several overlap"),
        ({"rows": []}, "is a record without a case"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    head = {"ranks": changed.pop("ranks", 4)}
    rows = changed.pop("rows", [ROW | changed])
    file.write_text(json.dumps({"head": head, "rows": rows}))
    result = invoke("--record", str(file))
    assert result.exit_code == 2, result.output
    assert words in said(result)


def test_ranks_that_are_all_on_one_host_have_no_link(tmp_path: Path) -> None:
    result = invoke("--per-host", "8", "--ranks", "2,8,9,64", "--link", "1gbit")
    assert [line[0] for line in lines(result)] == ["9", "64"]
    assert result.stdout.endswith("left out, since all are on one host: 2, 8 ranks\n")
    within = Figures(1e-4, 4e-9, 2e-5)
    write(tmp_path / "profile.json", Profile((), 4, None, within, 1e-10))
    given = ("--profile", str(tmp_path / "profile.json"), "--ranks", "4")
    result = invoke(*given, "--case", "uniform", "--json", str(tmp_path / "plan.json"))
    [one] = json.loads((tmp_path / "plan.json").read_text())
    verdicts = {line["algorithm"]: line["verdict"] for line in one["algorithms"]}
    assert verdicts["hierarchical"] == "all ranks are on one host"


def test_a_table_that_is_too_wide_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"\x1b\[[0-9;]*m", "", invoke("--ranks", "4,4096", "--link", "1gbit").stdout)
    tables = text[text.index("ranks") : text.index("ms, and")]
    assert all(len(line) <= 80 for line in tables.splitlines()) and "…" not in tables


def test_what_is_refused_leaves_no_file(tmp_path: Path) -> None:
    for flag, name in (("--json", "plan.json"), ("--plot", "plan.svg")):
        assert invoke(flag, str(tmp_path / name), "--rows", "0").exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--case", "nope"], "unknown 'nope': there is uniform, zipf"),
        (["--ranks", "1,2"], "1,2: numbers from 2 to 65536"),
        (["--ranks", "many"], "many: numbers"),
        (["--per-host", "0"], "--per-host"),
        (["--link", "fast"], "'fast' is no speed"),
        (["--latency", "0"], "--latency"),
        (["--distribution", "flat"], "--distribution"),
        (["--dtype", "float"], "--dtype"),
        (["--rows", "9", "--height", "4"], "9 distinct rows do not fit"),
        (["--plot", "x.pdf"], "ends in .png or .svg"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
        (["--record", "/nowhere/x.json"], "/nowhere/x.json cannot be read"),
        (["--record", "pyproject.toml"], "pyproject.toml is no record of weft bench --json"),
        (["--record", "x", "--rows", "4"], "it says the sizes"),
        (["--profile", "x", "--link", "1gbit"], "it says the figures"),
        (["--per-host", "8", "--ranks", "2,8"], "all of --ranks 2,8 are on one host"),
        (["--width", str(2**41)], "--width"),
        (["--profile", "pyproject.toml"], "pyproject.toml is no link profile"),
    ],
)
def test_refused_with_status_2(given: list[str], words: str) -> None:
    result = invoke(*given)
    assert result.exit_code == 2
    assert words in said(result) and result.stdout == ""
