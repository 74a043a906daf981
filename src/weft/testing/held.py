"""What a process holds, before a wire is made and after it was closed."""

from __future__ import annotations

import time
from typing import NamedTuple

import psutil

from ..base.pace import patient

_GONE = 5.0  # seconds in which what was closed is gone: a thread may end a moment later


class Held(NamedTuple):
    """How many descriptors and threads a process has.

    Attributes:
        descriptors: that are open.
        threads: of Python and of libraries.
    """

    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        process = psutil.Process()
        return cls(process.num_fds(), process.num_threads())

    def is_all_soon(self) -> None:
        """Wait until the process holds no more than this.

        Raises:
            AssertionError: it still does after a while.
        """
        until = time.monotonic() + patient(_GONE)
        while True:
            now = Held.now()
            descriptors = now.descriptors - self.descriptors
            threads = now.threads - self.threads
            if descriptors <= 0 and threads <= 0:
                return
            if time.monotonic() >= until:
                raise AssertionError(
                    f"the process has {descriptors} more descriptors and {threads} more threads "
                    "than before the wire was made, though that is closed"
                )
            time.sleep(0.01)
