"""Callbacks: what users' Futures call once a call has ended, on threads for that alone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ..base.latch import deadline_of
from .server import Server

_PATIENCE = 0.01  # seconds that a callback may take while others are queued
_SOON = 1e-3  # seconds between two looks

_log = logging.getLogger("weft")


class Callbacks:
    """A thread that runs functions in order: it *serves*.

    A function may wait for a later one, as a callback does that waits for another Future. So a
    second thread watches while functions are queued behind one that runs. If that asks for a Future
    itself, or takes longer than 10 ms, the second thread serves in its place.

    Example:
        >>> callbacks = Callbacks("of this example")
        >>> callbacks.prepare()
        >>> first, second = threading.Event(), threading.Event()
        >>> callbacks.run(lambda: first.wait(10.0) and second.set())
        >>> callbacks.run(first.set)
        >>> second.wait(10.0)
        True
        >>> callbacks.end(10.0)
        True
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = False
        self._server = Server(name)
        self._queue: deque[Callable[[], object]] = deque()
        self._serving: int | None = None  # the thread that serves, by its number; None: none does
        self._running: list[int] = []  # the threads that run a function
        self._begun = 0  # functions that were begun
        self._may_wait = False  # the last of these has asked for a Future
        self._is_watched = False  # a thread watches the queue

    def prepare(self) -> None:
        """Start the thread, for a Future that somebody asks for: later nobody is told of a failure.

        Raises:
            RuntimeError: there is none more for this process.
        """
        if threading.get_ident() in self._running:
            self._may_wait = True
        self._server.start()

    def run(self, do: Callable[[], object]) -> None:
        """Queue a function; run it here, if the threads were told to end."""
        self._queue.append(do)
        self._server.put(self._serve)
        # either this sees a function that runs, or that thread sees this one in the queue
        if self._running:
            self._watch()
        if self._ended:  # they may have ended before
            self._serve()

    def _serve(self) -> None:
        """Run what is queued, unless another thread does."""
        me = threading.get_ident()
        # also where the queue is empty: others leave it to the thread that `_serving` names
        while self._serving == me or (self._queue and self._serving is None):
            self._serving = me
            try:
                while self._queue and self._serving == me:
                    self._run_first()
            finally:
                if self._serving == me:
                    self._serving = None  # then looks again: who came before has left it to this
                    if self._queue:  # or what was raised ends this thread
                        self._server.put(self._serve)

    def _run_first(self) -> None:
        """Run the first function in the queue."""
        me = threading.get_ident()
        try:
            self._running.append(me)
            try:
                do = self._queue.popleft()
            except IndexError:  # another thread has taken it
                return
            self._begun += 1
            self._may_wait = False
            if self._queue:
                self._watch()
            do()
        except Exception:
            _log.exception("a callback of a call failed")
        finally:
            with contextlib.suppress(ValueError):  # an interrupt came before it was there
                self._running.remove(me)

    def _watch(self) -> None:
        """Have a thread watch the queue, unless one does."""
        if not self._is_watched:
            watcher = threading.Thread(target=self._look, name=self._name, daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread more: functions wait for each other
                watcher.start()

    def _look(self) -> None:
        """The thread that watches: until nothing is queued, or it has to serve."""
        self._is_watched = True
        while self._queue:
            if not self._goes_on():
                self._is_watched = False  # from here on this one is to be watched
                self._serving = threading.get_ident()
                self._serve()
                return
        self._is_watched = False
        if self._queue and self._running:  # queued meanwhile, by who took it for watched
            self._watch()

    def _goes_on(self) -> bool:
        """Whether the next function is begun soon."""
        begun = self._begun
        until = time.monotonic() + _PATIENCE
        while self._queue and self._begun == begun:
            if self._may_wait or time.monotonic() >= until:
                return False
            time.sleep(_SOON)
        return True

    def end(self, seconds: float | None = None) -> bool:
        """End the threads once all functions have run; False if that took more than these seconds.

        A function that calls this is not waited for.
        """
        self._ended = True
        until = deadline_of(seconds)
        self._server.end(seconds)
        while self._is_busy() and time.monotonic() < until:
            time.sleep(_SOON)
        return not self._is_busy()

    def _is_busy(self) -> bool:
        """Whether another thread runs a function, or is going to."""
        me = threading.get_ident()
        others = any(each != me for each in self._running.copy())
        return others or (bool(self._queue) and me not in self._running)
