"""plain: one all-gather of the rows of all ranks, one sort, one segmented sum; by verbs.

It is what a sum is by definition, in operations of torch's, on whatever device, and what the other
algorithms give the bits of. It serves tensors that weft's wire does not carry, and sums by a
caller's function, on the wire too.

1. Each rank sorts its indices, sums its duplicates, and reads how many rows are left, with the
   smallest and the largest index: where one is out of bounds, it is known before anything is sent.
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
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..base.errors import WeftError
from ..base.memory import fresh
from ..call.attempt import confess, preparing
from ..call.opening import Opening, opened
from ..group.group import Group
from ..kernels import Distinct
from ..kernels.kinds import Kinds
from ..verbs.carrier import carried_by, own_device, verbs_of
from ..verbs.interface import Verbs
from ..verbs.posted import PostedVerbs
from .call import partial_dtype, row_bytes
from .guard import guarded
from .registry import PLAIN
from .request import Request, informed
from .rows import Rows
from .sizes import Sizes

WHOLE = 256 << 20
"""Bytes of all ranks' rows that are gathered at once."""

_HEADER = struct.Struct("<2q")  # how many rows a rank has, and its largest index
_MOST = 1 << 44  # rows that all ranks together may have: more than fit in any memory
_SHORT = 2**31 - 1  # indices below fit in int32, and one above them
_LAST = 2**63 - 1  # what fills the lists
_ALIGNED = 8  # bytes that a rank's buffer is a multiple of: as long as the longest number

Combine = Callable[[Tensor, int, Tensor], None]
"""Writes the sums of a table of all ranks' buffers, in which so many rows precede each rank's own,
to a tensor."""


@dataclass(frozen=True)
class Call:
    """What all ranks know of a call that goes by verbs, once it is open.

    Attributes:
        verbs: that carry the rows.
        request: its arguments; on a rank without rows those of the others' kind.
        distinct: this rank's indices.
        counts: how many rows each rank brings.
        highest: the largest index of all; -1 without rows.
        opening: what else they told.
    """

    verbs: Verbs
    request: Request
    distinct: Distinct
    counts: Sequence[int]
    highest: int
    opening: Opening

    @property
    def index(self) -> torch.dtype:
        """The dtype in which indices travel: int32 where all fit."""
        return torch.int32 if self.highest < _SHORT else torch.int64

    @property
    def partial(self) -> torch.dtype:
        """The dtype of sums that are not complete."""
        request = self.request
        return partial_dtype(request.op, request.dtype, request.rows.values.dtype)

    @property
    def why(self) -> str:
        """Why no algorithm of the wire runs."""
        op = self.request.op
        if not op.builtin:
            return "the op is a function"
        asked = self.request.algorithm == PLAIN
        return "it was asked for" if asked else f"weft's wire does not carry {self.verbs.name}"

    @property
    def sizes(self) -> Sizes:
        """The sizes of the call."""
        rows = self.request.rows
        row_shape = tuple(rows.row_shape)
        places = self.highest + 1
        return Sizes(
            ranks=self.verbs.size,
            total=sum(self.counts),
            most=max(self.counts),
            fewest=min(self.counts),
            height=places if rows.height is None else rows.height,
            row=row_bytes(row_shape, self.request.dtype),
            partial=row_bytes(row_shape, self.partial),
            places=places,
        )


def stated(verbs: Verbs, request: Request) -> tuple[Distinct, bytearray]:
    """This rank's indices sorted, each once, or as they are if rows only move; and what it tells.

    Raises:
        WeftError: an index is out of bounds.
    """
    distinct = _distinct(verbs, request)
    return distinct, bytearray(_HEADER.pack(distinct.indices.numel(), request.highest))


def call_of(verbs: Verbs, request: Request, distinct: Distinct, opening: Opening) -> Call:
    """The call, of which all ranks know the same.

    Raises:
        WireError: what a rank told cannot be read.
    """
    if not len(request.rows):
        request = informed(request, opening)
        distinct = Distinct(request.rows.indices, None, None)
    counts, highest = zip(*opening.read(_header_in), strict=True)
    return Call(verbs, request, distinct, counts, max(highest), opening)


