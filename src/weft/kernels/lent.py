"""What other processes of this host lend, by machine code: read, and added while in the cache.

The one place beside `cpu_talk` where more is done than arithmetic, for the same reason: a few reads
cost more in Python than in the system calls that do them. What is not compiled, or is not the
memory of a process that a record says how to read, is left to the caller: `weft.wire` has another
way.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from . import meter
from .compile import Key, compiler
from .cpu import row_loop
from .cpu_talk import Lender
from .ops import Op

__all__ = ["KEY", "combine", "fetch"]

KEY: Key = ("lent",)
"""The one set of loops."""


def fetch(reads: Sequence[tuple[Lender, int, Tensor]]) -> int | None:
    """Fill tensors (plain) from where their bytes lie in other processes, in this order.

    Returns:
        How many are filled, of which the next could not be; None: nothing was done.
    """
    loops = compiler.loops(KEY)
    if loops is None:
        return None
    table = array("q")
    for lender, address, into in reads:
        table.extend((lender.ctypes.data, address, into.data_ptr(), into.nbytes))
    return len(reads) - int(loops["fetch"](table.buffer_info()[0], len(reads)))


def combine(
    out: Tensor, slots: Tensor, lender: Lender, address: int, op: Op, scratch: Tensor
) -> bool | None:
    """`weft.kernels.combine` of rows that lie in another process, of the dtype of `out`.

    Args:
        out: `[n, *row_shape]`, contiguous.
        slots: int32 `[k]`, ascending in their places.
        lender: of those rows.
        address: of the first of them there; they lie one behind the other.
        op: how to combine, `out` on the left.
        scratch: uint8, for some of them at a time; at least one row.

    Returns:
        Whether all could be read; else `out` holds anything. None: nothing was done.
    """
    loops, loop = compiler.loops(KEY), row_loop(out, op)
    if loops is None or loop is None:
        return None
    call, width = loop
    row, count = out[:1].nbytes, slots.numel()
    meter.spend(meter.CALL + count * row)
    step, height, at = max(1, scratch.nbytes // row), out.shape[0], scratch.data_ptr()
    fetched, to, where = loops["fetch"], out.data_ptr(), slots.data_ptr()
    table = np.array([lender.ctypes.data, address, at, 0], np.int64)
    told = table.ctypes.data
    for first in range(0, count, step):
        rows = min(step, count - first)
        table[1], table[3] = address + first * row, rows * row
        if fetched(told, 1):
            return False
        if call(to, height, 0, where + 4 * first, at, row, 0, rows, width):
            raise IndexError("slots are of places outside of what they are added to")
    return True
