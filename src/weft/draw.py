"""Pictures of plans: who holds what, and who gets what from whom.

`frames` says what is to be seen, in integers; `drawn` paints it with matplotlib (the extra
`report`), which is imported there alone.

A side of a plan is one frame where its ranks hold different parts of one tensor; where they hold
the same, or parts that overlap, it is a frame for each rank, all to the same scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

from .errors import WeftError
from .grid import Box, overlap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .plan import Piece, Plan, Side

__all__ = ["MOST", "Cell", "Frame", "drawn", "frames"]

Colours = dict[int, tuple[float, float, float, float]]

_FLAT, _TALL = 0.15, 1.5  # the shapes of tensors that are drawn as they are, height by width

MOST = 16
"""Ranks that are drawn; of the others there is a number."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of a frame in one colour, or in stripes of several.

    Attributes:
        box: where.
        ranks: whose values are there; several are added up; none: zeros.
    """

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """A part of the picture.

    Attributes:
        title: above it.
        cells: what is coloured.
        outlines: (box, label) of what each rank of the frame holds as a whole.
    """

    title: str
    cells: tuple[Cell, ...]
    outlines: tuple[tuple[Box, str], ...]


def frames(plan: Plan) -> tuple[list[Frame], list[Frame]]:
    """What is to be seen: of what ranks have, and of what they get.

    Example:
        >>> from weft.grid import Box
        >>> from weft.plan import between
        >>> plan = between({0: Box((0,), (3,)), 1: Box((3,), (5,))}, {1: Box((0,), (5,))})
        >>> (have,), (get,) = frames(plan)
        >>> [cell.ranks for cell in get.cells], get.title
        ([(0,), (1,)], 'rank 1 gets (5,)')
    """
    dims = _shown(plan)
    have = {
        rank: [Cell(box, (rank,)) for box in _global(plan.have, rank)] for rank in plan.have.shapes
    }
    want: dict[int, list[Cell]] = {rank: [] for rank in plan.want.shapes}
    for move in plan.moves:
        box = _placed(plan.want, move.destination, move.put)
        want[move.destination].append(Cell(box, (move.source,)))
    return _side(plan.have, have, dims, "has"), _side(plan.want, want, dims, "gets")


def _side(
    side: Side,
    parts: dict[int, list[Cell]],
    dims: Sequence[int],
    verb: str,
) -> list[Frame]:
    ranks = sorted(side.shapes)
    whole = {rank: _global(side, rank) for rank in ranks}
    one_tensor = len({piece.sheet for piece in side.pieces}) < 2
    apart = not overlap([_flat(box, dims) for each in whole.values() for box in each if box.volume])
    known = all(_tiles(side, rank) is not None for rank in ranks)
    together = len(ranks) > 1 and one_tensor and apart and known
    groups = [ranks] if together else [[rank] for rank in ranks[:MOST]]
    found = []
    for group in groups:
        cells = _cells([part for rank in group for part in parts[rank]], dims)
        outlines = [
            (_flat(box, dims), f"rank {rank}" * together)
            for rank in group
            for box in whole[rank]
            if box.volume
        ]
        found.append(Frame(_title(side, group, verb), cells, tuple(outlines)))
    return found


def _title(side: Side, group: Sequence[int], verb: str) -> str:
    if len(group) == 1:
        return f"rank {group[0]} {verb} {side.shapes[group[0]]}"
    empty = [str(rank) for rank in group if 0 in side.shapes[rank]]
    nothing = f", ranks {', '.join(empty)} nothing" * bool(empty)
    return f"each rank {verb} its part{nothing}"


def _cells(parts: Sequence[Cell], dims: Sequence[int]) -> tuple[Cell, ...]:
    """The parts, cut where they overlap, so that each cell has the ranks of all that lie there."""
    flat = [Cell(_flat(part.box, dims), part.ranks) for part in parts if part.box.volume]
    found = []
    for rows, columns in product(*(pairwise(_edges([c.box for c in flat], d)) for d in (0, 1))):
        box = Box((rows[0], columns[0]), (rows[1], columns[1]))
        ranks = sorted({rank for part in flat if box & part.box == box for rank in part.ranks})
        if ranks:
            found.append(Cell(box, tuple(ranks)))
    return tuple(_merged(found))


def _edges(boxes: Iterable[Box], dim: int) -> list[int]:
    """Where boxes begin and end in a dimension."""
    return sorted({edge for box in boxes for edge in (box.start[dim], box.stop[dim])})


def _merged(cells: Iterable[Cell]) -> list[Cell]:
    """Neighbours of the same ranks as one, along rows and then along columns."""
    found = list(cells)
    for dim in (1, 0):
        rest = 1 - dim
        found.sort(key=lambda cell: (cell.box.start[rest], cell.box.start[dim]))
        joined: list[Cell] = []
        for cell in found:
            if joined and _continues(joined[-1], cell, dim):
                joined[-1] = Cell(Box(joined[-1].box.start, cell.box.stop), cell.ranks)
            else:
                joined.append(cell)
        found = joined
    return found


def _continues(last: Cell, cell: Cell, dim: int) -> bool:
    """Whether a cell is of the same ranks as the last one, and next to it."""
    a, b, rest = last.box, cell.box, 1 - dim
    level = (a.start[rest], a.stop[rest]) == (b.start[rest], b.stop[rest])
    return last.ranks == cell.ranks and level and a.stop[dim] == b.start[dim]


def _tiles(side: Side, rank: int) -> list[Piece] | None:
    """The pieces that a rank's tensor consists of, if it is of one tensor."""
    pieces = side.by_rank.get(rank, [])
    shape = side.shapes[rank]
    for piece in pieces:  # all of it; others are images that lie in the same place
        if not any(piece.at) and piece.box.shape == shape:
            return [piece]
    volume = Box((0,) * len(shape), shape).volume
    return pieces if sum(piece.box.volume for piece in pieces) == volume else None


