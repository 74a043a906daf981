"""Run `weft bench` as an ordinary user on every link of the project's goals, and judge the goals.

    python benchmarks/goals.py                          # all of it; an hour on a small machine
    python benchmarks/goals.py --link 4x1gbit --case uniform,wide --runs 1
    python benchmarks/goals.py --link near,far,lossy --case small,zipf,wide --peers torch,horovod
    python benchmarks/goals.py --read                   # judge the files of an earlier run again
    python benchmarks/goals.py --read --table           # and print them in Markdown

Links: `one-host` is this machine with 4 ranks, `one-host-2` and `one-host-8` with 2 and 8. `PxRATE`
is P virtual hosts that are joined by links of that rate (`tools/netlab`, which needs root and
iproute2), and `HxNxRATE` is H hosts with N ranks each. `near`, `far` and `lossy` are 4 hosts at 100
Mbit/s: side by side, 25 ms apart, and 25 ms apart with 0.1 % of the packets lost. The ranks run
with `--unprivileged`. If you are root and ask for no virtual hosts, start this with
`setpriv --bounding-set -sys_ptrace`.

Each run of each link leaves a JSON file in `--out`. A goal is compared with the median of the runs.
The exit status is 0 if all goals that were measured are reached, 1 if not, 2 if something could not
be run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.cli.bench.cases import CASES as DRAWN
from weft.cli.bench.cases import indices
from weft.sparse.bound import rows_of_average

HERE = Path(__file__).resolve().parent
NETLAB = HERE.parent / "tools" / "netlab"
CASES = ("uniform", "zipf", "small", "identical", "scalar", "wide", "full")

Row = dict[str, Any]
"""One contender in one case, as `weft bench --json` writes it, and what `with_figures` adds."""


@dataclass(frozen=True, slots=True)
class Link:
    """So many hosts, and how they are joined; slow links take fewer iterations.

    Attributes:
        hosts: how many; without a rate, ranks of this machine.
        rate: of each host's link; None: one host.
        per_host: ranks of each.
        delay: milliseconds from one host to another.
        loss: percent of the packets.
    """

    name: str
    hosts: int
    rate: str | None
    iters: int
    per_host: int = 1
    delay: float = 0
    loss: float = 0

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host


LINKS = {
    link.name: link
    for link in (
        Link("one-host", 4, None, 15),
        Link("4x1gbit", 4, "1gbit", 10),
        Link("8x1gbit", 8, "1gbit", 5),
        Link("8x250mbit", 8, "250mbit", 3),
        Link("4x10gbit", 4, "10gbit", 10),
        Link("one-host-2", 2, None, 15),
        Link("one-host-8", 8, None, 5),
        Link("2x4x250mbit", 2, "250mbit", 5, per_host=4),
        Link("4x2x250mbit", 4, "250mbit", 5, per_host=2),
        Link("8x2x250mbit", 8, "250mbit", 3, per_host=2),
        Link("2x4x1gbit", 2, "1gbit", 7, per_host=4),
        Link("4x2x1gbit", 4, "1gbit", 7, per_host=2),
        Link("8x2x1gbit", 8, "1gbit", 5, per_host=2),
        Link("near", 4, "100mbit", 5),
        Link("far", 4, "100mbit", 5, delay=25),
        Link("lossy", 4, "100mbit", 5, delay=25, loss=0.1),
    )
}


RATES = {"100mbit": 1e8, "250mbit": 2.5e8, "1gbit": 1e9, "10gbit": 1e10}  # bits a second

Figure = Callable[[Row], float | None]
"""Computes a figure from what `auto` did in a case; None where it does not apply."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit on a figure of a case on a link; `least`: it must be at least that, else at most."""

    name: str
    link: str
    case: str
    limit: float
    figure: Figure
    least: bool = True

    def reached(self, value: float) -> bool:
        return value >= self.limit if self.least else value <= self.limit


def over(peer: str) -> Figure:
    """The time of a peer over weft's."""
    return lambda auto: auto.get(f"{peer}_ratio")


def over_best_peer(auto: Row) -> float | None:
    ratios = [auto.get(f"{peer}_ratio") for peer in ("torch", "horovod", "dense")]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def over_bound(auto: Row) -> float | None:
    """Weft's time over that of the bound's bytes on the link."""
    return auto["time_ratio"]


def over_host_bound(auto: Row) -> float | None:
    """Weft's time over that of the host bound's bytes on the link of the busiest host.

    It is left out where each rank has a host of its own.
    """
    return auto.get("host_bound_ratio")


