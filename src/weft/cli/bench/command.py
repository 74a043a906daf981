"""The command line of `weft bench`: from options to a job, and to ranks that do it.

Under a launcher (RANK and WORLD_SIZE are set: torchrun, `tools/netlab`) this process is one of the
ranks. Otherwise it starts `--ranks` processes itself and shows what rank 0 tells it.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer
from rich.console import Console

import weft
from weft.testing import launch, send

from ..options import launched, names, rate, refuse, writable
from .cases import CASES, Case, Distribution, Dtype, Op
from .measure import PEERS, Job, run
from .results import Shown


def bench(
    case: Annotated[
        str | None,
        typer.Option(
            help=f"Cases, divided by commas: {', '.join(CASES)}, or all.",
            show_default="all, or one of your own sizes",
        ),
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="Algorithms of weft, divided by commas; a row for each; or all.")
    ] = "auto",
    peers: Annotated[
        str,
        typer.Option(
            help="Peers, divided by commas: torch (its sparse all-reduce), horovod (Horovod's way, "
            "in torch), dense, or none."
        ),
    ] = ",".join(PEERS),
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Start this many processes here.", show_default="1, or what launched it"
        ),
    ] = None,
    size: Annotated[float, typer.Option(help="Times the rows and the height of each case.")] = 1.0,
    rows: Annotated[int | None, typer.Option(help="Indices of a rank.")] = None,
    height: Annotated[int | None, typer.Option(help="Rows of the dense tensor.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Values of a row; 1 means plain numbers.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="Rows of a rank over the height; gives --rows.")
    ] = None,
    distribution: Annotated[Distribution | None, typer.Option(help="How rows are drawn.")] = None,
    ids: Annotated[
        Literal["frequency", "shuffled"] | None,
        typer.Option(
            help="Of zipf: whether the commonest row has index 0.", show_default="frequency"
        ),
    ] = None,
    values: Annotated[
        Literal["integers", "normal"] | None,
        typer.Option(help="Whose sums are exact, or round.", show_default="integers"),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Values.", show_default="float32")] = None,
    index_dtype: Annotated[
        Literal["int32", "int64"] | None, typer.Option(help="Indices.", show_default="int64")
    ] = None,
    op: Annotated[Op, typer.Option(help="The reduction; peers know sum and avg.")] = "sum",
    iters: Annotated[int, typer.Option(min=1, help="Timed calls of each contender.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed calls before them.")] = 2,
    check: Annotated[
        bool, typer.Option(help="Compare every result with the right one, and across ranks.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
    link: Annotated[
        str | None,
        typer.Option(help="Speed of a rank's link, such as 1gbit: shows time over the bound's."),
    ] = None,
    unprivileged: Annotated[
        bool,
        typer.Option(
            "--unprivileged",
            help="Ranks keep each other out of their memory, as an ordinary user's do; as root "
            "start it with: setpriv --bounding-set -sys_ptrace",
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that any wait may last.", show_default="300")
    ] = None,
) -> None:
    """Measure sparse all-reduce beside what PyTorch does today, and beside the bound.

    Results are checked before anything is timed; if one is wrong its row says so and the exit
    status is 1.
    """
    here = launched(ranks)
    if not 0 < size < math.inf or (density is not None and not 0 < density < math.inf):
        refuse("--size, --density", "they are numbers above 0")
    if unprivileged and not psutil.LINUX:
        refuse("--unprivileged", "there is prctl on Linux only")
    given = {
        "rows": rows,
        "height": height,
        "width": width,
        "distribution": distribution,
        "ids": ids,
        "values": values,
        "dtype": dtype,
        "index_dtype": index_dtype,
    }
    own = {name: value for name, value in given.items() if value is not None}
    job = Job(
        cases=_cases(case, size, density, own, op),
        algorithms=names("--algorithm", algorithm, ("auto", *weft.sparse.ALGORITHMS)),
        peers=() if peers == "none" else names("--peers", peers, PEERS),
        iters=iters,
        warmup=warmup,
        check=check,
        seed=seed,
        link=None if link is None else rate("--link", link),
        timeout=timeout,
        unprivileged=unprivileged,
    )
    writable("--json", json)
    try:
        if here and os.environ["RANK"] != "0":
            right = run(job, lambda found: None)
        else:
            with Shown(Console(), job.peers, job.link is not None, json) as shown:
                right = run(job, shown.show) if here else _launch(job, ranks or 1, shown)
    except (weft.Error, OSError) as error:
        typer.echo(f"weft bench: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not right:
        raise typer.Exit(1)


def _launch(job: Job, ranks: int, shown: Shown) -> bool:
    """Start the ranks as processes of this machine and show what rank 0 sends."""
    return all(launch(ranks, _rank, (job,), on_message=lambda _, found: shown.show(found)))


def _rank(job: Job) -> bool:
    """What a process that `_launch` started does."""
    return run(job, send)


def _cases(
    chosen: str | None, size: float, density: float | None, own: dict[str, Any], op: str
) -> tuple[Case, ...]:
    """The cases asked for, with the sizes of one's own."""
    if density is not None and "rows" in own and "height" in own:
        refuse("--density", "it is --rows over --height: give two of the three")
    if chosen is None and (own or density is not None):
        cases = [replace(CASES["uniform"], name="own")]
    else:
        cases = [CASES[name] for name in names("--case", chosen or "all", CASES)]
    made = []
    for case in cases:
        case = replace(case.scaled(size), op=op, **own)
        if density is not None and "rows" in own:
            case = replace(case, height=max(1, round(case.rows / density)))
        elif density is not None:
            case = replace(case, rows=max(1, round(case.height * density)))
        if (fault := case.fault()) is not None:
            refuse(f"case {case.name}", fault)
        made.append(case)
    return tuple(made)
