"""plain: one all-gather of the rows of all ranks, one sort, one segmented sum; by verbs.

It is what a sum is by definition, in operations of torch's, on whatever device, and what the other
algorithms give the bits of. It serves tensors that weft's wire does not carry, and sums by a
caller's function, on the wire too.

1. Each rank sorts its indices, and reads how many are left without duplicates, with the smallest
   and the largest: where one is out of bounds, it is known before anything is sent (`look`).
2. The opening tells how many rows each rank has. The most of them is the *capacity*: from here on
   no size depends on data but that of the result.
3. Each rank puts its indices and its rows into one buffer, which is as long on all, and one
   all-gather brings all buffers. Behind a rank's indices stand some that are greater than any.
4. One sort brings the indices of all together, those of one index in the order of ranks. The host
   reads how many there are. One segmented sum, from left to right, makes the result: so all ranks
   get the same bits, which no atomic operation could promise.

Above `WHOLE` bytes the buffers take the columns of rows in turns. A table that has fewer rows than
half of what ranks give is summed whole instead, with a byte for each row that is there: the order
of those additions is that of the process group.

On the CPU the kernels sort and merge. Gathering sparse rows and adding them up is what
torch.distributed does, "SSAR" in Renggli et al., "SparCML" (SC'19), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..base.memory import fresh
from ..base.tensors import there
from ..call.attempt import preparing
from ..call.opening import opened
from ..group.group import Group
from ..kernels.kinds import Kinds
from ..verbs.carrier import carried_by, own_device, verbs_of
from ..verbs.interface import Verbs
from ..verbs.posted import PostedVerbs
from .call import Call, row_bytes
from .canonical import CanonicalRows
from .choose import Line
from .registry import PLAIN
from .rows import Rows

WHOLE = 256 << 20
"""Bytes of all ranks' rows that are gathered at once."""

_ALIGNED = 8  # bytes that a rank's buffer is a multiple of: as long as the longest number

Combine = Callable[[Tensor, int, Tensor], None]
"""Writes the sums of a table of all ranks' buffers, in which so many rows precede each rank's own,
to a tensor."""


def heard(group: Group, name: str, said: str) -> tuple[Verbs, torch.device]:
    """The verbs, and the device, of a rank that has learnt where rows are; collective.

    All ranks open the call again, the one that knew in `sparse_broadcast`: some may have no such
    device.

    Args:
        group: of the call.
        name: of the call.
        said: what the opening said of the device.
    """
    with preparing(group, name):
        device = own_device(said.partition(" ")[0])
        verbs = verbs_of(group, device) or PostedVerbs(group, carried_by(None))
    opened(group, name, {"device": verbs.name})
    return verbs, device


def line_of(verbs: Verbs, call: Call) -> Line:
    """What runs, and why no algorithm of the wire."""
    if not call.op.builtin:
        return Line(PLAIN, "the op is a function")
    if call.fields.get("algorithm") == PLAIN:
        return Line(PLAIN, "it was asked for")
    return Line(PLAIN, f"weft's wire does not carry {verbs.name}")


# sums


def summed(
    verbs: Verbs, rows: CanonicalRows, call: Call, bounds: Sequence[int] = ()
) -> tuple[Rows, list[int]]:
    """The sum of all ranks' rows, canonical; collective.

    Args:
        verbs, rows, call: of the call.
        bounds: indices, or their end: from 0 up to 2**63.

    Returns:
        The sum, and how many of its rows come before each of the bounds.
    """
    given = call.given
    if not call.sizes.total:
        return given, [0] * len(bounds)
    way = _table_summed if _is_small(verbs, call) else _rows_summed
    indices, values, cuts = way(verbs, rows, call, bounds)
    shaped = values.view(len(indices), *given.row_shape)
    return Rows(indices.to(given.indices.dtype), shaped, given.height), cuts