def with_figures(rows: list[Row], link: Link) -> list[Row]:
    """Add to the rows of a case the median, ratios to the peers', and ratios to the bounds."""
    well = [row for row in rows if row["status"] == "ok"]
    medians = {row["by"]: statistics.median(row["seconds"]) for row in well}
    for row in rows:
        took = row["median_seconds"] = medians.get(row["by"])
        for peer in ("torch", "horovod", "dense"):
            is_compared = took and peer in medians and peer != row["by"]
            row[f"{peer}_ratio"] = medians[peer] / took if is_compared else None
        row["time_ratio"] = None
        if took and link.rate is not None and row["bound_bytes"]:
            bytes_a_second = RATES[link.rate] / 8
            row["time_ratio"] = took * bytes_a_second / row["bound_bytes"]
            if link.per_host > 1:
                least = host_bound(row["case"], link)
                row["host_bound_ratio"] = took * bytes_a_second / least
    return rows


def rows_of_busiest(own: Sequence[float], others: Sequence[float], union: float) -> float:
    """Rows that the part with most to do must receive or send.

    That is at least what the average part must. A part also sends each row that it has once or
    more, and receives each row that others have once or more.

    Args:
        own: rows of each part, its duplicates removed.
        others: for each part the rows in the union of all others.
        union: rows of the result.
    """
    if len(own) == 1:
        return 0.0
    return max(rows_of_average(sum(own), union, len(own)), *map(float, own), *map(float, others))


def host_bound(case: str, link: Link) -> float:
    """Bytes that must cross the link of the busiest host, an index counted as 4."""
    drawn = DRAWN[case]
    runs = [np.unique(indices(drawn, rank)) for rank in range(link.ranks)]
    hosts = [runs[first:][: link.per_host] for first in range(0, link.ranks, link.per_host)]
    own = [np.unique(np.concatenate(host)) for host in hosts]
    others = [len(np.unique(np.concatenate(own[:n] + own[n + 1 :]))) for n in range(link.hosts)]
    union = len(np.unique(np.concatenate(own)))
    busiest = max(rows_of_busiest([*map(len, own)], others, union), *map(len, runs))
    return busiest * (4 * drawn.width + 4)


