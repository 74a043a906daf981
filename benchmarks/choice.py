"""Compare the algorithm that `auto` chooses with all others, in each case on each link.

    python benchmarks/choice.py                                    # all: 25 minutes
    python benchmarks/choice.py --link 4x1gbit --case zipf,full    # or a part of it ...
    python benchmarks/choice.py --read --table                     # ... and all of it, in Markdown
    python benchmarks/choice.py --link one-host --case text,ratings,graph,tables   # real work

All algorithms take turns in one run, so noise affects all alike. Links and cases are those of
`goals.py`; cases of `weft bench --case real` can be named, too. The figure is the median time of
`auto` over the least median time of all algorithms: 1.00 means that no algorithm was faster.

The exit status is 0 if the figure is at most 1.15 in 30 of the 35 cases (in six of seven, if there
are fewer), 1 if not or if a result was wrong, 2 if something could not be run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from goals import CASES, HERE, LINKS, asked, command
from weft.cli.bench.cases import CASES as DRAWN
from weft.cli.bench.cases import REAL
from weft.cli.bench.results import OWN

LIMIT, SHARE = 1.15, 30 / 35
FIVE = tuple(LINKS)[:5]
SIZES = DRAWN | REAL
ROOT = HERE.parent


@dataclass(frozen=True, slots=True)
class Choice:
    """One case on one link.

    Attributes:
        chosen: what `auto` took.
        auto: median seconds of the calls that `auto` served.
        others: median seconds of each algorithm by name, of those that serve the case.
        measured: when, and with what.
    """

    link: str
    case: str
    chosen: str
    auto: float
    others: dict[str, float]
    measured: str

    @property
    def best(self) -> str:
        return min(self.others, key=self.others.__getitem__)

    @property
    def ratio(self) -> float:
        """What `auto` took over what the best took."""
        return self.auto / self.others[self.best]

    def line(self) -> str:
        word = "" if self.ratio <= LIMIT else f"  MORE THAN {LIMIT:.2f}"
        return (
            f"{self.link:10} {self.case:10} {self.chosen:13} {self.auto * 1e3:8.1f} "
            f"{self.best:13} {self.others[self.best] * 1e3:8.1f} {self.ratio:6.2f}{word}"
        )


def choices(out: Path) -> list[Choice]:
    """What the files of a folder say, in the order of LINKS and CASES."""
    found = []
    for link in LINKS:
        for case in (*CASES, *REAL):
            file = out / f"{link}-{case}.json"
            if file.exists() and (text := file.read_text(encoding="utf-8")):
                read = json.loads(text)
                found.append(_choice(link, case, read["rows"], read["measured"]))
    return found


def _choice(link: str, case: str, rows: list[dict[str, Any]], measured: str) -> Choice:
    refuse_wrong(f"{link} {case}", rows)
    done = {row["by"].removeprefix(OWN): row for row in rows if row["status"] == "ok"}
    auto = done.pop("auto")
    others = {name: row["median_seconds"] for name, row in done.items()}
    chosen, seconds = auto["algorithm"], auto["median_seconds"]
    if chosen not in others:  # the opening exchange carried all rows: no algorithm ran
        others[chosen] = seconds
    return Choice(link, case, chosen, seconds, others, measured)


def measure(links: Iterable[str], cases: Iterable[str], out: Path, size: float) -> None:
    for name in links:
        for case in cases:
            file = out / f"{name}-{case}.json"
            argv = [*command(LINKS[name], [case], "all", file, size), "--peers", "none"]
            print(f"# {name} {case}, load of this machine {os.getloadavg()[0]:.1f}", flush=True)
            run(argv, file)


def run(argv: list[str], file: Path) -> None:
    """Run `weft bench`, and note in its file when that was."""
    done = subprocess.run(argv, env=dict(os.environ, OMP_NUM_THREADS="1"), check=False)
    if done.returncode not in (0, 1) or not file.exists():
        print(f"choice: {' '.join(argv)} ended with {done.returncode}", file=sys.stderr)
        raise typer.Exit(2)
    found = json.loads(file.read_text(encoding="utf-8"))
    found["measured"] = measured()
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured() -> str:
    """When, with which commit of the sources ("+": they were changed since), and which torch."""
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=ROOT, check=False)
    words = ["git", "log", "-1", "--format=%h", "--abbrev=7", "--", "src"]
    done = subprocess.run(words, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    commit = done.stdout.strip() + "+" * bool(changed.returncode)
    return f"{date.today()} with commit {commit}, torch {torch.version.__version__}"


def summary(found: list[Choice]) -> str:
    """In words: how good the choice is, and when that was measured."""
    near = [sum(choice.ratio <= limit for choice in found) for limit in (1.05, LIMIT)]
    lines = [
        f"`auto` is within 5 % of the best in {near[0]} of the {len(found)} cases, and within 15 % "
        f"in {near[1]}."
    ]
    worse = [
        f"`{choice.case}` on {choice.link} ({choice.ratio:.2f} of `{choice.best}`)"
        for choice in found
        if choice.ratio > LIMIT
    ]
    if worse:
        lines.append(f"Beyond that: {', '.join(worse)}.")
    times: dict[str, list[str]] = {}
    for choice in found:
        links = times.setdefault(choice.measured, [])
        links += [choice.link] * (choice.link not in links)
    lines += [f"Measured {when}: {', '.join(links)}." for when, links in times.items()]
    return "\n".join(lines)


def table(found: list[Choice]) -> str:
    """Markdown: what `auto` took, and its time over that of the best, for each case and link."""
    links = list(dict.fromkeys(choice.link for choice in found))
    cells = {(choice.case, choice.link): f"{choice.chosen} {choice.ratio:.2f}" for choice in found}
    lines = [f"| | {' | '.join(links)} |", "|---" * (len(links) + 1) + "|"]
    for case in dict.fromkeys(choice.case for choice in found):
        there = [cells.get((case, link), "-") for link in links]
        lines.append(f"| {case} | {' | '.join(there)} |")
    return "\n".join(lines) + "\n"


def refuse_wrong(where: str, rows: list[dict[str, Any]]) -> None:
    """End the tool if a result was wrong."""
    wrong = [row for row in rows if row["status"] == "wrong"]
    if wrong:
        print(f"choice: {where}: {wrong[0]['by']} is wrong: {wrong[0]['why']}")
        raise typer.Exit(1)


def main(
    link: Annotated[str, typer.Option(help="Links, divided by commas.")] = ",".join(FIVE),
    case: Annotated[str, typer.Option(help="Cases, divided by commas.")] = ",".join(CASES),
    size: Annotated[float, typer.Option(help="Times the rows and heights.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = Path("build/choice"),
    read_only: Annotated[bool, typer.Option("--read", help="Judge what is there.")] = False,
    tabled: Annotated[bool, typer.Option("--table", help="Print them in Markdown, too.")] = False,
) -> None:
    """Say whether `auto` takes what is quickest."""
    links, cases = asked("choice", link, case, SIZES)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not read_only:
        measure(links, cases, out, size)
    found = [one for one in choices(out) if one.link in links and one.case in cases]
    if not found:
        print(f"choice: {out} has no figures of these links and cases; leave out --read")
        raise typer.Exit(2)
    print(f"{'link':10} {'case':10} {'auto took':13} {'ms':>8} {'best':13} {'ms':>8} {'ratio':>6}")
    for one in found:
        print(one.line())
    if tabled:
        print(f"\n{summary(found)}\n\n{table(found)}", end="")
    if sum(one.ratio <= LIMIT for one in found) < SHARE * len(found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
