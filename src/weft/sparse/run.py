"""The steps of a call, the same for every algorithm and for every collective of the family.

1. Who carries the rows: weft's wire, or verbs (`plain`).
2. `begun`: this rank's rows in their canonical form, and a header of them, or the rows themselves;
   all ranks tell all others their arguments and their headers, and know the same of the call.
3. Run: for a sparse all-reduce the algorithm that the rule names (`choose`). If a caller's function
   raised meanwhile, all ranks are told, and raise (`guard`).
4. Note what the call did (`record`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from .. import kernels
from ..base.errors import WeftError
from ..base.memory import Pool
from ..call.attempt import confess, preparing
from ..call.opening import opened
from ..group.group import Group
from ..schedules.hosts import hosts_of
from ..verbs.carrier import carried_by, verbs_of
from ..verbs.interface import Verbs
from ..verbs.posted import PostedVerbs
from . import plain
from .call import Call, dtype_of_partials, row_bytes
from .canonical import CanonicalRows
from .choose import Line, chosen
from .explanation import Explanation
from .guard import guarded
from .header import Header
from .look import look_at
from .rate import fitted, known_rate, learn
from .record import Record, note
from .registry import ALGORITHMS, ALONE, EAGER, PLAIN
from .request import Request, informed
from .rows import Rows
from .sizes import Sizes

Body = Callable[[CanonicalRows, Call], tuple[Line, Rows]]
"""Gets this rank's rows and the call; returns what ran, and the result."""

Agreed = tuple[Verbs, Mapping[str, str], Sequence[Header]]
"""What all ranks know of a call by verbs: these, the fingerprint, and the header of each rank."""


def begun(group: Group, request: Request, name: str) -> tuple[CanonicalRows, Call]:
    """Agree on a call, and exchange headers or rows; collective.

    Args:
        group: the ranks that take part.
        request: the arguments on this rank.
        name: of the call.

    Returns:
        This rank's rows, canonical if they are to be combined, which the caller releases; and the
        call.
    """
    with preparing(group, name):
        verbs = verbs_for(group, request)
        if verbs is not None:
            look_at(verbs, request)
        rows = _canonical(request, group.memory)
        header = _header(group, request, rows, verbs)
        body = header.pack()
    opening = opened(group, name, {"device": carried_by(verbs), **request.fields}, body)
    # from here on every rank knows the same of the call
    device = request.device
    said = opening.fields["device"]
    if said != carried_by(verbs):  # the listeners of `sparse_broadcast` had said nothing of it
        verbs, device = plain.heard(group, name, said)
    known: Header | None = header
    if not header.total:
        request = informed(request, opening, device)
        rows = _canonical(request, group.memory)
        known = None  # whose rows were of another kind
    unpack = partial(Header.unpack, moves=request.moves)
    headers = opening.read(unpack, request.rows.row_shape, request.dtype, own=known)
    return rows, _call_of(group, request, verbs, opening.fields, headers)


def verbs_for(group: Group, request: Request) -> Verbs | None:
    """The verbs that carry the rows of a call; None: the wire does, by its algorithms.

    Raises:
        WeftError: nobody carries them; or the algorithm that was asked for needs the wire.
    """
    if request.fields.get("device", "") is None:  # a listener: the opening will tell
        return None
    verbs = verbs_of(group, request.device)
    if verbs is None:
        by_plain = request.algorithm == PLAIN or not request.op.builtin
        return PostedVerbs(group, carried_by(None)) if by_plain else None
    if request.algorithm not in ("auto", PLAIN):
        raise WeftError(
            f"algorithm {request.algorithm} is for tensors that weft's wire carries, and these are "
            f"{verbs.name}: use auto, or {PLAIN}"
        )
    return verbs


def _canonical(request: Request, memory: Pool) -> CanonicalRows:
    """This rank's rows as an algorithm gets them; rows that only move stay in their order."""
    return CanonicalRows(request.rows, request.distinct, request.op, request.dtype, memory)


def _header(group: Group, request: Request, rows: CanonicalRows, verbs: Verbs | None) -> Header:
    """This rank's header; it has the rows themselves, if these fit, and no algorithm is asked for.

    Of ranks that all have few rows all do this: they have the same algorithm and row shape. Rows
    that verbs carry are never in it; nor does anybody ask where these lie, or where rows lie that
    only move.
    """
    row = row_bytes(request.rows.row_shape, request.dtype)
    may_carry = verbs is None and group.size > 1 and request.algorithm == "auto"
    carries = may_carry and Header.fits(len(rows), rows.indices.element_size(), row, group.size)
    header = Header(len(rows), request.highest, known_rate(group), int(kernels.is_compiled()))
    if carries:
        return header._replace(rows=Rows(rows.indices, rows.values))
    if request.moves or verbs is not None:
        return header
    return header.with_points(rows.indices, group.size, group.rank)


