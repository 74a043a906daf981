"""The roll call: before anything is built, the processes of a group find out whether they fit.

Each process appends what it is to a list in the store (`Entry`): rank, world size, versions, the
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
from ..wire.failure.verdict import names
from ..wire.interface import is_loopback
from . import backends
from .store import has

__all__ = ["Decision", "Entry", "call", "judge"]

_log = logging.getLogger("weft")
_LINGER = 5.0  # seconds in which the others may fetch an error from a store that this process hosts
_GRACE = 10.0  # seconds in which torchrun's agents start their workers again, one after another
_LATE = 2.0  # seconds after the deadline in which rank 0 may still say who is missing


@dataclass(frozen=True, slots=True)
class Entry:
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
        cls,
        rank: int,
        size: int,
        *,
        backend: str | None = None,
        address: str = "",
        error: str = "",
    ) -> Entry:
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


def judge(entries: Sequence[Entry]) -> Decision | None:
    """Decide from those who have come so far, or None if more must come first.

    Example:
        >>> judge([Entry(0, 2)]) is None
        True
        >>> judge([Entry(0, 2), Entry(1, 2)]).backend
        'gloo'
        >>> judge([Entry(0, 2), Entry(1, 3)]).error
        'the ranks differ in world size: rank 0 has 2, rank 1 has 3; start all with the same'
    """
    came = len(entries)
    for entry in entries:
        if entry.error:
            return Decision(error=f"{entry.name}: {entry.error}", came=came)
    if text := _differ(entries, "world size", lambda e: e.size, "start all with the same"):
        return Decision(error=text, came=came)
    seen: dict[int, Entry] = {}
    for entry in entries:
        twin = seen.setdefault(entry.rank, entry)
        if twin is not entry:
            return Decision(
                error=f"rank {entry.rank} of {entry.size} was started twice: on {twin.host} "
                f"(process {twin.pid}) and on {entry.host} (process {entry.pid}); give each "
                "process a rank of its own",
                came=came,
            )
    if not entries or came < entries[0].size:
        return None
    ranked = [seen[rank] for rank in sorted(seen)]
    for what, of, remedy in (
        ("weft version", lambda e: e.weft, "install the same everywhere"),
        ("torch version", lambda e: e.torch, "install the same everywhere"),
        ("backend", lambda e: e.backend or "none given", "pass the same on every rank"),
    ):
        if text := _differ(ranked, what, of, remedy):
            return Decision(error=text, came=came)
    machine = _machines(ranked)
    lost = [e for e in ranked if e.address and is_loopback(e.address)]
    if lost and len(set(machine.values())) > 1:
        blind = [e.rank for e in ranked if not e.machine]
        hosts = f"({', '.join(dict.fromkeys(e.host for e in ranked))})"
        apart, remedy = f"the ranks are on several hosts {hosts}", ""
        if blind and len({e.machine for e in ranked if e.machine}) < 2:
            apart = (
                f"since /proc is hidden from {names(blind)} it is not known whether all ranks are "
                f"on one host {hosts}"
            )
            remedy = "mount /proc there if they are; if not, "
        return Decision(
            error=f"{names([e.rank for e in lost])} would listen at {lost[0].address}, where other "
            f"hosts cannot reach it, and {apart}: {remedy}name the network interface in "
            "WEFT_INTERFACE, and let MASTER_ADDR be no loopback",
            came=came,
        )
    at: dict[str, Entry] = {}
    for entry in filter(lambda e: e.address, ranked):
        twin = at.setdefault(entry.address, entry)
        if twin.machine and entry.machine and twin.machine != entry.machine:
            return Decision(
                error=f"{names([twin.rank, entry.rank])} would both listen at {entry.address}, on "
                f"two hosts ({twin.host}, {entry.host}), so that is no address by which others "
                "reach them: name another network interface in WEFT_INTERFACE",
                came=came,
            )
    return Decision(backend=ranked[0].backend or backends.best(e.able for e in ranked), came=came)


def call(
    store: dist.Store,
    entry: Entry,
    timeout: float,
    *,
    where: str,
    hosts: bool,
    elastic: bool = False,
) -> tuple[Decision, dist.Store]:
    """Come to the roll call, and wait for what is decided; collective.

    Args:
        store: of all ranks, in a space that no other roll call uses.
        entry: this process's.
        timeout: seconds to wait for the others.
        where: the place, for messages.
        hosts: whether the store ends with this process.
        elastic: whether processes of an earlier round may have left their entries here, which
            torchrun's do when hosts join or leave; then rank 0 begins a new round.

    Returns:
        The decision, and a store for what follows, in a space of this round's own.

    Raises:
        WeftError: the processes do not fit together; every rank raises the same.
        WireError: somebody did not come in time.
        RuntimeError: from the store.
    """
    deadline = time.monotonic() + timeout
    number = 1
    if elastic:
        number = _new_round(store) if entry.rank == 0 else _this_round(store, deadline)
    while True:
        space = dist.PrefixStore(f"round{number}", store)
        arrival, decision = _attend(space, entry, deadline, where, hosts)
        late = arrival > decision.came
        gone = decision.error == _OVER or (late and not decision.error)
        if elastic and late and not gone:
            gone = _another_began(store, number, deadline)
        if not (elastic and gone):
            break
        number += 1  # that round was of processes that are gone
    if arrival > decision.came and not decision.error:
        raise WeftError(
            f"{entry.name}: the {entry.size} ranks at {where} are complete without it: more "
            "processes were started than the world size says, or two with one rank"
        )
    if decision.missing is not None:
        raise WireError(decision.error, rank=entry.rank, culprit=decision.missing)
    if decision.error:
        raise WeftError(decision.error)
    return decision, space


_OVER = "this round is over"


def _new_round(store: dist.Store) -> int:
    """Begin a round, and send those away who are in an earlier one."""
    number = store.add("round", 1)
    if number > 1:
        before = dist.PrefixStore(f"round{number - 1}", store)
        before.compare_set("decision", "", json.dumps(asdict(Decision(error=_OVER))))
    store.set("begun", "yes")
    return number


def _this_round(store: dist.Store, deadline: float) -> int:
    """The round that rank 0 began last; the first one if it has not come in time."""
    if not has(store, "begun", deadline, 1):
        return 1
    return store.add("round", 0)


def _another_began(store: dist.Store, number: int, deadline: float) -> bool:
    """Whether a round begins behind that one, whose error this process came too late to share.

    If so, the error was of an attempt that ended; if not, it is of this attempt.
    """
    until = min(deadline, time.monotonic() + _GRACE)
    while store.add("round", 0) <= number:
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def _attend(
    store: dist.Store, entry: Entry, deadline: float, where: str, hosts: bool
) -> tuple[int, Decision]:
    arrival = store.add("arrived", 1)
    store.set(f"entry{arrival}", json.dumps(asdict(entry)))
    judges = entry.rank == 0 or (hosts and bool(entry.error))
    if not judges or store.add("judge", 1) != 1:
        if not has(store, "decision", deadline + _LATE, entry.size):
            return arrival, _incomplete(_read(store, store.add("arrived", 0)), entry, where)
        decision = Decision(**json.loads(store.get("decision")))
        store.add("heard", 1)
        return arrival, decision
    entries: list[Entry] = []
    found: Decision | None = None
    while found is None:
        if has(store, f"entry{len(entries) + 1}", deadline, 1):
            entries += _read(store, store.add("arrived", 0), after=len(entries))
            # in the order of arrival, so that who came too late is not counted
            found = next(filter(None, map(judge, _beginnings(entries))), None)
        else:
            found = _incomplete(entries, entry, where)
    store.set("decision", json.dumps(asdict(found)))
    if found.error and hosts:
        _linger(store, entry, whole=found.missing is None)
    return arrival, found


def _beginnings(entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    return [entries[: count + 1] for count in range(len(entries))]


def _read(store: dist.Store, arrived: int, *, after: int = 0) -> list[Entry]:
    """The entries that are there, but for the first ones."""
    if arrived <= after:
        return []
    keys = [f"entry{number}" for number in range(after + 1, arrived + 1)]
    found = [json.loads(store.get(key)) for key in keys]  # not every store has multi_get
    return [Entry(**{**each, "able": tuple(each["able"])}) for each in found]


def _incomplete(entries: Sequence[Entry], entry: Entry, where: str) -> Decision:
    """Say who has not come."""
    late = sorted(set(range(entry.size)) - {each.rank for each in entries})
    there = f"{len(entries)} of {entry.size} came, from {_hosts(entries)}"
    who = names(late) if late else "rank 0"
    return Decision(
        error=f"{who} did not come to {where} in time ({there}): is every rank started, and does "
        "each reach that place?",
        missing=late[0] if late else 0,
        came=len(entries),
    )


def _hosts(entries: Sequence[Entry]) -> str:
    return ", ".join(dict.fromkeys(each.host for each in entries)) or "nowhere"


def _linger(store: dist.Store, entry: Entry, *, whole: bool) -> None:
    """Keep a store that ends with this process until the others know, but not for long.

    Args:
        store: of this round.
        entry: of this process, which may not know how many there are.
        whole: whether those are waited for who have not come yet.
    """
    until = time.monotonic() + _LINGER
    entries: list[Entry] = []
    while time.monotonic() < until:
        entries += _read(store, store.add("arrived", 0), after=len(entries))
        coming = _coming(entries or [entry]) if whole else len(entries)
        if coming and store.add("heard", 0) >= coming - 1:
            return
        time.sleep(0.01)


def _coming(entries: Sequence[Entry]) -> int:
    """How many processes are going to come, as far as is known; 0 if it is not.

    One that came twice is no reason not to wait for another; one without a rank may be any.
    """
    size = max(each.size for each in entries)
    numbers = {each.rank for each in entries if 0 <= each.rank < size}
    nameless = sum(not 0 <= each.rank < size for each in entries)
    return size and len(entries) + max(0, size - len(numbers) - nameless)


def _differ(entries: Sequence[Entry], what: str, of: Callable[[Entry], object], remedy: str) -> str:
    """In what the ranks differ, or nothing."""
    found: dict[object, list[int]] = {}
    for entry in entries:
        found.setdefault(of(entry), []).append(entry.rank)
    if len(found) < 2:
        return ""
    said = [
        f"{names(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in found.items()
    ]
    return f"the ranks differ in {what}: {', '.join(said)}; {remedy}"


def _machines(entries: Sequence[Entry]) -> dict[int, str]:
    """The network stack of each rank; who cannot tell is with those whose host has that name."""
    of = {e.host: e.machine for e in entries if e.machine}
    return {e.rank: e.machine or of.get(e.host, e.host) for e in entries}


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
