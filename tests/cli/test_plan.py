"""`weft plan`: what it predicts, and what it refuses."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import weft
from weft.cli.bench.cases import CASES, Case
from weft.cli.commands import app
from weft.cli.pictures import ON_DARK
from weft.cli.plan.predict import Drawing, Named, drawn, predict, recorded
from weft.sparse import ALGORITHMS
from weft.sparse.rate import rate_of, set_rate
from weft.sparse.stages import in_stages
from weft.testing import run
from weft.wire import Link

ROOT = Path(__file__).parents[2]


def invoke(options: str) -> Result:
    return CliRunner().invoke(app, ["plan", *shlex.split(options)])


def lines(result: Result) -> list[list[str]]:
    """Of the tables that say what is chosen."""
    words = [line.split() for line in result.stdout.splitlines()]
    rows = [line for line in words if len(line) == 10 and line[0].isdigit()]
    return [line for line in rows if line[2] in {"eager", *ALGORITHMS}]


def test_a_line_for_each_number_of_ranks_to_thousands() -> None:
    result = invoke("--case uniform,zipf --link 1gbit,100gbit")
    assert result.exit_code == 0, result.output
    assert [line[0] for line in lines(result)] == [str(2**power) for power in range(1, 13)] * 4
    titles = [line.split() for line in result.stdout.splitlines() if line.startswith("ranks")]
    assert titles[1::2] == [["ranks", *ALGORITHMS]] * 4


WINS = {  # a case of each algorithm that the rule takes
    "doubling": "--rows 1000 --height 100000 --link 10gbit --ranks 16",
    "eager": "--rows 10 --height 1000 --link 1gbit --ranks 4",
    "gather": "--case uniform --link 1gbit --ranks 2",
    "holders": "--case uniform --link 1gbit --ranks 16",
    "split": "--case full --link 1gbit --ranks 8",
}


@pytest.mark.parametrize("name", sorted(WINS))
def test_each_algorithm_is_planned_where_the_rule_takes_it(name: str) -> None:
    [line] = lines(invoke(WINS[name]))
    assert line[2] == name


def test_where_nothing_keeps_within_the_workspace_what_needs_least_is_planned() -> None:
    wide = "--rows 100 --height 8192 --width 100000 --ranks 65536 --link 1gbit"
    [line] = lines(invoke(wide))
    assert line[2] in ALGORITHMS


def test_figures_and_a_plot_are_written(tmp_path: Path) -> None:
    figures = tmp_path / "plan.json"
    files = f"--json {figures} --plot {tmp_path / 'plan.png'}"
    result = invoke(f"--ranks 2,64 --link 1gbit {files}")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    few, many = json.loads(figures.read_text())
    assert (few["ranks"], many["ranks"]) == (2, 64)
    assert few["union"] < many["union"] <= 1_000_000
    for one, line in zip((few, many), lines(result), strict=True):
        assert {*one["algorithms"]} <= {*ALGORITHMS}
        chosen = one["algorithms"][one["chosen"]]
        assert line[2] == one["chosen"]
        assert line[5:7] == [str(chosen["messages"]), str(chosen["rounds"])]
        assert float(line[3]) == pytest.approx(chosen["milliseconds"], rel=0.01)
        assert chosen["bytes"] == pytest.approx(chosen["of_bound"] * one["bound_bytes"])


def test_the_bound_of_hosts_is_beside_that_of_ranks(tmp_path: Path) -> None:
    figures = tmp_path / "plan.json"
    found = {}
    for per_host in (1, 4):
        result = invoke(
            f"--case identical --ranks 8 --per-host {per_host} --link 1gbit --json {figures}"
        )
        [line] = lines(result)
        [one] = json.loads(figures.read_text())
        least = one["least_time_milliseconds"]
        assert float(line[8]) == pytest.approx(least, rel=0.01)
        assert float(line[9]) == pytest.approx(float(line[3]) / least, rel=0.05)
        found[per_host] = one
    rows = 50_000 * 260
    assert found[1]["host_bound_bytes"] == found[1]["bound_bytes"] == 7 / 4 * rows
    # two hosts have the same rows: each sends all of them, whatever its ranks are
    assert found[4]["host_bound_bytes"] == rows
    assert found[4]["bound_bytes"] == 7 / 4 * rows


GBIT = Named("1gbit", Link(50e-6, 8e-9, 10e-6))


def of(distribution: str, rows: int, height: int) -> Drawing:
    return drawn(Case("own", rows, height, width=1, distribution=distribution))


def test_what_is_predicted_and_what_was_measured_is_said_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    result = invoke(f"--ranks 64 --per-host 8 --link 10gbit --plot {picture}")
    assert result.exit_code == 0, result.output
    assert "All figures of the tables are predicted" in result.stdout
    assert "\nMeasured, by weft's authors: the rates of merging and within a host" in result.stdout
    drawn = picture.read_text("utf-8")
    assert drawn.startswith("<?xml") and ">least time<" in drawn and ">split<" in drawn
    assert ">all of it predicted; measured: the rates of merging" in drawn
    assert ">eager<" not in drawn  # which no line and no place of the map is


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
    counted = text.counted(8)
    sizes = counted.sizes
    assert sizes.most <= counted.union <= sizes.total == 8 * sizes.most


@pytest.mark.parametrize("link", ["100mbit", "1gbit", "10gbit"])
def test_no_link_changes_what_is_planned(link: str) -> None:
    at_most, beyond = lines(invoke(f"--case uniform --link {link} --ranks 32,33"))
    assert (at_most[2], beyond[2]) == ("holders", "split")


@pytest.mark.parametrize("per_host", [1, 8])
def test_of_many_ranks_a_split_in_stages_saves_messages(per_host: int) -> None:
    drawings = [drawn(CASES[name]) for name in ("uniform", "zipf", "identical")]
    for one in predict(drawings, [GBIT], [512], per_host):
        assert one.chosen == "split", one.drawing.case.name
        assert in_stages(one.counted.sizes).blocks
        assert one.forecasts["split"].rounds < 100  # a hop of a ring each, were it flat


def test_the_bound_of_hosts_follows_from_the_rows_of_their_ranks() -> None:
    text = of("zipf", 1000, 100_000)
    [one] = predict([text], [GBIT], [32], per_host=8)
    assert one.counted.rows_of_hosts == ((text.union(8), text.union(24)),) * 4
    assert one.json()["host_bound_bytes"] == one.counted.host_bound
    assert one.least_ms == 1e3 * one.counted.least_seconds(GBIT.link.beta)


@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("rows", [20, 200, 9000])
def test_plan_names_what_a_call_takes_and_what_it_sends(rows: int, per_host: int) -> None:
    case = Case("same", rows, 20_000, width=64, distribution="identical")
    [planned] = predict([drawn(case)], [GBIT], [8], per_host)

    def program(group: weft.Group) -> weft.sparse.Explanation:
        set_rate(group, rate_of(125e6))
        group.session.hosts = tuple(str(rank // per_host) for rank in range(8))
        indices = torch.arange(20_000 - rows, 20_000, dtype=torch.int32)
        return weft.explain(weft.Rows(indices, torch.ones(rows, 64), 20_000))

    called = run(8, program)[0]
    assert planned.chosen == called.chosen
    for line in called.lines:
        if line.verdict in ("chosen", ""):
            forecast = planned.forecasts[line.algorithm]
            assert line.bytes[0] <= round(forecast.bytes) <= line.bytes[1]
            assert forecast.messages <= line.messages


MINE = asdict(Case("mine", 400, 5000, width=8, dtype="bfloat16"))
ROW = {"case": MINE.pop("name"), **MINE, "ranks": 4}
ROW |= {"distinct": 400.0, "total": 1600, "union": 1000}


def test_a_recorded_run_says_the_overlap(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"version": 3, "rows": [ROW, ROW]}))
    [drawing] = recorded(file)
    sizes = drawing.counted(4).sizes
    assert (sizes.row, sizes.partial, drawing.rows) == (16, 32, 400.0)
    assert drawing.union(4) == pytest.approx(1000, rel=1e-3)
    assert 400 < drawing.union(2) < 1000 < drawing.union(16)
    result = invoke(f"--record {file} --ranks 4,32")
    assert result.exit_code == 0, result.output
    assert [line[0] for line in lines(result)] == ["4", "32"] * 2
    assert f"Measured, in {file}: rows and their overlap, of its ranks." in result.stdout


def test_a_recorded_run_says_the_dtype_of_the_wire(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    row = ROW | {"dtype": "float32", "wire_dtype": "bfloat16"}
    file.write_text(json.dumps({"version": 3, "rows": [row]}))
    [drawing] = recorded(file)
    sizes = drawing.counted(4).sizes
    assert (sizes.row, sizes.partial) == (16, 32)
    row["wire_dtype"] = None
    file.write_text(json.dumps({"version": 3, "rows": [row]}))
    [drawing] = recorded(file)
    sizes = drawing.counted(4).sizes
    assert (sizes.row, sizes.partial) == (32, 32)


@pytest.mark.parametrize(
    ("changed", "words", "whole"),
    [
        ({"distinct": -4.0}, "do not go together", {}),
        ({"union": 300}, "do not go together", {}),
        ({"union": 5001, "total": 5100}, "do not go together", {}),
        ({"total": 100_000}, "do not go together", {}),
        ({"distinct": float("nan")}, "do not go together", {}),
        ({"distinct": None}, "TypeError", {}),
        ({"dtype": "nope"}, "nope", {}),
        ({"dtype": "Tensor"}, "TypeError", {}),
        ({"op": "nope"}, "nope", {}),
        ({"width": 0}, "do not go together", {}),
        ({"union": 10**400}, "do not go together", {}),
        ({"distinct": 10**400}, "OverflowError", {}),
        ({"ranks": 0}, "of 0 ranks", {}),
        ({"ranks": 1}, "says nothing of how several overlap", {}),
        ({}, "is a record without a case", {"rows": []}),
        ({}, "of version 1, this weft reads 3", {"version": 1}),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(
    changed: dict[str, Any], words: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"version": 3, "rows": [ROW | changed]} | whole))
    result = invoke(f"--record {file}")
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_ranks_that_are_all_on_one_host_have_no_link() -> None:
    result = invoke("--per-host 8 --ranks 2,8,9,64 --link 1gbit")
    assert [line[0] for line in lines(result)] == ["9", "64"]
    assert result.stdout.endswith("left out, since all are on one host: 2, 8 ranks\n")


def test_a_table_that_is_too_wide_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"\x1b\[[0-9;]*m", "", invoke("--ranks 4,4096 --link 1gbit").stdout)
    tables = text[text.index("ranks") : text.index("All figures")]
    assert all(len(line) <= 80 for line in tables.splitlines()) and "…" not in tables


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda p: p.stem)
def test_pictures_of_the_manual_have_colours_for_dark_pages(picture: Path) -> None:
    style, drawn = picture.read_text("utf-8").split("</style>")
    assert "color-scheme: light dark" in style
    for colour in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn)) & set(ON_DARK):
        assert f"light-dark({colour}, {ON_DARK[colour]})" in style
    assert "light-dark(#ffffff" in style  # the paper
