"""The command line of `weft plan`: from options to predictions, and how they are shown."""

from __future__ import annotations

import json as writer
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

import weft

from .. import options, show, wording
from ..counted import WITHIN
from .forecast import MERGED
from .predict import Named, Prediction, drawn, predict, recorded

_MOST = 1 << 16  # ranks that a prediction is made for
_RANKS = "2,4,8,16,32,64,128,256,512,1024,2048,4096"
_LINK, _LATENCY, _WORK = "1gbit,10gbit", 50.0, 10.0
_CLUSTER = "The cluster"
_NOTE = (
    "All figures of the tables are predicted; nothing was sent. "
    "ms, and the figures under the algorithms' names: milliseconds after the opening exchange; "
    "-: cannot serve, or needs more workspace than auto allows; MB and messages: of a rank; "
    "rounds: that a call waits for after the opening; "
    "xbound: MB over the least that a rank must receive. least-ms: the least time of any exact "
    "schedule with these ranks on these hosts, an index counted as 4 bytes; xleast: ms over that, "
    "below 1 where packed indices take less"
)
_MEASURED = "Measured, by weft's authors: the rates of merging and within a host"


def plan(
    case: options.Cases = None,
    rows: options.Rows = None,
    height: options.Height = None,
    width: options.Width = None,
    dtype: options.ValueDtype = "float32",
    distribution: options.Drawn = None,
    record: Annotated[
        Path | None,
        Option(help="Sizes, from weft bench --json.", rich_help_panel=options.THE_CASE),
    ] = None,
    ranks: Annotated[
        str,
        Option(
            metavar="NUMBERS",
            help="Numbers of ranks, divided by commas.",
            show_default="powers of two from 2 to 4096",
            rich_help_panel=_CLUSTER,
        ),
    ] = _RANKS,
    per_host: Annotated[
        int,
        Option(
            min=1,
            metavar="N",
            help="Ranks that share a host and its link.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 1,
    link: Annotated[
        str,
        Option(
            metavar="SPEEDS",
            help="Of a host's link, divided by commas.",
            rich_help_panel=_CLUSTER,
        ),
    ] = _LINK,
    latency: Annotated[
        float,
        Option(min=1e-3, metavar="US", help="Latency of a round, in µs.", rich_help_panel=_CLUSTER),
    ] = _LATENCY,
    work: Annotated[
        float,
        Option(
            min=1e-3, metavar="US", help="CPU time of a message, in µs.", rich_help_panel=_CLUSTER
        ),
    ] = _WORK,
    plot: options.Picture = None,
    json: options.Json = None,
) -> None:
    """Predict algorithm, time, bytes and messages for a cluster that you describe.

    The algorithm is the one that the rule takes; the times are forecasts, and nothing is sent.
    """
    counts = _counts(ranks)
    own = {"rows": rows, "height": height, "width": width, "distribution": distribution}
    if record is not None and (case, *own.values(), dtype) != (None,) * 5 + ("float32",):
        options.refuse("--record", "the file has the sizes: leave --case and other sizes out")
    with options.failing("plan", 2):
        if record is not None:
            drawings = recorded(record)
        else:
            drawings = [*map(drawn, options.cases_of(case, "uniform", own, {"dtype": dtype}))]
        links = _links(link, latency, work)
        found = list(predict(drawings, links, counts, per_host))
    if not found:
        options.refuse("--per-host", f"all of --ranks {ranks} are on one host, without a link")
    groups = [list(group) for _, group in groupby(found, lambda one: (one.drawing, one.link))]
    _show(groups, record)
    if alone := sorted(set(counts) - {one.ranks for one in found}):
        typer.echo(f"left out, since all are on one host: {', '.join(map(str, alone))} ranks")
    if json is not None:
        text = writer.dumps([one.json() for one in found], indent=1)
        json.write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        from .plot import draw  # here: matplotlib is an extra

        draw(plot, groups, [weft.sparse.EAGER, *weft.sparse.ALGORITHMS])
        typer.echo(f"wrote {plot}")


def _counts(given: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in given.split(",")]
    if not all(2 <= count <= _MOST for count in counts):
        options.refuse("--ranks", f"{given}: numbers from 2 to {_MOST}, divided by commas")
    return sorted(set(counts))


def _links(speeds: str, latency: float, work: float) -> list[Named]:
    def link(bits: float) -> weft.wire.Link:
        figures = {"alpha": latency * 1e-6, "beta": 8 / bits, "work": work * 1e-6}
        return weft.wire.Link(**figures)

    return [Named(name.strip(), link(options.rate(name))) for name in speeds.split(",")]


def _show(groups: list[list[Prediction]], record: Path | None) -> None:
    """Two tables for each case and link: what is chosen, and the time of each algorithm.

    Below them, what of this was measured.
    """
    console = show.console()
    algorithms = list(weft.sparse.ALGORITHMS)
    for lines in groups:
        drawing, link = lines[0].drawing, lines[0].link
        words = (
            f"{drawing.case.name}: {lines[0].counted.sizes.most} rows a rank of "
            f"{drawing.case.height}, {drawing.case.sent_row_bytes} bytes each; link {link.name}: "
            f"{link.link}, {1e-9 / MERGED:.3g} GB/s merged, {1e-9 / WITHIN:.3g} GB/s within a host"
        )
        console.print(words, style="dim", soft_wrap=True)
        titles = ["ranks", "union", "chosen", "ms", "MB", "messages", "rounds", "xbound"]
        titles += ["least-ms", "xleast"]
        console.print(show.table(titles, map(_chosen, lines), left=0))
        times = [[str(one.ranks), *(_time(one, name) for name in algorithms)] for one in lines]
        console.print(show.table(["ranks", *algorithms], times, left=0), "")
    console.print(_NOTE, style="dim", soft_wrap=True)
    measured = _MEASURED
    if record is not None:
        measured = f"Measured, in {record}: rows and their overlap, of its ranks. {measured}"
    console.print(measured, style="dim", soft_wrap=True)


def _chosen(one: Prediction) -> list[str]:
    """A line of the first table, below `titles` of `_show`."""
    best = one.forecasts[one.chosen]
    return [
        str(one.ranks),
        str(one.counted.union),
        f"[bold]{one.chosen}[/]",
        wording.number(best.milliseconds),
        wording.number(best.bytes, 1e-6),
        str(best.messages),
        str(best.rounds),
        wording.number(best.of_bound),
        wording.number(one.least_ms),
        wording.number(best.milliseconds / one.least_ms),
    ]


def _time(one: Prediction, name: str) -> str:
    found = one.forecasts.get(name)
    figure = wording.number(found and found.milliseconds)
    return f"[bold]{figure}[/]" if name == one.chosen else figure
