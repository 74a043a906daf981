"""The group: who takes part, and what they send to each other, in few verbs.

Programs and algorithms hold a group, which knows nothing of rows. An algorithm is written against
this face alone, so it runs unchanged between processes (`joining`) and between threads
(`weft.testing.threads`).

The rules, for every group:

* Posts between the same two ranks on the same channel match in the order they were made; different
  pairs of ranks, different channels, and groups of different ranks are independent. A send may
  complete only when it is received.
* A receive is a tensor, which its message fills exactly, or the most bytes that may come, of which
  as many are returned as came.
* Nobody sends to itself.
* Every wait ends: with what was awaited, or within `timeout` seconds with a `WireError` that says
  which rank waited for what, from which peer, for how long, and which rank is to blame. After
  that the group is broken: every later use raises the same verdict at once.
* One thread at a time uses a group. `group.worker` gives calls their turn.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar, final

import torch.distributed as dist

from ..base._torch import is_of_group
from ..base.arguments import as_integer, shown, wrong_timeout
from ..base.errors import Error, WeftError, WireError, entry, summed_up
from ..base.memory import Pool, tensor_of
from ..records.traffic import Traffic
from ..wire.interface import Lease, Recv, Send, Wire
from .channels import OPENINGS, SMALL
from .pending import Exchange, Telling
from .session import Session
from .worker import Worker

T = TypeVar("T")

_LINE = "line"  # in the state of a group
_MEMBERS = 64  # bytes of the text of a group's ranks, which travels with every call


@final
class Group:
    """Some ranks that talk to each other; what `weft.init` returns, and `group=` takes.

    It is a view of a `Session`, which it shares with the groups that `subset` gives: a failure of
    one is a failure of all. To make a view costs nothing, and sends nothing. There is one of the
    same ranks in the same order, and what calls keep of them outlives it (`state`).

    Attributes:
        session: what the group is a view of.
        rank: this rank's number in the group.
        size: how many ranks there are.
        peers: all other ranks, starting with the next one, so that not all turn to rank 0 at once.
        members: its ranks in words, in their order and by their numbers in the session, such as
            "ranks 2, 0"; the same text on each of them, of many a digest.
        global_ranks: its ranks, by their numbers in the job.
        near: the other ranks that this one tells something in a meeting: those of its host, if any.
        wire: what carries tensors of the CPU.
        memory: the pool that workspaces are leased from.
        worker: the one queue in which calls take their turn, on whichever groups of the session.
        traffic: what was sent so far, by all groups of the session.
        state: what is kept of these ranks from one call to the next, by its name; this group has it
            in common with every view of the same ranks and wire.
    """

    def __init__(self, session: Session, ranks: Sequence[int] | None = None) -> None:
        """All of a session, as `weft.init` returns it, or a view: see `subset`.

        Args:
            session: of the ranks. The group closes it, unless it is a view.
            ranks: of the session, in the order in which they are numbered here.
        """
        self.session = session
        self._is_view = ranks is not None
        self._ranks = tuple(range(session.size) if ranks is None else ranks)
        # where numbers are those of the session, a post does not pay for numbering its messages
        self._is_renumbered = self._ranks != tuple(range(len(self._ranks)))
        self._is_whole = not self._is_renumbered and len(self._ranks) == session.size
        self._end: Callable[[], None] | None = None  # of a `with` block, if it is not `close`
        self.rank = self._ranks.index(session.rank)
        self.size = len(self._ranks)
        self.peers = [*range(self.rank + 1, self.size), *range(self.rank)]
        self.members = f"all {self.size} ranks" if self._is_whole else _in_words(self._ranks)
        # what sets its channels apart from those of groups of other ranks
        self._apart = 0 if self._is_whole else zlib.crc32(self.members.encode()) >> 1
        self.global_ranks = tuple(session.global_ranks[rank] for rank in self._ranks)
        near = session.meetings.near if session.meetings is not None else ()
        self.near = frozenset(peer for peer in self.peers if self._ranks[peer] in near)
        self.wire: Wire = session.wire
        self.memory: Pool = session.memory
        self.worker: Worker = session.worker
        self.traffic: Traffic = session.traffic
        self.state: dict[str, Any] = session.states.setdefault(self._ranks, {})

    @property
    def timeout(self) -> float:
        """Seconds that any one wait may last."""
        return self.session.timeout

    @property
    def hosts(self) -> tuple[str, ...]:
        """For each rank an opaque name of its host: where these are equal, ranks share memory."""
        return tuple(map(self.session.hosts.__getitem__, self._ranks))

    @property
    def closed(self) -> bool:
        """Whether this rank has left."""
        return self.session.closed

    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of torch's that it stands for, if there is one."""
        return self.session.process_group() if self._is_whole else None

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> Exchange:
        """Start sending and receiving, in the order given; returns at once.

        Receives are posted before sends. Empty tensors are sent and received like others. Posts
        on different channels (small numbers) match independently of each other, and so do posts on
        groups of different ranks, or of the same ranks in another order.

        Raises:
            WireError: the group is broken or closed.
            WeftError: a rank is no peer.
        """
        self._check_peers([*sends, *recvs])
        session = self.session
        if channel != OPENINGS:
            channel ^= self._apart
        if self._is_renumbered:
            sends = [(self._ranks[peer], tensor) for peer, tensor in sends]
            recvs = [(self._ranks[peer], into) for peer, into in recvs]
        pending = session.use("posted messages", self.wire.post, sends, recvs, channel)
        session.traffic.count(sends)
        return Exchange(session, pending, sends, recvs)

    def tell(
        self,
        message: bytearray,
        most: int,
        *,
        to: Sequence[int] | None = None,
        to_far: Mapping[int, bytearray] | None = None,
        counted: Mapping[int, int] | None = None,
        opens: bool = False,
    ) -> Telling:
        """Start telling other ranks a few bytes, and hearing theirs, as a call begins.

        It travels as openings do, whatever carries the tensors: in a meeting with the `near` ranks,
        else in messages. So what two ranks tell each other takes one way, whichever others are in
        the call: a rank hears of one that is in another call, and each says of which it is.

        Args:
            message: what this rank tells. It does not change from here on.
            most: bytes that a rank may tell, no more than `weft.wire.interface.MEETS`.
            to: to which ranks, each of which tells all these; None: all others.
            to_far: what to tell each of those that are not near instead, by rank.
            counted: how many bytes of the message are for each of the near ones; None: all.
            opens: as of `Telling`.
        """
        session = self.session
        peers = self.peers if to is None else to
        near = [peer for peer in peers if peer in self.near]
        far = [peer for peer in peers if peer not in self.near]
        meeting = messages = None
        if far:  # first: they take longer
            same = tensor_of(message)
            sends = [(peer, same if to_far is None else tensor_of(to_far[peer])) for peer in far]
            messages = self.post(sends, [(peer, most) for peer in far], OPENINGS)
        if near:
            wire = session.meetings
            assert wire is not None  # else nobody is near
            ranks = [self._ranks[peer] for peer in near]
            everybody = [session.rank, *ranks]
            meeting = session.use("came to a meeting", wire.meet, message, everybody)
            lengths = [len(message)] * len(near)
            if counted is not None:
                lengths = [counted[peer] for peer in near]
            session.traffic.count_bytes([*zip(ranks, lengths, strict=True)])
        return Telling(session, [*near, *far], meeting, messages, opens=opens)

    def all_gather_bytes(self, message: bytes, decode: Callable[[bytes], T]) -> list[T]:
        """Exchange messages of one length between all ranks; the decoded messages, in rank order.

        Args:
            message: this rank's; all have the same length.
            decode: as for `decode`.

        Raises:
            WireError: the deadline passed, or a peer or a link failed.
        """
        own = tensor_of(bytearray(message))
        recvs = [(peer, len(message)) for peer in sorted(self.peers)]
        pending = self.post([(peer, own) for peer in self.peers], recvs, SMALL)
        messages = [each.numpy().tobytes() for each in pending.wait()]
        pending.release()
        messages.insert(self.rank, message)
        return [self.decode(rank, "a message", decode, each) for rank, each in enumerate(messages)]

    def lease(self, nbytes: int) -> Lease:
        """Workspace that is best to send from: peers of this host read it where it lies.

        They do that in a wait. So a send from there may be complete only once its receiver waits.
        """
        return self.wire.lease(nbytes) or self.memory.lease(nbytes)

    def subset(self, ranks: Sequence[int]) -> Group:
        """Some of the ranks, this one among them, as a group: nothing is set up, nothing is sent.

        The ranks are numbered in the order given. Asked again, for the same ranks in the same
        order, this returns the same group. Messages go over the same wires, and a call on the
        subset takes its turn among the calls on this group: so all ranks make the calls on both in
        the same order. Errors name ranks by their numbers in the session.

        Raises:
            WeftError: these are not distinct ranks of this group, or this rank is not among them.
        """
        chosen = self._chosen(ranks)
        if self.rank not in chosen:
            raise WeftError(f"rank {self.rank} is none of the ranks {list(chosen)}: it has no part")
        members = tuple(self._ranks[rank] for rank in chosen)
        views = self.session.views
        view: Group | None = views.get(members)
        return view or views.setdefault(members, Group(self.session, members))

    def split(self, ranks: Sequence[int]) -> Group | None:
        """Some of the ranks, as a group with connections of its own; numbered in the order given.

        Every rank of this group calls it with the same list; those outside get None. A subset is
        split into subsets, which have no connections of their own.

        Raises:
            WeftError: these are not distinct ranks of this group. Only the ranks that gave such a
                list raise it, and the others wait for them; the next call works.
            WireError: somebody did not come in time, or died.
        """
        if not self._is_view:
            self.session.count_split()
        chosen = self._chosen(ranks)
        if self.rank not in chosen:
            return None
        if self._is_view:
            return self.subset(chosen)
        return Group(self.session.split(chosen))

    def add_line(self) -> None:
        """Give calls on `line` connections and a worker of their own; collective.

        Of a group of some of the ranks it does nothing: the others are not here.

        Raises:
            WireError, WeftError: as `Session.add_line`.
        """
        if self._is_whole:
            self.session.add_line()

    @property
    def line(self) -> Group:
        """The same ranks, for calls whose order among the others may differ between ranks.

        That is this group itself, until all ranks of the session have come to `add_line`.
        """
        line = self.session.line
        if line is None:
            return self
        found: Group | None = self.state.get(_LINE)
        if found is None:
            found = self.state[_LINE] = Group(line).subset(self._ranks)
        return found

    def rank_in_errors(self, rank: int) -> int:
        """The number that errors call a rank by: that of the session."""
        return self._ranks[rank]

    def fail(self, peer: int, text: str) -> WireError:
        """Break the group for all ranks on account of what a peer did; the error to raise here."""
        return self.session.fail(self._ranks[peer], text)

    def decode(self, peer: int, what: str, decode: Callable[..., T], *given: Any) -> T:
        """`decode(*given)`, which reads bytes that a peer sent.

        Args:
            peer: the rank that sent them.
            what: the bytes should be, for the error.
            decode: raises any Exception if the bytes are invalid. It has no side effects, and
                allocates no more memory than valid bytes need.
            given: the bytes, and what else `decode` takes.

        Raises:
            WireError: `decode` raised. The group is broken for all ranks, since messages and calls
                may no longer match.
        """
        try:
            return decode(*given)
        except (Error, MemoryError):  # of this rank
            raise
        except Exception as error:
            sender = f"rank {self.rank_in_errors(peer)}"
            why = f"{sender} sent {what} that cannot be read: {error!r:.500}"
            raise self.fail(peer, why) from error

    def diagnose(self, where: str) -> WireError | None:
        """The error to raise after a call of another library failed, if a peer is to blame.

        Args:
            where: the call, as the end of the clause "while rank 0 was in ...".
        """
        return self.session.diagnose(where)

    def check(self) -> None:
        """Raise if the group is broken, as far as this rank knows; it asks nobody.

        On an accelerator the host does not wait for the last messages of a call, and a rank that
        dies meanwhile leaves garbage in the result. So wait for the device (by
        `torch.accelerator.synchronize()`), and call this, before you keep what cannot be had again.

        Raises:
            WireError: the group is broken or closed.
        """
        self.session.check()

    def abort(self, reason: str) -> None:
        """Break the group, telling every peer that this rank did it and why; waits for no peer.

        For a rank that cannot finish a schedule that others are in (out of memory, interrupted).
        """
        self.session.abort(reason)

    def set_timeout(self, seconds: float) -> None:
        """Change what any one wait may last, of those that begin from now on.

        Raises:
            WeftError: it is no number of seconds above 0; nothing has changed.
        """
        if error := wrong_timeout(seconds):
            raise WeftError(f"rank {self.rank_in_errors(self.rank)}: {error}")
        self.session.set_timeout(seconds)

    def close(self) -> None:
        """Leave: tell the peers that this is no death, and let go of everything. Twice is fine.

        Of a group that `subset` gave it does nothing: what that is a view of stays open.
        """
        if not self._is_view:
            self.session.close()

    def end_with(self, leave: Callable[[], None] | None) -> None:
        """Set what is called at the end of a `with` block of the group; None: `close`."""
        self._end = leave

    def __enter__(self) -> Self:
        return self

    @entry
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave. If a process group raised, raise an error that names the culprit instead."""
        lost = self.diagnose("a call of torch.distributed's") if is_of_group(error) else None
        if self._end is not None:
            self._end()
        else:
            self.close()
        if lost is not None:
            raise lost from error

    def __reduce__(self) -> NoReturn:
        """Refuse `copy` and `pickle`: two groups over the same connections would mix up messages"""
        raise WeftError(
            f"rank {self.rank}: a group cannot be copied or pickled, since its connections are "
            "this process's: pass the group itself, or make one where it is needed (weft.init)"
        )

    def _check_peers(self, messages: Sequence[tuple[int, object]]) -> None:
        """Raise WeftError if a message is for or from a rank that is no peer."""
        for peer, _ in messages:
            if peer == self.rank or not 0 <= peer < self.size:
                raise WeftError(f"rank {self.rank}: rank {peer} is no peer among {self.size} ranks")

    def _chosen(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Some of the ranks. Raises WeftError: they are not distinct ranks of this group."""
        try:
            distinct = tuple(map(as_integer, ranks))
        except Exception:  # a caller's object may raise anything
            distinct = (-1,)
        if len(set(distinct)) < len(distinct) or not set(distinct) <= set(range(self.size)):
            said = f"{shown(ranks)} are not distinct ranks of {self.size}"
            raise WeftError(f"rank {self.rank}: {said}")
        return distinct


def _in_words(ranks: Sequence[int]) -> str:
    """Some ranks in words, of many a digest."""
    text = f"ranks {', '.join(map(str, ranks))}"
    return summed_up(text, _MEMBERS, f"{len(ranks)} ranks")
