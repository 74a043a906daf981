"""The steps of a call, the same for every algorithm.

Agree on what all ranks were asked, each stating a header of its rows or the rows themselves;
choose the algorithm from the combined header; run its schedule; where a caller's function took
part, tell each other whether it raised; hand out the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..agree import Agreement, agree, is_direct
from ..errors import WeftError
from ..rows import Rows
from ..wire.base import Wire
from ..wire.memory import Lease
from .call import Call, row_bytes, shape_in
from .choice import ALONE, EAGER, Explanation, choose, is_eager, packs, with_link
from .choice import explained as explained_choice
from .cost import Load
from .header import Header, ListInHeader, RowsInHeader, of_all
from .link import is_known as link_is_known
from .link import link_of
from .own import OwnRows
from .registry import Algorithm, find
from .request import Request

__all__ = [
    "Done",
    "explained",
    "handed_out",
    "merge_eager",
    "opened",
    "reduced",
    "settle",
    "too_small",
]


_Said = Header | RowsInHeader | ListInHeader


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a call.

    Attributes:
        algorithm: what ran.
        rows: the result.
        load: the sizes of the call; `load.union` is exact here.
        own: rows of this rank.
    """

    algorithm: str
    rows: Rows
    load: Load
    own: int


@dataclass(frozen=True, slots=True)
class Opened:
    """A call that all ranks agreed on.

    Attributes:
        call: what every rank knows of it.
        own: this rank's rows; valid inside of `opened`.
        everyone: the rows of all ranks, if all of them came in the opening exchange.
    """

    call: Call
    own: OwnRows
    everyone: list[RowsInHeader] | None

    @property
    def mine(self) -> Rows:
        """This rank's rows, canonical; valid inside of `opened`."""
        values = self.own.values.view(len(self.own.indices), *self.call.row_shape)
        return Rows(self.own.indices, values, self.call.height)


@contextmanager
def opened(wire: Wire, request: Request, name: str, *, lists: bool = False) -> Iterator[Opened]:
    """Agree on a call and look at everybody's rows; collective.

    Where `lists`, the call is one that an algorithm of the registry will serve, whose index lists
    a rank may send at once.
    """
    given, count = request.rows, request.distinct.indices.numel()
    call = Call(
        wire,
        request.op,
        index=given.indices.dtype,
        dtype=request.dtype,
        row_shape=tuple(given.row_shape),
        height=given.height,
        wide=request.wide,
        out=request.out,
        given=given,
    )
    eager = request.algorithm == "auto" and is_direct(wire) and wire.size > 1
    row = row_bytes(call.row_shape, call.dtype)
    eager = eager and RowsInHeader.fit(count, given.indices.element_size(), row)
    own = OwnRows.asked(request, call.op, wire.memory)
    agreement = None
    leases: list[Lease] = []
    try:
        agreement = _open(wire, request, name, own, eager=eager, lists=lists)
        said = _said(agreement, call)
        load = _load(wire, request, said, call, own, leases)
        everyone = None
        if eager and is_eager(wire, load, given.indices.dtype):
            everyone = [one for one in said if isinstance(one, RowsInHeader)]
        elif wire.size > 1:
            call.load = with_link(wire, load)
        yield Opened(call, own, everyone)
    finally:
        own.release()
        for lease in leases:
            lease.release()
        if agreement is not None:
            agreement.release()


def reduced(wire: Wire, request: Request) -> Done:
    """Run one call; collective."""
    with opened(wire, request, "sparse_all_reduce", lists=True) as opening:
        call = opening.call
        if opening.everyone is not None:
            name, result = EAGER, merge_eager(opening.everyone, call)
        else:
            name = choose(wire, call.load, request.algorithm)
            _note(wire, request, name)
            result = _alone(opening.mine, call) if name == ALONE else _run(name, opening)
    settle(wire, "sparse_all_reduce", call)
    if len(result) > call.header.capacity:
        raise WeftError(
            f"rank {call.header.tightest}: {too_small(call.header.capacity, len(result))}"
        )
    load, own = call.load.with_union(len(result)), len(request.distinct.indices)
    return Done(name, handed_out(call.widened(result), call), load, own)


_LATELY = "what auto chose lately"
_KINDS = 64  # of calls of which that is remembered


