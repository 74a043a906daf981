"""`sparse_reduce_scatter`: every rank gets the sums of the rows that it owns.

What a table needs that is cut over the ranks: each rank is sent the gradients of its own rows and
no others. Few rows travel in the opening exchange; else the schedule is
`owners.reduce_to_owners`. The caller gives the index ranges, or `owners` cuts them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, overload

import torch

from ...base.arguments import truth
from ...base.errors import WeftError, summed_up, untransformed
from ...call.attempt import preparing
from ...group import default
from ...group.worker import Work
from .. import plain
from ..call import Call
from ..canonical import CanonicalRows
from ..choose import Line
from ..forms import Form, Reduction
from ..owners import balanced_bounds, reduce_to_owners, slices_between
from ..record import note
from ..request import NO_CHOICE, Request
from ..rows import Rows
from ..run import merge_eager, performed, sibling

_NAME = "sparse_reduce_scatter"
_SHOWN = 9  # bounds that are compared as they are; longer ranges by a digest


@overload
def sparse_reduce_scatter(
    rows: Form,
    op: Reduction = "sum",
    group: object = None,
    async_op: Literal[False] = False,
    *,
    ranges: Sequence[int] | None = None,
    wire_dtype: torch.dtype | None = None,
) -> Form: ...


@overload
def sparse_reduce_scatter(
    rows: Form,
    op: Reduction = "sum",
    group: object = None,
    async_op: Literal[True] = ...,
    *,
    ranges: Sequence[int] | None = None,
    wire_dtype: torch.dtype | None = None,
) -> Work[Form]: ...


@untransformed
def sparse_reduce_scatter(
    rows: Any,
    op: Any = "sum",
    group: object = None,
    async_op: bool = False,
    *,
    ranges: Sequence[int] | None = None,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """Reduce the rows of all ranks; every rank gets those of the result that it owns.

    Args:
        rows: a sparse COO tensor, `(indices, values)`, or `weft.Rows`, as for
            `weft.sparse_all_reduce`; the result has the same form and device.
        op: as for `weft.sparse_all_reduce`.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        async_op: return at once a `Work`, whose `wait()` gives the result. Do not change the input
            before `wait()` returns.
        ranges: size + 1 ascending integers: rank r owns the indices from `ranges[r]` up to, not
            including, `ranges[r + 1]`; every index must be in a range. None: weft cuts ranges that
            give all ranks equal work in this call; `weft.sparse.last_call().ranges` has them.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: floating-point
            values are sent in this dtype, and rounded as in `weft.sparse_all_reduce`
            (docs/wire-dtype.md).

    Returns:
        This rank's part of the result of `weft.sparse_all_reduce`: indices of the whole tensor,
        sorted, each once. Ranks are added in rank order, so the same inputs give the same bits,
        whatever the ranges.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):  # a table of 10 rows, 5 of them on each of two ranks
        ...     rows = weft.Rows(torch.tensor([2, 7]), torch.ones(2), height=10)
        ...     return weft.sparse_reduce_scatter(rows, ranges=[0, 5, 10]).indices.tolist()
        >>> run(2, program)
        [[2], [7]]
    """
    group = default.resolve(group)
    bounds: list[int] = []
    chosen: tuple[int, ...] = ()

    def algorithm(rows: CanonicalRows, call: Call) -> tuple[Line, Rows]:
        line = sibling(call, "reduce_scatter")
        bounds.extend(chosen or _balanced(call))
        if call.verbs is None:
            return line, sums_in(bounds, rows, call)
        own = bounds[group.rank : group.rank + 2]
        sums, (start, stop) = plain.summed(call.verbs, rows, call, own)
        part = sums.indices[start:stop].clone(), sums.values[start:stop].clone()
        return line, Rows(*part, sums.height)

    def job() -> Any:
        result, record = performed(group, request, _NAME, algorithm, apart=True)
        note(group, replace(record, ranges=tuple(bounds)))
        return request.restore(result)

    with preparing(group, _NAME) as call:
        call.is_async = truth("async_op", async_op)
        request = Request.asked(op, NO_CHOICE, wire_dtype)
        request.fields["ranges"] = "balanced"
        if ranges is not None:
            chosen = _checked(ranges, group.size)
            text = ", ".join(map(str, chosen))
            if len(chosen) > _SHOWN:
                text = summed_up(text, 0, f"{chosen[0]} ... {chosen[-1]}, of {len(chosen)} bounds")
            request.fields["ranges"] = text
            request.wrong_ends = functools.partial(_outside, chosen)
        request = request.given(rows).look()
        call.job = job
        call.device = request.device
    return call.start()


def sums_in(bounds: Sequence[int], rows: CanonicalRows, call: Call) -> Rows:
    """The sums of the indices that this rank owns: see `SparseReduceScatter`; collective."""
    if call.rows_of_all is None:
        return reduce_to_owners(rows, call, bounds)
    rank = call.group.rank
    mine = bounds[rank : rank + 2]
    parts = []
    for each in call.rows_of_all:
        (part,) = slices_between(each.indices, mine, call.header.highest)
        parts.append(Rows(each.indices[part], each.values[part]))
    return merge_eager(parts, call)


def _balanced(call: Call) -> list[int]:
    size = call.group.size
    end = call.header.highest + 1 if call.height is None else call.height
    if call.verbs is not None:  # every rank makes all sums anyway
        return [end * rank // size for rank in range(size + 1)]
    return [*balanced_bounds(call.distribution, size)[:-1], end]


def _checked(ranges: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranges as integers.

    Raises:
        WeftError: they are none.
    """
    try:
        bounds = tuple(map(operator.index, ranges))
    except Exception:  # whatever iterates may raise anything
        raise WeftError(
            f"ranges is a {type(ranges).__name__}: pass {size + 1} integers, None for balanced ones"
        ) from None
    if len(bounds) != size + 1:
        raise WeftError(
            f"ranges has {len(bounds)} bounds: {size} ranks need {size + 1}, from the first index "
            "of rank 0 to the end"
        )
    for low, high in pairwise(bounds):
        if low > high or low < 0:
            raise WeftError(f"ranges has {high} after {low}: pass ascending bounds from 0 up")
    return bounds


def _outside(bounds: tuple[int, ...], low: int, high: int) -> str | None:
    """What is wrong with a smallest and a largest index that are to lie in the ranges, or None."""
    outside = low if low < bounds[0] else high
    if bounds[0] <= outside < bounds[-1]:
        return None
    return (
        f"index {outside} is in no range: they go from {bounds[0]} up to, not including, "
        f"{bounds[-1]}"
    )
