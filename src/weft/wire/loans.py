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

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .base import Wire
from .routine import NUMBER, Rooms, Routine, Script

__all__ = ["TICKET", "Loans", "closing"]

TICKET = 8
"""Bytes of a ticket."""

_CHANNEL = 1 << 15  # that nobody else uses
_NOT_READ, _READ, _LATE = range(3)  # the last: read, but what I lend next is not there yet
_HERE = torch.ones(1, dtype=torch.uint8)  # what is lent next is there now
_KEPT = "loans"  # what a wire keeps by that name: memory for what is heard


class Loans:
    """What one rank lends and borrows in one call.

    Between two ranks either lends the other one tensor at the most, and both know its size.

    Attributes:
        wire: among whom.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._lent: dict[int, Tensor] = {}
        self._read: list[int] = []
        self._declined: dict[int, Tensor] = {}

    def ticket(self, peer: int, tensor: Tensor) -> bytes:
        """Lend a tensor (contiguous, CPU) to a peer that `wire.lends` to; what it is to be told.

        From when the peer hears it, at the latest, until `settle` it must stay as it is.
        """
        self._lent[peer] = tensor
        return tensor.data_ptr().to_bytes(TICKET, "little")

    def take(self, peer: int, ticket: bytes | memoryview, into: Tensor) -> bool:
        """Read what a peer lends with this ticket; False: `into` is filled only by `settle`."""
        if not into.numel() or self.wire.read(peer, int.from_bytes(ticket, "little"), into):
            self._read.append(peer)
            return True
        self._declined[peer] = into
        return False

    def settle(self, then: Callable[[], object] = lambda: None, *, opens: bool = False) -> None:
        """Return once all is read, here and by all peers that got a ticket.

        Args:
            then: what is to be done with what was taken.
            opens: whether it makes what peers, with tickets for it, take next. Then it is done
                before they go on; otherwise while others still read.
        """
        late = bool(self._declined)
        if opens and not late:
            then()
        owners = [*self._read, *self._declined]
        routine = self._routine(owners)
        for peer in owners:
            read = _LATE if opens and late else _READ
            routine.said[peer][0] = _NOT_READ if peer in self._declined else read
        meanwhile = _nothing if opens or late else then
        if routine.run(0, meanwhile=meanwhile) is None:
            routine.start(0)
            meanwhile()
            routine.finish()
        self.heard(routine, then, opens=opens)

    def heard(
        self, routine: Routine, then: Callable[[], object] = lambda: None, *, opens: bool = False
    ) -> None:
        """The rest of `settle`, once each side has said whether it has read."""
        wire, late = self.wire, bool(self._declined)
        owners = [*self._read, *self._declined]
        kinds = {peer: int(routine.heard[peer][NUMBER]) for peer in self._lent}
        lent = self._lent.items()
        again = [each for each in lent if kinds[each[0]] == _NOT_READ]
        wire.count([(peer, part.nbytes) for peer, part in lent if kinds[peer] != _NOT_READ])
        if again or late:
            wire.post(again, list(self._declined.items()), _CHANNEL).wait()
        if late:
            then()
        if opens:
            ready = [(peer, _HERE) for peer in owners * late]
            waited = [(peer, len(_HERE)) for peer, kind in kinds.items() if kind != _READ]
            if ready or waited:
                pending = wire.post_small(ready, waited)
                pending.wait()
                pending.release()

    def took(self, peers: Iterable[int]) -> None:
        """What these lend was read by other means."""
        self._read += peers

    def _routine(self, owners: Sequence[int]) -> Routine:
        """As `closing`; kept, since making it would take longer than using it."""
        kept, key = self.wire.kept, (_KEPT, tuple(owners), tuple(self._lent))
        if key not in kept:
            kept[key] = closing(self.wire, owners, self._lent)
        routine: Routine = kept[key]
        return routine


def closing(wire: Wire, owners: Iterable[int], readers: Iterable[int]) -> Routine:
    """To tell owners that all they lent was read, and to hear it from those that read here."""
    read, readers = bytes([_READ]), list(readers)
    rooms = wire.kept.setdefault(_KEPT, Rooms(NUMBER + 1))
    expects, lengths = dict.fromkeys(readers, read), dict.fromkeys(readers, len(read))
    return wire.routine(Script(dict.fromkeys(owners, read), expects, lengths, rooms))


def _nothing() -> None:
    return None
