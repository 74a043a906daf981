"""SAR's communication thread: it runs tasks one after the other while the program goes on."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from weft import StillRunning
from weft.base.latch import NAP
from weft.base.pace import patient
from weft.bootstrap import TIMEOUT

from ..arguments import default

_GRACE = 1.0  # seconds that a task gets to finish at exit


class CommThread:
    """A thread that runs tasks in the order in which they were submitted.

    All ranks must call collectives of a group in the same order. This holds for those in tasks and
    those that the program itself calls meanwhile, together.

    At exit a task that runs has a second to finish; those that have not begun are dropped.

    Attributes:
        task_queue: tasks that have not begun.
        result_queue: results that `get_result` has not returned yet.

    Example:
        >>> thread = CommThread()
        >>> thread.submit_task("square", lambda: 7 * 7)
        >>> thread.get_result()
        49
    """

    def __init__(self) -> None:
        self.task_queue: queue.SimpleQueue[tuple[str, Callable[[], Any]]] = queue.SimpleQueue()
        self.result_queue: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._goes_on = True

    def submit_task(self, task_id: str, task: Callable[[], Any]) -> None:
        """Queue a task; it runs when those before it have ended. Return at once.

        Args:
            task_id: a name for it, which has no effect.
            task: a function without arguments.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="sar comm", daemon=True)
            thread.start()
            self._thread = thread
            atexit.register(self._end)
        self.task_queue.put((task_id, task))

    def get_result(self, block: bool = True) -> Any:
        """Return the oldest result that was not returned yet. A task that returns None has none.

        Args:
            block: whether to wait for a result: at most the group's timeout, 300 s without a group.

        Raises:
            queue.Empty: there is no result, and `block` is False.
            StillRunning: there was no result in time; wait again.
            Exception: what the task raised in place of a result.
        """
        return self._ended(block).result()

    def _ended(self, block: bool) -> Future[Any]:
        """The task that ended first of those that nobody has asked for; as `get_result`."""
        if not block:
            return self.result_queue.get(block=False)
        group = default()
        seconds = TIMEOUT if group is None else group.timeout
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self.result_queue.get(timeout=min(left, NAP))
        raise StillRunning(f"no task has ended within {seconds:g} s: wait again")

    def _run(self) -> None:
        while self._goes_on:
            _, task = self.task_queue.get()
            ended: Future[Any] = Future()
            try:
                ended.set_result(task())
            except BaseException as error:  # get_result raises it
                ended.set_exception(error)
            if ended.exception() is not None or ended.result() is not None:
                self.result_queue.put(ended)

    def _end(self) -> None:
        """Wait for the task that runs: in torch's code it aborts the process as Python ends."""
        assert self._thread is not None
        self._goes_on = False
        self.task_queue.put(("wakes the thread", lambda: None))
        self._thread.join(patient(_GRACE))


comm_thread = CommThread()
"""The thread that SAR's own layers share."""
