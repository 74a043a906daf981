"""What a split in stages costs, and which algorithm runs between its blocks (`factors`).

What runs there is chosen with all that it means for the call: how much of the work within the hosts
its bytes overlap, and in how many messages the hosts share what it makes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from .cost import Cost, Load, preferred
from .factors import are_near, blocks_of, handing_on, in_parts, load_between_blocks, load_in_block
from .registry import ALGORITHMS, Algorithm, remembered
from .stream import list_messages, window

# its receives are as long as the call's rows
NOT_BETWEEN = ("doubling",)


def cost(load: Load) -> Cost:
    """What the average rank does and, as `slowest`, what a rank with a place does.

    A rank with a place does what all ranks of its block do, and takes part in what runs between the
    blocks. The others then wait for its sums: so it is the slowest. Where all blocks have the same
    number of ranks, each rank has a place. What runs between the blocks may have a slowest rank of
    its own, which then is the slowest of the call.
    """
    return cost_with(load, *middle(load))


def cost_with(load: Load, algorithm: Algorithm, inner: Load) -> Cost:
    """The same with an algorithm between the blocks, where it has the load `inner`."""
    between = algorithm.cost(inner)
    busiest = between.slowest or between
    block = load_in_block(load)
    traffic = _block_traffic(load, block, algorithm, inner)
    if block.on_one_host:
        slowest = _slowest_on_hosts(load, block, algorithm, inner, busiest, traffic)
    else:
        slowest = _slowest_of_neighbours(load, block, busiest, traffic)
    rounds = slowest.rounds + (3 if load.lengths_known else 2)
    slowest = replace(slowest, rounds=rounds, memory=_memory(load, block, between, inner))
    return replace(
        slowest,
        messages=round(traffic.messages + traffic.leading * between.messages),
        bytes=traffic.bytes + traffic.leading * between.bytes,
        slowest=slowest,
    )


def middle(load: Load) -> tuple[Algorithm, Load]:
    """What runs between the blocks, and the load that it has; the same on every rank."""
    return ALGORITHMS[_name_between(load.coarse)], load_between_blocks(load)


@remembered
def _name_between(load: Load) -> str:
    """What runs between the blocks of a load: where these are hosts, what makes the call quick."""
    inner = load_between_blocks(load)
    if inner.stages or not are_near(load, blocks_of(load)):  # then it is there to save messages
        return "split"
    able = [
        name
        for name, algorithm in sorted(ALGORITHMS.items())
        if algorithm.builtin and name not in NOT_BETWEEN and algorithm.applies(inner) is None
    ]
    costs = [cost_with(load, ALGORITHMS[name], inner) for name in able]
    return able[preferred(load, costs, inner.ranks)]


class _BlockTraffic(NamedTuple):
    """What the average rank sends and receives in its block.

    Attributes:
        leading: the part of the ranks that has a place.
        messages: sent.
        bytes: received.
    """

    leading: float
    messages: float
    bytes: float


def _block_traffic(load: Load, block: Load, algorithm: Algorithm, inner: Load) -> _BlockTraffic:
    """Rows go to the ranks of the block that have a place, and these send sums to all of it."""
    blocks = blocks_of(load)
    count = len(blocks)
    places = load.factors[0]
    leading = places * count / load.ranks
    rows = load.mean / places  # that a rank has of what one place sums
    sums = load.union / places  # of one place
    list_of_rows = block.list_of(rows, 1 / places)
    list_of_sums = block.list_of(sums, 1 / places)

    owners = places - leading  # to whom the average rank sends: not to itself
    values = block.parted(rows, load.incoming, places) * owners / places
    sent_up = owners * list_messages(list_of_rows) + values

    runs = count if in_parts(load, algorithm, inner) else 1
    messages = list_messages(list_of_sums) + runs * block.chunks(sums / runs, load.row)
    others = [len(ranks) - 1 for ranks in blocks]
    # a rank without a place tells the others of its block, by an empty list
    without = sum((each + 1 - places) * each for each in others)
    sent_down = (places * sum(others) * messages + without) / load.ranks

    received = owners * (rows * load.incoming + list_of_rows)
    received += owners * (sums * load.row + list_of_sums)
    return _BlockTraffic(leading, sent_up + sent_down, received)


def _slowest_on_hosts(
    load: Load,
    block: Load,
    algorithm: Algorithm,
    inner: Load,
    between: Cost,
    traffic: _BlockTraffic,
) -> Cost:
    """The slowest rank where each block is on a host.

    All places of a host use its link at the same time: so the link carries `sharing` times what one
    of them sends, and all wait for the link of the busiest host. What ranks of a host hand each
    other never comes there. It is work of their cores, and so are the messages of it: a part goes
    on while the link is busy (`_on_hosts`).
    """
    assert load.link is not None
    alone, meanwhile = _on_hosts(load, block, algorithm, inner)
    posting = traffic.messages * load.link.work / load.link.gamma
    carried = inner.sharing * _busiest_over_average(load)
    return replace(
        between,
        rounds=between.rounds + 1,
        bytes=carried * between.bytes,
        delayed=carried * between.delayed,
        merged=between.merged + alone,
        overlapped=between.overlapped + meanwhile + posting,
    )


def _busiest_over_average(load: Load) -> float:
    """How many times as much crosses the link of the busiest host as that of the average one.

    A host of many ranks sends more rows than others, and one of few receives more. Hosts of equally
    many count as alike: how far their rows differ is known from small samples alone.
    """
    blocks = blocks_of(load)
    if load.hosts is None or blocks != load.hosts.ranks or len({*map(len, blocks)}) == 1:
        return 1.0
    return load.unevenness


def _slowest_of_neighbours(load: Load, block: Load, between: Cost, traffic: _BlockTraffic) -> Cost:
    """The slowest rank where ranks of a block are on several hosts: one stage after the other.

    All of it takes the same links.
    """
    rows = load.mean / load.factors[0]
    sums = load.union / load.factors[0]
    return replace(
        between,
        rounds=between.rounds + block.hops_of_shared(sums),
        messages=round(between.messages + traffic.messages),
        bytes=between.bytes + traffic.bytes,
        delayed=between.delayed + block.unevenly(traffic.bytes) + block.crowded(traffic.bytes),
        merged=between.merged
        + block.merging(block.ranks * rows, block.pieces(rows, block.ranks, sums)),
        recovering=between.recovering
        + block.recovering((block.ranks - 1) * rows * load.incoming, sums),
    )


def _memory(load: Load, block: Load, between: Cost, inner: Load) -> float:
    """Workspace: that of what runs between the blocks, the sums of a place, and that of a block."""
    rows = load.mean / load.factors[0]
    return (
        between.memory
        + inner.mean * load.partial
        + min(load.mean * load.incoming, block.ranks * window(block) * block.chunk)
        + block.uniting_memory(block.ranks * rows, inner.mean)
        + load.union * block.index_memory(load.union)
    )


def _on_hosts(load: Load, block: Load, algorithm: Algorithm, inner: Load) -> tuple[float, float]:
    """What the stages in a block that is a host cost its ranks, in bytes merged.

    Args:
        load: of the call.
        block: that in a block.
        algorithm: between the blocks.
        inner: its load.

    Returns:
        What nothing else overlaps, and what passes while bytes of other hosts are on the wire.
    """
    places = load.factors[0]
    rows = load.mean / places  # that a rank has of what one place sums
    sums = load.union / places  # of one place

    # the place gets rows from the others of the block, and merges them
    received = (block.ranks - 1) * (rows * load.incoming + block.list_of(rows, 1 / places))
    reducing = handing_on(load) * received
    reducing += block.merging(block.ranks * rows, inner.pieces(rows, block.ranks, inner.mean))
    before = reducing * _part_before(places, algorithm, inner)

    # then it shares complete sums with the others of the block, as these do with it, if each has a
    # place; several places take turns on the host's link, and in the first nothing is handed on
    sharing = handing_on(load) * (block.ranks - 1) * sums * load.row
    chunks = max(1, block.chunks(sums, load.row))
    overlap = 1 - 1 / chunks
    if places > 1:
        overlap *= 1 - 1 / places
    during = min(sharing, overlap * _completing(load, algorithm, inner))
    return before + sharing - during, reducing - before + during


def _part_before(places: int, algorithm: Algorithm, inner: Load) -> float:
    """The part of a block's sums that is made before those of a place begin to cross the link.

    The ranks of a block send to its places one after the other. A place then makes its sums in the
    order of the indices, a chunk at a time, and sends what is made: with `gather` each chunk to
    all. With `split` a place begins with the range of the rank after it, so one begins with the
    first range and one with the last; it is counted as if all began with the first, which comes
    back complete once its owner has it of all.

    With `holders` rows that others sum leave chunk by chunk, but complete sums, most of the bytes,
    begin to go round when all of the block's sums are made. So these, and those of all others, are
    counted as if they began when all sums are made.

    It is that of the average place.
    """
    first = 1 / max(1, inner.chunks(inner.mean, inner.incoming))
    if algorithm.name == "gather":
        own = first
    elif algorithm.name == "split" and not inner.stages:
        own = min(1.0, 1 / inner.ranks + first)
    else:
        return 1.0
    return (places - 1) / (2 * places) + own / places


def _completing(load: Load, algorithm: Algorithm, inner: Load) -> float:
    """For how long the sums of a place become complete, one after the other, in bytes merged.

    Meanwhile they are handed on.
    """
    link = inner.link
    assert link is not None
    wire = link.beta / link.gamma
    if in_parts(load, algorithm, inner):
        return (inner.ranks - 1) / inner.ranks * inner.union * inner.row * wire
    if algorithm.name == "gather":  # as the last block's rows come
        return inner.mean * inner.row * wire
    # where each rank of a place sends one message, the last ones of the places come one by one
    message = inner.union / inner.ranks * inner.row
    return message * wire if message <= inner.chunk else 0.0
