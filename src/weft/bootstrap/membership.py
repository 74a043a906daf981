"""The membership check: before anything is built, the processes of a group find out if they fit.

Each process appends a `Member` to a list in the store: its rank, world size, versions, backend, and
an error, if it cannot take part. Rank 0 reads the list until `judge` can decide, and writes the
decision, which all others read. So every process raises the same error, whichever of them was
started wrongly. A process that comes after the decision learns that it is one too many. If two
processes say that they are rank 0, the first one decides; if rank 0 cannot take part, and another
process hosts the store in its place, that one decides. P ranks make O(P) requests of the store, and
while they wait some thousands a second, whatever P is.

Each check is a round of its own in the store, which rank 0 begins. A store may outlive processes:
torchrun's does when hosts join or leave, and a crashed run leaves its file. Then rank 0 ends the
earlier round, and the processes that wait in it come to the new one.
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

from .. import version
from ..base.errors import WeftError, WireError, names
from ..base.pace import patient
from ..failure.verdict import differing
from ..rendezvous import places as rendezvous
from ..rendezvous.address import is_loopback, own_address
from ..rendezvous.launchers import Launch
from ..rendezvous.machine import machine_and_network
from ..rendezvous.places import Place, Rendezvous
from ..rendezvous.store import AnsweringStore, has, pauses
from . import backends

_log = logging.getLogger("weft")
LINGER = 5.0  # seconds in which the others can read an error from a store that this process hosts
GRACE = 10.0  # seconds in which torchrun's agents restart their workers, one after another
_FRESH = 30.0  # an error that is no older, in seconds, is one of this attempt; clocks may differ
LATE = 0.7  # seconds after the deadline in which rank 0 may still say who is missing


@dataclass(frozen=True, slots=True)
class Member:
    """What a process writes when it comes.

    Attributes:
        rank: its rank, or -1 if it does not know it.
        size: its world size, or 0 if it does not know it.
        backend: the argument of `init`, or None.
        able: the backends that its devices can use, best first.
        address: where it would listen.
        machine: names its machine and network namespace; empty if they are unknown.
        host: its host's name, for messages.
        pid: its process number on that host.
        weft: the version of weft.
        torch: the version of torch, without the build's suffix.
        error: why it cannot take part, or empty.
    """

    rank: int
    size: int
    backend: str | None = None
    able: Sequence[str] = ("gloo",)
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
        """The member that this process writes to that store."""
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
            version.__version__,
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
        missing: the lowest rank that did not come, if ranks are missing.
        came: how many arrivals were counted.
        over: whether this round ended because another rank 0 has begun a new one.
        when: it was decided, in seconds since 1970.
    """

    backend: str = ""
    error: str = ""
    missing: int | None = None
    came: int = 0
    over: bool = False
    when: float = 0.0


def judge(members: Sequence[Member]) -> Decision | None:
    """Decide from the members that have come so far; None if more must come first.

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
    """Open the store of a place, and check the membership there; collective.

    Args:
        place: where the ranks meet.
        launch: how this process was launched.
        backend: the argument of `init`.
        deadline: by `time.monotonic`.
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
    except WeftError:  # every process that came raises it
        raise
    except BaseException:
        rendezvous.forget(place)
        raise


def check(meeting: Rendezvous, mine: Member, deadline: float) -> tuple[Decision, dist.Store]:
    """Write what this process is, and wait for the decision; collective.

    Args:
        meeting: of all ranks; its `round` is updated.
        mine: what this process writes.
        deadline: when to give up, by `time.monotonic`.

    Returns:
        The decision, and a store for what follows, whose keys belong to this round alone.

    Raises:
        WeftError: the processes do not fit together; every rank raises the same.
        WireError: somebody did not come in time.
        RuntimeError: from the store.
    """
    stands_in = meeting.hosts and mine.rank != 0 and bool(mine.error)  # for rank 0, to say why
    newcomer, hint = meeting.round == 0, ""
    longest = deadline + patient(LATE)
    store = AnsweringStore(meeting.store, longest)
    arrival, decision = 0, Decision(over=True)
    judges = stands_in or mine.rank == 0
    # if another rank 0 hosts the store, it has begun the first round
    if judges and (meeting.hosts or meeting.lasts or meeting.round):
        begin_round(store)
    while decision.over:
        meeting.round = _next_round(meeting, store, mine, deadline)
        name = f"weft/round{meeting.round}"
        arrival, decision = _attend(store.part(name), mine, deadline, longest, meeting, judges)
        doubts = stands_in or (newcomer and arrival > decision.came)
        if meeting.lasts and doubts and not decision.over:
            # the decision is one of processes that are gone; or it is an error of this attempt,
            # made before this process came: then rank 0 begins no other round
            until = min(deadline, time.monotonic() + GRACE)
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
    return decision, dist.PrefixStore(name, meeting.store)


# What fits.


