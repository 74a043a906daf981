"""The worker: one queue for each wire, in which calls take their turn.

Calls must reach the wire in the same order on every rank. A synchronous call runs in the caller's
own thread when nothing is queued (no hop, no wake-up); an asynchronous one runs on the worker's
thread, and a synchronous one behind it waits for its turn.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from .._torch import without_modes, without_transforms
from ..errors import Error, StillRunning, WeftError

if TYPE_CHECKING:
    from .base import Wire

T = TypeVar("T")

_Futures = list["torch.futures.Future[Any]"]

_GRACE = 1.0  # seconds that a call under way gets to finish when the interpreter exits
_LAST = 5.0  # seconds to end in after its wire was aborted


class Worker:
    """The calls of one rank on one wire, one at a time, in the order they were made.

    A job that raises a `weft.Error` leaves the wire as it is. Any other exception,
    KeyboardInterrupt included, means that this rank will not finish a schedule that others are
    in: the wire is aborted, so that they raise instead of waiting, and the exception goes on.

    Attributes:
        calls: how many calls were started.
        doing: the name of the call that is running, "" between calls.

    Example:
        >>> from weft.wire import threads
        >>> wire = threads.group(1)[0]
        >>> wire.worker.call("add", lambda: 1 + 1)
        2
        >>> work = wire.worker.submit("add", lambda: 2 + 2)
        >>> work.wait()
        4
        >>> wire.close()
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.calls, self.doing = 0, ""
        self._lock = threading.Lock()
        self._turns = threading.Condition(self._lock)
        self._tickets = 0  # drawn so far
        self._serving = 0  # the ticket whose turn it is
        self._left: set[int] = set()  # tickets whose callers were interrupted before their turn
        self._owner: int | None = None  # the thread that runs a job
        self._several = False  # and that may make calls
        self._queue: deque[_Queued] = deque()
        self._thread: threading.Thread | None = None
        self._announcer: threading.Thread | None = None
        self._announcements: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = self._forked = False

    @property
    def made(self) -> int:
        """How many calls were made so far, those that wait for their turn included."""
        return self._tickets

    @without_transforms
    @without_modes
    def call(self, name: str, job: Callable[[], T]) -> T:
        """Run `job` in this thread, once all calls made before it are done; return its result.

        Raises:
            WeftError: made from inside another call on this wire, or after `stop()`.
            Exception: whatever the job raises.
        """
        if self._several and self._owner == threading.get_ident():
            return self._do(name, job)
        with self._lock:  # which takes less than the condition itself
            ticket = self._draw(name)
            self._wait_for(ticket)
        return self._run(name, job)

    def submit(self, name: str, job: Callable[[], T], *, several: bool = False) -> Work[T]:
        """Queue `job` for the worker's thread, with this thread's context and gradient mode.

        Args:
            name: of the call.
            job: what it does.
            several: whether the job makes calls on this wire itself, all in its one turn.

        Raises:
            WeftError: made from inside another call on this wire, or after `stop()`.
        """
        work: Work[T] = Work(self, name)
        context = contextvars.copy_context()
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def inside() -> T:
            if inference:  # of which this thread knows nothing
                with torch.inference_mode(), torch.set_grad_enabled(grad):
                    return context.run(job)
            with torch.set_grad_enabled(grad):
                return context.run(job)

        with self._turns:
            self._queue.append(_Queued(self._draw(name), name, inside, several, work))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"weft worker {self._wire.rank}", daemon=True
                )
                self._thread.start()
                _running.add(self)
            self._turns.notify_all()
        return work

    def stop(self) -> None:
        """Take no more calls, let those that were made end, and end the threads.

        Close the wire first if they shall not be waited for: then they raise.
        """
        with self._turns:
            self._stopped = True
            self._turns.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._turns:
            announcer, self._announcer = self._announcer, None
        if announcer is not None:
            self._announcements.put(None)
            if announcer is not threading.current_thread():
                announcer.join(self._wire.timeout)  # a user's callback may take any time
        _running.discard(self)

    def _draw(self, name: str) -> int:
        """A ticket for the next call; with the lock held."""
        rank = self._wire.rank
        if self._owner == threading.get_ident():
            raise WeftError(
                f"rank {rank}: {name} was called from inside {self.doing}, which still has "
                "the wire: call it afterwards, or on another group"
            )
        if self._stopped:
            raise WeftError(f"rank {rank}: {name} was called after the wire was closed")
        self._tickets += 1
        return self._tickets - 1

    def _wait_for(self, ticket: int) -> None:
        """Wait for a turn; with the lock held."""
        try:
            while self._serving != ticket:
                self._turns.wait()
        except BaseException as error:
            self._abandon(ticket)
            self._wire.abort(_text(error))
            raise

    def _abandon(self, ticket: int) -> None:
        """Give up a turn that has not begun; with the lock held."""
        if self._serving == ticket:
            self._advance()
        else:
            self._left.add(ticket)

    def _advance(self) -> None:
        """Give the turn to the next call; with the lock held."""
        self._serving += 1
        while self._serving in self._left:
            self._left.remove(self._serving)
            self._serving += 1
        if self._serving != self._tickets:
            self._turns.notify_all()

    def _run(self, name: str, job: Callable[[], T], several: bool = False) -> T:
        """Run a job whose turn it is, and give the turn to the next."""
        try:
            self._owner = threading.get_ident()
            return self._do(name, job, several)
        finally:
            with self._lock:
                self._owner = None
                self._advance()

    def _do(self, name: str, job: Callable[[], T], several: bool = False) -> T:
        """Run a job in this thread's turn."""
        outer = self.doing, self._several
        try:
            self.calls += 1
            self.doing, self._several = name, several
            return job()
        except Error:
            raise
        except BaseException as error:
            self._wire.abort(_text(error))
            raise
        finally:
            self.doing, self._several = outer

    def _serve(self) -> None:
        """The worker's thread."""
        while True:
            with self._turns:
                while not (self._queue or self._stopped):
                    self._turns.wait()
                if not self._queue:
                    return
                queued = self._queue.popleft()
                while self._serving != queued.ticket:
                    self._turns.wait()
            work = queued.work
            try:
                futures = work._end(self._run(queued.name, queued.job, queued.several), None)
            except BaseException as error:  # kept for whoever waits
                futures = work._end(None, error)
            if futures:
                self._announce(functools.partial(work._complete, *futures))
            del queued, work, futures  # what they hold is the caller's, not this idle thread's

    def _announce(self, announcement: Callable[[], None]) -> None:
        """Run what completes a Future, and so its callbacks, on a thread of their own.

        On the worker's thread a callback that waits for another call would wait for itself.
        """
        with self._turns:
            if self._announcer is None and not self._stopped:
                self._announcer = threading.Thread(
                    target=self._tell, name=f"weft callbacks {self._wire.rank}", daemon=True
                )
                self._announcer.start()
            if self._announcer is not None:
                self._announcements.put(announcement)
                return
        announcement()  # stopped, and nobody is left to do it

    def _tell(self) -> None:
        """The thread of callbacks."""
        while (announcement := self._announcements.get()) is not None:
            announcement()

    def after_fork(self) -> None:
        """In a forked child, which has no thread that would serve the calls under way."""
        self._forked = True
        self._lock = threading.Lock()  # it may have been held
        self._turns = threading.Condition(self._lock)
        self._queue.clear()
        self._left.clear()
        self._serving, self._owner, self._thread = self._tickets, None, None

    def _leave(self) -> None:
        """End the threads before the interpreter ends under them."""
        with self._turns:
            self._stopped = True
            self._turns.notify_all()
        if self._thread is not None:
            self._thread.join(_GRACE)
            if self._thread.is_alive():
                self._wire.abort(f"its process ends while {self.doing or 'a call'} runs")
                self._thread.join(_LAST)
        self._announcements.put(None)
        if self._announcer is not None:
            self._announcer.join(_GRACE)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A call that waits for its turn."""

    ticket: int
    name: str
    job: Callable[[], object]
    several: bool
    work: Work[Any]


class Work(Generic[T]):
    """An asynchronous call under way, with the face of `torch.distributed.Work`."""

    def __init__(self, worker: Worker, name: str) -> None:
        self._worker, self._name = worker, name
        self._lock = threading.Lock()
        self._ended = False
        self._waited: threading.Event | None = None  # for, which few calls are
        self._value: T | None = None
        self._error: BaseException | None = None
        self._futures: list[torch.futures.Future[T]] = []

    def __repr__(self) -> str:
        state = "under way"
        if self.is_completed():
            state = "done" if self._error is None else f"failed: {_text(self._error)}"
        return f"<Work {self._name}: {state}>"

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Wait until the call has ended and return its result.

        Args:
            timeout: seconds, or a timedelta; None waits as long as the wire's own deadlines allow.

        Raises:
            StillRunning: `timeout` passed first. Nothing is broken: wait again.
            WeftError: called from inside a call on the same wire, which this one waits for.
            Exception: whatever the call raised.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self.is_completed():
            worker = self._worker
            if worker._owner == threading.get_ident():
                raise WeftError(
                    f"rank {worker._wire.rank}: {self._name} waits for its turn behind "
                    f"{worker.doing}, which waits for it: wait outside"
                )
            if worker._forked:
                raise WeftError(
                    f"rank {worker._wire.rank}: {self._name} was under way when this process was "
                    "forked: wait for it in the parent"
                )
            if not self._wait(seconds):
                raise StillRunning(
                    f"rank {worker._wire.rank}: {self._name} is still under way after {seconds} s: "
                    "wait again, or longer"
                )
        return self.result()

    def result(self) -> T:
        """The result of a call that has ended.

        Raises:
            WeftError: it has not ended.
            Exception: whatever the call raised.
        """
        if not self.is_completed():
            raise WeftError(f"{self._name} is still under way: wait() for it first")
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def exception(self) -> BaseException | None:
        """What the call raised, or None: it has not ended, or it ended well."""
        return self._error if self.is_completed() else None

    def get_future(self) -> torch.futures.Future[T]:
        """A Future of the result, for C++ to read and to chain callbacks on.

        If the call raises, `wait()` of the Future raises a RuntimeError with that text; to get
        the exception itself, wait for the Work.
        """
        raw: torch.futures.Future[T] = torch.futures.Future()
        # A Future in which Python set an exception holds it as a value, and C++ that reads it as
        # a tensor crashes. The error of one made by then() is native.
        future: torch.futures.Future[T] = raw.then(lambda done: done.value())
        with self._lock:
            if not self.is_completed():
                self._futures.append(raw)
                return future
        self._complete(raw)
        return future

    def _wait(self, seconds: float | None) -> bool:
        with self._lock:
            if self._ended:
                return True
            self._waited = done = self._waited or threading.Event()
        return done.wait(seconds)

    def _end(self, value: T | None, error: BaseException | None) -> _Futures:
        """Keep what came of it, for who waits; returns the Futures that are to be completed."""
        with self._lock:
            self._value, self._error, self._ended = value, error, True
            if self._waited is not None:
                self._waited.set()
            futures, self._futures = self._futures, []
        return futures

    def _complete(self, *raw: torch.futures.Future[T]) -> None:
        for future in raw:
            if self._error is None:
                future.set_result(cast(T, self._value))
            else:
                error = self._error  # of which torch takes no KeyboardInterrupt
                known = error if isinstance(error, Exception) else RuntimeError(_text(error))
                future.set_exception(known)  # type: ignore[arg-type]  # torch's stub says T


def _text(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for worker in list(_running):
        worker._leave()
