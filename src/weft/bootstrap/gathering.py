"""From ranks that have met to the default group of torch.distributed; who is lost there is named.

gloo connects every two ranks while the group is made. It says what has failed, and not whose fault
that is, and it waits for a rank that has begun to connect for five times as long as it was told to.
So the ranks call the roll, before and after: who does not answer is to blame.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from ..base import _torch
from ..base.errors import AbsentError, WireError
from ..base.pace import patient
from ..failure.control import HELD_UP, NotJoinedError, RollCall
from ..rendezvous.address import GLOO
from ..rendezvous.launchers import Launch
from ..rendezvous.places import File, Place, Tcp
from ..rendezvous.store import AnsweringStore, SilentStoreError, exchange

_ATTEMPTS = 5  # of gloo, each of which lasts as long as its timeout
_PATIENCE = 0.6  # seconds after a deadline in which ranks answer a roll call
_LEAST = 0.5  # of the timeout, that is left for connecting however long the meeting took


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
        When this rank was connected, by `time.monotonic`; from then on others may have gone on.

    Raises:
        NotJoinedError: somebody did not connect, the same on all ranks that answer; it is raised
            within the timeout and a second, or a few where the machine is busy.
        AbsentError: somebody was gone between the two roll calls.
        RuntimeError: from the store.
    """
    # A rank that is gone by now need not be waited for by gloo.
    patience = patient(_PATIENCE)
    here = AnsweringStore(dist.PrefixStore("here", space), deadline + patience)
    RollCall(here, rank, size, step="go on", patience=patience).hold(lambda: None, deadline)

    # All have the same seconds, and begin at once: so they are through at once, too.
    left = max(deadline - time.monotonic(), _LEAST * timeout)
    missing = "came, and then did not go on"
    everyones = exchange(space, "seconds left", left, rank, size, left, missing)
    is_of_gloo = _is_of_gloo(spec)
    seconds = min(everyones) if is_of_gloo else _ATTEMPTS * timeout
    until = time.monotonic() + seconds
    roll = RollCall(
        AnsweringStore(dist.PrefixStore("connected", space), until + 2 * patience),
        rank,
        size,
        step="connect",
        patience=patience,
        busy_until=until,
    )
    limit = seconds / _ATTEMPTS if is_of_gloo else timeout
    store = dist.PrefixStore("group", space)

    def connect() -> float:
        init_group(spec, store, rank, size, limit, interfaces)
        return time.monotonic()

    connected = roll.hold(connect, until)
    world = dist.group.WORLD
    assert world is not None  # it was just made
    if is_of_gloo:
        _torch.set_timeout(world, timeout)
    return connected


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
    if isinstance(failed, NotJoinedError | AbsentError):
        culprit = failed.culprit if isinstance(failed, NotJoinedError) else failed.ranks[0]
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
    before = os.environ.get(GLOO)
    wanted = ",".join(interfaces) or before
    if wanted is None or wanted == before:
        yield
        return
    os.environ[GLOO] = wanted
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO]
        else:
            os.environ[GLOO] = before
