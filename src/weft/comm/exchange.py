"""`exchange`: chosen rows to each rank, such as the features of a graph's remote neighbours.

Rows are picked where they are and sent as `all_to_all` sends. Its adjoint adds up: what comes back
for a row that went to several ranks, or several times to one, is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import truth
from ..base.errors import check, entry
from ..base.tensors import serves
from ..call.attempt import preparing
from ..group import default
from ..group.group import Group
from ..sparse.request import travelling, wrong_wire_dtype
from ..verbs.group import read
from .all_to_all import Scatter
from .differentiable import make
from .staging import unsendable, unsendable_rows

_NAME = "exchange"


@entry
def exchange(
    rows: Tensor,
    to: Sequence[Tensor | None],
    group: object = None,
    async_op: bool = False,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """Send some of this rank's rows to each rank; receive theirs. Differentiable.

    `weft.remote_rows` is for who knows which rows of all ranks it needs, and not yet who sends what
    to whom.

    Args:
        rows: `[n, *row_shape]`, of any dtype of which torch picks rows (not uint16, uint32 and
            uint64: view signed integers); the row shape and the dtype must be the same on every
            rank, n may differ.
        to: for each rank of the group, in rank order, also for this rank, the rows to send to it:
            int32 or int64 indices into `rows`, `[k]`, in any order, also repeated; or None.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        async_op: return a `Work` at once; its `wait()` returns what the call returns without, as
            differentiable. `rows` and `to` may change meanwhile. Backward is not in the background.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: wider
            floating-point numbers are sent in this dtype, each rounded once to nearest even. So are
            their gradients, each before it is added: sums are made in the dtype of `rows`. Lossy.
            Narrower ones are sent as they are. An error for other dtypes.

    Returns:
        For each rank, in rank order, the rows that it sent to this rank: `[k, *row_shape]`, k being
        the length of its indices for this rank, in the dtype of `rows`. If `rows` of some rank
        requires a gradient, the results of all ranks do, and all must run backward; the gradient of
        a row is the sum over all places that it was sent to.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        A rank knows which rows it wants, but not which the others want. An `all_to_all` tells it:

        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     features = 10.0 * group.rank + torch.arange(3.0)
        ...     other = 1 - group.rank
        ...     wanted = [torch.empty(0, dtype=torch.int64)] * 2
        ...     wanted[other] = torch.tensor([2, 0])
        ...     to = weft.all_to_all(wanted)  # once: what each rank wants of this one
        ...     return weft.exchange(features, to)[other].tolist()
        >>> run(2, program)
        [[12.0, 10.0], [2.0, 0.0]]
    """
    group = default.resolve(group)
    with preparing(group, _NAME) as call:
        call.is_async = truth("async_op", async_op)
        check(_wrong(rows, to, group) or wrong_wire_dtype(wire_dtype, rows.dtype))
        nothing = torch.empty(0, dtype=torch.int64, device=rows.device)
        chosen = [nothing if some is None else some for some in to]
        counts = [some.numel() for some in chosen]
        picks = torch.cat(chosen)
        send_rows(call, Scatter(group, _NAME), rows, picks, counts, wire_dtype)
    return call.start()


def send_rows(
    call: preparing,
    scatter: Scatter,
    rows: Tensor,
    picks: Tensor,
    counts: Sequence[int],
    wire_dtype: torch.dtype | None,
    finish: Callable[[list[Tensor]], Any] = list,
) -> None:
    """Make a call that sends rows to each rank and receives theirs.

    Args:
        call: whose arguments these are.
        scatter: the collective.
        rows: `[n, *row_shape]`.
        picks: indices into `rows` of those that go out, in the order of the ranks that get them.
        counts: how many of them each rank gets.
        wire_dtype: in which they travel, as for `exchange`.
        finish: makes the result of the rows that each rank sent to this one.
    """
    dtype = rows.dtype  # as it is now: `module.half()` changes that of the same tensor
    travels = f"{dtype} as {wire_dtype}" if wire_dtype else "None"
    scatter.fields = {"row shape": tuple(rows.shape[1:]), "wire_dtype": travels}
    # rounded after they are picked, so that gradients are widened before they are added
    sent = rows.index_select(0, picks).to(travelling(dtype, wire_dtype))
    parts = torch.split(sent, list(counts))
    make(call, scatter, parts, lambda received: finish([part.to(dtype) for part in received]))


def _first(rows: Tensor) -> Tensor:
    return rows.index_select(0, torch.zeros(1, dtype=torch.int64))


def wrong_rows(rows: object) -> str | None:
    """What is wrong with a tensor whose rows are to be sent, or None."""
    if error := unsendable_rows("rows", rows):
        return error
    assert isinstance(rows, Tensor)  # else it was not sendable
    if not serves(_first, rows.dtype):
        return f"rows is {rows.dtype}, of which torch picks no rows: view integers of that size"
    return None


def _wrong(rows: Tensor, to: object, group: Group) -> str | None:
    """What is wrong with what a caller passed, or None."""
    if error := wrong_rows(rows):
        return error
    if not isinstance(to, list | tuple) or len(to) != group.size:
        count = f"{len(to)} entries" if isinstance(to, list | tuple) else type(to).__name__
        return f"to is {count} for {group.size} ranks: pass a list with indices for each"
    given = {rank: some for rank, some in enumerate(to) if some is not None}
    for rank, some in given.items():
        if error := unsendable(f"to[{rank}]", some):
            return error
        if some.dim() != 1:
            return f"to[{rank}] has shape {tuple(some.shape)}: pass 1-D indices, or None"
        if some.dtype not in (torch.int32, torch.int64):
            return f"to[{rank}] is {some.dtype}: indices must be int32 or int64"
        if some.device != rows.device:
            return f"to[{rank}] is on {some.device}, rows on {rows.device}: pass one device"
    ends = [end.long() for some in given.values() if some.numel() for end in some.aminmax()]
    found = iter(read(group, torch.stack(ends)) if ends else ())
    for rank in (rank for rank, some in given.items() if some.numel()):
        low, high = next(found), next(found)
        if low < 0 or high >= rows.shape[0]:
            wrong = low if low < 0 else high
            return f"to[{rank}] has index {wrong}, rows has {rows.shape[0]} rows"
    return None
