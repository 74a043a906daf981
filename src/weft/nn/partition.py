"""Partitions: Cartesian grids over some of the ranks of a group.

A partition is integers, and the group whose ranks they are. All ranks of the group make the same
one. Making it sends nothing, with one exception: the first use of a ProcessGroup or a DeviceMesh
connects its ranks, so all of them must take part in that. Ranks that are not in a partition are
*inactive*: they take no part in the communication of a layer on it.

Dimension d of the grid cuts dimension d of a tensor. Further dimensions of the tensor are not cut.
If the tensor has fewer dimensions than the grid, a layer within slices of the grid (`slices`) works
in each cell of the further dimensions by itself; what cuts a tensor along all dimensions of the
grid, such as `boxes` and Repartition, raises an error.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import WeftError, entry, summed_up
from ..base.tensors import Shape
from ..group import default
from ..group.group import Group
from . import grid
from .grid import Box
from .mesh import group_named, mesh_of, name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NAMED = 60  # bytes of ranks that are named in full


@dataclass(frozen=True, init=False, repr=False)
class Partition:
    """A Cartesian grid over some of the ranks of a group; immutable.

    Args:
        shape: the number of cells in each dimension; an integer is a grid of one dimension.
        ranks: the rank of each cell, in row-major order: any ranks of the group, in any order.
            None: the first ranks of the group.
        group: the group whose ranks these are: None (the default group), a Group, a ProcessGroup,
            or a 1-D DeviceMesh.

    Attributes:
        shape: the number of cells in each dimension.
        ranks: the rank of each cell, in row-major order.
        group_handle: what was given as `group=`; None is whichever group is the default one.

    Raises:
        WeftError: an extent is below 1, there is not one rank for each cell, a rank is repeated or
            not in the group, or there is no such group; raised on this rank alone.

    Example:
        >>> import weft
        >>> with weft.init():  # alone: a group of one
        ...     partition = weft.Partition((1, 1))
        ...     partition.index, partition.active, partition.box((5, 3)).shape
        ((0, 0), True, (5, 3))
    """

    shape: Shape
    ranks: tuple[int, ...]
    group_handle: Any = field(hash=False)

    @entry
    def __init__(
        self,
        shape: Sequence[int] | int,
        *,
        ranks: Sequence[int] | None = None,
        group: object = None,
    ) -> None:
        group = default.resolve(handle := group)
        me = f"rank {group.rank}"
        extents = integers(me, "shape", shape)
        if any(extent < 1 for extent in extents):
            raise WeftError(f"{me}: a grid of {extents} has a dimension without cells")
        count = math.prod(extents)
        if ranks is None:
            if count > group.size:
                raise WeftError(
                    f"{me}: a grid of {extents} has {count} cells, the group {group.size} ranks: "
                    "start more ranks, or make it smaller"
                )
            ranks = range(count)
        chosen = integers(me, "ranks", ranks)
        if len(chosen) != count:
            raise WeftError(f"{me}: {len(chosen)} ranks for the {count} cells of a grid {extents}")
        for number, rank in enumerate(chosen):
            if not 0 <= rank < group.size:
                raise WeftError(f"{me}: there is no rank {rank} in a group of {group.size}")
            if rank in chosen[:number]:
                raise WeftError(f"{me}: rank {rank} is in the grid twice")
        self._set(extents, chosen, handle)

    def _set(self, shape: Shape, ranks: Iterable[int], handle: object) -> Partition:
        self.__dict__.update(shape=shape, ranks=tuple(ranks), group_handle=handle)
        return self

    def like(self, shape: Shape, ranks: Iterable[int]) -> Partition:
        """Another grid in the same group, of ranks that are known to be in it."""
        return object.__new__(Partition)._set(shape, ranks, self.group_handle)

    def without_group(self) -> Partition:
        """The same cells and ranks, in whatever is the default group."""
        return _restore(self.shape, self.ranks, None)

    @classmethod
    @entry
    def from_mesh(cls, mesh: DeviceMesh) -> Partition:
        """The grid of a `torch.distributed` DeviceMesh, in the default group.

        The ranks of a mesh are those of torch's default group, which must be weft's, too.

        Raises:
            WeftError: it is not a mesh, or has ranks that the default group does not have.
        """
        if not hasattr(mesh, "mesh"):
            raise WeftError(f"a {type(mesh).__name__} is no DeviceMesh: pass one")
        return cls(tuple(mesh.mesh.shape), ranks=mesh.mesh.flatten().tolist())

    @entry
    def to_mesh(
        self, device_type: str = "cpu", *, names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """This grid as a DeviceMesh; collective among all ranks of torch's default group.

        The mesh has the ranks in the grid's order. DTensor mixes up shards along a dimension in
        which the ranks do not ascend (PyTorch 2.13), which `to_dtensor` and `from_dtensor` refuse.
        """
        return mesh_of(device_type, self._array.tolist(), names)

    # ranks and cells

    @property
    def group(self) -> Group:
        """The group, here and now."""
        return default.resolve(self.group_handle)

    @property
    def rank(self) -> int:
        """This rank, as the group counts."""
        return self.group.rank

    @property
    def dim(self) -> int:
        """How many dimensions the grid has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many cells it has."""
        return len(self.ranks)

    @property
    def active(self) -> bool:
        """Whether this rank is in the grid."""
        return self.rank in self.cells

    @property
    def index(self) -> Shape | None:
        """The cell of this rank; None if it is inactive."""
        return self.cells.get(self.rank)

    @functools.cached_property
    def cells(self) -> dict[int, Shape]:
        """The cell of each rank."""
        return dict(zip(self.ranks, grid.cells(self.shape), strict=True))

    @functools.cached_property
    def _array(self) -> np.ndarray[Any, Any]:
        """The ranks, as they stand in the grid."""
        return np.reshape(self.ranks, self.shape)

    # other grids

    @entry
    def subset(self, positions: Sequence[int]) -> Partition:
        """A grid of one dimension of the cells with these numbers (row-major), in that order.

        Raises:
            WeftError: there is no such cell, or it is repeated.
        """
        numbers = integers("subset", "positions", positions)
        if not numbers or len(set(numbers)) < len(numbers):
            raise WeftError(f"positions are {list(numbers)}: pass some, each of them once")
        absent = [at for at in numbers if not 0 <= at < self.size]
        if absent:
            raise WeftError(
                f"there is no rank {absent[0]} in a partition of size {self.size}: "
                f"pass 0 to {self.size - 1}, or start more ranks"
            )
        return self.like((len(numbers),), [self.ranks[at] for at in numbers])

    @entry
    def reshape(self, shape: Sequence[int]) -> Partition:
        """The first ranks of this grid, in a grid of another shape.

        Raises:
            WeftError: the shape has more cells than this grid.
        """
        extents = integers("reshape", "shape", shape)
        count = math.prod(extents)
        if any(extent < 1 for extent in extents) or count > self.size:
            raise WeftError(f"a grid of {extents} cannot be made of {self.size} ranks")
        return self.like(extents, self.ranks[:count])

    @entry
    def union(self, *others: Partition) -> Partition:
        """A grid of one dimension of all ranks of these grids, each once, in order of appearance.

        Raises:
            WeftError: they count in different groups.
        """
        are_grids("union", *others)
        for other in others:
            same_group("union", self, other)
        ranks = dict.fromkeys(rank for each in (self, *others) for rank in each.ranks)
        return self.like((len(ranks),), ranks)

    @entry
    def keep(self, dims: Sequence[int] | int) -> Partition:
        """The sub-grid through this rank's cell along some dimensions, in the order given.

        On an inactive rank: the one through the first cell.
        """
        kept = normal_dims(dims, self.dim)
        here = self.index or (0,) * self.dim
        through = tuple(slice(None) if d in kept else at for d, at in enumerate(here))
        found = self._array[through].transpose([sorted(kept).index(dim) for dim in kept])
        return self.like(found.shape, found.ravel().tolist())

    # how tensors are cut

    def boxes(self, shape: Sequence[int] | int) -> dict[int, Box]:
        """The balanced cut of a tensor of that shape: each rank's box.

        Raises:
            WeftError: it is no shape, or the grid cuts a dimension that the tensor does not have.

        Example:
            >>> from weft.testing import run
            >>> run(2, lambda group: Partition((2, 1)).boxes((5, 3))[group.rank].shape)
            [(3, 3), (2, 3)]
        """
        shape = lengths_of("boxes", "shape", shape)
        if any(extent > 1 for extent in self.shape[len(shape) :]):
            raise WeftError(
                f"a grid of {self.shape} cuts dimensions that a tensor of shape {shape} "
                "does not have"
            )
        counts = (*self.shape, *(1,) * len(shape))
        lengths = [grid.balanced(*each) for each in zip(shape, counts, strict=False)]
        return dict(zip(self.ranks, grid.boxes(lengths), strict=True))

    def box(self, shape: Sequence[int] | int) -> Box:
        """The box of this rank in the balanced cut of a tensor.

        Raises:
            WeftError: this rank is inactive.
        """
        if not self.active:
            raise WeftError(f"rank {self.rank} has no part of a grid of ranks {self.ranks}")
        return self.boxes(shape)[self.rank]

    # as a value

    def __copy__(self) -> Partition:
        return self

    def __deepcopy__(self, _: object) -> Partition:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The integers, and what finds the group again where they are read."""
        if isinstance(self.group_handle, Group):
            raise WeftError(
                "a partition of a weft.Group cannot be pickled, since nobody could find that "
                "group again: make it of the default group, or of a process group"
            )
        return _restore, (self.shape, self.ranks, name_of(self.group_handle))

    def __repr__(self) -> str:
        """The ranks, as they stand in the grid."""
        return f"Partition({self.brief})\n{self._array}"

    @property
    def brief(self) -> str:
        """Shape and ranks in a few words, to compare grids by; of many ranks a digest."""
        shape = "x".join(map(str, self.shape)) or "1"
        if self.ranks == tuple(range(self.ranks[0], self.ranks[0] + self.size)):
            last = self.ranks[-1]
            which = f"rank {last}" if self.size == 1 else f"ranks {self.ranks[0]} to {last}"
        else:
            named = ", ".join(map(str, self.ranks))
            which = summed_up(
                f"ranks {named}", _NAMED, f"ranks {named[:_NAMED].rpartition(',')[0]}, ..."
            )
        return f"{shape} of {which}"