def _global(side: Side, rank: int) -> list[Box]:
    """What a rank holds, as boxes of the whole tensor; of its own, if that cannot be said."""
    pieces = _tiles(side, rank)
    if pieces is None:
        shape = side.shapes[rank]
        return [Box((0,) * len(shape), shape)]
    return [piece.box for piece in pieces]


def _placed(side: Side, rank: int, put: Box) -> Box:
    """A box of a rank's tensor, as one of the whole tensor."""
    for piece in _tiles(side, rank) or ():
        inside = piece.local(piece.box)
        if put & inside == put:
            return put.shifted([a - b for a, b in zip(piece.box.start, piece.at, strict=True)])
    return put


def _shown(plan: Plan) -> tuple[int, ...]:
    """The dimensions to show: the two in which boxes differ most, in their order."""
    sides = (plan.have, plan.want)
    boxes = [box for side in sides for rank in side.shapes for box in _global(side, rank)]
    if not boxes:
        raise WeftError("this plan moves nothing: there is nothing to draw")
    ndim = max(len(box.start) for box in boxes)
    parts = [{(box.start[d : d + 1], box.stop[d : d + 1]) for box in boxes} for d in range(ndim)]
    ranked = sorted(range(ndim), key=lambda d: (-len(parts[d]), d))
    return tuple(sorted(ranked[:2]))


def _flat(box: Box, dims: Sequence[int]) -> Box:
    """A box in the dimensions that are shown: rows and columns."""
    start = [box.start[d] if d < len(box.start) else 0 for d in dims]
    stop = [box.stop[d] if d < len(box.stop) else 1 for d in dims]
    while len(start) < 2:  # one row
        start.insert(0, 0)
        stop.insert(0, 1)
    return Box(tuple(start), tuple(stop))


# the painting


