"""Pictures of plans: who holds what, and who gets what from whom.

`frames` says what is to be seen, in integers; `drawn` paints it with matplotlib (the extra
`report`), which is imported there alone.

A side is one frame where its ranks hold different parts of one tensor; where they hold the same,
or parts that overlap, it is a frame for each rank, all to the same scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, Protocol

from ..base.errors import WeftError
from .grid import Box, whole
from .sides import Move, Piece, Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Drawable(Protocol):
    """What there is to be drawn of a plan."""

    @property
    def have(self) -> Side: ...

    @property
    def want(self) -> Side: ...

    @property
    def moves(self) -> Sequence[Move]: ...

    @property
    def ranks(self) -> Sequence[int]: ...


Colours = Mapping[int, tuple[float, float, float, float]]

_FLAT = 0.15  # height by width: flatter tensors are drawn less flat
_TALL = 1.5  # and taller ones less tall

MOST = 16
"""Frames of a side, at most; the picture says how many ranks it leaves out."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of a frame in one colour, or in stripes of several.

    Attributes:
        box: where.
        ranks: whose values are there; several are added up.
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


def frames(plan: Drawable) -> tuple[list[Frame], list[Frame]]:
    """What is to be seen: of what ranks have, and of what they get.

    Raises:
        WeftError: there is nothing to be seen.

    Example:
        >>> from weft.nn.grid import Box
        >>> from weft.nn.plan import between
        >>> plan = between({0: Box((0,), (3,)), 1: Box((3,), (5,))}, {1: Box((0,), (5,))})
        >>> (have,), (get,) = frames(plan)
        >>> [cell.ranks for cell in get.cells], get.title
        ([(0,), (1,)], 'rank 1 gets (5,)')
    """
    boxes: list[Box] = []
    for side in (plan.have, plan.want):
        for rank in side.shapes:
            boxes += _held(side, rank)
    if not boxes:
        raise WeftError("this plan moves nothing: there is nothing to draw")
    dims = _most_cut(boxes)
    has = {}
    for rank in plan.have.shapes:
        has[rank] = [Cell(box, (rank,)) for box in _held(plan.have, rank)]
    gets: dict[int, list[Cell]] = {rank: [] for rank in plan.want.shapes}
    for move in plan.moves:
        box = _placed(plan.want, move.destination, move.put)
        gets[move.destination].append(Cell(box, (move.source,)))
    return _frames(plan.have, has, dims, "has"), _frames(plan.want, gets, dims, "gets")


def _most_cut(boxes: Iterable[Box]) -> list[int]:
    """The two dimensions in which boxes differ most, in their order."""
    ranges: dict[int, set[tuple[int, int]]] = {}
    for box in boxes:
        for dim, ends in enumerate(zip(box.start, box.stop, strict=True)):
            ranges.setdefault(dim, set()).add(ends)
    dims = sorted(ranges, key=lambda dim: len(ranges[dim]), reverse=True)
    return sorted(dims[:2])


def _tiles(side: Side, rank: int) -> list[Piece] | None:
    """The pieces that a rank's tensor consists of, if it is of one tensor."""
    pieces = side.by_rank.get(rank, [])
    everything = whole(side.shapes[rank])
    for piece in pieces:  # all of it; others are images that lie in the same place
        if piece.local(piece.box) == everything:
            return [piece]
    return pieces if sum(p.box.volume for p in pieces) == everything.volume else None


def _held(side: Side, rank: int) -> list[Box]:
    """What a rank holds: boxes of the whole tensor, or its own where that cannot be said."""
    pieces = _tiles(side, rank)
    return [whole(side.shapes[rank])] if pieces is None else [piece.box for piece in pieces]


def _placed(side: Side, rank: int, box: Box) -> Box:
    """A box of a rank's tensor, as one of the whole tensor where that can be said."""
    for piece in _tiles(side, rank) or ():
        if box & piece.local(piece.box) == box:
            return box.shifted([a - b for a, b in zip(piece.box.start, piece.at, strict=True)])
    return box