def _alike(members: Sequence[Member]) -> str:
    """An error that can be seen before all have come; empty if there is none."""
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
    """An error among all ranks, which are in order; empty if there is none."""
    for what, of, remedy in (
        ("weft version", lambda m: m.weft, "install the same everywhere"),
        ("torch version", lambda m: m.torch, "install the same everywhere"),
        ("backend", lambda m: m.backend or "none given", "pass the same on every rank"),
    ):
        if text := _differ(members, what, of, remedy):
            return text
    lost = [m for m in members if m.address and is_loopback(m.address)]
    # a member with an unknown machine counts as on the machine of others with its host name
    machines = {m.host: m.machine for m in members if m.machine}
    if lost and len({m.machine or machines.get(m.host, m.host) for m in members}) > 1:
        hosts = ", ".join(dict.fromkeys(m.host for m in members))
        return (
            f"{names([m.rank for m in lost])} would listen at {lost[0].address}, where other "
            f"hosts cannot reach it, and the ranks seem to be on several hosts ({hosts}): name the "
            "network interface in WEFT_INTERFACE, and let MASTER_ADDR be no loopback"
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
    """The error if members differ in what `of` returns, or nothing."""
    found: dict[object, list[int]] = {}
    for each in members:
        found.setdefault(of(each), []).append(each.rank)
    if len(found) < 2:
        return ""
    return differing(f"the ranks differ in {what}", found.items(), then)


def _machine() -> str:
    """The name of this machine and of its network namespace; empty if they are unknown."""
    name, network = machine_and_network()
    if network or not sys.platform.startswith("linux"):
        return f"{name} {network}"
    _log.warning(
        "/proc is hidden from this process: messages between it and others of its host go over the "
        "network, which is slower; mount /proc where it runs"
    )
    return ""


# Rounds.


def begin_round(store: AnsweringStore) -> None:
    """Begin a round, and end the one before."""
    number = store.add("weft/round", 1)
    store.set(f"weft/begun{number}", "yes")
    over = json.dumps(asdict(Decision(over=True)))
    store.part(f"weft/round{number - 1}").compare_set("decision", "", over)


def _next_round(meeting: Rendezvous, store: AnsweringStore, mine: Member, deadline: float) -> int:
    """Wait for a round after the last one of this process; the number of the latest.

    If none begins in time, it is the next number: there the processes without rank 0 are counted.
    """
    following = meeting.round + 1
    late = mine.rank, lambda: f"rank 0 did not come to {meeting.where} so far"
    begun = has(store, f"weft/begun{following}", deadline, 1, late)
    return store.add("weft/round", 0) if begun else following


def _attend(
    store: AnsweringStore,
    mine: Member,
    deadline: float,
    longest: float,
    meeting: Rendezvous,
    judges: bool,
) -> tuple[int, Decision]:
    """Take part in a round: the number of this process in order of arrival, and the decision.

    All are to have come by the deadline; until `longest` who judges may still say who has not.
    """
    arrival = store.add("arrived", 1)
    store.set(f"member{arrival}", json.dumps(asdict(mine)))

    def late() -> str:
        came = _read_all(store)
        if len(came) < mine.size:
            return incomplete(came, mine, meeting.where, "so far").error
        return f"all came to {meeting.where}, and rank 0 has not answered so far"

    if not judges or store.add("judge", 1) != 1:
        if not has(store, "decision", longest, mine.size, (mine.rank, late)):
            return arrival, incomplete(_read_all(store), mine, meeting.where)
        decision = Decision(**json.loads(store.get("decision")))
        with contextlib.suppress(RuntimeError):  # the store may end once this is counted
            store.add("heard", 1)
        return arrival, decision
    members: list[Member] = []
    found: Decision | None = None
    for _ in pauses(deadline, 0.001, 0.02, (mine.rank, late)):
        while store.check([key := f"member{len(members) + 1}"]):  # up to one not written yet
            members.append(_member_at(store, key))
        found = _judge_in_order(members)
        if found or store.check(["decision"]):  # another rank 0 has begun a new round
            break
    if found is None:
        members = _read_all(store)
        found = _judge_in_order(members) or incomplete(members, mine, meeting.where)
    elif found.error:  # all that came raise it
        found = replace(found, came=len(members))
    store.compare_set("decision", "", json.dumps(asdict(replace(found, when=time.time()))))
    found = Decision(**json.loads(store.get("decision")))
    if found.error and meeting.hosts:
        _linger(store, whole=found.missing is None)
    return arrival, found


def _read_all(store: AnsweringStore) -> list[Member]:
    """The members in the list, also behind one that is not written: it has stopped, or died."""
    keys = [f"member{number + 1}" for number in range(store.add("arrived", 0))]
    return [_member_at(store, key) for key in keys if store.check([key])]


def _member_at(store: AnsweringStore, key: str) -> Member:
    return Member(**json.loads(store.get(key)))


def _judge_in_order(members: Sequence[Member]) -> Decision | None:
    """What `judge` says of the first that come: one that is one too many is not counted."""
    starts = (members[: count + 1] for count in range(len(members)))
    return next(filter(None, map(judge, starts)), None)


def incomplete(
    members: Sequence[Member], mine: Member, where: str, when: str = "in time"
) -> Decision:
    """The decision that names the ranks that have not come."""
    late = sorted(set(range(mine.size)) - {each.rank for each in members})
    hosts = ", ".join(dict.fromkeys(each.host for each in members)) or "nowhere"
    if late:
        why = (
            f"{names(late)} did not come to {where} {when} ({len(members)} of {mine.size} came, "
            f"from {hosts}): is every rank started, and does each reach that place?"
        )
    else:
        why = (
            f"rank 0 came to {where}, and did not answer {when}: is it stopped, or gone, or did an "
            "earlier run leave that?"
        )
    return Decision(error=why, missing=min(late, default=0), came=len(members))


def _linger(store: AnsweringStore, *, whole: bool) -> None:
    """Keep a store that ends with this process until the others have read the error.

    Args:
        store: of this round.
        whole: whether to wait for ranks that have not come yet, too.
    """
    for _ in pauses(time.monotonic() + LINGER, last=0.02):
        members = _read_all(store)
        size = max(each.size for each in members) if whole else 1
        if size and store.add("heard", 0) >= max(size, len(members)) - 1:
            return