def _call_of(
    group: Group,
    request: Request,
    verbs: Verbs | None,
    fields: Mapping[str, str],
    headers: Sequence[Header],
) -> Call:
    """The call, of which all ranks know the same."""
    rows = request.rows
    op = request.op
    summed_as = dtype_of_partials(op, request.dtype, rows.values.dtype)
    header = Header.of_all(headers)
    counts = [one.total for one in headers]
    end = header.highest + 1
    sizes = Sizes(
        ranks=group.size,
        total=header.total,
        most=max(counts),
        fewest=min(counts),
        # without a height, assume the smallest tensor that holds all rows
        height=end if rows.height is None else rows.height,
        row=row_bytes(rows.row_shape, request.dtype),
        partial_row=row_bytes(rows.row_shape, summed_as),
        index=4 if end < 2**31 else 8,  # one above them fits, too
        end=end,
        compiled=bool(header.compiled),
        hosts=hosts_of(group),
    )
    came = [one.rows for one in headers if one.rows is not None]
    is_eager = len(came) == group.size  # else those that came are not merged here
    return Call(
        group,
        op,
        rows,
        request.dtype,
        summed_as,
        divisor=group.size if op.mean else 1,
        header=header,
        sizes=sizes if is_eager else fitted(sizes, header.rate),
        fields=fields,
        headers=headers,
        rows_of_all=came if is_eager else None,
        verbs=verbs,
    )


def performed(
    group: Group,
    request: Request,
    name: str,
    algorithm: Body,
    *,
    apart: bool = False,
    agreed: Agreed | None = None,
) -> tuple[Rows, Record]:
    """Begin a call, run it, and note what it did; collective.

    Args:
        group, request, name: see `begun`.
        algorithm: what it does.
        apart: whether ranks get different results.
        agreed: what all ranks know already: then no opening is needed.

    Returns:
        The result, of the caller's dtype, and the record.

    Raises:
        WeftError: a caller's function raised; the same text on every rank.
    """
    raised: list[BaseException] = []
    if not request.op.builtin:
        request = replace(request, op=guarded(request.op, raised))
    if agreed is None:
        rows, call = begun(group, request, name)
    else:
        rows = _canonical(request, group.memory)
        call = _call_of(group, request, *agreed)
    try:
        start = time.perf_counter()
        line, result = algorithm(rows, call)
        seconds = time.perf_counter() - start
        result = call.delivered(result)
        if not request.op.builtin:
            confess(group, f"the end of {name}", raised[0] if raised else None)
    finally:
        rows.release()
        raised.clear()
    union = len(result)
    if apart:  # nobody knows all rows of the result
        bound = call.sizes.bound_to_one
    else:
        bound = call.sizes.bound(union)
        if call.verbs is None:
            learn(call.group, call.sizes, union, seconds)
    record = Record.of(group, *line, len(rows), call.sizes.total, union, bound)
    note(group, record)
    return result, record


def reduced(group: Group, request: Request) -> tuple[Rows, Record]:
    """Run one sparse all-reduce; collective."""

    def algorithm(rows: CanonicalRows, call: Call) -> tuple[Line, Rows]:
        line = _line(request, call)
        if call.verbs is not None:
            return line, plain.summed(call.verbs, rows, call)[0]
        if line.algorithm == ALONE:
            return line, _alone(rows, call)
        if line.algorithm == EAGER:
            assert call.rows_of_all is not None
            return line, merge_eager(call.rows_of_all, call)
        return line, ALGORITHMS[line.algorithm](rows, call)

    return performed(group, request, "sparse_all_reduce", algorithm)


def sibling(call: Call, name: str) -> Line:
    """What runs in a call that has no choice but its own algorithm, of that name."""
    if call.verbs is not None:
        return plain.line_of(call.verbs, call)
    if call.rows_of_all is not None:
        return Line(EAGER)
    return Line(ALONE if call.group.size == 1 else name)


def explained(group: Group, request: Request) -> Explanation:
    """What `reduced` would do; collective."""
    rows, call = begun(group, request, "explain")
    rows.release()
    return Explanation.of(_line(request, call), call.sizes)


def _line(request: Request, call: Call) -> Line:
    """What runs."""
    if call.verbs is not None:
        return plain.line_of(call.verbs, call)
    return chosen(call.sizes, request.algorithm, is_eager=call.rows_of_all is not None)


def merge_eager(rows_of_all: Sequence[Rows], call: Call) -> Rows:
    """Merge the rows that came in the opening exchange; sends nothing."""
    index = call.wire_index
    union = kernels.union([rows.indices.to(index) for rows in rows_of_all])
    result = call.result_at(union.indices)
    sums = result.values
    if call.partial_dtype != call.dtype:
        sums = torch.empty(sums.shape, dtype=call.partial_dtype)
    for slots, rows in zip(union.slots, rows_of_all, strict=True):
        kernels.combine(sums, slots, rows.values, call.op)
    call.finish(sums, result.values)
    return result


def _alone(rows: CanonicalRows, call: Call) -> Rows:
    result = call.result_at(rows.indices)
    result.values.copy_(rows.values)
    return result
