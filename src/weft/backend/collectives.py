"""The collectives of torch.distributed over a group, on CPU tensors, also of different sizes.

They take any dtype; a reduction must be defined for it. Each begins with an opening exchange
(`agreed`), in which every rank learns what every other rank was asked for. So wrong or differing
arguments raise the same WeftError on all ranks, and the next call works. What is small goes along
with it; then messages go directly from rank to rank, over the wire of the CPU's tensors. Reductions
add in rank order, so all ranks that get the result have the same bits.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..base import _torch
from ..base.errors import WeftError, summed_up
from ..base.memory import memory_of, typed
from ..base.tensors import flattened, has_elements, is_made_of_others, is_plain, lacking, plain
from ..call.opening import is_direct
from ..call.terms import agreed
from ..comm.all_reduce import reduce_in_place
from ..comm.parameters import ScatterAllGather
from ..comm.staging import is_on_one_host, most_to_all, most_to_each, moved
from ..group.group import Group
from ..schedules import dense
from ..sparse.api import job_of

_SAID = 200  # characters of sizes that ranks compare as text; longer texts by a digest

_SHOWN = 8  # sizes that an error names

WHOLE = 128 << 10  # bytes of a tensor that one rank rather reduces alone, also for other hosts

_PAIRS = "number of outputs"
"""A field: torch's lists of outputs and of inputs are as many calls. Each says how many there are,
so that ranks whose lists differ hear of it in the first one."""

Parts = Sequence[Tensor | None]
"""A tensor, or nothing, for each rank."""


def all_reduce(group: Group, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Reduce each tensor over all ranks, in place."""
    if error := _reason(tensors, op):
        return refuse(group, "all_reduce", error)
    flats = [_flat(tensor) for tensor in tensors]
    reduce_in_place(group, "all_reduce", {"op": op, **_said(tensors)}, flats, op)
    for flat, tensor in zip(flats, tensors, strict=True):
        _put(flat, tensor)
    return tensors


