"""The steps of a call, the same for every algorithm and for every collective of the family.

1. Begin (`begin`): every rank states its arguments, and a header of its rows or the rows.
2. Run a schedule: for a sparse all-reduce the algorithm that the rule names (`choose`).
3. If a caller's function may have raised, tell each other (`settle`).
4. Put the result where the caller wants it (`handed_out`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .. import kernels
from ..base.devices import current, on_host
from ..base.errors import WeftError
from ..base.tensors import dtype_in, shape_in
from ..call.attempt import confess
from ..call.fingerprint import UNKNOWN
from ..call.opening import Opening, is_direct, opened
from ..group.group import Group
from .call import Call, row_bytes
from .choose import chosen, is_eager
from .explanation import Explanation, explanation
from .header import Header, combined, described
from .local_rows import LocalRows
from .rate import GUESS, learn, stated, suited
from .record import note
from .registry import ALONE, EAGER, find
from .request import Request, travelling
from .rows import Rows
from .sizes import Sizes


@dataclass(frozen=True, slots=True)
class Done:
    """A call that has ended well.

    Attributes:
        algorithm: what ran.
        rows: the result.
        sizes: of the call.
        bound: bytes that the average rank must receive, an index counted as 4.
        own: number of this rank's rows.
        below: see `Call.below`.
    """

    algorithm: str
    rows: Rows
    sizes: Sizes
    bound: float
    own: int
    below: Sequence[int]

    def note(self, group: Group, **more: Any) -> None:
        """Store the figures of the call, whose turn it is."""
        note(
            group,
            self.algorithm,
            bound=self.bound,
            rows=self.own,
            total=self.sizes.total,
            union=len(self.rows),
            **more,
        )


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that all ranks agreed on.

    Attributes:
        call: what every rank knows of the call.
        own: this rank's rows, canonical if they are to be combined; valid inside `begin`.
        headers: of each rank; above 16 ranks one combined header.
        rows_of_all: of each rank, if the opening exchange carried all of them.
    """

    call: Call
    own: LocalRows
    headers: list[Header]
    rows_of_all: list[Rows] | None


@contextmanager
def begin(
    group: Group, request: Request, name: str, *, moves: bool = False, looks: bool = False
) -> Iterator[Begun]:
    """Agree on a call, and exchange headers or rows; collective.

    Args:
        group: the ranks that take part.
        request: the arguments on this rank.
        name: of the call.
        moves: rows are neither sorted nor combined; a rank without rows need not know their dtype
            and shape.
        looks: exchange headers only, even if the rows would fit in the opening exchange.
    """
    over = group.on(request.rows.values.device)
    if not on_host(request.rows.indices):
        # `looked_at` left this to us: weft's stream is current only now
        if moves:
            request.look()
        else:
            request.sort()
    request.fields.setdefault("device", over.route)  # None: this rank learns it from others
    call = _call_of(request, over)
    own = _rows_of(request, call, moves=moves)
    direct = is_direct(group)
    may_be_eager = not looks and _may_be_eager(group, request, moves=moves)
    try:
        # all ranks tell all others their arguments, and a header
        header = _header(group, request, call, own, eager=may_be_eager, moves=moves)
        with opened(group, name, request.fields, request.error, header.pack(), combined) as opening:
            request.agreed = opening.fields
            _learn(opening, request, call, group, moves=moves)
            own.row_shape = call.row_shape

            # from here on every rank knows the same of the call
            headers = _read_headers(opening, request, call, header, direct=direct, moves=moves)
            distributions = headers
            if not moves and any(header.rows is None for header in headers):
                # some ranks' rows did not come, so those that came are not merged here
                distributions = described(headers)
            call.header = Header.together(distributions)
            if direct:
                call.counts = [header.total for header in headers]
            call.sizes = _sizes(call)
            assert call.given is not None
            staying = not on_host(call.given.values)
            rows_of_all = None
            if may_be_eager and not staying and is_eager(call.sizes, call.index.itemsize):
                rows_of_all = _rows_of_all(group, headers)
            elif group.size > 1:
                call.sizes = suited(call.sizes, call.group, call.header.rate, staying=staying)
            yield Begun(call, own, headers, rows_of_all)
    finally:
        own.release()


def _may_be_eager(group: Group, request: Request, *, moves: bool) -> bool:
    """Whether this rank's rows may travel in the opening exchange, if they fit."""
    if not is_direct(group) or group.size == 1 or request.error is not None:
        return False
    if not on_host(request.rows.values):  # which never pass through the host
        return False
    return moves or request.algorithm == "auto"


