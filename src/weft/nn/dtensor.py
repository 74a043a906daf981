"""To and from DTensors of `torch.distributed`, whatever their placements.

A DTensor is one tensor over many ranks: its mesh and placements say which rank has which part. So
both conversions are linear maps of that one tensor, and each is the other's adjoint. Of a
replicated DTensor each rank reads the nearest replica; its gradient is replicated. A DTensor that
is Partial is reduced; its gradient is replicated, too.

`Layout` has DTensor's own cuts, those of `torch.chunk`: parts of ceil(n / p) elements, the last
ones shorter or empty. They are made one mesh dimension after the other; each cuts what the one
before left. A strided shard (FSDP over tensor parallelism) cuts each piece of an earlier cut by
itself, and a rank gets a part of each, so its elements need not be adjacent. Therefore a layout
has ranges, in the order in which a rank has them. Source: the documentation of
`torch.distributed.tensor.placement_types` of PyTorch 2.13.

Every call compares the layout with the shapes that the ranks really have. So a DTensor that was
made of other shards is an error on every rank; PyTorch 2.13 computes wrong values with it. A
DTensor that is cut along a mesh dimension whose ranks do not ascend is an error, too: there PyTorch
moves data in the order of the ranks, and computes shapes in the order of the mesh.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base._torch import shard_order
from ..base.errors import WeftError, entry
from ..base.tensors import Shape
from ..call.attempt import preparing
from ..call.handshake import among
from .autograd import Call, Moved, anchor_of, outside
from .grid import ravel
from .partition import Partition
from .plan import Piece, Plan, Side, between
from .spec import (
    CheckedLengths,
    Lengths,
    PlacedRange,
    Spec,
    checked_lengths,
    cut,
    fitting,
    pieces_of,
    shards,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Range = tuple[int, int]

_WHICH_IS = ", which is "  # in the text of a layout


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut of one tensor dimension along one mesh dimension.

    Attributes:
        dim: the dimension of the tensor.
        along: the dimension of the mesh.
        factor: the number of pieces of an earlier cut; each of them is cut by itself.
    """

    dim: int
    along: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The placements of a DTensor, without the tensor.

    Attributes:
        mesh: the shape of the mesh.
        cuts: the cuts, in the order in which they are made.
        partial: (mesh dimension, reduction) for each dimension with a Partial placement.

    Example:
        >>> layout = Layout((2, 2), (Cut(0, 0), Cut(0, 1)))
        >>> [layout.ranges((10,), cell)[0] for cell in ((0, 0), (0, 1), (1, 0), (1, 1))]
        [[(0, 3)], [(3, 5)], [(5, 8)], [(8, 10)]]
    """

    mesh: Shape
    cuts: tuple[Cut, ...] = ()
    partial: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], order: Sequence[Any] | None = None
    ) -> Layout:
        """The layout of a DTensor.

        Args:
            mesh: its mesh.
            placements: one for each dimension of the mesh.
            order: PyTorch's shard order: (tensor dimension, mesh dimensions) in turn, if it has
                one; else the mesh dimensions cut from left to right.

        Raises:
            WeftError: not one placement for each dimension, or one of an unknown kind.
        """
        from torch.distributed.tensor import Partial, Placement

        shape = tuple(mesh.mesh.shape)
        if len(placements) != len(shape):
            raise WeftError(
                f"{len(placements)} placements for a mesh of {len(shape)} dimensions, {shape}: "
                "pass one for each"
            )
        cuts, partial = [], []
        for along, each in enumerate(placements):
            given: Any = each
            if not isinstance(given, Placement):
                raise WeftError(
                    f"placements has a {type(given).__name__}: pass Shard, Replicate or Partial"
                )
            if type(given) is Partial:
                if shape[along] > 1:
                    partial.append((along, str(given.reduce_op)))
            elif hasattr(given, "dim"):
                cuts.append(Cut(given.dim, along, int(getattr(given, "split_factor", 1))))
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
    def reductions(self) -> set[str]:
        """The reductions of the Partial placements."""
        return {how for _, how in self.partial}

    def replica(self, number: int, cell: Shape | None) -> int:
        """The number of the replica that a rank reads: that of its own cell; else any."""
        used = {each.along for each in self.cuts} | {dim for dim, _ in self.partial}
        dims = [dim for dim in range(len(self.mesh)) if dim not in used]
        extents = [self.mesh[dim] for dim in dims]
        if cell is None:
            return number % math.prod(extents)
        return ravel([cell[dim] for dim in dims], extents)

    def carries(self, cell: Shape) -> bool:
        """Whether a cell gets the values of a tensor that becomes Partial; else it gets zeros."""
        return all(how != "sum" or cell[dim] == 0 for dim, how in self.partial)

    def ranges(self, shape: Shape, cell: Shape) -> list[list[Range]]:
        """The ranges that a cell has in each dimension, in the order in which it has them."""
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
        """The shape of a cell's part."""
        return tuple(sum(b - a for a, b in each) for each in self.ranges(shape, cell))

    def pieces(self, shape: Shape, cell: Shape, rank: int) -> list[Piece]:
        """A cell's part, which is that of this rank."""
        placed: list[list[PlacedRange]] = []
        for ranges in self.ranges(shape, cell):
            at = 0
            placed.append([])
            for start, stop in ranges:
                placed[-1].append((start, stop, at))
                at += stop - start
        return pieces_of(rank, placed)

    def spelled(self) -> str:
        """The layout as text for people, and behind that for `read`."""
        cuts = tuple((each.dim, each.along, each.factor) for each in self.cuts)
        return f"{self}{_WHICH_IS}{(self.mesh, cuts, self.partial)}"

    @classmethod
    def read(cls, text: str) -> Layout:
        """The layout that `spelled` gave the text of."""
        mesh, cuts, partial = ast.literal_eval(text.rpartition(_WHICH_IS)[2])
        return cls(mesh, tuple(Cut(*each) for each in cuts), partial)

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
    """Cut ranges into `count` chunks as `torch.chunk` does; the last ones may be empty."""
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