def _frames(
    side: Side, cells: Mapping[int, list[Cell]], dims: Sequence[int], verb: str
) -> list[Frame]:
    ranks = sorted(side.shapes)
    outlines = {}
    for rank in ranks:
        outlines[rank] = [_flat(box, dims) for box in _held(side, rank) if box.volume]
    together = len(ranks) > 1 and _is_one_tensor(side) and _are_apart(outlines.values())
    found = []
    for group in [ranks] if together else [[rank] for rank in ranks[:MOST]]:
        labels: list[tuple[Box, str]] = []
        parts: list[Cell] = []
        for rank in group:
            label = f"rank {rank}" if together else ""
            labels += [(box, label) for box in outlines[rank]]
            shown = [cell for cell in cells[rank] if cell.box.volume]
            parts += [Cell(_flat(cell.box, dims), cell.ranks) for cell in shown]
        found.append(Frame(_title(side, group, verb), tuple(_cut(parts)), tuple(labels)))
    return found


def _is_one_tensor(side: Side) -> bool:
    """Whether all that ranks hold are known parts of one tensor."""
    sheets = {piece.sheet for piece in side.pieces}
    return len(sheets) < 2 and all(_tiles(side, rank) is not None for rank in side.shapes)


def _are_apart(groups: Iterable[Sequence[Box]]) -> bool:
    """Whether no two boxes have a place in common."""
    boxes = [box for group in groups for box in group]
    return all(one & other is None for one, other in combinations(boxes, 2))


def _title(side: Side, group: Sequence[int], verb: str) -> str:
    if len(group) == 1:
        return f"rank {group[0]} {verb} {side.shapes[group[0]]}"
    title = f"each rank {verb} its part"
    empty = [str(rank) for rank in group if 0 in side.shapes[rank]]
    if empty:
        title += f", ranks {', '.join(empty)} nothing"
    return title


def _cut(parts: Sequence[Cell]) -> Iterable[Cell]:
    """The parts, cut where any begins or ends, each cell with the ranks of all that lie there."""
    boxes = [part.box for part in parts]
    rows = pairwise(_edges(boxes, 0))
    columns = pairwise(_edges(boxes, 1))
    for (top, bottom), (left, right) in product(rows, columns):
        box = Box((top, left), (bottom, right))
        ranks = {rank for part in parts if box & part.box == box for rank in part.ranks}
        if ranks:
            yield Cell(box, tuple(sorted(ranks)))


def _edges(boxes: Iterable[Box], dim: int) -> list[int]:
    """Where boxes begin and end in a dimension."""
    return sorted({edge for box in boxes for edge in (box.start[dim], box.stop[dim])})


def _flat(box: Box, dims: Sequence[int]) -> Box:
    """A box in the dimensions that are shown: rows and columns; a row where there is but one."""
    ranges = [(box.start[d], box.stop[d]) if d < len(box.start) else (0, 1) for d in dims]
    ranges = [(0, 1)] * (2 - len(ranges)) + ranges
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


# The painting


