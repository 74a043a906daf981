"""A rank's tensor as a table of text: whose values lie where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product

from ..base.tensors import Shape
from .grid import Box, whole

Range = tuple[int, int]
Part = tuple[Box, int]
"""A box of the tensor, and the rank whose values lie there."""


def drawn(shape: Shape, parts: Iterable[Part]) -> list[str]:
    """The lines of a tensor's tables; where values of several ranks lie, they are added up.

    Rows and columns are the last two dimensions that the parts cut. If they cut others, each range
    of these has a table of its own.

    Example:
        >>> top, bottom = Box((0, 0), (2, 4)), Box((1, 0), (3, 4))
        >>> print(*drawn((3, 4), [(top, 0), (bottom, 7)]), sep="\\n")
             0:4
        0:1    0
        1:2  0+7
        2:3    7
    """
    missing = max(0, 2 - len(shape))  # a line is one row
    found = [(_deeper(box, missing), rank) for box, rank in parts]
    everything = _deeper(whole(shape), missing)
    boxes = [everything, *(box for box, _ in found)]
    ranges = [_ranges(boxes, dim) for dim in range(len(everything.start))]
    by_cuts = sorted(range(len(ranges)), key=lambda dim: len(ranges[dim]) > 1)
    *behind, y, x = *by_cuts[:-2], *sorted(by_cuts[-2:])
    lines = []
    for place in product(*(ranges[dim] for dim in behind)):
        at = dict(zip(behind, place, strict=True))
        cut = [f"{_text(at[dim])} of dimension {dim}" for dim in behind if len(ranges[dim]) > 1]
        if cut:
            lines.append(", ".join(cut))
        table = [["", *map(_text, ranges[x])]]
        for row in ranges[y]:
            cells = ({**at, y: row, x: column} for column in ranges[x])
            table.append([_text(row), *(_ranks(found, cell) for cell in cells)])
        width = max(len(each) for line in table for each in line)
        lines += ["  ".join(each.rjust(width) for each in line).rstrip() for line in table]
    return lines


def _deeper(box: Box, count: int) -> Box:
    """A box with so many dimensions of extent 1 before its own."""
    return Box((0,) * count + box.start, (1,) * count + box.stop)


def _ranges(boxes: Sequence[Box], dim: int) -> list[Range]:
    """The ranges into which the edges of boxes cut a dimension."""
    edges = {edge for box in boxes for edge in (box.start[dim], box.stop[dim])}
    return list(pairwise(sorted(edges)))


def _ranks(parts: Iterable[Part], cell: dict[int, Range]) -> str:
    """The ranks whose values lie in a cell, which no part cuts."""
    inside = Box(*zip(*(cell[dim] for dim in sorted(cell)), strict=True))
    ranks = sorted({rank for box, rank in parts if box & inside})
    return "+".join(map(str, ranks)) or "."


def _text(ends: Range) -> str:
    return f"{ends[0]}:{ends[1]}"
