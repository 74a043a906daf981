"""The steps of a call, the same for every algorithm and for every collective of the family.

1. `begun`: this rank's rows in their canonical form, and a header of them, or the rows themselves;
   all ranks tell all others their arguments and their headers, and know the same of the call.
2. Run: for a sparse all-reduce the algorithm that the rule names (`choose`).
3. If the op is a caller's function, which may have raised, tell each other (`confess`).
4. Note what the call did (`record`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from .. import kernels
from ..base.devices import current, on_host
from ..base.errors import check
from ..base.memory import Pool
from ..base.tensors import dtype_in, shape_in
from ..call.attempt import confess, preparing
from ..call.fingerprint import UNKNOWN
from ..call.opening import Opening, opened
from ..group.group import Group
from ..schedules.hosts import hosts_of
from .call import Call, partial_dtype, row_bytes
from .canonical import CanonicalRows
from .choose import Line, chosen, is_eager
from .explanation import Explanation
from .guard import guarded
from .header import Header, all_with_points
from .rate import fitted, known_rate, learn
from .record import Record, note
from .registry import ALGORITHMS, ALONE, EAGER
from .request import Request, travelling
from .rows import Rows
from .sizes import Sizes


def begun(
    group: Group, request: Request, name: str, *, looks: bool = False
) -> tuple[CanonicalRows, Call]:
    """Agree on a call, and exchange headers or rows; collective.

    Args:
        group: the ranks that take part.
        request: the arguments on this rank.
        name: of the call.
        looks: exchange headers only, even if the rows would fit in the opening exchange.

    Returns:
        This rank's rows, canonical if they are to be combined, which the caller releases; and the
        call.
    """
    on_device = group.on(request.device)
    may_be_eager = not looks and _may_be_eager(group, request)
    with preparing(group, name):
        check(on_device.refusal)
        if not on_host(request.rows.indices):
            request.look()  # which waited until weft's stream is current
        rows = _canonical(request, on_device.memory)
        header = _header(group, on_device, request, rows, eager=may_be_eager)
        body = header.pack()
    opening = opened(group, name, {"device": on_device.route, **request.fields}, body)
    # from here on every rank knows the same of the call
    known: Header | None = header
    if not header.total:
        request = _informed(request, opening)
        on_device = group.on(request.device)
        rows = _canonical(request, on_device.memory)
        known = None  # whose rows were of another kind
    unpack = partial(Header.unpack, moves=request.moves)
    headers = opening.read(unpack, tuple(request.rows.row_shape), request.dtype, own=known)
    return rows, _call_of(on_device, request, opening.fields, headers, may_be_eager=may_be_eager)


def _canonical(request: Request, memory: Pool) -> CanonicalRows:
    """This rank's rows as an algorithm gets them; rows that only move stay in their order."""
    rows = request.rows
    distinct = request.distinct
    if request.moves or not len(rows):
        distinct = kernels.Distinct(rows.indices.contiguous(), None, None)
    return CanonicalRows(rows, distinct, request.op, request.dtype, memory)


def _may_be_eager(group: Group, request: Request) -> bool:
    """Whether this rank's rows may travel in the opening exchange, if they fit."""
    if group.size == 1:
        return False
    if not on_host(request.rows.values):  # which never pass through the host
        return False
    return request.moves or request.algorithm == "auto"


def _header(
    group: Group, on_device: Group, request: Request, rows: CanonicalRows, *, eager: bool
) -> Header:
    """This rank's header; with `eager` it has the rows themselves, if they fit."""
    row = row_bytes(tuple(request.rows.row_shape), request.dtype)
    carries = eager and Header.fits(len(rows), rows.indices.element_size(), row, group.size)
    header = Header.of(
        rows.indices,
        rate=known_rate(on_device),
        highest=request.highest if request.moves else None,
        values=rows.values if carries else None,
        survey=request.survey,
    )
    return header.of_one_of(group.size, group.rank)


def _informed(request: Request, opening: Opening) -> Request:
    """The request of a rank without rows: of the others' kind, as far as it is known."""
    rows = request.rows
    row_shape: Sequence[int] = rows.row_shape
    if opening.fields["row shape"] != UNKNOWN:
        row_shape = opening.field("row shape", shape_in)
    index = rows.indices.dtype
    dtype = rows.values.dtype
    height = rows.height
    device = rows.values.device
    if request.moves:
        index = opening.field("index dtype", dtype_in)
        dtype = opening.field("value dtype", dtype_in)
        said = opening.fields["height"]
        height = opening.field("height", int) if said.isdigit() else None
    if request.fields.get("device", "") is None:
        device = _device_of(opening.field("device", _kind_in))
    indices = torch.empty(0, dtype=index, device=device)
    values = torch.empty((0, *row_shape), dtype=dtype, device=device)
    sent_as = travelling(dtype, request.rounded)
    return replace(request, rows=Rows(indices, values, height), dtype=sent_as)


def _kind_in(text: str) -> str:
    """The kind of device in a field. Raises ValueError or RuntimeError if it is none."""
    kind, *_ = text.split()
    return torch.device(kind).type


def _device_of(kind: str) -> torch.device:
    """This rank's device of the kind, such as "cuda".

    Raises:
        RuntimeError: the rank uses no such device.
    """
    device = torch.device("cpu") if kind == "cpu" else current()
    if device.type != kind:
        raise RuntimeError(f"rows come on {kind}, of which this rank uses none: set a device first")
    return device


