"""To and from DTensors of `torch.distributed` that are cut: Repartition moves the shards.

A DTensor says by its mesh and placements which rank has which part. Where all placements are Shard
it is a tensor that is cut along a grid, by `torch.chunk`: parts of ceil(n / p) elements, the last
ones shorter or empty; each mesh dimension cuts what the ones before it left. Repartition moves it
between that grid and the caller's. What has other placements its owner redistributes.

Some DTensors are errors on every rank, because values would be wrong: those that were made of other
shards than PyTorch would cut, those that are cut in another order of the mesh dimensions than from
left to right, those whose placements are strided, and those on a mesh whose ranks do not ascend:
there PyTorch moves data in the order of the ranks, and computes shapes in the order of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..base._torch import shard_order
from ..base.arguments import is_a
from ..base.errors import WeftError, entry
from ..base.tensors import Shape
from ..call.attempt import preparing
from ..call.opening import opened
from ..comm.staging import packed, unpacked
from .autograd import applied, outside
from .executor import among
from .mesh import as_dtensor, ranks_in
from .partition import Partition
from .repartition import Repartition, RepartitionSpec
from .spec import Lengths, checked_lengths, fitting

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@entry
def from_dtensor(x: DTensor, partition: Partition, *, lengths: Lengths = None) -> Tensor:
    """Convert a DTensor to this rank's shard on a grid. Differentiable.

    Collective among the ranks of the grid, which are those of the mesh; other ranks wait for
    nobody. The gradient is a DTensor with the same mesh and placements.

    Args:
        x: a dense DTensor whose placements are Shard, also several along one dimension. Its mesh
            has ranks of torch's default group. On ranks that are not in the grid: a tensor without
            elements.
        partition: the grid that cuts the result. Its group is torch's default one, or a part of it.
        lengths: for each dimension the lengths of the grid's parts; None: balanced ones. (PyTorch
            cuts 10 over 4 ranks into 3, 3, 3, 1, weft into 3, 3, 2, 2. `lengths=[(3, 3, 3, 1)]`
            keeps PyTorch's cut.)

    Returns:
        The shard, a new tensor; a tensor without elements on ranks that are not in the grid.

    Raises:
        WeftError: `x` is no DTensor, has other shards than its placements say, or cut in another
            order, other placements than Shard, or a mesh of other ranks, or of ranks that do not
            ascend; or `lengths` do not fit; the same text on every rank of the grid. A rank outside
            of it raises for itself.
        WireError: a peer or a link failed; names the culprit. The group is lost.

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

    name = "from_dtensor"
    if not partition.active:
        return _outside(name, partition, x, getattr(x, "device_mesh", None))
    with preparing(among(partition.group, tuple(sorted(partition.ranks))), name):
        if not isinstance(x, DTensor):
            raise WeftError(f"{name} takes a DTensor, not a {type(x).__name__}")
        order = shard_order(x)
        if any(list(dims) != sorted(dims) for _, dims in order):
            raise WeftError(
                f"{name}: this DTensor is cut along the mesh dimensions in the order {order}: "
                "redistribute() to Replicate, and then to shards"
            )
        shape = tuple(x.shape)
        cells = _cells(name, partition, x.device_mesh)
        text = f"a DTensor of shape {shape} with {_text(cells, x.placements)}"
        grid, parts = _layout(name, partition, cells, x.placements, shape)
        places = zip(parts, grid.cells[partition.rank], strict=True)
        expected = tuple(each[at] for each, at in places)
        held = tuple(x.to_local().shape)
        if held != expected:
            raise WeftError(
                f"{name}: this rank holds {held} of {text}, by which it should hold {expected}: "
                "this DTensor was made of other shards than PyTorch cuts, so pass the local "
                "tensors to weft.nn layers as they are, without a DTensor"
            )
        spec = FromDTensor(grid, partition, checked_lengths(lengths), text)
    return applied(spec, x.to_local())


