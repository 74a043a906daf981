"""`sparse_all_gather`: every rank gets the rows of all, one rank's after another's.

For rows that must not be combined, or not yet: samples, queues of indices, gradients that are
clipped one rank at a time.
Nothing is sorted and nothing combined, so rows may be of any dtype; where the caller gave a
`wire_dtype` they are rounded to it, the rank's own too, so that all ranks have the same bits. Few
rows travel in the opening exchange. Else that says how many rows each rank has; so every length is
known, and rows are received where they belong. They go round the ring of ranks in chunks: one
stream into each host and one out of it. Each rank sends to all others directly where links are as
quick as memory, and where few rows go between distant hosts.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(JPDC 2009), section 3.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ...base.arguments import truth
from ...base.errors import untransformed
from ...call.attempt import preparing
from ...group import default
from ...group.channels import LISTS, VALUES
from ...group.worker import Work
from .. import plain
from ..call import Call
from ..canonical import CanonicalRows
from ..choose import Line
from ..forms import Form
from ..request import Request
from ..rows import Rows
from ..run import performed, sibling
from ..stream import Ring

_NAME = "sparse_all_gather"


@overload
def sparse_all_gather(
    rows: Form,
    group: object = None,
    async_op: Literal[False] = False,
    *,
    return_counts: Literal[False] = False,
    wire_dtype: torch.dtype | None = None,
) -> Form: ...


@overload
def sparse_all_gather(
    rows: Form,
    group: object = None,
    async_op: Literal[True] = ...,
    *,
    return_counts: Literal[False] = False,
    wire_dtype: torch.dtype | None = None,
) -> Work[Form]: ...


@overload
def sparse_all_gather(
    rows: Form,
    group: object = None,
    async_op: Literal[False] = False,
    *,
    return_counts: Literal[True],
    wire_dtype: torch.dtype | None = None,
) -> tuple[Form, Tensor]: ...


@overload
def sparse_all_gather(
    rows: Form,
    group: object = None,
    async_op: Literal[True] = ...,
    *,
    return_counts: Literal[True],
    wire_dtype: torch.dtype | None = None,
) -> Work[tuple[Form, Tensor]]: ...


@untransformed
def sparse_all_gather(
    rows: Any,
    group: object = None,
    async_op: bool = False,
    *,
    return_counts: bool = False,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """Concatenate the rows of all ranks in rank order; every rank gets all of them.

    Args:
        rows: a sparse COO tensor, `(indices, values)`, or `weft.Rows`; the result has the same form
            and device. Indices are int32 or int64; values `[k, *row_shape]` of any dtype. Ranks may
            have different numbers of rows, or none.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        async_op: return at once a `Work`, whose `wait()` gives the result. Do not change the input
            before `wait()` returns.
        return_counts: also return each rank's number of rows.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: values of wider
            floating-point dtypes are sent in this dtype, rounded once, to nearest even, also on the
            rank that sends them (docs/wire-dtype.md). Narrower values are sent unchanged; values
            that are not floating point are an error.

    Returns:
        The rows of rank 0, unchanged but for `wire_dtype`, then those of rank 1, and so on: not
        sorted, with duplicates (a COO tensor is not coalesced). With `return_counts` a pair: these
        rows and an int64 tensor `[size]` on the CPU. The result has no gradient history.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     rows = torch.tensor([7, group.rank]), torch.ones(2)
        ...     (indices, _), counts = weft.sparse_all_gather(rows, return_counts=True)
        ...     return indices.tolist(), counts.tolist()
        >>> run(2, program)[0]
        ([7, 0, 7, 1], [2, 2])
    """
    group = default.resolve(group)
    counts: list[int] = []

    def algorithm(rows: CanonicalRows, call: Call) -> tuple[Line, Rows]:
        counts.extend(call.counts)
        line = sibling(call, "ring")
        if call.verbs is not None:
            return line, plain.concatenated(call.verbs, call)
        return line, concatenated(rows, call, counts)

    def job() -> Any:
        result, _ = performed(group, request, _NAME, algorithm)
        restored = request.restore(result)
        return (restored, torch.tensor(counts)) if with_counts else restored

    with preparing(group, _NAME) as call:
        call.is_async = truth("async_op", async_op)
        request = Request.to_move(rows, wire_dtype)
        with_counts = truth("return_counts", return_counts)
        call.job = job
        call.device = request.device
    return call.start()


def concatenated(own: CanonicalRows, call: Call, counts: list[int]) -> Rows:
    """All ranks' rows one after the other: from the opening exchange, or by a ring."""
    group = call.group
    result = call.result(sum(counts))
    if call.rows_of_all is not None:
        places = torch.split(result.indices, counts), torch.split(result.values, counts)
        for rows, indices, values in zip(call.rows_of_all, *places, strict=True):
            indices.copy_(rows.indices)
            values.copy_(rows.values)
        return result
    indices = result.indices.to(call.wire_index)
    rings = []
    for moved, mine, channel in (
        (indices, own.indices, LISTS),
        (result.values, own.values, VALUES),
    ):
        parts = torch.split(moved, counts)  # of each rank
        parts[group.rank].copy_(mine)
        ring = Ring(call, parts, channel, moved.nbytes / group.size).start()
        ring.send(parts[group.rank])
        rings.append(ring)
    for ring in rings:
        ring.finish()
    result.indices.copy_(indices)
    return result
