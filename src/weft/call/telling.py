"""How ranks tell each other what they state as a call opens: within a host in a meeting, else in
messages.

What two ranks tell each other takes one way, whichever others are in the call. So a rank hears of
one that is in another call, of a part of the ranks, say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.memory import tensor_of
from ..group.channels import OPENINGS
from ..group.group import Group
from ..group.pending import Awaited, Meeting, Pending


class Telling(Awaited):
    """Bytes of each of some ranks on their way to all of them."""

    def __init__(
        self,
        own: tuple[int, memoryview],
        meeting: Meeting | None,
        messages: Pending | None,
        senders: Sequence[int],
    ) -> None:
        """
        Args:
            own: this rank, and what it tells.
            meeting: of the others of its host; None: there are none.
            messages: of all others; None: there are none.
            senders: of these messages, in their order.
        """
        self._own = own
        self._meeting = meeting
        self._messages = messages
        self._senders = senders

    def wait(self) -> list[memoryview]:
        """Wait until all are here; what each tells, in rank order, this rank's own too.

        Valid until `release()`.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """
        told = dict([self._own])
        if self._meeting is not None:
            told.update(zip(self._meeting.peers, self._meeting.wait(), strict=True))
        if self._messages is not None:
            messages = [message.numpy().data for message in self._messages.wait()]
            told.update(zip(self._senders, messages, strict=True))
        return [told[rank] for rank in sorted(told)]

    def awaited(self) -> list[int] | None:
        late = [] if self._meeting is None else self._meeting.awaited()
        far = [] if self._messages is None else self._messages.awaited()
        return None if far is None else sorted([*late, *far])

    def release(self) -> None:
        if self._messages is not None:
            self._messages.release()


def tell(
    group: Group,
    message: bytearray,
    most: int,
    *,
    to: Sequence[int] | None = None,
    to_far: Mapping[int, bytearray] | None = None,
    lengths: Mapping[int, int] | None = None,
    opens: bool = False,
) -> Telling:
    """Start telling other ranks a few bytes, and hearing theirs.

    Args:
        group: of the ranks.
        message: what this rank tells. It does not change from here on.
        most: bytes that a rank may tell.
        to: to which ranks, each of which tells all these; None: all others.
        to_far: what to tell each of those on other hosts instead, by rank.
        lengths: how many bytes of the message are for each of those on this host; None: all.
        opens: as of `Awaited`.
    """
    peers = group.peers if to is None else to
    near = [peer for peer in peers if peer in group.near]
    far = [peer for peer in peers if peer not in group.near]
    messages = None
    if far:  # first: they take longer
        tensor = tensor_of(message)
        sends = [(peer, tensor if to_far is None else tensor_of(to_far[peer])) for peer in far]
        messages = group.post(sends, [(peer, most) for peer in far], OPENINGS)
        messages.opens = opens
    meeting = None
    if near:
        of_near = None if lengths is None else [lengths[peer] for peer in near]
        meeting = group.meet(message, near, of_near, opens=opens)
    return Telling((group.rank, memoryview(message)), meeting, messages, far)
