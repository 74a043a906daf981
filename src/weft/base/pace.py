"""Seconds that grow with the load of the machine.

What is to find who hangs gives others some seconds, in which whoever is well answers. On a machine
that is busy with other work everything takes longer, but nothing hangs. So these seconds are
multiplied by the load average over the number of cores.
"""

from __future__ import annotations

import os

MOST = 4.0
"""The largest factor of a deadline."""


def patient(seconds: float) -> float:
    """A deadline in seconds for this machine now, given the one for an idle machine.

    The factor is between 1 and `MOST`.

    Example:
        >>> 10.0 <= patient(10.0) <= 40.0
        True
    """
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(max(1.0, waiting), MOST)
