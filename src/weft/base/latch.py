"""Waits that an interrupt may end at any point: a latch, and conditions.

A latch is an event that happens once, which no interrupt of who waits can leave locked.

`threading.Event`, `Condition` and `Future` are written in Python, and hold a lock meanwhile. Where
the handler of a signal raises there, as that of Ctrl-C does, the lock may stay held, and whoever
comes next waits for ever. Here what an interrupt may leave undone, others do within a second.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

LOOK = 1.0
"""Seconds after which who waits looks by itself at what it waits for."""

NAP = 0.1
"""Seconds that a thread may sleep in one piece. Python runs the handlers of signals between two
pieces: a signal that another thread takes, or that comes right before a sleep, does not end it."""


def deadline_of(seconds: float | None) -> float:
    """When so many seconds will be over, by `time.monotonic`; None: never."""
    return math.inf if seconds is None else time.monotonic() + seconds


def wait_for(
    condition: threading.Condition, is_over: Callable[[], bool], seconds: float | None
) -> bool:
    """`condition.wait_for(is_over, seconds)`, in naps; with the lock of the condition held.

    Example:
        >>> with (condition := threading.Condition()):
        ...     wait_for(condition, lambda: True, None), wait_for(condition, lambda: False, 0.01)
        (True, False)
    """
    until = deadline_of(seconds)
    while not is_over():
        left = until - time.monotonic()
        if left <= 0:
            return False
        condition.wait(min(left, NAP))
    return True


def join(thread: threading.Thread, seconds: float | None) -> bool:
    """`thread.join(seconds)`, in naps; whether the thread has ended.

    Example:
        >>> thread = threading.Thread(target=time.sleep, args=[0.01])
        >>> thread.start()
        >>> join(thread, None)
        True
    """
    until = deadline_of(seconds)
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        thread.join(min(left, NAP))
    return not thread.is_alive()


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
        until = deadline_of(seconds)
        while not self.is_open:
            left = max(0.0, until - time.monotonic())
            # ended by `open`, by another that it has let through, or by the time
            if self._lock.acquire(timeout=min(left, NAP)):
                self._hand_on()
            elif left < NAP:
                break
        return self.is_open

    def _hand_on(self) -> None:
        """Have the next one go through that waits."""
        try:
            self._lock.release()
        except RuntimeError:  # another thread has done it
            return