class _DTensorSpec(Spec):
    """A spec with the layout of a DTensor, which the ranks of its mesh state.

    Others have a DTensor without elements, whose placements PyTorch does not always keep right: its
    layout is None until they learn it.
    """

    layout: Layout | None

    @property
    def laid(self) -> Layout:
        """The layout, which all ranks know when they make a plan."""
        assert self.layout is not None
        return self.layout

    def known_to_some(self) -> dict[str, str | None]:
        return {"layout": None if self.layout is None else self.layout.spelled()}

    def learned(self, agreed: Mapping[str, str]) -> Spec:
        if self.layout is not None:
            return self
        layout = Layout.read(agreed["layout"])
        return replace(self, layout=layout)  # type: ignore[call-arg]  # a field of its subclasses


@dataclass(frozen=True)
class FromDTensorSpec(_DTensorSpec):
    """Shards of a DTensor to shards on a grid."""

    mesh: Partition
    layout: Layout | None
    extents: Shape
    target: Partition
    lengths: CheckedLengths = None

    name = "from_dtensor"

    @property
    def summing(self) -> bool:
        return bool(self.laid.partial)

    def settings(self) -> str:
        lengths = "" if self.lengths is None else f", lengths={self.lengths}"
        return f"a DTensor of shape {self.extents}{lengths}"

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        if odd := self.laid.reductions - {"sum", "avg"}:
            raise WeftError(
                f"{self.name}: a DTensor that is Partial({min(odd)!r}) is no linear map of what "
                "ranks hold: redistribute() it to Replicate() first"
            )
        _ascending(self.name, self.mesh, self.laid)
        for rank, cell in self.mesh.cells.items():
            expected = self.laid.local_shape(self.extents, cell)
            if shapes[rank] != expected:
                raise WeftError(
                    f"{self.name}: rank {rank} holds {shapes[rank]} of a DTensor of shape "
                    f"{self.extents} with {self.laid}, by which it should hold {expected}: this "
                    "DTensor was made of other shards than PyTorch cuts, so pass the local "
                    "tensors to weft.nn layers as they are, without a DTensor"
                )
        held = tuple(
            replace(piece, sheet=self.laid.replica(rank, cell))
            for rank, cell in sorted(self.mesh.cells.items())
            for piece in self.laid.pieces(self.extents, cell, rank)
        )
        dims, origin = range(self.target.dim), (0,) * len(self.extents)
        lengths = cut(self.name, self.target, dims, self.extents, self.lengths)
        want = shards(self.target.cells, lengths, dims)
        wanted = tuple(
            Piece(rank, box, origin, self.laid.replica(rank, self.mesh.cells.get(rank)))
            for rank, box in sorted(want.items())
        )
        return between(
            Side({rank: shapes[rank] for rank in self.mesh.ranks}, held),
            Side({rank: box.shape for rank, box in want.items()}, wanted),
        )


