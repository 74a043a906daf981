"""The membership check: before anything is built, the processes of a group find out if they fit.

Each process appends what it is to a list in the store (`Member`): rank, world size, versions, the
backend that it asked for, and an error, if it cannot take part. Rank 0, the first process that
says it is (or one that cannot take part and hosts the store in its place), reads the list until
`judge` can decide, and writes the decision; all others read that. So every process that comes says
the same, whichever of them was started wrongly, and a process that comes after the decision learns
that it is one too many. A group of P ranks makes O(P) requests of its store, and while they wait
some thousands a second, however many they are.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from ..errors import WeftError, WireError
from ..wire.base import names
from ..wire.interface import is_loopback
from . import backends, rendezvous
from .launchers import Launch
from .rendezvous import MovedError, Place, Rendezvous, has, pauses

_log = logging.getLogger("weft")
_OPEN = 2.0  # seconds for which rank 0 leaves the file of a rendezvous that failed
_LINGER = 5.0  # seconds in which the others may fetch an error from a store that this process hosts
_GRACE = 10.0  # seconds in which torchrun's agents start their workers again, one after another
_LATE = 2.0  # seconds after the deadline in which rank 0 may still say who is missing
_OVER = "this round is over"


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
        cls, rank: int, size: int, backend: str | None = None, address: str = "", error: str = ""
    ) -> Member:
        """That of this process."""
        from .. import __version__  # weft imports this module before it has one

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
    """

    backend: str = ""
    error: str = ""
    missing: int | None = None
    came: int = 0


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
    place: Place,
    launch: Launch,
    mine: Callable[[dist.Store], Member],
    deadline: float,
) -> tuple[Rendezvous, Decision, dist.Store]:
    """Come to a place, and be checked there; collective.

    Args:
        place: where the ranks meet.
        launch: which of them this process is.
        mine: what this process says at that store.
        deadline: as `time.monotonic` tells it.

    Returns:
        The meeting, the decision, and a store for what follows.

    Raises:
        WeftError, WireError, RuntimeError: as `check`, and where the place cannot be used.
    """
    elastic = "TORCHELASTIC_RUN_ID" in os.environ
    seen: list[Rendezvous] = []
    try:
        while True:
            meeting, times = rendezvous.store_of(place, launch, deadline, guest=bool(seen))
            seen.append(meeting)
            try:
                number = None if elastic else times
                found = check(meeting, mine(meeting.store), deadline, number)
            except MovedError:
                continue
            return meeting, *found
    except WeftError:  # all that came have heard it there
        if isinstance(place, rendezvous.File) and any(each.hosts for each in seen):
            time.sleep(_OPEN)  # before the file goes: who comes in a moment hears it, too
        raise
    except BaseException:
        rendezvous.forget(place)
        raise
    finally:
        for each in seen:
            each.close()


def check(
    meeting: Rendezvous, mine: Member, deadline: float, number: int | None
) -> tuple[Decision, dist.Store]:
    """Say what this process is, and wait for what is decided; collective.

    Args:
        meeting: of all ranks.
        mine: what this process says.
        deadline: when to give up, as `time.monotonic` tells it.
        number: of the rounds in this store, the same on all ranks; None: processes of an earlier
            round may have left what they said, as torchrun's do when hosts join or leave, and what
            torchrun tells them of restarts differs between hosts; so rank 0 begins a new one.

    Returns:
        The decision, and a store for what follows, in a space of this round's own.

    Raises:
        WeftError: the processes do not fit together; every rank raises the same.
        WireError: somebody did not come in time.
        MovedError: rank 0 is elsewhere.
        RuntimeError: from the store.
    """
    elastic, store = number is None, meeting.store
    if number is None:
        number = _new_round(store) if mine.rank == 0 else _this_round(store, deadline)
    while True:
        space = dist.PrefixStore(f"weft/round{number}", store)
        arrival, decision = _attend(space, mine, deadline, meeting)
        late = arrival > decision.came
        gone = decision.error == _OVER or (late and not decision.error)
        if elastic and late and not gone:
            gone = _another_began(store, number, deadline)
        if not (elastic and gone):
            break
        number += 1  # that round was of processes that are gone
    if late and not decision.error:
        if meeting.unanswered():  # it may be that of an earlier run
            for _ in pauses(deadline):
                meeting.look()
            raise WireError(meeting.unanswered(), rank=mine.rank, culprit=0)
        raise WeftError(
            f"{mine.name}: the {mine.size} ranks at {meeting.where} are complete without it: more "
            "processes were started than the world size says, or two with one rank"
        )
    if decision.missing is not None:
        raise WireError(decision.error, rank=mine.rank, culprit=decision.missing)
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
    if len(found) < 2:
        return ""
    said = [
        f"{names(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in found.items()
    ]
    return f"the ranks differ in {what}: {', '.join(said)}; {then}"