def _call_of(request: Request, over: Group) -> Call:
    """The call as far as this rank knows it before the others have told theirs."""
    rows = request.rows
    return Call(
        over,
        request.op,
        index=rows.indices.dtype,
        dtype=request.dtype,
        row_shape=tuple(rows.row_shape),
        height=rows.height,
        wide=request.wide,
        half=request.half,
        out=request.out,
        given=rows,
        marks=request.marks,
    )


def _rows_of(request: Request, call: Call, *, moves: bool) -> LocalRows:
    """This rank's rows, combined when they are read, unless they only move."""
    rows = request.rows
    if moves:
        distinct = kernels.Distinct(rows.indices.contiguous(), None, None)
    else:
        distinct = request.distinct
    points = None if request.survey is None else request.survey.points
    return LocalRows(rows, distinct, call.op, call.dtype, call.group.memory, points)


def _header(
    group: Group, request: Request, call: Call, own: LocalRows, *, eager: bool, moves: bool
) -> Header:
    """This rank's header; with `eager` it has the rows themselves, if they fit."""
    row = row_bytes(call.row_shape, call.dtype)
    carries = eager and Header.fits(len(own), own.indices.element_size(), row)
    # an error of this rank may be that WEFT_LINK says no rate
    rate = stated(call.group) if request.error is None else GUESS
    return Header.of(
        own.indices,
        group.rank_in_errors(group.rank),
        capacity=request.capacity,
        fallible=request.fallible,
        rate=rate,
        highest=request.highest if moves else None,
        values=own.values if carries else None,
        survey=request.survey,
    )


def _read_headers(
    opening: Opening, request: Request, call: Call, own: Header, *, direct: bool, moves: bool
) -> list[Header]:
    """The headers that came: of each rank or, where they are combined, one of all.

    Raises:
        WireError: a rank sent another rank's header, or none.
    """
    unpack = partial(
        Header.unpack,
        moves=moves,
        height=call.height,
        counted=None if direct else own,
        of_one=direct,
    )
    known = own if direct and own.total else None  # without rows it may not know their shape
    headers = opening.read(unpack, call.row_shape, call.dtype, own=known)
    if direct:
        opening.check_whose([[header.tightest] for header in headers])
    return headers


def _rows_of_all(group: Group, headers: Sequence[Header]) -> list[Rows]:
    """The rows that came in the opening exchange, of each rank.

    Raises:
        WireError: a rank sent its header without them.
    """
    rows_of_all = []
    for rank, header in enumerate(headers):
        if header.rows is None:
            name = group.rank_in_errors(rank)
            raise group.fail(rank, f"rank {name} did not send its {header.total} rows")
        rows_of_all.append(header.rows)
    return rows_of_all


def _learn(opening: Opening, request: Request, call: Call, group: Group, *, moves: bool) -> None:
    """Copy the agreed fields that this rank did not know into the call."""
    if opening.fields["row shape"] != UNKNOWN:
        call.row_shape = opening.field("row shape", shape_in)
    if moves:
        call.index = opening.field("index dtype", dtype_in)
        dtype = opening.field("value dtype", dtype_in)
        call.dtype = travelling(dtype, request.rounded)
        call.wide = None if call.dtype == dtype else dtype
        height = opening.fields["height"]
        call.height = opening.field("height", int) if height.isdigit() else None
    if request.fields["device"] is None:
        call.given = _nothing_on(opening.field("device", _kind_in))
        call.group = group.on(call.given.values.device)


def _kind_in(text: str) -> str:
    """The kind of device in a field. Raises ValueError or RuntimeError if it is none."""
    kind, *_ = text.split()
    return torch.device(kind).type


def _nothing_on(kind: str) -> Rows:
    """No rows, on this rank's device of the kind, such as "cuda".

    Raises:
        RuntimeError: the rank uses no such device.
    """
    device = torch.device("cpu") if kind == "cpu" else current()
    if device.type != kind:
        raise RuntimeError(f"rows come on {kind}, of which this rank uses none: set a device first")
    nothing = torch.empty(0, device=device)
    return Rows(nothing, nothing)


def _sizes(call: Call) -> Sizes:
    """The sizes of a call, from the combined header."""
    header = call.header
    return Sizes(
        ranks=call.group.size,
        total=header.total,
        most=header.most,
        fewest=header.fewest,
        # without a height, assume the smallest tensor that holds all rows
        height=header.highest + 1 if call.height is None else call.height,
        row=row_bytes(call.row_shape, call.dtype),
        partial=row_bytes(call.row_shape, call.partial),
        index=4 if header.highest < 2**31 else 8,
        places=header.highest + 1,
        in_order=not call.op.builtin,
        has_neutral=call.op.neutral_of is not None,
    )