TORCH = {  # torch.distributed.all_reduce of the COO tensor over weft, at least
    "one-host": dict(zip(CASES, (8, 3, 1.5, 5, 11, 8, 3), strict=True)),
    "4x1gbit": dict(zip(CASES, (2.2, 1.8, 1.5, 2.4, 8, 1.9, 2), strict=True)),
    "one-host-8": {"uniform": 27, "zipf": 8, "small": 1.8, "wide": 32},
}
MEASURED = ("one-host", "4x1gbit", "one-host-2", "one-host-8")  # links, unless --link says which
SEVERAL = ("uniform", "zipf", "identical", "wide")  # cases of several ranks on several hosts
BOUND = {"uniform": 1.2, "zipf": 1.35, "identical": 1.3, "scalar": 1.7, "wide": 1.2}
HOST_BOUND = {  # time over the least with several ranks on each host, at most
    "2x4x250mbit": 1.2,
    "4x2x250mbit": 1.2,
    "8x2x250mbit": 1.2,
    "2x4x1gbit": 1.5,
    "4x2x1gbit": 1.5,
}
GOALS = (
    *(
        Goal("torch / weft", link, case, limit, over("torch"))
        for link, limits in TORCH.items()
        for case, limit in limits.items()
    ),
    *(
        Goal("time / bound", "4x1gbit", case, limit, over_bound, least=False)
        for case, limit in BOUND.items()
    ),
    *(
        Goal("time / host bound", link, case, limit, over_host_bound, least=False)
        for link, limit in HOST_BOUND.items()
        for case in SEVERAL
    ),
    *(
        Goal("best peer / weft", link, case, 1.0, over_best_peer)
        for link in ("far", "lossy")
        for case in ("zipf", "wide", "small")
    ),
    Goal("dense / weft", "one-host", "full", 0.95, over("dense")),
    Goal("dense / weft", "4x1gbit", "full", 1.0, over("dense")),
    Goal("dense / weft", "8x1gbit", "full", 1.0, over("dense")),
    *(Goal("best peer / weft", "one-host-2", case, 1.0, over_best_peer) for case in CASES),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal held against the runs of its link and case; a run that is wrong has no figure."""

    goal: Goal
    values: tuple[float, ...]
    missing: int

    @property
    def reached(self) -> bool:
        """By the median of the runs, all of which gave a figure."""
        return not self.missing and self.goal.reached(statistics.median(self.values))

    def line(self) -> str:
        goal = self.goal
        sign = ">=" if goal.least else "<="
        ends = f"{statistics.median(self.values):.2f}" if self.values else "no figure"
        if len(self.values) > 1:
            ends += f" ({min(self.values):.2f}..{max(self.values):.2f})"
        word = "reached" if self.reached else "SHORT"
        if self.missing:
            word += f", {self.missing} runs without a figure"
        wanted = f"{sign} {goal.limit:g}"
        return f"{goal.link:12} {goal.case:10} {goal.name:18} {wanted:8} {ends:24} {word}"


def judge(runs: dict[str, list[list[Row]]]) -> list[Verdict]:
    """Every goal against the runs of its link: `runs[link]` has a list of rows for each run."""
    verdicts = []
    for goal in GOALS:
        of_case = [
            [row for row in of_auto([run]) if row["case"] == goal.case]
            for run in runs.get(goal.link, [])
        ]
        autos = [rows[0] for rows in of_case if rows]
        figures = [goal.figure(auto) if auto["status"] == "ok" else None for auto in autos]
        values = tuple(value for value in figures if value is not None)
        if figures:
            verdicts.append(Verdict(goal, values, len(figures) - len(values)))
    return verdicts


def command(
    link: Link,
    cases: Iterable[str],
    algorithm: str,
    file: Path,
    peers: str = "all",
) -> list[str]:
    """The command line that measures some cases on a link."""
    bench = [sys.executable, "-m", "weft", "bench", "--case", ",".join(cases)]
    bench += ["--algorithm", algorithm, "--peers", peers, "--iters", str(link.iters)]
    bench += ["--json", str(file), "--unprivileged"]
    if link.rate is None:
        return [*bench, "--ranks", str(link.hosts)]
    netlab = [sys.executable, str(NETLAB), "-n", str(link.hosts), "--rate", link.rate, "--raw"]
    netlab += ["--per-host", str(link.per_host)]
    if link.delay:
        netlab += ["--delay", str(link.delay), "--loss", str(link.loss)]
    return [*netlab, "--timeout", "7200", "--", *bench]


def measure(link: Link, cases: list[str], run: int, out: Path, peers: str) -> None:
    """Run the bench of one link once, each case in processes of its own.

    In a process that served other cases before, malloc keeps the pages of large tensors, and
    torch's all-reduce of `wide` takes a third to a half of the time: peers must not depend on that.
    """
    print(f"# {link.name}, run {run}, load of this machine {os.getloadavg()[0]:.1f}", flush=True)
    rows: list[Row] = []
    for case in cases:
        file = out / "last.json"
        file.unlink(missing_ok=True)
        argv = command(link, [case], "auto", file, peers)
        done = subprocess.run(argv, env=dict(os.environ, OMP_NUM_THREADS="1"), check=False)
        if done.returncode not in (0, 1) or not file.exists():  # 1: a wrong result, in the file
            print(f"goals: {' '.join(argv)} ended with {done.returncode}", file=sys.stderr)
            sys.exit(2)
        rows += with_figures(json.loads(file.read_text(encoding="utf-8"))["rows"], link)
    (out / f"{link.name}-{run}.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")


def of_auto(runs: list[list[Row]]) -> Iterator[Row]:
    """What `auto` did in each case of each run, also where that was wrong."""
    for run in runs:
        yield from (row for row in run if row["by"] == "weft:auto")


def read(out: Path) -> dict[str, list[list[Row]]]:
    """The rows of every run in a folder, by link."""
    runs: dict[str, list[list[Row]]] = {}
    for file in sorted(out.glob("*-*.json")):
        if text := file.read_text(encoding="utf-8"):
            runs.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(text)["rows"])
    return runs


def picture(runs: dict[str, list[list[Row]]], file: Path) -> None:
    """Draw torch's time over weft's, the median of the runs, a bar for each case and link."""
    from matplotlib.figure import Figure as Canvas

    links = [name for name in ("one-host", "4x1gbit") if name in runs]

    canvas = Canvas(figsize=(8, 3.2), layout="constrained")
    axes = canvas.subplots()
    for number, link in enumerate(links):
        of: dict[str, list[float]] = {}
        for row in of_auto(runs[link]):
            if row.get("torch_ratio"):
                of.setdefault(row["case"], []).append(row["torch_ratio"])
        cases = [case for case in CASES if case in of]
        heights = [statistics.median(of[case]) for case in cases]
        places = [CASES.index(case) + 0.4 * (number - (len(links) - 1) / 2) for case in cases]
        words = {"one-host": "4 ranks of one host", "4x1gbit": "4 hosts, 1 Gbit/s"}[link]
        colour = ("#0b7285", "#c2571a")[number]
        bars = axes.bar(places, heights, 0.38, label=words, color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.axhline(1, color="#59636f", linewidth=0.8)
    axes.set_xticks(range(len(CASES)), CASES)
    axes.set_ylabel("torch.distributed.all_reduce / weft")
    axes.legend(frameon=False)
    canvas.savefig(file)


COLUMNS: dict[str, Figure] = {  # of a table, by heading
    "torch / weft": over("torch"),
    "horovod / weft": over("horovod"),
    "dense / weft": over("dense"),
    "time / bound": over_bound,
    "time / host bound": over_host_bound,
}


def tables(runs: dict[str, list[list[Row]]]) -> str:
    """A table in Markdown for each link: what `auto` took, its time, and what it is judged by."""
    return "\n\n".join(f"{link}, {len(runs[link])} runs\n\n{table(runs[link])}" for link in runs)


def table(runs: list[list[Row]]) -> str:
    """The table of one link: a line for each case, with medians of the runs and their range."""
    autos: dict[str, list[Row]] = {}
    for row in of_auto(runs):
        if row["status"] == "ok":
            autos.setdefault(row["case"], []).append(row)
    measured = [
        heading
        for heading, figure in COLUMNS.items()
        if any(figure(row) is not None for rows in autos.values() for row in rows)
    ]
    lines = [
        f"| case | algorithm | ms | {' | '.join(measured)} |",
        "|---" * (3 + len(measured)) + "|",
    ]
    for case, rows in autos.items():
        took = statistics.median(row["median_seconds"] for row in rows) * 1e3
        names = " or ".join(sorted({row["algorithm"] for row in rows}))
        cells = [spread([COLUMNS[heading](row) for row in rows]) for heading in measured]
        lines.append(f"| {case} | {names} | {took:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(figures: Iterable[float | None]) -> str:
    """The median of some figures with the least and the most; "-": there are none."""
    found = [figure for figure in figures if figure is not None]
    if not found:
        return "-"
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main() -> int:
    """Say which of the project's goals of speed are reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", default=",".join(MEASURED), help="links, divided by commas")
    parser.add_argument("--case", default=",".join(CASES), help="cases, divided by commas")
    parser.add_argument("--runs", type=int, default=3, help="how often each link is measured")
    parser.add_argument("--peers", default="all", help="as of weft bench; few save time")
    parser.add_argument("--out", type=Path, default=Path("build/goals"), help="of the JSON files")
    parser.add_argument("--picture", type=Path, help="draw them to a file")
    parser.add_argument("--table", action="store_true", help="print them in Markdown, too")
    parser.add_argument("--read", action="store_true", help="judge what is there")
    given = parser.parse_args()
    links, cases = given.link.split(","), given.case.split(",")
    if unknown := {*links} - {*LINKS} | {*cases} - {*CASES}:
        parser.error(f"unknown {unknown}: links are {', '.join(LINKS)}; cases {', '.join(CASES)}")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not given.read:
        for name in links:
            for older in out.glob(f"{name}-?.json"):
                older.unlink()  # figures of two sessions must not be judged as one
            for run in range(1, given.runs + 1):
                measure(LINKS[name], cases, run, out, given.peers)
    found = {name: rows for name, rows in read(out).items() if name in links}
    verdicts = [verdict for verdict in judge(found) if verdict.goal.case in cases]
    if given.picture is not None:
        picture(found, given.picture)
    if given.table:
        print(tables(found), end="\n\n")
    print(f"{'link':10} {'case':10} {'figure':18} {'goal':8} {'median (range)':24} verdict")
    for verdict in verdicts:
        print(verdict.line())
    wrong = [row for run in found.values() for rows in run for row in rows]
    wrong = [row for row in wrong if row["status"] in ("wrong", "failed")]
    for row in wrong:
        print(f"{row['status'].upper()}: {row['case']} {row['by']}: {row['why']}")
    return int(bool(wrong or not verdicts or not all(verdict.reached for verdict in verdicts)))


if __name__ == "__main__":
    sys.exit(main())
