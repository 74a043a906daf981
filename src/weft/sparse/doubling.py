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

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..rows import Rows
from ..wire.base import Pending
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
    halves = min(2 * load.union_of(core // 2), load.union)  # the operands of the last merge
    cost = Cost(
        rounds=rounds,
        messages=rounds,
        bytes=sum(carried) * row,
        queued=load.queue * sum(carried) * row,
        merged=load.merging(2 * sum(carried) + load.union),
        memory=3 * load.union * row + load.uniting(halves, load.union),
    )
    if not folded:
        return cost
    # those that speak for two have more to carry, and others wait for them
    carried = [load.union_of(min(2 ** (i + 1), load.ranks)) for i in range(rounds)]
    longest = load.mean + sum(carried) + load.union
    slowest = replace(
        cost,
        rounds=rounds + 2,
        messages=rounds + 2,
        bytes=longest * row,
        queued=load.queue * longest * row,
        merged=load.merging(2 * (load.mean + sum(carried)) + 2 * load.union),
    )
    # the average rank's share of the fold: one message in before, one result out after
    voices, pairs = core / load.ranks, folded / load.ranks
    bytes_ = voices * cost.bytes + pairs * (load.mean + load.union) * row
    return replace(
        cost,
        messages=round(voices * rounds + 2 * pairs),
        bytes=bytes_,
        queued=load.queue * bytes_,
        slowest=slowest,
    )


@algorithm(cost=cost)
def doubling(rows: Rows, call: Call) -> Rows:
    wire, rank = call.wire, call.wire.rank
    core = 1 << (wire.size.bit_length() - 1)
    paired = 2 * (wire.size - core)  # the first ranks, two by two, act as one
    mine = _Message.room(call, len(rows))
    mine.indices.copy_(rows.indices)
    mine.values.copy_(rows.values)

    if rank < paired and rank % 2:
        wire.post([(rank - 1, mine.bytes)]).wait()
        mine.release()
        answer = wire.post((), [(rank - 1, _most(call, wire.size))])
        return _result(_heard(call, answer), call)
    if rank < paired:
        pending = wire.post((), [(rank + 1, _most(call, 1))])
        mine = _merged(call, mine, _heard(call, pending))

    block = rank // 2 if rank < paired else rank - paired // 2
    distance = 1
    while distance < core:
        other = block ^ distance
        peer = 2 * other if other < paired // 2 else other + paired // 2
        first = other // distance * distance  # of the blocks whose sum the peer has
        held = distance + min(distance, max(0, paired // 2 - first))
        pending = wire.post([(peer, mine.bytes)], [(peer, _most(call, held))])
        theirs = _heard(call, pending)
        lower, upper = (mine, theirs) if block < other else (theirs, mine)
        mine = _merged(call, lower, upper)
        distance *= 2

    if rank < paired:
        wire.post([(rank + 1, mine.bytes)]).wait()
    return _result(mine, call)


@dataclass(frozen=True, slots=True)
class _Message:
    """Rows as they travel: how many, the indices, the values; in memory that is to be released."""

    bytes: Tensor
    indices: Tensor
    values: Tensor
    release: Callable[[], None]

    @classmethod
    def room(cls, call: Call, count: int) -> _Message:
        """A message of so many rows, to be filled."""
        lease = call.wire.lease(_size(call, count))
        typed(lease.tensor, (1,), torch.int64)[0] = count
        return cls.read(call, lease.tensor, lease.release)

    @classmethod
    def read(cls, call: Call, memory: Tensor, release: Callable[[], None]) -> _Message:
        count = int(typed(memory, (1,), torch.int64)[0])
        nbytes = _size(call, count)
        start = nbytes - count * call.load.partial
        return cls(
            memory[:nbytes],
            typed(memory, (count,), call.wire_index, 8),
            typed(memory, (count, *call.row_shape), call.partial, start),
            release,
        )


def _size(call: Call, count: int) -> int:
    """Bytes of a message; its values begin at a multiple of 8."""
    return 8 + -(-count * call.load.index // 8) * 8 + count * call.load.partial


def _most(call: Call, ranks: int) -> int:
    """Bytes that the sum of so many ranks' rows may take."""
    load = call.load
    most = min(ranks * load.most, load.total if load.height is None else load.height)
    return _size(call, most)


def _heard(call: Call, pending: Pending) -> _Message:
    return _Message.read(call, pending.wait()[0], pending.release)


def _merged(call: Call, lower: _Message, upper: _Message) -> _Message:
    """The sum of two messages, whose memory goes back."""
    union = kernels.union([lower.indices, upper.indices])
    both = _Message.room(call, union.indices.numel())
    both.indices.copy_(union.indices)
    for slots, part in zip(union.slots, (lower, upper), strict=True):
        kernels.combine(both.values, slots, part.values, call.op)
        part.release()
    return both


def _result(mine: _Message, call: Call) -> Rows:
    result = call.result(mine.indices.numel())
    result.indices.copy_(mine.indices)
    kernels.finish(mine.values, result.values, call.divisor)
    mine.release()
    return result
