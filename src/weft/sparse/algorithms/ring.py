"""ring: partial sums travel round the ring, each rank adding its rows; then the sums are shared.

The index ranges are those of `split`, but nobody receives a range from everybody: the range of
rank r starts at rank r + 1 and is handed on to the right, every rank adding its own rows, until
it arrives at r complete. Index sets run ahead of the values, so that the size of the result, and
every row's place in it, are known before the first value moves; where the headers' digests say that
all ranks have the same rows, no index moves at all. The values follow in chunks that are merged,
and sent on, while the next are on their way. What the last rank of a range adds goes straight into
the result, and from there round the ring, once: so every rank gets the same bits, though each range
is added in an order of its own.

Each rank has one peer that it hears and one that it tells, whatever P is, and holds two runs of
partial sums, 1/P of the union each: the algorithm with least workspace where ranks are many. It
pays for that with P - 1 steps in a row, and where rows overlap little with more bytes than
`split`, since a sum grows on its way.

The ring reduce-scatter and all-gather of Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (JPDC 2009), section 3, on sorted runs of rows.
"""

from __future__ import annotations

from torch import Tensor

from ... import kernels
from ...group.pending import Pending
from ...rows import Rows
from ...wire.memory import typed
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows, within
from ..owners import balanced, spans
from ..registry import algorithm
from ..stream import (
    IndexLists,
    Inflow,
    Share,
    list_messages,
    merge_blocks,
    send_rows,
    wait_all,
    window,
)


def cost(load: Load) -> Cost:
    others, share = load.ranks - 1, 1 / load.ranks
    runs = [load.union_of(ranks) * share for ranks in range(1, load.ranks)]
    mine, sums = load.mean * share, load.union * share
    told = 0.0 if load.identical else load.list_of(sums, share)
    lists = [0.0 if load.identical else load.list_of(run, share) for run in runs]
    listed = 0 if load.identical else sum(map(list_messages, lists)) + others * list_messages(told)
    values = sum(load.parted(run, load.partial, 1) for run in runs)
    shared = others * sums * load.row
    received = sum(runs) * load.partial + sum(lists) + shared + others * told
    hops = load.hops(sums) + load.hops_of_shared(sums)
    return Cost(
        rounds=(1 if load.identical else others + 1) + hops,
        messages=listed + round(values + load.parted(sums, load.row, others)),
        bytes=received,
        merged=load.merging(
            sum(runs) + others * mine,
            sum(load.pieces(run, 1, run) + load.pieces(mine, 1, run) for run in runs),
        ),
        delayed=load.queue * others * told + load.shared(shared) + load.crowded(received),
        memory=2 * sums * load.partial + min(sums * load.partial, window(load) * load.chunk),
    )


def applies(load: Load) -> str | None:
    if load.in_order:
        return "op is a function, which needs its operands in the order of ranks"
    return None


@algorithm(cost=cost, applies=applies)
def ring(own: LocalRows, call: Call) -> Rows:
    group, me, size = call.group, call.group.rank, call.group.size
    left, right = (me - 1) % size, (me + 1) % size
    indices = own.indices.to(call.wire_index)
    bounds = balanced(call.header, size)
    part, ranges = within(indices, bounds, call.header.highest), spans(bounds)
    passing = [(me - step) % size for step in range(1, size + 1)]  # the last range is its own

    # round the ring with the index sets
    run = indices[part[passing[0]]]
    came: list[Tensor] = []
    unions: list[kernels.Union] = []
    for owner in passing[1:]:
        if call.load.identical:
            came.append(indices[part[owner]])
        else:
            lists = IndexLists(call, {right: run}, [left], {left: ranges[owner]})
            came.append(lists.wait()[left].clone())
            lists.release()
        unions.append(kernels.union([came[-1], indices[part[owner]]]))
        run = unions[-1].indices

    # now everybody's sums are known, and their places in the result
    share = Share(call)
    if call.load.identical:
        mine = share.lay_out([indices[rows] for rows in part])
    else:
        share.tell(run, ranges)
        mine = share.lay_out(share.heard())
        share.release()
    passed = call.of_partials()
    most = max((len(union.indices) for union in unions[:-1]), default=0)
    with group.lease(2 * most * passed.load.row) as memory:
        space = typed(memory, (2, most, *call.row_shape), call.partial)

        # and with the values
        first = part[passing[0]]
        going: list[list[Pending]] = [[]]
        for piece in own.pieces(passed.chunk_rows, first.start, first.stop):
            going[0] += send_rows(passed, right, piece.to(call.partial))
        for step, owner in enumerate(passing[1:]):
            inflow = Inflow(passed, left, came[step].numel())
            runs = [came[step], indices[part[owner]]]
            sources = [inflow.pieces, own.source(part[owner])]
            if owner == me:
                for _, stop in merge_blocks(call, runs, sources, unions[step], mine):
                    share.send(stop)
            else:
                if step:  # what went out two steps before must have left its memory
                    wait_all(going[step - 1])
                out = space[step % 2][: unions[step].indices.numel()]
                going.append([])
                for start, stop in merge_blocks(passed, runs, sources, unions[step], out):
                    going[-1] += send_rows(passed, right, out[start:stop])
            inflow.release()
        result = share.finish()
        for sent in going:
            wait_all(sent)
    return result