@entry
def to_dtensor(
    x: Tensor, partition: Partition, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor | Tensor:
    """Convert a tensor that is cut along a grid to a DTensor. Differentiable.

    Collective among the ranks of the grid, which are those of the mesh; other ranks wait for
    nobody.

    Args:
        x: this rank's shard, of any lengths that fit together; on ranks that are not in the grid a
            tensor without elements.
        partition: the grid that cuts `x`.
        mesh: the mesh of the DTensor.
        placements: a Shard for each dimension of the mesh.

    Returns:
        The DTensor; a plain tensor without elements on ranks that are not in the grid.

    Raises:
        WeftError: the shards do not fit together; there is not one placement for each dimension of
            the mesh, or one is of a dimension that does not exist, or no Shard; or the mesh has
            other ranks, or some that do not ascend; the same text on every rank of the grid. A rank
            outside of it raises for itself.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from torch.distributed.tensor import Shard
        >>> with weft.init():  # alone: a group of one
        ...     grid = weft.Partition(1)
        ...     weft.nn.to_dtensor(torch.arange(3), grid, grid.to_mesh(), [Shard(0)]).to_local()
        tensor([0, 1, 2])
    """
    name = "to_dtensor"
    group = partition.group
    if not partition.active:
        return _outside(name, partition, x, mesh)
    ranks = tuple(sorted(partition.ranks))
    taking_part = among(group, ranks)
    with preparing(taking_part, name):
        if not is_a(x, Tensor):
            raise WeftError(f"{name} takes a tensor, not a {type(x).__name__}")
        if not isinstance(placements, Sequence):
            raise WeftError(
                f"{name}: placements is {placements!r}: pass a list with a Shard for each "
                "dimension of the mesh"
            )
        operand = packed(x, -1)
        cells = _cells(name, partition, mesh)
        text = _text(cells, placements)
    fields = {"partition": partition.brief, "arguments": text, "dtype": None}

    def job() -> dict[int, Shape]:
        opening = opened(taking_part, name, fields, operand)
        operands = opening.read(unpacked, x.dtype)
        return {rank: shape for rank, (shape, _) in zip(ranks, operands, strict=True)}

    # from here on every rank knows the same, or all raise
    shapes = group.worker.call(name, job)
    shape = tuple(map(sum, fitting(name, partition.cells, shapes, range(partition.dim))))
    grid, lengths = _layout(name, partition, cells, placements, shape)
    y = Repartition(partition, grid, lengths=lengths)(x)
    return as_dtensor(y, mesh, placements, shape)


@dataclass(frozen=True)
class FromDTensor(RepartitionSpec):
    """Repartition from PyTorch's cut; the ranks compare what each believes to be cut."""

    x: str = ""

    name = "from_dtensor"


def _layout(
    name: str,
    partition: Partition,
    cells: Partition,
    placements: Sequence[Placement],
    shape: Shape,
) -> tuple[Partition, list[Shape]]:
    """How PyTorch cuts a tensor of that shape along a mesh of the ranks of a partition.

    Args:
        name: of the conversion, for errors.
        partition: the grid to or from which it goes.
        cells: the mesh.
        placements: on the mesh.
        shape: of the whole tensor.

    Returns:
        The ranks of the mesh, as a grid that cuts each dimension of the tensor; and the lengths of
        the parts of each dimension.

    Raises:
        WeftError: there is a mesh or a placement of which PyTorch, or the conversion, would make
            other values.
    """
    from torch.distributed.tensor import Shard

    text = _text(cells, placements)
    ranks = np.reshape(cells.ranks, cells.shape)
    for dim in range(ranks.ndim):
        if not (np.diff(ranks, axis=dim) > 0).all():
            raise WeftError(
                f"{name}: {text}, whose ranks do not ascend in dimension {dim}; PyTorch mixes up "
                "the shards of such meshes: use one whose ranks ascend"
            )
    ndim = len(shape)
    shards = [each for each in placements if type(each) is Shard]  # a strided one is another type
    dims = [each.dim % ndim for each in shards if -ndim <= each.dim < ndim]
    if not len(dims) == len(placements) == ranks.ndim:
        raise WeftError(
            f"{name}: {text}, of a tensor of shape {shape}: it takes a Shard of one of these "
            "dimensions for each of the mesh: redistribute() what has other placements"
        )
    lengths: list[Shape] = [(extent,) for extent in shape]
    for dim, count in zip(dims, ranks.shape, strict=True):
        lengths[dim] = tuple(part for each in lengths[dim] for part in _chunks(each, count))
    order = sorted(range(ranks.ndim), key=dims.__getitem__)
    grid = partition.like(tuple(map(len, lengths)), ranks.transpose(order).flatten().tolist())
    return grid, lengths


def _outside(name: str, partition: Partition, x: Tensor, mesh: object) -> Tensor:
    """What a rank gets that is not in the grid. Nothing is sent.

    Args:
        mesh: what it passes as one, which may be none here.

    Raises:
        WeftError: the mesh has other ranks than the grid, or `x` has elements; on this rank alone.
    """
    group = partition.group
    with preparing(among(group, (group.rank,)), name):
        if isinstance(mesh, DeviceMesh):
            _cells(name, partition, mesh)
    return outside(name, group, x)


def _cells(name: str, partition: Partition, mesh: DeviceMesh) -> Partition:
    """A mesh as a grid of its ranks, as the group of a partition counts them.

    Raises:
        WeftError: it is no mesh, or has other ranks than the partition.
    """
    if not isinstance(mesh, DeviceMesh):
        raise WeftError(f"{name}: a {type(mesh).__name__} is no DeviceMesh: pass one")
    shape = tuple(mesh.mesh.shape)
    numbers = mesh.mesh.flatten().tolist()  # as torch's default group counts
    ranks = ranks_in(partition.group_handle, numbers)
    places = zip(numbers, ranks, strict=True)
    strange = [number for number, rank in places if rank not in partition.cells]
    if strange or len(ranks) < partition.size:
        which = f" (rank {strange[0]} of torch's default group is not in it)" if strange else ""
        raise WeftError(
            f"{name}: a mesh of {partition.like(shape, numbers).brief}, which has not the ranks of "
            f"the grid, {partition.brief}{which}: convert on a grid of the mesh's ranks, and move "
            "the shards by weft.nn.Repartition"
        )
    return partition.like(shape, ranks)


def _chunks(length: int, count: int) -> list[int]:
    """The lengths of the parts into which `torch.chunk` cuts; the last ones may be empty."""
    size = -(-length // count)
    return [max(0, min(size, length - at * size)) for at in range(count)]


def _text(cells: Partition, placements: Sequence[Placement]) -> str:
    return f"placements {[*placements]} on a mesh of {cells.brief}"
