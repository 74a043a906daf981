"""A thread that runs functions in order."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from ..base.latch import deadline_of, join

_log = logging.getLogger("weft")


class Server:
    """A daemon thread that runs functions in order.

    Who calls holds no lock meanwhile, which an interrupt might leave held.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = False
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._serving = threading.Lock()  # held for good by the thread that runs the functions
        self._threads: list[threading.Thread] = []  # all that were started: one of them serves

    def start(self) -> None:
        """Start the thread, if nobody has.

        Raises:
            RuntimeError: there is none more for this process.
        """
        if not self._threads:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)  # twice, mostly: an interrupt may come in between

    def put(self, do: Callable[[], object]) -> None:
        """Queue a function."""
        self._queue.put(do)

    def _run(self) -> None:
        """The thread."""
        if not self._serving.acquire(blocking=False):
            return  # another one was started, and serves
        self._threads.append(threading.current_thread())
        while not (self._ended and self._queue.empty()):
            try:
                self._queue.get()()
            except BaseException:  # nobody else would run what comes next
                with contextlib.suppress(Exception):  # of a handler of the log
                    _log.exception("a function of thread %s failed", self._name)

    def end(self, seconds: float | None = None) -> bool:
        """End the thread once the queue is empty; False if that took more than these seconds."""
        self._ended = True
        self._queue.put(lambda: None)  # wakes up the thread
        threads = self._threads.copy()
        if threading.current_thread() in threads:
            return True
        until = deadline_of(seconds)
        return all(join(each, until - time.monotonic()) for each in threads)
