"""The collectives of torch.distributed over a group, on CPU tensors, also of different sizes.

They take any dtype; a reduction must be defined for it. Each begins with an opening, in which every
rank learns what every other rank was asked for. So wrong or differing arguments raise the same
WeftError on all ranks, and the next call works. What is small goes along with it; then messages go
directly from rank to rank, over the wire of the CPU's tensors. Where hosts have several ranks, as
many each, what all need, and what is reduced, crosses a host's link once. Reductions add in rank
order, there those of a host first, so all ranks that get the result have the same bits.

Some take several calls at once, as `torch.distributed._coalescing_manager` makes them: `outs[c]`
and `ins[c]` are those of call c.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import _torch
from ..base.errors import WireError
from ..base.tensors import has_elements, is_made_of_others
from ..call.attempt import confess
from ..comm.all_reduce import reduce_in_place
from ..comm.parameters import ScatterAllGather
from ..comm.staging import are_all_near, most_to_all
from ..group.group import Group
from ..kernels.ops import OPS
from ..sparse.api import job_of
from .aliases import Aliases, aliased, copied_if_mixed
from .exchanges import Parts, exchange, open_and_exchange, open_call
from .reductions import open_and_reduce
from .refusals import (
    first_of,
    misfit,
    misfits,
    no_root,
    reason,
    refuse,
    uneven,
    unlike,
    unsendable,
    unwritable,
)
from .runs import CALLS, open_and_exchange_each, runs
from .sizes import as_text, fields_of
from .tensors import elements, flat_of, overwritten, place_for, put

BY_ROOT = 128 << 10
"""Bytes of a tensor that its root reduces alone. Of 4 hosts at 1 Gbit/s all ranks together took 0.6
times as long for 256 KiB; on one host they take longer for any size."""


@_torch.without_transforms
@_torch.without_modes
def taken(
    collective: Callable[..., list[Tensor]], given: tuple[Any, ...]
) -> tuple[tuple[Any, ...], dict[int, Tensor], str | None]:
    """The arguments of a collective, outputs first, with an alias in place of each tensor.

    An alias keeps its memory where the caller's tensor gets other (`tensor.data = other`).

    Returns:
        The arguments; the tensors, by the ids of their aliases; and what is wrong with one, or
        None.
    """
    if collective is sparse_all_reduce:  # which looks itself
        return given, {}, None
    if error := unsendable(given):
        return given, {}, error
    made: Aliases = {}
    arguments = tuple(aliased(each, made) for each in given)
    if collective is not reduce:  # of which one is written
        error = unwritable(arguments[0])
    return arguments, {id(alias): tensor for alias, tensor in made.values()}, error


def tell_early(group: Group, call: str, trouble: Exception) -> None:
    """Tell all ranks of what was raised here, unless they have met in the call that runs.

    Raises:
        WeftError: as `confess`.
    """
    now = group.worker.now
    if not isinstance(trouble, WireError) and now is not None and not now.has_met:
        confess(group, call, trouble)


def all_reduce(group: Group, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Reduce each tensor over all ranks, in place: what it was before the call."""
    if error := reason(tensors, op):
        return refuse(group, "all_reduce", error)
    flats = copied_if_mixed(tensors, [flat_of(tensor) for tensor in tensors])
    reduce_in_place(group, "all_reduce", {"op": op, **fields_of(tensors)}, flats, op)
    for flat, tensor in zip(flats, tensors, strict=True):
        put(flat, tensor)
    return tensors