def drawn(plan: Plan, title: str | None = None) -> Figure:
    """The picture of a plan; see `Plan.draw`.

    Raises:
        WeftError: matplotlib is not there, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise WeftError("a plan is drawn by matplotlib: pip install 'weft[report]'") from error

    sides = frames(plan)
    columns = min(4, max(map(len, sides)))
    rows = [-(-len(side) // columns) for side in sides]
    bounds = _bounds([box for side in sides for each in side for box, _ in each.outlines])
    height, width = bounds.shape
    ratio = min(max(height / width, _FLAT), _TALL)
    each = 2.6 if columns > 1 else 4.2
    size = (each * columns, (each * ratio + 0.5) * sum(rows) + 0.9)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    colours = _colours(plan.ranks)
    grid = figure.add_gridspec(sum(rows) or 1, columns)
    for number, side in enumerate(sides):
        for at, frame in enumerate(side):
            row = at // columns + number * rows[0]
            place = grid[row, :] if len(side) == 1 else grid[row, at % columns]
            _paint(figure.add_subplot(place), frame, bounds, colours)
    more = max(len(plan.have.shapes), len(plan.want.shapes)) - MOST
    left = f"; {more} more ranks are not drawn" if more > 0 and columns > 1 else ""
    _legend(figure, plan, colours, left)
    figure.suptitle(title if title is not None else _summary(plan), fontsize=10)
    return figure


def _summary(plan: Plan) -> str:
    travel = [move for move in plan.moves if move.source != move.destination]
    numbers = sum(move.take.volume for move in travel)
    hint = f"{plan.hint}: " if plan.hint else ""
    pairs = len({(move.source, move.destination) for move in travel})
    return f"{hint}{numbers:,} values in {pairs} messages between {len(plan.ranks)} ranks"


def _bounds(boxes: Sequence[Box]) -> Box:
    if not boxes:
        return Box((0, 0), (1, 1))
    return Box(
        tuple(min(box.start[d] for box in boxes) for d in (0, 1)),
        tuple(max(box.stop[d] for box in boxes) for d in (0, 1)),
    )


def _colours(ranks: Sequence[int]) -> Colours:
    from matplotlib import colormaps

    few = colormaps["Set2" if len(ranks) <= 8 else "tab20"]
    many = colormaps["turbo"]
    return {
        rank: few(number) if len(ranks) <= 20 else many(number / len(ranks))
        for number, rank in enumerate(ranks)
    }


def _paint(axes: Axes, frame: Frame, bounds: Box, colours: Colours) -> None:
    from matplotlib.patches import Rectangle

    _outline(axes, bounds, "0.85", 0.8)  # so that frames can be compared
    together = any(label for _, label in frame.outlines)
    several = len({cell.ranks for cell in frame.cells}) > 1
    for cell in frame.cells:
        (top, left), (height, width) = cell.box.start, cell.box.shape
        stripe = width / len(cell.ranks)
        for number, rank in enumerate(cell.ranks):
            place = (left + number * stripe, top)
            axes.add_patch(Rectangle(place, stripe, height, color=colours[rank], lw=0))
        if len(cell.ranks) > 1:
            axes.add_patch(
                Rectangle((left, top), width, height, fill=False, hatch="///", ec="1", lw=0)
            )
        large = height * 8 >= bounds.shape[0] and width * 8 >= bounds.shape[1]
        if several and large and not together:
            _write(axes, cell.box, "+".join(map(str, cell.ranks)))
    for box, label in frame.outlines:
        _outline(axes, box, "0.15", 1.1)
        _write(axes, box, label)
    (top, left), (bottom, right) = bounds.start, bounds.stop
    pad_y, pad_x = 0.02 * (bottom - top), 0.02 * (right - left)
    axes.set_xlim(left - pad_x, right + pad_x)
    axes.set_ylim(bottom + pad_y, top - pad_y)  # the first row is the top one
    outlines = [box for box, _ in frame.outlines]
    axes.set_xticks(_edges(outlines, 1))
    axes.set_yticks([] if bounds.shape[0] == 1 else _edges(outlines, 0))
    axes.tick_params(labelsize=6, length=2)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(frame.title, fontsize=8)
    ratio = bounds.shape[0] / bounds.shape[1]
    axes.set_aspect("equal" if _FLAT <= ratio <= _TALL else "auto")


def _outline(axes: Axes, box: Box, colour: str, width: float) -> None:
    from matplotlib.patches import Rectangle

    (top, left), (rows, columns) = box.start, box.shape
    axes.add_patch(Rectangle((left, top), columns, rows, fill=False, ec=colour, lw=width))


def _write(axes: Axes, box: Box, text: str) -> None:
    x, y = (box.start[1] + box.stop[1]) / 2, (box.start[0] + box.stop[0]) / 2
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5)


def _legend(
    figure: Figure,
    plan: Plan,
    colours: Colours,
    left: str,
) -> None:
    from matplotlib.patches import Patch

    shown = plan.ranks[: 2 * MOST]
    patches = [Patch(color=colours[rank], label=f"rank {rank}") for rank in shown]
    sums = any(plan.local(rank).adds for rank in plan.want.shapes)
    legend = figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=min(len(shown), 8),
        fontsize=7,
        frameon=False,
        title=f"whose values{', added up where hatched' * sums}{left}",
    )
    legend.get_title().set_fontsize(7)
