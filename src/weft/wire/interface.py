"""The seam: how bytes get from rank to rank.

A wire is one rank's end of one group, for the memory of one kind of device. It moves bytes, and
says what it saw when it cannot. Who takes part under which name, how long a wait may last, who is
to blame, and what was counted is the group's business.

One thread at a time posts and waits. Where any thread may call something, it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

MEETS = 160 << 10
"""Bytes that a message of a meeting may have; calls open in meetings within a host."""

Send = tuple[int, Tensor]
"""(peer, contiguous tensor on the wire's device, of any dtype). Until the post was waited for the
tensor does not change, and the wire keeps its storage, whatever becomes of the tensor."""

Recv = tuple[int, Tensor | int]
"""(peer, contiguous tensor to fill), or (peer, the most bytes that may come): a receive by size,
for which memory is taken as messages come, and not for the most that may come."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a wire ended, as this rank saw it: evidence, of which the group makes a verdict.

    Attributes:
        kind: "lost": the way to the peer ended; it died, or left, or the link is down. Weak: the
            peer may have ended because of another.
            "garbled": the peer sent what no rank may send, or another length than was asked for.
            "broken": something at this end failed.
            "stuck": ranks wait for each other, none with a limit, so nothing will ever come. Only a
            wire that sees the waits of others can say so, such as one between threads of a process.
            "aborted": `abort` was called, with this.
        peer: whom it is about; None where the wire cannot say.
        text: a clause, such as "the connection to rank 2 was reset".
        circle: of "stuck", ranks of which each waits for the next, if they are known.
    """

    kind: Literal["lost", "garbled", "broken", "stuck", "aborted"]
    peer: int | None
    text: str
    circle: tuple[int, ...] = ()


class WireFailed(ConnectionError):
    """What every use of a wire raises once it has failed.

    Attributes:
        failure: the wire's, the first one.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)  # not its text: what is raised can be pickled
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.text


class Lease(Protocol):
    """Memory for a while, the caller's until it is released; a context manager that gives `tensor`.

    Attributes:
        tensor: uint8, 1-D, on the wire's device, 64-byte aligned.
    """

    tensor: Tensor

    def release(self) -> None:
        """Give it back; any thread. Twice does nothing. On a device the memory is used again when
        the stream that is current now is through."""

    def __enter__(self) -> Tensor: ...

    def __exit__(self, *_: object) -> None: ...


class Pending(Protocol):
    """The messages of one post. To drop it does not cancel them."""

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        """Wait on the host until all messages are complete.

        Handlers of signals run within 0.1 s, and within 0.5 s where another thread has taken the
        signal, which then ends no sleep; what one raises leaves here, and changes nothing.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            What was received, in the order asked for; again, the same. For a tensor, it, filled
            exactly. For a size, the bytes that came: uint8, 1-D, 16-byte aligned, to be read only,
            and until `release()`. All other memory of the post is the caller's again.

        Raises:
            TimeoutError: not yet. Nothing has changed: wait again, or abort.
            WireFailed: the wire has failed, and not all had come. From now on nothing writes to the
                memory of any post of this wire. It may take a second until a wait sees a failure.
        """

    def waiting_for(self) -> list[int]:
        """The peers of messages that are not complete, ascending, for texts; any thread."""

    def release(self) -> None:
        """Give back what came by size; after a wait. Twice does nothing.

        Any thread, also once the wire has failed. It waits for no peer; but where another thread
        is in a wait of this wire, it may take as long as that. On a device the memory is used again
        when the stream that is current now is through.

        Raises:
            WireFailed: the wire fails here, as one may that sees that the caller wrote to what it
                may only read.
        """


@runtime_checkable
class Wire(Protocol):
    """One rank's end of a group.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
    """

    rank: int
    size: int

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> Pending:
        """Start receiving and sending; returns at once.

        Peers are other ranks, and a channel is a number below 2**31, as torch's tags are. Messages
        have any length, also none. The n-th send to a peer on a channel meets the peer's n-th
        receive from this rank on that channel, whichever is posted first; other pairs and other
        channels wait for neither. Messages move while nobody waits.

        A send may be complete before its receive is posted, or only then; where the receiver copies
        from memory that both share, only when it is in a wait, for whatever. It never waits for a
        `release`.

        A peer that is gone fails the wire when something is awaited of it, and not before: ranks
        close early.

        Raises:
            WireFailed: the wire has failed, or is closed. What this post finds, its wait raises.
        """

    def lease(self, nbytes: int) -> Lease | None:
        """Memory that is best to send from and to receive into; None: any is as good.

        Peers may read a message where it lies. So a send from there may be complete later than one
        that the wire copies, see `post`.
        """

    def abort(self, failure: Failure) -> None:
        """Fail with this, unless the wire has failed already: every wait of this rank ends.

        Any thread; returns at once. Peers are not told: the group does that, and does it before.
        """

    def failure(self) -> Failure | None:
        """None while the wire is sound, then for ever the first failure; any thread."""

    def close(self) -> None:
        """Let go of everything; waits end, later uses raise WireFailed. Twice does nothing.

        It may be called by any thread, and by a handler of a signal in the middle of a wait. What
        was sent and waited for still arrives, as far as 5 seconds are enough for it. In a child
        that this process has forked it closes the child's copies of descriptors and mappings, and
        no more: peers notice nothing, and still see when this process dies, though the child lives.
        """


class PendingBytes(Protocol):
    """The messages of one meeting. To drop it does not cancel them."""

    def wait(self, timeout: float | None = None) -> list[bytes | bytearray]:
        """Wait on the host until the messages of all are here, and this rank's is where they read.

        Signals are handled as in `Pending.wait`.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            Each one's message, this rank's own too, in the order of `ranks`; again, the same. The
            memory is the caller's, but for that of its own message.

        Raises:
            TimeoutError: not yet. Nothing has changed: wait again, or abort.
            WireFailed: as `Pending.wait`; and as stuck, where ranks that wait without a limit do so
                in a circle, each for a meeting that the next one comes to later. One of them finds
                it, soon after the circle is closed; the group tells the others.
        """

    def waiting_for(self) -> list[int]:
        """The peers whose messages are not here, ascending; any thread. Where this rank's own found
        no room yet, also those that have to read more before it does."""


@runtime_checkable
class Meeting(Protocol):
    """What a wire between processes has beside.

    Ranks of one host tell each other a few bytes quicker than by messages: each leaves its own
    where all can read them. Messages of `post` and meetings do not wait for each other.

    Attributes:
        near: the ranks that this one can meet, itself among them; the same on each of these. Where
            no ranks meet, it is this one alone.
    """

    near: frozenset[int]

    def meet(self, message: bytes | bytearray, ranks: Sequence[int]) -> PendingBytes:
        """Tell these ranks a message, and begin to hear theirs; never blocks.

        Nothing belongs to a set of ranks, and none is made known before. Two ranks hear of each
        other what both said in their meetings of the same number, of those that they both are in,
        whoever else is. So they begin these in one order, and where they do not, that is not found
        here: messages say what they are of. Any number may be begun before the first is waited
        for, and they may be waited for in any order.

        A message goes at once, while less than a few meetings of any two ranks are unread. Else it
        goes in a later wait of this rank, for whatever. Peers read in their waits, too, and nobody
        writes to a message that somebody may yet read.

        Peers that leave, or die, have told what they told before: that still comes. A meeting that
        lacks one of them fails the wire as lost, and others do not.

        Args:
            message: of at most `MEETS` bytes; those of the ranks have any lengths. It
                does not change from here on.
            ranks: distinct, some of `near`, this one among them, in any order.

        Raises:
            ValueError: a message is longer, or `ranks` are not as above. Nothing has changed.
            WireFailed: the wire has failed, or is closed; or this process is a child that the
                wire's was forked into.
        """
