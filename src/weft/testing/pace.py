"""How patient to be with this machine: the one place that deadlines of tests look at.

A deadline is for what hangs. On a machine that other work keeps busy everything takes longer, and
nothing hangs; so deadlines are as much longer as there is more to do than there are cores.
"""

from __future__ import annotations

import os

MOST = 4.0
"""How many times as long a deadline may become."""


def patient(seconds: float) -> float:
    """A deadline of so many seconds on an idle machine, on this one now.

    Example:
        >>> 10.0 <= patient(10.0) <= 40.0
        True
    """
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(max(1.0, waiting), MOST)
