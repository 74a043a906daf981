"""The options of `weft bench`, its table and its file.

Under a launcher (RANK and WORLD_SIZE are set: torchrun, `tools/netlab`) this process is one of the
ranks. Otherwise it starts `--ranks` processes itself.
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import weft
from weft.testing import launch

from ..words import about, number, several, size
from .cases import CASES
from .measure import PEERS, Result, run

VERSION = 4
"""Of the format of files; it changes when a field changes its name or meaning, or goes."""

_COLUMNS = "{:11}{:14}{:10}{:>8}{:>8}{:>8}{:>9}{:>11}{:>9}"
_HEAD = """\
# ms: median of the slowest rank's time; MB: sent by the average rank; xbound: that over the bound's
# bytes; torch/x ...: the peer's time over this time: above 1, this is faster"""


def add_options(parser: ArgumentParser) -> None:
    """What `weft bench` takes."""
    algorithms = ["auto", *weft.sparse.ALGORITHMS]
    lists = (
        ("--case", CASES, "zipf,small,full", "what is summed"),
        ("--algorithm", algorithms, "auto", "of weft"),
        ("--peers", PEERS, "all", "what is timed beside weft"),
    )
    for option, names, default, what in lists:
        text = f"{what}: some of {', '.join(names)}, divided by commas; all; or none ({default})"
        parser.add_argument(option, type=several(names), default=default, help=text)
    sizes = (
        ("--rows", None, "indices that each rank brings; else those of the case"),
        ("--height", None, "rows of the dense tensor; else those of the case"),
        ("--width", None, "values of a row; else those of the case"),
        ("--ranks", 4, "processes to start, without a launcher (4)"),
        ("--iters", 5, "timed calls of each (5)"),
    )
    for option, number_of, what in sizes:
        parser.add_argument(option, type=size, default=number_of, metavar="N", help=what)
    parser.add_argument("--unprivileged", action="store_true", help="run as an ordinary user does")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def bench(given: Namespace) -> int:
    """Time sparse all-reduce beside PyTorch's collectives, and compare it with the lower bound."""
    own = {name: vars(given)[name] for name in ("rows", "height", "width") if vars(given)[name]}
    names = *(f"weft:{algorithm}" for algorithm in given.algorithm), *given.peers
    cases = tuple(replace(CASES[name], **own) for name in given.case)
    job = cases, names, given.iters, show, given.unprivileged
    speaks = os.environ.get("RANK", "0") == "0"
    if speaks:
        print(f"# {about()}\n{_HEAD}")
        titles = ["#case", "by", "algorithm", "ms", "MB", "xbound"]
        titles += [f"{peer}/x" for peer in PEERS]
        print(_COLUMNS.format(*titles), flush=True)
    is_rank = "WORLD_SIZE" in os.environ
    results = run(*job) if is_rank else launch(given.ranks, run, job)[0]
    if given.json and speaks:
        rows = [asdict(one) for one in results]
        given.json.write_text(json.dumps({"version": VERSION, "about": about(), "rows": rows}))
    return int(any(one.status in ("wrong", "failed") for one in results))


def show(results: list[Result]) -> None:
    """Print a line for each contender of a case."""
    medians = {one.by: median(one.seconds) for one in results if one.status == "ok"}
    for one in results:
        took, bound = medians.get(one.by), one.bound_bytes
        peers = [number(medians.get(peer), 1 / took) if took else "-" for peer in PEERS]
        milliseconds = number(took, 1e3) if took else one.status.upper()
        sent, over = (number(one.sent_bytes, 1 / unit) if bound else "-" for unit in (1e6, bound))
        cells = one.case, one.by, one.algorithm, milliseconds, sent, over, *peers
        print(_COLUMNS.format(*cells), flush=True)
        if one.why:
            print(f"# {one.case} {one.by} {one.status}: {one.why}")
