"""The command line of `weft bench`: from options to a job, and to ranks that do it.

Under a launcher (RANK and WORLD_SIZE are set: torchrun, `tools/netlab`) this process is one of the
ranks. Otherwise it starts `--ranks` processes itself and shows what rank 0 tells it. Nothing heavy
is imported before the options are read.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from .cases import Case
    from .measure import Job
    from .results import Head, Row
    from .table import Sink

__all__ = ["bench"]

_OWN_SIZES = ("rows", "height", "width", "distribution", "ids", "values", "dtype", "index_dtype")


def bench(
    case: Annotated[
        str | None,
        typer.Option(
            help="Cases, divided by commas: uniform, zipf, small, identical, scalar, wide, full, "
            "or all.",
            show_default="all, or one of your own sizes",
        ),
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="Algorithms of weft, divided by commas; a row for each; or all.")
    ] = "auto",
    peers: Annotated[
        str, typer.Option(help="Peers, divided by commas: torch, horovod, dense, or none.")
    ] = "torch,horovod,dense",
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Start this many processes here.", show_default="1, or what the launcher says"
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
    distribution: Annotated[str | None, typer.Option(help="uniform, zipf or identical.")] = None,
    ids: Annotated[
        str | None,
        typer.Option(
            help="Of zipf: frequency (the commonest row has index 0) or shuffled.",
            show_default="frequency",
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            help="integers (sums are exact) or normal (they round).", show_default="integers"
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the values, as torch says it.", show_default="float32")
    ] = None,
    index_dtype: Annotated[
        str | None, typer.Option(help="int32 or int64.", show_default="int64")
    ] = None,
    op: Annotated[str, typer.Option(help="The reduction; peers know sum and avg.")] = "sum",
    iters: Annotated[int, typer.Option(help="Timed calls of each contender.")] = 10,
    warmup: Annotated[int, typer.Option(help="Untimed calls before them.")] = 2,
    check: Annotated[
        bool, typer.Option(help="Compare every result with the right one, and across ranks.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
    link: Annotated[
        str | None,
        typer.Option(help="Speed of a rank's link, such as 1gbit: shows time over the bound's."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that any wait may last.", show_default="300")
    ] = None,
) -> None:
    """Measure sparse all-reduce beside what PyTorch does today, and beside the bound.

    Results are checked before anything is timed; if one is wrong its row says so and the exit
    status is 1.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and ranks not in (None, int(os.environ["WORLD_SIZE"])):
        world = os.environ["WORLD_SIZE"]
        _refuse(f"--ranks {ranks} under a launcher that started {world}: leave --ranks out")
    if ranks is not None and ranks < 1:
        _refuse(f"--ranks {ranks}: at least 1")
    if iters < 1 or warmup < 0:
        _refuse(f"--iters {iters} --warmup {warmup}: at least 1 and 0")
    if not 0 < size < math.inf or (density is not None and not 0 < density < math.inf):
        _refuse("--size and --density are numbers above 0")
    bits = _bits(link)
    if json is not None:
        _writable(json)

    from .measure import Job

    given = (rows, height, width, distribution, ids, values, dtype, index_dtype)
    own = {name: value for name, value in zip(_OWN_SIZES, given, strict=True) if value is not None}
    job = Job(
        cases=_cases(case, size, density, own, op),
        algorithms=_algorithms(algorithm),
        peers=_peers(peers),
        iters=iters,
        warmup=warmup,
        check=check,
        seed=seed,
        link=bits,
        timeout=timeout,
    )
    right = _here(job, json) if launched else _launch(job, ranks or 1, json)
    if not right:
        raise typer.Exit(1)


