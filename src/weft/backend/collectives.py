"""The collectives of torch.distributed over a group, on CPU tensors, also of different sizes.

They take any dtype; a reduction must be defined for it. Each begins with an opening exchange
(`agreed`), in which every rank learns what every other rank was asked for. So wrong or differing
arguments raise the same WeftError on all ranks, and the next call works. What is small goes along
with it; then messages go directly from rank to rank, over the wire of the CPU's tensors. Where
hosts have several ranks, as many each, what all need, and what is reduced, crosses a host's link
once. Reductions add in rank order, there those of a host first, so all ranks that get the result
have the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import _torch
from ..base.arguments import shown
from ..base.errors import WeftError, WireError, summed_up
from ..base.memory import memory_of, typed
from ..base.tensors import (
    as_bytes,
    extent,
    flattened,
    has_elements,
    is_made_of_others,
    is_plain,
    lacking,
    mark_overwritten,
    plain,
    serves,
    shares_elements,
    write,
)
from ..call.attempt import confess
from ..call.opening import is_direct
from ..call.terms import MODULUS, agreed
from ..comm.all_reduce import reduce_in_place
from ..comm.buckets import ALONE
from ..comm.parameters import ScatterAllGather
from ..comm.staging import are_all_near, most_to_all, most_to_each, moved, moved_to_all, swapped
from ..group.group import Group
from ..kernels.ops import OPS
from ..schedules import dense
from ..schedules.hosts import Grid, grid_of
from ..sparse.api import job_of

_SAID = 200  # characters of sizes that ranks compare as text; longer texts by a digest

_SHOWN = 8  # sizes that an error names

BY_ROOT = 128 << 10
"""Bytes of a tensor that its root reduces alone. Of 4 hosts at 1 Gbit/s all ranks together took 0.6
times as long for 256 KiB; on one host they take longer for any size."""

_PAIRS = "number of outputs"
"""A field: torch's lists of outputs and of inputs are as many calls. The first of them is given the
arguments of the others as `later`, and does all. So what is wrong with one of them is an error
before anything is written, and what is small travels together."""

Parts = Sequence[Tensor | None]
"""A tensor, or nothing, for each rank."""

_Span = tuple[int, int, int, bool]
"""The addresses of a tensor's first byte and behind its last, its call, and whether it is read."""


def all_reduce(group: Group, tensors: list[Tensor], op: str) -> list[Tensor]:
    """Reduce each tensor over all ranks, in place: what it was before the call."""
    if error := _reason(tensors, op):
        return refuse(group, "all_reduce", error)
    flats = [_flat(tensor) for tensor in tensors]
    if are_mixed(tensors, ()):
        flats = [copied(flat) for flat in flats]
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
        with torch.inference_mode(tensor.is_inference()):  # in which it was made
            tensor.data = result  # the caller's tensor now has the memory of the result
    return _overwritten(tensors)


def all_gather(
    group: Group,
    outs: list[Tensor],
    mine: Tensor,
    later: Sequence[tuple[Any, ...]] = (),
) -> list[Tensor]:
    """Send every rank's tensor to every rank. `outs` may differ in size, but not between ranks."""
    pairs = [(outs, mine), *(call[:2] for call in later)]
    error = _first(
        _reason([given, *places]) or _misfit("output", places, _own(group, given))
        for places, given in pairs
    )
    told = [places for places, _ in pairs]
    ends = [([given] * group.size, places) for places, given in pairs]
    _open_and_exchange_each(group, "all_gather", {}, error, ends, told, alike=True)
    return _overwritten([place for places in told for place in places])


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
    exchanges = list(itertools.zip_longest(*outs))
    if are_mixed(exchanges, mine):
        mine = [copied(tensor) for tensor in mine]
    for number, places in enumerate(exchanges):
        given = mine[number] if number < len(mine) else None
        _exchange(group, [given] * group.size, places)
    return _overwritten(received)


