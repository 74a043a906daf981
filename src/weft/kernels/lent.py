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
from .talk_table import ARENA

__all__ = ["KEY", "combine", "fetch"]

KEY: Key = ("lent",)
"""The one set of loops."""

_OUTSIDE = "slots are of places outside of what they are added to"


def fetch(reads: Sequence[tuple[Lender | None, int, Tensor]]) -> int | None:
    """Fill tensors (plain) from where their bytes lie in other processes, in this order.

    Args:
        reads: of each the lender, None for this process; the address there; what to fill.

    Returns:
        How many are filled, of which the next could not be; None: nothing was done.
    """
    loops = compiler.loops(KEY)
    if loops is None:
        return None
    table = array("q")
    for lender, address, into in reads:
        whose = 0 if lender is None else lender.ctypes.data
        table.extend((whose, address, into.data_ptr(), into.nbytes))
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
        scratch: uint8, for some of them at a time; at least one row. Those in an arena that is
            mapped here are added from there.

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
    there, room, here, _ = lender[ARENA:].tolist()
    if room and 0 <= address - there <= room - count * row:
        if call(to, height, 0, where, here + address - there, row, 0, count, width):
            raise IndexError(_OUTSIDE)
        return not fetched(told, 1)  # of no bytes: whether they were still lent
    for first in range(0, count, step):
        rows = min(step, count - first)
        table[1], table[3] = address + first * row, rows * row
        if fetched(told, 1):
            return False
        if call(to, height, 0, where + 4 * first, at, row, 0, rows, width):
            raise IndexError(_OUTSIDE)
    return True