def sparse_all_reduce(group: Group, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Reduce sparse tensors over all ranks, each in place: it becomes the coalesced result."""
    given = [_combined(_as_given(tensor), op) for tensor in tensors]
    alone = len(given) == 1  # a list would need one more exchange
    done = job_of(group, given[0] if alone else given, op, "auto", None).run()
    for tensor, result in zip(tensors, [done] if alone else done, strict=True):
        tensor.data = result  # the caller's tensor now has the memory of the result
    return _overwritten(tensors)


def all_gather(group: Group, outs: list[Tensor], mine: Tensor, pairs: int = 1) -> list[Tensor]:
    """Send every rank's tensor to every rank. `outs` may differ in size, but not between ranks."""
    error = _reason([mine, *outs]) or _misfit("output", outs, _own(group, mine))
    fields = {_PAIRS: pairs, **_said(outs)}
    gives = [mine] * group.size
    _open_and_exchange(group, "all_gather", fields, error, gives, outs, alike=True)
    return _overwritten(outs)


def all_gather_coalesced(
    group: Group, outs: list[list[Tensor]], mine: list[Tensor]
) -> list[Tensor]:
    """Send every rank's tensors to every rank: `outs[p]` receives those of rank p, in their order.

    Ranks may have tensors of different sizes, and another number of them.
    """
    received = [tensor for each in outs for tensor in each]
    error = _reason([*mine, *received]) or _misfits(group, outs, mine)
    shapes = {"tensors": _text([len(each) for each in outs]), **_said(received)}
    _open(group, "all_gather_coalesced", shapes, error)
    for number in range(max(len(each) for each in outs)):
        given = mine[number] if number < len(mine) else None
        places = [each[number] if number < len(each) else None for each in outs]
        _exchange(group, [given] * group.size, places)
    return _overwritten(received)


def reduce_scatter(
    group: Group, out: Tensor, ins: list[Tensor], op: str, pairs: int = 1
) -> list[Tensor]:
    """Reduce the ranks' `ins[p]` on rank p. They may differ in size, but not between ranks."""
    error = _reason([out, *ins], op) or _misfit("input", ins, _own(group, out))
    fields = {_PAIRS: pairs, "op": op, **_said(ins)}
    _open_and_reduce(group, "reduce_scatter", fields, error, out, ins, op)
    return _overwritten([out])


def reduce(group: Group, tensor: Tensor, root: int, op: str) -> list[Tensor]:
    """Reduce a tensor on one rank, in place there; the others' stay as they are."""
    error = _no_root(group, root) or _reason([tensor], op)
    if error is not None:
        return refuse(group, "reduce", error)
    fields = {"root": root, "op": op, **_said([tensor])}
    if tensor.nbytes <= WHOLE or is_on_one_host(group):
        parts = [tensor.new_empty(0)] * group.size
        parts[root] = tensor
        _open_and_reduce(group, "reduce", fields, None, parts[group.rank], parts, op)
        return [tensor]
    # each rank reduces a part, which the root then gets: half the bytes on the root's link
    flat, is_root = _flat(tensor), group.rank == root
    pieces = flat.tensor_split(group.size)
    mine = pieces[group.rank] if is_root else torch.empty_like(pieces[group.rank])
    _open_and_reduce(group, "reduce", fields, None, mine, pieces, op)
    _exchange(group, _at(root, mine, group.size), pieces if is_root else [])
    if is_root:
        _put(flat, tensor)
    return [tensor]


def broadcast(group: Group, tensor: Tensor, root: int) -> list[Tensor]:
    """Send one rank's tensor to all ranks, in place."""
    error = _no_root(group, root) or _reason([tensor])
    fields = {"root": root, **_said([tensor])}
    if error is None and tensor.nbytes <= most_to_all(group):
        gives = [tensor if group.rank == root else None] * group.size
        takes = _at(root, tensor, group.size)
        _open_and_exchange(group, "broadcast", fields, None, gives, takes, alike=True)
        return [tensor]
    _open(group, "broadcast", fields, error)
    flat = _flat(tensor)
    ScatterAllGather(_over(group), root, flat).start().wait()
    _put(flat, tensor)
    return [tensor]


def gather(
    group: Group, outs: list[Tensor], mine: Tensor, root: int, pairs: int = 1
) -> list[Tensor]:
    """Send every rank's tensor to one rank; `outs` is empty on the others."""
    error = _no_root(group, root) or _reason([mine, *outs])
    error = error or _misfit("output", outs, _all(group, root, mine))
    fields = {_PAIRS: pairs, "root": root, **_said([mine])}
    _open_and_exchange(group, "gather", fields, error, _at(root, mine, group.size), outs)
    return _overwritten(outs)


def scatter(
    group: Group, out: Tensor, ins: list[Tensor], root: int, pairs: int = 1
) -> list[Tensor]:
    """Send a tensor from one rank to each rank; `ins` is empty on the others."""
    error = _no_root(group, root) or _reason([out, *ins])
    error = error or _misfit("input", ins, _all(group, root, out))
    fields = {_PAIRS: pairs, "root": root, **_said([out])}
    _open_and_exchange(group, "scatter", fields, error, ins, _at(root, out, group.size))
    return [out]


def all_to_all(group: Group, outs: list[Tensor], ins: list[Tensor]) -> list[Tensor]:
    """Send every rank's `ins[p]` to rank p, which receives it in `outs[q]` from rank q.

    Tensors may have any sizes. If there are at most 16 ranks, they check that each output has the
    size of its input.
    """
    any_size: list[int | None] = [None] * group.size
    error = _reason([*ins, *outs])
    error = error or _misfit("input", ins, any_size) or _misfit("output", outs, any_size)
    dtypes = sorted({str(tensor.dtype) for tensor in (*ins, *outs)})
    counts = struct.pack(f"<{len(ins) + len(outs)}q", *(each.numel() for each in (*ins, *outs)))
    shown = counts if is_direct(group) and error is None else b""
    fields = {"dtype": ", ".join(dtypes)}
    _open_and_exchange(group, "all_to_all", fields, error, ins, outs, counts=shown)
    return _overwritten(outs)


def none(group: Group, call: str) -> list[Tensor]:
    """Take part in a call of no outputs and no inputs: all ranks raise if one has some."""
    _open(group, call, {_PAIRS: 0}, None)
    return []


def refuse(group: Group, call: str, error: str) -> list[Tensor]:
    """Take part in a call with nothing but the error of this rank's arguments: all ranks raise it.

    Args:
        group: the ranks that make the call.
        call: its name.
        error: what is wrong, in a sentence without the rank.
    """
    _open(group, call, {}, error)
    raise AssertionError("the opening exchange raises a rank's error on every rank")


def all_gather_single(group: Group, out: Tensor, mine: Tensor, pairs: int = 1) -> list[Tensor]:
    """Send every rank's tensor to every rank, where they follow one another in one tensor."""
    place = _place(out)
    all_gather(group, _split(place, [], group.size), mine, pairs)
    _put(place, out)
    return _overwritten([out])


def gather_single(group: Group, out: Tensor, mine: Tensor, root: int) -> list[Tensor]:
    """Send every rank's tensor to one rank, where they follow one another in one tensor."""
    if group.rank != root:
        gather(group, [], mine, root)
        return [out]
    place = _place(out)
    gather(group, _split(place, [], group.size), mine, root)
    _put(place, out)
    return _overwritten([out])


def reduce_scatter_single(
    group: Group, out: Tensor, mine: Tensor, op: str, pairs: int = 1
) -> list[Tensor]:
    """Cut the ranks' tensors into equal parts, and reduce part p on rank p."""
    return reduce_scatter(group, out, _split(_flat(mine), [], group.size), op, pairs)


def all_to_all_single(
    group: Group, out: Tensor, mine: Tensor, out_sizes: list[int], in_sizes: list[int]
) -> list[Tensor]:
    """Send a part of one tensor to each rank, cut along dimension 0; no sizes: equal parts."""
    error = _uneven("input", mine, in_sizes, group.size)
    error = error or _uneven("output", out, out_sizes, group.size)
    if error is not None:
        return refuse(group, "all_to_all", error)
    outs = _split(elements(out), out_sizes, group.size)
    all_to_all(group, outs, _split(elements(mine), in_sizes, group.size))
    return [out]


def _uneven(what: str, tensor: Tensor, sizes: list[int], ranks: int) -> str | None:
    """The error if a tensor cannot be cut into one part of these sizes for each rank, or None."""
    if not tensor.dim():
        return f"the {what} has no dimension to be cut along: pass one of at least one dimension"
    rows = tensor.shape[0]
    if not all(hasattr(size, "__index__") for size in sizes):  # NumPy's integers have it, too
        return f"the split sizes of the {what} are {_shown(sizes)}: pass integers"
    if not sizes and rows % ranks:
        return (
            f"the {what} has {rows} along dimension 0, of which {ranks} ranks cannot get equal "
            "parts: pass split sizes"
        )
    if sizes and (len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows):
        return (
            f"the {what} has {rows} along dimension 0, and its split sizes are {_shown(sizes)}: "
            f"pass {ranks} sizes of this sum"
        )
    return None


def _split(tensor: Tensor, sizes: list[int], ranks: int) -> list[Tensor]:
    """The parts of a tensor along dimension 0; no sizes: equal ones.

    If there are no equal ones, they are empty, and the opening exchange finds an error.
    """
    rows = tensor.shape[0]
    if not sizes:
        return list(tensor.chunk(ranks)) if rows % ranks == 0 and rows else [tensor[:0]] * ranks
    return list(torch.split(tensor, sizes))


def unsendable(argument: object) -> str | None:
    """What is wrong with the first tensor in an argument that has no elements to send, or None.

    It is asked before anything else of them is: what has no elements need not have a size.
    """
    for tensor in tensors_in(argument):
        own = _torch.waited(tensor)
        if not has_elements(own):
            return (
                f"a tensor is {lacking(own)}: pass tensors with elements in memory; all_reduce "
                "alone takes sparse ones, too"
            )
    return None


def tensors_in(argument: object) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from tensors_in(each)


def _open(group: Group, call: str, fields: Mapping[str, object], error: str | None) -> None:
    """The opening exchange, with which nothing goes along."""
    with agreed(group, call, fields, error):
        pass


def _open_and_exchange(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    gives: Parts,
    takes: Parts,
    *,
    alike: bool = False,
    counts: bytes = b"",
) -> None:
    """Open a call, send `gives[p]` to each rank p, and receive `takes[p]` from it.

    What is small goes along with the opening.

    Args:
        group, call, fields, error: of the opening.
        gives, takes: as of `_exchange`.
        alike: whether a rank that gives something gives the same to all.
        counts: what `_unequal` compares, if it shall.
    """
    if error is not None:
        refuse(group, call, error)
    outgoing, incoming = _flats(gives), _places(takes)
    along = _along(group, outgoing, alike=alike)
    own: bytes | memoryview = counts
    private = None
    if alike:
        own = next(iter(along.values()), b"")
    elif is_direct(group):
        private = [[along[p]] if p in along else [] for p in range(group.size)]
    come = set[int]()
    with agreed(group, call, fields, None, own=own, private=private) as said:
        to_all = said.own(len(counts) if counts else None)
        if counts and (wrong := _unequal(group.size, to_all)):  # every rank finds the same
            raise WeftError(wrong)
        told = to_all if alike else said.opening.private
        for peer in incoming.keys() - {group.rank} if is_direct(group) else ():
            if told[peer]:
                group.decode(peer, "a tensor", _fill, incoming[peer], told[peer])
                come.add(peer)
    rest = {p: flat for p, flat in outgoing.items() if p not in along}
    moved(_over(group), rest, {p: place for p, place in incoming.items() if p not in come})
    _keep_own(group, outgoing, incoming)
    _deliver(incoming, takes)


def _along(group: Group, outgoing: Mapping[int, Tensor], *, alike: bool) -> dict[int, memoryview]:
    """What is small enough to go along with the opening, by the rank that it is for."""
    if not is_direct(group):
        return {}
    most = [most_to_all(group)] * group.size if alike else most_to_each(group)
    small = {peer: flat for peer, flat in outgoing.items() if flat.nbytes <= most[peer]}
    return {peer: memory_of(flat) for peer, flat in small.items() if peer != group.rank}


def _fill(place: Tensor, told: memoryview) -> None:
    """Copy what a rank has told. Raises ValueError if it is of another length."""
    memory_of(place)[:] = told


def _over(group: Group) -> Group:
    """The group as it carries tensors of the CPU, which may have a wire of their own."""
    return group.on(torch.device("cpu"))


def _no_root(group: Group, root: int) -> str | None:
    """The error if the root is no rank of the group, or None."""
    if 0 <= root < group.size:
        return None
    return f"the root is rank {root}, and there are ranks 0 to {group.size - 1}: pass one of these"


def _own(group: Group, tensor: Tensor) -> list[int | None]:
    """The required sizes of a tensor for each rank: this rank's only."""
    return [tensor.numel() if rank == group.rank else None for rank in range(group.size)]


def _all(group: Group, root: int, tensor: Tensor) -> list[int | None]:
    """The required sizes of the tensors for each rank, which only the root has."""
    return [tensor.numel()] * group.size if group.rank == root else []


def _misfit(what: str, parts: Sequence[Tensor], counts: Sequence[int | None]) -> str | None:
    """The error if there is not one tensor for each count, with that many elements; or None."""
    if len(parts) != len(counts):
        return (
            f"{len(parts)} {what}s were given, and {len(counts)} are wanted: pass one for each "
            "rank, and none where another rank is the root"
        )
    for rank, (part, count) in enumerate(zip(parts, counts, strict=True)):
        if count is not None and part.numel() != count:
            return (
                f"{what} {rank} has {part.numel()} elements, and the tensor that goes with it "
                f"{count}: they must be as many"
            )
    return None


def _misfits(group: Group, outs: Sequence[Sequence[Tensor]], mine: Sequence[Tensor]) -> str | None:
    """The error if there is not one list for each rank, or this rank's does not fit; or None."""
    if len(outs) != group.size:
        return f"{len(outs)} lists of outputs were given: pass one for each of {group.size} ranks"
    own = outs[group.rank]
    if [each.numel() for each in own] == [each.numel() for each in mine]:
        return None
    return (
        f"the inputs have {_sizes(mine)} elements, and the outputs in the list of this rank "
        f"{_sizes(own)}: they must be as many"
    )


def _sizes(tensors: Sequence[Tensor]) -> str:
    return _shown([each.numel() for each in tensors])


def _shown(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:_SHOWN]))
    return f"{shown} ..." if len(sizes) > _SHOWN else shown or "no"


