"""gather: all rows of all ranks go round the ring, and every rank merges them all.

Index sets go first, so that each rank knows the result's size and every row's place before the
first value arrives; values follow in chunks that carry no indices, and are merged in rank order
while the last of them are on the wire. No row waits for another rank's arithmetic, so the link is
never idle; but every rank receives every row of all others and repeats the whole merge.

Best for few ranks whose rows overlap little: without overlap it receives exactly the bound. It
needs workspace for the rows of all others.

What torch.distributed, Horovod and DeepSpeed do, without their padding, 64-bit indices and serial
sums; the "sparse allgather" of Renggli et al., "SparCML" (SC'19), on the pipelined ring of
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 2009), section 3.
"""

from __future__ import annotations

import torch

from ...rows import Rows
from ...wire.memory import typed
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows
from ..registry import algorithm
from ..stream import (
    VALUES,
    Ring,
    all_gather_lists,
    at_hand,
    list_messages,
    merge_blocks,
    united,
)


def cost(load: Load) -> Cost:
    others, listed = load.ranks - 1, load.list_of(load.mean)
    received = others * (load.mean * load.given + listed)
    merged = load.merging(load.total, load.pieces(load.mean, load.ranks, load.union))
    last = min(merged, load.mean * load.given)  # rows are merged in order, while the last ones come
    return Cost(
        rounds=1 + load.hops_of_shared(load.mean),
        messages=others * (list_messages(listed) + load.chunks(load.mean, load.given)),
        bytes=received,
        merged=merged - last,
        overlapped=last,
        delayed=load.queue * others * listed
        + load.shared(others * load.mean * load.given)
        + load.crowded(received),
        memory=(load.total - load.fewest) * load.given + load.uniting(load.total, load.union),
    )


@algorithm(cost=cost, lockstep=True)
def gather(rows: LocalRows, call: Call) -> Rows:
    group = call.group
    incoming = call.incoming

    # to all: index lists
    runs, lists = all_gather_lists(call, rows.indices.to(call.wire_index))

    # round the ring: values, which are merged as they come
    counts = [run.numel() * (rank != group.rank) for rank, run in enumerate(runs)]
    with group.lease(sum(counts) * call.load.given) as memory:
        space = typed(memory, (sum(counts), *call.row_shape), incoming.dtype)
        ring = Ring(incoming, torch.split(space, counts), VALUES).start()
        for piece in rows.pieces(incoming.chunk_rows, 0, len(rows)):
            ring.send(piece)
        union = united(call, dict(enumerate(runs)))
        result = call.result_at(union.indices)
        sources = [ring.source(rank) for rank in range(group.size)]
        sources[group.rank] = at_hand(rows.values)
        for _, stop in merge_blocks(call, runs, sources, union, result.values):
            call.ready(stop)
        ring.finish()
    lists.release()
    return result