@dataclass(frozen=True)
class ToDTensorSpec(_DTensorSpec):
    """Shards on a grid to shards of a DTensor."""

    source: Partition
    mesh: Partition
    layout: Layout | None

    name = "to_dtensor"

    def settings(self) -> str:
        return ""

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        if odd := self.laid.reductions - {"sum", "avg", "min", "max"}:
            raise WeftError(
                f"{self.name}: no DTensor is made Partial({min(odd)!r}): use Replicate(), or "
                "Partial() of sum, avg, min or max"
            )
        _ascending(self.name, self.mesh, self.laid)
        lengths = self.lengths(shapes)
        extents = tuple(map(sum, lengths))
        for each in self.laid.cuts:
            if not -len(extents) <= each.dim < len(extents):
                raise WeftError(
                    f"{self.name}: Shard({each.dim}) of a tensor of {len(extents)} dimensions, "
                    f"{extents}"
                )
        cells = self.mesh.cells
        pieces = tuple(
            piece
            for rank, cell in sorted(cells.items())
            if self.laid.carries(cell)
            for piece in self.laid.pieces(extents, cell, rank)
        )
        held = {rank: self.laid.local_shape(extents, cell) for rank, cell in cells.items()}
        have = shards(self.source.cells, lengths, range(self.source.dim))
        return between(have, Side(held, pieces))

    def lengths(self, shapes: Mapping[int, Shape]) -> list[Shape]:
        """How the grid cuts the tensor."""
        return fitting(self.name, self.source.cells, shapes, range(self.source.dim))


@entry
def from_dtensor(x: DTensor, partition: Partition, *, lengths: Lengths = None) -> Tensor:
    """Convert a DTensor to this rank's shard on a grid. Differentiable.

    Collective among the ranks of the mesh and of the grid, which may have any ranks in common. A
    rank does not send or receive values that it has already: a DTensor that is replicated on all
    ranks of the grid needs the opening exchange only. The gradient is a DTensor with the same mesh
    and placements, but Replicate where `x` is Partial.

    Args:
        x: a dense DTensor, of any dtype, with the placements Shard (also several along one
            dimension, in any order), Replicate, and Partial of sum or avg. Every rank that takes
            part passes it; in PyTorch, ranks outside of the mesh have one without elements. The
            mesh has ranks of torch's default group. The grid's group is that group, too, or a part
            of it that has all ranks of the mesh.
        partition: the grid that cuts the result.
        lengths: for each dimension the lengths of the grid's parts; None: balanced ones. (PyTorch
            cuts 10 over 4 ranks into 3, 3, 3, 1, weft into 3, 3, 2, 2. `lengths=[(3, 3, 3, 1)]`
            keeps PyTorch's cut.)

    Returns:
        The shard, a new tensor; a tensor without elements on ranks that are not in the grid.

    Raises:
        WeftError: `x` is no DTensor, has other shards than its placements say, or is Partial of
            another reduction; or `lengths` do not fit; the same text on every rank that takes part.
        WireError: a peer or a link failed; names the culprit. The group is lost. Also if some rank
            passes no DTensor, and so does not know the mesh, where that has ranks outside the grid.

    Example:
        >>> import torch, weft
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> with weft.init():  # alone: a group of one
        ...     grid = weft.Partition(1)
        ...     x = distribute_tensor(torch.arange(3), grid.to_mesh(), [Shard(0)])
        ...     weft.nn.from_dtensor(x, grid)
        tensor([0, 1, 2])
    """
    from torch.distributed.tensor import DTensor  # here: it takes a while

    group = partition.group
    is_dtensor = isinstance(x, DTensor)
    ranks = _taking_part(partition, x.device_mesh if is_dtensor else None)
    if group.rank not in ranks:
        return _local(x).detach().clone() if is_dtensor else outside("from_dtensor", group, x)
    with preparing(among(group, ranks), "from_dtensor"):
        if not is_dtensor:
            raise WeftError(f"from_dtensor takes a DTensor, not a {type(x).__name__}")
        mesh, layout = _grid(x.device_mesh, partition), None
        if group.rank in mesh.ranks:
            layout = Layout.of(x.device_mesh, _positive(x.placements, x.ndim), shard_order(x))
        spec = FromDTensorSpec(mesh, layout, tuple(x.shape), partition, checked_lengths(lengths))
        local = _local(x)
    moved = Call(spec, group, ranks).run(local)
    learned, dtype = moved.call.spec, moved.dtype
    assert isinstance(learned, FromDTensorSpec)
    averages = "avg" in learned.laid.reductions
    if averages and not (dtype.is_floating_point or dtype.is_complex):
        raise WeftError(f"from_dtensor: {dtype} has no average: use Partial('sum')")
    y: Tensor = _FromDTensor.apply(x, anchor_of(moved, x), moved)  # type: ignore[no-untyped-call]  # torch's
    return y


