"""The steps of a call, the same for every algorithm.

Agree on what all ranks were asked, each stating a header of its rows or the rows themselves;
choose the algorithm from the combined header; run its schedule; where a caller's function took
part, tell each other whether it raised; hand out the result.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..agree import Agreement, agree, is_direct
from ..errors import WeftError
from ..rows import Rows
from ..wire.base import Wire
from ..wire.memory import typed
from .call import Call, row_bytes
from .choice import ALONE, EAGER, Explanation, choose, is_eager, with_link
from .choice import explained as explained_choice
from .cost import Load
from .header import Header, RowsInHeader, of_all
from .registry import find
from .request import Request

__all__ = ["Done", "explained", "reduced"]


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a call: `load.union` is exact here."""

    algorithm: str
    rows: Rows
    load: Load


def reduced(wire: Wire, request: Request) -> Done:
    """Run one call; collective."""
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
    )
    eager = request.algorithm == "auto" and is_direct(wire) and wire.size > 1
    row = row_bytes(call.row_shape, call.dtype)
    eager = eager and RowsInHeader.fit(count, given.indices.element_size(), row)
    with wire.lease(count * row) as memory:
        own = _Own(request, call, memory)
        agreement = _open(wire, request, "sparse_all_reduce", own if eager else None, own.reduce)
        try:
            load = _load(wire, request, agreement, call)
            values = own.reduce().view(count, *call.row_shape)
            mine = Rows(request.distinct.indices, values, given.height)
            if eager and is_eager(wire, load, given.indices.dtype):
                name, result = EAGER, _merge_eager(agreement.bodies, mine, call)
            else:
                call.load = load = with_link(wire, load) if wire.size > 1 else load
                name = choose(wire, load, request.algorithm)
                result = _alone(mine, call) if name == ALONE else find(name).run(mine, call)
        finally:
            agreement.release()
    if call.header.fallible:
        _settle(wire, call)
    if len(result) > call.header.capacity:
        raise WeftError(
            f"rank {call.header.tightest}: out holds {call.header.capacity} rows, the result has "
            f"{len(result)}: pass larger buffers, or a function that allocates them"
        )
    result = call.widened(result)
    if call.target is not None:
        call.target.indices.copy_(result.indices)
        call.target.values.copy_(result.values)
        result = call.target
    return Done(name, result, load.with_union(len(result)))


def explained(wire: Wire, request: Request) -> Explanation:
    """Say what `reduced` would do; collective."""
    shape = tuple(request.rows.row_shape)
    call = Call(wire, request.op, shape, dtype=request.dtype, wide=request.wide)
    agreement = _open(wire, request, "explain")
    try:
        load = _load(wire, request, agreement, call)
    finally:
        agreement.release()
    if wire.size > 1:
        load = with_link(wire, load)
    return explained_choice(wire, load, request.algorithm, request.rows.indices.dtype)


class _Own:
    """This rank's rows with duplicates combined and rounded to what travels, each once.

    As late as possible, in leased memory.
    """

    def __init__(self, request: Request, call: Call, memory: Tensor) -> None:
        self.request, self._call, self._memory = request, call, memory
        self._values: Tensor | None = None

    def reduce(self) -> Tensor:
        if self._values is None:
            distinct, values = self.request.distinct, self.request.rows.values
            ready = distinct.order is None and distinct.starts is None and self._call.wide is None
            if self.request.error is not None or ready:
                self._values = values.contiguous()
            else:
                shape = (distinct.indices.numel(), *values.shape[1:])
                space = typed(self._memory, shape, self._call.dtype)
                self._values = kernels.reduce(values, distinct, self._call.op, out=space)
        return self._values


def _open(
    wire: Wire,
    request: Request,
    name: str,
    eager: _Own | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Agreement:
    indices, capacity, fallible = request.distinct.indices, request.capacity, request.fallible
    if eager is not None:
        body = RowsInHeader(indices, eager.reduce(), capacity, fallible).pack()
    else:
        body = Header.of(indices, wire.rank, capacity=capacity, fallible=fallible).pack()

    def combine(lower: Tensor, upper: Tensor) -> Tensor:
        return Header.unpack(lower).combine(Header.unpack(upper)).pack()

    return agree(
        wire,
        name,
        request.fields,
        request.error,
        body,
        combine,
        meanwhile=meanwhile,
    )


def _load(wire: Wire, request: Request, agreement: Agreement, call: Call) -> Load:
    """What all ranks together said; also fills in what this rank alone did not know."""
    shape = agreement.fields["row shape"]
    call.row_shape = call.row_shape if shape == "?" else ast.literal_eval(shape)
    said = [
        RowsInHeader.unpack(body, call.row_shape, call.dtype)
        if RowsInHeader.are_in(body)
        else Header.unpack(body)
        for body in agreement.bodies
    ]
    rows = [one for one in said if isinstance(one, RowsInHeader)]
    if len(rows) == len(said):
        header = of_all(rows)
    else:
        headers = (
            one.described(rank) if isinstance(one, RowsInHeader) else one
            for rank, one in enumerate(said)
        )
        header = functools.reduce(Header.combine, headers)
    call.header = header
    height = request.rows.height
    call.load = Load(
        ranks=wire.size,
        total=header.total,
        most=header.most,
        fewest=header.fewest,
        union=header.union(height),
        height=height,
        row=row_bytes(call.row_shape, call.dtype),
        partial=row_bytes(call.row_shape, call.partial),
        index=4 if header.highest < 2**31 else 8,
        places=header.highest + 1,
        in_order=not call.op.builtin,
    )
    return call.load


def _merge_eager(bodies: list[Tensor], mine: Rows, call: Call) -> Rows:
    """Merge the rows that came in the opening exchange."""
    everyone = [RowsInHeader.unpack(body, call.row_shape, call.dtype) for body in bodies]
    indices, values = kernels.merge(
        [(rows.indices.to(call.wire_index), rows.values) for rows in everyone],
        call.op,
        call.partial,
    )
    result = call.result(indices.numel())
    result.indices.copy_(indices)
    kernels.finish(values, result.values, call.divisor)
    return result


def _alone(mine: Rows, call: Call) -> Rows:
    result = call.result(len(mine))
    result.indices.copy_(mine.indices)
    result.values.copy_(mine.values)
    return result


def _settle(wire: Wire, call: Call) -> None:
    """Tell each other whether a caller's function raised; raises alike on all ranks."""
    trouble = call.trouble
    sentence = None if trouble is None else f"{type(trouble).__name__}: {trouble}"
    nothing = torch.empty(0, dtype=torch.uint8)
    try:
        agree(wire, "the end of sparse_all_reduce", {}, sentence, nothing, lambda a, b: a).release()
    except WeftError as error:
        raise error from trouble