def reduce_scatter(
    group: Group,
    out: Tensor,
    ins: list[Tensor],
    op: str,
    later: Sequence[tuple[Any, ...]] = (),
) -> list[Tensor]:
    """Reduce the ranks' `ins[p]` on rank p. They may differ in size, but not between ranks."""
    pairs = [(out, ins), *(call[:2] for call in later)]
    error = _first(
        _reason([place, *given], op) or _misfit("input", given, _own(group, place))
        for place, given in pairs
    )
    if error is not None:
        return refuse(group, "reduce_scatter", error)
    told = [given for _, given in pairs]
    fields = {_PAIRS: len(pairs), "op": op, **_said(*told)}
    for run in _runs(pairs, told):
        places, given = zip(*run, strict=True)
        parts = [_joined(each) for each in zip(*given, strict=True)]
        place = _room(places)
        _open_and_reduce(group, "reduce_scatter", fields, place, parts, op)
        _spread([place], [[each] for each in places])
        fields = {"op": op}
    return _overwritten([place for place, _ in pairs])


def reduce(group: Group, tensor: Tensor, root: int, op: str) -> list[Tensor]:
    """Reduce a tensor on one rank, in place there; the others' stay as they are."""
    error = _no_root(group, root) or _reason([tensor], op)
    if group.rank == root:  # the others' tensors are not written
        error = error or unwritable([tensor])
    if error is not None:
        return refuse(group, "reduce", error)
    fields = {"root": root, "op": op, **_said([tensor])}
    if tensor.nbytes <= BY_ROOT or len({*group.hosts}) == 1:
        parts = [tensor.new_empty(0)] * group.size
        parts[root] = tensor
        _open_and_reduce(group, "reduce", fields, parts[group.rank], parts, op)
        return [tensor]
    # each rank reduces a part, which the root then gets: of P ranks, 2/P of the bytes on its link
    flat, is_root = _flat(tensor), group.rank == root
    pieces = flat.tensor_split(group.size)
    mine = pieces[group.rank] if is_root else torch.empty_like(pieces[group.rank])
    _open_and_reduce(group, "reduce", fields, mine, pieces, op)
    _exchange(group, _at(root, mine, group.size), pieces if is_root else [])
    if is_root:
        _put(flat, tensor)
    return [tensor]


def broadcast(group: Group, tensor: Tensor, root: int) -> list[Tensor]:
    """Send one rank's tensor to all ranks, in place."""
    error = _no_root(group, root) or _reason([tensor])
    fields = {"root": root, **_said([tensor])}
    if error is not None or are_all_near(group) or tensor.nbytes <= most_to_all(group):
        gives = [tensor if group.rank == root else None] * group.size
        takes = _at(root, tensor, group.size)
        _open_and_exchange(group, "broadcast", fields, error, gives, takes, alike=True)
        return [tensor]
    _open(group, "broadcast", fields, None)
    flat = _flat(tensor)
    ScatterAllGather(_over(group), root, flat).start().wait()
    _put(flat, tensor)
    return [tensor]


def gather(
    group: Group,
    outs: list[Tensor],
    mine: Tensor,
    root: int,
    later: Sequence[tuple[Any, ...]] = (),
) -> list[Tensor]:
    """Send every rank's tensor to one rank; `outs` is empty on the others."""
    pairs = [(outs, mine), *(call[:2] for call in later)]
    error = _no_root(group, root) or _first(
        _reason([given, *places]) or _misfit("output", places, _all(group, root, given))
        for places, given in pairs
    )
    told = [[given] for _, given in pairs]
    ends = [(_at(root, given, group.size), places) for places, given in pairs]
    _open_and_exchange_each(group, "gather", {"root": root}, error, ends, told)
    return _overwritten([place for places, _ in pairs for place in places])