def _machine() -> str:
    """This machine and the network that its processes see; empty if they are hidden."""
    if not sys.platform.startswith("linux"):
        return socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError as error:
        _log.warning(
            "/proc is hidden from this process (%s): messages between it and others of its host go "
            "over the network, which is slower; mount /proc where it runs",
            error,
        )
        return ""


# Rounds of a store that outlives the processes.


def _new_round(store: dist.Store) -> int:
    """Begin a round, and send those away who are in an earlier one."""
    number = store.add("weft/round", 1)
    if number > 1:
        before = dist.PrefixStore(f"weft/round{number - 1}", store)
        before.compare_set("decision", "", json.dumps(asdict(Decision(error=_OVER))))
    store.set("weft/begun", "yes")
    return number


def _this_round(store: dist.Store, deadline: float) -> int:
    """The round that rank 0 began last; the first one if it has not come in time."""
    return store.add("weft/round", 0) if has(store, "weft/begun", deadline, 1) else 1


def _another_began(store: dist.Store, number: int, deadline: float) -> bool:
    """Whether a round begins behind that one, whose error this process came too late to share.

    If so, the error was of an attempt that ended; if not, it is of this attempt.
    """
    until = min(deadline, time.monotonic() + _GRACE)
    return any(store.add("weft/round", 0) > number for _ in pauses(until, last=0.05))


# One round.


def _attend(
    store: dist.Store, mine: Member, deadline: float, meeting: Rendezvous
) -> tuple[int, Decision]:
    """The number of this process among those who came, and what is decided."""
    arrival = store.add("arrived", 1)
    store.set(f"member{arrival}", json.dumps(asdict(mine)))
    judges = mine.rank == 0 or (meeting.hosts and bool(mine.error))
    if not judges or store.add("judge", 1) != 1:
        if has(store, "decision", deadline + _LATE, mine.size, meeting.look):
            decision = Decision(**json.loads(store.get("decision")))
            store.add("heard", 1)
            return arrival, decision
        if (text := meeting.unanswered()) and store.add("counted", 0) < arrival:
            return arrival, Decision(error=text, missing=0, came=arrival)
        return arrival, _incomplete(_read(store, store.add("arrived", 0)), mine, meeting.where)
    members: list[Member] = []
    found: Decision | None = None
    while found is None:
        if has(store, f"member{len(members) + 1}", deadline, 1, meeting.look):
            more = _read(store, store.add("arrived", 0), after=len(members))
            store.add("counted", len(more))
            members += more
            # in the order of arrival, so that who came too late is not counted
            starts = (members[: count + 1] for count in range(len(members)))
            found = next(filter(None, map(judge, starts)), None)
        else:
            found = _incomplete(members, mine, meeting.where)
    store.set("decision", json.dumps(asdict(found)))
    if found.error and meeting.hosts:
        _linger(store, mine, whole=found.missing is None)
    return arrival, found


def _read(store: dist.Store, arrived: int, *, after: int = 0) -> list[Member]:
    """The members that are there, but for the first ones."""
    keys = [f"member{number}" for number in range(after + 1, arrived + 1)]
    found = [json.loads(store.get(key)) for key in keys]  # not every store has multi_get
    return [Member(**{**each, "able": tuple(each["able"])}) for each in found]


def _incomplete(members: Sequence[Member], mine: Member, where: str) -> Decision:
    """Say who has not come."""
    late = sorted(set(range(mine.size)) - {each.rank for each in members})
    hosts = ", ".join(dict.fromkeys(each.host for each in members)) or "nowhere"
    return Decision(
        error=f"{names(late) if late else 'rank 0'} did not come to {where} in time "
        f"({len(members)} of {mine.size} came, from {hosts}): is every rank started, and does "
        "each reach that place?",
        missing=late[0] if late else 0,
        came=len(members),
    )


def _linger(store: dist.Store, mine: Member, *, whole: bool) -> None:
    """Keep a store that ends with this process until the others know, but not for long.

    Args:
        store: of this round.
        mine: what this process said, which may not know how many there are.
        whole: whether those are waited for who have not come yet.
    """
    members: list[Member] = []
    for _ in pauses(time.monotonic() + _LINGER, last=0.02):
        members += _read(store, store.add("arrived", 0), after=len(members))
        size = max((each.size for each in members), default=mine.size) if whole else 1
        if size and store.add("heard", 0) >= max(size, len(members)) - 1:
            return