def _at(root: int, tensor: Tensor, size: int) -> Parts:
    """The tensor in the root's place, None in the others'."""
    return [tensor if rank == root else None for rank in range(size)]


def _exchange(group: Group, gives: Parts, takes: Parts) -> None:
    """Send `gives[p]` to each rank p, and receive `takes[p]` from it; nothing for empty tensors."""
    outgoing, incoming = _flats(gives), _places(takes)
    moved(_over(group), outgoing, incoming)
    _keep_own(group, outgoing, incoming)
    _deliver(incoming, takes)


def _flats(gives: Parts) -> dict[int, Tensor]:
    """What is to be sent, by rank: plain, and once where several get the same."""
    flats = {id(each): _flat(each) for each in gives if each is not None and each.numel()}
    return {p: flats[id(each)] for p, each in enumerate(gives) if id(each) in flats}


def _places(takes: Parts) -> dict[int, Tensor]:
    """Where to receive, by rank."""
    return {p: _place(each) for p, each in enumerate(takes) if each is not None and each.numel()}


def _keep_own(group: Group, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
    """Give this rank what it gives itself."""
    if group.rank in incoming and group.rank in outgoing:
        incoming[group.rank].copy_(outgoing[group.rank])


def _deliver(incoming: Mapping[int, Tensor], takes: Parts) -> None:
    """Put what was received where a caller wants it."""
    for peer, place in incoming.items():
        wanted = takes[peer]
        assert wanted is not None  # else there is no place for it
        _put(place, wanted)


def _open_and_reduce(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    out: Tensor,
    parts: Sequence[Tensor],
    op: str,
) -> None:
    """Open a call, and reduce every rank's `parts[p]` on rank p, into its `out`, in chunks."""
    if error is not None:
        refuse(group, call, error)
    flats, place = [_flat(part) for part in parts], _place(out)
    step = max(1, dense.SCRATCH // group.size // max(1, out.element_size()))
    for start in range(0, max(1, *map(len, flats)), step):
        chunks = [flat[start : start + step] for flat in flats]
        mine = len(chunks[group.rank])
        with _over(group).lease(group.size * chunks[group.rank].nbytes) as memory:
            slots = list(typed(memory, (group.size, mine), out.dtype))
            takes = [None if rank == group.rank else slot for rank, slot in enumerate(slots)]
            if start == 0:
                _open_and_exchange(group, call, fields, None, chunks, takes)
            else:
                _exchange(group, chunks, takes)
            slots[group.rank] = chunks[group.rank]
            if mine:
                dense.reduce(slots, op, place[start : start + step])
    _put(place, out)


def _unequal(size: int, said: Sequence[memoryview]) -> str | None:
    """The error if an output is not as large as its input; the same on every rank."""
    counts = [struct.unpack(f"<{2 * size}q", each) for each in said]
    for source, target in itertools.product(range(size), repeat=2):
        sends, takes = counts[source][target], counts[target][size + source]
        if sends != takes:
            return (
                f"rank {source} has {sends} elements for rank {target}, which has room for {takes} "
                "from it: split sizes must match"
            )
    return None


def _reason(tensors: Sequence[Tensor], op: str | None = None) -> str | None:
    """What is wrong with a call's tensors, in a sentence, or None."""
    if not tensors:
        return None
    first = tensors[0]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"a tensor is on {tensor.device}: this backend moves CPU tensors, so copy it"
        if tensor.dtype != first.dtype:
            return f"tensors of {first.dtype} and of {tensor.dtype} were given: pass one dtype"
        if tensor.is_quantized:
            return "a tensor is quantized, and its scale is not in its memory: pass it dequantized"
    return None if op is None else dense.refuses(op, first.dtype)


def _said(tensors: Sequence[Tensor]) -> dict[str, object]:
    """The dtype and the sizes of tensors, as a fingerprint."""
    sizes = _text([tensor.numel() for tensor in tensors])
    return {"dtype": tensors[0].dtype if tensors else None, "sizes": sizes}


def _text(numbers: Sequence[int]) -> str:
    """Numbers as a text that ranks can compare."""
    text = ", ".join(map(str, numbers))
    return summed_up(text, _SAID, f"{text[:20]} ... of {len(numbers)}")


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
    if op in ("sum", "avg") or not is_sparse or tensor.is_meta:
        return tensor
    sizes = torch.tensor(tensor.shape[: tensor.sparse_dim()], device=tensor.device)[:, None]
    indices = tensor._indices()
    # `coalesce` would write out of bounds for others
    in_range = ((indices >= 0) & (indices < sizes)).all()
    return tensor.coalesce() if in_range else tensor


def elements(tensor: Tensor) -> Tensor:
    """A tensor's elements, in the same memory, which may be written without autograd's knowledge.

    `detach()` would share the version of the tensor, which then could not be written where a
    backward is to read it. torch's own backends let a program do that; see `_overwritten`.
    """
    return _torch.waited(tensor).data


def _overwritten(outs: list[Tensor]) -> list[Tensor]:
    """The outputs of a call, of which autograd learns that they were overwritten.

    A backward that was to read what they held before then raises, as with gloo. gloo does so of
    outputs, but for those of scatter and all_to_all_single, and not of what is reduced or sent in
    place.
    """
    torch.autograd.graph.increment_version(outs)
    return outs


def _flat(tensor: Tensor) -> Tensor:
    """The elements in their order, 1-D: the tensor's own memory if it is plain."""
    return flattened(plain(elements(tensor)))


def _place(tensor: Tensor) -> Tensor:
    """Where to receive a tensor: its own memory if it is plain; `_put` does the rest."""
    own = elements(tensor)
    return flattened(own) if is_plain(own) else torch.empty(own.numel(), dtype=own.dtype)


def _put(flat: Tensor, tensor: Tensor) -> None:
    own = elements(tensor)
    if flat.data_ptr() != own.data_ptr():
        own.copy_(flat.view(own.shape))