def scatter(
    group: Group,
    out: Tensor,
    ins: list[Tensor],
    root: int,
    later: Sequence[tuple[Any, ...]] = (),
) -> list[Tensor]:
    """Send a tensor from one rank to each rank; `ins` is empty on the others."""
    pairs = [(out, ins), *(call[:2] for call in later)]
    error = _no_root(group, root) or _first(
        _reason([place, *given]) or _misfit("input", given, _all(group, root, place))
        for place, given in pairs
    )
    told = [[place] for place, _ in pairs]
    ends = [(given, _at(root, place, group.size)) for place, given in pairs]
    _open_and_exchange_each(group, "scatter", {"root": root}, error, ends, told)
    return [place for place, _ in pairs]


def all_to_all(group: Group, outs: list[Tensor], ins: list[Tensor]) -> list[Tensor]:
    """Send every rank's `ins[p]` to rank p, which receives it in `outs[q]` from rank q.

    Tensors may have any sizes, and each output that of its input.
    """
    any_size: list[int | None] = [None] * group.size
    error = _reason([*ins, *outs])
    error = error or _misfit("input", ins, any_size) or _misfit("output", outs, any_size)
    dtypes = sorted({str(tensor.dtype) for tensor in (*ins, *outs)})
    counts = [each.numel() for each in (*ins, *outs)]
    fields = {"dtype": ", ".join(dtypes)}
    _open_and_exchange(group, "all_to_all", fields, error, ins, outs, counts=counts)
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


def all_gather_single(
    group: Group, out: Tensor, mine: Tensor, later: Sequence[tuple[Any, ...]] = ()
) -> list[Tensor]:
    """Send every rank's tensor to every rank, where they follow one another in one tensor."""
    pairs = [(out, mine), *(call[:2] for call in later)]
    error = _first(
        _reason([given, whole]) or _unlike("output", whole, "inputs", given, group.size)
        for whole, given in pairs
    )
    if error is not None:
        return refuse(group, "all_gather", error)
    places = [_place(whole) for whole, _ in pairs]
    first, *rest = [
        (_split(place, [], group.size), given)
        for place, (_, given) in zip(places, pairs, strict=True)
    ]
    all_gather(group, *first, rest)
    for place, (whole, _) in zip(places, pairs, strict=True):
        _put(place, whole)
    return _overwritten([whole for whole, _ in pairs])


def gather_single(group: Group, out: Tensor, mine: Tensor, root: int) -> list[Tensor]:
    """Send every rank's tensor to one rank, where they follow one another in one tensor."""
    if group.rank != root:
        gather(group, [], mine, root)
        return [out]
    if error := _reason([mine, out]) or _unlike("output", out, "inputs", mine, group.size):
        return refuse(group, "gather", error)
    place = _place(out)
    gather(group, _split(place, [], group.size), mine, root)
    _put(place, out)
    return _overwritten([out])


def reduce_scatter_single(
    group: Group, out: Tensor, mine: Tensor, op: str, later: Sequence[tuple[Any, ...]] = ()
) -> list[Tensor]:
    """Cut the ranks' tensors into equal parts, and reduce part p on rank p."""
    error = _first(
        _reason([place, whole]) or _unlike("input", whole, "outputs", place, group.size)
        for place, whole, *_ in [(out, mine), *later]
    )
    if error is not None:
        return refuse(group, "reduce_scatter", error)
    rest = [(place, _split(_flat(whole), [], group.size)) for place, whole, *_ in later]
    return reduce_scatter(group, out, _split(_flat(mine), [], group.size), op, rest)


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


def _unlike(what: str, whole: Tensor, parts: str, part: Tensor, ranks: int) -> str | None:
    """The error if a tensor has not as many elements as a part of each rank together, or None."""
    count = ranks * part.numel()
    if whole.numel() == count:
        return None
    return f"the {what} has {whole.numel()} elements, and the {parts} of {ranks} ranks {count}"


