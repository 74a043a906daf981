"""SAR's communication thread: tasks that run one after the other beside the program."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from weft import StillRunning

from ..arguments import default

_TIMEOUT = 300.0  # seconds that a result is waited for where there is no group


class CommThread:
    """A thread that runs tasks in the order in which they were submitted.

    Tasks of all ranks that call the same collective must come in the same order, and so must what
    the program itself calls meanwhile.

    Attributes:
        task_queue: what is to be run.
        result_queue: what has ended and was not read.

    Example:
        >>> thread = CommThread()
        >>> thread.submit_task("square", lambda: 7 * 7)
        >>> thread.get_result()
        49
    """

    def __init__(self) -> None:
        self.task_queue: queue.Queue[tuple[str, Callable[[], Any]]] = queue.Queue()
        self.result_queue: queue.Queue[Future[Any]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def submit_task(self, task_id: str, task: Callable[[], Any]) -> None:
        """Run a task when those before it have ended.

        Args:
            task_id: its name.
            task: a function without arguments.
        """
        self.task_queue.put((task_id, task))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sar comm", daemon=True)
            self._thread.start()

    def get_result(self, block: bool = True) -> Any:
        """What the oldest task returned whose result was not read; None is no result.

        Args:
            block: whether to wait for it, for as long as the group's timeout.

        Raises:
            queue.Empty: there is none, and `block` is False.
            StillRunning: none came in time.
            Exception: what the task raised.
        """
        wire = default()
        seconds = _TIMEOUT if wire is None else wire.timeout
        try:
            return self.result_queue.get(block, seconds).result()
        except queue.Empty:
            if not block:
                raise
            raise StillRunning(f"no task has ended within {seconds:g} s: wait again") from None

    def _run(self) -> None:
        while True:
            _, task = self.task_queue.get()
            ended: Future[Any] = Future()
            try:
                ended.set_result(task())
            except BaseException as error:  # for whoever asks for the result
                ended.set_exception(error)
            if ended.exception() is not None or ended.result() is not None:
                self.result_queue.put(ended)


comm_thread = CommThread()
"""The one that SAR's own layers share."""
