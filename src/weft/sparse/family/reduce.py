"""`sparse_reduce`: one rank gets the reduction of all ranks' rows.

It is a `sparse_reduce_scatter` in which that rank owns all indices: few rows travel in the opening
exchange; else all ranks send theirs to it, and it merges them.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from ...base.arguments import root_in, truth
from ...base.errors import untransformed
from ...call.attempt import preparing
from ...group import default
from ...group.worker import Work
from .. import plain
from ..call import Call
from ..canonical import CanonicalRows
from ..choose import Line
from ..forms import Form, Reduction
from ..request import NO_CHOICE, Request
from ..rows import Rows
from ..run import performed, sibling
from .reduce_scatter import sums_in

_NAME = "sparse_reduce"


@overload
def sparse_reduce(
    rows: Form,
    op: Reduction = "sum",
    group_dst: int = 0,
    group: object = None,
    async_op: Literal[False] = False,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Form | None: ...


@overload
def sparse_reduce(
    rows: Form,
    op: Reduction = "sum",
    group_dst: int = 0,
    group: object = None,
    async_op: Literal[True] = ...,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Work[Form | None]: ...


@untransformed
def sparse_reduce(
    rows: Any,
    op: Any = "sum",
    group_dst: int = 0,
    group: object = None,
    async_op: bool = False,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """Reduce the rows of all ranks; one rank gets the result, the others None.

    Args:
        rows: a sparse COO tensor, `(indices, values)`, or `weft.Rows`, as for
            `weft.sparse_all_reduce`; the result has the same form and device.
        op: as for `weft.sparse_all_reduce`.
        group_dst: the rank, in the group, that gets the result; the same on every rank.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        async_op: return at once a `Work`, whose `wait()` gives the result. Do not change the input
            before `wait()` returns.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: floating-point
            values are sent in this dtype, and rounded as in `weft.sparse_all_reduce`
            (docs/wire-dtype.md).

    Returns:
        On `group_dst` the result of `weft.sparse_all_reduce`, with ranks added in rank order; None
        on the other ranks.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     total = weft.sparse_reduce((torch.tensor([group.rank, 9]), torch.ones(2)))
        ...     return None if total is None else total[1].tolist()
        >>> run(2, program)
        [[1.0, 1.0, 2.0], None]
    """
    group = default.resolve(group)
    dst = root_in(group_dst, group.size)
    here = group.rank == dst

    def algorithm(rows: CanonicalRows, call: Call) -> tuple[Line, Rows]:
        line = sibling(call, "direct")
        if call.verbs is not None:
            return line, plain.summed(call.verbs, rows, call)[0]
        end = call.header.highest + 1
        ranges = [0] * (dst + 1) + [end] * (group.size - dst)
        return line, sums_in(ranges, rows, call)

    def job() -> Any:
        result, _ = performed(group, request, _NAME, algorithm, apart=True)
        return request.restore(result) if here else None

    with preparing(group, _NAME) as call:
        call.is_async = truth("async_op", async_op)
        request = Request.of(rows, op, NO_CHOICE, wire_dtype)
        request.take_root("group_dst", dst, group_dst, group.size)
        call.job = job
        call.device = request.device
    return call.start()
