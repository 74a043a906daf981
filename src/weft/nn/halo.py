"""HaloExchange: every rank's shard grown by a margin, which its neighbours fill.

The plan asks for overlapping boxes, so its adjoint adds what the neighbours computed for a margin
to where that came from. All neighbours are asked at once, those across corners too. Where
there is no neighbour, the boundary says what the margin holds: zeros, the tensor from its other end
("periodic"), or its mirror image ("reflect", which does not repeat the edge); in the plan, the
last two are further pieces that lie in the same place.

Best before a convolution or a stencil: with the margin in place, each rank computes its part
without padding. Source: Hewett and Grady, arXiv:2006.03108, section on the halo exchange.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal, get_args

from ..errors import WeftError
from ..grid import Box, Shape
from ..plan import Piece, Plan, Side, between
from .along import evenly, shards, told
from .layer import Layer
from .movement import Movement, fitting, group_of
from .partition import Partition

__all__ = ["Boundary", "HaloExchange", "Haloing"]

Boundary = Literal["zero", "periodic", "reflect"]
"""What lies beyond the edge of the tensor."""


@dataclass(frozen=True)
class Haloing(Movement):
    """Shards to shards with margins."""

    partition: Partition
    width: tuple[tuple[int, int], ...]
    boundary: Boundary
    shape: Shape | None = None

    name: ClassVar[str] = "HaloExchange"

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return (self.partition,)

    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        return group_of([self.partition.ranks])

    def _givers(self) -> Iterable[int]:
        return self.partition.ranks

    def settings(self) -> str:
        told = "" if self.shape is None else f", shape={self.shape}"
        return f"width={self.width}, boundary={self.boundary}{told}"

    def batched(self, extent: int) -> Movement:
        shape = None if self.shape is None else (*self.shape, extent)
        return Haloing(self.partition, self.width, self.boundary, shape)

    def expected(self, rank: int) -> Mapping[int, Shape] | None:
        if self.shape is None:
            return None
        return evenly(self.partition, range(self.partition.dim), self.shape)

    def alone(self, rank: int, shape: Shape) -> Shape | None:
        widths = (*self.width, *((0, 0),) * len(shape))
        return tuple(a + n + b for n, (a, b) in zip(shape, widths, strict=False))

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        cells = self.partition.cells
        dims = [
            dim
            for dim, extent in enumerate(self.partition.shape)
            if extent > 1 or any(self.width[dim : dim + 1] and self.width[dim])
        ]
        lengths = fitting(self.name, cells, shapes, dims)
        widths = [
            self.width[dim] if dim < len(self.width) else (0, 0) for dim in range(len(lengths))
        ]
        self._check(lengths, widths)
        held = shards(cells, lengths, dims)
        wanted = {
            rank: Box(
                tuple(a - w for a, (w, _) in zip(box.start, widths, strict=True)),
                tuple(b + w for b, (_, w) in zip(box.stop, widths, strict=True)),
            )
            for rank, box in held.items()
        }
        extents = [sum(each) for each in lengths]
        pieces = tuple(
            Piece(
                rank,
                Box(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges)),
                tuple(r[2] for r in ranges),
            )
            for rank, box in sorted(held.items())
            for ranges in product(
                *(
                    self._images(*each)
                    for each in zip(box.start, box.stop, extents, widths, strict=True)
                )
            )
        )
        return between(Side({rank: box.shape for rank, box in held.items()}, pieces), wanted)

    def _images(
        self, start: int, stop: int, extent: int, width: tuple[int, int]
    ) -> list[tuple[int, int, int]]:
        """Where a range of the tensor is seen: (start, stop, where it begins in the shard)."""
        found = [(start, stop, 0)]
        before, after = width
        if self.boundary == "periodic":
            low = max(start, extent - before)  # what lies before the tensor is its end
            high = min(stop, after)
            found += [(low - extent, stop - extent, low - start)] * (low < stop)
            found += [(start + extent, high + extent, 0)] * (start < high)
        if self.boundary == "reflect":  # backwards, so one by one
            mirrored = [(at, -at) for at in range(1, before + 1)]
            mirrored += [(extent - 1 - k, extent - 1 + k) for k in range(1, after + 1)]
            found += [(seen, seen + 1, at - start) for at, seen in mirrored if start <= at < stop]
        return found

    def _check(self, lengths: Sequence[Shape], widths: Sequence[tuple[int, int]]) -> None:
        """See that each margin is filled by the next rank alone.

        Raises:
            WeftError: a shard is narrower than a margin.
        """
        for dim, (each, width) in enumerate(zip(lengths, widths, strict=True)):
            mirror = self.boundary == "reflect" and any(width)
            most = max(width)
            alone = len(each) == 1 and self.boundary == "zero"
            for place, length in enumerate(each):
                edge = mirror and place in (0, len(each) - 1)
                if (length < most and not alone) or (edge and length <= most):
                    rank = next(r for r, c in self.partition.cells.items() if (*c, 0)[dim] == place)
                    raise WeftError(
                        f"{self.name}: a halo of {most} in dimension {dim} is wider than the shard "
                        f"of rank {rank}, which has {length} there"
                        f"{', without its edge, which a reflection does not repeat' * edge}: use "
                        "fewer ranks or a narrower halo"
                    )


class HaloExchange(Layer):
    """Grows every shard by margins that hold what lies next to it in the whole tensor.

    Input: the rank's shard, of any lengths that fit together. Output: the shard with its margins,
    `before + length + after` in each dimension, also at the edges of the tensor. Adjoint: adds the
    margins to where they came from.

    Args:
        partition: the grid.
        width: of the margins: an integer, for each dimension that the grid cuts; or for each
            dimension of the grid an integer or a pair (before, after).
        boundary: what lies beyond the edges: "zero", "periodic" or "reflect".
        shape: the shape of the tensor, if it is known and cut evenly; checked.

    Raises:
        WeftError: the width is negative or not one for each dimension, or the boundary is unknown;
            when called: shards do not fit together, or a shard is narrower than a margin.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     layer = weft.nn.HaloExchange(weft.Partition(2), 1)
        ...     return layer(torch.tensor([1, 2]) + 2 * wire.rank)
        >>> run(2, program)
        [tensor([0, 1, 2, 3]), tensor([2, 3, 4, 0])]
    """

    def __init__(
        self,
        partition: Partition,
        width: Any,
        boundary: Boundary = "zero",
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        if boundary not in get_args(Boundary):
            raise WeftError(
                f"HaloExchange: boundary {boundary!r} is unknown: use zero, periodic or reflect"
            )
        super().__init__(Haloing(partition, _widths(partition, width), boundary, told(shape)))


def _widths(partition: Partition, width: Any) -> tuple[tuple[int, int], ...]:
    """(before, after) for each dimension of the grid.

    Raises:
        WeftError: that is not what was given.
    """
    try:
        if isinstance(width, Sequence):
            pairs = [each if isinstance(each, Sequence) else (each, each) for each in width]
        else:
            pairs = [(width, width) if extent > 1 else (0, 0) for extent in partition.shape]
        found = tuple((operator.index(a), operator.index(b)) for a, b in pairs)
    except (TypeError, ValueError) as error:
        raise WeftError(
            f"HaloExchange: width is {width!r}: pass an integer, or for each dimension an integer "
            "or a pair (before, after)"
        ) from error
    if len(found) != partition.dim or any(each < 0 for pair in found for each in pair):
        raise WeftError(
            f"HaloExchange: width is {width!r}, and the grid {partition.shape}: pass a width of at "
            "least 0 for each dimension"
        )
    return found