def _uneven(what: str, tensor: Tensor, sizes: list[int], ranks: int) -> str | None:
    """The error if a tensor cannot be cut into one part of these sizes for each rank, or None."""
    if not tensor.dim():
        return f"the {what} has no dimension to be cut along: pass one of at least one dimension"
    rows = tensor.shape[0]
    if not sizes and rows % ranks:
        return (
            f"the {what} has {rows} along dimension 0, of which {ranks} ranks cannot get equal "
            "parts: pass split sizes"
        )
    if sizes and (len(sizes) != ranks or sum(sizes) != rows):
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
        if not is_plain(own) and not serves(torch.clone, own.dtype):
            return f"a tensor is {own.dtype}, which torch does not copy: pass a contiguous one"
    return None


def unwritable(tensors: object) -> str | None:
    """What is wrong with the first of some tensors to which no result can be written, or None."""
    for tensor in tensors_in(tensors):
        if tensor.layout == torch.strided and shares_elements(elements(tensor)):
            return (
                "elements of a tensor to be written share memory, as expand() has them: pass a "
                "contiguous one"
            )
    return None


def are_mixed(outs: Sequence[object], ins: Sequence[object]) -> bool:
    """Whether, of several calls, one writes what another reads or writes.

    To the caller they are one call: each has to read what was there before all of them.

    Args:
        outs: for each call a tensor, or some, as of `tensors_in`.
        ins: the same of what it reads.
    """
    if len(outs) < 2:
        return False
    begun: list[_Span] = []  # those that may go on where the next begins
    for span in sorted([*_spans(outs, is_read=False), *_spans(ins, is_read=True)]):
        start, _, number, is_read = span
        begun = [each for each in begun if each[1] > start]
        if any(each[2] != number and not (each[3] and is_read) for each in begun):
            return True
        begun.append(span)
    return False


def _spans(arguments: Sequence[object], *, is_read: bool) -> Iterator[_Span]:
    for number, argument in enumerate(arguments):
        for tensor in tensors_in(argument):
            if tensor.numel():
                yield *extent(_torch.waited(tensor)), number, is_read


Aliases = dict[int, tuple[Tensor, Tensor]]
"""An alias of each of a caller's tensors, and the tensor, by the id of that."""


@_torch.without_transforms
@_torch.without_modes
def taken(
    collective: Callable[..., list[Tensor]], given: Sequence[tuple[Any, ...]]
) -> tuple[Sequence[tuple[Any, ...]], dict[int, Tensor], str | None]:
    """The arguments of calls, with an alias in place of each tensor.

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
    calls = [tuple(_aliased(each, made) for each in call) for call in given]
    if collective is not reduce:  # of which one is written
        error = unwritable([call[0] for call in calls if call])
    return calls, {id(alias): tensor for alias, tensor in made.values()}, error


def _aliased(argument: Any, made: Aliases) -> Any:
    """A tensor's alias, one for each tensor; the same of a list; anything else as it is."""
    if isinstance(argument, list):
        return [_aliased(each, made) for each in argument]
    if not isinstance(argument, Tensor):
        return argument
    if id(argument) not in made:
        made[id(argument)] = _torch.waited(argument).detach(), argument
    return made[id(argument)][0]


def at_once(
    group: Group, collective: Callable[..., list[Tensor]], calls: Sequence[tuple[Any, ...]]
) -> list[Tensor]:
    """Run a collective for each of these arguments, outputs first.

    None reads what one before has written.
    """
    if are_mixed([call[0] for call in calls], [call[1:] for call in calls]):
        calls = [(outs, *map(_copies, others)) for outs, *others in calls]
    first, *later = calls
    return collective(group, *first, **({"later": later} if later else {}))


def tell_early(group: Group, call: str, trouble: Exception) -> None:
    """Tell all ranks of what was raised here, unless they have met in the call that runs.

    Raises:
        WeftError: as `confess`.
    """
    now = group.worker.now
    if not isinstance(trouble, WireError) and now is not None and not now.agreed:
        confess(group, call, trouble)


