"""The command line of `weft plan`: from options to predictions, and how they are shown."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from .predict import Named
    from .sizes import Sizes

__all__ = ["plan"]

_RANKS = "2,4,8,16,32,64,128,256,512,1024,2048,4096"
_MOST = 1 << 16  # ranks that a prediction is made for
_LARGEST = {"rows": 1 << 62, "height": 1 << 62, "width": 1 << 40}  # that an index, or memory, holds
_LINK, _LATENCY, _WORK = "1gbit,10gbit", 50.0, 10.0


def plan(
    case: Annotated[
        str | None,
        typer.Option(
            help="Cases of weft bench, divided by commas.",
            show_default="uniform, or one of your own sizes",
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Indices of a rank.")] = None,
    height: Annotated[int | None, typer.Option(help="Rows of the dense tensor.")] = None,
    width: Annotated[int | None, typer.Option(help="Values of a row.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the values, as torch says it.")] = None,
    distribution: Annotated[
        str | None, typer.Option(help="How ranks overlap: uniform, zipf or identical.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Take sizes and overlap from this file of weft bench --json."),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, divided by commas.")] = _RANKS,
    per_host: Annotated[int, typer.Option(help="Ranks that share a host, and its link.")] = 1,
    link: Annotated[
        str | None,
        typer.Option(
            help="Speeds of a host's link, divided by commas, such as 1gbit.", show_default=_LINK
        ),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(help="Microseconds of a round of messages.", show_default=f"{_LATENCY:g}"),
    ] = None,
    work: Annotated[
        float | None,
        typer.Option(help="Microseconds of a core a message.", show_default=f"{_WORK:g}"),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Take the link's figures from this file of weft tune.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw where each algorithm wins: a .png or .svg file.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.")] = None,
) -> None:
    """Predict time, bytes, messages and the chosen algorithm for a cluster that need not be here.

    By the same costs from which `auto` chooses; nothing is sent.
    """
    from weft.errors import Error
    from weft.sparse.registry import ALGORITHMS

    from .predict import predict

    if plot is not None:
        if plot.suffix not in (".png", ".svg"):
            _refuse(f"--plot {plot}: the file's name ends in .png or .svg")
        if find_spec("matplotlib") is None:
            _refuse("--plot needs matplotlib: pip install 'weft[report]'")
    counts = _counts(ranks)
    if per_host < 1:
        _refuse(f"--per-host {per_host}: at least 1")
    if profile is not None and (link, latency, work) != (None, None, None):
        _refuse("--profile says the figures: leave --link, --latency and --work out")
    try:
        sizes = _sizes(case, rows, height, width, dtype, distribution, record)
        links = _links(link, latency, work, profile)
        found = predict(sizes, links, counts, per_host)
    except Error as error:
        _refuse(str(error))
    for flag, path in (("json", json), ("plot", plot)):
        if path is not None:
            _writable(flag, path)
    alone = sorted(set(counts) - {one.ranks for one in found})
    if alone and not found:
        _refuse(f"--per-host {per_host}: all of --ranks {ranks} are on one host, without a link")
    from .table import show

    show(found, list(ALGORITHMS))
    if alone:
        typer.echo(f"left out, since all are on one host: {', '.join(map(str, alone))} ranks")
    if json is not None:
        import json as writer

        text = writer.dumps([one.json() for one in found], indent=1)
        json.write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        from weft.sparse.choice import EAGER

        from .plot import draw

        draw(plot, found, [EAGER, *ALGORITHMS])
        typer.echo(f"wrote {plot}")


def _counts(given: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in given.split(",")]
    if not all(2 <= count <= _MOST for count in counts):
        _refuse(f"--ranks {given}: numbers from 2 to {_MOST}, divided by commas")
    return sorted(set(counts))


def _sizes(
    names: str | None,
    rows: int | None,
    height: int | None,
    width: int | None,
    dtype: str | None,
    distribution: str | None,
    record: Path | None,
) -> list[Sizes]:
    from dataclasses import replace

    from ..bench.cases import CASES, DISTRIBUTIONS, DTYPES
    from .sizes import Values, drawn, recorded

    own = {
        name: value
        for name, value in (
            ("rows", rows),
            ("height", height),
            ("width", width),
            ("dtype", dtype),
            ("distribution", distribution),
        )
        if value is not None
    }
    if record is not None:
        if names is not None or own:
            _refuse("--record says the sizes: leave --case and sizes of your own out")
        return recorded(record)
    for option, there_is in (("distribution", DISTRIBUTIONS), ("dtype", DTYPES)):
        if own.get(option, there_is[0]) not in there_is:
            _refuse(f"unknown --{option} {own[option]!r}: there is {', '.join(there_is)}")
    if names is None:
        chosen = [replace(CASES["uniform"], name="own") if own else CASES["uniform"]]
    else:
        wanted = list(CASES) if names == "all" else [name.strip() for name in names.split(",")]
        for name in wanted:
            if name not in CASES:
                _refuse(f"unknown --case {name!r}: there is {', '.join(CASES)}")
        chosen = [CASES[name] for name in wanted]
    for option, value in (("rows", rows), ("height", height), ("width", width)):
        if (value or 0) > _LARGEST[option]:
            _refuse(f"--{option} {value}: at most {_LARGEST[option]}")
    made = []
    for one in chosen:
        one = replace(one, **own)  # type: ignore[arg-type]  # each value is of its field's type
        if (fault := one.fault()) is not None:
            _refuse(f"case {one.name}: {fault}")
        values = Values.of(one.width, one.torch_dtype, one.op)
        made.append(drawn(one.name, one.rows, one.height, values, one.distribution))
    return made


def _links(
    given: str | None, latency: float | None, work: float | None, path: Path | None
) -> list[Named]:
    from weft.wire.link import MERGE, Link

    from .predict import Named

    if path is not None:
        from weft.sparse.link import read

        profile = read(path)
        parts = (("between hosts", profile.between), ("within a host", profile.within))
        return [
            Named(
                name,
                Link(part.alpha, part.beta, profile.merge, part.work),
                within=part is profile.within,
            )
            for name, part in parts
            if part is not None
        ]
    given = _LINK if given is None else given
    latency = _LATENCY if latency is None else latency
    work = _WORK if work is None else work
    if not (0 < latency < math.inf and 0 < work < math.inf):
        _refuse(f"--latency {latency} --work {work}: microseconds, above 0")
    links = []
    for name in given.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", name.strip().lower())
        if match is None or float(match[1]) == 0:
            _refuse(f"--link {name!r} is no speed: write it as 1gbit or 250mbit")
        rate = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
        figures = latency * 1e-6, 8 / rate, MERGE, work * 1e-6
        links.append(Named(name.strip(), Link(*figures)))
    return links


def _writable(flag: str, path: Path) -> None:
    try:
        with path.open("a"):
            pass
    except OSError as error:
        _refuse(f"--{flag} {path} cannot be written: {error.strerror}")


def _refuse(words: str) -> NoReturn:
    typer.echo(f"weft plan: {words}", err=True)
    raise typer.Exit(2)
