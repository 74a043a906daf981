"""`barrier`: every rank waits until all have come; a rank that waits too long learns for whom.

A barrier that times out breaks nothing. The rank has still entered it: the other ranks can come
later, and go on then. The rank may call `barrier` again to wait on, or make its next call, which
takes its turn after the barrier.
"""

from __future__ import annotations

from ..base.arguments import is_duration, wrong_timeout
from ..base.errors import Error, StillRunning, check, entry, names
from ..call.attempt import preparing
from ..call.opening import opened
from ..group import default
from ..group.group import Group
from ..group.pending import Awaited
from ..group.worker import Work


@entry
def barrier(timeout: float | None = None, group: object = None) -> None:
    """Wait until every rank of the group has come here.

    Args:
        timeout: the longest wait of this rank, in seconds. None, or more than the group's own
            deadline: that deadline, after which the group is broken. The first call on a process
            group of torch's joins its ranks before, within the group's deadline.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.

    Raises:
        StillRunning: `timeout` passed; names the ranks that have not come. The group is intact, and
            this rank is still in the barrier: if its next call is `barrier` on this group, that
            waits for the same barrier. So it does where the wait was interrupted. Any other call,
            also on a subset, takes its turn after that barrier, and a barrier after it is a new
            one.
        WeftError: a rank is in another call, or its timeout is not a positive number of seconds;
            every rank raises it.
        WireError: a peer failed, or did not come before the group's deadline; names the culprit.

    Example:
        >>> import threading, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     if group.rank == 1:
        ...         waited_in_vain.wait(10)
        ...         return weft.barrier()
        ...     try:
        ...         weft.barrier(timeout=2.0)
        ...     except weft.StillRunning as error:
        ...         waited_in_vain.set()
        ...         weft.barrier()  # waits on
        ...         return error
        >>> waited_in_vain = threading.Event()
        >>> print(run(2, program)[0])
        rank 0: rank 1 has not come to the barrier after 2 s: call barrier again to wait on
    """
    group = default.resolve(group)
    if timeout is None and _LEFT not in group.state:
        group.worker.call("barrier", BarrierCall(group).run)
        return
    entered = enter(group, timeout)
    seconds = float(timeout) if is_duration(timeout) else group.timeout
    group.state[_LEFT] = entered  # also where the wait is interrupted
    try:
        entered.work.wait(seconds if seconds < group.timeout else None)
    except StillRunning:
        rank = group.rank_in_errors(group.rank)
        raise StillRunning(
            f"rank {rank}: {entered.late()} after {seconds:g} s: call barrier again to wait on"
        ) from None
    except Error:
        group.state.pop(_LEFT, None)
        raise
    group.state.pop(_LEFT, None)  # unless a barrier of another thread has taken it


def enter(group: Group, timeout: object) -> BarrierCall:
    """The barrier of this call: a new one, or the one that this rank's last call has not left."""
    entered: BarrierCall | None = group.state.pop(_LEFT, None)
    if entered is None or entered.calls != group.worker.made:
        entered = BarrierCall(group, timeout, waits_apart=True)
        entered.work = group.worker.submit("barrier", entered.run)
        entered.calls = group.worker.made
    return entered


_LEFT = "barrier that this rank is in, and whose wait timed out"  # of a group's state


class BarrierCall:
    """A barrier that this rank has entered: `run` is the call, in its turn.

    Attributes:
        work: the call.
        calls: how many calls this rank had made on the group, this one included.
    """

    work: Work[None]
    calls: int

    def __init__(self, group: Group, timeout: object = None, *, waits_apart: bool = False) -> None:
        """`waits_apart`: whether a wait for it may end before it does."""
        self._group = group
        self._wrong = None if timeout is None else wrong_timeout(timeout)
        # such a wait has to know who has come: of many ranks each then tells each
        self._watch = self._note if waits_apart else None
        self._awaited: Awaited | None = None

    def run(self) -> None:
        """Wait for all ranks; run in the call's turn."""
        with preparing(self._group, "barrier"):
            check(self._wrong)
        opened(self._group, "barrier", {}, watch=self._watch)

    def _note(self, pending: Awaited) -> None:
        self._awaited = pending

    def late(self) -> str:
        """Who has not come, as a clause."""
        group, awaited = self._group, self._awaited
        if awaited is None:
            first = group.worker.doing or "earlier calls"
            return f"the barrier still waits for its turn behind {first}"
        missing = awaited.awaited()
        if not missing:  # since the wait gave up
            return "everybody has come to the barrier, the last only"
        have = "has" if len(missing) == 1 else "have"
        return f"{names(missing)} {have} not come to the barrier"
