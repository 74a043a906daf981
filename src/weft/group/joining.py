"""Ranks that share a store become a group: links first, then the wire, and who failed to come.

weft's traffic never mixes with the caller's: a group has sockets of its own, made from the store
alone (never `new_group`, whose names and order the caller would have to keep).
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from ..base import watch
from ..base.arguments import LONGEST, in_words
from ..base.errors import AbsentError, WeftError, WireError
from ..base.pace import patient
from ..failure.control import Statement, join_links
from ..failure.detector import Detector
from ..failure.links import ControlLinks
from ..failure.verdict import SAME_ORDER, in_the_job
from ..rendezvous.address import server_of
from ..rendezvous.machine import own_host
from ..rendezvous.store import (
    HELD_UP,
    AnsweringStore,
    Failure,
    Look,
    SilentStoreError,
    first_to_fail,
    pauses,
)
from ..rendezvous.world import own_rank
from ..wire.tcp.listener import Sockets
from ..wire.tcp.wire import alone, make
from .group import Group
from .session import Session

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


@dataclass(slots=True, kw_only=True)
class _Joining:
    """One rank that is being joined to others; collective. All raise what `connect` raises.

    Attributes:
        ranks: all of them, by their numbers in the job.
        deadline: when joining as a whole is over, by `time.monotonic`.
        look: that of `join_links`.
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
        self.deadline = time.monotonic() + self.timeout
        if self.size == 1:
            return self._session_alone(trouble)
        space, links, sockets, statements = self._meet(trouble)
        detector = Detector(self.rank, self.timeout, links, slow, global_ranks=self.ranks)
        try:
            detector.start()
            wire = make(
                self.rank,
                sockets,
                self._who_meets(statements),
                functools.partial(detector.exchange, until=self.deadline),
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
        return Session(
            wire,
            self.timeout,
            [each.host for each in statements],
            detector=detector,
            join=functools.partial(_join_part, space),
            global_ranks=self.ranks,
        )

    def _session_alone(self, trouble: str) -> Session:
        """The session of one rank, which opens nothing."""
        if trouble:
            raise WeftError(f"{own_rank()}{trouble}")
        return Session(
            alone(),
            self.timeout,
            [own_host()],
            detector=None,
            join=functools.partial(_join_part, self.store),
            global_ranks=self.ranks,
        )

    def _meet(self, trouble: str) -> tuple[dist.Store, ControlLinks, Sockets, list[Statement]]:
        """Meet the others at the store: the part of it that these ranks have, and `join_links`."""
        space = None
        try:
            store = AnsweringStore(self.store, self.deadline)
            generation = store.add(f"weft/{self.name}/{self.rank}", 1)
            space = dist.PrefixStore(f"weft/{self.name}/{generation}", self.store)
            return space, *join_links(space, self.rank, self.size, self.timeout, trouble, self.look)
        except WireError:  # of `look`
            raise
        except (RuntimeError, OSError) as error:  # of the store, of the sockets
            self._look_for_news(error)
            raise self._not_joined(error, space) from error

    def _who_meets(self, statements: Sequence[Statement]) -> set[int]:
        """The others of this host, if all ranks have the same machine code to meet by."""
        own = statements[self.rank]
        if {each.kind for each in statements} != {own.kind} or not own.kind:
            return set()
        near = {rank for rank, each in enumerate(statements) if each.host == own.host}
        return near - {self.rank}

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
