"""Callbacks: what users' Futures call once a call has ended, on threads for that alone."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable

from ..base.latch import deadline_of
from .server import Server


class Callbacks:
    """Threads that run functions, each of them one at a time.

    A function may wait for a later one, as a callback does that waits for another Future. So where
    all threads run a function, one more is started. One that is idle is enough: others end.

    Example:
        >>> import threading
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
        self._servers: list[Server] = []
        self._idle: deque[Server] = deque()  # those of them that run nothing

    def prepare(self) -> None:
        """Start a thread, for a Future that somebody asks for: later nobody is told of a failure.

        Raises:
            RuntimeError: there is none more for this process.
        """
        if not self._servers:
            self._idle.append(self._started())

    def run(self, do: Callable[[], object]) -> None:
        """Have a function run: here, if the thread was told to end."""
        server = self._idle_one()
        server.put(functools.partial(self._serve, server, do))
        if server.has_ended:  # perhaps before
            server.finish()

    def _idle_one(self) -> Server:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        with contextlib.suppress(RuntimeError):
            return self._started()
        return self._servers[-1]  # there is no thread more: functions wait for each other

    def _started(self) -> Server:
        server = Server(self._name)
        server.start()
        self._servers.append(server)
        return server

    def _serve(self, server: Server, do: Callable[[], object]) -> None:
        """Run a function, on the thread of a server."""
        try:
            do()
        finally:
            if self._idle:
                self._servers.remove(server)
                server.end()
            else:
                self._idle.append(server)

    def end(self, seconds: float | None = None) -> bool:
        """End the threads once all functions have run; False if that took more than these seconds.

        A function that calls this is not waited for.
        """
        until = deadline_of(seconds)
        ended = [server.end(until - time.monotonic()) for server in self._servers.copy()]
        return all(ended)