def heard(group: Group, request: Request, name: str, opening: Opening) -> Call:
    """The call on a rank that has learnt from the opening on what device rows are; collective.

    All ranks open it again, those that knew, too: some may have no such device.
    """
    with preparing(group, name):
        device = own_device(opening.fields["device"].partition(" ")[0])
        verbs = verbs_of(group, device) or PostedVerbs(group, carried_by(None))
        rows = request.rows
        there = Rows(rows.indices.to(device), rows.values.to(device), rows.height)
    opened(group, name, {"device": verbs.name})
    distinct = Distinct(there.indices, None, None)
    return call_of(verbs, replace(request, rows=there), distinct, opening)


def performed(group: Group, call: Call, name: str, body: Callable[[Call], Rows]) -> Rows:
    """Run a call that is open; collective.

    Args:
        group, call: that.
        name: of the call.
        body: what it does.

    Raises:
        WeftError: a caller's function raised; the same text on every rank.
    """
    op = call.request.op
    if op.builtin:
        return body(call)
    raised: list[BaseException] = []
    try:
        result = body(replace(call, request=replace(call.request, op=guarded(op, raised))))
        confess(group, f"the end of {name}", raised[0] if raised else None)
    finally:
        raised.clear()
    return result


def _header_in(body: memoryview) -> tuple[int, int]:
    """Read a header, or the beginning of one of the wire's, as who listens has sent it.

    Raises:
        ValueError, struct.error: the bytes are none.
    """
    count, highest = _HEADER.unpack_from(body)
    if not (0 <= count < _MOST and highest >= -1):
        raise ValueError(f"no rank can have {count} rows up to index {highest}")
    return count, highest


def on_host(tensor: Tensor) -> bool:
    """Whether the kernels sort and merge; else operations of torch's do, and `read` waits."""
    return tensor.is_cpu


def _distinct(verbs: Verbs, request: Request) -> Distinct:
    """As `stated`, without what is told."""
    indices = request.rows.indices
    if request.moves:
        request.look_at_ends(verbs.read)
        return Distinct(indices, None, None)
    if on_host(indices):
        return request.look().distinct
    if not indices.numel():
        return Distinct(indices, None, None)
    kinds = Kinds.of(indices)
    most = kinds.starts(len(indices)).diff().max().view(1)
    ends = kinds.ascending[:1], kinds.ascending[-1:]
    numbers = torch.cat([kinds.total, most, *ends])  # promotes to int64
    count, repeats, *found = verbs.read(numbers)
    request.take_ends(*found)
    if request.highest == _LAST:
        raise WeftError(f"index {_LAST} is too large for a device: pass .cpu()")
    if count == len(indices):
        return Distinct(kinds.ascending, kinds.order, None, 1)
    return kinds.distinct(count, repeats)


# sums


def summed(call: Call) -> Rows:
    """The sum of all ranks' rows, canonical, in the caller's dtype; collective."""
    given = call.request.rows
    if not max(call.counts):
        return Rows(given.indices[:0], given.values[:0], given.height)
    if _is_small(call):
        indices, values = _table_summed(call)
    else:
        indices, values = _rows_summed(call)
    shaped = values.view(len(indices), *given.row_shape)
    return Rows(indices.to(given.indices.dtype), shaped, given.height)


