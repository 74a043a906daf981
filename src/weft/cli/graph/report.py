"""What the page of `weft demo --graph` says: the demo's page, with a picture of the cut."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.table import Table

from ..demo import plots as shared
from ..demo.live import COLUMNS, cells
from ..demo.record import TOLERANCE, Agreement, Summary, speedups
from ..demo.report import machine
from . import plots
from .run import Cut, Trained
from .settings import GraphSettings
from .sources import FEATURES

__all__ = ["pairs_table", "values"]

_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "hand_over": "exchange",
    "wait": "sync_grads",
}


def pairs_table(trained: Trained) -> Table:
    """KiB between each pair in a step, for the terminal."""
    ranks = range(trained.run.ranks)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for to in ranks:
        table.add_column(f"rank {to}", justify="right")
    for source in ranks:
        sent = trained.sent.get(source, {})
        table.add_row(
            f"rank {source}",
            *("" if rank == source else f"{sent.get(rank, 0) / 1024:,.0f}" for rank in ranks),
        )
    return table


def values(
    settings: GraphSettings,
    cut: Cut,
    runs: Sequence[Trained],
    agreements: Sequence[Agreement],
    command: Sequence[str],
) -> dict[str, object]:
    """What fills the page."""
    summaries = [one.summary() for one in runs]
    named = [(one.run.way, line) for one, line in zip(runs, summaries, strict=True)]
    drawn = [
        shared.loss_against_time(
            [one.run for one in runs],
            "All ranks together train on every node in every step, as one process does alone: the "
            "same loss after the same steps. What differs is when.",
        ),
        plots.cut_picture(cut),
    ]
    if settings.ranks > 1 and runs[0].sent:
        drawn.append(plots.bytes_of_pairs(runs[0]))
    drawn.append(
        shared.step_parts(
            named,
            _PARTS,
            "communication",
            "Exchange: hidden states of neighbours on other ranks, forward, and their gradients, "
            "backward. sync_grads: the sum of the weights' gradients. Slower ranks are waited for "
            "in both.",
        )
    )
    return {
        "headline": _headline(summaries),
        "lead": _lead(settings, cut),
        "interrupted": any(one.run.interrupted and one.run.note for one in runs),
        "facts": _facts(cut, runs[0], summaries[0]),
        "checks": agreements,
        "tolerance_note": (
            f"Equal means: within {TOLERANCE:.0e} at every step. Ranks add the same numbers in "
            "another order, so sums differ in the last bit of a 32-bit float, and each step starts "
            "from what the one before left. A neighbour left out, or a gradient that did not come "
            "back, is seen at once."
        ),
        "columns": (*COLUMNS[:-1], "nodes/s"),
        "rows": [
            {"way": way, "name": line.name, "note": line.note, "cells": cells(line)}
            for way, line in named
        ],
        "table_note": (
            "Times are medians over the steps, of the mean over the ranks. Synchronisation is all "
            "communication of a step, waiting for slower ranks included. Sent: bytes that a rank "
            "sends in a step, counted on the wire. Peak memory: highest resident memory of a "
            "process; in parentheses what is beyond one that has only started."
        ),
        "plots": drawn,
        "words_note": "",
        "neighbours": (),
        "details": _details(settings, cut, runs, command),
    }


def _headline(summaries: Sequence[Summary]) -> str:
    one, others = summaries[0], speedups(summaries)
    if others:
        return f"A step with weft takes {one.step * 1e3:.0f} ms: {' and '.join(others)}"
    return f"A step over the whole graph takes {one.step * 1e3:.0f} ms"


def _lead(settings: GraphSettings, cut: Cut) -> str:
    graph = cut.graph
    return (
        f"GraphSAGE, two layers, on all of {graph.source}: {len(graph.names):,} nodes, "
        f"{len(graph.edges):,} edges, {len(graph.classes)} classes. The graph is cut between "
        f"{settings.ranks} ranks; each holds its own nodes and gets the hidden states of their "
        "neighbours on other ranks by weft.exchange, in every step."
    )


def _facts(cut: Cut, weft: Trained, line: Summary) -> list[tuple[str, str]]:
    facts = [
        (f"{cut.crossing().mean():.1%}", "of the edges cross the cut"),
        (f"{line.synchronisation / line.step:.0%}", "of a step is communication"),
    ]
    if line.sent is not None:
        facts.append((f"{line.sent / 2**20:.2f} MiB", "sent by a rank in a step"))
    if weft.accuracy is not None:
        facts.append((f"{weft.accuracy:.1%}", "of held-out nodes: class found"))
    return facts


def _details(
    settings: GraphSettings, cut: Cut, runs: Sequence[Trained], command: Sequence[str]
) -> list[tuple[str, str]]:
    found = [f"{one.run.name} {one.accuracy:.2%}" for one in runs if one.accuracy is not None]
    sizes = [end - start for start, end in zip(cut.bounds, cut.bounds[1:], strict=False)]
    return [
        ("Command", shlex.join(command)),
        ("Graph", cut.graph.source),
        ("Cut", "nodes of each rank: " + ", ".join(f"{size:,}" for size in sizes)),
        (
            "Training",
            f"{FEATURES} features of a node, {settings.dim} hidden, Adam, all nodes in every step, "
            f"seed {settings.seed}",
        ),
        ("Held out", f"{', '.join(found) or 'not measured'} right"),
        *machine(settings.ranks),
    ]
