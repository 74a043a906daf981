"""Ranks that share a store become a group: links first, then the wires, and who failed to come.

weft's traffic never mixes with the caller's: a group has sockets of its own (wire "tcp") or a
process group of its own (wire "torch"), made from the store alone (never `new_group`, whose names
and order the caller would have to keep). To add a wire, register it (`registry`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ..base import watch
from ..base.arguments import LONGEST, wrong_timeout
from ..base.errors import AbsentError, WeftError, WireError, there_are
from ..base.memory import Pool
from ..failure.control import HELD_UP, NotJoinedError, join_links
from ..failure.detector import Detector
from ..failure.verdict import SAME_ORDER
from ..rendezvous.address import server_of
from ..rendezvous.machine import own_host
from ..rendezvous.store import AnsweringStore, Look, SilentStoreError, has, pauses
from ..rendezvous.world import own_rank
from ..wire.factory import Factory, Start, make_wire, seconds_left
from ..wire.interface import Wire
from ..wire.registry import is_own, own_wire, wire_alone, wire_names
from . import choice
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
    wire: str | None = None,
    process_group: dist.ProcessGroup | None = None,
    where: Where | None = None,
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
        wire: the name of what carries bytes, in this group and in those that are split off; the
            same on every rank. None: the chosen one. One that is `lockstep` or `exact` carries
            payloads alone, and "tcp" the openings, or what carries the control links.
        process_group: torch's, that the group is made for; for wires that use it.
        where: asked for ranks that did not come. None: they can be nowhere but on their way.

    Raises:
        WeftError: the rank is none of them, or the timeout no number of seconds; or, on every rank:
            the ranks were asked for different wires, or for one that some rank does not know, or
            some rank cannot have its end of the wire, or may not open as many files as its
            connections are.
        WireError: somebody did not come in time, or died.

    Example:
        >>> group = connect(dist.HashStore(), 0, 1, timeout=5.0)
        >>> group.rank, group.size
        (0, 1)
        >>> group.close()
    """
    if not 0 <= rank < size:
        raise WeftError(f"rank {rank} is none of {size} ranks")
    if error := wrong_timeout(timeout):
        raise WeftError(f"rank {rank}: {error}")
    timeout = min(timeout, LONGEST)
    return Group(
        _join(store, rank, size, timeout, name, wire or choice.wire_name(), process_group, where)
    )


def _join(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    name: str,
    wire: str,
    process_group: dist.ProcessGroup | None,
    where: Where | None,
    look: Look = None,
) -> Session:
    """This rank's end of a new session; the arguments and errors are those of `connect`.

    `look` is that of `join_links`.
    """
    factory: Factory | str
    try:
        factory = choice.factory_of(wire)
        slow = watch.chosen()
    except WeftError as error:
        factory = str(error)  # which all ranks raise, once they have met
    deadline = time.monotonic() + timeout
    memory = Pool()
    space = store  # later: the part of it that these ranks have, where splits meet, too

    def join(ranks: tuple[int, ...], name: str, parent: Session) -> Session:
        def where(absent: Sequence[int]) -> str:
            return ""  # they may be in another split

        own = ranks.index(rank)
        gone = functools.partial(parent.check_on, ranks)
        return _join(space, own, len(ranks), timeout, name, wire, None, where, gone)

    if size == 1:
        if isinstance(factory, str):
            raise WeftError(f"{own_rank()}{factory}")
        alone = wire_alone(memory)
        return Session(alone, timeout, [own_host()], detector=None, memory=memory, join=join)
    try:
        generation = AnsweringStore(store, deadline).add(f"weft/{name}/{rank}", 1)
        space = dist.PrefixStore(f"weft/{name}/{generation}", store)
        joined = join_links(space, rank, size, timeout, wire, factory, look)
    except WireError:  # of `look`
        raise
    except (RuntimeError, OSError) as error:  # of the store, of the sockets
        if look is not None and not isinstance(error, AbsentError):
            # who was told first may have ended, and the store with it: the news is on its way
            for _ in pauses(time.monotonic() + _NEWS, last=0.05):
                look()
        failure = _why_not_joined(error, store, rank, deadline, timeout, process_group, where)
        if space is not store:  # else the store has not even said how these ranks are called there
            lost = error.ranks if isinstance(error, AbsentError) else [failure[1]]
            failure = _first_to_fail(space, failure, rank, set(range(size)).difference(lost))
        why, culprit = failure
        text = f"rank {rank}: group {name!r} of {size} ranks: {why}"
        raise WireError(text, rank=rank, culprit=culprit) from error
    assert not isinstance(factory, str)  # else every rank has raised that
    detector = Detector(rank, timeout, joined.links, slow)
    start = Start(
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        timeout=seconds_left(deadline),
        host=joined.hosts[rank],
        exchange=functools.partial(detector.exchange, until=deadline),
        memory=memory,
        process_group=process_group,
        store=dist.PrefixStore("wire", space),
    )
    try:
        detector.start()
        openings, payloads = _make_wires(
            wire, factory, joined.carrier or "tcp", start, detector.early, deadline
        )
    except BaseException:
        detector.close()
        raise
    registered = "" if is_own(factory) else wire  # errors need not name weft's own
    session = Session(
        openings,
        timeout,
        joined.hosts,
        detector=detector,
        memory=memory,
        join=join,
        registered=registered if payloads is None else "",
    )
    if payloads is not None:
        session.carry_payloads(payloads, wire, registered)
    return session


