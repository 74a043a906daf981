"""AllToAll: along one dimension of a grid, another dimension of the tensor becomes the one cut.

In each slice of the grid, ranks hold parts along one dimension of a tensor; afterwards they hold
parts along another. Its adjoint is the way back. Best between layers that each need a whole
dimension, such as attention heads and sequence (Jacobs et al., "DeepSpeed Ulysses",
arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..errors import WeftError
from ..grid import Box, Shape, balanced, boxes
from ..plan import Plan, between
from .layer import Layer
from .partition import Partition, are_grids, integers, normal_dims
from .spec import SliceSpec, Spec, checked_lengths, checked_shape, fitting, parts


@dataclass(frozen=True)
class AllToAllSpec(SliceSpec):
    """Shards along one dimension to shards along another; `dims` is the grid's."""

    gathered: int = 0
    scattered: int = 1

    name: ClassVar[str] = "AllToAll"

    def settings(self) -> str:
        told = "" if self.shape is None else f", shape={self.shape}"
        cut = "" if self.lengths is None else f", lengths={self.lengths[0]}"
        return f"dims=({self.gathered}, {self.scattered}), along={self.dims[0]}{told}{cut}"

    def inputs(self, rank: int, shape: Shape) -> Mapping[int, Shape] | None:
        cells = self.cells(self.groups[rank])
        both = self._from_first(len(shape))
        if both is None:
            return None  # the plan says what is wrong
        lengths: list[Shape] = [(extent,) for extent in shape]
        lengths[both[0]] = balanced(shape[both[0]], len(cells))
        return {r: box.shape for r, box in self._along(cells, lengths).items()}

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        cells = self.cells(list(shapes))
        ndim = len(shapes[min(shapes)])
        both = self._from_first(ndim)
        if both is None:
            raise WeftError(
                f"{self.name}: dims is {(self.gathered, self.scattered)}, and the tensor has "
                f"{ndim} dimensions: pass two different ones of these"
            )
        gathered, scattered = both
        places = {r: (0,) * gathered + (cell[self.dims[0]],) for r, cell in cells.items()}
        lengths = fitting(self.name, places, shapes, (gathered,))
        there: list[Shape] = [(sum(each),) for each in lengths]
        (extent,) = there[scattered]
        given = None if self.lengths is None else self.lengths[0]
        there[scattered] = parts(self.name, extent, len(cells), given, scattered)
        return between(self._along(cells, lengths), self._along(cells, there))

    def batched(self, extent: int) -> Spec:
        """What is batched comes behind the other dimensions, so the last of these moves on."""
        further = replace(
            self,
            gathered=self.gathered - (self.gathered < 0),
            scattered=self.scattered - (self.scattered < 0),
        )
        return super(AllToAllSpec, further).batched(extent)

    def _from_first(self, ndim: int) -> Shape | None:
        """The two dimensions counted from the first of so many; None: they are not two of these."""
        both = self.gathered, self.scattered
        if any(not -ndim <= dim < ndim for dim in both) or (both[0] - both[1]) % ndim == 0:
            return None
        return both[0] % ndim, both[1] % ndim

    def _along(self, cells: Mapping[int, Shape], lengths: Sequence[Shape]) -> dict[int, Box]:
        """The box of each rank, where one dimension has a part for each of them."""
        found = boxes(lengths)
        return {rank: found[cell[self.dims[0]]] for rank, cell in cells.items()}


class AllToAll(Layer):
    """Within each slice of a grid, cuts another dimension of the tensor than before.

    Input: the rank's part along dimension `dims[0]`, of any lengths that fit together. Output: all
    of that dimension, and the rank's part along `dims[1]`. Adjoint: the way back.

    Args:
        partition: the grid.
        dims: the dimension of the tensor that is gathered, and the one that is cut; negative ones
            count from the tensor's last.
        along: the dimension of the grid whose ranks exchange; None: `dims[0]`, where that is
            negative counted from the last of the grid.
        shape: the shape of the tensor of a slice, if it is known and cut evenly; checked, and
            needed under torch.compile.
        lengths: the lengths of the parts along `dims[1]`, or None: balanced.

    Raises:
        WeftError: dims are not two different ones, or the grid has no such dimension; when called:
            shards do not fit together.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     return weft.nn.AllToAll(weft.Partition(2), (0, 1))(torch.full((1, 2), wire.rank))
        >>> run(2, program)[0]
        tensor([[0],
                [1]])
    """

    def __init__(
        self,
        partition: Partition,
        dims: Sequence[int],
        *,
        along: int | None = None,
        shape: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        are_grids("AllToAll", partition)
        both = integers("AllToAll", "dims", dims)
        if len(both) != 2 or both[0] == both[1]:
            raise WeftError(
                f"AllToAll: dims is {both}: pass two different dimensions of the tensor"
            )
        axis = normal_dims(both[0] if along is None else along, partition.dim)
        cut = None if lengths is None else checked_lengths([lengths])
        super().__init__(AllToAllSpec(partition, axis, cut, *both, shape=checked_shape(shape)))
