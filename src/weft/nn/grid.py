"""Boxes, balanced cuts and Cartesian indices: pure integers.

The geometry of a tensor that is cut along a grid; there is no tensor here, and no rank. Everything
counts from 0, ranges exclude their end, and cells are in row-major order.

The balanced cut of n into p parts gives each of the first `n % p` parts one more: the rule of MPI
libraries and of DistDL. (`torch.chunk` cuts 10 into 3, 3, 3, 1; this one into 3, 3, 2, 2.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from ..base.tensors import Shape


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor.

    Attributes:
        start: its first index in each dimension.
        stop: the first index behind it in each dimension; never below `start`.

    Example:
        >>> box = Box((0, 2), (3, 4))
        >>> box.shape, box.volume
        ((3, 2), 6)
        >>> box & Box((2, 3), (9, 9))
        Box(start=(2, 3), stop=(3, 4))
        >>> box & Box((3, 0), (9, 9)) is None
        True
    """

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes a tensor with it."""
        return tuple(map(slice, self.start, self.stop))

    def __and__(self, other: Box) -> Box | None:
        """What both have in common; None if that has no volume."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(int.__lt__, start, stop)) else None

    def shifted(self, by: Sequence[int]) -> Box:
        """The box, moved."""
        return Box(
            tuple(a + b for a, b in zip(self.start, by, strict=True)),
            tuple(a + b for a, b in zip(self.stop, by, strict=True)),
        )

    def __sub__(self, other: Box) -> list[Box]:
        """The parts of the box that are outside another: boxes that have nothing in common.

        Example:
            >>> Box((0, 0), (3, 4)) - Box((1, 0), (3, 2))
            [Box(start=(0, 0), stop=(1, 4)), Box(start=(1, 2), stop=(3, 4))]
        """
        both = self & other
        if both is None:
            return [self]
        left = []
        start = list(self.start)
        stop = list(self.stop)
        for dim, (low, high) in enumerate(zip(both.start, both.stop, strict=True)):
            for first, last in ((start[dim], low), (high, stop[dim])):
                if first < last:
                    start[dim] = first
                    stop[dim] = last
                    left.append(Box(tuple(start), tuple(stop)))
            start[dim] = low  # the next dimensions cut what is between
            stop[dim] = high
        return left


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor.

    Example:
        >>> whole((2, 3))
        Box(start=(0, 0), stop=(2, 3))
    """
    return Box((0,) * len(shape), tuple(shape))


def balanced(length: int, parts: int) -> Shape:
    """The lengths of `parts` parts that differ by one at the most, the longer ones first.

    Example:
        >>> balanced(10, 4), balanced(2, 3)
        ((3, 3, 2, 2), (1, 1, 0))
    """
    return tuple((length + parts - 1 - part) // parts for part in range(parts))


def boxes(lengths: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes of all cells of a grid that cuts each dimension into parts of these lengths.

    Example:
        >>> boxes([(2, 1), (4,)])
        [Box(start=(0, 0), stop=(2, 4)), Box(start=(2, 0), stop=(3, 4))]
    """
    edges = [list(pairwise(accumulate(each, initial=0))) for each in lengths]
    return [
        Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges)) for ranges in product(*edges)
    ]


def cells(shape: Sequence[int]) -> Iterable[Shape]:
    """The index of each cell of a grid, in row-major order.

    Example:
        >>> list(cells((2, 2)))
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return product(*map(range, shape))
