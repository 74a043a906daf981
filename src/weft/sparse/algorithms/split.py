"""split: the owner of an index range sums it, then shares the sums.

A sparse reduce-scatter followed by a sparse all-gather, each row received once for each rank that
holds it, and once more for each that does not own it: within 1 + 1/P of the bound. The index
ranges are cut so that all owners have equal work, also on skewed data (`owners`).

Index sets go to the owners first. An owner merges them while the first values arrive, and tells
everybody the indices of its sums; so every rank knows the size of the result, and every row's
place in it, early. Owners merge chunk by chunk into their part of the result; each finished block
goes round the ring straight from there, and is received where it belongs. Workspace is bounded,
whatever P is.

Best for overlapping rows or many ranks: the general case.

"SSAR_Split_allgather" of Renggli et al., "SparCML" (SC'19), section 5.3; balanced owners as in Li
and Hoefler, "Near-optimal sparse allreduce" (PPoPP'22), section 3.
"""

from __future__ import annotations

from ...rows import Rows
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows
from ..owners import ToOwners, balanced, spans
from ..registry import algorithm
from ..stream import index_lists, list_messages, share, window


def cost(load: Load) -> Cost:
    others, given, sums = load.ranks - 1, load.mean / load.ranks, load.union / load.ranks
    asked, told = (rows * load.index_of(rows * load.ranks) for rows in (given, sums))
    received = others * ((given + sums) * load.row + asked + told)
    values = load.parted(given, load.row, others) + load.parted(sums, load.row, others)
    return Cost(
        rounds=3 + load.hops(others, sums),
        messages=others * (list_messages(asked) + list_messages(told)) + round(values),
        bytes=received,
        merged=load.merging(load.mean, load.pieces(given, load.ranks, sums)),
        delayed=load.queue * others * (given * load.row + asked)
        + load.unevenly(received)
        + load.crowded(received),
        # the index lists of one's own share, then those of all sums
        memory=min(load.mean * load.row, others * window(load) * load.chunk)
        + load.uniting(load.mean, sums)
        + load.union * load.listed(load.union),
    )


@algorithm(cost=cost, lockstep=True)
def split(rows: LocalRows, call: Call) -> Rows:
    group, others = call.group, call.group.peers
    bounds = balanced(call.header, group.size)
    moving = ToOwners(call, rows, bounds)

    # what will be summed here, told to all ahead of the bulk of the values
    told = moving.indices
    sums = index_lists(call, dict.fromkeys(others, told), others, spans(bounds))
    moving.send_rest()

    # now the result's size is known, and the place of everybody's sums in it
    summed = sums.wait() | {group.rank: told}
    result, mine, ring = share(call, [summed[rank] for rank in range(group.size)])

    for start, stop in moving.sums(call, moving.union, mine):
        ring.send(mine[start:stop])
    ring.finish()

    moving.finish()
    sums.release()
    return result
