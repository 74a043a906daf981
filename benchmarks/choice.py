"""Compare the algorithm that `auto` chooses with all others, in each case on each link.

    python benchmarks/choice.py --docs docs/choice.md          # all, into the manual: 25 minutes
    python benchmarks/choice.py --link 4x1gbit --case zipf,full    # or a part of it ...
    python benchmarks/choice.py --read --docs docs/choice.md       # ... and then into the manual
    python benchmarks/choice.py --link one-host --case text,ratings,graph,tables   # real work
    python benchmarks/choice.py --several --docs docs/choice.md    # a case for each algorithm

All algorithms take turns in one run, so noise affects all alike. Links and cases are those of
`goals.py`; cases of `weft bench --case real` can be named, too. The figure is the median time of
`auto` over the least median time of all algorithms: 1.00 means that no algorithm was faster. Over a
network `dense_tail` is left out if the dense tensor has more rows than all ranks together: there it
takes 5 to 30 times as long as the fastest.

`--several` runs other cases, on several hosts of several ranks each: one for each algorithm, in
which it is predicted to be the quickest (`SETTINGS`), and one more for `gather`, with one rank on
each host. A table has the measured and the predicted time of every algorithm. The exit status is
then 0 if `auto` took the expected one in all of them.

Else it is 0 if the figure is at most 1.15 in 30 of the 35 cases (in six of seven, if there
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

from goals import CASES, HERE, LINKS, Link, asked, command
from weft.cli.bench.cases import CASES as DRAWN
from weft.cli.bench.cases import REAL
from weft.cli.bench.results import OWN
from weft.sparse import ALGORITHMS, EAGER

LIMIT, SHARE = 1.15, 30 / 35
FIVE = tuple(LINKS)[:5]  # those of docs/choice.md
SIZES = DRAWN | REAL
ROOT = HERE.parent
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
BEGIN_SEVERAL, END_SEVERAL = "<!-- several -->", "<!-- /several -->"


@dataclass(frozen=True, slots=True)
class Setting:
    """A case on several hosts, in which an algorithm is predicted to be quickest.

    Attributes:
        expected: the algorithm, or "eager".
        hosts, per_host, rate: the hosts, ranks of each, and the rate of their links.
        rows, height, width: a rank brings so many of so many rows, of so many floats.
        distribution: as `weft bench --distribution`.
        delay: milliseconds from one host to another.
    """

    expected: str
    hosts: int
    per_host: int
    rate: str
    rows: int
    height: int
    width: int
    distribution: str = "uniform"
    delay: float = 0

    @property
    def shape(self) -> str:
        return f"{self.hosts}x{self.per_host}"

    def __str__(self) -> str:
        words = f"{self.rows:,} of {self.height:,} rows of {self.width} floats"
        if self.distribution == "identical":
            words = f"the same {words}"
        apart = f", {self.delay:g} ms apart" if self.delay else ""
        return f"{self.shape}, {self.rate}{apart}, {words}"

    def command(self, file: Path, iters: int) -> list[str]:
        """The command line that measures all algorithms."""
        link = Link("several", self.hosts, self.rate, iters, self.per_host, self.delay)
        names = served(link.ranks, self.rows, self.height)
        argv = command(link, ["uniform"], names, file, 1.0, "none")
        sizes = {"rows": self.rows, "height": self.height, "width": self.width}
        for name, value in sizes.items():
            argv += [f"--{name}", str(value)]
        return [*argv, "--distribution", self.distribution]


# By links as netlab makes them on two cores: there each is predicted to be 10 % ahead or more, of
# all that keep within the memory that `auto` allows. But `dense_tail` is 4 % ahead, and `ring` from
# 14 % behind to 17 % ahead, by what is measured of the link: between 8 ranks, 3 to 5 Gbit/s.
SETTINGS = (
    Setting("eager", 2, 2, "1gbit", 60, 1_000_000, 64),
    Setting("gather", 3, 1, "1gbit", 100_000, 1_000_000, 4),
    Setting("gather", 2, 2, "100mbit", 5_000, 1_000_000, 16, delay=25),
    Setting("doubling", 4, 2, "10gbit", 600, 1_000, 64),
    Setting("holders", 4, 2, "1gbit", 7_000, 1_000_000, 1024),
    Setting("split", 2, 4, "1gbit", 50_000, 1_000_000, 16),
    Setting("ring", 4, 2, "10gbit", 60_000, 1_000_000, 64, "identical"),
    Setting("mask", 2, 4, "10gbit", 200_000, 1_000_000, 1, "identical"),
    Setting("dense_tail", 4, 2, "100mbit", 6_000, 8_000, 16, delay=25),
)


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


def algorithms(link: Link, case: str) -> str:
    """What is worth measuring there, as `weft bench --algorithm` wants it."""
    mine = SIZES[case]
    return "all" if link.rate is None else served(link.ranks, mine.rows, mine.height)


def served(ranks: int, rows: int, height: int) -> str:
    """All algorithms, but for `dense_tail` where the table is longer than all ranks' rows."""
    if height <= ranks * rows:
        return "all"
    names = sorted(ALGORITHMS.keys() - {"dense_tail"})
    return ",".join(["auto", *names])


