"""How a habit of `all_to_all` ends: what was told is brought to where it belongs.

As steps of machine code, which go with the opening, where the wire has such: once all was heard,
what travelled in it is copied, and what peers lend is read. So a call is two exchanges and next to
no Python. Where there is none, or something cannot be read in it, Python does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.cpu_talk import HERE, IN_X, Came, Place, Steps
from ..kernels.talk_table import TO
from ..wire.base import Wire
from ..wire.loans import Loans, closing
from .movement import empty

if TYPE_CHECKING:
    from .habit import Habit

__all__ = ["Coming", "Delivery"]

_AT_ONCE = 8 << 20  # bytes of a tensor up to which it is read without a look at signals


@dataclass(frozen=True, slots=True)
class Coming:
    """What a rank has for this one: its shape and bytes, and whether it lends them."""

    shape: tuple[int, ...]
    nbytes: int
    lent: bool = False


class Delivery:
    """One rank's part in a call that is made again."""

    def __init__(
        self, wire: Wire, habit: Habit, lends: Mapping[int, int], coming: Mapping[int, Coming]
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            wire: among whom.
            habit: of the call; what follows what is always the same in it are tickets for what is
                lent, and else the bytes.
            lends: bytes that this rank lends, by peer.
            coming: from each rank; from this one, what it has for itself.
        """
        self._rank, self._traffic = wire.rank, wire.traffic
        self._lends = list(lends.items())
        self._coming = [coming[rank] for rank in range(wire.size)]
        self._owners = [peer for peer in wire.peers if coming[peer].lent]
        self._closing = closing(wire, self._owners, lends)
        self._stepped = [rank for rank in (wire.rank, *wire.peers) if coming[rank].nbytes]
        self._places: NDArray[np.int64] | None = None
        steps = self._steps(wire, habit)
        if steps is not None:
            program = steps.done()
            habit.follow(program)
            self._places = program.table[:, TO + 1]

    def _steps(self, wire: Wire, habit: Habit) -> Steps | None:
        """One for each rank of `_stepped`; None if there is none for some of them."""
        steps, fine = Steps(), True
        steps.then()
        for rank in self._stepped[: self._rank in self._stepped]:
            place = _place(self._coming[rank])
            fine &= steps.copy(place, (IN_X, place[1]))
        steps.then()
        for peer in self._stepped[self._rank in self._stepped :]:
            place, tail = _place(self._coming[peer]), habit.tails[peer]
            if not self._coming[peer].lent:
                fine &= steps.copy(place, (HERE, tail))
                continue
            lender = wire.lender(peer)
            if lender is None or self._coming[peer].nbytes > _AT_ONCE:
                return None
            fine &= steps.read(place, tail, lender)
        return steps if fine else None

    def ended(
        self, habit: Habit, tails: Mapping[int, bytes], own: Tensor, loans: Loans
    ) -> list[Tensor] | None:
        """The results, once nobody reads here any more; collective.

        Args:
            habit: as before.
            tails: what to tell each peer.
            own: what this rank has for itself: plain, of the CPU.
            loans: with the tickets that are told.

        Returns:
            None: something else was heard, and nothing done yet; `Habit.news` is what.

        Raises:
            WireError: a peer or a link failed.
        """
        results = [empty(each.shape, own) for each in self._coming]
        if self._places is not None:  # they differ from call to call
            self._places[:] = [results[rank].data_ptr() for rank in self._stepped]
        came = habit.exchange(tails, lambda: results[self._rank].copy_(own), own.data_ptr())
        if came is Came.OTHER:
            return None
        if came is Came.ALL:
            self._close(loans)
            return results
        for peer in self._owners:
            loans.take(peer, habit.tails[peer].numpy().data, results[peer])

        def copy() -> None:
            for peer, tail in habit.tails.items():
                if not self._coming[peer].lent:
                    results[peer].copy_(tail.view(own.dtype).view(results[peer].shape))

        loans.settle(copy)
        return results

    def _close(self, loans: Loans) -> None:
        """Let the owners of all that was read go on, and wait for those that read here."""
        if not self._owners and not self._lends:
            return
        came = self._closing.run(0)
        if came is Came.ALL:
            self._traffic.add(self._lends)
            return
        if came is None:
            self._closing.start(0)
            self._closing.finish()
        loans.took(self._owners)
        loans.heard(self._closing)


def _place(coming: Coming) -> Place:
    """Where a result is going to be, which is written into its step in each call."""
    return HERE, torch.empty(coming.nbytes, dtype=torch.uint8, device="meta")