@entry
def to_dtensor(
    x: Tensor, partition: Partition, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor | Tensor:
    """Convert a tensor that is cut along a grid to a DTensor. Differentiable.

    Collective among the ranks of the grid and of the mesh, which may have any ranks in common. The
    gradient may have any placements that `from_dtensor` takes.

    Args:
        x: this rank's shard, of any dtype, and of any lengths that fit together; on ranks that are
            not in the grid a tensor without elements.
        partition: the grid that cuts `x`.
        mesh: the mesh of the DTensor.
        placements: one for each dimension of the mesh: Shard, Replicate, or Partial of sum, avg,
            min or max. Along a dimension with Partial of sum the first rank gets the values and the
            others zeros; with avg, min and max all get the values.

    Returns:
        The DTensor, contiguous; without elements on ranks of the grid that are not in the mesh.
        Ranks that are in neither get a plain tensor without elements, and wait for nobody.

    Raises:
        WeftError: the shards do not fit together; there is not one placement for each dimension of
            the mesh, or one is of a dimension that does not exist, or of another reduction; the
            same text on every rank that takes part.
        WireError: a peer or a link failed; names the culprit. The group is lost. Also if some rank
            passes no mesh, where that of the others has ranks outside the grid.

    Example:
        >>> import torch, weft
        >>> from torch.distributed.tensor import Replicate
        >>> with weft.init():  # alone: a group of one
        ...     grid = weft.Partition(1)
        ...     weft.nn.to_dtensor(torch.arange(3), grid, grid.to_mesh(), [Replicate()]).to_local()
        tensor([0, 1, 2])
    """
    group = partition.group
    ranks = _taking_part(partition, mesh)
    if group.rank not in ranks:
        return outside("to_dtensor", group, x)
    with preparing(among(group, ranks), "to_dtensor"):
        grid, layout = _grid(mesh, partition), Layout.of(mesh, placements)
        spec = ToDTensorSpec(partition, grid, layout if group.rank in grid.ranks else None)
    moved = Call(spec, group, ranks).run(x)
    anchor = anchor_of(moved, x)
    y: DTensor = _ToDTensor.apply(x, anchor, moved, mesh, placements)  # type: ignore[no-untyped-call]  # torch's
    return y


class _FromDTensor(torch.autograd.Function):
    """`from_dtensor` in autograd; its backward is `to_dtensor`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, anchor: Tensor | None, moved: Moved) -> Tensor:
        spec = moved.call.spec
        assert isinstance(spec, FromDTensorSpec)
        ctx.partition, ctx.mesh = spec.target, x.device_mesh
        ctx.placements = _of_gradients(x.placements)
        y = moved.output
        for dim, how in spec.laid.partial:
            if how == "avg":
                y = y / spec.mesh.shape[dim]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor | Tensor, None, None]:
        return to_dtensor(grad, ctx.partition, ctx.mesh, ctx.placements), None, None


class _ToDTensor(torch.autograd.Function):
    """`to_dtensor` in autograd; its backward is `from_dtensor`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        moved: Moved,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
    ) -> DTensor:
        from torch.distributed.tensor import DTensor

        spec = moved.call.spec
        assert isinstance(spec, ToDTensorSpec)
        ctx.lengths = spec.lengths({r: moved.said[r].shape for r in spec.source.ranks})
        ctx.partition, ctx.x = spec.source, (tuple(x.shape), x.dtype, x.device)
        shape = torch.Size(map(sum, ctx.lengths))
        stride = torch.empty(shape, device="meta").stride()
        placed = _positive(placements, len(shape))
        y: DTensor = DTensor.from_local(
            moved.output, mesh, placed, run_check=False, shape=shape, stride=stride
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None, None, None]:
        shape, dtype, device = ctx.x
        back = from_dtensor(grad, ctx.partition, lengths=ctx.lengths)
        return back.reshape(shape).to(device, dtype), None, None, None, None


