"""The rows of tables that are cut over ranks, for those who need them: a call and its gradients.

A message holds the parts of all tables, one after the other. In forward, each rank sends to each
owner the indices of the rows that it needs, then the owners send the rows; in backward the ranks
send the gradients of those rows, and no indices. The host waits for a device once in forward, once
more where there are several tables, and once in backward (`read`).

Indices are sorted, and gradients added in rank order, by kernels on the CPU, and by operations of
torch's on whatever device: these leave behind the distinct indices, of which only the device knows
how many there are, the greatest again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ... import kernels
from ...base.errors import summed_up
from ...base.tensors import plain, there
from ...call.attempt import preparing
from ...comm.all_to_all import Scatter
from ...comm.differentiable import apply
from ...comm.named import Cut
from ...group.group import Group
from ...kernels.kinds import Kinds
from ...kernels.ops import OPS
from ...verbs.group import read

NAME = "sharded_lookup"
ASKING = f"{NAME} (indices)"
_SENDING = f"{NAME} (rows)"
_SPELLED = 500  # characters of a fingerprint that tell what tables there are; above, a digest


class Table(Cut):
    """A table that is cut over ranks, as it is looked up.

    Attributes:
        weight: this rank's rows.
        bounds: for each rank the index of its first row; and the number of all rows.
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, average, sparse: of the
            table.
    """

    bounds: list[int]
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    average: bool
    sparse: bool
    _number: int  # among the tables that its group has made: so ranks know which one is meant

    @property
    def description(self) -> str:
        """What must be equal on all ranks, in words."""
        kind = "averaged" if self.average else "summed"
        most = "" if self.max_norm is None else f", max_norm {self.max_norm} of {self.norm_type}"
        size = f"{self.num_embeddings} x {self.embedding_dim}"
        dtype = str(self.weight.dtype)[6:]
        return f"{size} of {dtype}, gradients {kind}{most}, table {self._number} of its group"


class Search(NamedTuple):
    """The indices that a caller gave for a table, before the host knows anything of them.

    Attributes:
        found: each of them once, ascending; on a device the greatest again behind them.
        place: for each given one its place there, in the input's shape.
        numbers: what the host is to read, int64: the least and the greatest, where there are any;
            then where in `found` the indices from each bound on begin.
    """

    found: Tensor
    place: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, given: Tensor, bounds: Sequence[int]) -> Search:
        flat = plain(given).reshape(-1)
        if kernels.on_host(flat):
            found, order, starts, _ = kernels.distinct(flat)
            count = torch.full((1,), len(found), device=flat.device)
            place = torch.arange(len(found), dtype=flat.dtype, device=flat.device)
            if starts is not None:
                place = place.repeat_interleave(starts.diff(), output_size=len(flat))
        else:
            ascending, order, upto, count = Kinds.of(flat)
            found = ascending[-1:].repeat(len(flat)).scatter_(0, upto - 1, ascending)
            place = (upto - 1).to(flat.dtype)
        if order is not None:
            place = torch.empty_like(place).scatter_(0, order, place)
        begins = torch.minimum(torch.searchsorted(found, there(bounds, found)), count)
        return cls(found, place.view(given.shape), torch.cat([found[:1], found[-1:], begins]))


def description_of(tables: Sequence[Table]) -> str:
    """What tables there are, in words that the ranks compare when a call opens."""
    words = [table.description for table in tables]
    return summed_up("; ".join(words), _SPELLED, f"{len(tables)} tables, the first {words[0]}")


def messages_for(
    tables: Sequence[Table], wanted: Sequence[Tensor], counts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The message to each rank: the rows that are needed of each table, as the rank counts them.

    Args:
        tables: that are looked up.
        wanted: the indices of the rows of each, ascending.
        counts: by table, how many of these are on each rank.
    """
    is_tall = max(table.num_embeddings for table in tables) >= 1 << 31
    dtype = torch.int64 if is_tall else torch.int32
    parts = []
    for table, indices, of_ranks in zip(tables, wanted, counts, strict=True):
        split = torch.split(indices, list(of_ranks))
        owned = zip(split, table.bounds, strict=False)  # which ends with all rows
        parts.append([(some - first).to(dtype) for some, first in owned])
    heads = there([*itertools.chain(*counts)], parts[0][0]).view(len(tables), -1).t()
    by_rank = zip(*parts, strict=True)
    return [_joined(head, of_rank) for head, of_rank in zip(heads, by_rank, strict=True)]


def fetched(
    group: Group,
    tables: Sequence[Table],
    counts: Sequence[Sequence[int]],
    messages: Sequence[Tensor],
) -> list[Tensor]:
    """The rows of each table that this rank needs, `[u, embedding_dim]`. Collective.

    Args:
        group: of the ranks.
        tables, counts: as of `messages_for`.
        messages: what that gave.
    """
    fields: dict[str, object] = {"tables": description_of(tables)}
    heard = apply(Scatter(group, ASKING, fields), messages)
    many = len(tables)
    sizes = [[len(message)] for message in heard]
    if many > 1:  # a message says how many rows of each table a rank needs
        heads = read(group, torch.cat([message[:many] for message in heard]))
        sizes = [heads[start : start + many] for start in range(0, len(heads), many)]
    asked = [_parts(message, some) for message, some in zip(heard, sizes, strict=True)]
    with preparing(group, _SENDING):  # they may not fit in memory
        rows = _Owned.apply(group, tables, asked, *(table.weight for table in tables))  # type: ignore[no-untyped-call]  # torch's
    came = apply(Scatter(group, _SENDING, fields), cast(list[Tensor], rows))
    widths = [table.embedding_dim for table in tables]
    by_rank = zip(*counts, strict=True)
    pieces = [_rows_in(each, some, widths) for each, some in zip(came, by_rank, strict=True)]
    return [torch.cat(each) for each in zip(*pieces, strict=True)]


