"""The compiled loop that reads the memory of other processes; see `lent`.

Made and called like `value_loops`: all arguments are int64, addresses and counts. The steps of
`talk_loops` read by `read`, too.
"""

from __future__ import annotations

from collections.abc import Callable

from .machine import fence, load, memcpy, part, process_vm_readv, store
from .talk_table import ARENA, GUARD, SEEN, SPANS

LOOPS = ("fetch",)

__all__ = ["LOOPS", "read", *LOOPS]


def fetch() -> Callable[..., int]:
    """Carry out reads until one fails; returns how many are left then.

    A read is a row of `table`: the address of the record of a lender, or 0 for this process; an
    address there, one here, and bytes. Behind it comes a look at the lender's guard.
    """

    def loop(table: int, count: int) -> int:
        for number in range(count):
            row = table + 32 * number
            lender, address, to = load("i64", row, 0), load("i64", row, 1), load("i64", row, 2)
            if lender == 0:
                memcpy(to, address, load("i64", row, 3))
            elif read(lender, address, to, load("i64", row, 3)) == 0:
                return count - number
        return 0

    return loop


@part
def read(lender: int, address: int, to: int, count: int) -> int:
    """Read another process's memory, and its guard behind it; whether it still lent it then."""
    room, at = load("i64", lender, ARENA + 1), address - load("i64", lender, ARENA)
    if room and at >= 0 and at + count <= room:  # it is mapped here
        memcpy(to, load("i64", lender, ARENA + 2) + at, count)
        fence()
        guard = load("i64", lender, ARENA + 3)
        alike = load("i64", guard, 0) == load("i64", lender, GUARD + 1)
        return int(alike and load("i64", guard, 1) == load("i64", lender, GUARD + 2))
    spans = lender + 8 * SPANS
    store("i64", spans, 0, to)
    store("i64", spans, 1, count)
    store("i64", spans, 2, lender + 8 * SEEN)
    store("i64", spans, 3, 16)
    store("i64", spans, 4, address)
    store("i64", spans, 5, count)
    store("i64", spans, 6, load("i64", lender, GUARD))
    store("i64", spans, 7, 16)
    came = process_vm_readv(load("i64", lender, 0), spans, 2, spans + 32, 2, 0)
    alike = load("i64", lender, SEEN) == load("i64", lender, GUARD + 1)
    alike = alike and load("i64", lender, SEEN + 1) == load("i64", lender, GUARD + 2)
    return int(came == count + 16 and alike)
