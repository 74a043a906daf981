"""split: the owner of an index range sums it, then shares the sums; in one stage, or in several.

A sparse reduce-scatter followed by a sparse all-gather, each row received once for each rank that
holds it, and once more for each that does not own it: within 1 + 1/P of the bound. The index
ranges are cut so that all owners have equal work, also on skewed data (`owners`).

Index sets go to the owners first. An owner merges them while the first values arrive, and tells
everybody the indices of its sums; so every rank knows the size of the result, and every row's
place in it, early. Owners merge chunk by chunk into their part of the result; each finished block
goes round the ring straight from there, and is received where it belongs. Workspace is bounded,
whatever P is.

With several factors (`factors`) the owners are those of a block, such as a host. What they sum is
then summed among the ranks of one place, one of each block, by whatever algorithm is quickest
there: its rows are the block's sums, which leave as they are made, and its result goes straight to
the ranks of the block. Nothing is agreed on again: the headers of the call say what to expect. Sums
of one block travel unrounded; complete sums are divided and rounded once, and shared in the dtype
of the rows.

Best for overlapping rows or many ranks: the general case.

"SSAR_Split_allgather" of Renggli et al., "SparCML" (SC'19), section 5.3; balanced owners as in Li
and Hoefler, "Near-optimal sparse allreduce" (PPoPP'22), section 3; factors as in Zhao and Canny,
"Kylix" (ICPP 2014), section 4, and with hosts first as in Goyal et al., "Accurate, Large Minibatch
SGD" (2017), section 4.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from torch import Tensor

from ...rows import Rows
from ...wire.memory import typed
from ..call import Call
from ..cost import Blocks, Cost, Load
from ..factors import blocks, in_parts, middle, on_hosts, within
from ..header import Header
from ..local_rows import LocalRows, SummedRows
from ..owners import ToOwners, balanced, of_blocks, owned, spans
from ..registry import algorithm
from ..stream import Share, list_messages, window


def cost(load: Load) -> Cost:
    return _in_stages(load) if load.stages else _flat(load)


def _flat(load: Load) -> Cost:
    others, given, sums = load.ranks - 1, load.mean / load.ranks, load.union / load.ranks
    asked, told = (load.list_of(rows, 1 / load.ranks) for rows in (given, sums))
    received = others * (given * load.given + sums * load.row + asked + told)
    values = load.parted(given, load.given, others) + load.parted(sums, load.row, others)
    return Cost(
        rounds=2 + load.hops_of_shared(sums),
        messages=others * (list_messages(asked) + list_messages(told)) + round(values),
        bytes=received,
        merged=load.merging(load.mean, load.pieces(given, load.ranks, sums)),
        delayed=load.queue * others * (given * load.given + asked + told)
        + load.shared(others * sums * load.row)
        + load.unevenly(received)
        + load.crowded(received),
        # the index lists of one's own share, then those of all sums
        memory=min(load.mean * load.given, others * window(load) * load.chunk)
        + load.uniting(load.mean, sums)
        + load.union * load.listed(load.union),
    )


def _in_stages(load: Load) -> Cost:
    found = blocks(load)
    block = within(load)
    among_places, inner = middle(load)
    inner_cost = among_places.cost(inner)
    places = load.factors[0]
    leading = places * len(found) / load.ranks  # the part of the ranks that has a place
    given = load.mean / places
    sums = load.union / places
    asked = block.list_of(given, 1 / places)
    told = block.list_of(sums, 1 / places)

    # the average rank gives to the owners of its block, and gets the sums of the others
    owners = places - leading
    others = load.ranks / len(found) - 1
    up = owners * list_messages(asked) + block.parted(given, load.given, places) * owners / places
    lists = leading * list_messages(told) + 1 - leading
    runs = len(found) if in_parts(load, among_places, inner) else 1
    down = others * (lists + leading * runs * block.chunks(sums / runs, load.row))
    reduced = owners * (given * load.given + asked)
    shared = owners * (sums * load.row + told)

    slowest = inner_cost.slowest or inner_cost
    if block.on_one_host:
        assert load.link is not None
        sharing = inner.sharing
        alone, meanwhile = on_hosts(load, among_places, inner)
        slowest = replace(
            slowest,
            bytes=sharing * slowest.bytes,
            delayed=sharing * slowest.delayed,
            merged=slowest.merged + alone,
            overlapped=slowest.overlapped + meanwhile,
        )
        # a rank posts messages within the host while the link carries what other places send
        messages = slowest.messages
        slowest = replace(
            slowest, overlapped=slowest.overlapped + (up + down) * load.link.work / load.link.gamma
        )
        hops = 1.0
    else:
        in_block = reduced + shared
        merged = block.merging(block.ranks * given, block.pieces(given, block.ranks, sums))
        slowest = replace(
            slowest,
            bytes=slowest.bytes + in_block,
            delayed=slowest.delayed + block.unevenly(in_block) + block.crowded(in_block),
            merged=slowest.merged + merged,
        )
        messages = round(slowest.messages + up + down)
        hops = block.hops_of_shared(sums)
    memory = (
        inner_cost.memory
        + inner.mean * load.partial
        + min(load.mean * load.given, block.ranks * window(block) * block.chunk)
        + block.uniting(block.ranks * given, inner.mean)
        + load.union * block.listed(load.union)
    )
    slowest = replace(
        slowest,
        rounds=slowest.rounds + (3 if load.lockstep else 2) + hops,
        messages=messages,
        memory=memory,
    )
    return replace(
        slowest,
        messages=round(up + down + leading * inner_cost.messages),
        bytes=reduced + shared + leading * inner_cost.bytes,
        slowest=slowest,
    )


@algorithm(cost=cost, lockstep=True)
def split(rows: LocalRows, call: Call) -> Rows:
    found = blocks(call.load)
    block = next(ranks for ranks in found if call.group.rank in ranks)
    is_flat = len(found) == 1
    among = call if is_flat else _within(call, block)
    bounds = _bounds(call, block)
    moving = ToOwners(among, rows, bounds)
    share = Share(call, among)

    if is_flat:
        # what will be summed here, told to all ahead of the bulk of the values
        share.tell(moving.indices, spans(bounds))
        moving.send_rest()

        # now the result's size is known, and the place of everybody's sums in it
        mine = share.lay_out(share.heard())
        for _, stop in moving.sums(call, moving.union, mine):
            share.send(stop)
    else:
        moving.send_rest()
        if call.load.lockstep:
            # the round of the block's rows, also for ranks that sum none, and so await none
            among.group.post().wait()
        between = _Between(call, found, bounds)
        place = block.index(call.group.rank)
        onward = _Onward(share, between, place, found.index(block))
        if place < call.load.factors[0]:
            _sum_between(call, moving, between, onward)
        else:
            onward.place(moving.indices)

    result = share.finish()
    moving.finish()
    share.release()
    return result


def _within(call: Call, block: tuple[int, ...]) -> Call:
    """The call among the ranks of a block."""
    among = copy(call)
    among.group = call.group.subset(block)
    among.load = within(call.load)
    return among


def _bounds(call: Call, block: tuple[int, ...]) -> list[int]:
    """The ranges of a block's ranks; those that have no place own nothing."""
    if len(block) == call.group.size:
        return balanced(call.header, call.group.size)
    bounds = balanced(call.header, call.group.size, call.load.factors[0])
    return bounds + bounds[-1:] * (len(block) + 1 - len(bounds))


