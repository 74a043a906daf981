"""gather: every rank sends all its rows to every other, and each merges them all.

Index sets go first, so that each rank knows the result's size and every row's place before the
first value arrives; values follow in chunks that carry no indices, and are merged in rank order
while later chunks are on the wire. No row waits for another rank's arithmetic, so the link is
never idle; but every rank receives every row of all others and repeats the whole merge.

Best for few ranks whose rows overlap little: without overlap it receives exactly the bound.
It needs workspace for the rows of all others.

What torch.distributed, Horovod and DeepSpeed do, without their padding, 64-bit indices and
serial sums; "SSAR_Recursive_double" and "sparse allgather" of Renggli et al., "SparCML"
(SC'19), section 5, are its relatives.
"""

from __future__ import annotations

from .. import kernels
from ..rows import Rows
from .call import Call
from .cost import Cost, Load
from .registry import algorithm
from .stream import IndexLists, Inflow, Own, list_messages, merge_blocks, send_rows


def cost(load: Load) -> Cost:
    others = load.ranks - 1
    return Cost(
        rounds=2,
        messages=others * (list_messages(load.mean, load.index) + load.chunks(load.mean, load.row)),
        bytes=others * load.mean * (load.row + load.index),
        merged=load.total * load.row,
        memory=(load.total - load.fewest) * load.row,
    )


@algorithm(cost=cost)
def gather(rows: Rows, call: Call) -> Rows:
    wire, peers = call.wire, call.wire.peers
    indices = rows.indices.to(call.wire_index)

    lists = IndexLists(wire, dict.fromkeys(peers, indices), peers)
    sent = [pending for peer in peers for pending in send_rows(call, peer, rows.values)]

    runs = lists.wait() | {wire.rank: indices}
    inflows = {peer: Inflow(call, peer, runs[peer].numel(), window=1 << 62) for peer in peers}
    order = range(wire.size)
    union = kernels.union([runs[rank] for rank in order])
    result = call.result(union.indices.numel())
    result.indices.copy_(union.indices)

    sources = [inflows.get(rank) or Own(rows.values) for rank in order]
    for _ in merge_blocks(call, [runs[rank] for rank in order], sources, union, result.values):
        pass

    for pending in sent:
        pending.wait()
    lists.release()
    for inflow in inflows.values():
        inflow.release()
    return result
