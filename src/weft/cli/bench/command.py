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
from .cases import Dtype, Ids, IndexDtype, Numbers, Op
from .measure import PEERS, Job, run
from .results import Shown

_ALL = ",".join(PEERS)


def bench(
    case: options.Cases = None,
    algorithm: Annotated[str, Option(help="Algorithms of weft to time, or all.")] = "auto",
    peers: Annotated[str, Option(help="What to time beside weft, or none.")] = _ALL,
    ranks: Annotated[int | None, Option(min=1, help="Ranks to start.", show_default="1")] = None,
    size: Annotated[float, Option(help="Factor for rows and height of each case.")] = 1.0,
    rows: options.Rows = None,
    height: options.Height = None,
    width: options.Width = None,
    density: Annotated[float | None, Option(help="Rows divided by height.")] = None,
    distribution: options.Drawn = None,
    ids: Annotated[Ids, Option(help="zipf: order of indices.")] = "frequency",
    values: Annotated[Numbers, Option(help="Sums of integers are exact.")] = "integers",
    dtype: Annotated[Dtype, Option(help="Dtype of the values.")] = "float32",
    index_dtype: Annotated[IndexDtype, Option(help="Dtype of the indices.")] = "int64",
    op: Annotated[Op, Option(help="The reduction; peers have only sum and avg.")] = "sum",
    iters: Annotated[int, Option(min=1, help="Timed calls of each contender.")] = 10,
    warmup: Annotated[int, Option(min=0, help="Untimed calls before those.")] = 2,
    check: Annotated[bool, Option(help="Compare each result with the correct one.")] = True,
    seed: Annotated[int, Option(help="Seed of the data.")] = 0,
    link: Annotated[
        float | None, Option(parser=options.rate, help="Speed of the link, such as 1gbit.")
    ] = None,
    unprivileged: Annotated[bool, Option(help="Run as an ordinary user's processes.")] = False,
    json: options.Json = None,
    timeout: options.Timeout = None,
) -> None:
    """Time sparse all-reduce beside PyTorch's collectives, and compare it with the lower bound.

    Results are checked before anything is timed.
    If one is wrong, its row says WRONG and the exit status is 1.
    """
    here = options.launched(ranks)
    if not 0 < size < math.inf or (density is not None and not 0 < density < math.inf):
        options.refuse("--size, --density", "they must be finite and above 0")
    if unprivileged and not psutil.LINUX:
        options.refuse("--unprivileged", "it needs prctl, which only Linux has")
    own = {"rows": rows, "height": height, "width": width, "distribution": distribution}
    kind = {"ids": ids, "values": values, "dtype": dtype, "index_dtype": index_dtype, "op": op}
    cases = options.cases_of(case, "all", own, kind, size, density)
    algorithms = options.names("--algorithm", algorithm, ("auto", *weft.sparse.ALGORITHMS))
    others = () if peers == "none" else options.names("--peers", peers, PEERS)
    when = iters, warmup, check
    job = Job(cases, algorithms, others, *when, seed, link, timeout, unprivileged)
    shown = Shown(Console(highlight=False), job.peers, link is not None, json)
    with options.failing("bench", 1), shown:
        if here:
            right = [run(job, shown.show)]
        else:
            hear = shown.show
            right = launch(ranks or 1, run, (job, send), on_message=lambda rank, found: hear(found))
    if not all(right):
        raise typer.Exit(1)