def _copies(argument: Any) -> Any:
    """A tensor in a copy, or a list of them; anything else as it is."""
    if isinstance(argument, Tensor):
        return copied(argument)
    return [*map(copied, argument)] if isinstance(argument, list) else argument


def copied(tensor: Tensor) -> Tensor:
    """The elements in their order, 1-D, in memory of their own, also where torch copies none."""
    return as_bytes(_flat(tensor)).clone().view(tensor.dtype)


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
    counts: Sequence[int] = (),
) -> None:
    """Open a call, send `gives[p]` to each rank p, and receive `takes[p]` from it.

    What is small goes along with the opening.

    Args:
        group, call, fields, error: of the opening.
        gives, takes: as of `_exchange`.
        alike: whether a rank that gives something gives the same to all.
        counts: the elements of `gives`, then of `takes`, for each rank, if both ends of a pair are
            to be compared; none: their fields have them.
    """
    if error is not None:
        refuse(group, call, error)
    outgoing, incoming = _ends(group, gives, takes)
    along = _along(group, outgoing, alike=alike)
    own: bytes | memoryview = b""
    private = None
    if alike:
        own = next(iter(along.values()), b"")
    elif is_direct(group):
        private = [[along[p]] if p in along else [] for p in range(group.size)]
    come = set[int]()
    summand = _summand(group, counts) if counts else 0
    with agreed(group, call, fields, None, summand=summand, own=own, private=private) as said:
        if said.total:  # every rank knows the same
            raise WeftError(_unequal(group, counts))
        told = said.own() if alike else said.opening.private
        for peer in incoming.keys() - {group.rank} if is_direct(group) else ():
            if told[peer]:
                group.decode(peer, "a tensor", _fill, incoming[peer], told[peer])
                come.add(peer)
    rest = {p: flat for p, flat in outgoing.items() if p not in along}
    missing = {p: place for p, place in incoming.items() if p not in come}
    if alike:
        moved_to_all(_over(group), rest, missing)
    else:
        moved(_over(group), rest, missing)
    _keep_own(group, outgoing, incoming)
    _deliver(incoming, takes)


def _open_and_exchange_each(
    group: Group,
    call: str,
    fields: Mapping[str, object],
    error: str | None,
    ends: Sequence[tuple[Parts, Parts]],
    told: Sequence[Sequence[Tensor]],
    *,
    alike: bool = False,
) -> None:
    """Open a call, and do what several calls give and take, in runs of which each is opened.

    The first opening compares all of them.

    Args:
        group, call, fields, error, alike: as of `_open_and_exchange`.
        ends: of each call, what it gives and takes.
        told: of each call, the tensors whose sizes all ranks compare.
    """
    if error is not None:
        refuse(group, call, error)
    fields = {_PAIRS: len(ends), **fields, **_said(*told)}
    for run in _runs(ends, told):
        given, wanted = zip(*run, strict=True)
        if alike:
            gives: Parts = [_joined([each[0] for each in given])] * group.size
        else:
            gives = [_joined(each) for each in zip(*given, strict=True)]
        takes = [_room(each) for each in zip(*wanted, strict=True)]
        _open_and_exchange(group, call, fields, None, gives, takes, alike=alike)
        _spread(takes, wanted)
        fields = {}


def _runs(
    pairs: Sequence[tuple[Any, Any]], told: Sequence[Sequence[Tensor]]
) -> Iterator[list[tuple[Any, Any]]]:
    """The outputs and inputs of several calls, in runs of which each is done at once.

    What is small goes together. The runs depend on dtypes and sizes that all ranks compare.
    """
    run: list[tuple[Any, Any]] = []
    room, dtype = 0, None
    for pair, tensors in zip(pairs, told, strict=True):
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if run and (nbytes > room or tensors[0].dtype != dtype):
            yield run
            run = []
        if not run:
            room, dtype = ALONE, tensors[0].dtype
        run.append(pair)
        room -= nbytes
    yield run


