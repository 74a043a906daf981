"""Let one rank fail in a collective; measure when the others raise, and whom their errors name.

    python benchmarks/faults.py --docs docs/errors.md         # all, into the manual: 20 minutes
    python benchmarks/faults.py --only kill,freeze,tcp,4              # two faults, a wire, 4 ranks
    python benchmarks/faults.py --sample 40                                    # 40 of the cells
    python benchmarks/faults.py --read --docs docs/errors.md          # judge the last run again

A cell is a fault, a collective, a wire and a number of ranks. Its ranks are processes of this
machine that make the call again and again. The fault happens to one of them, which is another in
each cell. The wires are: `shm`, weft on one host; `tcp`, weft with each rank as if on a host of its
own; `torch`, weft over a process group of torch's; `gloo`, PyTorch alone, with its own collectives.
Links are cut only if root may make network namespaces (`tools/netlab`).

`ddp_unused` is a step with BatchNorm and `find_unused_parameters=True`, in which
DistributedDataParallel makes calls of its own over gloo. While the others are in such a call, weft
cannot name a rank that is alive but elsewhere; so those faults are left out for it. `topk` is a
step of `weft.ddp.TopK`, for gloo of PyTorch's PowerSGD. `sharded` looks up rows of a sharded table,
and runs backward. `dense` and `dense_small` are `dist.all_reduce` of 4 MB and of 1 KB, which weft
serves as the backend `cpu:weft`.

`seconds` are counted from the fault until every live rank has raised. The limit is 1 if a process
ends or calls something else, and the deadline plus 1 if it is only silent. A live rank *hangs* if
it has not raised 6 seconds after the deadline. A cell is *wrong* if a live rank names another than
the culprit, *nobody* if a live rank names none. It is *unclean* if a survivor does not end by
itself with status 0 after its shutdown, leaves processes or files behind, or keeps sockets, threads
or shared memory of weft's wires. The exit status is 0 if weft has no such cell and none above the
limit, else 1.
"""

from __future__ import annotations

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
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TextColumn

from choice import measured
from goals import HERE
from weft.base.pace import patient

# seconds that one wait may last
DEADLINE = float(os.environ.get("FAULTS_DEADLINE", "2"))
GRACE = 1.0  # seconds that all have to raise: after a fault that is seen, or after the deadline
PATIENCE = 6.0  # seconds after the deadline, after which a rank hangs

AT_ONCE = ("kill", "exception", "exit", "another call")
FAULTS = (*AT_ONCE, "freeze", "cut", "absence")
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
)
WIRES = ("shm", "tcp", "torch", "gloo")
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
        return patient(GRACE) + (0.0 if self.fault in AT_ONCE else DEADLINE)

    def must_raise(self) -> list[int]:
        """The ranks that must raise: all but the victim; it, too, if it is in a call itself."""
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
    able = os.geteuid() == 0 and shutil.which("ip") is not None
    asked = set(filter(None, only.split(",")))
    kinds = [set(FAULTS), set(COLLECTIVES), set(WIRES), {str(size) for size in SIZES}]
    if unknown := asked.difference(*kinds):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: use {kinds}")
    wanted = [asked & kind or kind for kind in kinds]
    found = []
    for number, (wire, fault, collective, size) in enumerate(
        product(WIRES, FAULTS, COLLECTIVES, SIZES)
    ):
        cell = Cell(fault, collective, wire, size, number // 3 % size)
        possible = fault != "cut" or (able and wire != "shm")
        possible &= collective != "ddp_unused" or fault not in ("absence", "another call")
        possible &= collective not in DENSE or wire != "torch"  # the backend has wires of its own
        if possible and all(word in each for word, each in zip(cell.words, wanted, strict=True)):
            found.append(cell)
    return found


def measure(asked: list[Cell], jobs: int) -> list[Result]:
    """Run cells, `jobs` at once."""
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in asked:
        waiting.put(cell)
    results: list[Result] = []
    lab = ["--lab"] if any(cell.fault == "cut" for cell in asked) else []
    line = [sys.executable, str(HERE / "fault_lane.py"), *lab]
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[news]}")) as progress:
        task = progress.add_task("cells", total=len(asked), news="")

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
                        bad = sum(not each.good for each in results if each.cell.wire != "gloo")
                        progress.update(task, advance=1, news=f"{bad} of weft's not as they should")
                lane.stdin.close()

        with ThreadPoolExecutor(jobs) as lanes:
            for done in [lanes.submit(follow) for _ in range(jobs)]:
                done.result()
    return results


def table(results: list[Result]) -> str:
    """The table in Markdown, with a line for each fault and wire."""
    lines = ["|fault|wire|cells|hang|wrong|nobody|unclean|seconds|", "|---|---|" + "--:|" * 6]
    for fault, wire in product(FAULTS, WIRES):
        mine = [each for each in results if each.cell.fault == fault and each.cell.wire == wire]
        if mine:
            counts = [
                sum(bool(getattr(each, what)) for each in mine)
                for what in ("hangs", "wrong", "nobody", "unclean")
            ]
            worst = max(each.seconds for each in mine)
            shown = "|".join(map(str, (len(mine), *counts)))
            lines.append(f"|{fault}|{wire}|{shown}|{worst:.2f}|")
    return "\n".join(lines)


def main(
    only: Annotated[str, typer.Option(help="Faults, collectives, wires and sizes.")] = "",
    sample: Annotated[int, typer.Option(help="So many of the cells; 0: all.")] = 0,
    jobs: Annotated[int, typer.Option(help="Cells at a time.")] = 3,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = Path("build/faults.json"),
    read_only: Annotated[bool, typer.Option("--read", help="Judge what is there.")] = False,
    docs: Annotated[Path | None, typer.Option(help="Page to put the table into.")] = None,
) -> None:
    """Say how soon and how well ranks learn of a fault."""
    if read_only:
        found = json.loads(out.read_text(encoding="utf-8"))
    else:
        asked = cells(only)
        random.Random(0).shuffle(asked)
        results = measure(asked[: sample or None], jobs)
        found = {"measured": measured(), "results": [asdict(each) for each in results]}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    results = [Result.read(each) for each in found["results"]]
    print(table(results))
    bad = [each for each in results if not each.good and each.cell.wire != "gloo"]
    for each in bad:
        print(f"\n{' '.join(each.cell.words)}, rank {each.cell.victim}: {each.seconds:.2f} s")
        for what in ("hangs", "wrong", "nobody", "unclean"):
            if getattr(each, what):
                print(f"  {what}: {', '.join(map(str, getattr(each, what)))}")
        for rank, text in each.texts.items():
            print(f"  {rank} raised {text}")
    if docs is not None:
        before, rest = docs.read_text(encoding="utf-8").split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        text = f"Measured {found['measured']}.\n\n{table(results)}\n"
        docs.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    raise typer.Exit(bool(bad))


if __name__ == "__main__":
    typer.run(main)
