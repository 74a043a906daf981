"""To and from DTensors of `torch.distributed`: by their own `redistribute`, and Repartition.

A DTensor says by its mesh and placements which rank has which part. Where all placements are Shard
it is a tensor that is cut along a grid (`_grid`), by `torch.chunk`: parts of ceil(n / p) elements,
the last ones shorter or empty; each mesh dimension cuts what the ones before it left. Repartition
moves it between that grid and the caller's. What is replicated or partial PyTorch itself cuts
first, and restores last.

As a conversion opens, all ranks learn which shapes all really have. So a DTensor that was made of
other shards is an error on every rank; PyTorch 2.13 computes wrong values with it. A mesh whose
ranks do not ascend is an error, too: there PyTorch moves data in the order of the ranks, and
computes shapes in the order of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base._torch import shard_order
from ..base.arguments import is_a
from ..base.errors import WeftError, entry
from ..base.tensors import Shape
from ..call.attempt import preparing
from ..call.handshake import Operand, among, handshake
from .autograd import outside
from .executor import has_addition
from .partition import Partition
from .repartition import Repartition
from .spec import Lengths, fitting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement, Shard


@entry
def from_dtensor(x: DTensor, partition: Partition, *, lengths: Lengths = None) -> Tensor:
    """Convert a DTensor to this rank's shard on a grid. Differentiable.

    Collective among the ranks of the mesh, which has all ranks of the grid. The gradient is a
    DTensor with the same mesh and placements, but Replicate where `x` is Partial.

    Args:
        x: a dense DTensor of at least one dimension, with the placements Shard (also several along
            one dimension), Replicate, and Partial of sum or avg. Every rank of the mesh passes it.
            The mesh has ranks of torch's default group. The grid's group is that group, too, or a
            part of it that has all ranks of the mesh.
        partition: the grid that cuts the result.
        lengths: for each dimension the lengths of the grid's parts; None: balanced ones. (PyTorch
            cuts 10 over 4 ranks into 3, 3, 3, 1, weft into 3, 3, 2, 2. `lengths=[(3, 3, 3, 1)]`
            keeps PyTorch's cut.)

    Returns:
        The shard, a new tensor; a tensor without elements on ranks that are not in the grid.

    Raises:
        WeftError: `x` is no DTensor, has other shards than its placements say, or placements that
            are not named above; or `lengths` do not fit; the same text on every rank of the mesh.
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

    name = "from_dtensor"
    is_dtensor = isinstance(x, DTensor)
    ranks = _taking_part(partition, x.device_mesh if is_dtensor else None)
    if partition.rank not in ranks:
        return x.to_local().detach().clone() if is_dtensor else outside(name, partition.group, x)
    with preparing(among(partition.group, ranks), name):
        if not is_dtensor:
            raise WeftError(f"from_dtensor takes a DTensor, not a {type(x).__name__}")
        _check(name, partition, x.device_mesh, x.placements, reductions=("sum", "avg"))
        _check_shards(name, partition, x)
        shards = _shards(x.placements, x.shape)
        source, _ = _grid(partition, x.device_mesh, shards, x.ndim)
        layer = Repartition(source, partition, lengths=lengths)
    needs = torch.is_grad_enabled() and x.requires_grad  # redistribute is a call in backward, too
    _opened(name, partition, ranks, x, {"arguments": _text(x), "gradient": needs})
    y: Tensor = layer(x.redistribute(placements=shards).to_local())
    return y