def _make_wires(
    name: str,
    factory: Factory,
    beside: str,
    start: Start,
    early: Callable[[], list[bytes]],
    deadline: float,
) -> tuple[Wire, Wire | None]:
    """Make a wire; what carries openings, and what carries payloads, if others do.

    Args:
        name: of the wire that was asked for.
        factory: what makes it.
        beside: the name of weft's own that carries openings where the first one cannot.
        start: what the factories are given.
        early: see `make_wire`.
        deadline: when both have to be made.

    Raises:
        WeftError: some rank cannot have its end of one of them; the same on every rank.
        WireError: somebody did not come in time, or died.
    """
    wire = _made_by_all(name, factory, start, early)
    # features are equal on all ranks, so all of them make a second wire, or none does
    if not wire.features.lockstep and not wire.features.exact:
        return wire, None
    store = None if start.store is None else dist.PrefixStore("openings", start.store)
    start = replace(start, store=store, timeout=seconds_left(deadline))
    try:
        return _made_by_all(beside, own_wire(beside), start, early), wire
    except BaseException:
        wire.close()
        raise


def _made_by_all(
    name: str, factory: Factory, start: Start, early: Callable[[], list[bytes]]
) -> Wire:
    """This rank's end of a wire; the arguments and errors are those of `_make_wires`."""
    try:
        return make_wire(name, factory, start, early)
    except WeftError as error:
        raise WeftError(
            f"{error}; mend it there, or give all ranks another weft.init(wire=) or WEFT_WIRE; "
            f"{there_are(wire_names())}"
        ) from error.__cause__


def _why_not_joined(
    error: Exception,
    store: dist.Store,
    rank: int,
    deadline: float,
    timeout: float,
    process_group: dist.ProcessGroup | None,
    where: Where | None,
) -> tuple[str, int | None]:
    """What is said where the store, the sockets or gloo failed, and the rank to blame."""
    remedy = "; see that all ranks were started and reach each other"
    late = time.monotonic() - deadline
    if isinstance(error, NotJoinedError):  # it says itself what to do
        why = str(error) if error.culprit is not None else f"it was not joined: {error}"
        return why, error.culprit
    if late > HELD_UP:
        return f"rank {rank} came {late:.0f} s too late to join it: was it stopped?", rank
    if isinstance(error, AbsentError):
        why = f"{error} before the timeout of {timeout:g} s"
        if where is None:
            return f"{why}{remedy}", error.ranks[0]
        if place := where(error.ranks):  # they may wait there for one that is here
            return f"{why}: {place}; see that {SAME_ORDER}", None
        return f"{why}{remedy}, and that {SAME_ORDER}", error.ranks[0]
    if isinstance(error, OSError) or server_of(store)[0] is None:  # not of a store that has a host
        return f"it was not joined (timeout {timeout:g} s): {error}{remedy}", None
    host, culprit = "the process that hosts it", None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host = "the launcher, which hosts it,"
    elif process_group is not None and process_group is dist.group.WORLD:
        # in other groups rank 0 may be another one than the program's
        host, culprit = "rank 0, which hosts it,", 0
    if isinstance(error, SilentStoreError):
        return f"{error}: is {host} stopped or cut off?", culprit
    said = str(error).splitlines()[0]
    return (
        f"the store failed ({said}): has {host} ended, or was this rank stopped meanwhile?",
        culprit,
    )


def _first_to_fail(
    space: dist.Store, failure: tuple[str, int | None], rank: int, there: Collection[int]
) -> tuple[str, int | None]:
    """What the first rank said that gave up, which is what all say; this rank may be the first.

    A rank that goes on after it was stopped finds nobody, and hears by this that it is to blame.
    Others may give up a moment later, and the store may end with this program: they are waited for.
    """
    store = AnsweringStore(space, time.monotonic())
    with contextlib.suppress(RuntimeError):  # the store may be what failed
        store.compare_set("failure", "", json.dumps(failure))
        why, culprit = json.loads(store.get("failure"))
        failure = why, culprit
        store.set(f"read/{rank}", "")
        until = time.monotonic() + HELD_UP
        for each in there:
            has(store, f"read/{each}", until, len(there))
    return failure