def _here(job: Job, json: Path | None) -> bool:
    """Be the one rank that the launcher made this process."""
    from weft.errors import Error

    from .measure import run

    try:
        if os.environ["RANK"] != "0":
            return run(job, lambda _: None)
        with _Shown(job, json) as shown:
            return run(job, shown.take)
    except Error as error:
        typer.echo(f"weft bench: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _launch(job: Job, ranks: int, json: Path | None) -> bool:
    """Start the ranks as processes of this machine and show what rank 0 sends."""
    from weft.bootstrap.local import launch
    from weft.errors import Error

    try:
        with _Shown(job, json) as shown:
            return all(launch(ranks, _rank, (job,), on_message=lambda _, found: shown.take(found)))
    except Error as error:
        typer.echo(f"weft bench: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _rank(job: Job) -> bool:
    """What a process that `_launch` started does."""
    from weft.bootstrap.local import send

    from .measure import run

    return run(job, send)


class _Shown:
    """Shows what comes and, at the end, writes it where `--json` says, however it ends."""

    def __init__(self, job: Job, json: Path | None) -> None:
        from rich.console import Console

        from .table import sink

        self._json = json
        self._sink: Sink = sink(Console(), job.peers, job.link is not None)
        self._head: Head | None = None
        self._rows: list[Row] = []

    def __enter__(self) -> _Shown:
        self._sink.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        from .results import write

        self._sink.__exit__(*error)
        if self._json is not None and self._head is not None:
            write(self._json, self._head, self._rows)

    def take(self, found: Head | Row | str) -> None:
        from .results import Head, Row

        if isinstance(found, Head):
            self._head = found
        elif isinstance(found, Row):
            self._rows.append(found)
        self._sink.show(found)


def _cases(
    names: str | None, size: float, density: float | None, own: dict[str, Any], op: str
) -> tuple[Case, ...]:
    from .cases import CASES, DISTRIBUTIONS, DTYPES

    def known(option: str, there_is: tuple[str, ...]) -> None:
        if option in own and own[option] not in there_is:
            flag = option.replace("_", "-")
            _refuse(f"unknown --{flag} {own[option]!r}: there is {', '.join(there_is)}")

    known("distribution", DISTRIBUTIONS)
    known("ids", ("frequency", "shuffled"))
    known("values", ("integers", "normal"))
    known("dtype", DTYPES)
    known("index_dtype", ("int32", "int64"))
    from weft.kernels.ops import OPS

    if op not in OPS:
        _refuse(f"unknown --op {op!r}: there is {', '.join(OPS)}")
    if density is not None and "rows" in own and "height" in own:
        _refuse("--density is --rows over --height: give two of the three")

    if names is None and (own or density is not None):
        chosen = [replace(CASES["uniform"], name="own")]
    else:
        chosen = [CASES[name] for name in _names("case", names or "all", tuple(CASES))]
    made = []
    for case in chosen:
        case = replace(case.scaled(size), op=op, **own)
        if density is not None:
            if "rows" in own:
                case = replace(case, height=max(1, round(case.rows / density)))
            else:
                case = replace(case, rows=max(1, round(case.height * density)))
        fault = case.fault()
        if fault is not None:
            _refuse(f"case {case.name}: {fault}")
        made.append(case)
    return tuple(made)


def _algorithms(given: str) -> tuple[str, ...]:
    from weft.sparse.registry import ALGORITHMS

    return tuple(_names("algorithm", given, ("auto", *ALGORITHMS)))


def _peers(given: str) -> tuple[str, ...]:
    from .contenders import PEERS

    return () if given == "none" else tuple(_names("peers", given, tuple(PEERS)))


def _names(option: str, given: str, there_is: tuple[str, ...]) -> list[str]:
    if given == "all":
        return list(there_is)
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    for name in names:
        if name not in there_is:
            _refuse(f"unknown --{option} {name!r}: there is {', '.join(there_is)}")
    if not names:
        _refuse(f"--{option} names nothing: there is {', '.join(there_is)}")
    return names


def _bits(link: str | None) -> float | None:
    """Bits per second of a speed such as `250mbit`."""
    if link is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", link.lower())
    if match is None or float(match[1]) == 0:
        _refuse(f"--link {link!r} is no speed: write it as 1gbit or 250mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def _writable(path: Path) -> None:
    try:
        with path.open("a"):
            pass
    except OSError as error:
        _refuse(f"--json {path} cannot be written: {error.strerror}")


def _refuse(words: str) -> NoReturn:
    """Exit status 2 on every rank, words from one."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"weft bench: {words}", err=True)
    raise typer.Exit(2)
