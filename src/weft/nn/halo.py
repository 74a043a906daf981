"""HaloExchange: every rank's shard with margins, which hold the adjacent values of its neighbours.

The boxes that the ranks receive overlap. So the adjoint adds the gradient of a margin to that of
the elements from which the margin was copied. A rank receives from all ranks whose shards a margin
reaches at once, also from those across corners. At the edge of the tensor `boundary` says what the
margin holds: zeros, or the values at the other end of the tensor ("periodic"); a margin that is
wider than the tensor holds these again and again. In the plan they are further images of the same
elements.

Use it before a convolution or a stencil: each rank then computes its part without padding. Source:
Hewett and Grady (arXiv 2006.03108), on the halo exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast, get_args

from torch import Tensor

from ..base.arguments import as_integer, is_a
from ..base.errors import WeftError
from ..base.tensors import Shape
from .grid import Box
from .layer import Layer
from .partition import Partition, are_grids
from .plan import Piece, Plan, Side, between
from .spec import Spec, fitting, shards

Boundary = Literal["zero", "periodic"]
"""What margins at the edges of the tensor hold."""


PlacedRange = tuple[int, int, int]
"""A range of a dimension that lies in a rank's tensor: start, stop, and its first index there."""


Widths = tuple[tuple[int, int], ...]
"""(before, after) for each dimension of the grid."""