@entry
def to_dtensor(
    x: Tensor, partition: Partition, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor | Tensor:
    """Convert a tensor that is cut along a grid to a DTensor. Differentiable.

    Collective among the ranks of the mesh, which has all ranks of the grid.

    Args:
        x: this rank's shard, of any lengths that fit together; on ranks that are not in the grid a
            tensor without elements.
        partition: the grid that cuts `x`.
        mesh: the mesh of the DTensor.
        placements: one for each dimension of the mesh: Shard or Replicate.

    Returns:
        The DTensor. Ranks that are not in the mesh get a plain tensor without elements, and wait
        for nobody.

    Raises:
        WeftError: the shards do not fit together; there is not one placement for each dimension of
            the mesh, or one is of a dimension that does not exist, or of another kind; the same
            text on every rank of the mesh.
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
    from torch.distributed.tensor import DTensor  # here: it takes a while

    name = "to_dtensor"
    ranks = _taking_part(partition, mesh)
    if partition.rank not in ranks:
        return outside(name, partition.group, x)
    with preparing(among(partition.group, ranks), name):
        _check(name, partition, mesh, placements, reductions=())
        text = _placed(mesh, placements)
        if not is_a(x, Tensor):
            raise WeftError(f"{name} takes a tensor, not a {type(x).__name__}")
    shapes = _opened(name, partition, ranks, x, {"arguments": text})
    shapes = {rank: shapes[rank] for rank in partition.ranks}
    lengths = fitting(name, partition.cells, shapes, range(partition.dim))
    extents = tuple(map(sum, lengths))
    shards = _shards(placements, extents)
    if not extents or not all(-len(extents) <= each.dim < len(extents) for each in shards):
        raise WeftError(f"{name}: {text}, of a tensor of {len(extents)} dimensions, {extents}")
    target, counts = _grid(partition, mesh, shards, len(extents))
    y = Repartition(partition, target, lengths=_chunks(extents, counts))(x)
    found: DTensor = DTensor.from_local(
        y,
        mesh,
        shards,
        run_check=False,
        shape=torch.Size(extents),
        stride=torch.empty(extents, device="meta").stride(),
    )
    return found.redistribute(placements=placements)


def _taking_part(partition: Partition, mesh: object) -> tuple[int, ...]:
    """The ranks of a conversion, ascending: those of the mesh, and of the grid.

    A rank that has no mesh to know them by tells those of the grid what is wrong with its call.
    """
    try:
        found = _ranks(mesh, partition)
    except WeftError:
        found = []
    return tuple(sorted({*partition.ranks, *found}))


def _ranks(mesh: object, partition: Partition) -> list[int]:
    """The ranks of a mesh, in its order, as the group of a partition counts.

    Raises:
        WeftError: it is no mesh, or has ranks that are not in that group.
    """
    from torch.distributed.device_mesh import DeviceMesh

    from .mesh import ranks_in

    if not isinstance(mesh, DeviceMesh):
        raise WeftError(f"a {type(mesh).__name__} is no DeviceMesh: pass one")
    return ranks_in(partition.group_handle, mesh.mesh.flatten().tolist())


def _check(
    name: str,
    partition: Partition,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    reductions: Collection[str],
) -> None:
    """Check a mesh and placements, of which PyTorch or a conversion would make other values.

    Args:
        reductions: of the Partial placements that there may be.

    Raises:
        WeftError: there is something wrong with them.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if outside := set(partition.ranks).difference(_ranks(mesh, partition)):
        raise WeftError(
            f"{name}: ranks {sorted(outside)} of the grid are not in the mesh: convert on a grid "
            "of the mesh's ranks, and move the shards by weft.nn.Repartition"
        )
    for dim in range(mesh.ndim):
        if not (mesh.mesh.diff(dim=dim) > 0).all():
            raise WeftError(
                f"{name}: the ranks of the mesh {mesh.mesh.tolist()} do not ascend in dimension "
                f"{dim}; PyTorch mixes up the shards of such meshes: use one whose ranks ascend"
            )
    if len(placements) != mesh.ndim:
        raise WeftError(
            f"{len(placements)} placements for a mesh of {mesh.ndim} dimensions, "
            f"{tuple(mesh.mesh.shape)}: pass one for each"
        )
    for each in placements:
        is_reduced = type(each) is Partial and each.reduce_op in reductions
        if type(each) not in (Shard, Replicate) and not is_reduced:  # nor is a strided one a Shard
            raise WeftError(
                f"{name} does not take {each!r} of placements {[*placements]}: redistribute() to "
                "Shard or Replicate"
            )


def _check_shards(name: str, partition: Partition, x: DTensor) -> None:
    """Check that a DTensor has what PyTorch itself would have cut, and can cut and reduce.

    Raises:
        WeftError: it has not.
    """
    order = shard_order(x) or ()
    if any(list(dims) != sorted(dims) for _, dims in order):
        raise WeftError(
            f"{name}: this DTensor is cut along the mesh dimensions in the order {order}: "
            "redistribute() to shards that are cut from left to right first"
        )
    if not x.ndim:
        raise WeftError(f"{name}: a number has no dimension to cut: pass x.full_tensor()")
    if any(each.is_partial() for each in x.placements) and not has_addition(x.dtype):
        raise WeftError(f"{name}: {x.dtype} has no addition in torch: pass another dtype")
    grid, counts = _grid(partition, x.device_mesh, x.placements, x.ndim)
    cut = zip(_chunks(x.shape, counts), grid.cells[partition.rank], strict=False)
    expected = tuple(parts[at] for parts, at in cut)
    held = tuple(x.to_local().shape)
    if held != expected:
        raise WeftError(
            f"{name}: this rank holds {held} of {_text(x)}, by which it should hold {expected}: "
            "this DTensor was made of other shards than PyTorch cuts, so pass the local tensors to "
            "weft.nn layers as they are, without a DTensor"
        )


def _shards(placements: Sequence[Any], shape: Shape) -> list[Shard]:
    """Placements as shards: what is replicated or partial is cut along the longest dimension that
    no later mesh dimension cuts, since PyTorch does that without moving what is replicated."""
    from torch.distributed.tensor import Shard

    ndim = len(shape)
    found: list[Shard] = []
    later: set[int] = set()
    for each in reversed(placements):
        if each.is_shard():
            dim = each.dim + ndim * (each.dim < 0)
        else:
            dim = max(set(range(ndim)) - later, key=shape.__getitem__, default=0)
        found.append(Shard(dim))
        later.add(dim)
    return found[::-1]


def _grid(
    partition: Partition, mesh: DeviceMesh, placements: Sequence[Any], ndim: int
) -> tuple[Partition, list[Shape]]:
    """A mesh as a grid that cuts a tensor's dimensions along the mesh dimensions that shard them.

    Returns:
        The grid, whose further dimensions are those of the mesh that cut nothing; and for each
        dimension of the tensor the extents of the mesh that cut it, one after the other.
    """
    cuts = [each.dim % ndim if each.is_shard() else ndim for each in placements]
    along = sorted(range(mesh.ndim), key=cuts.__getitem__)
    counts = [
        tuple(mesh.size(each) for each in along if cuts[each] == dim) for dim in range(ndim + 1)
    ]
    found = torch.tensor(_ranks(mesh, partition)).view(mesh.mesh.shape).permute(along)
    return partition.like(tuple(map(math.prod, counts)), found.flatten().tolist()), counts[:ndim]


def _chunks(shape: Shape, counts: Iterable[Shape]) -> list[Shape]:
    """The lengths of the parts of each dimension, cut so many times one after the other."""
    found = []
    for extent, each in zip(shape, counts, strict=True):
        lengths = [extent]
        for count in each:
            lengths = [part for length in lengths for part in _chunk(length, count)]
        found.append(tuple(lengths))
    return found


def _chunk(length: int, count: int) -> list[int]:
    """The lengths of the parts into which `torch.chunk` cuts; the last ones may be empty."""
    size = -(-length // count)
    return [max(0, min(size, length - at * size)) for at in range(count)]


def _text(x: DTensor) -> str:
    return f"a DTensor of shape {tuple(x.shape)} with {_placed(x.device_mesh, x.placements)}"


def _placed(mesh: DeviceMesh, placements: Sequence[Placement]) -> str:
    return f"placements {[*placements]} on a mesh of {tuple(mesh.mesh.shape)}"


def _opened(
    name: str, partition: Partition, ranks: tuple[int, ...], x: Tensor, fields: Mapping[str, object]
) -> dict[int, Shape]:
    """The shapes of all ranks' tensors, if the fields are the same on all of them. Collective."""
    group = partition.group
    records = torch.is_grad_enabled()
    statement = Operand(tuple(x.shape), records and x.requires_grad, records)
    dtype = x.dtype if x.numel() else None
    told = {"partition": partition.brief, "dtype": dtype, **fields}

    def job() -> dict[int, Shape]:
        heard = handshake(group, ranks, name, told, None, statement)
        return {rank: each.shape for rank, each in heard.operands.items()}

    return group.worker.call(name, job)
