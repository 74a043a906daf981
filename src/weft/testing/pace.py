"""Deadlines of tests, which grow with the load of the machine.

A deadline is to find what hangs. On a machine that is busy with other work everything takes longer,
but nothing hangs. So a deadline is multiplied by the load average over the number of cores.
"""

from __future__ import annotations

import os

MOST = 4.0
"""The largest factor of a deadline."""

START = 60.0
"""Seconds that new processes may take until they are where they meet, and to join a group."""

ANSWER = 2.0
"""Seconds that a rank has to say where it is."""


def patient(seconds: float) -> float:
    """A deadline in seconds for this machine now, given the one for an idle machine.

    The factor is between 1 and `MOST`.

    Example:
        >>> 10.0 <= patient(10.0) <= 40.0
        True
    """
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(max(1.0, waiting), MOST)
