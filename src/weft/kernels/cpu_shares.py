"""What the compiled loops make of slots: sharing places out; see `cpu`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .compile import Key, compiler
from .reference import Picked, Shares

__all__ = ["KEY", "alone", "deal", "held", "pick", "shares"]

KEY: Key = ("share",)
"""The one set of loops for all dtypes."""


def shares(slots: Sequence[Tensor], total: int, weights: Sequence[int]) -> Shares | None:
    """See `weft.kernels.shares`."""
    loops = compiler.loops(KEY)
    if loops is None:
        return None
    words = torch.zeros(total, dtype=torch.int64)
    keys, order, at = torch.empty(3, total, dtype=torch.int32)
    for slot, weight in zip(slots, weights, strict=True):
        loops["weigh"](slot.data_ptr(), len(slot), weight, words.data_ptr())
    loops["aim"](words.data_ptr(), total, keys.data_ptr())
    for run, (slot, weight) in enumerate(zip(slots, weights, strict=True)):
        loops["choose"](slot.data_ptr(), len(slot), weight, run, words.data_ptr(), keys.data_ptr())
    many = 2 * len(slots)
    starts = torch.zeros(many + 1, dtype=torch.int64)
    loops["arrange"](
        keys.data_ptr(), total, many, starts.data_ptr(), order.data_ptr(), at.data_ptr()
    )
    return Shares(keys, order, at, starts.tolist())


def pick(slots: Tensor, shares: Shares, run: int, to: int) -> Picked | None:
    """See `weft.kernels.pick`."""
    loops = compiler.loops(KEY)
    if loops is None:
        return None
    alone = shares.alone(to) if run == to else 0
    room = min(len(slots), shares.count(to))
    rows, there = torch.empty(2, room, dtype=torch.int32)
    found = loops["pick"](
        slots.data_ptr(),
        len(slots),
        shares.keys.data_ptr(),
        to,
        shares.at.data_ptr(),
        shares.starts[2 * to],
        alone,
        rows.data_ptr(),
        there.data_ptr(),
    )
    return Picked(rows[:found], there[:found])


def deal(slots: Tensor, shares: Shares) -> list[Tensor] | None:
    """See `weft.kernels.deal`."""
    loops = compiler.loops(KEY)
    if loops is None:
        return None
    which = slots.data_ptr(), len(slots), shares.keys.data_ptr()
    counts = torch.zeros(len(shares.starts) // 2, dtype=torch.int64)
    loops["tally"](*which, counts.data_ptr())
    starts = counts.cumsum(0) - counts
    rows = torch.empty(len(slots), dtype=torch.int32)
    loops["deal"](*which, starts.data_ptr(), rows.data_ptr())
    return list(torch.split(rows, counts.tolist()))


def alone(
    slots: Sequence[Tensor], runs: Sequence[int], total: int, most: int
) -> list[Tensor] | None:
    """See `weft.kernels.alone`."""
    loops = compiler.loops(KEY)
    if loops is None:
        return None
    marks = torch.zeros(total, dtype=torch.uint8)
    for slot in slots:
        loops["mark_again"](slot.data_ptr(), len(slot), marks.data_ptr())

    def first(slot: Tensor) -> Tensor:
        room = min(most, len(slot))
        rows = torch.empty(room, dtype=torch.int32)
        found = loops["alone"](slot.data_ptr(), len(slot), marks.data_ptr(), room, rows.data_ptr())
        return rows[:found]

    return [first(slots[run]) for run in runs]


def held(slots: Sequence[Tensor], places: Tensor) -> Tensor | None:
    """See `weft.kernels.held`."""
    loops = compiler.loops(KEY)
    if loops is None:
        return None
    found = torch.empty(len(places), len(slots), dtype=torch.int64)
    for run, slot in enumerate(slots):
        loops["held"](
            *(slot.data_ptr(), len(slot), places.data_ptr(), len(places), len(slots)),
            found.data_ptr() + 8 * run,
        )
    return found