def drawn(plan: Drawable, title: str) -> Figure:
    """The picture of a plan; see `Plan.draw`.

    Raises:
        WeftError: matplotlib is not there, or there is nothing to draw.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise WeftError("a plan is drawn by matplotlib: pip install matplotlib") from error

    have, get = frames(plan)
    ranks = plan.ranks
    columns = min(4, max(len(have), len(get)))
    rows = [-(-len(side) // columns) for side in (have, get)]
    bounds = _bounds([*have, *get])
    ratio = min(max(bounds.shape[0] / bounds.shape[1], _FLAT), _TALL)
    width = 2.6 if columns > 1 else 4.2
    size = (width * columns, (width * ratio + 0.5) * sum(rows) + 0.9)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    palette = colormaps["Set2"]
    if len(ranks) > palette.N:
        palette = colormaps["turbo"].resampled(len(ranks))
    colours = {rank: palette(number) for number, rank in enumerate(ranks)}
    grid = figure.add_gridspec(sum(rows), columns)
    for first_row, side in ((0, have), (rows[0], get)):
        for number, frame in enumerate(side):
            row = first_row + number // columns
            place = grid[row, :] if len(side) == 1 else grid[row, number % columns]
            _paint(figure.add_subplot(place), frame, bounds, colours)
    about = "whose values"
    if any(len(cell.ranks) > 1 for frame in get for cell in frame.cells):
        about += ", added up where hatched"
    more = max(len(plan.have.shapes), len(plan.want.shapes)) - MOST
    if more > 0 and columns > 1:
        about += f"; {more} more ranks are not drawn"
    legend = figure.legend(
        handles=[Patch(color=colours[rank], label=f"rank {rank}") for rank in ranks[: 2 * MOST]],
        loc="outside lower center",
        ncols=min(len(ranks), 8),
        fontsize=7,
        frameon=False,
        title=about,
    )
    legend.get_title().set_fontsize(7)
    figure.suptitle(title, fontsize=10)
    return figure


def _bounds(shown: Iterable[Frame]) -> Box:
    """The box that all frames show a part of."""
    boxes = [box for frame in shown for box, _ in frame.outlines]
    rows = _edges(boxes, 0) or [0, 1]
    columns = _edges(boxes, 1) or [0, 1]
    return Box((rows[0], columns[0]), (rows[-1], columns[-1]))


def _paint(axes: Axes, frame: Frame, bounds: Box, colours: Colours) -> None:
    _rectangle(axes, bounds, fill=False, ec="0.85", lw=0.8)  # so that frames can be compared
    together = any(label for _, label in frame.outlines)
    several = len({cell.ranks for cell in frame.cells}) > 1
    for cell in frame.cells:
        (top, left), (bottom, right) = cell.box.start, cell.box.stop
        for number, rank in enumerate(cell.ranks):
            _rectangle(axes, cell.box, number, len(cell.ranks), color=colours[rank], lw=0)
        if len(cell.ranks) > 1:
            _rectangle(axes, cell.box, fill=False, hatch="///", ec="1", lw=0)
        large = (bottom - top) * 8 >= bounds.shape[0] and (right - left) * 8 >= bounds.shape[1]
        if several and large and not together:
            _write(axes, cell.box, "+".join(map(str, cell.ranks)))
    for box, label in frame.outlines:
        _rectangle(axes, box, fill=False, ec="0.15", lw=1.1)
        _write(axes, box, label)
    _scale(axes, bounds, [box for box, _ in frame.outlines])
    axes.set_title(frame.title, fontsize=8)


def _scale(axes: Axes, bounds: Box, outlines: Sequence[Box]) -> None:
    """What the frames of a picture have in common, and the numbers at the edges."""
    (top, left), (bottom, right) = bounds.start, bounds.stop
    height, width = bounds.shape
    axes.set_xlim(left - 0.02 * width, right + 0.02 * width)
    axes.set_ylim(bottom + 0.02 * height, top - 0.02 * height)  # the first row is the top one
    axes.set_xticks(_edges(outlines, 1))
    axes.set_yticks([] if height == 1 else _edges(outlines, 0))
    axes.tick_params(labelsize=6, length=2)
    axes.spines[:].set_visible(False)
    axes.set_aspect("equal" if _FLAT <= height / width <= _TALL else "auto")


def _rectangle(axes: Axes, box: Box, number: int = 0, stripes: int = 1, **style: object) -> None:
    """A box, or one of the upright stripes of equal width that it is cut into."""
    from matplotlib.patches import Rectangle

    top, left = box.start
    height, columns = box.shape
    width = columns / stripes
    corner = (left + number * width, top)
    axes.add_patch(Rectangle(corner, width, height, **style))  # type: ignore[arg-type]  # styles


def _write(axes: Axes, box: Box, text: str) -> None:
    x = (box.start[1] + box.stop[1]) / 2
    y = (box.start[0] + box.stop[0]) / 2
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5)
