"""`exchange`: chosen rows to each rank, such as the features of a graph's remote neighbours.

Rows are picked where they are and sent as `all_to_all` sends. Its adjoint adds up: what comes back
for a row that went to several ranks, or several times to one, is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import entry
from ..wire import default
from .all_to_all import Scatter, check_round
from .differentiable import applied
from .opening import NO_LIMIT
from .staging import serves, unsendable

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, a dtype that torch picks rows of."""


@entry
def exchange(
    rows: Tensor, to: Sequence[Tensor | None], group: Any = None, *, round_bytes: int | None = None
) -> list[Tensor]:
    """Send some of this rank's rows to each rank; receive theirs. Differentiable.

    Args:
        rows: `[n, *row_shape]`, of any dtype; the row shape and the dtype must be the same on every
            rank, n may differ.
        to: for each rank of the group, in rank order, also for this rank, the rows to send to it:
            int32 or int64 indices into `rows`, `[k]`, in any order, also repeated; or None.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.
        round_bytes: as for `weft.all_to_all`.

    Returns:
        For each rank, in rank order, the rows that it sent to this rank: `[k, *row_shape]`, k being
        the length of its indices for this rank. If `rows` of some rank requires a gradient, the
        results of all ranks do, and all must run backward; the gradient of a row is the sum over
        all places that it was sent to.

    Raises:
        WeftError: some rank's arguments are wrong or differ from the others'; the same text on
            every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        A rank knows which rows it wants, but not which the others want. An `all_to_all` tells it:

        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     features = 10.0 * wire.rank + torch.arange(3.0)
        ...     other = 1 - wire.rank
        ...     wanted = [torch.empty(0, dtype=torch.int64)] * 2
        ...     wanted[other] = torch.tensor([2, 0])
        ...     to = weft.all_to_all(wanted)  # once: what each rank wants of this one
        ...     return weft.exchange(features, to)[other].tolist()
        >>> run(2, program)
        [[12.0, 10.0], [2.0, 0.0]]
    """
    wire = default.resolve(group)
    error = _wrong(rows, to, wire.size) or check_round(round_bytes)
    if error:
        return applied(Scatter(wire, "exchange", error), [torch.empty(0)] * wire.size)
    nothing = torch.empty(0, dtype=torch.int64, device=rows.device)
    # of dtypes that torch only copies, such as uint16, their bits are picked
    source = rows if serves(_first, rows.dtype) else rows.view(_BITS[rows.element_size()])
    parts = [source.index_select(0, nothing if some is None else some) for some in to]
    if source is not rows:
        parts = [part.view(rows.dtype) for part in parts]
    shape = tuple(rows.shape[1:])
    scatter = Scatter(wire, "exchange", fields={"row shape": shape}, limit=round_bytes or NO_LIMIT)
    return applied(scatter, parts)


def _first(rows: Tensor) -> Tensor:
    return rows.index_select(0, torch.zeros(1, dtype=torch.int64))


def _wrong(rows: Tensor, to: object, size: int) -> str | None:
    """What is wrong with what a caller passed, or None."""
    if error := unsendable("rows", rows):
        return error
    if rows.dim() == 0:
        return "rows has no dimension, and so no rows: pass a tensor of at least one"
    if not isinstance(to, list | tuple) or len(to) != size:
        count = f"{len(to)} entries" if isinstance(to, list | tuple) else type(to).__name__
        return f"to is {count} for {size} ranks: pass a list with indices for each"
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
    found = iter(torch.stack(ends).tolist() if ends else ())  # one wait for a device
    for rank in (rank for rank, some in given.items() if some.numel()):
        low, high = next(found), next(found)
        if low < 0 or high >= rows.shape[0]:
            wrong = low if low < 0 else high
            return f"to[{rank}] has index {wrong}, rows has {rows.shape[0]} rows"
    return None