def sparse_all_reduce(group: Group, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Reduce sparse tensors over all ranks, each in place: it becomes the coalesced result."""
    given = [_combined(_as_given(tensor), op) for tensor in tensors]
    alone = len(given) == 1  # a list would need one more exchange
    done = job_of(group, given[0] if alone else given, op, "auto", None).run()
    for tensor, result in zip(tensors, [done] if alone else done, strict=True):
        with torch.inference_mode(tensor.is_inference()):  # in which it was made
            tensor.data = result  # the caller's tensor now has the memory of the result
    return overwritten(tensors)


def all_gather(group: Group, outs: list[list[Tensor]], ins: list[Tensor]) -> list[Tensor]:
    """Send every rank's `ins[c]` to every rank, into `outs[c]`.

    The tensors of `outs[c]` may differ in size, but not between ranks.
    """
    error = first_of(
        reason([given, *places]) or misfit("output", places, _own(group, given))
        for places, given in zip(outs, ins, strict=True)
    )
    if error is not None:
        return refuse(group, "all_gather", error)
    _all_gather_each(group, outs, copied_if_mixed(outs, ins))
    return overwritten([*itertools.chain(*outs)])


def all_gather_coalesced(group: Group, outs: list[list[Tensor]], ins: list[Tensor]) -> list[Tensor]:
    """Send every rank's tensors to every rank: `outs[p]` receives those of rank p, in their order.

    Ranks may have tensors of different sizes, and another number of them.
    """
    received = [*itertools.chain(*outs)]
    error = reason([*ins, *received]) or misfits(group, outs, ins)
    shapes = {"tensors": as_text([len(each) for each in outs]), **fields_of(received)}
    open_call(group, "all_gather_coalesced", shapes, error)
    wanted = [*itertools.zip_longest(*outs)]
    for given, places in itertools.zip_longest(copied_if_mixed(wanted, ins), wanted):
        exchange(group, [given] * group.size, places)
    return overwritten(received)


def reduce_scatter(
    group: Group, outs: list[Tensor], ins: list[list[Tensor]], op: str
) -> list[Tensor]:
    """Reduce the ranks' `ins[c][p]` on rank p, into its `outs[c]`.

    The tensors of `ins[c]` may differ in size, but not between ranks.
    """
    error = first_of(
        reason([place, *parts], op) or misfit("input", parts, _own(group, place))
        for place, parts in zip(outs, ins, strict=True)
    )
    if error is not None:
        return refuse(group, "reduce_scatter", error)
    _reduce_scatter_each(group, outs, copied_if_mixed(outs, ins), op)
    return overwritten(outs)


def reduce(group: Group, tensor: Tensor, root: int, op: str) -> list[Tensor]:
    """Reduce a tensor on one rank, in place there; the others' stay as they are."""
    error = no_root(group, root) or reason([tensor], op)
    if group.rank == root:  # the others' tensors are not written
        error = error or unwritable([tensor])
    if error is not None:
        return refuse(group, "reduce", error)
    fields = {"root": root, "op": op, **fields_of([tensor])}
    if tensor.nbytes <= BY_ROOT or len({*group.hosts}) == 1:
        parts = [tensor.new_empty(0)] * group.size
        parts[root] = tensor
        open_and_reduce(group, "reduce", fields, parts[group.rank], parts, op)
        return [tensor]
    # each rank reduces a part, which the root then gets: of P ranks, 2/P of the bytes on its link
    flat, is_root = flat_of(tensor), group.rank == root
    pieces = flat.tensor_split(group.size)
    mine = pieces[group.rank] if is_root else torch.empty_like(pieces[group.rank])
    open_and_reduce(group, "reduce", fields, mine, pieces, op)
    exchange(group, _at(root, mine, group.size), pieces if is_root else [])
    if is_root:
        put(flat, tensor)
    return [tensor]


def broadcast(group: Group, tensor: Tensor, root: int) -> list[Tensor]:
    """Send one rank's tensor to all ranks, in place."""
    error = no_root(group, root) or reason([tensor])
    if error is not None:
        return refuse(group, "broadcast", error)
    fields = {"root": root, **fields_of([tensor])}
    if are_all_near(group) or tensor.nbytes <= most_to_all(group):
        gives = [tensor if group.rank == root else None] * group.size
        takes = _at(root, tensor, group.size)
        open_and_exchange(group, "broadcast", fields, gives, takes, alike=True)
        return [tensor]
    open_call(group, "broadcast", fields, None)
    flat = flat_of(tensor)
    ScatterAllGather(group, root, flat).start().wait()
    put(flat, tensor)
    return [tensor]


def gather(group: Group, outs: list[list[Tensor]], ins: list[Tensor], root: int) -> list[Tensor]:
    """Send every rank's `ins[c]` to one rank, into `outs[c]`, which is empty on the others."""
    error = no_root(group, root) or first_of(
        reason([given, *places]) or misfit("output", places, _all(group, root, given))
        for places, given in zip(outs, ins, strict=True)
    )
    if error is not None:
        return refuse(group, "gather", error)
    gives = [_at(root, given, group.size) for given in copied_if_mixed(outs, ins)]
    compared = [[given] for given in ins]
    open_and_exchange_each(group, "gather", {"root": root}, gives, outs, compared)
    return overwritten([*itertools.chain(*outs)])


def scatter(group: Group, outs: list[Tensor], ins: list[list[Tensor]], root: int) -> list[Tensor]:
    """Send one rank's `ins[c][p]` to rank p, into its `outs[c]`; the others' `ins[c]` are empty."""
    error = no_root(group, root) or first_of(
        reason([place, *parts]) or misfit("input", parts, _all(group, root, place))
        for place, parts in zip(outs, ins, strict=True)
    )
    if error is not None:
        return refuse(group, "scatter", error)
    gives = copied_if_mixed(outs, ins)
    takes = [_at(root, place, group.size) for place in outs]
    compared = [[place] for place in outs]
    open_and_exchange_each(group, "scatter", {"root": root}, gives, takes, compared)
    return outs


def all_to_all(group: Group, outs: list[Tensor], ins: list[Tensor]) -> list[Tensor]:
    """Send every rank's `ins[p]` to rank p, which receives it in `outs[q]` from rank q.

    Tensors may have any sizes, and each output that of its input.
    """
    any_size: list[int | None] = [None] * group.size
    error = reason([*ins, *outs])
    error = error or misfit("input", ins, any_size) or misfit("output", outs, any_size)
    if error is not None:
        return refuse(group, "all_to_all", error)
    dtypes = sorted({str(tensor.dtype) for tensor in (*ins, *outs)})
    counts = [each.numel() for each in (*ins, *outs)]
    fields = {"dtype": ", ".join(dtypes)}
    open_and_exchange(group, "all_to_all", fields, ins, outs, counts=counts)
    return overwritten(outs)


def none(group: Group, call: str) -> list[Tensor]:
    """Take part in a call of no outputs and no inputs: all ranks raise if one has some."""
    open_call(group, call, {CALLS: 0}, None)
    return []


def all_gather_single(group: Group, outs: list[Tensor], ins: list[Tensor]) -> list[Tensor]:
    """`all_gather` into one tensor for each call: in `outs[c]` the ranks' follow one another."""
    error = first_of(
        reason([given, whole]) or unlike("output", whole, "inputs", given, group.size)
        for whole, given in zip(outs, ins, strict=True)
    )
    if error is not None:
        return refuse(group, "all_gather", error)
    places = [place_for(whole) for whole in outs]
    parts = [_split(place, [], group.size) for place in places]
    _all_gather_each(group, parts, copied_if_mixed(outs, ins))
    for place, whole in zip(places, outs, strict=True):
        put(place, whole)
    return overwritten(outs)


def gather_single(group: Group, out: Tensor, given: Tensor, root: int) -> list[Tensor]:
    """`gather` of one call into one tensor: in the root's `out` the ranks' follow one another."""
    if group.rank != root:
        gather(group, [[]], [given], root)
        return [out]
    if error := reason([given, out]) or unlike("output", out, "inputs", given, group.size):
        return refuse(group, "gather", error)
    place = place_for(out)
    gather(group, [_split(place, [], group.size)], [given], root)
    put(place, out)
    return overwritten([out])


def reduce_scatter_single(
    group: Group, outs: list[Tensor], ins: list[Tensor], op: str
) -> list[Tensor]:
    """`reduce_scatter` of one tensor for each call: the ranks get equal parts of `ins[c]`."""
    error = first_of(
        reason([place, whole], op) or unlike("input", whole, "outputs", place, group.size)
        for place, whole in zip(outs, ins, strict=True)
    )
    if error is not None:
        return refuse(group, "reduce_scatter", error)
    parts = [_split(flat_of(whole), [], group.size) for whole in copied_if_mixed(outs, ins)]
    _reduce_scatter_each(group, outs, parts, op)
    return overwritten(outs)


def all_to_all_single(
    group: Group, out: Tensor, mine: Tensor, out_sizes: list[int], in_sizes: list[int]
) -> list[Tensor]:
    """Send a part of one tensor to each rank, cut along dimension 0; no sizes: equal parts."""
    error = uneven("input", mine, in_sizes, group.size)
    error = error or uneven("output", out, out_sizes, group.size)
    if error is not None:
        return refuse(group, "all_to_all", error)
    outs = _split(elements(out), out_sizes, group.size)
    all_to_all(group, outs, _split(elements(mine), in_sizes, group.size))
    return [out]


def _all_gather_each(group: Group, outs: Sequence[Sequence[Tensor]], ins: Sequence[Tensor]) -> None:
    """The calls of an `all_gather`, whose arguments fit."""
    gives = [[given] for given in ins]
    open_and_exchange_each(group, "all_gather", {}, gives, outs, outs, alike=True)


def _reduce_scatter_each(
    group: Group, outs: Sequence[Tensor], ins: Sequence[Sequence[Tensor]], op: str
) -> None:
    """The calls of a `reduce_scatter`, whose arguments fit."""
    for fields, parts, (place,) in runs({"op": op}, ins, [[each] for each in outs], ins):
        open_and_reduce(group, "reduce_scatter", fields, place, parts, op)


def _split(tensor: Tensor, sizes: list[int], ranks: int) -> list[Tensor]:
    """The parts of a tensor along dimension 0; no sizes: equal ones."""
    return list(torch.split(tensor, sizes) if sizes else tensor.tensor_split(ranks))


def _own(group: Group, tensor: Tensor) -> list[int | None]:
    """The required sizes of a tensor for each rank: this rank's only."""
    return [tensor.numel() if rank == group.rank else None for rank in range(group.size)]


def _all(group: Group, root: int, tensor: Tensor) -> list[int | None]:
    """The required sizes of the tensors for each rank, which only the root has."""
    return [tensor.numel()] * group.size if group.rank == root else []


def _at(root: int, tensor: Tensor, size: int) -> Parts:
    """The tensor in the root's place, None in the others'."""
    return [tensor if rank == root else None for rank in range(size)]


def _as_given(tensor: Tensor) -> Tensor:
    """The tensor that `torch.distributed.all_reduce` was given.

    In place of a complex one it hands over a view in real numbers. That of a sparse tensor gets
    indices and values of its own in the end, so the caller's would stay as it was.
    """
    viewed = tensor._base
    return viewed if viewed is not None and viewed.is_complex() else tensor


def _combined(tensor: Tensor, op: str) -> Tensor:
    """A sparse tensor whose entries may be reduced one by one.

    Entries of one index are its summands, which only a sum may take so. A tensor in which something
    is wrong stays as it is: the call says so on every rank.
    """
    is_sparse = tensor.layout == torch.sparse_coo and not is_made_of_others(tensor)
    if op in ("sum", "avg") or not is_sparse:
        return tensor
    indices = tensor._indices()
    if not has_elements(indices) or not has_elements(tensor._values()):
        return tensor
    if op not in OPS or OPS[op].refuses(tensor.dtype):  # `coalesce` may not know the dtype
        return tensor
    sizes = torch.tensor(tensor.shape[: tensor.sparse_dim()], device=tensor.device)[:, None]
    # `coalesce` would write out of bounds for others
    in_range = ((indices >= 0) & (indices < sizes)).all()
    return tensor.coalesce() if in_range else tensor
