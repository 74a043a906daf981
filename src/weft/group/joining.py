"""Ranks that share a store become a group: sockets first, then the wire, and who failed to come.

At the store each rank says where it listens. If a rank is in trouble, every rank raises the same.
Then two sockets join every two ranks (`tcp.listener`): one for control links, one for the wire.

weft's traffic never mixes with the caller's: a group has sockets of its own, made from the store
alone (never `new_group`, whose names and order the caller would have to keep).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from .. import kernels
from ..base import watch
from ..base.arguments import LONGEST, in_words
from ..base.errors import AbsentError, WeftError, WireError
from ..base.pace import patient
from ..failure.detector import Detector
from ..failure.links import ControlLinks, SocketLinks
from ..failure.verdict import SAME_ORDER, in_the_job
from ..rendezvous.address import own_address, server_of
from ..rendezvous.machine import own_host
from ..rendezvous.store import (
    HELD_UP,
    AnsweringStore,
    Failure,
    Look,
    SilentStoreError,
    exchange,
    first_to_fail,
    pauses,
)
from ..rendezvous.world import own_rank
from ..wire.tcp.listener import (
    LANES,
    STRANGERS,
    Endpoint,
    Listener,
    Sockets,
    check_nothing,
    make_room,
)
from ..wire.tcp.meeting import architecture
from ..wire.tcp.wire import TcpWire, alone, make
from .group import Group
from .session import Session

_BUFFER = 1 << 17  # bytes that a control link takes at once, whatever its peer does
_NEWS = 1.0  # seconds after which what another rank was told is known here, too

Where = Callable[[Sequence[int]], str]
"""Says where ranks are that have not come, as a clause; "": nobody knows."""


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    name: str = "world",
    where: Where | None = None,
    global_ranks: Sequence[int] | None = None,
) -> Group:
    """Join ranks that share a store into a group; collective, all with the same name.

    Only this function, `split` and `add_line` use the store, so it may end with its host
    afterwards. Groups of one name may be made at one store, one after the other.

    Args:
        store: any store that all ranks share; all keys begin with `weft/{name}`.
        rank: this rank, from 0.
        size: how many ranks there are; one alone opens nothing.
        timeout: seconds that joining as a whole, and then any one wait, may last; more than
            `LONGEST` are as many.
        name: tells groups that are made at the same time apart.
        where: asked for ranks that did not come. None: they can be nowhere but on their way.
        global_ranks: the ranks, by their numbers in the job; None: these are the same.

    Raises:
        WeftError: some rank may not open as many files as its connections are, or cannot listen.
        WireError: somebody did not come in time, or died, or cannot have its end of the wire.

    Example:
        >>> group = connect(dist.HashStore(), 0, 1, timeout=5.0)
        >>> group.rank, group.size
        (0, 1)
        >>> group.close()
    """
    joining = _Joining(
        store=store,
        rank=rank,
        ranks=range(size) if global_ranks is None else global_ranks,
        timeout=min(timeout, LONGEST),
        name=name,
        where=where,
    )
    return Group(joining.session())


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank says at the store.

    Attributes:
        host: the name of its host.
        kind: of the machine code that ranks of a host meet by; "": it has none.
        trouble: why it cannot be joined, or "".
        endpoint: where it listens, as the values of an `Endpoint`; empty: nowhere.
    """

    host: str
    kind: str
    trouble: str
    endpoint: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _Joining:
    """One rank that is being joined to others; collective. All raise what `connect` raises.

    Attributes:
        ranks: all of them, by their numbers in the job.
        deadline: when joining as a whole is over, by `time.monotonic`.
        look: called until all have come and are connected; raises once one is known not to come.
        store, rank, timeout, name, where: as for `connect`.
    """

    store: dist.Store
    rank: int
    ranks: Sequence[int]
    timeout: float
    name: str
    where: Where | None
    look: Look = None
    deadline: float = field(init=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def session(self) -> Session:
        """This rank's end of a new session."""
        trouble = ""
        slow = math.inf
        try:
            slow = watch.chosen()
        except WeftError as error:
            trouble = str(error)  # which all ranks raise, once they have met
        if self.size == 1:
            if trouble:
                raise WeftError(f"{own_rank()}{trouble}")
            return self._session_over(alone(), [own_host()], None, self.store)
        kernels.prepare()  # before the deadline of any wait begins
        self.deadline = time.monotonic() + self.timeout
        space, links, sockets, statements = self._meet(trouble)
        detector = Detector(self.rank, self.timeout, links, slow, global_ranks=self.ranks)
        try:
            detector.start()
            wire = make(
                self.rank,
                sockets,
                who_meets(statements, self.rank),
                functools.partial(detector.agree, until=self.deadline),
                self.deadline,
            )
        except BaseException as error:
            is_of_sockets = isinstance(error, OSError) and not isinstance(error, WireError)
            lost = detector.blame() if is_of_sockets else None
            detector.close()  # which tells the others what this rank raised
            for sock in sockets.values():
                sock.close()
            if lost is not None:
                raise lost.error(self.rank) from error
            if isinstance(error, WireError):  # of one that has ended because of other news
                self._look_for_news(error)
            elif is_of_sockets:
                text = f"rank {self.rank}: it has no part in group {self.name!r}: {in_words(error)}"
                raise WireError(text, rank=self.rank, culprit=self.rank) from error
            raise
        return self._session_over(wire, [each.host for each in statements], detector, space)

    def _session_over(
        self, wire: TcpWire, hosts: Sequence[str], detector: Detector | None, space: dist.Store
    ) -> Session:
        return Session(
            wire,
            self.timeout,
            hosts,
            detector=detector,
            join=functools.partial(_join_part, space),
            global_ranks=self.ranks,
        )

    def _meet(self, trouble: str) -> tuple[dist.Store, ControlLinks, Sockets, list[Statement]]:
        """Meet the others at the store: the part of it that these ranks have, and `_connected`."""
        space = None
        try:
            store = AnsweringStore(self.store, self.deadline)
            generation = store.add(f"weft/{self.name}/{self.rank}", 1)
            space = dist.PrefixStore(f"weft/{self.name}/{generation}", self.store)
            return space, *self._connected(space, trouble)
        except WireError:  # of `look`
            raise
        except (RuntimeError, OSError) as error:  # of the store, of the sockets
            self._look_for_news(error)
            raise self._not_joined(error, space) from error

    def _connected(
        self, space: dist.Store, trouble: str
    ) -> tuple[ControlLinks, Sockets, list[Statement]]:
        """This rank's control links, its sockets for messages, and what each rank has said."""
        look = self.look
        # a rank that is connected leaves only when all others are, too
        check = check_nothing if look is None else functools.partial(look, lambda: range(self.size))
        with contextlib.ExitStack() as stack:
            endpoint: dict[str, Any] = {}
            try:
                trouble = trouble or make_room(self.size - 1) or ""
                backlog = len(LANES) * self.size + STRANGERS
                listener = stack.enter_context(Listener(own_address(space), backlog, own_host()))
                endpoint = asdict(listener.endpoint)
            except OSError as error:
                trouble = trouble or f"it cannot listen: {error}"
            own = asdict(Statement(own_host(), architecture(), trouble, endpoint))
            place = self.rank, self.size
            values = exchange(space, "statement", own, *place, self.timeout, "did not join", look)
            statements = [Statement(**each) for each in values]
            self._raise_trouble(statements, space)  # also where this one cannot listen
            peers = {}
            for peer, each in enumerate(statements):
                if peer != self.rank:
                    peers[peer] = Endpoint(**each.endpoint)
            messages, control = listener.connect(self.rank, peers, self.deadline, check)
        for sock in control.values():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        return SocketLinks(control), messages, statements

    def _raise_trouble(self, statements: Sequence[Statement], space: dist.Store) -> None:
        """Raise the trouble of the first rank that has any, on every rank."""
        for peer, each in enumerate(statements):
            if each.trouble:
                failure = f"rank {peer}: {each.trouble}", peer
                text, _ = first_to_fail(space, self.rank, self.size, failure)
                raise WeftError(text)

    def _look_for_news(self, error: Exception) -> None:
        """Raise the news that has ended the wait too early, as soon as this rank has it.

        Who had it first may have gone, and the store with it.
        """
        gone = error.ranks if isinstance(error, AbsentError) else range(self.size)
        if self.look is not None and time.monotonic() < self.deadline:
            for _ in pauses(time.monotonic() + _NEWS, last=0.05):  # the news is on its way
                self.look(lambda: gone)

    def _not_joined(self, error: Exception, space: dist.Store | None) -> WireError:
        """What all ranks raise where the store or the sockets failed.

        `space` is None where the store has not even said how these ranks are called there.
        """
        failure = self._why_not_joined(error)
        if space is not None:
            lost = error.ranks if isinstance(error, AbsentError) else ()
            failure = first_to_fail(space, self.rank, self.size, failure, lost)
        why, culprit = failure
        numbers = in_the_job(self.ranks, culprit)
        return WireError(
            f"rank {self.rank}: group {self.name!r} of {self.size} ranks: {why}{numbers}",
            rank=self.rank,
            culprit=culprit,
        )

    def _why_not_joined(self, error: Exception) -> Failure:
        """What is said where the store or the sockets failed, and the rank to blame."""
        remedy = "; see that all ranks were started and reach each other"
        late = time.monotonic() - self.deadline
        # where the store has failed, others had ended it; else a busy machine may be late
        store_is_there = isinstance(error, AbsentError | SilentStoreError)
        if late > (patient(HELD_UP) if store_is_there else HELD_UP):
            why = f"rank {self.rank} came {late:.0f} s too late to join it: was it stopped?"
            return why, self.rank
        if isinstance(error, AbsentError):
            why = f"{error} before the timeout of {self.timeout:g} s"
            if self.where is None:
                return f"{why}{remedy}", error.ranks[0]
            if place := self.where(error.ranks):  # they may wait there for one that is here
                return f"{why}: {place}; see that {SAME_ORDER}", None
            return f"{why}{remedy}, and that {SAME_ORDER}", error.ranks[0]
        if isinstance(error, OSError) or server_of(self.store)[0] is None:
            # not of a store that has a host
            return f"it was not joined (timeout {self.timeout:g} s): {error}{remedy}", None
        host, culprit = "the process that hosts it", None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host = "the launcher, which hosts it,"
        elif self.name == "world":
            # in other groups rank 0 may be another one than the program's
            host, culprit = "rank 0, which hosts it,", 0
        said = str(error).splitlines()[0]
        why = f"the store failed ({said}): is {host} gone or stopped, or was this rank stopped?"
        return why, culprit


def who_meets(statements: Sequence[Statement], rank: int) -> set[int]:
    """The others of a rank's host, if all ranks have the same machine code to meet by."""
    own = statements[rank]
    if {each.kind for each in statements} != {own.kind} or not own.kind:
        return set()
    near = {peer for peer, each in enumerate(statements) if each.host == own.host}
    return near - {rank}


def _join_part(space: dist.Store, ranks: tuple[int, ...], name: str, parent: Session) -> Session:
    """A session of some of the ranks of a session, whose part of a store is `space`."""
    joining = _Joining(
        store=space,
        rank=ranks.index(parent.rank),
        ranks=[parent.global_ranks[rank] for rank in ranks],
        timeout=parent.timeout,
        name=name,
        where=lambda absent: "",  # they may be in another split
        look=functools.partial(parent.check_on, ranks),
    )
    return joining.session()