def _run(name: str, opening: Opened) -> Rows:
    """Run that algorithm's schedule."""
    found, call = find(name), opening.call
    if call.union is not None and not found.lists:  # then nobody has said where its rows lie
        full = Header.together(
            [Header.of(run, rank, digest=False) for rank, run in sorted(call.lists.items())]
        )
        call.header = replace(call.header, points=full.points, weights=full.weights)
    if found.uncombined is not None:
        return found.uncombined(opening.own, call)
    return found.run(opening.mine, call)


def _kind(rows: Rows) -> tuple[object, ...]:
    """What calls have in common that are likely to be served alike."""
    values = rows.values
    return values.dtype, values.shape[1:], rows.height, len(rows).bit_length()


def _note(wire: Wire, request: Request, name: str) -> None:
    """Remember what `auto` chose for rows like these."""
    lately: dict[tuple[object, ...], str] = wire.kept.setdefault(_LATELY, {})
    if request.algorithm == "auto":
        if len(lately) >= _KINDS:
            lately.clear()
        lately[_kind(request.rows)] = name


def _expected(wire: Wire, request: Request) -> Algorithm | None:
    """The algorithm that is asked for, or was taken last time for rows like these.

    This rank's guess: on that no other rank may depend.
    """
    name = request.algorithm
    if name == "auto":
        name = wire.kept.get(_LATELY, {}).get(_kind(request.rows), ALONE)
    return None if name == ALONE else find(name)


def handed_out(result: Rows, call: Call) -> Rows:
    """The result where the caller wants it."""
    if call.target is None:
        return result
    call.target.indices.copy_(result.indices)
    call.target.values.copy_(result.values)
    return call.target


def explained(wire: Wire, request: Request) -> Explanation:
    """Say what `reduced` would do; collective."""
    shape = tuple(request.rows.row_shape)
    call = Call(wire, request.op, shape, dtype=request.dtype, wide=request.wide)
    agreement = _open(wire, request, "explain")
    try:
        load = _load(wire, request, _said(agreement, call), call)
    finally:
        agreement.release()
    if wire.size > 1:
        load = with_link(wire, load)
    index = request.rows.indices.dtype
    eager = request.algorithm == "auto" and wire.size > 1 and is_eager(wire, load, index)
    return explained_choice(wire, load, request.algorithm, index, eager=eager)


def _open(
    wire: Wire,
    request: Request,
    name: str,
    own: OwnRows | None = None,
    *,
    eager: bool = False,
    lists: bool = False,
) -> Agreement:
    """Exchange headers, or where `eager` the rows themselves; collective.

    Where `lists`, an index list takes the place of a header if it is going to be asked for. What a
    statement holds it says itself, so ranks need not do alike. Meanwhile the duplicates among the
    `own` rows are combined, if that is to be expected.
    """
    indices, capacity, fallible = request.distinct.indices, request.capacity, request.fallible
    expected, body = _expected(wire, request), None
    if eager and own is not None:
        body = RowsInHeader(indices, own.values, capacity, fallible).pack()
    elif lists and expected is not None and expected.lists and _may_list(wire):
        body = ListInHeader.pack(indices, wire.memory, capacity, fallible)
    if body is None:
        body = Header.of(indices, wire.rank, capacity=capacity, fallible=fallible).pack()

    def combine(lower: Tensor, upper: Tensor) -> Tensor:
        return Header.unpack(lower).combine(Header.unpack(upper)).pack()

    def meanwhile() -> None:
        if own is not None and (expected is None or expected.uncombined is None):
            _ = own.values

    agreement = agree(wire, name, request.fields, request.error, body, combine, meanwhile=meanwhile)
    request.agreed = agreement.fields
    return agreement


def _may_list(wire: Wire) -> bool:
    """Whether index lists may come in the opening: packed, and each rank hears every other's."""
    return wire.size > 1 and is_direct(wire) and link_is_known(wire) and packs(link_of(wire))


def _said(agreement: Agreement, call: Call) -> list[_Said]:
    """What each rank said, or all together; also fills in what this rank alone did not know."""
    shape = agreement.fields["row shape"]
    call.row_shape = call.row_shape if shape == "?" else shape_in(shape)
    return [_unpacked(body, call) for body in agreement.bodies]


def _unpacked(body: Tensor, call: Call) -> _Said:
    if RowsInHeader.are_in(body):
        return RowsInHeader.unpack(body, call.row_shape, call.dtype)
    return ListInHeader.unpack(body) if ListInHeader.is_in(body) else Header.unpack(body)


