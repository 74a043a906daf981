"""Layouts: which part of a DTensor each cell of its mesh holds, in integers only.

DTensor cuts with `torch.chunk`: parts of ceil(n / p), the last ones shorter or empty. A tensor
dimension may be cut along several mesh dimensions, one after the other, each cutting what the one
before left. A strided shard (FSDP over tensor parallelism) deals the pieces of an earlier cut out
like cards, so what a rank holds need not lie together: hence ranges, in the order they are held.
Source: the documentation of `torch.distributed.tensor.placement_types` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ..errors import WeftError
from ..grid import Box, Shape, ravel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = ["Layout"]

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut of one tensor dimension along one mesh dimension.

    Attributes:
        dim: of the tensor.
        along: of the mesh.
        factor: into how many pieces it was cut before, each of which is cut by itself.
    """

    dim: int
    along: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The placements of a DTensor, without the tensor.

    Attributes:
        mesh: cells of the mesh in each of its dimensions.
        cuts: in the order in which they are made.
        partial: (mesh dimension, reduction) where what ranks hold is yet to be reduced.

    Example:
        >>> layout = Layout((2, 2), (Cut(0, 0), Cut(0, 1)))
        >>> [layout.ranges((10,), cell)[0] for cell in ((0, 0), (0, 1), (1, 0), (1, 1))]
        [[(0, 3)], [(3, 5)], [(5, 8)], [(8, 10)]]
    """

    mesh: Shape
    cuts: tuple[Cut, ...] = ()
    partial: tuple[tuple[int, str], ...] = ()

    @classmethod
    def replicated(cls, mesh: Shape) -> Layout:
        """All of it, everywhere."""
        return cls(mesh)

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        ndim: int | None = None,
        order: Sequence[Any] | None = None,
    ) -> Layout:
        """The layout of a DTensor.

        Args:
            mesh: its mesh.
            placements: one for each dimension of the mesh.
            ndim: dimensions of the tensor, if they are known.
            order: PyTorch's shard order: (tensor dimension, mesh dimensions) in turn, if it has
                one; else the mesh dimensions cut from left to right.

        Raises:
            WeftError: not one placement for each dimension, or one of an unknown kind.
        """
        from torch.distributed.tensor import Partial

        shape = tuple(mesh.mesh.shape)
        if len(placements) != len(shape):
            raise WeftError(
                f"{len(placements)} placements for a mesh of {len(shape)} dimensions, {shape}: "
                "pass one for each"
            )
        cuts, partial = [], []
        for along, each in enumerate(placements):
            given: Any = each
            if type(given) is Partial:
                if shape[along] > 1:
                    partial.append((along, str(given.reduce_op)))
            elif hasattr(given, "dim"):
                dim = given.dim
                if dim < 0 and ndim is not None:
                    dim += ndim
                cuts.append(Cut(dim, along, int(getattr(given, "split_factor", 1))))
            elif not given.is_replicate():
                raise WeftError(
                    f"{given} is a placement that weft does not know: redistribute() to Shard, "
                    "Replicate or Partial first"
                )
        if order is not None:
            turn = [along for _, dims in order for along in dims]
            cuts.sort(key=lambda each: turn.index(each.along))
        return cls(shape, tuple(cuts), tuple(partial))

    @property
    def reductions(self) -> dict[int, str]:
        """How to reduce, for each dimension of the mesh that is Partial."""
        return dict(self.partial)

    @property
    def replicas(self) -> int:
        """How many ranks hold the same."""
        count = 1
        for dim in self._copies():
            count *= self.mesh[dim]
        return count

    def replica(self, cell: Shape) -> int:
        """Which of the replicas a cell is part of."""
        dims = self._copies()
        return ravel([cell[dim] for dim in dims], [self.mesh[dim] for dim in dims])

    def carries(self, cell: Shape) -> bool:
        """Whether a cell holds values, not zeros, of a tensor that becomes Partial."""
        return all(how != "sum" or cell[dim] == 0 for dim, how in self.partial)

    def check(self, name: str, shape: Shape) -> None:
        """See that there is such a tensor.

        Raises:
            WeftError: it lacks a dimension that is cut.
        """
        for each in self.cuts:
            if not -len(shape) <= each.dim < len(shape):
                raise WeftError(
                    f"{name}: Shard({each.dim}) of a tensor of {len(shape)} dimensions, {shape}"
                )

    def ranges(self, shape: Shape, cell: Shape) -> list[list[Range]]:
        """What a cell holds in each dimension, in the order it is held."""
        found = [[(0, extent)] for extent in shape]
        for each in self.cuts:
            count, mine = self.mesh[each.along], cell[each.along]
            found[each.dim] = [
                part
                for piece in _chunks(found[each.dim], each.factor)
                for part in _chunks(piece, count)[mine]
            ]
        return found

    def local_shape(self, shape: Shape, cell: Shape) -> Shape:
        """The shape of what a cell holds."""
        return tuple(sum(b - a for a, b in each) for each in self.ranges(shape, cell))

    def pieces(self, shape: Shape, cell: Shape) -> list[tuple[Box, Shape]]:
        """What a cell holds: boxes of the tensor, and where they begin in what it holds."""
        dims = []
        for each in self.ranges(shape, cell):
            at, placed = 0, []
            for start, stop in each:
                placed.append((start, stop, at))
                at += stop - start
            dims.append(placed)
        return [
            (Box(tuple(r[0] for r in box), tuple(r[1] for r in box)), tuple(r[2] for r in box))
            for box in product(*dims)
        ]

    def _copies(self) -> list[int]:
        used = {each.along for each in self.cuts} | {dim for dim, _ in self.partial}
        return [dim for dim in range(len(self.mesh)) if dim not in used]

    def __str__(self) -> str:
        names = ["Replicate()"] * len(self.mesh)
        for turn, each in enumerate(self.cuts):
            strided = f", factor {each.factor}" if each.factor > 1 else ""
            late = any(other.along > each.along for other in self.cuts[:turn])
            names[each.along] = f"Shard({each.dim}{strided}{', cut later' * late})"
        for dim, how in self.partial:
            names[dim] = f"Partial({how!r})"
        return f"placements [{', '.join(names)}] on a mesh of {self.mesh}"


def _chunks(ranges: Sequence[Range], count: int) -> list[list[Range]]:
    """What `torch.chunk` makes of the numbers in these ranges, with empty chunks at the end."""
    total = sum(b - a for a, b in ranges)
    size = -(-total // count)
    found: list[list[Range]] = [[] for _ in range(count)]
    at = 0
    for start, stop in ranges:
        while start < stop:
            chunk = at // size
            step = min(stop - start, (chunk + 1) * size - at)
            found[chunk].append((start, start + step))
            start, at = start + step, at + step
    return found
