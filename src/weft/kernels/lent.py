"""What other processes of this host lend: read by machine code, or added where it lies.

The one place beside `cpu_talk` where more is done than arithmetic, for the same reason: a few reads
cost more in Python than in the system calls that do them. What is not compiled, or is not the
memory of a process that a record says how to read, is left to the caller: `weft.wire` has another
way.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from .compile import Key, compiler
from .cpu_talk import Lender
from .talk_table import ARENA

__all__ = ["KEY", "fetch", "mapped"]

KEY: Key = ("lent",)
"""The one set of loops."""


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
    table, records = array("q"), {id(None): 0}
    for lender, address, into in reads:
        whose = records.get(id(lender))
        if whose is None and lender is not None:
            whose = records[id(lender)] = torch.from_numpy(lender).data_ptr()
        table.extend((whose or 0, address, into.data_ptr(), into.nbytes))
    return len(reads) - int(loops["fetch"](table.buffer_info()[0], len(reads)))


def mapped(lender: Lender, spans: Sequence[tuple[int, int]]) -> list[int] | None:
    """Where memory of another process, addresses and bytes there, lies in this one.

    None: it does not, or nobody here could tell whether it is still lent.
    """
    there, room, here, _ = lender[ARENA:].tolist()
    if not (room and compiler.loops(KEY)):
        return None
    found = []
    for address, nbytes in spans:
        if not 0 <= address - there <= room - nbytes:
            return None
        found.append(here + address - there)
    return found
