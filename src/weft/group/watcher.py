"""Who looks whether what the stream of a device waits for comes, since the host does not wait.

Where a device has streams a wait has the current stream wait, and returns. So no wait of the host
ends at the deadline. A thread looks in its place, and breaks the session if something is late.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..base.devices import claim_thread
from ..base.errors import WireError
from ..failure.verdict import Entered
from ..wire.interface import DevicePending

_log = logging.getLogger("weft")

_PAUSES = (1e-4, 0.02)  # seconds between two looks at what is watched: the first, and the longest


class Breakable(Protocol):
    """What is broken where something is late: a session.

    Attributes:
        timeout: seconds that it may take.
    """

    timeout: float

    def diagnose(self, where: str, ranks: Sequence[int], call: Entered | None) -> WireError | None:
        """Break it if a peer is to blame; the error, or None.

        Args:
            where: the round that is late.
            ranks: of it, without this one.
            call: in which that is, or None.
        """

    def give_up(self, what: str) -> None:
        """Break it on account of nobody: this was not done in time, though all ranks answer."""


class _Item(NamedTuple):
    """A round that is watched: see `Watcher.watch_round`."""

    pending: DevicePending
    ranks: Sequence[int]
    call: Entered | None


class Watcher:
    """Breaks a session if something does not come that the stream of a device waits for.

    Else nobody would: a kernel of NCCL that waits for a dead rank ends only at NCCL's own deadline,
    minutes later. Once the session is broken its wires are aborted, which ends the kernel.
    """

    def __init__(self, session: Breakable, device: torch.device, name: str) -> None:
        """
        Args:
            session: which this does not keep alive.
            device: whose streams wait.
            name: of what is waited for, for errors: "a round over nccl".
        """
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._session = weakref.ref(session)
        self._device = device
        self._name = name
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # held while it is started: only one may watch
        # the thread ends with this object, too
        weakref.finalize(self, self._queue.put, None).atexit = False

    def watch_round(
        self, pending: DevicePending, ranks: Sequence[int], call: Entered | None
    ) -> None:
        """Watch a round, behind what was given before.

        Args:
            pending: the round.
            ranks: the others of it.
            call: that this rank has come to, and makes the round in; None: there is none.
        """
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(
                    target=_watch,
                    args=[self._queue, self._session, self._device, self._name],
                    name="weft watcher",
                    daemon=True,
                )
                self._thread = thread  # before: a collection of garbage in `start` may come here
                try:
                    thread.start()
                except BaseException:
                    self._thread = None
                    raise
        self._queue.put(_Item(pending, ranks, call))

    def end(self) -> None:
        """End the thread, once all is through."""
        self._queue.put(None)


def _watch(
    queued: queue.SimpleQueue[_Item | None],
    session: Callable[[], Breakable | None],
    device: torch.device,
    name: str,
) -> None:
    """The thread of a watcher."""
    try:
        claim_thread(device)
    except Exception as error:  # nothing is watched then: who waits for a stream hears of nothing
        alive = session()
        if alive is not None:
            alive.give_up(f"{name} cannot be watched ({error!r})")
        return
    # ended by `end`, or by the end of the watcher, which both put None
    while (item := queued.get()) is not None:
        try:
            _wait_for(item, session, name)
        except Exception as error:  # what comes next is watched, too
            _log.error("%s could not be watched: %s", name, repr(error))
        del item  # what it holds is not this idle thread's


def _wait_for(item: _Item, session: Callable[[], Breakable | None], name: str) -> None:
    """Wait until something is through; at the deadline break the session.

    The time counts from when this thread begins to look, behind what was watched before. Where a
    wire has failed, all that is pending on it is done, and the wait ends with that.
    """
    began = time.monotonic()
    pause, longest = _PAUSES
    while not item.pending.done():
        alive = session()
        if alive is None:
            return  # nobody uses what comes
        if time.monotonic() - began > alive.timeout:
            if alive.diagnose(name, item.ranks, item.call) is None:
                alive.give_up(f"{name} was not through after {alive.timeout:g} s")
            return
        del alive  # this thread does not keep it during the pause
        time.sleep(pause)
        pause = min(2 * pause, longest)
