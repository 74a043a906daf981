"""A latch: an event that happens once, which no interrupt of who waits can leave locked.

`threading.Event`, `Condition` and `Future` are written in Python, and hold a lock meanwhile. Where
the handler of a signal raises there, as that of Ctrl-C does, the lock may stay held, and whoever
comes next waits for ever. Here what an interrupt may leave undone, others do within a second.
"""

from __future__ import annotations

import threading
import time

LOOK = 1.0
"""Seconds after which who waits looks by itself at what it waits for."""


class Latch:
    """Closed until somebody opens it, which is for good.

    Attributes:
        is_open: whether it is.

    Example:
        >>> latch = Latch()
        >>> latch.wait(0.01)
        False
        >>> latch.open()
        >>> latch.wait()
        True
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()  # held while the latch is closed
        self._lock.acquire()

    def open(self) -> None:
        """Let everybody through. Twice is fine."""
        self.is_open = True
        self._hand_on()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is open; False: it is not, after so many seconds. None: no limit."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self.is_open:
            left = LOOK if until is None else min(LOOK, until - time.monotonic())
            # ended by `open`, by another that it has let through, or by the time
            if self._lock.acquire(timeout=max(0.0, left)):
                self._hand_on()
            elif left < LOOK:
                break
        return self.is_open

    def _hand_on(self) -> None:
        """Have the next one go through that waits."""
        try:
            self._lock.release()
        except RuntimeError:  # another thread has done it
            return