def _rows_summed(call: Call) -> tuple[Tensor, Tensor]:
    """The result's indices and values, by an all-gather of rows."""
    request = call.request
    given = request.rows
    capacity = max(call.counts)
    width = math.prod(given.row_shape)
    if not width:  # rows without bytes
        place = fresh((capacity,), call.index, given.indices.device)
        indices, _ = _united(call, call.verbs.all_gather(_list_of(call, place)))
        return indices, given.values.new_empty((len(indices), *given.row_shape))
    # a function is given whole rows
    shape = (width,) if request.op.builtin else tuple(given.row_shape)
    values = given.values.reshape(len(given), *shape)
    most = WHOLE // (call.verbs.size * capacity * request.dtype.itemsize)
    step = min(max(1, most), width) if request.op.builtin else width
    for start in range(0, width, step):
        columns = slice(start, start + step)
        some = values if step == width else values[:, columns].contiguous()
        lists, table, front = _gathered(call, some, has_list=start == 0)
        if start == 0:
            indices, combine = _united(call, lists)
            found = fresh((len(indices), *shape), values.dtype, values.device)
        out = found if step == width else found[:, columns]
        sums = out
        if not out.is_contiguous() or not out.dtype == call.partial == request.dtype:
            sums = fresh((len(indices), *some.shape[1:]), call.partial, values.device)
        combine(table, front, sums)
        _finish(call, sums, out)
    return indices, found


def _list_of(call: Call, place: Tensor) -> Tensor:
    """Write this rank's indices to a place of the capacity, with greater ones behind them."""
    indices = call.distinct.indices
    place[: len(indices)] = indices
    place[len(indices) :] = torch.iinfo(place.dtype).max
    return place


