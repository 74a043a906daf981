"""split of a list of tables among ranks of one host, by reading alone: two rounds and no header.

Ranks that can read each other's memory need not describe their rows. Each lays them where the
others read them, one table behind the other, its duplicates combined but in any order, and says
where in its statement; from the numbers of rows in there all compute the same cuts. Everybody reads
the rows of what it owns, sorts them by their keys and adds them up, tells where its sums are, and
reads the others'. So rows are sorted once, by their owner; nothing is sampled beside a table that
is cut in the middle, nothing is estimated or chosen, and the opening is followed by one small
exchange where `split` otherwise needs three (`near`).

Rows and sums are leased from the arena of the wire (`weft.wire.arena`). Who maps that adds rows
where they lie, and need not say that it has read the sums: they stay until all have spoken in
a later call. Others say so in a second exchange. A large result is made in common, without reading
sums (`weft.wire.common`). Where no table is cut, that takes one exchange: each owner's sums lie
where they would if no rows met.

Rows that are few came in the statement itself, and are taken from there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from operator import add
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..kernels import lists
from ..kernels.lists import Spans
from ..wire import common as in_common
from ..wire.base import Wire
from ..wire.common import Common
from ..wire.memory import fresh, typed
from .call import Call
from .mixed import Extents, Stacked, widened
from .near import say_read, staying, told
from .near_rows import Cut, Part, owned
from .space import Space
from .tables import Tables

__all__ = ["NAME", "lends", "pause", "prepare", "split"]

NAME = "split"
"""What it is in records: the same owners, messages and sums, described by another opening."""

_MOST = 16 << 20  # bytes of a rank's rows; for more a header, by which to choose, costs little
_PAUSE = 64  # openings of all calls until ranks that could not all lend try it again
_INDEX = 8  # bytes of a row besides its values, in the work of an owner
_ROOMY = 1.125  # times the rows of rank 0, that all ranks' average may be where it offers a block
_EVEN = 8  # a table is cut in the middle only where a share would be this part of it off

_resting: WeakKeyDictionary[Wire, int] = WeakKeyDictionary()


def lends(wire: Wire, nbytes: int) -> bool:
    """Whether this rank can lend rows of so many bytes to all others."""
    return (
        wire.size > 1
        and wire.near
        and nbytes <= _MOST
        and wire.sequence >= _resting.get(wire, 0)
        and all(map(wire.lends, wire.peers))
    )


def pause(wire: Wire) -> None:
    """Not all ranks lend, which all of them know: open the next calls with headers."""
    _resting[wire] = wire.sequence + _PAUSE


def prepare(wire: Wire, nbytes: int) -> None:
    """Before a call opens in which this rank lends so many bytes: offer room for its result."""
    if wire.rank == 0 and nbytes <= _MOST:
        in_common.offer(wire, int(_ROOMY * wire.size * nbytes))


def split(everyone: Sequence[Tables], call: Call, space: Space) -> Stacked:
    """The sums of all ranks' rows.

    Args:
        everyone: what each rank said.
        call: what every rank knows of it.
        space: the keys of all ranks.
    """
    wire, me = call.wire, call.wire.rank
    spans = lists.spans(np.array([said.numbers for said in everyone]), space.which)
    done = list(map(add, map(_INDEX.__mul__, spans.rows[-1]), spans.bytes[-1]))
    cuts = _cuts(done, wire.size)
    wire.count(_read_by(everyone[me], spans, cuts, wire))
    wire.memory.reclaim()  # all have spoken since they read what was lent in a call before
    with ExitStack() as undo:
        with owned(call, space, everyone, spans, _touched(cuts, me)) as mine:
            parts = mine.between(cuts[me : me + 2])
            count = sum(part.many for part in parts)
            size = sum(part.many * part.stack.row for part in parts)
            roomy = _roomy(wire, spans, cuts, space)
            exact = count * space.index.itemsize, size
            common = roomy or in_common.begun(wire, done[-1], exact)
            if common is not None:
                places, sums = undo.enter_context(common).mine
                keys, sums = places[: exact[0]].view(space.index), sums[:size]
            else:
                keys_at = -(-size // 8) * 8
                lease = wire.lease(keys_at + count * space.index.itemsize, lent=True)
                undo.callback(lease.release, later=True)
                sums = lease.tensor[:size]
                keys = typed(lease.tensor, (count,), space.index, keys_at)
            _add_up(parts, keys, sums, past=common is not None)
        wire.count([(peer, nbytes) for peer in wire.peers for nbytes in (keys.nbytes, size)])
        if roomy is not None:
            found = _gathered(space, roomy, count, spans, cuts)
        else:
            found = _read(call, space, keys, sums) if common is None else _made(space, common)
    return widened(found, space.stacks)


def _add_up(parts: Sequence[Part], keys: Tensor, sums: Tensor, *, past: bool) -> None:
    """The keys and the bytes of the rows that this rank owns; if `past`, not read here soon."""
    count = size = 0
    for part in parts:
        last = count + part.many
        rows = part.stack.typed(sums, part.many, size)
        part.add_up(keys[count:last], rows, past=past)
        count, size = last, size + part.many * part.stack.row


def _roomy(wire: Wire, spans: Spans, cuts: Sequence[Cut], space: Space) -> Common | None:
    """A result in which each owner has the room that its rows would take if none met."""
    if any(into for _, into in cuts) or any(stack.wide for stack in space.stacks):
        return None
    sizes = [
        [each * (ends[last] - ends[first]) for (first, _), (last, _) in pairwise(cuts)]
        for ends, each in ((spans.rows[-1], space.index.itemsize), (spans.bytes[-1], 1))
    ]
    return in_common.offered(wire, sizes)


def _gathered(
    space: Space, roomy: Common, count: int, spans: Spans, cuts: Sequence[Cut]
) -> Stacked:
    """The sums of all, each owner's at the beginning of its room."""
    counts = roomy.finish(count)
    tables = [table for table, _ in cuts[:-1]]
    # an owner's keys, and what it left free behind them
    places = (
        roomy.whole(0)
        .view(space.index)
        .split_with_sizes(
            [
                part
                for room, many in zip(roomy.sizes[0], counts, strict=True)
                for part in (many, room // space.index.itemsize - many)
            ]
        )
    )
    where = {table: spans.bytes[-1][table] for table in tables}
    return Stacked(torch.cat(places[::2]), roomy.own(1), where)


def _made(space: Space, common: Common) -> Stacked:
    """The sums of all, which each owner wrote where all ranks have them."""
    common.finish()
    keys = common.whole(0).view(space.index).clone()  # the memory may be let go once it is not own
    return Stacked(keys, common.own(1))


def _read(call: Call, space: Space, keys: Tensor, sums: Tensor) -> Stacked:
    """The sums of all, each owner's read where they lie."""
    wire, me, peers, stacks = call.wire, call.wire.rank, call.wire.peers, space.stacks
    said = staying(wire, keys, sums)
    summed = told(wire, said)
    counts = [keys.numel() if rank == me else summed[rank].rows for rank in range(wire.size)]
    places = [0, *accumulate(counts)]
    result = torch.empty(places[-1], dtype=space.index)
    spots = [result[low:high] for low, high in pairwise(places)]
    spots[me].copy_(keys)
    reads = [(peer, summed[peer].indices, spots[peer]) for peer in peers]
    if len(stacks) > 1:  # whose extents depend on what these are
        wire.read_all(reads)
        reads = []
    whole = Extents(result, stacks)
    out = fresh((whole.bytes[-1],), torch.uint8)
    parts = [out[low:high] for low, high in pairwise(map(whole.at, places))]
    reads += [(peer, summed[peer].values, parts[peer]) for peer in peers]
    wire.read_all([*reads, (me, sums.data_ptr(), parts[me])])
    say_read(wire, said, summed)
    return Stacked(result, out)


def _read_by(said: Tables, spans: Spans, cuts: Sequence[Cut], wire: Wire) -> list[tuple[int, int]]:
    """How many bytes each owner of its rows reads here."""
    if said.lent is None:
        return []
    me = wire.rank
    size, rows, bytes_ = spans.itemsizes[me], spans.rows[me], spans.bytes[me]
    reads = []
    for peer in wire.peers:
        first, last = _touched(cuts, peer)
        nbytes = (rows[last] - rows[first]) * size + bytes_[last] - bytes_[first]
        reads.append((peer, nbytes))
    return reads


def _cuts(done: Sequence[int], ranks: int) -> list[Cut]:
    """Where the range of each rank begins, so that all have about equal work, and where they end.

    Between two tables, if that is nearly as even; `done` is the work before each, and all of it.
    """
    total, near = done[-1], done[-1] // (_EVEN * ranks)
    found: list[Cut] = [(0, 0.0)]
    for rank in range(1, ranks):
        goal = total * rank // ranks
        table = bisect_right(done, goal) - 1
        if goal - done[table] <= near:
            found.append((table, 0.0))
        elif done[table + 1] - goal <= near:
            found.append((table + 1, 0.0))
        else:
            found.append((table, (goal - done[table]) / (done[table + 1] - done[table])))
    return [*found, (len(done) - 1, 0.0)]


def _touched(cuts: Sequence[Cut], rank: int) -> tuple[int, int]:
    """The first of the tables that a rank owns something of, and their end."""
    last, into = cuts[rank + 1]
    return cuts[rank][0], last + (into > 0)
