"""Events: what a call returns at once, to wait for, to test, and to make other calls depend on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

from weft import WeftError, Work
from weft.base.arguments import limit_of_wait


class Event:
    """One or more operations that may still be running. An event of no operation is done.

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
        """Wait until all operations have ended.

        Args:
            timeout: seconds, or a timedelta; None: as long as the group's own deadlines allow.

        Raises:
            StillRunning: `timeout` passed first. Nothing is broken: wait again.
            WeftError: the call was wrong on some rank; the same text on every rank. Or `timeout` is
                no number of seconds, on this rank alone.
            WireError: a peer or a link failed; names the culprit. The group is lost.
        """
        seconds = limit_of_wait(timeout)
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
        """Whether all operations have ended, with a result or with an error."""
        return all(work.is_completed() for work in self.works)

    def __bool__(self) -> bool:
        return self.test()

    def cancel(self) -> bool:
        """Return False: an operation cannot be cancelled, because the other ranks take part."""
        return False


def compose(*events: Event) -> Event:
    """One event of several, which is done when all of them are.

    Example:
        >>> compose(Event(), Event()).test()
        True
    """
    return Event(*(work for event in events for work in event.works))


def await_all(events: Sequence[tuple[str, Any]], seconds: float) -> None:
    """Wait for what a call depends on, given with names: events, works, futures, streams.

    Args:
        events: (name, object) of each.
        seconds: for all of them together.

    Raises:
        WeftError: one is no such object, has failed, or has not ended in time.
    """
    deadline = time.monotonic() + seconds
    for name, event in events:
        # synchronize() first: the wait() of a CUDA event blocks a stream, not the caller
        names = ("synchronize", "wait", "result")
        body = next((getattr(event, each) for each in names if hasattr(event, each)), None)
        if body is None:
            raise WeftError(f"{name} is a {type(event).__name__}: pass what can be waited for")
        ended: Future[object] = Future()
        # on a thread, because some of these cannot wait with a timeout
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