def _gathered(call: Call, values: Tensor, *, has_list: bool) -> tuple[Tensor, Tensor, int]:
    """Sum this rank's duplicates into a buffer, and gather those of all.

    Args:
        call: whose rows they are.
        values: `[k, *row_shape]`, as given; or some columns.
        has_list: whether the buffer begins with this rank's indices.

    Returns:
        The lists of all ranks, one behind the other; the buffers of all ranks as one table of rows;
        and how many rows of that precede those of each rank in its buffer.
    """
    capacity = max(call.counts)
    count = call.distinct.indices.numel()
    dtype = call.request.dtype
    row = row_bytes(tuple(values.shape[1:]), dtype)
    nbytes = capacity * call.index.itemsize if has_list else 0
    front = -(-nbytes // row)
    grain = _ALIGNED // math.gcd(row, _ALIGNED)
    front += -(front + capacity) % grain
    buffer = fresh((front + capacity, *values.shape[1:]), dtype, values.device)
    kernels.reduce(values, call.distinct, call.request.op, out=buffer[front : front + count])
    if has_list:
        _list_of(call, buffer.view(-1).view(torch.uint8)[:nbytes].view(call.index))
    gathered = call.verbs.all_gather(buffer.view(-1))
    buffers = gathered.view(torch.uint8).view(call.verbs.size, -1)
    lists = buffers[:, :nbytes].contiguous().view(-1).view(call.index)
    return lists, gathered.view(-1, *values.shape[1:]), front


def _united(call: Call, lists: Tensor) -> tuple[Tensor, Combine]:
    """The union of all ranks' lists, and what combines their rows."""
    op = call.request.op
    ranks = call.verbs.size
    capacity = max(call.counts)
    if on_host(lists):
        runs = [lists[rank * capacity :][:count] for rank, count in enumerate(call.counts)]
        union = kernels.union(runs)

        def combine(table: Tensor, front: int, out: Tensor) -> None:
            buffers = table.view(ranks, front + capacity, *table.shape[1:])
            ends = [front + count for count in call.counts]
            rows = [each[front:end] for each, end in zip(buffers, ends, strict=True)]
            kernels.combine_runs(out, union.slots, rows, op)

        return union.indices, combine

    kinds = Kinds.of(lists, sum(call.counts))  # without what only fills the lists
    (count,) = call.verbs.read(kinds.total)
    segments = kinds.distinct(count, ranks)._replace(order=None)
    rank = torch.div(kinds.order, capacity, rounding_mode="floor")

    def combine_segments(table: Tensor, front: int, out: Tensor) -> None:
        where = kinds.order + rank * front + front  # of a row, among those of all buffers
        rows = table.index_select(0, where).to(out.dtype)
        kernels.reduce(rows, segments, op, out=out)

    return segments.indices, combine_segments


def _finish(call: Call, sums: Tensor, out: Tensor) -> None:
    """Write complete sums: divided, and rounded once to what travels."""
    divisor = call.verbs.size if call.request.op.mean else 1
    rounded = out
    if out.dtype != call.request.dtype:
        rounded = torch.empty_like(sums, dtype=call.request.dtype)
    kernels.finish(sums, rounded, divisor)
    if rounded is not out:
        out.copy_(rounded)


# sums of small tables


def _is_small(call: Call) -> bool:
    """Whether the whole table is summed: it has fewer numbers than half of what would be gathered.

    The same on every rank.
    """
    op, height = call.request.op, call.request.rows.height
    if height is None or op.name not in ("sum", "avg") or not op.builtin:
        return False
    is_less = 2 * height < call.verbs.size * max(call.counts)
    return is_less and call.verbs.reduces("sum", call.partial)


def _table_summed(call: Call) -> tuple[Tensor, Tensor]:
    """The result's indices and values, by a reduction of the whole table, and of which rows are
    there."""
    given = call.request.rows
    height = given.height
    assert height is not None
    device = given.values.device
    width = math.prod(given.row_shape)
    values = given.values.reshape(len(given), width)
    own = fresh((len(call.distinct.indices), width), call.request.dtype, device)
    kernels.reduce(values, call.distinct, call.request.op, out=own)
    where = call.distinct.indices.long()
    table = torch.zeros(height, width, dtype=call.partial, device=device)
    table.index_copy_(0, where, own.to(call.partial))
    is_there = torch.zeros(height, dtype=torch.uint8, device=device).index_fill_(0, where, 1)
    call.verbs.all_reduce(table, "sum")
    call.verbs.all_reduce(is_there, "max")
    upto = torch.cumsum(is_there, 0)
    (count,) = call.verbs.read(upto[-1:])
    indices = torch.searchsorted(upto, torch.arange(1, count + 1, device=device))
    found = fresh((count, width), given.values.dtype, device)
    _finish(call, table.index_select(0, indices), found)
    return indices, found


# parts of sums, and rows that only move


def part_of(verbs: Verbs, rows: Rows, low: int, high: int) -> Rows:
    """The canonical rows with indices from `low` up to, not including, `high`."""
    if not len(rows):
        return rows
    most = torch.iinfo(rows.indices.dtype).max
    bounds = [torch.searchsorted(rows.indices, min(bound, most)) for bound in (low, high)]
    start, stop = verbs.read(torch.stack(bounds))
    stop = len(rows) if high > most else stop
    return Rows(rows.indices[start:stop].clone(), rows.values[start:stop].clone(), rows.height)


def concatenated(call: Call) -> Rows:
    """The rows of all ranks, one rank's behind the other's, as they are; collective."""
    given = call.request.rows
    if not max(call.counts):
        return given
    indices = _all_of(call, given.indices, given.indices.dtype)
    values = _all_of(call, given.values, call.request.dtype)
    return Rows(indices, values.to(given.values.dtype), given.height)


def _all_of(call: Call, mine: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor with an entry for each row, of all ranks; it travels in that dtype; collective."""
    shape = max(call.counts), *mine.shape[1:]
    padded = fresh(shape, dtype, mine.device)
    padded[: len(mine)] = mine
    of_ranks = call.verbs.all_gather(padded.view(-1)).view(call.verbs.size, *shape)
    parts = zip(of_ranks.unbind(), call.counts, strict=True)
    return torch.cat([part[:count] for part, count in parts])


def of_source(call: Call, source: int) -> Rows:
    """The rows of one rank, as they are; collective."""
    given = call.request.rows
    indices = _broadcast(call, given.indices, given.indices.dtype, source)
    values = _broadcast(call, given.values, call.request.dtype, source)
    return Rows(indices, values.to(given.values.dtype), given.height)


def _broadcast(call: Call, mine: Tensor, dtype: torch.dtype, source: int) -> Tensor:
    """A tensor with an entry for each row, of one rank; it travels in that dtype; collective."""
    found = fresh((call.counts[source], *mine.shape[1:]), dtype, mine.device)
    if call.verbs.rank == source:
        found.copy_(mine)
    if found.numel():
        call.verbs.broadcast(found, source)
    return found