def _local(x: DTensor) -> Tensor:
    """This rank's part of a DTensor, when it has arrived; it requires a gradient if `x` does."""
    with torch.no_grad():
        local: Any = x.to_local()
    arrived: Tensor = local.trigger_wait() if hasattr(local, "trigger_wait") else local
    return arrived.detach().requires_grad_(x.requires_grad)


def _taking_part(partition: Partition, mesh: object) -> tuple[int, ...]:
    """The ranks of a conversion, ascending: those of the grid and those of the mesh.

    A rank that has no mesh to know them by tells those of the grid what is wrong with its call.
    """
    try:
        found = _grid(mesh, partition).ranks
    except WeftError:
        found = ()
    return tuple(sorted({*partition.ranks, *found}))


def _grid(mesh: object, partition: Partition) -> Partition:
    """A mesh as a grid in the group of a partition.

    Raises:
        WeftError: it is no mesh, or has ranks that are not in that group.
    """
    from torch.distributed.device_mesh import DeviceMesh

    from .mesh import ranks_in

    if not isinstance(mesh, DeviceMesh):
        raise WeftError(f"a {type(mesh).__name__} is no DeviceMesh: pass one")
    ranks = ranks_in(partition.group_handle, mesh.mesh.flatten().tolist())
    return Partition(tuple(mesh.mesh.shape), ranks=ranks, group=partition.group_handle)


def _positive(placements: Sequence[Placement], ndim: int) -> list[Placement]:
    """The placements with non-negative dimensions; PyTorch converts them only if there is data."""
    found: list[Any] = list(placements)
    for number, each in enumerate(found):
        if getattr(each, "dim", 0) < 0:
            factor = getattr(each, "split_factor", None)
            more = {} if factor is None else {"split_factor": factor}
            found[number] = type(each)(each.dim + ndim, **more)
    return found


def _of_gradients(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements of the gradient: an addend has the gradient of the sum, so Replicate."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if each.is_partial() else each for each in placements)


def _ascending(name: str, mesh: Partition, layout: Layout) -> None:
    """Check that the ranks of the mesh ascend along each dimension that is cut.

    Raises:
        WeftError: they do not; PyTorch mixes up shards then (see above).
    """
    for dim in {each.along for each in layout.cuts}:
        for rank, cell in mesh.cells.items():
            before = mesh.rank_at((*cell[:dim], cell[dim] - 1, *cell[dim + 1 :]))
            if cell[dim] and before > rank:
                raise WeftError(
                    f"{name}: ranks {before} and {rank} follow each other in dimension {dim} of "
                    "the mesh, along which the DTensor is cut; PyTorch mixes up such shards: use "
                    "a mesh whose ranks ascend"
                )
