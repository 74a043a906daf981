"""`benchmarks/goals.py`: each goal is judged, and only what reached it is called so."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def goals(script):
    return script("benchmarks/goals.py")


def a_run(case, median, status="ok", **others):
    """One run of a case: weft's auto took `median`, the bound takes 1, the others as given."""
    ratios = {f"{name}_ratio": other / median for name, other in others.items()}
    auto = {"case": case, "by": "weft:auto", "status": status, "time_ratio": median}
    auto |= {"median_seconds": median, "host_bound_ratio": 1.1 * median}
    return [auto | ratios, {"case": case, "by": "torch", "status": "ok", "torch_ratio": None}]


def judged(goals, link, *runs):
    return {verdict.goal.name: verdict.reached for verdict in goals.judge({link: list(runs)})}


EACH = (  # link, case, auto's time over the bound's, the peers' times, which goal, whether reached
    ("one-host", "uniform", 1.0, {"torch": 8.1}, "torch / weft", True),
    ("one-host", "uniform", 1.0, {"torch": 7.9}, "torch / weft", False),
    ("4x1gbit", "uniform", 1.0, {"torch": 2.3}, "torch / weft", True),
    ("4x1gbit", "wide", 1.1, {"torch": 9.0}, "time / bound", True),
    ("4x1gbit", "zipf", 1.4, {"torch": 9.0}, "time / bound", False),
    ("one-host", "full", 1.0, {"torch": 9.0, "dense": 0.96}, "dense / weft", True),
    ("4x1gbit", "full", 1.0, {"torch": 9.0, "dense": 0.96}, "dense / weft", False),
    ("one-host-2", "small", 1.0, {"torch": 1.2, "horovod": 1.1}, "best peer / weft", True),
    ("one-host-2", "small", 1.0, {"torch": 1.2, "horovod": 0.9}, "best peer / weft", False),
    ("one-host-8", "wide", 1.0, {"torch": 31.0}, "torch / weft", False),
    ("2x4x250mbit", "wide", 1.0, {}, "time / host bound", True),
    ("2x4x250mbit", "wide", 1.15, {}, "time / host bound", False),
    ("4x2x1gbit", "zipf", 1.15, {}, "time / host bound", True),
    ("8x1gbit", "full", 1.0, {"torch": 9.0, "dense": 1.01}, "dense / weft", True),
    ("8x1gbit", "full", 1.0, {"torch": 9.0, "dense": 0.99}, "dense / weft", False),
    ("far", "zipf", 1.34, {"torch": 1.5}, "best peer / weft", True),
    ("lossy", "wide", 1.49, {"torch": 1.5, "horovod": 1.4}, "best peer / weft", False),
    ("far", "small", 9.0, {"torch": 9.1}, "best peer / weft", True),
)


@pytest.mark.parametrize("number", range(len(EACH)))
def test_each_goal(goals, number):
    link, case, median, others, figure, reached = EACH[number]
    assert judged(goals, link, a_run(case, median, **others))[figure] is reached


def test_the_median_of_the_runs_must_reach_it_and_a_wrong_one_does_not(goals):
    good, bad = a_run("zipf", 1.0, torch=4.0), a_run("zipf", 1.0, torch=1.0)
    assert judged(goals, "one-host", good, good, bad)["torch / weft"]
    assert not judged(goals, "one-host", good, bad, bad)["torch / weft"]
    wrong = a_run("zipf", 1.0, "wrong", torch=9.0)
    [verdict] = goals.judge({"one-host": [good, wrong]})
    assert not verdict.reached and "SHORT, 1 runs without a figure" in verdict.line()
    assert goals.judge({"8x1gbit": [good]}) == goals.judge({}) == []  # there is no goal


def test_files_are_read_by_link(goals, tmp_path):
    for name, rows in (("4x1gbit-1", ["a"]), ("4x1gbit-2", ["b"]), ("one-host-8-1", ["c"])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    assert goals.read(tmp_path) == {"4x1gbit": [["a"], ["b"]], "one-host-8": [["c"]]}


def test_a_table_has_medians_and_ranges_of_the_runs_that_were_right(goals):
    def run(median, torch, status="ok"):
        [auto, peer] = a_run("zipf", median, status, torch=torch)
        return [auto | {"algorithm": "split"}, peer]

    runs = [run(1.0, 4.0), run(1.0, 2.0), run(1.0, 5.0), run(1.0, 99.0, "wrong")]
    assert goals.table(runs).splitlines() == [
        "| case | algorithm | ms | torch / weft | time / bound | time / host bound |",
        "|---|---|---|---|---|---|",
        "| zipf | split | 1000.0 | 4.00 (2.00 to 5.00) "
        "| 1.00 (1.00 to 1.00) | 1.10 (1.10 to 1.10) |",
    ]
    assert goals.spread([None, None]) == "-"


@pytest.mark.parametrize("link", ["one-host-8", "8x250mbit"])
def test_commands_name_the_link(goals, link):
    where = goals.LINKS[link]
    argv = goals.command(where, ["wide", "full"], "all", Path("x.json"))
    assert {"wide,full", "bench", "--unprivileged", "8"} <= set(argv)
    assert ("--ranks" in argv) == (where.rate is None)
    if where.rate is not None:
        assert argv[argv.index("--rate") + 1] == where.rate and goals.RATES[where.rate]


def test_figures_are_those_of_seconds_and_bytes(goals):
    def row(by, status, seconds, nbytes=0):
        named = {"case": "uniform", "by": by, "status": status}
        return named | {"seconds": seconds, "bound_bytes": nbytes}

    rows = [row("weft:auto", "ok", [1.0, 3.0, 2.0], 125_000_000), row("torch", "ok", [5.0])]
    rows += [row("horovod", "wrong", [0.1]), row("dense", "refused", [])]
    auto, torch, _, dense = goals.with_figures(rows, goals.LINKS["4x1gbit"])
    assert (auto["median_seconds"], auto["time_ratio"], auto["torch_ratio"]) == (2.0, 2.0, 2.5)
    assert torch["torch_ratio"] is None and torch["time_ratio"] is None
    assert auto["horovod_ratio"] is None  # nobody is compared with what is wrong
    assert dense["median_seconds"] is None and "host_bound_ratio" not in auto


def test_the_host_bound_is_counted_from_the_rows_of_the_cases(goals):
    link = goals.LINKS["2x4x1gbit"]
    assert goals.host_bound("identical", link) == 50_000 * 260  # all leave and enter each host
    rows = goals.host_bound("small", link) / 260
    (auto,) = goals.with_figures(
        [{"case": "small", "by": "weft:auto", "status": "ok", "seconds": [1.0], "bound_bytes": 1}],
        link,
    )
    assert auto["host_bound_ratio"] == 125_000_000 / (rows * 260)
    drawn = [set(goals.indices(goals.DRAWN["small"], rank).tolist()) for rank in range(8)]
    own = [set().union(*drawn[:4]), set().union(*drawn[4:])]
    assert rows == max(map(len, own))  # of two hosts each sends what it has to the other
