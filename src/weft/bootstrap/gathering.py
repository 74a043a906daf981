"""From ranks that have met to the default group of torch.distributed; who is lost there is named.

gloo connects every two ranks while the group is made. It says what has failed, and not whose fault
that is, and it waits for a rank that has begun to connect for five times as long as it was told to.
So all ranks say at the store that they are there, before, and what came of it, after: who says
nothing is to blame. The first that gives up says why, and all raise the same.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..base import _torch
from ..base.errors import AbsentError, WireError, in_short, names
from ..base.pace import patient
from ..rendezvous.address import GLOO
from ..rendezvous.launchers import Launch
from ..rendezvous.places import File, Place, Tcp
from ..rendezvous.store import (
    HELD_UP,
    AnsweringStore,
    Failure,
    SilentStoreError,
    exchange,
    first_to_fail,
)

_ATTEMPTS = 5  # of gloo, each of which lasts as long as its timeout
_PATIENCE = 0.6  # seconds after a deadline in which ranks may still say how they are
_LEAST = 0.5  # of the timeout, that is left for connecting however long the meeting took

_CONNECTED = "connected"
_FAILED = "failed"
_CANNOT = "cannot"  # failed for no reason that other ranks have


class NotJoinedError(RuntimeError):
    """The ranks are not joined, and all of them know why.

    Attributes:
        culprit: the rank to blame, or None.
    """

    def __init__(self, failure: Failure) -> None:
        text, self.culprit = failure
        super().__init__(text)


def connect_all(
    space: dist.Store,
    rank: int,
    size: int,
    spec: str,
    timeout: float,
    deadline: float,
    interfaces: Sequence[str],
) -> float:
    """Set up the default group of ranks that have met; collective.

    Args:
        space: a part of the store that all share.
        rank, size: this rank, and how many there are.
        spec: the backend, as torch.distributed calls it.
        timeout: of the group's operations, in seconds.
        deadline: of the meeting, by `time.monotonic`.
        interfaces: where gloo listens.

    Returns:
        When all were connected, by `time.monotonic`; from then on others may have gone on.

    Raises:
        NotJoinedError: somebody did not connect, the same on all ranks that answer; it is raised
            within the timeout and a second, or a few where the machine is busy.
        RuntimeError: from the store.
    """
    # A rank that is gone by now need not be waited for by gloo.
    left = max(deadline - time.monotonic(), _LEAST * timeout)
    here = dist.PrefixStore("here", space)
    everyones = said_by_all(here, rank, size, left, "go on", deadline)

    # All have the same seconds, and begin at once: so they are through at once, too.
    is_of_gloo = _is_of_gloo(spec)
    seconds = min(everyones) if is_of_gloo else _ATTEMPTS * timeout
    until = time.monotonic() + seconds
    limit = seconds / _ATTEMPTS if is_of_gloo else timeout
    outcome = [_CONNECTED, ""]
    try:
        init_group(spec, dist.PrefixStore("group", space), rank, size, limit, interfaces)
    except WireError:  # of weft's own backend, which has found who is lost
        raise
    except (OSError, RuntimeError) as error:
        is_own = isinstance(error, OSError | _torch.NoDevice) and not isinstance(
            error, TimeoutError
        )
        outcome = [_CANNOT if is_own else _FAILED, in_short(str(error))]
    connected = dist.PrefixStore("connected", space)
    outcomes = said_by_all(connected, rank, size, outcome, "connect", until)
    failure = _failure_in(outcomes)
    if failure is not None:
        raise NotJoinedError(first_to_fail(connected, rank, size, failure))
    world = dist.group.WORLD
    assert world is not None  # it was just made
    if is_of_gloo:
        _torch.set_timeout(world, timeout)
    return time.monotonic()


def said_by_all(
    store: dist.Store, rank: int, size: int, own: object, step: str, until: float
) -> list[Any]:
    """What all ranks say as they come to where they are to take a step, or have taken it.

    Args:
        store: a part of the store that is for this step alone.
        rank, size: this rank, and how many there are.
        own: what this rank says, as for `exchange`.
        step: for errors.
        until: when all are to have come, by `time.monotonic`.

    Raises:
        NotJoinedError: somebody did not come, or this rank itself came so late that others have
            gone on, or given up; the same on all ranks that answer.
        RuntimeError: from the store.
    """
    end = until + patient(_PATIENCE)
    answering = AnsweringStore(store, end)

    def look(absent: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise what another rank has found."""
        if answering.check(["failure"]):
            unread = f"a rank did not {step}", None
            raise NotJoinedError(first_to_fail(store, rank, size, unread))

    values: list[Any] = []
    failure: Failure | None = None
    lost: Sequence[int] = ()
    late = time.monotonic() - until
    try:
        seconds = end - time.monotonic()
        values = exchange(
            store, "said", own, rank, size, seconds, f"came, and then did not {step}", look
        )
        look()
        late = time.monotonic() - until  # it may have stood still meanwhile
    except AbsentError as error:
        failure = f"{error}: see that all ranks run, and reach the store", error.ranks[0]
        lost = error.ranks
    if late > patient(HELD_UP):
        failure = f"rank {rank} came {late:.0f} s too late to {step}: was it stopped?", rank
    if failure is not None:
        raise NotJoinedError(first_to_fail(store, rank, size, failure, lost))
    return values