class _Between:
    """What runs between the blocks.

    Attributes:
        call: the call.
        blocks: the ranks of each.
        bounds: the ranges of a block's ranks.
        algorithm, load: what runs among the ranks of a place, and the load that it has.
        in_parts: whether sums are handed on in the parts that each rank of a place sums.
    """

    def __init__(self, call: Call, found: Blocks, bounds: list[int]) -> None:
        self.call = call
        self.blocks = found
        self.bounds = bounds
        self.algorithm, self.load = middle(call.load)
        self.in_parts = in_parts(call.load, self.algorithm, self.load)

    def header(self, place: int) -> Header:
        """Of the ranks of a place together."""
        span = self.bounds[place], self.bounds[place + 1]
        return of_blocks(self.call.header, self.call.group.size, len(self.blocks), span)

    def runs(self, place: int, indices: Tensor, block: int) -> list[slice]:
        """The sums of a place in the order in which its rank of a block gets them."""
        if not self.in_parts:
            return [slice(0, len(indices))]
        count = len(self.blocks)
        parts = owned(self.header(place), count, indices)
        return [parts[(block - step) % count] for step in range(count)]


def _sum_between(call: Call, moving: ToOwners, between: _Between, onward: _Onward) -> None:
    """Sum what the ranks of one place have of their blocks."""
    inner = copy(call)
    inner.group = call.group.subset([ranks[moving.owner] for ranks in between.blocks])
    inner.load = between.load
    inner.header = between.header(moving.owner)
    inner.onward = onward
    indices = moving.indices
    with call.group.lease(len(indices) * call.load.partial) as memory:
        sums = Rows(indices, typed(memory, (len(indices), *call.row_shape), call.partial))
        merged = moving.sums(inner.incoming, moving.union, sums.values)
        between.algorithm.run(SummedRows(sums, merged), inner)
        onward.finish()


class _Onward:
    """The sums of a place on their way to the ranks of the block."""

    def __init__(self, share: Share, between: _Between, place: int, block: int) -> None:
        self._share = share
        self._between = between
        self._place = place
        self._block = block
        self._runs: list[slice] = []  # of this place's sums

    def place(self, indices: Tensor) -> Rows:
        """Tell the block which sums come; where they belong in the result."""
        self._share.tell(indices, spans(self._between.bounds))
        lists = self._share.heard()
        runs = [self._between.runs(place, sums, self._block) for place, sums in enumerate(lists)]
        self._runs = runs[self._place]
        return Rows(indices, self._share.lay_out(lists, runs), self._between.call.height)

    def ready(self, stop: int, rank: int | None) -> None:
        if rank is None:
            self._share.send(stop)
        elif self._between.in_parts:
            number = (self._block - rank) % len(self._runs)
            self._share.send(self._runs[number].start + stop, number)
        # else `finish` sends all: the block gets sums in an order in which parts are not complete

    def finish(self) -> None:
        """Send what is left: all is complete."""
        for number, run in enumerate(self._runs):
            self._share.send(run.stop, number)
