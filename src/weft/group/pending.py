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


class Pending(abc.ABC):
    """Some sends and receives under way."""

    @abc.abstractmethod
    def wait(self) -> list[Tensor]:
        """Wait until all of them are done; return what was received, in the order asked for.

        Where the receive was a tensor, that tensor; where it was a maximum, a uint8 view of the
        bytes that came, to be read only, and until `release()`. Waiting again returns the same.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """

    def release(self) -> None:
        """Give back the leased views, if there are any: after a wait. Twice does nothing."""
        return None


class Exchange(Pending):
    """The messages of one post.

    Ranks have their numbers in the session here: so errors name them.

    Attributes:
        opens: as in `Telling`.
        receive: waits for them at the wire, see `session.Waited`.
    """

    opens = False

    def __init__(
        self,
        session: Session,
        pending: interface.Pending,
        sends: Sequence[Send],
        recvs: Sequence[Recv],
    ) -> None:
        self.receive = pending.wait
        self._session = session
        self._pending = pending
        self._sends = sends
        self._recvs = recvs
        self._received: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self._received is None:
            self._received = self._session.wait_for(self)
        return self._received

    def release(self) -> None:
        self._session.release(self._pending)

    def awaited(self) -> list[int]:
        """The ranks whose messages are not complete; any thread may ask, and no message moves."""
        return self._pending.waiting_for()

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
        missing = self.awaited()
        messages = [*self._recvs, *self._sends]
        for message in messages:
            if message[0] in missing:
                return message
        return messages[-1]  # all are complete by now


class Telling:
    """A few bytes of each of some ranks on their way to all of them: see `Group.tell`.

    Ranks have their numbers in the session here, as in `Exchange`, but those of what is told.

    Attributes:
        opens: whether it is what all ranks say as they come to a call, before they wait for
            anything in it.
    """

    def __init__(
        self,
        session: Session,
        peers: Sequence[int],
        meeting: interface.PendingBytes | None,
        messages: Exchange | None,
        *,
        opens: bool,
    ) -> None:
        """
        Args:
            session: whose wire it is.
            peers: who tells something: those of the meeting first.
            meeting: of the ranks of this host, if there are others.
            messages: of ranks of other hosts, if there are any.
            opens: see above.
        """
        self.opens = opens
        self._session = session
        self._peers = peers
        self._meeting = meeting
        self._messages = messages

    def wait(self) -> dict[int, memoryview]:
        """Wait until all are here; what each of the others tells, by its rank; once.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """
        try:
            return dict(zip(self._peers, self._session.wait_for(self), strict=True))
        finally:
            if self._messages is not None:  # which were copied
                self._messages.release()

    def receive(self) -> list[memoryview]:
        """Wait at the wire for what all tell."""
        heard: list[memoryview] = []
        if self._meeting is not None:
            heard += map(memoryview, self._meeting.wait()[1:])
        if self._messages is not None:
            heard += [memoryview(bytearray(each.numpy())) for each in self._messages.receive()]
        return heard

    def awaited(self) -> list[int]:
        """The ranks that have not told all; any thread may ask, and no message moves."""
        late = [] if self._meeting is None else self._meeting.waiting_for()
        far = [] if self._messages is None else self._messages.awaited()
        return sorted([*late, *far])

    def peer(self) -> int | None:
        """The first rank that is waited for; None: none is any more."""
        return next(iter(self.awaited()), None)

    def what(self) -> str:
        """What is waited for, as a clause of an error."""
        peer = self.peer()
        return "awaited nothing" if peer is None else f"awaited a message from rank {peer}"


Awaited = Exchange | Telling
"""What is under way, and other ranks take part in: it knows who has not come."""