def _failure_in(outcomes: Sequence[Sequence[str]]) -> Failure | None:
    """Why the ranks are not connected, all of which have said what came of it; None: they are."""
    failed = []
    for rank, (kind, text) in enumerate(outcomes):
        if kind == _CANNOT:
            return f"rank {rank} did not connect ({text})", rank
        if kind == _FAILED:
            failed.append(rank)
    if not failed:
        return None
    _, text = outcomes[failed[0]]
    why = (
        f"gloo failed on {names(failed)} ({text}), though all ranks answer at the store: see that "
        "no firewall closes the ports that the system chooses, and that they reach each other by "
        "the interface that WEFT_INTERFACE names"
    )
    return why, None


def lost(
    failed: Exception, launch: Launch, place: Place, deadline: float, *, met: bool
) -> WireError:
    """What a rank raises that has no group.

    Args:
        failed: what went wrong.
        launch: how this process was launched.
        place: where the ranks meet.
        deadline: of the meeting.
        met: whether all ranks came there.
    """
    said = str(failed).splitlines()[0]
    is_of_launcher = isinstance(place, Tcp) and place.agent
    host, host_rank = ("the launcher", None) if is_of_launcher else ("rank 0", 0)
    late = time.monotonic() - deadline
    culprit = None
    if isinstance(failed, NotJoinedError):
        culprit = failed.culprit
        why = f"{said}; all {launch.size} ranks had come to {place.where}"
    elif late > HELD_UP and not isinstance(failed, SilentStoreError):
        culprit = launch.rank
        why = (
            f"this rank came {late:.0f} s too late itself, and the others have gone on without it: "
            f"was it stopped? ({said})"
        )
    else:
        who = f"all {launch.size} ranks" if met else "this rank"
        why = f"{who} came to {place.where}, and then the store failed there ({said})"
        if not isinstance(place, File):
            culprit = host_rank
            why += f": is {host}, which hosts it, gone or stopped, or was this rank stopped?"
    return WireError(f"rank {launch.rank}: {why}", rank=launch.rank, culprit=culprit)


def init_group(
    spec: str, store: dist.Store, rank: int, size: int, timeout: float, interfaces: Sequence[str]
) -> None:
    """Set up the default group, in which gloo listens at these interfaces."""
    limit = timedelta(seconds=timeout)
    with _gloo_at(interfaces):
        dist.init_process_group(spec, store=store, rank=rank, world_size=size, timeout=limit)


def _is_of_gloo(spec: str) -> bool:
    """Whether gloo connects the ranks of such a group, and its timeout can be set afterwards."""
    names = {part.rpartition(":")[2] for part in spec.split(",")}
    return "gloo" in names and names <= {"gloo", "nccl"} and _torch.can_set_timeout()


@contextlib.contextmanager
def _gloo_at(interfaces: Sequence[str]) -> Iterator[None]:
    """Name interfaces for gloo while the default group is made.

    torch takes them from the environment alone. Without names gloo chooses.
    """
    if not interfaces:  # nor is anything put back that another thread may have set
        yield
        return
    before = os.environ.get(GLOO)
    os.environ[GLOO] = ",".join(interfaces)
    try:
        yield
    finally:
        os.environ.pop(GLOO, None)
        if before is not None:
            os.environ[GLOO] = before
