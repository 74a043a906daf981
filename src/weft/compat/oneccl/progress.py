"""Progress: what a call returns at once, to wait for, to ask whether it is done, to depend on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

from weft import WeftError
from weft.wire.base import Work


class Event:
    """Operations under way; of none, it is done.

    Example:
        >>> Event().test()
        True
    """

    __slots__ = ("works",)

    def __init__(self, *works: Work[Any]) -> None:
        self.works = works

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self.works)) or 'of nothing'}>"

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Wait until all of it has ended.

        Args:
            timeout: seconds, or a timedelta; None waits as long as the group's own deadlines allow.

        Raises:
            StillRunning: `timeout` passed first. Nothing is broken: wait again.
            WeftError: what was wrong with the call; the same on every rank.
            WireError: a peer or a link failed.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deadline = None if seconds is None else time.monotonic() + seconds
        failed: Exception | None = None
        for work in self.works:
            try:
                work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Exception as error:  # all shall have ended when this returns
                failed = failed or error
        if failed is not None:
            raise failed

    def test(self) -> bool:
        """Whether all of it has ended, well or not."""
        return all(work.is_completed() for work in self.works)

    def __bool__(self) -> bool:
        return self.test()

    def cancel(self) -> bool:
        """Whether it was cancelled: never, since the other ranks are in it."""
        return False


def compose(*events: Event) -> Event:
    """One event of several: done when all are."""
    return Event(*(work for event in events for work in event.works))


def await_all(events: Sequence[tuple[str, Any]], seconds: float) -> None:
    """Wait for whatever a call depends on, each with its name: events, works, futures, streams."""
    deadline = time.monotonic() + seconds
    for name, event in events:
        # a CUDA event's wait() holds up a stream, and its synchronize() whoever calls
        names = ("synchronize", "wait", "result")
        body = next((getattr(event, each) for each in names if hasattr(event, each)), None)
        if body is None:
            raise WeftError(f"{name} is a {type(event).__name__}: pass what can be waited for")
        ended: Future[object] = Future()
        # a thread, since each kind has its own way to say how long, or none at all
        threading.Thread(
            target=_run, args=(body, ended), name="weft dependency", daemon=True
        ).start()
        if not wait([ended], max(0.0, deadline - time.monotonic())).done:
            raise WeftError(
                f"{name}, a {type(event).__name__}, has not ended within {seconds:g} s: "
                "see what it waits for, or start the group with a longer timeout"
            )
        if error := ended.exception():
            raise WeftError(f"{name} failed: {type(error).__name__}: {error}") from error


def _run(body: Callable[[], object], ended: Future[object]) -> None:
    try:
        ended.set_result(body())
    except BaseException as error:
        ended.set_exception(error)