def _joined(head: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """A message of parts, one for each table; of several, a number for each stands before them."""
    return parts[0] if len(parts) == 1 else torch.cat([head, *parts])


def _parts(message: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """The parts of a message, given how long they are."""
    if len(lengths) == 1:
        return [message]
    return torch.split(message[len(lengths) :], list(lengths))


def _rows_in(message: Tensor, counts: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """The rows of each table in a message, given how many there are, and how wide."""
    shapes = [*zip(counts, widths, strict=True)]
    parts: Sequence[Tensor] = [message]
    if len(shapes) > 1:
        parts = _Apart.apply(message, [*map(math.prod, shapes)])  # type: ignore[no-untyped-call]  # torch's
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Apart(torch.autograd.Function):
    """Takes a message of the rows of several tables apart.

    In the message that backward sends, its head tells of which tables this rank has gradients.
    """

    @staticmethod
    def forward(ctx: Any, message: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lengths, ctx.like = lengths, message.new_empty(0)
        return tuple(_parts(message, lengths))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        parts = []
        for gradient, length in zip(gradients, ctx.lengths, strict=True):
            parts.append(ctx.like.new_zeros(length) if gradient is None else gradient)
        head = there([gradient is not None for gradient in gradients], ctx.like)
        return _joined(head, parts), None


class _Owned(torch.autograd.Function):
    """Takes the rows that each rank asked for out of this rank's shards.

    Backward adds up the gradients that the ranks send back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        tables: Sequence[Table],
        asked: Sequence[Sequence[Tensor]],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.asked = asked
        ctx.widths = [table.embedding_dim for table in tables]
        # bound here: by backward the tables may have another weight, dtype, or settings
        ctx.gradients = [
            functools.partial(_gradient, weight.shape, weight.dtype, table.average, table.sparse)
            for table, weight in zip(tables, weights, strict=True)
        ]
        for number, table in enumerate(tables):
            if table.max_norm is not None:
                indices = torch.cat([of_tables[number] for of_tables in asked])
                own = weights[number].detach()
                torch.embedding_renorm_(own, indices, table.max_norm, table.norm_type)
        head = weights[0].new_zeros(len(tables))
        messages = []
        for of_tables in asked:
            places = zip(weights, of_tables, strict=True)
            rows = [weight.index_select(0, indices).view(-1) for weight, indices in places]
            messages.append(_joined(head, rows))
        return tuple(messages)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *messages: Tensor) -> tuple[Any, ...]:
        runs = [[*each] for each in zip(*ctx.asked, strict=True)]  # by table
        many = len(runs)
        uses = torch.ones(1, dtype=torch.int64, device=messages[0].device)
        if many > 1:  # the optimizer of a table that no rank has used is not to see a gradient
            uses = torch.stack([message[:many] for message in messages]).ne(0).any(0).long()
        unions = [] if kernels.on_host(uses) else [Kinds.of(torch.cat(each)) for each in runs]
        known = read(ctx.group, torch.cat([uses, *(each.total for each in unions)]))
        pieces = []
        for message, of_tables in zip(messages, ctx.asked, strict=True):
            pieces.append(_rows_in(message, [len(indices) for indices in of_tables], ctx.widths))
        found: list[Tensor | None] = []
        for number, values in enumerate(zip(*pieces, strict=True)):
            if not (known[number] and ctx.needs_input_grad[3 + number]):
                found.append(None)
                continue
            if unions:
                indices, sums = _merged(unions[number], known[many + number], values)
            else:
                indices, sums = kernels.merge([*zip(runs[number], values, strict=True)], OPS["sum"])
            found.append(ctx.gradients[number](indices, sums, len(values)))
        return None, None, None, *found


def _merged(kinds: Kinds, count: int, runs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """As `kernels.merge`, of the rows of all ranks, whose indices are of so many kinds."""
    values = torch.cat([*runs])
    dtype = OPS["sum"].accumulator(values.dtype)
    sums = values.new_empty((count, *values.shape[1:]), dtype=dtype)
    distinct = kinds.distinct(count, len(runs))
    return distinct.indices, kernels.reduce(values, distinct, OPS["sum"], out=sums)


def _gradient(
    shape: torch.Size,
    dtype: torch.dtype,
    average: bool,
    sparse: bool,
    indices: Tensor,
    sums: Tensor,
    ranks: int,
) -> Tensor:
    """The gradient of this rank's shard, from the sums of what all ranks sent."""
    values = torch.empty_like(sums, dtype=dtype)
    kernels.finish(sums, values, ranks if average else 1)
    flags: dict[str, Any] = {"is_coalesced": True, "check_invariants": False}
    gradient = torch.sparse_coo_tensor(indices.long()[None], values, shape, **flags)
    return gradient if sparse else gradient.to_dense()
