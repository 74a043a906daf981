"""This rank's rows as they travel: sorted, each index once, rounded to what is sent."""

from __future__ import annotations

from contextlib import ExitStack

from .. import kernels
from ..base.memory import Pool, typed
from .request import Request
from .rows import Rows


def canonical(request: Request, memory: Pool, leases: ExitStack) -> Rows:
    """The rows of a request in their canonical form; rows that only move stay in their order.

    Args:
        request: whose indices were looked at.
        memory: from which the values are leased, unless the caller's own are canonical already.
        leases: gives the memory back.
    """
    given = request.rows
    if request.moves:
        distinct = kernels.Distinct(given.indices.contiguous(), None, None)
    else:
        distinct = request.distinct
    count = distinct.indices.numel()
    values = given.values
    is_canonical = distinct.order is None and distinct.starts is None
    if (is_canonical and values.dtype == request.dtype) or not count:
        return Rows(distinct.indices, values.contiguous(), given.height)
    lease = memory.lease(count * values[:1].numel() * request.dtype.itemsize)
    leases.callback(lease.release)
    space = typed(lease.tensor, (count, *given.row_shape), request.dtype)
    kernels.reduce(values, distinct, request.op, out=space)
    return Rows(distinct.indices, space, given.height)
