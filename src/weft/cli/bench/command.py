"""The command line of `weft bench`: from options to a job, and to ranks that do it.

Under a launcher (RANK and WORLD_SIZE are set: torchrun, `tools/netlab`) this process is one of the
ranks. Otherwise it starts `--ranks` processes itself and shows what rank 0 tells it.
"""

from __future__ import annotations

import math
from typing import Annotated

import psutil
import typer
from rich.console import Console
from typer import Option

import weft
from weft.testing import launch, send

from .. import options
from .cases import CASES, REAL, Ids, IndexDtype, Numbers, Op
from .measure import PEERS, Job, run
from .real import TRACES
from .results import Shown

_ALL = ",".join(PEERS)
_QUICK = "zipf,small,full"
_NOTE = f"quick: {_QUICK}; --case all measures {len(CASES)} cases, which takes some minutes"
_RANKS = 4

_WHAT = "What is timed"
_HOW = "How it is timed"


def bench(
    case: options.CasesOrReal = None,
    size: Annotated[
        float,
        Option(help="Times the rows and the height of each.", rich_help_panel=options.THE_CASE),
    ] = 1.0,
    rows: options.Rows = None,
    height: options.Height = None,
    width: options.Width = None,
    density: Annotated[
        float | None, Option(help="Rows divided by height.", rich_help_panel=options.THE_CASE)
    ] = None,
    distribution: options.Drawn = None,
    ids: Annotated[
        Ids, Option(help="Order of zipf's indices.", rich_help_panel=options.THE_CASE)
    ] = "frequency",
    values: Annotated[
        Numbers, Option(help="Sums of integers are exact.", rich_help_panel=options.THE_CASE)
    ] = "integers",
    dtype: options.ValueDtype = "float32",
    wire_dtype: options.SentDtype = None,
    index_dtype: Annotated[
        IndexDtype, Option(help="Of indices.", rich_help_panel=options.THE_CASE)
    ] = "int64",
    seed: Annotated[int, Option(help="Of the data.", rich_help_panel=options.THE_CASE)] = 0,
    algorithm: Annotated[
        str, Option(metavar="NAMES", help="Of weft: some, or all.", rich_help_panel=_WHAT)
    ] = "auto",
    peers: Annotated[
        str, Option(metavar="NAMES", help="Beside weft: some, or none.", rich_help_panel=_WHAT)
    ] = _ALL,
    op: Annotated[
        Op, Option(metavar="OP", help="The reduction; peers: sum, avg.", rich_help_panel=_WHAT)
    ] = "sum",
    ranks: Annotated[
        int | None,
        Option(
            min=1,
            metavar="N",
            help="Processes to start.",
            show_default=str(_RANKS),
            rich_help_panel=_HOW,
        ),
    ] = None,
    iters: Annotated[
        int, Option(min=1, metavar="N", help="Timed calls of each.", rich_help_panel=_HOW)
    ] = 5,
    warmup: Annotated[
        int, Option(min=0, metavar="N", help="Untimed calls before those.", rich_help_panel=_HOW)
    ] = 1,
    check: Annotated[
        bool,
        Option("--check/--no-check", help="Look whether results are right.", rich_help_panel=_HOW),
    ] = True,
    link: Annotated[
        float | None,
        Option(
            parser=options.rate,
            metavar="SPEED",
            help="Speed of the links, as 1gbit.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    unprivileged: Annotated[
        bool,
        Option("--unprivileged", help="Run as an ordinary user does.", rich_help_panel=_HOW),
    ] = False,
    timeout: options.Timeout = None,
    json: options.Json = None,
    csv: options.Csv = None,
) -> None:
    """Time sparse all-reduce beside PyTorch's collectives, and compare it with the lower bound.

    Without options: three cases on four processes, in about a minute.
    Results are checked before anything is timed.
    If one is wrong, its row says WRONG and the exit status is 1.
    """
    here = options.launched(ranks)
    if not 0 < size < math.inf or (density is not None and not 0 < density < math.inf):
        options.refuse("--size, --density", "they must be finite and above 0")
    if unprivileged and not psutil.LINUX:
        options.refuse("--unprivileged", "it needs prctl, which only Linux has")
    own = {"rows": rows, "height": height, "width": width, "distribution": distribution}
    kind = {
        "ids": ids,
        "values": values,
        "dtype": dtype,
        "index_dtype": index_dtype,
        "op": op,
        "wire_dtype": wire_dtype,
    }
    cases = options.cases_of(case, _QUICK, own, kind, size, density, REAL)
    for one in cases:
        trace = TRACES.get(one.distribution)
        if trace is not None and (missing := trace.missing()) is not None:
            options.refuse(f"case {one.name}", missing)
    algorithms = options.names("--algorithm", algorithm, ("auto", *weft.sparse.ALGORITHMS))
    others = () if peers == "none" else options.names("--peers", peers, PEERS)
    when = iters, warmup, check
    job = Job(cases, algorithms, others, *when, seed, link, timeout, unprivileged)
    notes = []
    if [one.name for one in cases] == _QUICK.split(",") and case is None:
        notes.append(_NOTE)
    if wire_dtype is not None:
        notes.append(f"wire_dtype {wire_dtype}: of weft's calls; peers send values as they are")
    console = Console(highlight=False)
    shown = Shown(console, job.peers, link is not None, json, csv, notes)
    with options.failing("bench", 1), shown:
        if here:
            right = [run(job, shown.show)]
        else:
            hear = shown.show
            arguments = job, send
            right = launch(
                ranks or _RANKS, run, arguments, on_message=lambda rank, found: hear(found)
            )
    if not all(right):
        raise typer.Exit(1)