def measure(links: Iterable[str], cases: Iterable[str], out: Path, size: float) -> None:
    for name in links:
        for case in cases:
            file = out / f"{name}-{case}.json"
            argv = command(LINKS[name], [case], algorithms(LINKS[name], case), file, size)
            argv += ["--peers", "none"]
            print(f"# {name} {case}, load of this machine {os.getloadavg()[0]:.1f}", flush=True)
            run(argv, file)


def measure_several(settings: Iterable[Setting], out: Path, iters: int) -> None:
    for setting in settings:
        print(f"# {setting}, load of this machine {os.getloadavg()[0]:.1f}", flush=True)
        run(setting.command(file_of(setting, out), iters), file_of(setting, out))


def file_of(setting: Setting, out: Path) -> Path:
    return out / f"several-{setting.expected}-{setting.shape}.json"


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


@dataclass(frozen=True, slots=True)
class Trial:
    """What `weft bench` found in a setting.

    Attributes:
        chosen: what `auto` took.
        times: of each algorithm that serves: measured and predicted seconds; of "auto", too.
    """

    setting: Setting
    chosen: str
    times: dict[str, tuple[float, float | None]]
    measured: str

    @property
    def as_expected(self) -> bool:
        return self.chosen == self.setting.expected

    def cell(self, name: str) -> str:
        """The measured milliseconds of an algorithm, and the predicted ones."""
        # what auto took has its time, where it cannot be asked for by name
        taken = "auto" if name == self.chosen and name not in self.times else name
        if taken not in self.times:
            return "-"
        seconds, predicted = self.times[taken]
        words = f"{1e3 * seconds:.1f}"
        if predicted is not None:
            words += f" ({1e3 * predicted:.1f})"
        return f"**{words}**" if name == self.chosen else words


def trials(out: Path) -> list[Trial]:
    """What the files of a folder say of the settings, in their order."""
    found = []
    for setting in SETTINGS:
        file = file_of(setting, out)
        if not file.exists():
            continue
        read = json.loads(file.read_text(encoding="utf-8"))
        refuse_wrong(str(setting), read["rows"])
        done = [row for row in read["rows"] if row["status"] == "ok"]
        times = {
            row["by"].removeprefix(OWN): (row["median_seconds"], row["predicted_seconds"])
            for row in done
        }
        [auto] = [row for row in done if row["by"] == f"{OWN}auto"]
        found.append(Trial(setting, auto["algorithm"], times, read["measured"]))
    return found


