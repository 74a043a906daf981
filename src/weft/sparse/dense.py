"""dense: make the rows a dense tensor and all-reduce that.

Beside the values travels a bitmap of which rows are there: a sum of zero is a row, and min, max
and prod need to tell a missing row from a zero. Missing rows hold the neutral element (-0.0 for
sums), so that every row that is there has exactly the bits its own values give.

Best when the ranks' rows fill most of the tensor: with w bytes of values and i of index in a row,
when (k̄ + U)·(w + i) > 2V·w.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 2009), for the reduction.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from .. import kernels
from ..kernels import meter
from ..kernels.meter import MARK, SPREAD
from ..rows import Rows
from ..wire.dense import SCRATCH, messages, received_bytes, ring_chunk
from ..wire.memory import typed
from .call import Call
from .cost import UNEVEN, Cost, Load
from .registry import algorithm


class Reduction(NamedTuple):
    """A dense reduction by the wire, in the terms of `Cost`."""

    messages: int
    bytes: float
    direct: int
    hops: int
    behind: float
    queued: float
    spared: float = 0.0

    @classmethod
    def of(cls, load: Load, nbytes: float, *, partials: bool = False) -> Reduction:
        """The reduction of so many bytes, which may be `partials`: sums of some ranks' rows."""
        sent = messages(load.ranks, nbytes, load.hosts)
        received = received_bytes(load.ranks, nbytes)
        queued, chunk = load.queue * received, ring_chunk(load.ranks, nbytes, load.hosts)
        message = min(nbytes / load.ranks, chunk or SCRATCH // (load.ranks - 1))
        spared = load.spared(received, message, partial=True) if partials else 0.0
        if chunk is None:
            return cls(sent, received, sent, 0, 0.0, queued, spared)
        hops, behind = load.ranks - 2, nbytes / load.ranks - chunk
        return cls(sent, received, sent // 2, hops, behind, queued + UNEVEN * received, spared)


def bitmap_bytes(places: int) -> int:
    """Bytes of a bitmap of so many places: whole words."""
    return 8 * math.ceil(places / 64)


def unite_bytes(load: Load, places: int) -> float:
    """What uniting all ranks' index sets by a bitmap costs, in bytes that could be merged."""
    return MARK * 2 * load.mean + SPREAD * load.union + places / 2


def reduced(indices: Tensor, places: int, call: Call) -> kernels.Union:
    """The union of all ranks' index sets, by a bitmap that is reduced, and this rank's slots."""
    bits = kernels.bitmap(indices, places)
    call.wire.dense_all_reduce(bits, "bor").wait()
    return kernels.unite_bitmap(bits, indices)


def cost(load: Load) -> Cost:
    height = load.height or 0
    bits = Reduction.of(load, bitmap_bytes(height))
    sums = Reduction.of(load, height * load.partial, partials=True)
    return Cost(
        rounds=4,
        messages=bits.messages + sums.messages,
        bytes=bits.bytes + sums.bytes,
        spared=sums.spared,
        queued=bits.queued + sums.queued,
        merged=2 * height * load.partial
        + load.merging(load.union + load.mean)
        + unite_bytes(load, height),
        # the table, which rows it has (a bit each) and how many are before 64 of them, what
        # two steps of `dense_all_reduce` hold, the places of the rows that are there
        memory=height * (load.partial + 3 / 16) + 2 * SCRATCH + load.union * 8,
        direct=bits.direct + sums.direct,
        hops=bits.hops + sums.hops,
        behind=sums.behind,
    )


def applies(load: Load) -> str | None:
    if load.in_order and load.height is not None:
        return "op is a function, which has no neutral element"
    return too_high(load)


def too_high(load: Load) -> str | None:
    """Why a dense tensor of the load's height is out of the question, or None if it is not."""
    if load.height is None:
        return "the height is unknown"
    if load.height > max(1 << 20, 64 * load.total):
        return "the dense tensor is more than 64 times all rows"
    return None


@algorithm(cost=cost, applies=applies)
def dense(rows: Rows, call: Call) -> Rows:
    wire, height = call.wire, call.load.height
    assert height is not None
    op = "sum" if call.op.mean else call.op.name
    indices = rows.indices.long()

    with wire.lease(height * call.load.partial) as memory:
        table = typed(memory, (height, *call.row_shape), call.partial)
        table.fill_(call.op.neutral(call.partial))
        table[indices] = rows.values.to(call.partial)
        meter.spend(table.nbytes + call.load.merging(len(rows)))
        union = reduced(indices, height, call).indices
        if call.load.row:
            wire.dense_all_reduce(table, op).wait()
        result = call.result(union.numel())
        result.indices.copy_(union)
        if call.partial == call.dtype:
            kernels.take(table, union, out=result.values)
            call.finish(result.values, result.values)
        else:
            kernels.finish(kernels.take(table, union), result.values, call.divisor)
    return result
