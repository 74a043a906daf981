"""The steps of a call, the same for every algorithm.

Agree on what all ranks were asked, each stating a header of its rows or the rows themselves;
choose the algorithm from the combined header; run its schedule; where a caller's function took
part, tell each other whether it raised; hand out the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..agree import Agreement, agree, confess, is_direct
from ..errors import WeftError
from ..rows import Rows
from ..wire.base import Wire
from .call import Call, row_bytes, shape_in
from .choice import ALONE, EAGER, Explanation, choose, is_eager, with_link
from .choice import explained as explained_choice
from .cost import Load
from .header import Header, RowsInHeader, of_all
from .local_rows import LocalRows
from .registry import find
from .request import Request

_Said = Header | RowsInHeader


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
        own: this rank's rows, canonical; valid inside of `opened`.
        everyone: the rows of all ranks, if all of them came in the opening exchange.
    """

    call: Call
    own: LocalRows
    everyone: list[RowsInHeader] | None


@contextmanager
def opened(wire: Wire, request: Request, name: str) -> Iterator[Opened]:
    """Agree on a call and look at everybody's rows; collective."""
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
    eager = eager and request.error is None
    row = row_bytes(call.row_shape, call.dtype)
    eager = eager and RowsInHeader.fit(count, given.indices.element_size(), row)
    own = LocalRows(given, request.distinct, call.op, call.dtype, wire.memory)
    agreement = None
    try:
        agreement = _open(wire, request, name, own if eager else None)
        said = _said(agreement, call)
        own.row_shape = call.row_shape
        load = _load(wire, request, said, call)
        everyone = None
        if eager and is_eager(load, given.indices.dtype):
            everyone = [one for one in said if isinstance(one, RowsInHeader)]
        elif wire.size > 1:
            call.load = with_link(wire, load)
        yield Opened(call, own, everyone)
    finally:
        own.release()
        if agreement is not None:
            agreement.release()


def reduced(wire: Wire, request: Request) -> Done:
    """Run one call; collective."""
    with opened(wire, request, "sparse_all_reduce") as opening:
        call = opening.call
        if opening.everyone is not None:
            name, result = EAGER, merge_eager(opening.everyone, call)
        else:
            name = choose(call.load, request.algorithm)
            run = _alone if name == ALONE else find(name).run
            result = run(opening.own, call)
    settle(wire, "sparse_all_reduce", call)
    if len(result) > call.header.capacity:
        raise WeftError(
            f"rank {call.header.tightest}: {too_small(call.header.capacity, len(result))}"
        )
    load, own = call.load.with_union(len(result)), len(request.distinct.indices)
    return Done(name, handed_out(call.widened(result), call), load, own)


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
    return explained_choice(load, request.algorithm, request.rows.indices.dtype)


def _open(wire: Wire, request: Request, name: str, rows: LocalRows | None = None) -> Agreement:
    """Exchange headers, or in place of this rank's its rows, where they are given; collective."""
    indices, capacity, fallible = request.distinct.indices, request.capacity, request.fallible
    if rows is None:
        body = Header.of(indices, wire.rank, capacity=capacity, fallible=fallible).pack()
    else:
        body = RowsInHeader(indices, rows.values, capacity, fallible).pack()

    def combine(lower: Tensor, upper: Tensor) -> Tensor:
        return Header.unpack(lower).combine(Header.unpack(upper)).pack()

    agreement = agree(wire, name, request.fields, request.error, body, combine)
    request.agreed = agreement.fields
    return agreement


def _said(agreement: Agreement, call: Call) -> list[_Said]:
    """What each rank said, or all together; also fills in what this rank alone did not know."""
    shape = agreement.fields["row shape"]
    call.row_shape = call.row_shape if shape == "?" else shape_in(shape)
    return [_unpacked(body, call) for body in agreement.bodies]


def _unpacked(body: Tensor, call: Call) -> _Said:
    if RowsInHeader.are_in(body):
        return RowsInHeader.unpack(body, call.row_shape, call.dtype)
    return Header.unpack(body)


def _load(wire: Wire, request: Request, said: Sequence[_Said], call: Call) -> Load:
    """What all ranks together said; `call` learns it too."""
    height, index = request.rows.height, 4 if max(one.highest for one in said) < 2**31 else 8
    rows = [one for one in said if isinstance(one, RowsInHeader)]
    if len(rows) == len(said):
        header = of_all(rows)
    else:
        header = Header.together(
            [
                one if isinstance(one, Header) else one.described(rank)
                for rank, one in enumerate(said)
            ]
        )
    call.header = header
    call.load = Load(
        ranks=wire.size,
        total=header.total,
        most=header.most,
        fewest=header.fewest,
        union=header.union(height),
        # where nobody knows more, a tensor that has all rows is as good as any
        height=header.highest + 1 if height is None else height,
        row=row_bytes(call.row_shape, call.dtype),
        partial=row_bytes(call.row_shape, call.partial),
        index=index,
        places=header.highest + 1,
        in_order=not call.op.builtin,
        identical=header.identical,
    )
    return call.load


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


def _alone(rows: LocalRows, call: Call) -> Rows:
    result = call.result(len(rows))
    result.indices.copy_(rows.indices)
    result.values.copy_(rows.values)
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
    confess(wire, f"the end of {name}", call.trouble, lacking)


def too_small(room: int, count: int) -> str:
    """What is said of an `out` that is."""
    return (
        f"out holds {room} rows, the result has {count}: pass larger buffers, or a function that "
        "allocates them"
    )