def _restore(shape: Shape, ranks: tuple[int, ...], name: str | None) -> Partition:
    """A partition that was pickled."""
    group = None if name is None else group_named(name)
    return object.__new__(Partition)._set(shape, ranks, group)


def are_grids(name: str, *given: object) -> None:
    """See that these are partitions, as one that came from a DeviceMesh may not be.

    Raises:
        WeftError: one is not.
    """
    for each in given:
        if not isinstance(each, Partition):
            raise WeftError(
                f"{name} works on a grid, not on a {type(each).__name__}: pass a weft.Partition, "
                "such as weft.Partition.from_mesh(mesh)"
            )


def same_group(name: str, one: Partition, other: Partition) -> None:
    """See that two grids count ranks in the same group.

    Raises:
        WeftError: they do not.
    """
    if one.group is not other.group:
        raise WeftError(f"{name}: the two grids count ranks in different groups")


def normal_dims(dims: Sequence[int] | int, count: int) -> Shape:
    """Dimensions as non-negative numbers.

    Raises:
        WeftError: one is out of range, or there twice.
    """
    given = integers("dims", "dims", dims)
    for dim in given:
        if not -count <= dim < count:
            raise WeftError(f"dim {dim} is out of range: the grid has {count} dimensions")
    found = tuple(dim % count for dim in given)
    if len(set(found)) < len(found):
        raise WeftError(f"dims {given} name a dimension twice: name each once")
    return found


def integers(who: str, what: str, given: Any) -> tuple[int, ...]:
    """One integer or several as a tuple.

    Raises:
        WeftError: they are none.
    """
    with contextlib.suppress(TypeError):
        return (operator.index(given),)
    try:
        return tuple(operator.index(each) for each in given)
    except TypeError as error:
        raise WeftError(f"{who}: {what} is {given!r}: pass integers") from error


def lengths_of(who: str, what: str, given: Any) -> Shape:
    """The shape of a tensor as a tuple; an integer is that of a tensor of one dimension.

    Raises:
        WeftError: it is none.
    """
    found = integers(who, what, given)
    if any(length < 0 for length in found):
        raise WeftError(
            f"{who}: {what} is {given!r}: lengths are at least 0, and none may be left open"
        )
    return found
