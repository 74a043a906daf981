"""AllToAll: the ranks of a slice hold parts of a tensor along another dimension than before.

Before it, the ranks of each slice of the grid hold the parts of a tensor along one dimension; after
it, along another. Its adjoint is the reverse movement. Use it between layers that need different
dimensions whole, such as the sequence and the attention heads. Source: Jacobs et al., "DeepSpeed
Ulysses" (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..base.errors import WeftError
from ..base.tensors import Shape
from .layer import Layer
from .partition import Partition, are_grids, integers, normal_dims
from .plan import Plan, between
from .slices import slices_of
from .spec import Spec, checked_lengths, fitting, parts, shards


@dataclass(frozen=True)
class AllToAllSpec(Spec):
    """Shards along one dimension to shards along another, within slices of a grid.

    Attributes:
        partition: the grid.
        dims: of the tensor: the one that is gathered, and the one that is cut.
        along: the dimension of the grid whose ranks exchange.
        lengths: of the parts along the second of `dims`; None: balanced ones.
    """

    partition: Partition
    dims: Shape
    along: int
    lengths: Shape | None

    name = "AllToAll"

    def _connected(self) -> Iterable[Sequence[int]]:
        return slices_of(self.partition, (self.along,))

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        gathered, scattered = self._from_first(len(shapes[min(shapes)]))
        places = self._places(shapes, gathered)
        lengths = fitting(self.name, places, shapes, (gathered,))
        there: list[Shape] = [(sum(each),) for each in lengths]
        (extent,) = there[scattered]
        there[scattered] = parts(self.name, extent, len(places), self.lengths, scattered)
        return between(
            shards(places, lengths, (gathered,)),
            shards(self._places(shapes, scattered), there, (scattered,)),
        )

    def _from_first(self, ndim: int) -> Shape:
        """The two dimensions counted from the first of so many.

        Raises:
            WeftError: they are not two of these.
        """
        first, second = self.dims
        if any(not -ndim <= dim < ndim for dim in self.dims) or (first - second) % ndim == 0:
            raise WeftError(
                f"{self.name}: dims is {self.dims}, and the tensor has {ndim} dimensions: pass two "
                "different ones of these"
            )
        return first % ndim, second % ndim

    def _places(self, ranks: Iterable[int], dim: int) -> dict[int, Shape]:
        """Where each rank is, in a grid that cuts this dimension of the tensor alone."""
        cells = self.partition.cells
        return {rank: (*(0,) * dim, cells[rank][self.along]) for rank in ranks}


class AllToAll(Layer):
    """Within each slice of a grid, gathers one dimension of the tensor and cuts another.

    Input: this rank's part along dimension `dims[0]`, of any dtype, and of any lengths that fit
    together. Output: the whole of that dimension, and this rank's part along `dims[1]`. Adjoint:
    the reverse movement.

    Args:
        partition: the grid.
        dims: the dimension of the tensor that is gathered, and the one that is cut; negative ones
            count from the tensor's last.
        along: the dimension of the grid whose ranks exchange. None: `dims[0]`; a negative one
            counts from the last dimension of the grid.
        lengths: the lengths of the parts along `dims[1]`; None: balanced ones.

    Raises:
        WeftError: `dims` are not two different dimensions, or the grid has no dimension `along`.
            From a call: the parts do not fit together, or `lengths` do not fit.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     return weft.nn.AllToAll(weft.Partition(2), (0, 1))(torch.full((1, 2), group.rank))
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
        lengths: Sequence[int] | None = None,
    ) -> None:
        are_grids("AllToAll", partition)
        both = integers("AllToAll", "dims", dims)
        if len(both) != 2 or both[0] == both[1]:
            raise WeftError(
                f"AllToAll: dims is {both}: pass two different dimensions of the tensor"
            )
        (axis,) = normal_dims(both[0] if along is None else along, partition.dim)
        (cut,) = checked_lengths([lengths]) or (None,)
        super().__init__(AllToAllSpec(partition, both, axis, cut))
