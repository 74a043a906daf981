"""doubling: in round i, ranks 2^i apart swap all they have and merge it.

Fewest messages, log2 P, so best where latency rules: many ranks with tiny payloads. Each round
carries the union of the rows seen so far, in the type of partial sums. Blocks of neighbouring
ranks meet, the lower block always on the left, so every rank computes the same bits and an
operation needs only be associative. Where P is no power of two, the first ranks pair up before
and hear the answer after.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(IJHPCA 2005), section 4.1; "SSAR_Recursive_double" of Renggli et al., "SparCML" (SC'19).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..kernels import meter
from ..rows import Rows
from ..wire.base import as_bytes
from ..wire.memory import typed
from .call import Call
from .cost import Cost, Load
from .registry import algorithm


def cost(load: Load) -> Cost:
    core = 1 << (load.ranks.bit_length() - 1)
    folded = load.ranks - core
    rounds = core.bit_length() - 1
    row = load.partial + load.index
    carried = [load.union_of(2**i * load.ranks / core) for i in range(rounds)]
    # the average rank's share of the fold: one message in before, one result out after
    rows = core / load.ranks * sum(carried) + folded / load.ranks * (load.mean + load.union)
    longest = rows
    if folded:  # those that speak for two: theirs is more to carry, and others wait for it
        carried = [load.union_of(min(2 ** (i + 1), load.ranks)) for i in range(rounds)]
        longest = load.mean + sum(carried) + load.union
        carried = [load.mean, *carried, load.union / 2]  # which is copied, and not merged
    return Cost(
        rounds=rounds + 2 * bool(folded),
        messages=rounds + 2 * bool(folded),
        bytes=rows * row,
        merged=sum(load.merging(6 * rows) for rows in carried),  # packed, copied, merged afresh
        memory=4 * load.union * row,
        longest=longest * row,
    )


@algorithm(cost=cost)
def doubling(rows: Rows, call: Call) -> Rows:
    wire, rank = call.wire, call.wire.rank
    core = 1 << (wire.size.bit_length() - 1)
    paired = 2 * (wire.size - core)  # the first ranks, two by two, act as one
    mine = (rows.indices.to(call.wire_index), rows.values.to(call.partial))

    def merged(lower: tuple[Tensor, Tensor], upper: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return kernels.merge([lower, upper], call.op, call.partial)

    if rank < paired and rank % 2:
        _swap(call, rank - 1, send=mine)
        mine = _swap(call, rank - 1, ranks=wire.size)
        return _result(mine, call)
    if rank < paired:
        mine = merged(mine, _swap(call, rank + 1, ranks=1))

    block = rank // 2 if rank < paired else rank - paired // 2
    distance = 1
    while distance < core:
        other = block ^ distance
        peer = 2 * other if other < paired // 2 else other + paired // 2
        theirs = _swap(call, peer, send=mine, ranks=2 * distance)
        mine = merged(mine, theirs) if block < other else merged(theirs, mine)
        distance *= 2

    if rank < paired:
        _swap(call, rank + 1, send=mine)
    return _result(mine, call)


def _swap(
    call: Call, peer: int, *, send: tuple[Tensor, Tensor] | None = None, ranks: int = 0
) -> tuple[Tensor, Tensor]:
    """Send rows to a peer, receive the sum of at most `ranks` ranks' rows from it, or both.

    A message is the number of rows, the indices, the values; the receiver knows the most there
    can be.
    """
    wire, load = call.wire, call.load
    most = min(ranks * load.most, load.total if load.height is None else load.height)
    cap = 16 + most * (load.index + load.partial)
    outgoing = wire.lease(0)
    if send is not None:
        indices, values = send
        start = -(-(8 + indices.numel() * load.index) // 8) * 8
        outgoing.release()
        outgoing = wire.lease(start + indices.numel() * load.partial)
        typed(outgoing.tensor, (1,), torch.int64)[0] = indices.numel()
        typed(outgoing.tensor, tuple(indices.shape), indices.dtype, 8).copy_(indices)
        outgoing.tensor[start:] = as_bytes(values.contiguous())
        meter.spend(len(outgoing.tensor))
    pending = wire.post([(peer, outgoing.tensor)] * (send is not None), [(peer, cap)] * (ranks > 0))
    received = pending.wait()
    outgoing.release()
    indices, values = torch.empty(0), torch.empty(0)
    if received:
        count = int(typed(received[0], (1,), torch.int64)[0])
        start = -(-(8 + count * load.index) // 8) * 8
        indices = typed(received[0], (count,), call.wire_index, 8).clone()
        values = typed(received[0], (count, *call.row_shape), call.partial, start).clone()
        meter.spend(2 * (indices.nbytes + values.nbytes))  # into fresh memory
    pending.release()
    return indices, values


def _result(sums: tuple[Tensor, Tensor], call: Call) -> Rows:
    indices, values = sums
    result = call.result(indices.numel())
    result.indices.copy_(indices)
    kernels.finish(values, result.values, call.divisor)
    return result
