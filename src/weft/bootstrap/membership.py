"""The membership check: before anything is built, the processes of a group find out if they fit.

Each process appends what it is to a list in the store (`Member`): rank, world size, versions, the
backend that it asked for, and an error, if it cannot take part. Rank 0, the first process that
says it is (or one that cannot take part and hosts the store in its place), reads the list until
`judge` can decide, and writes the decision; all others read that. So every process that comes says
the same, whichever of them was started wrongly, and a process that comes after the decision learns
that it is one too many. A group of P ranks makes O(P) requests of its store, and while they wait
some thousands a second, however many they are.

Each check is a round of its own in the store, which rank 0 begins. A store may outlive processes,
as torchrun's does when hosts join or leave, and a file that a crashed run has left; then rank 0
sends those away who wait in an earlier round, and they come to the new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from ..errors import WeftError, WireError
from ..wire.base import differing, names
from ..wire.hosts import here
from ..wire.interface import is_loopback, own_address
from ..wire.store import has, pauses
from . import backends, rendezvous
from .launchers import Launch
from .rendezvous import Place, Rendezvous

_log = logging.getLogger("weft")
_LINGER = 5.0  # seconds in which the others may fetch an error from a store that this process hosts
_GRACE = 10.0  # seconds in which torchrun's agents start their workers again, one after another
_FRESH = 30.0  # seconds in which an error is one of this attempt, on clocks that differ a little
_LATE = 2.0  # seconds after the deadline in which rank 0 may still say who is missing


@dataclass(frozen=True, slots=True)
class Member:
    """What a process says when it comes.

    Attributes:
        rank: its number, or -1 if it does not know.
        size: how many it thinks there are, or 0.
        backend: what it asked for, or None.
        able: which backends its devices would choose, best first.
        address: where it would listen.
        machine: tells network stacks apart; empty if this process cannot tell its own.
        host: its host's name, for messages.
        pid: its number on that host.
        weft: the version.
        torch: the version, without what it was built for.
        error: why it cannot take part, or empty.
    """

    rank: int
    size: int
    backend: str | None = None
    able: tuple[str, ...] = ("gloo",)
    address: str = ""
    machine: str = ""
    host: str = ""
    pid: int = 0
    weft: str = ""
    torch: str = ""
    error: str = ""

    @classmethod
    def mine(
        cls, rank: int, size: int, store: dist.Store, backend: str | None = None, error: str = ""
    ) -> Member:
        """That of this process, for those at that store."""
        from .. import __version__  # here: tests pretend to be of another version

        address = ""
        try:
            address = own_address(store)
        except OSError as wrong:
            error = error or str(wrong)
        return cls(
            rank,
            size,
            backend,
            backends.able(),
            address,
            _machine(),
            socket.gethostname(),
            os.getpid(),
            __version__,
            torch.version.__version__.partition("+")[0],
            error,
        )

    @property
    def name(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "a process without a rank"
        return f"{who} ({self.host}, process {self.pid})"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided: the backend of the group, or what is wrong.

    Attributes:
        backend: its name.
        error: what every rank raises, or empty.
        missing: the lowest rank that did not come, if that is what is wrong.
        came: the arrivals that were counted, from 1.
        over: another rank 0 has begun a new round.
        when: it was decided, in seconds since 1970.
    """

    backend: str = ""
    error: str = ""
    missing: int | None = None
    came: int = 0
    over: bool = False
    when: float = 0.0


def judge(members: Sequence[Member]) -> Decision | None:
    """Decide from those who have come so far, or None if more must come first.

    Example:
        >>> judge([Member(0, 2)]) is None
        True
        >>> judge([Member(0, 2), Member(1, 2)]).backend
        'gloo'
        >>> judge([Member(0, 2), Member(1, 3)]).error
        'the ranks differ in world size: rank 0 has 2, rank 1 has 3; start all with the same'
    """
    came = len(members)
    complete = bool(members) and came >= members[0].size
    error = _alike(members) or (_fitting(sorted(members, key=lambda m: m.rank)) if complete else "")
    if error:
        return Decision(error=error, came=came)
    if not complete:
        return None
    chosen = members[0].backend or backends.best(each.able for each in members)
    return Decision(backend=chosen, came=came)


def meet(
    place: Place, launch: Launch, backend: str | None, deadline: float, error: str = ""
) -> tuple[Rendezvous, Decision, dist.Store]:
    """Come to a place, and be checked there; collective.

    Args:
        place: where the ranks meet.
        launch: which of them this process is.
        backend: what it was asked for.
        deadline: as `time.monotonic` tells it.
        error: why this process cannot take part, if so.

    Returns:
        The meeting, the decision, and a store for what follows.

    Raises:
        WeftError, WireError, RuntimeError: as `check`, and where the place cannot be used.
    """
    try:
        meeting = rendezvous.come(place, launch, deadline)
        mine = Member.mine(launch.rank, launch.size, meeting.store, backend, error)
        return meeting, *check(meeting, mine, deadline)
    except WeftError:  # all that came have heard it there
        raise
    except BaseException:
        rendezvous.forget(place)
        raise


