"""Run `weft bench` on every link of the project's goals and say which goals are reached.

    python benchmarks/goals.py                          # all of it; hours on a small machine
    python benchmarks/goals.py --link 4x1gbit --case uniform,wide --runs 1
    python benchmarks/goals.py --read                   # judge the files of an earlier run again

The links: `one-host` is this machine, four ranks; `PxRATE` is P virtual hosts joined by links of
that rate (`tools/netlab`, which needs root and iproute2). Each run of each link leaves a JSON file
in `--out`. A goal is reached when every run reaches it. The exit status is 0 if all that were
measured are reached, 1 if not, 2 if something could not be run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).resolve().parent
NETLAB = HERE.parent / "tools" / "netlab"
CASES = ("uniform", "zipf", "small", "identical", "scalar", "wide", "full")

Row = dict[str, Any]
"""One contender in one case, as `weft bench --json` writes it."""


@dataclass(frozen=True, slots=True)
class Link:
    """So many ranks, and how they are joined; slow links take fewer iterations."""

    name: str
    ranks: int
    rate: str | None
    iters: int


LINKS = {
    link.name: link
    for link in (
        Link("one-host", 4, None, 15),
        Link("4x1gbit", 4, "1gbit", 10),
        Link("8x1gbit", 8, "1gbit", 5),
        Link("8x250mbit", 8, "250mbit", 3),
        Link("4x10gbit", 4, "10gbit", 10),
    )
}


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit on a figure of some cases on some links.

    Attributes:
        figure: computes it from the rows of a case, None where it does not apply.
        least: the figure must be at least the limit; otherwise at most.
    """

    name: str
    links: tuple[str, ...]
    cases: tuple[str, ...]
    limit: float
    figure: Callable[[list[Row]], float | None]
    least: bool

    def reached(self, value: float) -> bool:
        return value >= self.limit if self.least else value <= self.limit


def _auto(rows: list[Row]) -> Row | None:
    """What `auto` did in a case, unless it was refused or wrong."""
    done = [row for row in rows if row["name"] == "weft:auto" and row["status"] == "ok"]
    return done[0] if done else None


ONECCL = {  # seconds of oneCCL 2021.3's best algorithm, on two quiet cores like these
    ("one-host", "uniform"): 0.253,
    ("one-host", "zipf"): 0.145,
    ("one-host", "identical"): 0.105,
    ("one-host", "scalar"): 2.48,
    ("4x1gbit", "uniform"): 0.545,
}


def _over_oneccl(link: str) -> Callable[[list[Row]], float | None]:
    def figure(rows: list[Row]) -> float | None:
        auto = _auto(rows)
        seconds = ONECCL.get((link, auto["case"])) if auto else None
        return seconds / auto["median"] if auto and seconds else None

    return figure


def _over_plain_bytes(rows: list[Row]) -> float | None:
    """Bytes sent, over what the same rows need as an int32 index and a float32 value each."""
    auto = _auto(rows)
    if auto is None or auto["chosen"] != "split":
        return None
    ranks = auto["total"] / auto["distinct"]
    sent = (ranks - 1) / ranks * (auto["distinct"] + auto["union"])
    return auto["sent_bytes"] / (sent * 8)


def _over_torch(rows: list[Row]) -> float | None:
    auto = _auto(rows)
    return auto["times"].get("torch") if auto else None


def _over_link(rows: list[Row]) -> float | None:
    auto = _auto(rows)
    return auto["time_ratio"] if auto else None


def _over_best_peer(rows: list[Row]) -> float | None:
    auto = _auto(rows)
    return min(auto["times"].values(), default=None) if auto else None


def _behind_best_peer(rows: list[Row]) -> float | None:
    best = _over_best_peer(rows)
    return 1 / best if best else None


def _behind_best(rows: list[Row]) -> float | None:
    auto = _auto(rows)
    best = min((row["median"] for row in rows if row["status"] == "ok"), default=None)
    return auto["median"] / best if auto and best else None