def performed(
    group: Group,
    request: Request,
    name: str,
    schedule: Callable[[Begun], tuple[str, Rows]],
    *,
    moves: bool = False,
    apart: bool = False,
) -> Done:
    """Open a call, run its schedule, raise late errors, and hand out the result; collective.

    Args:
        group, request, name, moves: see `begin`.
        schedule: runs in the open call; returns the name of what ran, and the result.
        apart: whether ranks get different results.
    """
    with begin(group, request, name, moves=moves) as begun:
        began = time.perf_counter()
        algorithm, result = schedule(begun)
        seconds = time.perf_counter() - began
        call = begun.call
    settle(group, name, call, len(result) if apart else None)
    if not apart and len(result) > call.header.capacity:
        raise WeftError(
            f"rank {call.header.tightest}: {too_small(call.header.capacity, len(result))}"
        )
    if apart:  # nobody knows all rows of the result
        bound = call.sizes.bound_to_one
    else:
        bound = call.sizes.bound(len(result))
        learn(call.group, call.sizes, len(result), seconds)
    result = handed_out(call.widened(result), call)
    return Done(algorithm, result, call.sizes, bound, len(begun.own), call.below)


def reduced(group: Group, request: Request) -> Done:
    """Run one sparse all-reduce; collective."""

    def schedule(begun: Begun) -> tuple[str, Rows]:
        if begun.rows_of_all is not None:
            return EAGER, merge_eager(begun.rows_of_all, begun.call)
        call = begun.call
        name = ALONE
        if call.sizes.ranks > 1:
            name, _ = chosen(call.sizes, request.algorithm, _carrier(call.group))
        run = _alone if name == ALONE else find(name).run
        return name, run(begun.own, call)

    return performed(group, request, "sparse_all_reduce", schedule)


def explained(group: Group, request: Request) -> Explanation:
    """Say what `reduced` would do; collective."""
    with begin(group, request, "explain", looks=True) as begun:
        call = begun.call
    index = request.rows.indices.dtype
    found = explanation(call.sizes, request.algorithm, index.itemsize, _carrier(call.group))
    return replace(found, device=call.group.route)


def _carrier(over: Group) -> str:
    """What carries the tensors of a group, for errors: "wire 'rounds'", "cuda (nccl)"."""
    return f"wire {over.wire_name!r}" if over.wire_name else over.route


def handed_out(result: Rows, call: Call) -> Rows:
    """The result where the caller wants it."""
    if call.target is None:
        return result
    call.target.indices.copy_(result.indices)
    call.target.values.copy_(result.values)
    return call.target


def merge_eager(rows_of_all: list[Rows], call: Call) -> Rows:
    """Merge the rows that came in the opening exchange; sends nothing."""
    union = kernels.union([rows.indices.to(call.wire_index) for rows in rows_of_all])
    result = call.result_at(union.indices)
    sums = result.values
    if call.partial != call.dtype:
        sums = torch.empty(sums.shape, dtype=call.partial)
    for slots, rows in zip(union.slots, rows_of_all, strict=True):
        kernels.combine(sums, slots, rows.values, call.op)
    call.finish(sums, result.values)
    return result


def _alone(rows: LocalRows, call: Call) -> Rows:
    result = call.result_at(rows.indices)
    result.values.copy_(rows.values)
    return result


def settle(group: Group, name: str, call: Call, count: int | None = None) -> None:
    """Tell each other what went wrong after the opening, if anything may have; collective.

    Args:
        group, name, call: the call that ends.
        count: rows of the result, if ranks get different results: then `out` may be too small on
            one rank.

    Raises:
        WeftError: a caller's function raised, or `out` is too small; the same text on every rank.
    """
    if not (call.header.fallible or (count is not None and call.header.limited)):
        return
    lacking = None
    if count is not None and call.out is not None and not callable(call.out):
        room = call.out[0].numel()
        lacking = too_small(room, count) if room < count else None
    confess(group, f"the end of {name}", call.trouble.error, lacking)


def too_small(room: int, count: int) -> str:
    """The error of an `out` that holds fewer rows than the result has."""
    return (
        f"out holds {room} rows, the result has {count}: pass larger buffers, or a function that "
        "allocates them"
    )
