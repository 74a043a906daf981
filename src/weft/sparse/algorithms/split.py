"""split: the owner of an index range sums it, then shares the sums; flat, or first in the hosts.

Flat it is a sparse reduce-scatter followed by a sparse all-gather: each row is received once for
each rank that holds it, and once more for each that does not own it, within 1 + 1/P of the bound.
The index ranges are cut so that all owners have equal work, also on skewed data (`owners`). Index
sets go to the owners first. An owner merges them while the first values arrive, and tells everybody
the indices of its sums; so every rank knows early the size of the result, and where in it every row
belongs. Owners merge chunk by chunk into their part of the result; each finished block goes round
the ring straight from there, and is received where it belongs. Workspace is bounded, whatever P is.

Where hosts have several ranks it is three calls, one after another. So a row crosses a host's link
once, whatever ranks of the host have it:

    1  among the ranks of a host       a reduce-scatter: each of its first ranks sums a range
    2  among the ranks with one local  any other algorithm, as the rule takes it: its rows are the
       rank, one of each host          sums of step 1, its result is complete
    3  among the ranks of a host       an all-gather: what each of them got in step 2

A *local rank* is a rank's number in its host; ranks sum whose local rank every host has. Nothing is
agreed on again: the headers of the call say what to expect. Sums of step 1 travel unrounded;
complete sums are divided and rounded once, and shared in the dtype of the rows. The result of step
2 is written where it belongs in that of step 3 (`Call.allocate`); `gather` says how much of it is
complete (`Call.ready`), which then leaves at once.

Best for overlapping rows or many ranks: the general case.

"SSAR_Split_allgather" of Renggli et al., "SparCML" (SC'19), section 5.3; balanced owners as in Li
and Hoefler, "Near-optimal sparse allreduce" (PPoPP'22), section 3; hosts first as in Goyal et al.,
"Accurate, Large Minibatch SGD" (2017), section 4.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from ...base.memory import typed
from ...schedules.hosts import Hosts
from ..call import Call
from ..canonical import CanonicalRows
from ..choose import between_hosts
from ..owners import SparseReduceScatter, balanced_bounds, reduce_to_owners
from ..registry import ALGORITHMS, algorithm
from ..rows import Rows
from ..stream import Share


@algorithm
def split(rows: CanonicalRows, call: Call) -> Rows:
    if call.sizes.begins_in_hosts:
        return _summed_by_hosts(rows, call)
    return _summed_by_all(rows, call)


def _summed_by_all(rows: CanonicalRows, call: Call) -> Rows:
    bounds = balanced_bounds(call.distribution, call.group.size)
    scatter = SparseReduceScatter(call, rows, bounds)
    share = Share(call)

    # to the owners: index lists, and the first values
    scatter.start()
    scatter.receive_lists()

    # what will be summed here is told to all, ahead of the bulk of the values
    share.send_list(scatter.union.indices)
    scatter.send_rest()

    # now the result's size is known, and where in it everybody's sums belong; these go to all
    sums = share.start()
    for _, stop in scatter.sums(call, sums):
        share.send(stop)

    result = share.finish()
    scatter.finish()
    return result


def _summed_by_hosts(rows: CanonicalRows, call: Call) -> Rows:
    group = call.group
    hosts = call.sizes.ranks_of_hosts
    summing = call.sizes.local_ranks  # of each host
    host = next(ranks for ranks in hosts if group.rank in ranks)
    local_rank = host.index(group.rank)
    # in a step no rank has told how many rows it brings
    in_host = call.sizes.but(ranks=len(host), hosts=Hosts((0,) * len(host)), gaps=False)
    within = replace(call, group=group.subset(host), sizes=in_host, headers=())
    distribution = call.distribution
    bounds = balanced_bounds(distribution, group.size, summing)
    share = Share(call, within)
    with ExitStack() as leases:

        def lease(indices: Tensor) -> Rows:
            memory = leases.enter_context(group.lease(len(indices) * call.sizes.partial_row))
            return Rows(indices, typed(memory, (len(indices), *call.row_shape), call.partial_dtype))

        # 1. in the host: what its ranks have of each range
        ranges = bounds + bounds[-1:] * (len(host) - summing)  # the others sum nothing
        partial = replace(within.of_partials(), allocate=lease)
        sums = reduce_to_owners(rows, within, ranges, partial)

        # 2. among the ranks with this local rank: the sums of all hosts
        if local_rank < summing:
            across = group.subset([ranks[local_rank] for ranks in hosts])
            line, sizes = between_hosts(call.sizes)
            among = replace(
                within,
                group=across,
                sizes=sizes,
                header=distribution.within(*bounds[local_rank : local_rank + 2]),
                allocate=share.allocate,
                ready=share.send,
            )
            own = CanonicalRows(sums, None, call.op, call.partial_dtype, group.memory)
            ALGORITHMS[line.algorithm](own, among)
        else:
            share.allocate(sums.indices)

        # 3. in the host: what each of its ranks has got
        return share.finish()
