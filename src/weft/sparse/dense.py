"""dense: make the rows a dense tensor and all-reduce that.

Beside the values travels a bitmap of which rows are there: a sum of zero is a row, and min, max
and prod need to tell a missing row from a zero. Missing rows hold the neutral element (-0.0 for
sums), so that every row that is there has exactly the bits its own values give.

Best when the ranks' rows fill most of the tensor: with w bytes of values and i of index in a row,
when (k̄ + U)·(w + i) > 2V·w.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 2009), for the reduction.
"""

from __future__ import annotations

import numpy as np
import torch

from .. import kernels
from ..kernels import meter
from ..rows import Rows
from ..wire import dense as reduction
from ..wire.memory import typed
from .call import Call
from .cost import Cost, Load
from .registry import algorithm


def cost(load: Load) -> Cost:
    height = load.height or 0
    tensors = (height / 8, height * load.partial)  # the bitmap, the values
    messages = sum(reduction.messages(nbytes, load.ranks) for nbytes in tensors)
    return Cost(
        rounds=4,
        messages=messages,
        bytes=sum(reduction.received_bytes(nbytes, load.ranks) for nbytes in tensors),
        merged=2 * height * load.partial + load.merging(load.union + load.mean),
        memory=height * load.partial + height / 4,
        direct=messages,
    )


def applies(load: Load) -> str | None:
    if load.height is None:
        return "the height is unknown"
    if load.in_order:
        return "op is a function, which needs its operands in the order of ranks"
    if load.height > max(1 << 20, 64 * load.total):
        return "the dense tensor is more than 64 times all rows"
    return None


@algorithm(cost=cost, applies=applies)
def dense(rows: Rows, call: Call) -> Rows:
    wire, height = call.wire, call.height
    assert height is not None
    op = "sum" if call.op.mean else call.op.name
    indices = rows.indices.long()

    present = np.zeros(height, dtype=np.bool_)
    present[indices.numpy()] = True
    bitmap = torch.from_numpy(np.packbits(present))
    with wire.lease(height * call.load.partial) as memory:
        table = typed(memory, (height, *call.row_shape), call.partial)
        table.fill_(call.op.neutral(call.partial))
        table[indices] = rows.values.to(call.partial)
        meter.spend(table.nbytes + call.load.merging(len(rows)))
        wire.dense_all_reduce(bitmap, "bor").wait()
        if call.load.row:
            wire.dense_all_reduce(table, op).wait()
        union = torch.from_numpy(np.flatnonzero(np.unpackbits(bitmap.numpy(), count=height)))
        result = call.result(union.numel())
        result.indices.copy_(union)
        if call.partial == call.dtype:
            kernels.take(table, union, out=result.values)
            call.finish(result.values, result.values)
        else:
            kernels.finish(kernels.take(table, union), result.values, call.divisor)
    return result