def _load(
    wire: Wire,
    request: Request,
    said: Sequence[_Said],
    call: Call,
    own: OwnRows | None = None,
    leases: list[Lease] | None = None,
) -> Load:
    """What all ranks together said.

    Args:
        wire, request, call: of the call; here it learns what came of its opening.
        said: by each rank.
        own: this rank's rows.
        leases: to which is added the memory of index lists.
    """
    height, index = request.rows.height, 4 if max(one.highest for one in said) < 2**31 else 8
    listed = [one for one in said if not isinstance(one, Header)]
    if any(isinstance(one, ListInHeader) for one in said):
        assert own is not None and leases is not None
        _take_lists(wire, said, call, own, torch.int32 if index == 4 else torch.int64, leases)
    if len(listed) == len(said):
        header = of_all(listed)
    else:
        header = Header.together(
            [
                one if isinstance(one, Header) else _described(one, rank, call)
                for rank, one in enumerate(said)
            ]
        )
    call.header = header
    union, identical = header.union(height), header.identical
    if len(call.lists) == wire.size:
        call.union = kernels.union([call.lists[rank] for rank in range(wire.size)])
        union = len(call.union.indices)
        identical = header.total == wire.size * union
    call.load = Load(
        ranks=wire.size,
        total=header.total,
        most=header.most,
        fewest=header.fewest,
        union=union,
        # where nobody knows more, a tensor that has all rows is as good as any
        height=header.highest + 1 if height is None else height,
        row=row_bytes(call.row_shape, call.dtype),
        partial=row_bytes(call.row_shape, call.partial),
        index=index,
        places=header.highest + 1,
        in_order=not call.op.builtin,
        identical=identical,
    )
    return call.load


def _take_lists(
    wire: Wire,
    said: Sequence[_Said],
    call: Call,
    own: OwnRows,
    index: torch.dtype,
    leases: list[Lease],
) -> None:
    """Read the index lists that came."""

    def room(nbytes: int) -> Tensor:
        leases.append(wire.lease(nbytes))
        return leases[-1].tensor

    for rank, one in enumerate(said):
        if isinstance(one, RowsInHeader):
            call.lists[rank] = one.indices.to(index)
        elif isinstance(one, ListInHeader):
            mine = rank == wire.rank
            call.lists[rank] = own.indices.to(index) if mine else one.indices(index, room)


def _described(one: RowsInHeader | ListInHeader, rank: int, call: Call) -> Header:
    """The header that the rank would have sent."""
    if isinstance(one, RowsInHeader):
        return one.described(rank)
    return Header.of(call.lists[rank], rank, capacity=one.capacity, fallible=one.fallible)


def merge_eager(everyone: list[RowsInHeader], call: Call) -> Rows:
    """Merge the rows that came in the opening exchange."""
    union = kernels.union([rows.indices.to(call.wire_index) for rows in everyone])
    result = call.result(union.indices.numel())
    result.indices.copy_(union.indices)
    sums = result.values
    if call.partial != call.dtype:
        sums = torch.empty(sums.shape, dtype=call.partial)
    for slots, rows in zip(union.slots, everyone, strict=True):
        kernels.combine(sums, slots, rows.values, call.op)
    call.finish(sums, result.values)
    return result


def _alone(mine: Rows, call: Call) -> Rows:
    result = call.result(len(mine))
    result.indices.copy_(mine.indices)
    result.values.copy_(mine.values)
    return result


def settle(wire: Wire, name: str, call: Call, count: int | None = None) -> None:
    """Tell each other what went wrong since the opening, if anything may have; raises alike.

    That is what a caller's function raised. With a `count`, the rows of a result that only this
    rank has, also that it does not fit.
    """
    if not (call.header.fallible or (count is not None and call.header.limited)):
        return
    lacking = None
    if count is not None and isinstance(call.out, tuple):
        room = call.out[0].numel()
        lacking = too_small(room, count) if room < count else None
    confess(wire, name, call.trouble, lacking)


def confess(wire: Wire, name: str, trouble: Exception | None, lacking: str | None = None) -> None:
    """Tell each other what a caller's function raised, or else what is lacking; raises alike."""
    sentence = lacking if trouble is None else f"{type(trouble).__name__}: {trouble}"
    nothing = torch.empty(0, dtype=torch.uint8)
    try:
        agree(wire, f"the end of {name}", {}, sentence, nothing, lambda a, b: a).release()
    except WeftError as error:
        raise error from trouble


def too_small(room: int, count: int) -> str:
    """What is said of an `out` that is."""
    return (
        f"out holds {room} rows, the result has {count}: pass larger buffers, or a function that "
        "allocates them"
    )
