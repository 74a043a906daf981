"""gather: all rows of all ranks go round the ring, and every rank merges them all.

Index sets go first, so that each rank knows the result's size and where every row belongs before
the first value arrives. Values follow in chunks that carry no indices, and are merged in rank order
while the last of them are on the wire. They follow at once where the opening has told how many rows
each rank has (not in a step of `split`): between distant hosts that saves a round. No row waits for
another rank's arithmetic, so the link is never idle; but every rank receives every row of all
others and repeats the whole merge.

Best for few ranks whose rows overlap little: without overlap it receives exactly the bound. It
needs workspace for the rows of all others.

What torch.distributed, Horovod and DeepSpeed do, without their padding, 64-bit indices and serial
sums; the "sparse allgather" of Renggli et al., "SparCML" (SC'19), on the pipelined ring of
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 2009), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import kernels
from ...base.memory import typed
from ...group.channels import VALUES
from ..call import Call
from ..canonical import CanonicalRows
from ..registry import algorithm
from ..rows import Rows
from ..stream import (
    Ring,
    check_lengths,
    merge_blocks,
    send_list_to_all,
    source_of,
)


@algorithm
def gather(rows: CanonicalRows, call: Call) -> Rows:
    group = call.group
    incoming = call.incoming

    # to all: index lists
    indices = rows.indices.to(call.wire_index)
    lists = send_list_to_all(call, indices)
    runs: list[Tensor] | None = None
    if call.counts:
        counts = call.counts
    else:
        runs = [*lists.wait().values()]
        counts = [len(run) for run in runs]

    # round the ring, or to all: values, which are merged as they come
    received = [0 if rank == group.rank else count for rank, count in enumerate(counts)]
    with group.lease(sum(received) * call.sizes.incoming) as memory:
        space = typed(memory, (sum(received), *call.row_shape), incoming.dtype)
        parts = torch.split(space, received)
        ring = Ring(incoming, parts, VALUES, incoming.sizes.mean * incoming.sizes.row).start()
        ring.send(rows.values)
        if runs is None:
            runs = [*lists.wait().values()]
            check_lengths(call, runs, counts)
        union = kernels.union(runs)
        result = call.result_at(union.indices)
        sources = [ring.source(rank) for rank in range(group.size)]
        sources[group.rank] = source_of(rows.values)
        for _, stop in merge_blocks(call, runs, sources, union, result.values):
            call.ready(stop)
        ring.finish()
    lists.release()
    return result