def _joined(parts: Sequence[Any]) -> Any:
    """Tensors in their order in one, 1-D, or the one that there is; None if there are none."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    flats = [as_bytes(_flat(part)) for part in parts]
    return torch.cat(flats).view(parts[0].dtype)


def _room(parts: Sequence[Any]) -> Any:
    """Where to receive such tensors in one; None if there are none."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    nbytes = sum(part.nbytes for part in parts)
    return torch.empty(nbytes, dtype=torch.uint8).view(parts[0].dtype)


def _spread(wholes: Parts, wanted: Sequence[Parts]) -> None:
    """Put what was received in one for several calls where they want it, in their order."""
    if len(wanted) == 1:
        return
    memories = [memory_of(whole) for whole in wholes if whole is not None]
    ends = [0] * len(memories)  # of what the calls before have got, in bytes
    for takes in wanted:
        places = [each for each in takes if each is not None]
        for number, (memory, wants) in enumerate(zip(memories, places, strict=True)):
            begin, ends[number] = ends[number], ends[number] + wants.nbytes
            place = _place(wants)
            _fill(place, memory[begin : ends[number]])
            _put(place, wants)


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
    return (
        f"the root is rank {shown(root)}, and there are ranks 0 to {group.size - 1}: pass one of "
        "these"
    )


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
    text = ", ".join(map(shown, sizes[:_SHOWN]))
    return f"{text} ..." if len(sizes) > _SHOWN else text or "no"


def _at(root: int, tensor: Tensor, size: int) -> Parts:
    """The tensor in the root's place, None in the others'."""
    return [tensor if rank == root else None for rank in range(size)]


def _exchange(group: Group, gives: Parts, takes: Parts) -> None:
    """Send `gives[p]` to each rank p, and receive `takes[p]` from it; nothing for empty tensors."""
    outgoing, incoming = _ends(group, gives, takes)
    moved(_over(group), outgoing, incoming)
    _keep_own(group, outgoing, incoming)
    _deliver(incoming, takes)


def _ends(group: Group, gives: Parts, takes: Parts) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """What is to be sent, and where to receive, by rank: nothing is written before it was sent."""
    outgoing, incoming = _flats(gives), _places(takes)
    places = {peer: extent(place) for peer, place in incoming.items()}
    apart: dict[int, Tensor] = {}  # by the id of what is sent
    for flat in {id(each): each for each in outgoing.values()}.values():
        span = extent(flat)
        is_written = any(
            _share(place, span)
            for peer, place in places.items()
            # what a rank gives itself may be in its place already
            if peer != group.rank or place != span
        )
        apart[id(flat)] = copied(flat) if is_written else flat
    return {peer: apart[id(flat)] for peer, flat in outgoing.items()}, incoming