def check(meeting: Rendezvous, mine: Member, deadline: float) -> tuple[Decision, dist.Store]:
    """Say what this process is, and wait for what is decided; collective.

    Args:
        meeting: of all ranks; it notes the round.
        mine: what this process says.
        deadline: when to give up, as `time.monotonic` tells it.

    Returns:
        The decision, and a store for what follows, in a space of this round's own.

    Raises:
        WeftError: the processes do not fit together; every rank raises the same.
        WireError: somebody did not come in time.
        RuntimeError: from the store.
    """
    stands_in = meeting.hosts and mine.rank != 0 and bool(mine.error)  # for rank 0, to say why
    newcomer, hint = meeting.round == 0, ""
    store, arrival, decision = meeting.store, 0, Decision(over=True)
    # where another rank 0 hosts, that has begun the first round
    if stands_in or (mine.rank == 0 and (meeting.hosts or meeting.lasts or meeting.round)):
        _begin(store)
    while decision.over:
        meeting.round = _next_round(meeting, mine, deadline)
        space = dist.PrefixStore(f"weft/round{meeting.round}", store)
        arrival, decision = _attend(space, mine, deadline, meeting, stands_in or mine.rank == 0)
        doubts = stands_in or (newcomer and arrival > decision.came)
        if meeting.lasts and doubts and not decision.over:
            # it was of processes that are gone, or an error of this attempt that was decided before
            # this process came: then rank 0 begins no other
            until = min(deadline, time.monotonic() + _GRACE)
            fresh = decision.error and time.time() - decision.when < _FRESH
            if not decision.error:
                hint = "; or the ranks there are complete without it: was one started twice?"
            if not fresh or has(store, f"weft/begun{meeting.round + 1}", until, 1):
                decision = Decision(over=True)
    if arrival > decision.came and not decision.error:
        raise WeftError(
            f"{mine.name}: the {mine.size} ranks at {meeting.where} are complete without it: more "
            "processes were started than the world size says, or two with one rank"
        )
    if decision.missing is not None:
        raise WireError(f"{decision.error}{hint}", rank=mine.rank, culprit=decision.missing)
    if decision.error:
        raise WeftError(decision.error)
    return decision, space


# What fits.


def _alike(members: Sequence[Member]) -> str:
    """What is wrong, though not all may have come yet; empty if nothing is."""
    for each in members:
        if each.error:
            return f"{each.name}: {each.error}"
    if text := _differ(members, "world size", lambda m: m.size, "start all with the same"):
        return text
    seen: dict[int, Member] = {}
    for each in members:
        twin = seen.setdefault(each.rank, each)
        if twin is not each:
            return (
                f"rank {each.rank} of {each.size} was started twice: on {twin.host} (process "
                f"{twin.pid}) and on {each.host} (process {each.pid}); give each process a rank of "
                "its own"
            )
    return ""


def _fitting(members: Sequence[Member]) -> str:
    """What is wrong with all ranks, in their order; empty if nothing is."""
    for what, of, remedy in (
        ("weft version", lambda m: m.weft, "install the same everywhere"),
        ("torch version", lambda m: m.torch, "install the same everywhere"),
        ("backend", lambda m: m.backend or "none given", "pass the same on every rank"),
    ):
        if text := _differ(members, what, of, remedy):
            return text
    lost = [m for m in members if m.address and is_loopback(m.address)]
    # who cannot tell its machine is with those whose host has that name
    machines = {m.host: m.machine for m in members if m.machine}
    if lost and len({m.machine or machines.get(m.host, m.host) for m in members}) > 1:
        blind = [m.rank for m in members if not m.machine]
        hosts = f"({', '.join(dict.fromkeys(m.host for m in members))})"
        apart, remedy = f"the ranks are on several hosts {hosts}", ""
        if blind and len({m.machine for m in members if m.machine}) < 2:
            apart = (
                f"since /proc is hidden from {names(blind)} it is not known whether all ranks are "
                f"on one host {hosts}"
            )
            remedy = "mount /proc there if they are; if not, "
        return (
            f"{names([m.rank for m in lost])} would listen at {lost[0].address}, where other "
            f"hosts cannot reach it, and {apart}: {remedy}name the network interface in "
            "WEFT_INTERFACE, and let MASTER_ADDR be no loopback"
        )
    at: dict[str, Member] = {}
    for each in filter(lambda m: m.address and m.machine, members):
        twin = at.setdefault(each.address, each)
        if twin.machine != each.machine:
            return (
                f"{names([twin.rank, each.rank])} would both listen at {each.address}, on two "
                f"hosts ({twin.host}, {each.host}), so that is no address by which others reach "
                "them: name another network interface in WEFT_INTERFACE"
            )
    return ""


