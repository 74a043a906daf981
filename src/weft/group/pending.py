"""What a group has under way, and waits for: messages of a post, or what all ranks tell.

A wait ends with its messages, or with an error that names a rank (`session`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor

from ..wire import interface
from ..wire.interface import Recv, Send
from .session import Session


class Awaited:
    """What is under way, and other ranks take part in.

    Attributes:
        opens: whether it is what all ranks say as they come to a call, before they wait for
            anything in it.
    """

    opens = False

    def awaited(self) -> list[int] | None:
        """The ranks whose messages are not complete; any thread may ask, and no message moves.

        Only for texts that name missing ranks. None: it is unknown.
        """
        return None

    def release(self) -> None:
        """Give back the leased views, if there are any: after a wait. Twice does nothing."""
        return None


class Pending(Awaited, abc.ABC):
    """Some sends and receives under way."""

    @abc.abstractmethod
    def wait(self) -> list[Tensor]:
        """Wait until all of them are done; return what was received, in the order asked for.

        Where the receive was a tensor, that tensor; where it was a maximum, a uint8 view of the
        bytes that came, to be read only, and until `release()`. Waiting again returns the same.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """


class Posted(Pending):
    """What a wire of a session has under way.

    Ranks have their numbers in the session here: so errors name them.

    Attributes:
        session: whose wire it is.
        pending: what the wire gave for it.
    """

    def __init__(self, session: Session, pending: interface.Pending) -> None:
        self.session = session
        self.pending = pending
        self._received: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self._received is None:
            self._received = self.receive()
        return self._received

    def receive(self) -> list[Tensor]:
        """Wait for the messages, for the first `wait`; what it returns."""
        return self.session.wait_for(self)

    def release(self) -> None:
        self.session.release(self.pending)

    @abc.abstractmethod
    def awaited(self) -> list[int]:
        """All ranks that are waited for."""

    @abc.abstractmethod
    def peer(self) -> int | None:
        """The rank that is waited for; None: there is none."""

    @abc.abstractmethod
    def what(self) -> str:
        """What is waited for, as a clause of an error."""


class Exchange(Posted):
    """The messages of one post."""

    def __init__(
        self,
        session: Session,
        pending: interface.Pending,
        sends: Sequence[Send],
        recvs: Sequence[Recv],
    ) -> None:
        super().__init__(session, pending)
        self._sends = sends
        self._recvs = recvs

    def awaited(self) -> list[int]:
        return self.pending.waiting_for()

    def peer(self) -> int | None:
        """The rank that is waited for; None: this post has no messages."""
        return self._first()[0] if self._recvs or self._sends else None

    def what(self) -> str:
        """What is waited for, as a clause of an error."""
        if not self._recvs and not self._sends:
            return "awaited nothing"
        peer, message = self._first()
        if isinstance(message, int):
            return f"awaited up to {message} bytes from rank {peer}"
        if any(message is sent for _, sent in self._sends):
            return f"was sending {message.nbytes} bytes to rank {peer}"
        return f"awaited {message.nbytes} bytes from rank {peer}"

    def _first(self) -> tuple[int, Tensor | int]:
        """The first message that is awaited, with its peer: receives come first.

        A wire says which peers it awaits, and not which of their messages. So where both a receive
        and a send of one peer were posted, it is the receive, though that may have come.
        """
        missing = self.pending.waiting_for()
        messages = [*self._recvs, *self._sends]
        for message in messages:
            if message[0] in missing:
                return message
        return messages[-1]  # all are complete by now


class Telling(Awaited):
    """A few bytes of each of some ranks on their way to all of them: see `Group.tell`.

    Ranks have their numbers in the session here, as in `Posted`, but those of what is told.

    Attributes:
        session: as in `Posted`.
        pending: what the wire has under way.
        opens: as in `Awaited`.
    """

    def __init__(
        self,
        session: Session,
        pending: InBothWays,
        peers: Sequence[int],
        *,
        opens: bool,
    ) -> None:
        """
        Args:
            session: whose wire it is.
            pending: what the peers tell.
            peers: who tells something, in the order of what is received.
            opens: as in `Awaited`.
        """
        self.session = session
        self.pending = pending
        self.opens = opens
        self._peers = peers

    def wait(self) -> dict[int, memoryview]:
        """Wait until all are here; what each of the others tells, by its rank; once.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """
        try:
            return dict(zip(self._peers, self.session.wait_for(self), strict=True))
        finally:
            if self.pending.messages is not None:  # which were copied
                self.session.release(self.pending.messages)

    def awaited(self) -> list[int]:
        return self.pending.waiting_for()

    def peer(self) -> int | None:
        """The first rank that is waited for; None: none is any more."""
        return next(iter(self.pending.waiting_for()), None)

    def what(self) -> str:
        """What is waited for, as a clause of an error."""
        peer = self.peer()
        return "awaited nothing" if peer is None else f"awaited a message from rank {peer}"


class InBothWays:
    """What ranks of this host tell in a meeting, and ranks of others in messages.

    Attributes:
        meeting, messages: None: there are no such ranks.
    """

    def __init__(
        self, meeting: interface.PendingBytes | None, messages: interface.Pending | None
    ) -> None:
        self.meeting = meeting
        self.messages = messages

    def wait(self) -> list[memoryview]:
        """What all tell: those of the meeting first."""
        heard: list[memoryview] = []
        if self.meeting is not None:
            heard += map(memoryview, self.meeting.wait()[1:])
        if self.messages is not None:
            heard += [memoryview(bytearray(message.numpy())) for message in self.messages.wait()]
        return heard

    def waiting_for(self) -> list[int]:
        late = [] if self.meeting is None else self.meeting.waiting_for()
        far = [] if self.messages is None else self.messages.waiting_for()
        return sorted([*late, *far])


class WithOwn(Pending):
    """The messages of all other ranks, with this rank's own put in its place in rank order."""

    def __init__(self, pending: Pending, rank: int, own: Tensor) -> None:
        self._pending = pending
        self._rank = rank
        self._own = own

    def wait(self) -> list[Tensor]:
        received = self._pending.wait()
        return [*received[: self._rank], self._own, *received[self._rank :]]

    def release(self) -> None:
        self._pending.release()