def _share(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two ranges of addresses have some in common."""
    return one[0] < other[1] and other[0] < one[1]


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
        memory_of(incoming[group.rank])[:] = memory_of(outgoing[group.rank])


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
    out: Tensor,
    parts: Sequence[Tensor],
    op: str,
) -> None:
    """Open a call, and reduce every rank's `parts[p]` on rank p, into its `out`, in chunks."""
    flats, place = [_flat(part) for part in parts], _place(out)
    span = extent(place)
    if any(_share(span, each) and each != span for each in map(extent, flats)):
        place = torch.empty_like(place)  # chunks of the result would be written before others go
    step = max(1, dense.SCRATCH // group.size // max(1, out.element_size()))
    is_large = max(flat.nbytes for flat in flats) > dense.SMALL
    grid = grid_of(group) if is_large else None
    if grid is not None and not _over(group).features.lockstep:
        _open(group, call, fields, None)
        for start in range(0, max(map(len, flats)), step):
            chunks = [flat[start : start + step] for flat in flats]
            _reduce_by_hosts(_over(group), grid, chunks, op, place[start : start + step])
        _put(place, out)
        return
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
                dense.reduce(slots, op, place[start : start + step], grid)
    _put(place, out)


def _reduce_by_hosts(
    group: Group, grid: Grid, parts: Sequence[Tensor], op: str, out: Tensor
) -> None:
    """Reduce every rank's `parts[p]` on rank p: on each host what its ranks have, then the rest.

    So a host's link carries a part once.
    """
    column = grid.column(group.rank)
    mine = [parts[rank] for rank in column]  # what this rank reduces of its host's
    given = {peer: [parts[rank] for rank in grid.column(peer)] for peer in grid.row}
    taken = {peer: _like(mine) if peer != group.rank else mine for peer in grid.row}
    swapped(group, given, taken).wait()
    totals = [dense.partial(each, op, out.dtype) for each in zip(*taken.values(), strict=True)]
    by_host = {peer: [total] for peer, total in zip(column, totals, strict=True)}
    own = by_host[group.rank]
    others = {peer: _like(own) if peer != group.rank else own for peer in column}
    swapped(group, by_host, others).wait()
    (hosts,) = zip(*others.values(), strict=True)
    dense.complete(dense.partial(hosts, op, own[0].dtype), op, group.size, out)


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for as many tensors of these kinds."""
    return [torch.empty_like(each) for each in tensors]


def _summand(group: Group, counts: Sequence[int]) -> int:
    """This rank's summand of a sum over all ranks, which is 0 if outputs have the sizes of their
    inputs, and else with a probability of 2^-56 at most.

    So all pairs are compared in the opening, and only after an error ranks tell their sizes.
    """
    weighted = zip(_weights(group.rank, group.size), counts, strict=False)
    return sum(weight * count for weight, count in weighted) % MODULUS


@functools.lru_cache(maxsize=64)  # calls ask again and again
def _weights(rank: int, size: int) -> list[int]:
    """By what a rank multiplies the counts that it sends to each, then those it takes from each.

    The ends of a pair have the same weight with opposite signs: equal counts add up to 0.
    """
    sends = [_weight(rank, peer) for peer in range(size)]
    takes = [-_weight(peer, rank) for peer in range(size)]
    return sends + takes


def _weight(source: int, target: int) -> int:
    """A number of 56 bits, as if drawn, and the same on every rank."""
    pair = struct.pack("<2q", source, target)
    return int.from_bytes(hashlib.blake2b(pair, digest_size=7).digest(), "little")


def _unequal(group: Group, counts: Sequence[int]) -> str:
    """The error of an output that is not as large as its input; collective, the same everywhere."""
    size = group.size
    form = struct.Struct(f"<{2 * size}q")
    said = group.all_gather_bytes(form.pack(*counts), form.unpack, "its sizes")
    for source, target in itertools.product(range(size), repeat=2):
        sends = said[source][target]
        takes = said[target][size + source]
        if sends != takes:
            return (
                f"rank {source} has {sends} elements for rank {target}, which has room for {takes} "
                "from it: split sizes must match"
            )
    raise AssertionError("sizes that all match add up to 0")


def _first(errors: Iterable[str | None]) -> str | None:
    """The first error that there is, or None."""
    return next(filter(None, errors), None)


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


def _said(*lists: Sequence[Tensor]) -> dict[str, object]:
    """The dtype of each list of tensors, and the sizes of all, as a fingerprint."""
    dtypes = [tensors[0].dtype for tensors in lists if tensors]
    if len({*dtypes}) < 2:
        dtypes = dtypes[:1]
    sizes = _text([tensor.numel() for tensors in lists for tensor in tensors])
    return {"dtype": _text(dtypes) if dtypes else None, "sizes": sizes}


def _text(values: Sequence[object]) -> str:
    """Values as a text that ranks can compare."""
    text = ", ".join(map(str, values))
    return summed_up(text, _SAID, f"{text[:20]} ... of {len(values)}")


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
    mark_overwritten(outs)
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
        write(own, flat.view(own.shape))
