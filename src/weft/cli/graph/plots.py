"""The cut as a picture, and the bytes between each pair of ranks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from ..demo.plots import STAND_INS, Plot, svg
from .run import Cut, Trained

__all__ = ["bytes_of_pairs", "cut_picture"]

_NODES = 1200  # that are drawn, of all parts
_EDGES = 1500
_COLOURS = ("weft", "torch", "dense", "rows_own", "rows_union", "hand_over", "bound", "hidden")
_GOLDEN = math.pi * (3 - math.sqrt(5))


def cut_picture(cut: Cut) -> Plot:
    """Each rank's nodes as a disc, with some of the edges within and between them."""
    parts = len(cut.bounds) - 1
    places = _places(cut, parts)
    edges = cut.graph.edges
    crossing = cut.crossing()
    drawn = edges[:: max(1, len(edges) // _EDGES)]
    across = crossing[:: max(1, len(edges) // _EDGES)]
    nodes = np.arange(0, len(cut.part), max(1, len(cut.part) // _NODES))

    def draw(axes: Axes) -> None:
        for which, colour, width in ((~across, "grid", 0.4), (across, "wait", 0.5)):
            axes.add_collection(
                LineCollection(
                    list(places[drawn[which]]),
                    colors=STAND_INS[colour],
                    linewidths=width,
                    alpha=0.6,
                )
            )
        for part in range(parts):
            of = nodes[cut.part[nodes] == part]
            colour = STAND_INS[_COLOURS[part % len(_COLOURS)]]
            axes.plot(*places[of].T, ".", color=colour, markersize=2.5)
            centre = _centre(part, parts)
            side = 1 if centre[1] > 0.1 else -1  # outside, where there are fewer edges
            size = cut.bounds[part + 1] - cut.bounds[part]
            axes.annotate(
                f"rank {part}: {size:,} nodes",
                (centre[0], centre[1] + side * _radius(parts) * 1.08),
                ha="center",
                va="bottom" if side > 0 else "top",
                fontsize=9,
                annotation_clip=False,
            )
        axes.set_aspect("equal")
        axes.axis("off")
        reach = 1.0 if parts == 1 else 1 + _radius(parts)
        height = reach if parts != 2 else _radius(parts)
        axes.set(
            xlim=(-1.02 * reach, 1.02 * reach),
            ylim=(-height - 0.2, height + (0.2 if parts > 2 else 0.02)),
        )

    share = f"{crossing.mean():.1%}" if len(crossing) else "none"
    return Plot(
        "The cut",
        f"Each disc is a rank. Of {len(edges):,} edges {int(crossing.sum()):,} ({share}) cross "
        f"from one to another, drawn in the warm colour; a sample of {len(drawn):,} edges is "
        "shown.",
        svg(draw, "Nodes by rank, and edges within and between ranks", legend=0, size=(5.4, 4.4)),
    )


def bytes_of_pairs(trained: Trained) -> Plot:
    """A square for each sender and receiver, the darker the more bytes."""
    ranks = trained.run.ranks
    table = np.array(
        [[trained.sent.get(a, {}).get(b, 0) for b in range(ranks)] for a in range(ranks)], float
    )
    most = table.max() or 1.0

    def draw(axes: Axes) -> None:
        for (source, to), nbytes in np.ndenumerate(table):
            if source == to:
                continue
            axes.add_patch(
                Rectangle(
                    (to, source), 0.96, 0.96, color=STAND_INS["weft"], alpha=0.75 * nbytes / most
                )
            )
            if ranks <= 10:
                text = f"{nbytes / 1024:,.0f}"
                axes.annotate(
                    text, (to + 0.48, source + 0.48), ha="center", va="center", fontsize=9
                )
        ticks = np.arange(ranks) + 0.48
        axes.set_xticks(ticks, [str(rank) for rank in range(ranks)])
        axes.set_yticks(ticks, [str(rank) for rank in range(ranks)])
        axes.set(xlim=(0, ranks), ylim=(ranks, 0), xlabel="to rank", ylabel="from rank")
        axes.grid(False)
        axes.set_aspect("equal")

    return Plot(
        "Bytes between each pair",
        "KiB that one rank sends to another in a step, counted on the wire: hidden states, their "
        "gradients on the way back, and the share of the weights' gradients.",
        svg(draw, "KiB from each rank to each other in a step", legend=0, size=(5.4, 4.4)),
    )


def _places(cut: Cut, parts: int) -> npt.NDArray[np.float64]:
    """A place in its rank's disc for each node: evenly, on a spiral (Vogel, 1979)."""
    places = np.empty((len(cut.part), 2))
    for part in range(parts):
        nodes = cut.order[cut.bounds[part] : cut.bounds[part + 1]]
        at = np.random.default_rng(part).permutation(len(nodes))
        radius = _radius(parts) * np.sqrt((at + 0.5) / len(nodes))
        places[nodes, 0] = _centre(part, parts)[0] + radius * np.cos(_GOLDEN * at)
        places[nodes, 1] = _centre(part, parts)[1] + radius * np.sin(_GOLDEN * at)
    return places


def _centre(part: int, parts: int) -> tuple[float, float]:
    if parts == 1:
        return 0.0, 0.0
    angle = math.pi * (1 - 2 * part / parts)
    return math.cos(angle), math.sin(angle)


def _radius(parts: int) -> float:
    """So that neighbouring discs on the circle do not touch."""
    return 1.0 if parts == 1 else 0.66 * math.sin(math.pi / parts) if parts > 2 else 0.6