def _differ(members: Sequence[Member], what: str, of: Callable[[Member], object], then: str) -> str:
    """In what the ranks differ, or nothing."""
    found: dict[object, list[int]] = {}
    for each in members:
        found.setdefault(of(each), []).append(each.rank)
    held = [(value, ranks, len(ranks)) for value, ranks in found.items()]
    return differing(f"the ranks differ in {what}", held, then) if len(found) > 1 else ""


def _machine() -> str:
    """This machine and the network that its processes see; empty if they are hidden."""
    name, network = here()
    if network or not sys.platform.startswith("linux"):
        return f"{name} {network}"
    _log.warning(
        "/proc is hidden from this process: messages between it and others of its host go over the "
        "network, which is slower; mount /proc where it runs"
    )
    return ""


# Rounds.


def _begin(store: dist.Store) -> None:
    """Begin a round, and send those away who are in an earlier one."""
    number = store.add("weft/round", 1)
    store.set(f"weft/begun{number}", "yes")
    over = json.dumps(asdict(Decision(over=True)))
    dist.PrefixStore(f"weft/round{number - 1}", store).compare_set("decision", "", over)


def _next_round(meeting: Rendezvous, mine: Member, deadline: float) -> int:
    """The latest round, once one has begun after the last that this process was in.

    If none has in time, it is the next, in which those are counted who have come without rank 0.
    """
    following, store = meeting.round + 1, meeting.store
    late = mine.rank, lambda: f"rank 0 did not come to {meeting.where} so far"
    begun = has(store, f"weft/begun{following}", deadline, 1, late)
    return store.add("weft/round", 0) if begun else following


def _attend(
    store: dist.Store, mine: Member, deadline: float, meeting: Rendezvous, judges: bool
) -> tuple[int, Decision]:
    """The number of this process among those who came to a round, and what is decided in it."""
    arrival = store.add("arrived", 1)
    store.set(f"member{arrival}", json.dumps(asdict(mine)))

    def late() -> str:
        came = _read(store)
        if len(came) < mine.size:
            return _incomplete(came, mine, meeting.where, "so far").error
        return f"all came to {meeting.where}, and rank 0 has not answered so far"

    if not judges or store.add("judge", 1) != 1:
        if not has(store, "decision", deadline + _LATE, mine.size, (mine.rank, late)):
            # whoever says there that it is rank 0 has not decided, so it is gone
            others = [each for each in _read(store) if each.rank != 0]
            return arrival, _incomplete(others, mine, meeting.where)
        decision = Decision(**json.loads(store.get("decision")))
        with contextlib.suppress(RuntimeError):  # the store may end once this is counted
            store.add("heard", 1)
        return arrival, decision
    members: list[Member] = []
    found: Decision | None = None
    for _ in pauses(deadline, 0.001, 0.02, (mine.rank, late)):
        members += _read(store, after=len(members))
        # in the order of arrival, so that who came too late is not counted
        starts = (members[: count + 1] for count in range(len(members)))
        found = next(filter(None, map(judge, starts)), None)
        if found or store.check(["decision"]):  # another rank 0 has begun a new round
            break
    if found is None:
        found = _incomplete(members, mine, meeting.where)
    elif found.error:  # all of these hear it
        found = replace(found, came=len(members))
    store.compare_set("decision", "", json.dumps(asdict(replace(found, when=time.time()))))
    found = Decision(**json.loads(store.get("decision")))
    if found.error and meeting.hosts:
        _linger(store, mine, members, whole=found.missing is None)
    return arrival, found


def _read(store: dist.Store, *, after: int = 0) -> list[Member]:
    """The members that are there, but for the first ones."""
    found: list[Member] = []
    while store.check([key := f"member{after + len(found) + 1}"]):
        each = json.loads(store.get(key))
        found.append(Member(**{**each, "able": tuple(each["able"])}))
    return found


def _incomplete(
    members: Sequence[Member], mine: Member, where: str, when: str = "in time"
) -> Decision:
    """Say who has not come."""
    late = sorted(set(range(mine.size)) - {each.rank for each in members}) or [0]
    hosts = ", ".join(dict.fromkeys(each.host for each in members)) or "nowhere"
    return Decision(
        error=f"{names(late)} did not come to {where} {when} "
        f"({len(members)} of {mine.size} came, from {hosts}): is every rank started, and does "
        "each reach that place?",
        missing=late[0],
        came=len(members),
    )


def _linger(store: dist.Store, mine: Member, members: list[Member], *, whole: bool) -> None:
    """Keep a store that ends with this process until the others know, but not for long.

    Args:
        store: of this round.
        mine: what this process said, which may not know how many there are.
        members: who have come.
        whole: whether those are waited for who have not come yet.
    """
    for _ in pauses(time.monotonic() + _LINGER, last=0.02):
        members += _read(store, after=len(members))
        size = max((each.size for each in members), default=mine.size) if whole else 1
        if size and store.add("heard", 0) >= max(size, len(members)) - 1:
            return
