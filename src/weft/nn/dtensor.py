"""To and from `torch.distributed` DTensors, whatever their placements.

A DTensor is one tensor, seen from many ranks: its mesh and placements say which rank holds what.
So the conversions are maps of that one tensor, and each is the other's adjoint: a replicated
DTensor is read once, from the nearest replica, and its gradient is the same on all of them; one
that is Partial is summed, and its gradient is replicated.

The cuts are DTensor's own (`layout`): `torch.chunk`'s, one mesh dimension after the other. What
ranks really hold is compared with them on every call, so a DTensor that was made of other shards
is an error on every rank, where PyTorch 2.13 computes with wrong values. So is one that is cut
along a mesh dimension whose ranks do not ascend: there PyTorch moves data in the order of the ranks
and finds shapes in the order of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..errors import WeftError
from ..grid import Shape
from ..plan import Piece, Plan, Side, between
from .along import cut, given, shards
from .door import Call
from .layout import Layout
from .movement import Lengths, Movement, fitting, group_of
from .partition import Partition

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["from_dtensor", "to_dtensor"]


@dataclass(frozen=True)
class _Leaving(Movement):
    """Shards of a DTensor to shards on a grid."""

    mesh: Partition
    layout: Layout
    shape: Shape
    target: Partition
    lengths: tuple[tuple[int, ...] | None, ...] | None = None

    name: ClassVar[str] = "from_dtensor"

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return (self.mesh, self.target)

    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        return group_of([(*self.mesh.ranks, *self.target.ranks)])

    def _givers(self) -> Iterable[int]:
        return self.mesh.ranks

    def settings(self) -> str:
        cut = "" if self.lengths is None else f", lengths={self.lengths}"
        return f"a DTensor of shape {self.shape} with {self.layout}{cut}"

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        if odd := set(self.layout.reductions.values()) - {"sum", "avg"}:
            raise WeftError(
                f"{self.name}: a DTensor that is Partial({min(odd)!r}) is no linear map of what "
                "ranks hold: redistribute() it to Replicate() first"
            )
        _ascending(self.name, self.mesh, self.layout)
        for rank, cell in self.mesh.cells.items():
            expected = self.layout.local_shape(self.shape, cell)
            if shapes[rank] != expected:
                raise WeftError(
                    f"{self.name}: rank {rank} holds {shapes[rank]} of a DTensor of shape "
                    f"{self.shape} with {self.layout}, by which it should hold {expected}: this "
                    "DTensor was made of other shards than PyTorch cuts, so pass the local "
                    "tensors to weft.nn layers as they are, without a DTensor"
                )
        have = Side(
            {rank: shapes[rank] for rank in self.mesh.ranks},
            tuple(
                Piece(rank, box, at, self.layout.replica(cell))
                for rank, cell in sorted(self.mesh.cells.items())
                for box, at in self.layout.pieces(self.shape, cell)
            ),
        )
        dims = [dim for dim, extent in enumerate(self.target.shape) if extent > 1]
        lengths = cut(self.name, self.target, dims, self.shape, self.lengths)
        want = shards(self.target.cells, lengths, dims)
        return between(
            have,
            Side(
                {rank: box.shape for rank, box in want.items()},
                tuple(
                    Piece(rank, box, (0,) * len(self.shape), self._nearest(rank))
                    for rank, box in sorted(want.items())
                ),
            ),
        )

    def _nearest(self, rank: int) -> int:
        """The replica that a rank reads: the one it is part of, else any."""
        cell = self.mesh.cells.get(rank)
        return rank % self.layout.replicas if cell is None else self.layout.replica(cell)


class _Summing(_Leaving):
    """The same for a DTensor that is Partial, so that values add up."""

    summing: ClassVar[bool] = True


@dataclass(frozen=True)
class _Entering(Movement):
    """Shards on a grid to shards of a DTensor."""

    source: Partition
    mesh: Partition
    layout: Layout

    name: ClassVar[str] = "to_dtensor"

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return (self.source, self.mesh)

    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        return group_of([(*self.source.ranks, *self.mesh.ranks)])

    def _givers(self) -> Iterable[int]:
        return self.source.ranks

    def settings(self) -> str:
        return str(self.layout)

    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        if odd := set(self.layout.reductions.values()) - {"sum", "avg", "min", "max"}:
            raise WeftError(
                f"{self.name}: no DTensor is made Partial({min(odd)!r}): use Replicate(), or "
                "Partial() of sum, avg, min or max"
            )
        _ascending(self.name, self.mesh, self.layout)
        lengths = self.lengths(shapes)
        extents = tuple(map(sum, lengths))
        self.layout.check(self.name, extents)
        want = Side(
            {
                rank: self.layout.local_shape(extents, cell)
                for rank, cell in self.mesh.cells.items()
            },
            tuple(
                Piece(rank, box, at)
                for rank, cell in sorted(self.mesh.cells.items())
                if self.layout.carries(cell)
                for box, at in self.layout.pieces(extents, cell)
            ),
        )
        return between(shards(self.source.cells, lengths, range(self.source.dim)), want)

    def lengths(self, shapes: Mapping[int, Shape]) -> list[Shape]:
        """How the grid cuts the tensor."""
        ndim = len(next(iter(shapes.values())))
        dims = [dim for dim, extent in enumerate(self.source.shape) if extent > 1 or dim < ndim]
        return fitting(self.name, self.source.cells, shapes, dims)


def from_dtensor(x: DTensor, partition: Partition, *, lengths: Lengths = None) -> Tensor:
    """This rank's shard, on a grid, of the tensor that a DTensor is; differentiable.

    Collective among the ranks of the mesh and of the grid, which may be the same, some, or others.
    What a rank holds already stays there: a replicated DTensor costs no traffic but the opening.
    The gradient is a DTensor of the same mesh and placements, Replicate where `x` is Partial.

    Args:
        x: any dense DTensor: Shard, also several times along one dimension, in any order;
            Replicate; Partial of sum or avg. Every rank that takes part passes one; in PyTorch,
            ranks outside of the mesh have one without elements. Its mesh counts the ranks of
            torch's default group, which must be weft's, too, or contain the grid's group.
        partition: the grid that is to cut the tensor.
        lengths: for each dimension the lengths of the grid's parts; None: balanced. (10 over 4
            ranks is 3, 3, 3, 1 in PyTorch and 3, 3, 2, 2 here: `lengths=[(3, 3, 3, 1)]` keeps it.)

    Returns:
        The shard, in new memory; a tensor without elements on ranks that are not in the grid.

    Raises:
        WeftError: not a DTensor; made of other shards than its placements say; Partial of another
            reduction; lengths that do not fit: the same on every rank that takes part.
        WireError: a peer or a link failed.

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

    _not_compiled("from_dtensor")
    wire = partition.wire
    if not isinstance(x, DTensor):
        if isinstance(x, Tensor) and not x.numel() and not partition.active:
            return x.clone()  # of no mesh and no grid
        fault = f"from_dtensor takes a DTensor, not a {type(x).__name__}"
        if not partition.active:
            raise WeftError(f"rank {wire.rank}: {fault}")
        nothing = _Leaving(partition, Layout.replicated(partition.shape), (), partition)
        lost = Call(nothing, wire, nothing.groups[wire.rank], fault=fault)
        lost.opened(torch.empty(0))  # where all raise
        raise AssertionError("a fault was stated and not heard")
    layout = Layout.of(x.device_mesh, x.placements, x.ndim, _order(x))
    mesh = _grid(x.device_mesh, partition)
    kind = _Summing if layout.reductions else _Leaving
    movement = kind(mesh, layout, tuple(x.shape), partition, given(lengths))
    local = _local(x)
    ranks = movement.groups.get(wire.rank)
    if ranks is None:
        return local.detach().clone()
    call: Call = Call(movement, wire, ranks).opened(local)
    assert call.opening is not None
    averages = any(how == "avg" for how in layout.reductions.values())
    if averages and not (call.opening.dtype.is_floating_point or call.opening.dtype.is_complex):
        raise WeftError(f"from_dtensor: {call.opening.dtype} has no average: use Partial('sum')")
    y: Tensor = _Leave.apply(x, _anchor(call, x), call)  # type: ignore[no-untyped-call]  # torch's
    return y


