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

from torch import Tensor

from .. import kernels
from ..kernels import meter
from ..kernels.meter import MARK, SPREAD
from ..rows import Rows
from ..wire.base import typed
from ..wire.dense import SCRATCH, messages, received_bytes, ring_chunk
from .call import Call
from .cost import Cost, Load
from .local_rows import LocalRows
from .registry import algorithm


def reduction(load: Load, nbytes: float) -> Cost:
    """What the wire's dense all-reduce of so many bytes costs."""
    received, chunk = received_bytes(load.ranks, nbytes), ring_chunk(load.ranks, nbytes, load.hosts)
    ring = chunk is not None and nbytes / load.ranks <= chunk
    return Cost(
        rounds=(load.ranks - 2) * ring,
        messages=messages(load.ranks, nbytes, load.hosts),
        bytes=received,
        delayed=load.queue * received + (0.0 if chunk is None else load.unevenly(received)),
    )


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
    merged = 2 * height * load.partial + load.merging(load.union + load.mean)
    # the table, which rows it has (a bit each) and how many are before 64 of them, what two steps
    # of `dense_all_reduce` hold, the places of the rows that are there
    memory = height * (load.partial + 3 / 16) + 2 * SCRATCH + load.union * 8
    made = Cost(4, 0, 0.0, merged + unite_bytes(load, height), memory=memory)
    return reduction(load, bitmap_bytes(height)) + reduction(load, height * load.partial) + made


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
def dense(rows: LocalRows, call: Call) -> Rows:
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