@dataclass(frozen=True)
class HaloSpec(Spec):
    """Shards to shards with margins.

    Attributes:
        partition: the grid.
        width: the widths of each rank's margins, in the order of the grid's cells.
        boundary: what margins at the edges of the tensor hold.
    """

    partition: Partition
    width: tuple[Widths, ...]
    boundary: Boundary

    name = "HaloExchange"

    def settings(self) -> str:
        width = f"{self.width} by cell" if len(set(self.width)) > 1 else f"{self.width[0]}"
        return f"width={width}, boundary={self.boundary}"

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        cells = self.partition.cells
        # in each dimension of the grid, the widest margins of any rank
        widest = tuple(
            (max(before for before, _ in widths), max(after for _, after in widths))
            for widths in zip(*self.width, strict=True)
        )
        dims = [dim for dim, n in enumerate(self.partition.shape) if n > 1 or any(widest[dim])]
        lengths = fitting(self.name, cells, shapes, dims)
        extents = [sum(each) for each in lengths]
        reach = _along(widest, len(extents))
        widths_of = dict(zip(self.partition.ranks, self.width, strict=True))
        pieces: list[Piece] = []
        wanted: dict[int, Box] = {}
        for rank, box in sorted(shards(cells, lengths, dims).items()):
            widths = _along(widths_of[rank], len(extents))
            wanted[rank] = Box(
                tuple(start - before for start, (before, _) in zip(box.start, widths, strict=True)),
                tuple(stop + after for stop, (_, after) in zip(box.stop, widths, strict=True)),
            )
            images = map(self._images, box.start, box.stop, extents, reach)
            for ranges in product(*images):
                start = tuple(start for start, _, _ in ranges)
                stop = tuple(stop for _, stop, _ in ranges)
                pieces.append(Piece(rank, Box(start, stop), tuple(at for _, _, at in ranges)))
        return between(Side({rank: shapes[rank] for rank in cells}, tuple(pieces)), wanted)

    def _images(
        self, start: int, stop: int, extent: int, width: tuple[int, int]
    ) -> list[PlacedRange]:
        """The images of a range of the tensor.

        Args:
            start, stop: the range, which begins the rank's tensor.
            extent: of the tensor.
            width: how far images reach before and behind the tensor, at most.

        Raises:
            WeftError: a margin is to hold images of a tensor that has nothing.
        """
        if self.boundary == "zero":
            return [(start, stop, 0)]
        if not extent and any(width):
            raise WeftError(
                f"{self.name}: a halo of {max(width)} is to be {self.boundary}, and the tensor has "
                "nothing there: use the boundary zero"
            )
        if start == stop:
            return [(start, stop, 0)]
        first, last = -width[0], extent + width[1]
        found = []
        for shift in range(first // extent * extent, last, extent):
            low = max(start + shift, first)
            high = min(stop + shift, last)
            if low < high:
                found.append((low, high, low - shift - start))
        return found


class HaloExchange(Layer):
    """Adds margins to every shard, with the adjacent values of the whole tensor.

    Input: this rank's shard, of any dtype, and of any lengths that fit together. Output: the shard
    with its margins: `before + length + after` in each dimension, also at the edges of the tensor.
    Margins may be wider than shards, and shards may be empty: a margin is filled from all shards
    that it reaches. Adjoint: adds the gradients of the margins to those of the elements they are
    copies of.

    If the widths differ between ranks, as a kernel with a stride needs it, pass a function of the
    cell as `width`.

    Args:
        partition: the grid.
        width: the widths of the margins, in elements. An integer: that of each dimension in which
            the grid has more than one cell; the other dimensions get no margin. A sequence: for
            each dimension of the grid an integer or a pair (before, after). A function that returns
            such a sequence, or an integer, for a cell of the grid: every rank calls it for all
            cells.
        boundary: what margins at the edges of the tensor hold: "zero" or "periodic", as "constant"
            and "wrap" of `numpy.pad`.

    Raises:
        WeftError: a width is negative or missing, or the boundary is unknown. From a call: the
            shards do not fit together, the ranks' layers have different widths, or the boundary is
            not "zero" and the whole tensor is empty.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     layer = weft.nn.HaloExchange(weft.Partition(2), 1)
        ...     return layer(torch.tensor([1, 2]) + 2 * group.rank)
        >>> run(2, program)
        [tensor([0, 1, 2, 3]), tensor([2, 3, 4, 0])]
        >>> def program(group):  # the second rank alone needs a margin
        ...     width = lambda cell: [(2, 0) if cell == (1,) else (0, 0)]
        ...     layer = weft.nn.HaloExchange(weft.Partition(2), width)
        ...     return layer(torch.tensor([1, 2]) + 2 * group.rank)
        >>> run(2, program)
        [tensor([1, 2]), tensor([1, 2, 3, 4])]
    """

    def __init__(
        self,
        partition: Partition,
        width: Any,
        boundary: Boundary = "zero",
    ) -> None:
        are_grids("HaloExchange", partition)
        if boundary not in get_args(Boundary):
            raise WeftError(f"HaloExchange: boundary {boundary!r} is unknown: use zero or periodic")
        cells = partition.cells.values()
        if callable(width):
            widths = tuple(_widths(partition, width(cell)) for cell in cells)
        else:
            widths = (_widths(partition, width),) * partition.size
        super().__init__(HaloSpec(partition, widths, boundary))


def _along(widths: Widths, ndim: int) -> Widths:
    """Widths for each dimension of a tensor: none where the grid has no such dimension."""
    return (*widths, *((0, 0),) * ndim)[:ndim]


def _widths(partition: Partition, width: Any) -> Widths:
    """(before, after) for each dimension of the grid.

    Raises:
        WeftError: that is not what was given.
    """
    by_dim = width
    if not isinstance(width, Sequence):
        by_dim = [width if extent > 1 else 0 for extent in partition.shape]
    found: list[tuple[int, ...]] = []
    for each in by_dim:
        ends = each if isinstance(each, Sequence) else (each, each)
        # one of a single element would pass for that
        found.append(tuple(-1 if is_a(end, Tensor) else as_integer(end) for end in ends))
    if len(found) != partition.dim or any(len(pair) != 2 or min(pair) < 0 for pair in found):
        raise WeftError(
            f"HaloExchange: width is {width!r}: pass an integer, or for each dimension an integer "
            "or a pair (before, after), or a function that gives such, of at least 0 for each "
            f"dimension of the grid {partition.shape}"
        )
    return cast(Widths, tuple(found))
