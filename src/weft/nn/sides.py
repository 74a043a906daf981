"""The two sides of a plan: pieces of a global tensor that lie in tensors of ranks, and moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..base.tensors import Shape
from .grid import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor that lies in some rank's tensor.

    Attributes:
        rank: whose tensor.
        box: which part of the global tensor.
        at: where the box begins in that rank's tensor.
        sheet: which global tensor, if a plan is about several.
    """

    rank: int
    box: Box
    at: Shape
    sheet: int = 0

    def local(self, box: Box) -> Box:
        """A box of the global tensor, in the coordinates of the rank's own."""
        return box.shifted([a - b for a, b in zip(self.at, self.box.start, strict=True)])


@dataclass(frozen=True)
class Side:
    """What ranks have, or what they want.

    Attributes:
        shapes: the shape of each rank's tensor; ranks that are not named have none.
        pieces: which parts of the global tensor are where; several may lie in one place.
    """

    shapes: Mapping[int, Shape]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, found: Mapping[int, Box], sheets: Mapping[int, int] | None = None) -> Side:
        """Each rank holds one box, which is all of its tensor; on its sheet, if there are more."""
        sheets = sheets or {}
        return cls(
            {rank: box.shape for rank, box in found.items()},
            tuple(
                Piece(rank, box, (0,) * len(box.start), sheets.get(rank, 0))
                for rank, box in sorted(found.items())
            ),
        )

    @cached_property
    def by_rank(self) -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.rank, []).append(piece)
        return found


@dataclass(frozen=True, slots=True)
class Move:
    """`y[put] += x[take]`, where x is the source's tensor and y the destination's.

    Attributes:
        source: the rank whose tensor is read.
        take: which box of it.
        destination: the rank whose tensor is written.
        put: which box of it; of the same shape.
    """

    source: int
    take: Box
    destination: int
    put: Box
