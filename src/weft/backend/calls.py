"""The calls of the backend that are weft's, on CPU tensors: each gives what runs in its turn.

Each begins with an opening, in which every rank learns what every other rank was asked for. So
wrong or differing arguments raise the same WeftError on all ranks, and the next call works. What is
small goes along with it. Reductions add in rank order, so all ranks have the same bits.

A tensor is read and written in the memory that it has when the call is made. As with gloo, what is
reduced in place may be an activation that a backward reads; of outputs autograd learns that they
were overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base import _torch
from ..base.errors import WeftError
from ..base.tensors import (
    flattened,
    has_elements,
    lacking,
    mark_overwritten,
    overlapping,
    plain,
    shares_elements,
    write,
)
from ..call.mode import PLAIN
from ..comm.all_reduce import Reduction
from ..comm.gradients import index_outside
from ..comm.named import wrong_gradient
from ..comm.uneven import Gathering, Scattering
from ..group.group import Group
from ..kernels.ops import OPS
from ..schedules import dense
from ..sparse.api import job_of

Job = Callable[[], list[Tensor]]
"""What runs in the turn of a call: the tensors that it has written."""


def all_reduce(group: Group, tensor: Tensor, op: str) -> Job:
    """Reduce a tensor over all ranks, in place.

    Raises:
        WeftError: what is wrong with this rank's arguments.
    """
    own = _elements(tensor)
    fields = _compared([own], op)

    def job() -> list[Tensor]:
        place = flattened(plain(own))
        Reduction(group, "all_reduce", fields, op=op).reduce(place)
        _put(place, own)
        return [tensor]

    return job


def sparse_all_reduce(group: Group, tensor: Tensor, op: str) -> Job:
    """Reduce a sparse tensor over all ranks, in place: it becomes the coalesced result."""
    reduction, _ = job_of(group, _combined(group, _as_given(tensor), op), op, "auto", None)

    def job() -> list[Tensor]:
        result = reduction()
        with torch.inference_mode(tensor.is_inference()):  # in which it was made
            tensor.data = result  # the caller's tensor now has the memory of the result
        mark_overwritten([tensor])
        return [tensor]

    return job


def all_gather_single(group: Group, out: Tensor, mine: Tensor) -> Job:
    """Send every rank's tensor to all; in `out` the ranks' follow one another.

    Raises:
        WeftError: what is wrong with this rank's arguments.
    """
    whole, given = _elements(out), _elements(mine)
    _check_sizes(group, whole, given)
    fields = _compared([given, whole])

    def job() -> list[Tensor]:
        place = flattened(whole) if whole.is_contiguous() else whole.new_empty(whole.numel())
        parts = place.tensor_split(group.size)
        own = flattened(plain(given))
        is_there = own.data_ptr() == parts[group.rank].data_ptr()
        if not is_there and overlapping(own, place):
            own = own.clone()  # parts of others would be written before it is sent
        counts = [own.numel()] * group.size
        Gathering(group, "all_gather_single", fields, sizes=counts).fill(place, own)
        _put(place, whole)
        mark_overwritten([out])
        return [out]

    return job


def reduce_scatter_single(group: Group, out: Tensor, mine: Tensor, op: str) -> Job:
    """Reduce the ranks' tensors, of which each rank gets an equal part, in their order.

    Raises:
        WeftError: what is wrong with this rank's arguments.
    """
    place, whole = _elements(out), _elements(mine)
    _check_sizes(group, whole, place)
    fields = _compared([place, whole], op)

    def job() -> list[Tensor]:
        counts = [place.numel()] * group.size
        scattering = Scattering(group, "reduce_scatter_single", fields, sizes=counts, op=op)
        (result,), _ = scattering.run([flattened(plain(whole))], PLAIN)
        write(place, result.view(place.shape))
        mark_overwritten([out])
        return [out]

    return job


def _elements(tensor: Tensor) -> Tensor:
    """A tensor's elements, in the memory that it has now.

    They are written without autograd's knowledge: `detach()` would share the version of the tensor,
    which then could not be written where a backward is to read it.

    Raises:
        WeftError: there are none to read or write.
    """
    own = _torch.waited(tensor)
    if not has_elements(own):
        raise WeftError(f"a tensor is {lacking(own)}: pass tensors with elements in memory")
    if own.device.type != "cpu":
        raise WeftError(f"a tensor is on {own.device}: this backend moves CPU tensors, so copy it")
    if shares_elements(own):
        raise WeftError(
            "elements of a tensor share memory, as expand() has them: pass a contiguous one"
        )
    return own.data


def _check_sizes(group: Group, whole: Tensor, part: Tensor) -> None:
    """Check that a tensor has room for one part of each rank.

    Raises:
        WeftError: it has more elements, or fewer.
    """
    total = group.size * part.numel()
    if whole.numel() != total:
        raise WeftError(
            f"tensors of {whole.numel()} and of {part.numel()} elements were given: for the parts "
            f"of {group.size} ranks the first must have {total}"
        )


def _compared(tensors: Sequence[Tensor], op: str | None = None) -> dict[str, object]:
    """What ranks compare of a call: the reduction, and the dtype and sizes of the tensors.

    Raises:
        WeftError: they have several dtypes, or one that cannot be reduced so.
    """
    dtypes = {str(tensor.dtype) for tensor in tensors}
    if len(dtypes) > 1:
        raise WeftError(f"tensors of {' and '.join(sorted(dtypes))} were given: pass one dtype")
    if op is not None and (error := dense.refuses(op, tensors[0].dtype)):
        raise WeftError(error)
    return {"op": op, "dtype": tensors[0].dtype, "sizes": [each.numel() for each in tensors]}


def _put(place: Tensor, own: Tensor) -> None:
    """Copy what was received to where a caller has it, unless that is the same memory."""
    if place.data_ptr() != own.data_ptr():
        write(own, place.view(own.shape))


def _as_given(tensor: Tensor) -> Tensor:
    """The tensor that `torch.distributed.all_reduce` was given.

    In place of a complex one it hands over a view in real numbers. That of a sparse tensor gets
    indices and values of its own in the end, so the caller's would stay as it was.
    """
    viewed = tensor._base
    return viewed if viewed is not None and viewed.is_complex() else tensor


def _combined(group: Group, tensor: Tensor, op: str) -> Tensor:
    """A sparse tensor whose entries may be reduced one by one.

    Entries of one index are its summands, which only a sum may take so. A tensor in which something
    is wrong stays as it is: the call says so on every rank.
    """
    if op in ("sum", "avg") or op not in OPS or OPS[op].refuses(tensor.dtype):
        return tensor
    if wrong_gradient("a tensor", tensor) or index_outside(group, {"a tensor": tensor}):
        return tensor  # `coalesce` would write out of bounds
    return tensor.coalesce()
