"""`sparse_reduce`: one rank gets the reduction of all ranks' rows.

Few rows travel in the opening exchange. Else it is one of two schedules: `direct`, within a host
and up to `DIRECTLY` ranks, where all send their rows to the one rank, which merges them; and
`owners`, where each rank first sums a range of the indices (`reduce_to_owners`) and then sends the
sums to the one rank. These are fewer rows where ranks overlap, and all ranks share the arithmetic.

The tree of Rabenseifner's reduce, as in Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH" (IJHPCA 2005), section 4.5: a reduce-scatter, then a
gather; here of sparse rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ...base.arguments import root_in, truth
from ...base.devices import Aside
from ...base.errors import untransformed
from ...base.memory import typed
from ...call.attempt import preparing
from ...group import default
from ...group.channels import SUMS
from ...group.worker import Work
from ..call import Call
from ..choose import Line
from ..forms import Form, Reduction
from ..owners import balanced_bounds, reduce_to_owners
from ..record import started
from ..registry import ALONE, EAGER
from ..request import Request
from ..rows import Rows
from ..run import merge_eager, performed
from ..stream import chunks, exchange_lists, in_rank_order, lay_out

_NAME = "sparse_reduce"

DIRECTLY = 4
"""Ranks up to which all send their rows to the one that gets the result, also between hosts.

Of 3, 4, 6 and 8 hosts at 1 Gbit/s that takes 0.81, 1.0, 1.1 and 1.2 times as long as `owners`
(geometric means of four cases, the worst 2.6, where all have the same rows); of 3, 4 and 8 ranks of
one host 0.66 to 0.82 times."""


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
    with preparing(group, _NAME):
        request = Request.of(rows, op, "auto", wire_dtype)
        request.take_root("group_dst", dst, group_dst, group.size)
        is_async = truth("async_op", async_op)

    def schedule(own: Rows, call: Call) -> tuple[Line, Rows]:
        if call.rows_of_all is not None:
            return Line(EAGER), merge_eager(call.rows_of_all, call) if here else call.result(0)
        if group.size > DIRECTLY and not call.sizes.on_one_host:
            return Line("owners"), _by_owners(own, call, dst)
        end = call.header.highest + 1
        all_his = [0] * (dst + 1) + [end] * (group.size - dst)
        return Line(ALONE if group.size == 1 else "direct"), reduce_to_owners(own, call, all_his)

    def job() -> Any:
        result, _ = performed(group, request, _NAME, schedule, apart=True)
        return request.restore(result) if here else None

    return started(group, _NAME, Aside(group.streams, request.device, job), is_async)


def _by_owners(rows: Rows, call: Call, dst: int) -> Rows:
    """The schedule `owners`: rows go to their owners, then all sums to one rank."""
    with ExitStack() as leases:

        def place(indices: Tensor) -> Rows:
            memory = leases.enter_context(call.group.lease(len(indices) * call.sizes.row))
            return Rows(indices, typed(memory, (len(indices), *call.row_shape), call.dtype))

        bounds = balanced_bounds(call.header, call.group.size)
        sums = reduce_to_owners(rows, call, bounds, replace(call, place=place))
        if call.group.rank == dst:
            return _gather_sums(sums, call)
        return _send_sums(sums, call, dst)


def _gather_sums(sums: Rows, call: Call) -> Rows:
    """Receive the index lists of all others, then their sums where these belong in the result."""
    group = call.group
    exchange = exchange_lists(call, {}, group.peers)
    result, parts = lay_out(call, in_rank_order(call, exchange, sums.indices))
    parts[group.rank].copy_(sums.values)
    recvs = [(peer, chunk) for peer in group.peers for chunk in chunks(call, parts[peer])]
    group.post((), recvs, SUMS).wait()
    exchange.release()
    return result


def _send_sums(sums: Rows, call: Call, dst: int) -> Rows:
    """Send this rank's index list, then its sums; the empty result."""
    exchange = exchange_lists(call, {dst: sums.indices}, [])
    exchange.wait()
    result = call.result(0)
    sends = [(dst, chunk) for chunk in chunks(call, sums.values)]
    call.group.post(sends, (), SUMS).wait()
    exchange.release()
    return result