def _rows_summed(
    verbs: Verbs, rows: CanonicalRows, call: Call, bounds: Sequence[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """The result's indices and values, by an all-gather of rows; and what comes before bounds."""
    given = call.given
    capacity = call.sizes.most
    width = math.prod(given.row_shape)
    if not width:  # rows without bytes
        own = fresh((capacity,), call.wire_index, given.indices.device)
        _fill(own, rows.indices)
        lists = verbs.all_gather(own)
        indices, cuts, _ = _united(verbs, call, lists, bounds)
        return indices, given.values.new_empty((len(indices), *given.row_shape)), cuts
    # a function is given whole rows
    shape = (width,) if call.op.builtin else given.row_shape
    values = given.values.reshape(len(given), *shape)
    most = WHOLE // (verbs.size * capacity * call.dtype.itemsize)
    step = min(max(1, most), width) if call.op.builtin else width
    for start in range(0, width, step):
        columns = slice(start, start + step)
        some = values if step == width else values[:, columns].contiguous()
        lists, table, front = _gathered(verbs, rows, some, call, has_list=start == 0)
        if start == 0:
            indices, cuts, combine = _united(verbs, call, lists, bounds)
            found = fresh((len(indices), *shape), call.dtype, values.device)
        out = found if step == width else found[:, columns]
        sums = out
        if not out.is_contiguous() or call.partial_dtype != call.dtype:
            sums = fresh((len(indices), *some.shape[1:]), call.partial_dtype, values.device)
        combine(table, front, sums)
        call.finish(sums, out)
    return indices, found, cuts


def _fill(out: Tensor, indices: Tensor) -> None:
    """Write this rank's indices to a list of the capacity, with greater ones behind them."""
    out[: len(indices)] = indices
    out[len(indices) :] = torch.iinfo(out.dtype).max


def _gathered(
    verbs: Verbs, rows: CanonicalRows, values: Tensor, call: Call, *, has_list: bool
) -> tuple[Tensor, Tensor, int]:
    """Sum this rank's duplicates into a buffer, and gather those of all.

    Args:
        verbs, rows, call: of the call.
        values: `[k, *row_shape]`, as given; or some columns.
        has_list: whether the buffer begins with this rank's indices.

    Returns:
        The lists of all ranks, one behind the other; the buffers of all ranks as one table of rows;
        and how many rows of that precede those of each rank in its buffer.
    """
    capacity = call.sizes.most
    row = row_bytes(values.shape[1:], call.dtype)
    nbytes = capacity * call.sizes.index if has_list else 0
    front = -(-nbytes // row)
    grain = _ALIGNED // math.gcd(row, _ALIGNED)
    front += -(front + capacity) % grain
    buffer = fresh((front + capacity, *values.shape[1:]), call.dtype, values.device)
    kernels.reduce(values, rows.distinct, call.op, out=buffer[front : front + len(rows)])
    if has_list:
        own = buffer.view(-1).view(torch.uint8)[:nbytes]
        _fill(own.view(call.wire_index), rows.indices)
    gathered = verbs.all_gather(buffer.view(-1))
    buffers = gathered.view(torch.uint8).view(verbs.size, -1)
    lists = buffers[:, :nbytes].contiguous().view(-1).view(call.wire_index)
    return lists, gathered.view(-1, *values.shape[1:]), front


def _united(
    verbs: Verbs, call: Call, lists: Tensor, bounds: Sequence[int]
) -> tuple[Tensor, list[int], Combine]:
    """The union of all ranks' lists; how many of it come before each bound; what combines rows."""
    ranks = verbs.size
    capacity = call.sizes.most
    if kernels.on_host(lists):
        counts = call.counts
        runs = [lists[rank * capacity :][:count] for rank, count in enumerate(counts)]
        union = kernels.union(runs)
        cuts = _places(union.indices, bounds).tolist()

        def combine(table: Tensor, front: int, out: Tensor) -> None:
            buffers = table.view(ranks, front + capacity, *table.shape[1:])
            for slots, buffer, count in zip(union.slots, buffers, counts, strict=True):
                kernels.combine(out, slots, buffer[front : front + count], call.op)

        return union.indices, cuts, combine

    kinds = Kinds.of(lists, call.sizes.total)  # without what only fills the lists
    count, *cuts = _counted(verbs, kinds.ascending, kinds.upto, bounds)
    segments = kinds.distinct(count, ranks)._replace(order=None)
    rank = torch.div(kinds.order, capacity, rounding_mode="floor")

    def combine_segments(table: Tensor, front: int, out: Tensor) -> None:
        where = kinds.order + rank * front + front  # of a row, among those of all buffers
        rows = table.index_select(0, where).to(out.dtype)
        kernels.reduce(rows, segments, call.op, out=out)

    return segments.indices, cuts, combine_segments


def _counted(verbs: Verbs, ascending: Tensor, upto: Tensor, bounds: Sequence[int]) -> list[int]:
    """How many rows a sum has, and how many of them come before each bound; one read.

    Args:
        verbs: that read.
        ascending: indices, on a device.
        upto: how many rows there are up to each of these.
        bounds: see `summed`.
    """
    numbers = upto[-1:]
    if bounds:
        before = torch.cat([torch.zeros_like(numbers), upto])
        numbers = torch.cat([numbers, before.index_select(0, _places(ascending, bounds))])
    return verbs.read(numbers)


def _places(ascending: Tensor, bounds: Sequence[int]) -> Tensor:
    """How many of some indices come before each bound."""
    most = torch.iinfo(ascending.dtype).max
    last = there([min(bound - 1, most) for bound in bounds], ascending)
    return torch.searchsorted(ascending, last, right=True)


# sums of small tables


def _is_small(verbs: Verbs, call: Call) -> bool:
    """Whether the whole table is summed: it has fewer numbers than half of what would be gathered.

    The same on every rank.
    """
    height = call.height
    if height is None or call.op.name not in ("sum", "avg") or not call.op.builtin:
        return False
    is_less = 2 * height < verbs.size * call.sizes.most
    return is_less and verbs.reduces("sum", call.partial_dtype)


def _table_summed(
    verbs: Verbs, rows: CanonicalRows, call: Call, bounds: Sequence[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """The result's indices and values, by a reduction of the whole table, and of which rows are
    there; and what comes before bounds."""
    given = call.given
    height = given.height
    assert height is not None
    device = given.values.device
    width = math.prod(given.row_shape)
    values = given.values.reshape(len(given), width)
    own = fresh((len(rows), width), call.dtype, device)
    kernels.reduce(values, rows.distinct, call.op, out=own)
    where = rows.indices.long()
    table = torch.zeros(height, width, dtype=call.partial_dtype, device=device)
    table.index_copy_(0, where, own.to(call.partial_dtype))
    is_there = torch.zeros(height, dtype=torch.uint8, device=device).index_fill_(0, where, 1)
    verbs.all_reduce(table, "sum")
    verbs.all_reduce(is_there, "max")
    upto = torch.cumsum(is_there, 0)
    count, *cuts = _counted(verbs, torch.arange(height, device=device), upto, bounds)
    indices = torch.searchsorted(upto, torch.arange(1, count + 1, device=device))
    found = fresh((count, width), call.dtype, device)
    call.finish(table.index_select(0, indices), found)
    return indices, found, cuts


# rows that only move


def concatenated(verbs: Verbs, call: Call) -> Rows:
    """The rows of all ranks, one rank's behind the other's, as they are; collective."""
    given = call.given
    if not call.sizes.total:
        return given
    indices = _all_of(verbs, call, given.indices, given.indices.dtype)
    values = _all_of(verbs, call, given.values, call.dtype)
    return Rows(indices, values, given.height)


def _all_of(verbs: Verbs, call: Call, mine: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor with an entry for each row, of all ranks; it travels in that dtype; collective."""
    shape = call.sizes.most, *mine.shape[1:]
    padded = fresh(shape, dtype, mine.device)
    padded[: len(mine)] = mine
    of_ranks = verbs.all_gather(padded.view(-1)).view(verbs.size, *shape)
    parts = zip(of_ranks.unbind(), call.counts, strict=True)
    return torch.cat([part[:count] for part, count in parts])


def of_source(verbs: Verbs, call: Call, source: int) -> Rows:
    """The rows of one rank, as they are; collective."""
    given = call.given
    indices = _broadcast(verbs, call, given.indices, given.indices.dtype, source)
    values = _broadcast(verbs, call, given.values, call.dtype, source)
    return Rows(indices, values, given.height)


def _broadcast(verbs: Verbs, call: Call, mine: Tensor, dtype: torch.dtype, source: int) -> Tensor:
    """A tensor with an entry for each row, of one rank; it travels in that dtype; collective."""
    found = fresh((call.counts[source], *mine.shape[1:]), dtype, mine.device)
    if verbs.rank == source:
        found.copy_(mine)
    if found.numel():
        verbs.broadcast(found, source)
    return found