def to_dtensor(
    x: Tensor, partition: Partition, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor | Tensor:
    """The DTensor of a tensor that is cut along a grid; differentiable.

    Collective among the ranks of the grid and of the mesh, which may be the same, some, or others.
    Gradients may come with any placements.

    Args:
        x: this rank's shard, of any lengths that fit together; without elements on ranks that are
            not in the grid.
        partition: the grid that cuts the tensor.
        mesh: of the ranks that are to hold the DTensor.
        placements: one for each dimension of the mesh. Where it is Partial, the first rank holds
            the values and the others zeros, or, for avg, min and max, all hold them.

    Returns:
        The DTensor, contiguous; without elements on ranks of the grid that are not in the mesh.
        Ranks that are in neither get a plain tensor without elements, and wait for nobody.

    Raises:
        WeftError: shards do not fit together; placements of dimensions that there are not, or of
            another reduction: the same on every rank that takes part.
        WireError: a peer or a link failed.

    Example:
        >>> import torch, weft
        >>> from torch.distributed.tensor import Replicate
        >>> with weft.init():  # alone: a group of one
        ...     grid = weft.Partition(1)
        ...     weft.nn.to_dtensor(torch.arange(3), grid, grid.to_mesh(), [Replicate()]).to_local()
        tensor([0, 1, 2])
    """
    _not_compiled("to_dtensor")
    wire = partition.wire
    movement = _Entering(partition, _grid(mesh, partition), Layout.of(mesh, placements))
    ranks = movement.groups.get(wire.rank)
    if ranks is None:
        if not isinstance(x, Tensor) or x.numel():
            raise WeftError(
                f"rank {wire.rank}: to_dtensor does not concern this rank, which must pass a "
                "tensor without elements, such as weft.nn.zero_volume_tensor()"
            )
        return x.clone()
    call = Call(movement, wire, ranks).opened(x)
    anchor = _anchor(call, x)
    y: DTensor = _Enter.apply(x, anchor, call, mesh, placements)  # type: ignore[no-untyped-call]  # torch's
    return y


class _Leave(torch.autograd.Function):
    """A DTensor to a shard. Its derivative is the way back."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, anchor: Tensor | None, call: Call) -> Tensor:
        movement = call.movement
        assert isinstance(movement, _Leaving)
        ctx.partition, ctx.mesh = movement.target, x.device_mesh
        ctx.placements = _of_gradients(x.placements)
        y = call.run(_local(x))
        for dim, how in movement.layout.reductions.items():
            if how == "avg":
                y = y / movement.mesh.shape[dim]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor | Tensor, None, None]:
        return to_dtensor(grad, ctx.partition, ctx.mesh, ctx.placements), None, None


class _Enter(torch.autograd.Function):
    """A shard to a DTensor. Its derivative is the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        call: Call,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
    ) -> DTensor:
        from torch.distributed.tensor import DTensor

        movement, plan, opening = call.movement, call.plan, call.opening
        assert isinstance(movement, _Entering) and plan is not None and opening is not None
        shapes = {rank: opening.said[rank].shape for rank in movement.source.ranks}
        ctx.lengths = movement.lengths(shapes)
        ctx.partition, ctx.x = movement.source, (tuple(x.shape), x.dtype, x.device)
        shape = torch.Size(map(sum, ctx.lengths))
        stride = torch.empty(shape, device="meta").stride()
        placed = _positive(placements, len(shape))
        y: DTensor = DTensor.from_local(
            call.run(x), mesh, placed, run_check=False, shape=shape, stride=stride
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None, None, None]:
        shape, dtype, device = ctx.x
        back = from_dtensor(grad, ctx.partition, lengths=ctx.lengths)
        return back.reshape(shape).to(device, dtype), None, None, None, None


