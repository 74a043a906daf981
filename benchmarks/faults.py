"""Let one rank fail in a collective; measure when the others raise, and whom their errors name.

    python benchmarks/faults.py --docs docs/errors.md         # all, into the manual: 20 minutes
    python benchmarks/faults.py --only kill,freeze,tcp,4              # two faults, a wire, 4 ranks
    python benchmarks/faults.py --sample 40                                    # 40 of the cells
    python benchmarks/faults.py --read --docs docs/errors.md          # judge the last run again
    PYTHONPATH=OTHER/src python benchmarks/faults.py --out build/other.json    # another checkout

A cell is a fault, a collective, a wire and a number of ranks. Its ranks are processes of this
machine that make the call again and again. The fault happens to one of them, which is another in
each cell. The wires are: `shm`, weft on one host; `tcp`, weft with each rank as if on a host of its
own; `gloo`, PyTorch alone, with its own collectives. Links are cut only if root may make network
namespaces (`tools/netlab`).

`ddp_unused` is a step with BatchNorm and `find_unused_parameters=True`, in which
DistributedDataParallel makes calls of its own over gloo. While the others are in such a call, weft
cannot name a rank that is alive but elsewhere; so those faults are left out for it. `topk` is a
step of `weft.ddp.TopK`, for gloo of PyTorch's PowerSGD. `sharded` looks up rows of a sharded table,
and runs backward. `dense` and `dense_small` are `dist.all_reduce` of 4 MB and of 1 KB, which weft
serves as the backend `cpu:weft`. `init` is `weft.init()`, in which a rank is killed.

`part` is a sum by some of the ranks:

* `bystander`: of a subset of two ranks one sleeps, while another rank, which is not of these, holds
  Python's lock in foreign code for longer than the deadline. weft is *known* to blame that one;
* `others leave`: of a split of all ranks but rank 0, which calls `shutdown` and goes. Nothing may
  be raised;
* `rank 0 killed`: the same, and rank 0 is killed. Nothing may be raised;
* `rank 0 gone`: rank 0 has left well before another rank, which is of the split, is killed.

`seconds` are counted from the fault until every live rank has raised. The limit is 1 if a process
ends or calls something else, and the deadline plus 1 if it is only silent; for `init` it is the
timeout of the start plus 1, since who dies before it has come to the store is only missed. Where
rank 0 dies in `init`, the store dies with it, and torch's error is *known* to name nobody. A live
rank *hangs* if it has not raised 6 seconds after the deadline. A cell is *wrong* if the error of a
live rank has another culprit, or if a rank raises that must not; it is *nobody* if a live rank
names none, also where its error has no `culprit` and only the text names somebody. It is *unclean*
if a survivor does not end by itself with status 0 after its shutdown, leaves processes or files
behind, or keeps sockets, threads or shared memory of weft's wires. The exit status is 0 if weft has
no such cell and none above the limit, but for known ones, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch

import weft
from weft.base.pace import patient

HERE = Path(__file__).resolve().parent

# seconds that one wait may last
DEADLINE = float(os.environ.get("FAULTS_DEADLINE", "2"))
GRACE = 1.0  # seconds that all have to raise: after a fault that is seen, or after the deadline
IN_INIT = 2 * DEADLINE  # seconds that a start may last in which a rank is killed
PATIENCE = 6.0  # seconds after the deadline, after which a rank hangs

AT_ONCE = ("kill", "exception", "exit", "another call", "rank 0 gone")
RIGHT = ("others leave", "rank 0 killed")  # for who is left: nothing may be raised
OF_A_PART = ("bystander", *RIGHT, "rank 0 gone")
FAULTS = (*AT_ONCE[:-1], "freeze", "cut", "absence", *OF_A_PART)
DDP = ("ddp", "ddp_unused", "topk")
DENSE = ("dense", "dense_small")
COLLECTIVES = (
    "small",
    "large",
    "list",
    "all_to_all",
    "layer",
    "barrier",
    "sync_grads",
    "sharded",
    *DENSE,
    *DDP,
    "init",
    "part",
)
WIRES = ("shm", "tcp", "gloo")
SIZES = (2, 4, 8)
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"


@dataclass(frozen=True, slots=True)
class Cell:
    """One job, and the fault of one of its ranks."""

    fault: str
    collective: str
    wire: str
    ranks: int
    victim: int

    @property
    def words(self) -> tuple[str, ...]:
        return self.fault, self.collective, self.wire, str(self.ranks)

    @property
    def limit(self) -> float:
        """Seconds within which all ranks must have raised."""
        if self.collective == "init":
            return patient(GRACE) + IN_INIT
        return patient(GRACE) + (0.0 if self.fault in AT_ONCE else DEADLINE)

    @property
    def culprit(self) -> int:
        """The victim, as the group numbers it whose call raises."""
        return self.victim - 1 if self.fault == "rank 0 gone" else self.victim

    @property
    def is_known(self) -> bool:
        """Whether weft is known not to pass, until what judges a wait, or the start, is mended."""
        return self.fault == "bystander" or (self.collective == "init" and self.victim == 0)

    def must_raise(self) -> list[int]:
        """The ranks that must raise: all but the victim; it, too, if it is in a call itself."""
        if self.fault in RIGHT:
            return []
        if self.fault == "bystander":
            return [0]
        if self.fault == "rank 0 gone":
            return [rank for rank in range(1, self.ranks) if rank != self.victim]
        all_of_them = self.fault in ("cut", "another call")
        return [rank for rank in range(self.ranks) if all_of_them or rank != self.victim]


@dataclass(slots=True)
class Result:
    """How a cell ended. `texts` has the errors of ranks, `unclean` what was left behind."""

    cell: Cell
    seconds: float = 0.0
    hangs: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    nobody: list[int] = field(default_factory=list)
    unclean: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        bad = self.hangs or self.wrong or self.nobody or self.unclean
        return not bad and self.seconds <= self.cell.limit

    @classmethod
    def read(cls, said: dict[str, Any]) -> Result:
        return cls(Cell(**said.pop("cell")), **said)


def named_in(text: str, rank: int) -> set[int]:
    """The ranks that the text of an error names, besides the rank that raised it."""
    found = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", text.replace(f"rank {rank}: ", ""))
    return {int(number) for each in found for number in re.findall(r"\d+", each)}


def cells(only: str) -> list[Cell]:
    """All cells, or those that `only` selects: by fault, collective, wire and number of ranks."""
    asked = set(filter(None, only.split(",")))
    kinds = [set(FAULTS), set(COLLECTIVES), set(WIRES), {str(size) for size in SIZES}]
    if unknown := asked.difference(*kinds):
        raise SystemExit(f"{', '.join(sorted(unknown))}: use {kinds}")
    wanted = [asked & kind or kind for kind in kinds]
    found = []
    for number, (wire, fault, collective, size) in enumerate(
        product(WIRES, FAULTS, COLLECTIVES, SIZES)
    ):
        cell = Cell(fault, collective, wire, size, victim_of(fault, size, number))
        if is_possible(cell) and all(
            word in each for word, each in zip(cell.words, wanted, strict=True)
        ):
            found.append(cell)
    return found


def victim_of(fault: str, size: int, number: int) -> int:
    """The rank that a fault happens to, and who is to blame for it."""
    if fault in RIGHT:
        return 0
    if fault == "bystander":
        return 1
    if fault == "rank 0 gone":
        return size - 1
    return number // 3 % size


def is_possible(cell: Cell) -> bool:
    if (cell.fault in OF_A_PART) != (cell.collective == "part"):
        return False
    if cell.collective == "part":
        return cell.ranks > 2 and cell.wire != "gloo"
    if cell.collective == "init":
        return cell.fault == "kill" and cell.wire != "gloo"
    if cell.fault == "cut" and cell.wire == "shm":
        return False
    if cell.fault == "cut" and (os.geteuid() != 0 or shutil.which("ip") is None):
        return False
    return cell.collective != "ddp_unused" or cell.fault not in ("absence", "another call")


def measure(asked: list[Cell], jobs: int) -> list[Result]:
    """Run cells, `jobs` at once."""
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in asked:
        waiting.put(cell)
    results: list[Result] = []
    lab = ["--lab"] if any(cell.fault == "cut" for cell in asked) else []
    line = [sys.executable, str(HERE / "fault_lane.py"), *lab]

    def follow() -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as lane:
            assert lane.stdin is not None and lane.stdout is not None
            with contextlib.suppress(queue.Empty):
                while True:
                    print(json.dumps(asdict(waiting.get_nowait())), file=lane.stdin, flush=True)
                    results.append(Result.read(json.loads(lane.stdout.readline())))
                    if len(results) % 20 == 0:
                        bad = len(not_as_they_should(results))
                        print(f"{len(results)} of {len(asked)} cells, {bad} bad", file=sys.stderr)
            lane.stdin.close()

    with ThreadPoolExecutor(jobs) as lanes:
        for done in [lanes.submit(follow) for _ in range(jobs)]:
            done.result()
    return results


def not_as_they_should(results: list[Result]) -> list[Result]:
    """What weft did wrong, but for what is known."""
    mine = [each for each in results if each.cell.wire != "gloo"]
    return [each for each in mine if not each.good and not each.cell.is_known]


def table(results: list[Result]) -> str:
    """The table in Markdown, with a line for each fault and wire."""
    lines = ["|fault|wire|cells|hang|wrong|nobody|unclean|seconds|", "|---|---|" + "--:|" * 6]
    for kind in product(FAULTS, WIRES, (False, True)):
        fault, wire, is_known = kind
        mine = [
            each
            for each in results
            if (each.cell.fault, each.cell.wire, each.cell.is_known) == kind
        ]
        if mine:
            counts = [
                sum(bool(getattr(each, what)) for each in mine)
                for what in ("hangs", "wrong", "nobody", "unclean")
            ]
            worst = max(each.seconds for each in mine)
            shown = "|".join(map(str, (len(mine), *counts)))
            known = " (known)" * is_known
            lines.append(f"|{fault}{known}|{wire}|{shown}|{worst:.2f}|")
    return "\n".join(lines)


def measured() -> str:
    """When, with which commit of the sources ("+": they were changed since), and which torch."""
    root = Path(weft.__file__).parents[2]
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=root, check=False)
    words = ["git", "log", "-1", "--format=%h", "--abbrev=7", "--", "src"]
    done = subprocess.run(words, cwd=root, text=True, stdout=subprocess.PIPE, check=False)
    commit = (done.stdout.strip() or str(root)) + "+" * (changed.returncode == 1)
    return f"{date.today()} with commit {commit}, torch {torch.version.__version__}"


def tell(each: Result) -> None:
    known = " (known)" * each.cell.is_known
    print(f"\n{' '.join(each.cell.words)}{known}, rank {each.cell.victim}: {each.seconds:.2f} s")
    for what in ("hangs", "wrong", "nobody", "unclean"):
        if getattr(each, what):
            print(f"  {what}: {', '.join(map(str, getattr(each, what)))}")
    for rank, text in each.texts.items():
        print(f"  {rank} raised {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="faults, collectives, wires and sizes")
    parser.add_argument("--sample", type=int, default=0, help="so many of the cells; 0: all")
    parser.add_argument("--jobs", type=int, default=3, help="cells at a time")
    parser.add_argument("--out", type=Path, default=Path("build/faults.json"))
    parser.add_argument("--read", action="store_true", help="judge what is in --out")
    parser.add_argument("--docs", type=Path, help="page to put the table into")
    given = parser.parse_args()
    if given.read:
        found = json.loads(given.out.read_text(encoding="utf-8"))
    else:
        asked = cells(given.only)
        random.Random(0).shuffle(asked)
        results = measure(asked[: given.sample or None], given.jobs)
        found = {"measured": measured(), "results": [asdict(each) for each in results]}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    results = [Result.read(each) for each in found["results"]]
    print(f"Measured {found['measured']}.\n\n{table(results)}")
    for each in results:
        if not each.good and each.cell.wire != "gloo":
            tell(each)
        if each.good and each.cell.is_known:
            print(f"\n{' '.join(each.cell.words)} passes: it need not be known any more")
    if given.docs is not None:
        before, rest = given.docs.read_text(encoding="utf-8").split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        text = f"Measured {found['measured']}.\n\n{table(results)}\n"
        given.docs.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    return int(bool(not_as_they_should(results)))


if __name__ == "__main__":
    raise SystemExit(main())