EVERYWHERE = tuple(LINKS)
WIRE = ("4x1gbit", "8x250mbit")
ONECCL_CASES = tuple(case for link, case in ONECCL if link == "one-host")
ROWS = ("uniform", "zipf", "wide", "identical")
MOST = ("uniform", "zipf", "scalar", "wide", "identical")
GOALS = (
    Goal("torch / weft", ("one-host",), MOST, 2.0, _over_torch, least=True),
    Goal("time / bound", WIRE, ROWS, 1.2, _over_link, least=False),
    Goal("time / bound", WIRE, ("scalar",), 1.6, _over_link, least=False),
    Goal(
        "torch / weft",
        ("8x1gbit",),
        tuple(case for case in CASES if case != "zipf"),
        2.0,
        _over_torch,
        least=True,
    ),
    Goal("torch / weft", ("8x1gbit",), ("zipf",), 1.3, _over_torch, least=True),
    Goal("bytes / plain bytes", WIRE, ("scalar",), 0.6, _over_plain_bytes, least=False),
    Goal("oneCCL / weft", ("one-host",), ONECCL_CASES, 2.0, _over_oneccl("one-host"), least=True),
    Goal("oneCCL / weft", ("4x1gbit",), ("uniform",), 1.25, _over_oneccl("4x1gbit"), least=True),
    Goal("best peer / weft", EVERYWHERE, ("small",), 1.0, _over_best_peer, least=True),
    Goal("weft / best of all", EVERYWHERE, ("full",), 1.2, _behind_best, least=False),
    Goal("weft / best peer", EVERYWHERE, CASES, 1.05, _behind_best_peer, least=False),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal held against the runs of one link and case."""

    goal: Goal
    link: str
    case: str
    values: tuple[float, ...]
    missing: int

    @property
    def reached(self) -> bool:
        """In every run; a run that gave no figure did not reach it."""
        return not self.missing and all(map(self.goal.reached, self.values))

    def line(self) -> str:
        sign = ">=" if self.goal.least else "<="
        ends = f"{statistics.median(self.values):.2f}" if self.values else "no figure"
        if len(self.values) > 1:
            ends += f" ({min(self.values):.2f}..{max(self.values):.2f})"
        met = sum(map(self.goal.reached, self.values))
        runs = len(self.values) + self.missing
        word = "reached" if self.reached else f"SHORT, {met} of {runs} runs"
        wanted = f"{sign} {self.goal.limit:g}"
        return f"{self.link:10} {self.case:10} {self.goal.name:20} {wanted:8} {ends:24} {word}"


def judge(runs: dict[str, list[list[Row]]]) -> list[Verdict]:
    """Every goal against the runs of each link: `runs[link]` has a list of rows for each run."""
    verdicts = []
    for goal in GOALS:
        for link in goal.links:
            for case in goal.cases:
                measured = runs.get(link, [])
                of_case = [[row for row in run if row["case"] == case] for run in measured]
                figures = [goal.figure(rows) for rows in of_case if rows]
                if figures:
                    values = tuple(value for value in figures if value is not None)
                    missing = len(figures) - len(values)
                    verdicts.append(Verdict(goal, link, case, values, missing))
    return verdicts


def command(link: Link, cases: Iterable[str], algorithm: str, file: Path, size: float) -> list[str]:
    """The command line that measures some cases on a link."""
    bench = [sys.executable, "-m", "weft", "bench", "--case", ",".join(cases)]
    bench += ["--algorithm", algorithm, "--size", str(size)]
    bench += ["--iters", str(link.iters), "--warmup", "1", "--json", str(file)]
    if link.rate is None:
        return [*bench, "--ranks", str(link.ranks)]
    netlab = [sys.executable, str(NETLAB), "-n", str(link.ranks), "--rate", link.rate, "--raw"]
    return [*netlab, "--timeout", "7200", "--", *bench, "--link", link.rate]


def measure(link: Link, cases: list[str], run: int, out: Path, size: float) -> None:
    """Run the benches of one link once; `full` with all algorithms, since its goal names them."""
    parts = {
        "auto": ([case for case in cases if case != "full"], "auto"),
        "all": ([case for case in cases if case == "full"], "all"),
    }
    for part, (some, algorithm) in parts.items():
        if not some:
            continue
        load = os.getloadavg()[0]
        print(f"# {link.name}, run {run}, load of this machine {load:.1f}", flush=True)
        file = out / f"{link.name}-{part}-{run}.json"
        argv = command(link, some, algorithm, file, size)
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        done = subprocess.run(argv, env=environment, check=False)
        if done.returncode not in (0, 1) or not file.exists():  # 1: a result was wrong, in the file
            print(f"goals: {' '.join(argv)} ended with {done.returncode}", file=sys.stderr)
            raise typer.Exit(2)


def read(out: Path) -> dict[str, list[list[Row]]]:
    """The rows of every run in a folder, by link; the two parts of a run are one."""
    runs: dict[str, dict[str, list[Row]]] = {}
    for file in sorted(out.glob("*-*-*.json")):
        link, _, run = file.stem.rsplit("-", 2)
        text = file.read_text(encoding="utf-8")
        if text:
            runs.setdefault(link, {}).setdefault(run, []).extend(json.loads(text)["rows"])
    return {link: list(by_run.values()) for link, by_run in runs.items()}


def asked(tool: str, link: str, case: str) -> tuple[list[str], list[str]]:
    """The names in --link and --case; ends the tool if there is one that it does not know."""
    links, cases = link.split(","), case.split(",")
    for option, names, there_is in (("link", links, LINKS), ("case", cases, CASES)):
        for name in names:
            if name not in there_is:
                print(f"{tool}: unknown --{option} {name!r}: there is {', '.join(there_is)}")
                raise typer.Exit(2)
    return links, cases


def main(
    link: Annotated[str, typer.Option(help="Links, divided by commas.")] = ",".join(LINKS),
    case: Annotated[str, typer.Option(help="Cases, divided by commas.")] = ",".join(CASES),
    runs: Annotated[int, typer.Option(help="How often each link is measured.")] = 3,
    size: Annotated[float, typer.Option(help="Times the rows and heights; goals are for 1.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = Path("build/goals"),
    read_only: Annotated[bool, typer.Option("--read", help="Judge what is there.")] = False,
) -> None:
    """Say which of the project's goals of speed are reached."""
    links, cases = asked("goals", link, case)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not read_only:
        for name in links:
            for older in out.glob(f"{name}-*-*.json"):
                older.unlink()  # figures of two sessions must not be judged as one
            for run in range(1, runs + 1):
                measure(LINKS[name], cases, run, out, size)
    found = {name: rows for name, rows in read(out).items() if name in links}
    verdicts = [verdict for verdict in judge(found) if verdict.case in cases]
    print(f"{'link':10} {'case':10} {'figure':20} {'goal':8} {'reached':24} verdict")
    for verdict in verdicts:
        print(verdict.line())
    wrong = [row for run in found.values() for rows in run for row in rows]
    wrong = [row for row in wrong if row["status"] == "wrong"]
    for row in wrong:
        print(f"WRONG: {row['case']} {row['name']}: {row['why']}")
    if wrong or not verdicts or not all(verdict.reached for verdict in verdicts):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