def _anchor(call: Call, x: Tensor) -> Tensor | None:
    """What makes the result require a gradient where others need one, so that all take part."""
    assert call.opening is not None
    needed = call.opening.needs and not x.requires_grad
    return torch.zeros((), device="cpu", requires_grad=True) if needed else None


def _local(x: DTensor) -> Tensor:
    """What this rank holds, arrived, and requiring a gradient if the whole does."""
    with torch.no_grad():
        local: Any = x.to_local()
    arrived: Tensor = local.trigger_wait() if hasattr(local, "trigger_wait") else local
    return arrived.detach().requires_grad_(x.requires_grad)


def _order(x: DTensor) -> Sequence[Any] | None:
    """In which order the mesh dimensions cut, if PyTorch keeps one besides the placements."""
    return getattr(x._spec, "shard_order", None)


def _grid(mesh: DeviceMesh, partition: Partition) -> Partition:
    """A mesh as a grid, as the group of a partition counts its ranks."""
    from ..wire import process_group

    ranks = process_group.ranks_in(partition.group, mesh.mesh.flatten().tolist())
    return Partition(tuple(mesh.mesh.shape), ranks=ranks, group=partition.group)


def _positive(placements: Sequence[Placement], ndim: int) -> list[Placement]:
    """With dimensions that count from the first, which PyTorch only does where there is data."""
    found: list[Any] = list(placements)
    for number, each in enumerate(found):
        if getattr(each, "dim", 0) < 0:
            factor = getattr(each, "split_factor", None)
            more = {} if factor is None else {"split_factor": factor}
            found[number] = type(each)(each.dim + ndim, **more)
    return found


def _of_gradients(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Those of a gradient: every rank's addend has the gradient of the sum."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if each.is_partial() else each for each in placements)


def _ascending(name: str, mesh: Partition, layout: Layout) -> None:
    """See that PyTorch knows who holds which shard.

    Raises:
        WeftError: it finds shapes by the order in the mesh, and moves data by that of the ranks.
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


def _not_compiled(name: str) -> None:
    if torch.compiler.is_compiling():
        raise WeftError(f"{name} is not compiled: call it outside of torch.compile")
