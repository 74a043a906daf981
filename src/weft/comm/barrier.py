"""`barrier`: every rank waits until all have come; a rank that waits too long learns for whom.

A barrier that times out breaks nothing. The rank has still entered it: the other ranks can come
later, and go on then. The rank may call `barrier` again to wait on, or make its next call, which
takes its turn after the barrier.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..errors import StillRunning, entry
from ..wire import default
from ..wire.base import Pending, Wire, Work, is_duration, names
from .opening import opened


@entry
def barrier(timeout: float | None = None, group: Any = None) -> None:
    """Wait until every rank of the group has come here.

    Args:
        timeout: the longest wait of this rank, in seconds. None, or more than the wire's own
            deadline: that deadline, after which the wire is broken.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.

    Raises:
        StillRunning: `timeout` passed; names the ranks that have not come. The wire is intact, and
            this rank is still in the barrier: if its next call on this group is `barrier`, that
            waits for the same barrier.
        WeftError: a rank is in another call, or its timeout is not a positive number of seconds;
            every rank raises it.
        WireError: a peer failed, or did not come before the wire's deadline; names the culprit.

    Example:
        >>> import weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     if wire.rank == 1:
        ...         while not waited_in_vain:
        ...             pass
        ...         return weft.barrier()
        ...     try:
        ...         weft.barrier(timeout=0.1)
        ...     except weft.StillRunning as error:
        ...         waited_in_vain.append(error)
        ...     weft.barrier()  # waits on
        >>> waited_in_vain = []
        >>> run(2, program)
        [None, None]
        >>> print(waited_in_vain[0])
        rank 0: rank 1 has not come to the barrier after 0.1 s: call barrier again to wait on
    """
    wire = default.resolve(group)
    if timeout is None and wire not in _left:
        wire.worker.call("barrier", Entered(wire, None).run)
        return
    entered = enter(wire, timeout)
    try:
        entered.work.wait(timeout if is_duration(timeout) else None)
    except StillRunning:
        _left[wire] = entered
        raise StillRunning(
            f"rank {wire.rank}: {entered.late()} after {timeout:g} s: call barrier again to wait on"
        ) from None


def enter(wire: Wire, timeout: float | None = None) -> Entered:
    """The barrier of this call: a new one, or the one that this rank's last call has not left."""
    entered = _left.pop(wire, None)
    if entered is None or entered.calls != wire.worker.made:
        entered = Entered(wire, timeout)
        entered.work = wire.worker.submit("barrier", entered.run)
        entered.calls = wire.worker.made
    return entered


_left: weakref.WeakKeyDictionary[Wire, Entered] = weakref.WeakKeyDictionary()
# = barriers that this rank has entered, and whose wait timed out


class Entered:
    """A barrier that this rank is in: `run` is the call, in its turn.

    Attributes:
        work: the call.
        calls: how many calls this rank had made on the wire, this one included.
    """

    work: Work[None]
    calls: int

    def __init__(self, wire: Wire, timeout: object) -> None:
        self._wire = wire
        self._error = None
        if timeout is not None and not is_duration(timeout):
            self._error = f"timeout is {timeout!r}: pass a positive number of seconds, or None"
        self._awaited: Pending | None = None

    def run(self) -> None:
        """Wait for all ranks; run in the call's turn."""
        with opened(self._wire, "barrier", {}, self._error, watch=self._watch):
            pass

    def _watch(self, pending: Pending) -> None:
        self._awaited = pending

    def late(self) -> str:
        """Who has not come, as a clause."""
        wire, awaited = self._wire, self._awaited
        if awaited is None:
            first = wire.worker.doing or "earlier calls"
            return f"the barrier still waits for its turn behind {first}"
        missing = awaited.awaited()
        if missing is None:
            return "not everybody has come to the barrier"
        if not missing:  # since the wait gave up
            return "everybody has come to the barrier, the last only"
        have = "has" if len(missing) == 1 else "have"
        return f"{names(missing)} {have} not come to the barrier"
