"""The sparse all-reduce that users call, and `explain`, which says what it would do.

Here is the public face; `request` checks the arguments, `run` takes the steps of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, cast, overload

import torch

from ..base.arguments import truth
from ..base.errors import WeftError, untransformed
from ..call.attempt import preparing
from ..group import default
from ..group.group import Group
from ..group.worker import Work
from . import run, tables
from .explanation import Explanation
from .forms import AnyForm, Form, Member, Reduction
from .request import Request

_NAME = "sparse_all_reduce"


@overload
def sparse_all_reduce(
    rows: Form,
    op: Reduction = "sum",
    group: object = None,
    async_op: Literal[False] = False,
    *,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> Form: ...


@overload
def sparse_all_reduce(
    rows: Form,
    op: Reduction = "sum",
    group: object = None,
    async_op: Literal[True] = ...,
    *,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> Work[Form]: ...


@overload
def sparse_all_reduce(
    rows: list[Member],
    op: Reduction = "sum",
    group: object = None,
    async_op: Literal[False] = False,
    *,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> list[Member]: ...


@overload
def sparse_all_reduce(
    rows: list[Member],
    op: Reduction = "sum",
    group: object = None,
    async_op: Literal[True] = ...,
    *,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> Work[list[Member]]: ...


@untransformed
def sparse_all_reduce(
    rows: Any,
    op: Any = "sum",
    group: object = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """Reduce the rows of all ranks; every rank gets the whole result, with the same bits.

    Args:
        rows: a sparse COO tensor (any number of sparse dimensions), `(indices, values)`, or
            `weft.Rows`; the result has the same form and device. Indices are int32 or int64, in any
            order; they may repeat, and there may be none. Values are `[k, *row_shape]`: float16 to
            float64, bfloat16, int8 to int64, uint8 or bool. A list of these is several tables, of
            any row shapes and dtypes that `op` takes; the result is then a list.
        op: "sum", "prod" (both of numbers), "avg" (of floating point; divides by the size of the
            group), "min", "max", "band", "bor", "bxor" (these three of integers and bool), a
            `torch.distributed.ReduceOp`, or an associative function `(a, b) -> tensor` of two
            `[n, *row_shape]` tensors, applied row by row; `a` comes from the lower rank.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        async_op: return at once a `Work`, whose `wait()` gives the result. Do not change the input
            before `wait()` returns.
        algorithm: "auto" or a name (docs/algorithms.md); the environment's WEFT_ALGORITHM replaces
            "auto".
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: values of wider
            floating-point dtypes are sent in this dtype. Each rank's sum of an index is rounded
            before it is sent, and the result is rounded, once each, to nearest even; the additions
            are as wide as without. Lossy: docs/wire-dtype.md has the error bound. Half precision
            with `torch.float32` is sent in float32 instead, and rounded once: in the result. Other
            values of two bytes are sent unchanged; values that are not floating point are an error.

    Returns:
        Sorted indices, each once, and their sums. A rank's duplicates are added in input order (a
        function combines neighbours, and then their results), and ranks in rank order, except by
        `doubling` and where `split` adds within hosts first (docs/algorithms.md). Which algorithm
        runs, and whether hosts come first, follows from sizes and hosts alone: the same inputs on
        the same hosts give the same bits, on every run. Half precision is added in float32 and
        rounded twice: each rank's sum of duplicates, before it is sent, and the result. Integers
        wrap. The result has no gradient history.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        >>> import torch, weft
        >>> with weft.init():  # alone: a group of one
        ...     weft.sparse_all_reduce((torch.tensor([7, 2, 7]), torch.tensor([1.0, 2.0, 4.0])))
        (tensor([2, 7]), tensor([2., 5.]))
    """
    group = default.resolve(group)
    with preparing(group, _NAME) as call:
        call.is_async = truth("async_op", async_op)
        call.job, call.device = job_of(group, rows, op, algorithm, wire_dtype)
    return call.start()


@untransformed
def explain(
    rows: AnyForm,
    op: Reduction = "sum",
    group: object = None,
    *,
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> Explanation:
    """Say what `sparse_all_reduce` would do with a table, and why; reduce nothing.

    Collective: every rank calls it. It raises the errors of `sparse_all_reduce`. The result prints
    the line of the rule that decides, and the bound. For a list, `weft.sparse.last_call()` says
    afterwards what was run.

    Example:
        >>> import torch, weft
        >>> with weft.init():
        ...     rows = (torch.tensor([2, 7]), torch.rand(2, 64))
        ...     weft.explain(rows)  # nobody to talk to
        alone: the group has one rank
        bound: 0 bytes a rank
    """
    group = default.resolve(group)
    with preparing(group, "explain") as call:
        if isinstance(rows, list):
            raise WeftError("explain takes one table: pass one of the list")
        request = Request.of(rows, op, algorithm, wire_dtype)
        call.job = functools.partial(run.explained, group, request)
    return cast(Explanation, call.start())


def job_of(
    group: Group, rows: Any, op: Any, algorithm: object, wire_dtype: object
) -> tuple[Callable[[], Any], torch.device]:
    """What reduces a table, or a list of them, when its turn has come; and where the rows are."""
    if not isinstance(rows, list):
        request = Request.of(rows, op, algorithm, wire_dtype)
        return functools.partial(reduce_one, group, request), request.device
    of_all = Request.asked(op, algorithm, wire_dtype)
    requests = tables.requests_of(rows, of_all)
    job = functools.partial(tables.reduced, group, of_all, requests)
    return job, tables.device_of(of_all, requests)


def reduce_one(group: Group, request: Request) -> Any:
    """Reduce a table, inside a call's turn; in the form that was given."""
    result, _ = run.reduced(group, request)
    return request.restore(result)
