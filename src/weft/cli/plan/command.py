"""The command line of `weft plan`: from options to predictions, and how they are shown."""

from __future__ import annotations

import json as writer
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import weft

from ..bench.cases import CASES, Distribution, Dtype
from ..options import names, rate, refuse, writable
from .predict import Named, Sizes, Values, drawn, predict, recorded
from .table import show

_RANKS = "2,4,8,16,32,64,128,256,512,1024,2048,4096"
_MOST = 1 << 16  # ranks that a prediction is made for
_LINK, _LATENCY, _WORK = "1gbit,10gbit", 50.0, 10.0


def plan(
    case: Annotated[
        str | None,
        typer.Option(
            help="Cases of weft bench, divided by commas.",
            show_default="uniform, or one of your own sizes",
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(max=1 << 62, help="Indices of a rank.")] = None,
    height: Annotated[
        int | None, typer.Option(max=1 << 62, help="Rows of the dense tensor.")
    ] = None,
    width: Annotated[int | None, typer.Option(max=1 << 40, help="Values of a row.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the values, as torch says it.")] = None,
    distribution: Annotated[Distribution | None, typer.Option(help="How ranks overlap.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Take sizes and overlap from this file of weft bench --json."),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, divided by commas.")] = _RANKS,
    per_host: Annotated[
        int, typer.Option(min=1, help="Ranks that share a host, and its link.")
    ] = 1,
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
    if plot is not None:
        if plot.suffix not in (".png", ".svg"):
            refuse("--plot", f"{plot}: the file's name ends in .png or .svg")
        if find_spec("matplotlib") is None:
            refuse("--plot", "it needs matplotlib: pip install 'weft[report]'")
    counts = _counts(ranks)
    given = {
        "rows": rows,
        "height": height,
        "width": width,
        "dtype": dtype,
        "distribution": distribution,
    }
    own = {name: value for name, value in given.items() if value is not None}
    try:
        sizes = _sizes(case, own, record)
        found = predict(sizes, _links(link, latency, work, profile), counts, per_host)
    except weft.Error as error:
        typer.echo(f"weft plan: {error}", err=True)
        raise typer.Exit(2) from None
    writable("--json", json)
    writable("--plot", plot)
    alone = sorted(set(counts) - {one.ranks for one in found})
    if alone and not found:
        refuse("--per-host", f"all of --ranks {ranks} are on one host, without a link")
    algorithms = list(weft.sparse.ALGORITHMS)
    show(found, algorithms)
    if alone:
        typer.echo(f"left out, since all are on one host: {', '.join(map(str, alone))} ranks")
    if json is not None:
        text = writer.dumps([one.json() for one in found], indent=1)
        json.write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        from .plot import draw  # here: matplotlib is an extra

        draw(plot, found, [weft.sparse.EAGER, *algorithms])
        typer.echo(f"wrote {plot}")


def _counts(given: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in given.split(",")]
    if not all(2 <= count <= _MOST for count in counts):
        refuse("--ranks", f"{given}: numbers from 2 to {_MOST}, divided by commas")
    return sorted(set(counts))


def _sizes(chosen: str | None, own: dict[str, Any], record: Path | None) -> list[Sizes]:
    if record is not None:
        if chosen is not None or own:
            refuse("--record", "it says the sizes: leave --case and sizes of your own out")
        return recorded(record)
    cases = [CASES[name] for name in names("--case", chosen or "uniform", CASES)]
    if chosen is None and own:
        cases = [replace(cases[0], name="own")]
    made = []
    for case in cases:
        case = replace(case, **own)
        if (fault := case.fault()) is not None:
            refuse(f"case {case.name}", fault)
        values = Values.of(case.width, case.torch_dtype, case.op)
        made.append(drawn(case.name, case.rows, case.height, values, case.distribution))
    return made


def _links(
    given: str | None, latency: float | None, work: float | None, path: Path | None
) -> list[Named]:
    Link = weft.sparse.Link
    if path is not None:
        if (given, latency, work) != (None, None, None):
            refuse("--profile", "it says the figures: leave --link, --latency and --work out")
        found = weft.sparse.link.read(path)
        parts = {"between hosts": found.between, "within a host": found.within}
        return [
            Named(
                name,
                Link(part.alpha, part.beta, found.merge, part.work),
                within=part is found.within,
            )
            for name, part in parts.items()
            if part is not None
        ]
    latency = _LATENCY if latency is None else latency
    work = _WORK if work is None else work
    if not (0 < latency < math.inf and 0 < work < math.inf):
        refuse("--latency, --work", f"{latency} and {work}: microseconds, above 0")
    return [
        Named(
            name.strip(),
            Link(latency * 1e-6, 8 / rate("--link", name), weft.sparse.MERGE, work * 1e-6),
        )
        for name in (given or _LINK).split(",")
    ]