def _call_of(
    group: Group,
    request: Request,
    fields: Mapping[str, str],
    headers: list[Header],
    *,
    may_be_eager: bool,
) -> Call:
    """The call, of which all ranks know the same."""
    rows = request.rows
    op = request.op
    summed_as = partial_dtype(op, request.dtype, rows.values.dtype)
    header = Header.of_all(headers)
    sizes = _sizes(group, request, summed_as, headers, header)
    rows_of_all = None
    if may_be_eager and is_eager(sizes, rows.indices.itemsize):
        rows_of_all = _rows_of_all(group, headers)
    elif not request.moves and any(one.rows is not None for one in headers):
        # some ranks' rows did not come, so those that came are not merged here
        header = Header.of_all(all_with_points(headers))
    return Call(
        group,
        op,
        rows,
        request.dtype,
        summed_as,
        divisor=group.size if op.mean else 1,
        header=header,
        sizes=sizes if rows_of_all is not None else fitted(sizes, header.rate),
        fields=fields,
        headers=headers,
        rows_of_all=rows_of_all,
        of_device=request.of_device,
    )


def _sizes(
    group: Group,
    request: Request,
    summed_as: torch.dtype,
    headers: Sequence[Header],
    of_all: Header,
) -> Sizes:
    """The sizes of a call, from the headers of all ranks; before they are fitted to the link."""
    rows = request.rows
    row_shape = tuple(rows.row_shape)
    counts = [header.total for header in headers]
    places = of_all.highest + 1
    return Sizes(
        ranks=group.size,
        total=of_all.total,
        most=max(counts),
        fewest=min(counts),
        # without a height, assume the smallest tensor that holds all rows
        height=places if rows.height is None else rows.height,
        row=row_bytes(row_shape, request.dtype),
        partial=row_bytes(row_shape, summed_as),
        index=4 if places <= 2**31 else 8,
        places=places,
        compiled=bool(of_all.compiled),
        staying=not on_host(rows.values),
        in_order=not request.op.builtin,
        hosts=hosts_of(group),
    )


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


def performed(
    group: Group,
    request: Request,
    name: str,
    algorithm: Callable[[CanonicalRows, Call], tuple[Line, Rows]],
    *,
    apart: bool = False,
) -> tuple[Rows, Record]:
    """Begin a call, run it, raise late errors, and note what it did; collective.

    Args:
        group, request, name: see `begun`.
        algorithm: gets this rank's rows and the call; returns what ran, and the result.
        apart: whether ranks get different results.

    Returns:
        The result, of the caller's dtype, and the record.

    Raises:
        WeftError: a caller's function raised; the same text on every rank.
    """
    raised: list[BaseException] = []
    if not request.op.builtin:
        request = replace(request, op=guarded(request.op, raised))
    try:
        rows, call = begun(group, request, name)
        try:
            start = time.perf_counter()
            line, result = algorithm(rows, call)
            seconds = time.perf_counter() - start
            result = call.delivered(result)
        finally:
            rows.release()
        if not call.op.builtin:  # its function may have raised on this rank alone
            confess(group, f"the end of {name}", raised[0] if raised else None)
    finally:
        raised.clear()
    union = len(result)
    if apart:  # nobody knows all rows of the result
        bound = call.sizes.bound_to_one
    else:
        bound = call.sizes.bound(union)
        learn(call.group, call.sizes, union, seconds)
    record = Record.of(group, *line, len(rows), call.sizes.total, union, bound)
    note(group, record)
    return result, record


def reduced(group: Group, request: Request) -> tuple[Rows, Record]:
    """Run one sparse all-reduce; collective."""

    def algorithm(rows: CanonicalRows, call: Call) -> tuple[Line, Rows]:
        line = _line(request, call)
        if line.algorithm == ALONE:
            return line, _alone(rows, call)
        if line.algorithm == EAGER:
            assert call.rows_of_all is not None
            return line, merge_eager(call.rows_of_all, call)
        return line, ALGORITHMS[line.algorithm](rows, call)

    return performed(group, request, "sparse_all_reduce", algorithm)


def sibling(call: Call, name: str) -> Line:
    """What runs in a call that has no choice but its own algorithm, of that name."""
    if call.rows_of_all is not None:
        return Line(EAGER)
    return Line(ALONE if call.group.size == 1 else name)


def explained(group: Group, request: Request) -> Explanation:
    """What `reduced` would do; collective."""
    _, call = begun(group, request, "explain", looks=True)
    return Explanation.of(_line(request, call), call.sizes)


def _line(request: Request, call: Call) -> Line:
    """What runs."""
    return chosen(call.sizes, request.algorithm, call.given.indices.itemsize)


def merge_eager(rows_of_all: Sequence[Rows], call: Call) -> Rows:
    """Merge the rows that came in the opening exchange; sends nothing."""
    index = call.wire_index
    union = kernels.union([rows.indices.to(index) for rows in rows_of_all])
    result = call.result_at(union.indices)
    sums = result.values
    if call.partial != call.dtype:
        sums = torch.empty(sums.shape, dtype=call.partial)
    values = [rows.values for rows in rows_of_all]
    kernels.combine_runs(sums, union.slots, values, call.op)
    call.finish(sums, result.values)
    return result


def _alone(rows: CanonicalRows, call: Call) -> Rows:
    result = call.result_at(rows.indices)
    result.values.copy_(rows.values)
    return result
