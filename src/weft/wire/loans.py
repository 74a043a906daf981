"""Loans: tensors that peers on the same host read where they lie, in the middle of a call.

On its line (`line`) a long message takes three turns: its place is granted, its address told, its
reading acknowledged. A call that opens with statements tells the addresses in them, so whoever is
to have a tensor reads it as soon as it has heard them; a byte to each owner ends the call.

What belongs here is that protocol, whoever's call it is: an owner gives a peer a *ticket*, which
the peer takes; `settle` returns once all that was lent has been read, and the memory is the
owner's again. Whether a peer that got a ticket can do what it says is found out by trying: what
cannot be read after all is sent, which both ends know from that byte. An owner that gives up wipes
its guard first (`lent`), so what is read from it afterwards counts as not read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .base import Wire

__all__ = ["NO_TICKET", "TICKET", "Loans"]

TICKET = 8
"""Bytes of a ticket."""

NO_TICKET = bytes(TICKET)
"""That of a rank that lends nothing."""

_CHANNEL = 1 << 15  # that nobody else uses
_READ, _NOT_READ = 1, 0


class Loans:
    """What one rank lends and borrows in one call.

    Between two ranks either lends the other one tensor at the most, and both know its size.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lent: dict[int, Tensor] = {}
        self._read: list[int] = []
        self._declined: dict[int, Tensor] = {}

    def ticket(self, peer: int, tensor: Tensor) -> bytes:
        """Lend a peer a tensor (contiguous, CPU); it must stay as it is until `settle`.

        Returns:
            What that peer needs to hear in this call; `NO_TICKET` if it can read nothing here.
        """
        if not (tensor.numel() and self._wire.lends(peer)):
            return NO_TICKET
        self._lent[peer] = tensor
        return tensor.data_ptr().to_bytes(TICKET, "little")

    def take(self, peer: int, ticket: bytes | memoryview, into: Tensor) -> bool:
        """Read what a peer lends with this ticket; False: `into` is filled only by `settle`."""
        if self._wire.read(peer, int.from_bytes(ticket, "little"), into):
            self._read.append(peer)
            return True
        self._declined[peer] = into
        return False

    def settle(self, then: Callable[[], object] = lambda: None) -> None:
        """End the call: return once all is read, here and by all peers that got a ticket.

        Args:
            then: what is to be done with what was taken; while others still read, if it is there.
        """
        wire = self._wire
        owners = [*self._read, *self._declined]
        said = {kind: torch.tensor([kind], dtype=torch.uint8) for kind in (_READ, _NOT_READ)}
        pending = wire.post_small(
            [(peer, said[_NOT_READ if peer in self._declined else _READ]) for peer in owners],
            [(peer, 1) for peer in self._lent],
        )
        if not self._declined:
            then()
        answers = [int(answer) for answer in pending.wait()]
        pending.release()
        again = [each for each, kind in zip(self._lent.items(), answers, strict=True) if not kind]
        wire.count([each for each, kind in zip(self._lent.items(), answers, strict=True) if kind])
        if again or self._declined:
            wire.post(again, list(self._declined.items()), _CHANNEL).wait()
        if self._declined:
            then()
