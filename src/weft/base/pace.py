"""Seconds that grow with the load of the machine.

What is to find who hangs gives others some seconds, in which whoever is well answers. On a machine
that is busy with other work everything takes longer, but nothing hangs. So these seconds are
multiplied by the load average over the number of cores.
"""

from __future__ import annotations

import os

MOST = 4.0
"""The largest factor."""


def patient(seconds: float) -> float:
    """So many seconds, or more where this machine is busy now: by a factor of up to `MOST`.

    That is the machine of who waits; nothing is known of those that it waits for.

    Example:
        >>> 10.0 <= patient(10.0) <= 40.0
        True
    """
    try:
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:  # a sandbox may refuse to say
        waiting = 1.0
    return seconds * min(max(1.0, waiting), MOST)
