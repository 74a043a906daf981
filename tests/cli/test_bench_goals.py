"""`benchmarks/goals.py`: each goal is judged, and only what reached it is called so."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def goals(benchmark_file: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_file("goals")


def a_run(case: str, median: float, **others: float) -> list[dict[str, Any]]:
    """One run of a case: weft's auto took `median`, the bound takes 1, the others as given."""
    times = {name: other / median for name, other in others.items() if name != "split"}
    auto = {
        "case": case,
        "name": "weft:auto",
        "chosen": "split",
        "distinct": 1000,
        "total": 4000,
        "union": 3000,
        "sent_bytes": 12_000,
        "status": "ok",
        "median": median,
        "time_ratio": median,
        "times": times,
    }
    rest = [
        {
            "case": case,
            "name": "weft:split" if name == "split" else name,
            "status": "ok",
            "median": other,
            "times": {},
        }
        for name, other in others.items()
    ]
    return [auto, *rest]


def judged(goals: ModuleType, link: str, *runs: list[dict[str, Any]]) -> dict[str, bool]:
    return {verdict.goal.name: verdict.reached for verdict in goals.judge({link: list(runs)})}


@pytest.mark.parametrize(
    ("link", "case", "median", "others", "figure", "reached"),
    [
        ("one-host", "zipf", 1.0, {"torch": 2.1}, "torch / weft", True),
        ("one-host", "zipf", 1.0, {"torch": 1.9}, "torch / weft", False),
        ("8x1gbit", "zipf", 1.0, {"torch": 1.4}, "torch / weft", True),
        ("8x1gbit", "wide", 1.0, {"torch": 1.4}, "torch / weft", False),
        ("4x1gbit", "wide", 1.1, {"torch": 9.0}, "time / bound", True),
        ("4x1gbit", "zipf", 1.3, {"torch": 9.0}, "time / bound", False),
        ("8x250mbit", "scalar", 1.5, {"torch": 9.0}, "time / bound", True),
        ("8x250mbit", "scalar", 1.7, {"torch": 9.0}, "time / bound", False),
        ("one-host", "uniform", 0.126, {"torch": 9.0}, "oneCCL / weft", True),
        ("one-host", "uniform", 0.127, {"torch": 9.0}, "oneCCL / weft", False),
        ("4x1gbit", "uniform", 0.43, {"torch": 9.0}, "oneCCL / weft", True),
        ("4x1gbit", "uniform", 0.44, {"torch": 9.0}, "oneCCL / weft", False),
        ("4x10gbit", "small", 1.0, {"torch": 1.2, "horovod": 1.1}, "best peer / weft", True),
        ("4x10gbit", "small", 1.0, {"torch": 1.2, "horovod": 0.9}, "best peer / weft", False),
        ("one-host", "full", 1.1, {"split": 1.0, "torch": 2.0}, "weft / best of all", True),
        ("one-host", "full", 1.3, {"split": 1.0, "torch": 2.0}, "weft / best of all", False),
        ("one-host", "full", 1.3, {"split": 1.9, "dense": 1.0}, "weft / best of all", False),
        ("4x10gbit", "uniform", 1.04, {"horovod": 1.0}, "weft / best peer", True),
        ("4x10gbit", "uniform", 1.06, {"horovod": 1.0}, "weft / best peer", False),
    ],
)
def test_each_goal(
    goals: ModuleType,
    link: str,
    case: str,
    median: float,
    others: dict[str, float],
    figure: str,
    reached: bool,
) -> None:
    assert judged(goals, link, a_run(case, median, **others))[figure] is reached


def test_bytes_are_held_against_those_of_plain_rows(goals: ModuleType) -> None:
    run = a_run("scalar", 1.0)  # 3/4 of (1000 + 3000) rows of 8 bytes are 24,000
    assert judged(goals, "4x1gbit", run)["bytes / plain bytes"]
    run[0]["sent_bytes"] = 15_000
    assert not judged(goals, "4x1gbit", run)["bytes / plain bytes"]


def test_every_run_must_reach_it_and_a_wrong_one_does_not(goals: ModuleType) -> None:
    good, bad = a_run("zipf", 1.0, torch=3.0), a_run("zipf", 1.0, torch=1.0)
    assert judged(goals, "one-host", good, good)["torch / weft"]
    assert not judged(goals, "one-host", good, bad)["torch / weft"]
    broken = [dict(good[0], status="wrong", times={}), good[1]]
    assert not judged(goals, "one-host", good, broken)["torch / weft"]
    verdicts = goals.judge({"one-host": [good, broken]})
    [verdict] = [v for v in verdicts if v.goal.name == "torch / weft"]
    assert "SHORT, 1 of 2 runs" in verdict.line()


def test_what_was_not_measured_is_not_judged(goals: ModuleType) -> None:
    assert judged(goals, "4x10gbit", a_run("zipf", 1.0, torch=1.0)).keys() == {"weft / best peer"}
    assert goals.judge({}) == []


def test_files_of_a_run_belong_together(goals: ModuleType, tmp_path: Path) -> None:
    for name, rows in (
        ("4x1gbit-auto-1", ["a"]),
        ("4x1gbit-all-1", ["b"]),
        ("4x1gbit-auto-2", ["c"]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    assert [sorted(run) for run in goals.read(tmp_path)["4x1gbit"]] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("link", ["one-host", "8x250mbit"])
def test_commands_name_the_link(goals: ModuleType, link: str) -> None:
    where = goals.LINKS[link]
    argv = goals.command(where, ["wide", "full"], "all", Path("x.json"), 1.0)
    assert "wide,full" in argv and "bench" in argv
    assert ("--ranks" in argv) == (where.rate is None)
    if where.rate is not None:
        assert argv[argv.index("--link") + 1] == argv[argv.index("--rate") + 1] == where.rate
        assert argv[argv.index("-n") + 1] == "8"
