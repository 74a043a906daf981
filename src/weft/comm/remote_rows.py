"""`remote_rows`: rows of a tensor that is cut over the ranks, fetched by those who need them.

It is common that a rank's nodes have neighbours on other ranks: in a graph or a mesh that is cut,
in a sparse matrix whose columns are. Their rows are called halo nodes (DGL), ghost cells or remote
rows. The plan is made once: each rank tells the owners which of their rows it needs, each row once.
Then every `fetch` is one exchange without indices, and its backward is the same exchange the other
way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import as_integer, shown, truth
from ..base.errors import WeftError, check, entry
from ..base.tensors import there
from ..call.attempt import preparing
from ..group import default
from ..group.group import Group
from ..sparse.request import outside, wrong_wire_dtype
from ..verbs.group import read
from .all_to_all import Scatter
from .differentiable import apply
from .exchange import send_rows, wrong_rows
from .staging import unsendable

_NAME = "remote_rows"
_MOST = 1 << 48  # rows of a rank; the sum over all ranks is an int64


@entry
def remote_rows(indices: Tensor, count: int, group: object = None) -> RemoteRows:
    """Plan how rows of other ranks get to the ranks that need them. Collective.

    The rows of all ranks are numbered rank by rank: rank 0 has the first, rank 1 those that follow,
    and so on, each as many as it says.

    Args:
        indices: the numbers of the rows that this rank needs, int32 or int64, of any shape, in any
            order, also repeated, also of its own rows, also none; such as the ends of a graph's
            edges.
        count: how many rows this rank has; 0 is allowed.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.

    Returns:
        The plan. `plan.fetch(rows)` returns this rank's rows, and behind them the rows of other
        ranks that it needs, each once; `plan.places` says where in them is what `indices` asked
        for. So `plan.fetch(rows)[plan.places]` has the rows that `indices` names.

    Raises:
        WeftError: some rank's arguments are wrong, or an index is not that of a row; the same text
            on every rank, naming the rank. The next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost.

    Example:
        Two ranks have two rows each, and each needs one of the other's:

        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     indices = torch.tensor([0, 2, 2]) if group.rank == 0 else torch.tensor([1, 3])
        ...     plan = weft.remote_rows(indices, count=2)
        ...     hidden = torch.tensor([10.0, 11.0]) + 2 * group.rank
        ...     return plan.fetch(hidden).tolist(), plan.places.tolist()
        >>> run(2, program)
        [([10.0, 11.0, 12.0], [0, 2, 2]), ([12.0, 13.0, 11.0], [2, 1])]

        With PyTorch Geometric, `conv((plan.fetch(h), h), edges)` has `plan.places` as the sources
        of `edges`; in DGL the result of `fetch` holds the source nodes of a block.
    """
    group = default.resolve(group)
    with preparing(group, f"{_NAME} (counts)"):
        check(_wrong(indices, count))
        count = as_integer(count)
        own = torch.tensor([count])
    # each rank tells the others how many rows it has
    counts = torch.cat(apply(Scatter(group, f"{_NAME} (counts)"), [own] * group.size))
    bounds = [0, *read(group, counts.cumsum(0))]
    first = bounds[group.rank]
    end = bounds[group.rank + 1]

    with preparing(group, f"{_NAME} (indices)"):
        indices = indices.contiguous()  # such as a column of edges, which torch searches slowly
        remote, cuts = _remote(group, indices, bounds)
        rows = count + remote.numel()
        if rows > torch.iinfo(indices.dtype).max:
            raise WeftError(f"{rows} rows are more than {indices.dtype} counts: pass int64")
        # each rank tells the owners which of their rows it needs, as they count them
        needs = [
            remote[cuts[owner] : cuts[owner + 1]] - bounds[owner] for owner in range(group.size)
        ]

        is_own = (indices >= first) & (indices < end)
        place_of_own = indices.long() - first
        place_of_remote = count + torch.searchsorted(remote, indices.long())
        places = torch.where(is_own, place_of_own, place_of_remote).to(indices.dtype)
    picks = apply(Scatter(group, f"{_NAME} (indices)"), needs)  # what each needs of this one

    received = [some.numel() for some in needs]
    sent = [some.numel() for some in picks]
    return RemoteRows(first, count, remote, places, received, sent, group, torch.cat(picks))


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """Which rows of other ranks this rank needs, and which of its own the others need.

    `weft.remote_rows` makes it. It holds no rows, so it serves any number of tensors: features,
    hidden states of each layer, of any row shape and dtype.

    Attributes:
        first: the number of this rank's first row.
        count: how many rows this rank has.
        remote: the numbers of the rows of other ranks that it needs, sorted, each once; int64
            `[m]`.
        places: for each index that was given, where in the result of `fetch` that row is; of the
            shape and dtype of the indices.
        received: how many rows come from each rank, in rank order; of this rank none.
        sent: how many rows go to each rank.
    """

    first: int
    count: int
    remote: Tensor = field(repr=False)
    places: Tensor = field(repr=False)
    received: Sequence[int]
    sent: Sequence[int]
    _group: Group = field(repr=False)
    _picks: Tensor = field(repr=False)  # of this rank's rows, in the order of `sent`

    @entry
    def fetch(
        self, rows: Tensor, async_op: bool = False, *, wire_dtype: torch.dtype | None = None
    ) -> Any:
        """Fetch the rows of other ranks that this rank needs. Collective; differentiable.

        Args:
            rows: this rank's rows, `[count, *row_shape]`, of a dtype that `weft.exchange` takes, on
                the device of the indices; the row shape and the dtype must be the same on every
                rank.
            async_op: return a `Work` at once; its `wait()` returns what the call returns without,
                as differentiable. Meanwhile you may compute with `rows`, but not change them.
                Backward is not in the background.
            wire_dtype: in which floating-point numbers and their gradients travel, as for
                `weft.exchange`. The rows of this rank are not rounded.

        Returns:
            A new tensor `[count + m, *row_shape]`: the rows of this rank, then those of `remote`.
            If `rows` of some rank requires a gradient, the results of all ranks do, and all must
            run backward. Backward sends gradients back to the owners. There the gradient of a row
            is the sum over all ranks that fetched it.

        Raises:
            WeftError: some rank's arguments are wrong or differ from the others'; the same text on
                every rank, naming the rank. The next call works.
            WireError: a peer or a link failed; names the culprit. The group is lost.

        Example:
            >>> import torch, weft
            >>> with weft.init():  # alone: no row is remote
            ...     plan = weft.remote_rows(torch.tensor([2, 0]), count=3)
            ...     plan.fetch(torch.tensor([5.0, 6.0, 7.0]))[plan.places]
            tensor([7., 5.])
        """
        group = self._group
        with preparing(group, "fetch") as call:
            call.is_async = truth("async_op", async_op)
            check(self._wrong(rows) or wrong_wire_dtype(wire_dtype, rows.dtype))
            send_rows(
                call,
                Scatter(group, "fetch"),
                rows,
                self._picks,
                self.sent,
                wire_dtype,
                lambda received: torch.cat([rows, *received]),
            )
        return call.start()

    def _wrong(self, rows: object) -> str | None:
        """What is wrong with what a caller passed, or None."""
        if error := wrong_rows(rows):
            return error
        assert isinstance(rows, Tensor)  # else it was wrong
        if rows.shape[0] != self.count:
            return f"rows has {rows.shape[0]} rows: the plan is for the {self.count} of this rank"
        if rows.device != self._picks.device:
            where = self._picks.device
            return f"rows is on {rows.device}, the plan on {where}: pass one device"
        return None


def _wrong(indices: object, count: object) -> str | None:
    """What is wrong with what a caller passed, or None."""
    if error := unsendable("indices", indices):
        return error
    assert isinstance(indices, Tensor)  # else it was not sendable
    if indices.dtype not in (torch.int32, torch.int64):
        return f"indices is {indices.dtype}: indices must be int32 or int64"
    if not 0 <= as_integer(count) <= _MOST:
        return f"count is {shown(count)}: pass the number of rows of this rank, 0 or more"
    return None


def _remote(group: Group, indices: Tensor, bounds: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The rows of other ranks among indices, sorted, each once; and where those of each begin.

    The host waits for a device once.

    Args:
        group: of the ranks.
        indices: of this rank, contiguous.
        bounds: for each rank the number of its first row, and the number of all rows.

    Raises:
        WeftError: an index is not that of a row.
    """
    ordered = indices.flatten().sort().values.long()
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    is_own = (ordered >= bounds[group.rank]) & (ordered < bounds[group.rank + 1])
    is_taken = is_first & ~is_own
    # how many are taken before each place
    counts = torch.cat([ordered.new_zeros(1), is_taken.cumsum(0)])
    cuts_there = counts[torch.searchsorted(ordered, there(bounds, ordered))]
    known = torch.cat([cuts_there, counts[-1:], ordered[:1], ordered[-1:]])
    found = read(group, known)
    *cuts, total = found[: len(bounds) + 1]
    if indices.numel():
        low, high = found[-2:]
        check(outside(low, high, None))
        if high >= bounds[-1]:
            raise WeftError(
                f"index {high} is outside of the {bounds[-1]} rows that all ranks have: "
                "count from 0"
            )
    slots = torch.where(is_taken, counts[:-1], total)  # all others in one behind
    remote = ordered.new_empty(total + 1).scatter_(0, slots, ordered)
    return remote[:total], cuts