def table_of_trials(found: list[Trial]) -> str:
    """Markdown: measured and predicted milliseconds of each algorithm; in bold what `auto` took."""
    names = [EAGER, *sorted(ALGORITHMS)]
    lines = [f"| | {' | '.join(f'`{name}`' for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for trial in found:
        cells = " | ".join(trial.cell(name) for name in names)
        lines.append(f"| {trial.setting} | {cells} |")
    times = {trial.measured: None for trial in found}
    lines += ["", *(f"Measured {when}." for when in times)]
    return "\n".join(lines) + "\n"


def refuse_wrong(where: str, rows: list[dict[str, Any]]) -> None:
    """End the tool if a result was wrong."""
    wrong = [row for row in rows if row["status"] == "wrong"]
    if wrong:
        print(f"choice: {where}: {wrong[0]['by']} is wrong: {wrong[0]['why']}")
        raise typer.Exit(1)


def draw(found: list[Choice], file: Path) -> None:
    """Each algorithm's time over the best's, a panel for each link; a ring is what `auto` took."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from weft.cli import pictures

    links = list(dict.fromkeys(choice.link for choice in found))
    names = sorted({name for choice in found for name in choice.others})
    colours = dict(zip(names, matplotlib.colormaps["tab10"].colors, strict=False))
    auto = {"marker": "o", "mfc": "none", "mec": pictures.INK}

    def panels(figure: Figure) -> None:
        axes = figure.subplots(1, len(links), sharex=True, squeeze=False)
        for axis, link in zip(axes[0], links, strict=True):
            mine = [choice for choice in found if choice.link == link]
            for place, choice in enumerate(mine):
                least = choice.others[choice.best]
                for name, seconds in choice.others.items():
                    axis.plot(seconds / least, place, "o", color=colours[name], ms=5, alpha=0.9)
                axis.plot(choice.others[choice.chosen] / least, place, ms=11, **auto)
            axis.set_yticks(range(len(mine)), [choice.case for choice in mine])
            axis.invert_yaxis()
            axis.set_xscale("log")
            axis.set_xlim(0.9, 12)
            axis.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
            axis.minorticks_off()
            axis.axvline(LIMIT, color=pictures.MUTED, lw=0.6)
            axis.set_title(link, fontsize=10)
        marks = [Line2D([], [], ls="", marker="o", c=colours[name], label=name) for name in names]
        marks.append(Line2D([], [], ls="", ms=10, label="auto", **auto))
        figure.supxlabel("time / time of the best", fontsize=9)
        figure.legend(handles=marks, loc="outside right center", fontsize=8)

    file.parent.mkdir(parents=True, exist_ok=True)
    pictures.write(file, "svg", 2.4 * len(links) + 1.6, 3.6, panels)


def publish(found: list[Choice], page: Path) -> None:
    """Put tables and picture into a page of the manual."""
    put(f"{summary(found)}\n\n{table(found)}", page, BEGIN, END)
    draw(found, page.parent / "images" / "choice.svg")


def put(text: str, page: Path, begin: str, end: str) -> None:
    """Put a text into a page of the manual, between its two marks."""
    before, rest = page.read_text(encoding="utf-8").split(begin, 1)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def main(
    link: Annotated[str, typer.Option(help="Links, divided by commas.")] = ",".join(FIVE),
    case: Annotated[str, typer.Option(help="Cases, divided by commas.")] = ",".join(CASES),
    size: Annotated[float, typer.Option(help="Times the rows and heights.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = Path("build/choice"),
    read_only: Annotated[bool, typer.Option("--read", help="Judge what is there.")] = False,
    docs: Annotated[Path | None, typer.Option(help="Page to put tables and picture into.")] = None,
    several: Annotated[
        bool, typer.Option("--several", help="A case for each algorithm, on several hosts.")
    ] = False,
    iters: Annotated[int, typer.Option(help="Timed calls of each, with --several.")] = 7,
) -> None:
    """Say whether `auto` takes what is quickest."""
    links, cases = asked("choice", link, case, SIZES)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if several:
        if not read_only:
            measure_several(SETTINGS, out, iters)
        show_several(trials(out), out, docs)
        return
    if not read_only:
        measure(links, cases, out, size)
    found = [one for one in choices(out) if one.link in links and one.case in cases]
    if not found:
        print(f"choice: {out} has no figures of these links and cases; leave out --read")
        raise typer.Exit(2)
    print(f"{'link':10} {'case':10} {'auto took':13} {'ms':>8} {'best':13} {'ms':>8} {'ratio':>6}")
    for one in found:
        print(one.line())
    if docs is not None:
        publish(found, docs)
    if sum(one.ratio <= LIMIT for one in found) < SHARE * len(found):
        raise typer.Exit(1)


def show_several(found: list[Trial], out: Path, docs: Path | None) -> None:
    """Print what was found in the settings; exit with 1 if `auto` took another algorithm."""
    if not found:
        print(f"choice: {out} has no figures of --several; leave out --read")
        raise typer.Exit(2)
    print(table_of_trials(found))
    others = [trial for trial in found if not trial.as_expected]
    for trial in others:
        print(f"{trial.setting}: auto took {trial.chosen}, expected was {trial.setting.expected}")
    if docs is not None:
        put(table_of_trials(found), docs, BEGIN_SEVERAL, END_SEVERAL)
    if others:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
