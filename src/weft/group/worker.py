"""The worker: one queue for each session, in which calls take their turn.

Calls must reach a group in the same order on every rank. A synchronous call runs in the caller's
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
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import torch

from .._torch import profiled, profiled_until, without_modes, without_transforms
from ..devices import Aside
from ..errors import Error, StillRunning, WeftError, WireError, entry
from . import listeners, recorder
from .failure.verdict import REMEMBERED, Entered
from .traffic import Traffic

T = TypeVar("T")

_GRACE = 1.0  # seconds that calls get to finish at exit, or where the group is broken
_LAST = 1.0  # seconds in which they end after the group was aborted


class Member(Protocol):
    """What a worker knows of whom it works for: a session, as one of its ranks has it.

    Attributes:
        rank: this rank's number.
        name: of the group, for records.
        timeout: seconds that any one wait may last.
        traffic: what this rank sent.
        streaming: whether a stream waits for messages of the call that runs, and the host does not.
        closed: whether this rank has left.
    """

    rank: int
    name: str
    timeout: float
    traffic: Traffic
    streaming: bool
    closed: bool

    def check(self) -> None:
        """Raise what broke the group, if anything did."""

    def abort(self, reason: str) -> None:
        """Break the group for all ranks, on account of this one."""

    def note_calls(self, history: tuple[Entered, ...]) -> None:
        """Note the last calls that this rank has come to: others are told, also as it leaves."""


class Worker:
    """The calls of one rank on one group, one at a time, in the order they were made.

    Each call is a range of the profiler: a synchronous one from its turn to its end, an
    asynchronous one from where it is made to its end.

    A job that raises a `weft.Error` leaves the group as it is; if SystemExit or KeyboardInterrupt
    in a caller's function is its cause, that is raised in its place. Any other exception,
    KeyboardInterrupt included, means that this rank will not finish a schedule that others are in:
    the group is aborted, so that they raise instead of waiting, and the exception goes on.

    Attributes:
        calls: how many calls were started.
        made: how many calls were started or queued.
        doing: the name of the call that runs, "" between calls.
        now: the record of that call, or None.
        entered: the same call, once this rank has come to it: see `enter`; any thread reads it.
        history: the last calls that this rank has come to.
        lock: held while a call joins the line or leaves it; a process may fork meanwhile.

    Example:
        >>> from weft.testing import threads
        >>> group = threads.group(1)[0]
        >>> group.worker.call("add", lambda: 1 + 1)
        2
        >>> work = group.worker.submit("add", lambda: 2 + 2)
        >>> work.wait()
        4
        >>> group.close()
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self.calls = 0
        self.made = 0
        self.doing = ""
        self.now: recorder.Call | None = None
        self.entered: Entered | None = None
        self.history: tuple[Entered, ...] = ()
        self._counts: dict[tuple[int, ...], int] = {}  # calls entered, by the ranks they are of
        self._stopped = False
        self._forked = False  # this is a child, and calls were perhaps under way in its parent
        self._lost = False  # a call raised a WireError: the group is broken
        self._begin()

    def _begin(self) -> None:
        """Begin with an empty line and no threads."""
        self.lock = threading.Lock()
        self._turns = threading.Condition(self.lock)
        self._line: deque[object] = deque()  # the calls in order; the first one has the group
        self._owner: int | None = None  # the thread that runs a job
        self._several = False  # whether that job may make calls itself
        self._jobs = _Server(f"weft worker {self._member.rank}")
        # a callback that waits for another call must not block the thread that runs the calls
        self._callbacks = _Server(f"weft callbacks {self._member.rank}")

    @without_transforms
    @without_modes
    def call(self, name: str, job: Callable[[], T]) -> T:
        """Run `job` in this thread, once all calls made before it are done; return its result.

        Raises:
            WeftError: made from inside another call on this group, or after `stop()`.
            Exception: whatever the job raises.
        """
        if self._several and self._owner == threading.get_ident():
            with profiled(name):
                return self._do(name, job)
        with self.lock:  # which takes less than the condition itself
            turn = self._draw(name)
            try:
                # without a deadline: a call before this one ends by the deadlines of its own waits
                while self._line[0] is not turn:
                    self._turns.wait()
            except BaseException as error:
                self._line.remove(turn)
                self._turns.notify_all()
                self._member.abort(_text(error))
                raise
        with profiled(name):
            return self._run(turn, name, job)

    def enter(
        self, ranks: tuple[int, ...], members: str, fields: tuple[tuple[str, str], ...]
    ) -> bool:
        """Note that this rank has come to the call that runs, where it meets the others.

        What a call does before, as what it does on its way out, needs no other rank. A call that is
        made inside another one is noted by itself, as is the first of several meetings of a call.

        Args:
            ranks: of the call, by their numbers in the job.
            members: the same ranks in words, `Group.members`.
            fields: the values that they compare, by name; the first is the name of the call.

        Returns:
            Whether this is the first meeting of the call that runs.
        """
        call = self.now
        if call is None or call.agreed:
            return False
        number = self._counts.get(ranks, 0) + 1
        self._counts[ranks] = number
        call.agreed = number
        call.ranks = ranks
        call.fields = fields
        self.entered = Entered(members, number, fields[0][1])
        self.history = (*self.history[1 - REMEMBERED :], self.entered)
        self._member.note_calls(self.history)
        return True

    def submit(
        self, name: str, job: Callable[[], T] | Aside[T], *, several: bool = False
    ) -> Work[T]:
        """Queue `job` for the worker's thread, with this thread's context and gradient mode.

        Args:
            name: of the call.
            job: what it does; `Work.result` joins the stream of an `Aside`.
            several: whether the job makes calls on this group itself, within its own turn. Before
                them it must not meet the others for the call that it is itself (`enter`): a rank
                that is in a call inside it would be taken for one that is past the call around it
                (`failure.verdict`).

        Raises:
            WeftError: made from inside another call on this group, or after `stop()`.
        """
        work: Work[T] = Work(self, name, job if isinstance(job, Aside) else None)
        context = contextvars.copy_context()
        grad = torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled()

        def as_here() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return context.run(job)

        with self.lock:
            turn = self._draw(name)
            work._end_range = profiled_until(name)
            try:
                self._jobs.put(functools.partial(self._serve, turn, as_here, several, work))
            except RuntimeError:  # there is no thread more for this process
                self._line.remove(turn)
                raise
            _running.add(self)
        return work

    def stop(self, grace: float | None = None) -> None:
        """Refuse new calls, wait for the calls that were made, and end the threads.

        If the group is closed before, those calls raise, and nothing is waited for.

        Args:
            grace: seconds to wait before the group is aborted; None: no limit, unless a call raised
                a WireError.
        """
        if self._lost:
            grace = _GRACE
        with self.lock:
            self._stopped = True
        if not self._jobs.end(grace):
            self._member.abort(f"its process ends while {self.doing or 'a call'} runs")
            self._jobs.end(_LAST)
        self._callbacks.end(grace or self._member.timeout)  # a user's callback may take any time
        _running.discard(self)

    def _draw(self, name: str) -> object:
        """A place in the line for the next call; with the lock held.

        Who draws it has to see to it that it leaves the line: every later call waits for that.
        """
        rank = self._member.rank
        if self._owner == threading.get_ident():
            raise WeftError(
                f"rank {rank}: {name} was called from inside {self.doing}, which still has "
                "the group: call it afterwards, or on another group"
            )
        if self._stopped:
            raise WeftError(f"rank {rank}: {name} was called after the group was closed")
        self.made += 1
        self._line.append(turn := object())
        return turn

    def _run(self, turn: object, name: str, job: Callable[[], T], several: bool = False) -> T:
        """Run a job whose turn it is, then let the next call have its turn."""
        try:
            self._owner = threading.get_ident()
            return self._do(name, job, several)
        except Error as error:
            self._lost = self._lost or isinstance(error, WireError)
            if error.__cause__ is None or isinstance(error.__cause__, Exception):
                raise
            raise error.__cause__ from None  # the others have the error
        finally:
            with self.lock:
                self._owner = None
                if self._line and self._line[0] is turn:  # not in a child that the job forked
                    self._line.popleft()
                if self._line:
                    self._turns.notify_all()

    def _do(self, name: str, job: Callable[[], T], several: bool = False) -> T:
        """Run a job in this thread's turn, and record it as a call."""
        member = self._member
        # of the call that this one is a part of
        outer = (self.doing, self._several, self.now, self.entered)
        call = recorder.Call(member.name, self.calls + 1, name, member.traffic)
        try:
            self.calls += 1
            self.doing = name
            self._several = several
            self.now = call
            self.entered = None
            result = self._sound(job)
            call.close()
            return result
        except BaseException as error:
            call.close(_text(error))
            if not isinstance(error, Error):
                member.abort(call.error)
            elif isinstance(error, WireError):
                recorder.write(call.error)
            raise
        finally:
            self.doing, self._several, self.now, self.entered = outer
            if not self.doing:  # else it is a part of the call around it
                member.streaming = False
                listeners.tell_all(call, member.rank)

    def _sound(self, job: Callable[[], T]) -> T:
        """What a job returns, unless the group broke while a stream waited for messages.

        That stream was not stopped. It went on with whatever the memory held, and so did the job,
        if it read numbers there.
        """
        member = self._member
        try:
            result = job()
        except Exception as error:
            if member.streaming and not isinstance(error, Error):
                member.check()
            raise
        if member.streaming:
            member.check()
        return result

    def _serve(self, turn: object, job: Callable[[], T], several: bool, work: Work[T]) -> None:
        """On the thread of jobs: run one when its turn comes."""
        with self.lock:
            # without a deadline: a call before this one ends by the deadlines of its own waits
            while self._line[0] is not turn:
                self._turns.wait()
        if work._aside is not None:
            work._aside.claim_thread()
        try:
            value = self._run(turn, work._name, job, several)
        except BaseException as error:  # kept for whoever waits
            work._end_range()
            work._done.set_exception(error)
        else:
            work._end_range()
            work._done.set_result(value)

    def after_fork(self) -> None:
        """In a forked child, which has no thread that would serve the calls under way."""
        self._forked = True
        self._begin()  # the lock may have been held


class _Server:
    """A daemon thread that runs functions in order; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = False
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, do: Callable[[], object]) -> None:
        """Queue a function; if the thread has ended, run it here."""
        with self._lock:
            if not self._ended:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
                self._queue.put(do)
                return
        do()

    def _run(self) -> None:
        while (do := self._queue.get()) is not None:
            do()
            del do  # what it holds is the caller's, not this idle thread's

    def end(self, seconds: float | None = None) -> bool:
        """End the thread once the queue is empty; False if that took more than these seconds."""
        with self._lock:
            self._ended = True
            thread = self._thread
        self._queue.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(seconds)
        return not thread.is_alive()


class Work(Generic[T]):
    """An asynchronous call under way, with the face of `torch.distributed.Work`."""

    def __init__(self, worker: Worker, name: str, aside: Aside[T] | None = None) -> None:
        """`aside` is the job, where it runs in a stream of its own."""
        self._worker = worker
        self._name = name
        self._aside = aside
        self._done: Future[T] = Future()
        self._end_range: Callable[[], None] = lambda: None  # of the profiler

    def __repr__(self) -> str:
        if not self.is_completed():
            state = "under way"
        elif (error := self.exception()) is None:
            state = "done"
        else:
            state = f"failed: {_text(error)}"
        return f"<Work {self._name}: {state}>"

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.done()

    @entry
    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Wait until the call has ended and return its result.

        Args:
            timeout: seconds, or a timedelta; None waits as long as the group's own deadlines allow.

        Raises:
            StillRunning: `timeout` passed first. Nothing is broken: wait again.
            WeftError: called from inside a call on the same group, which this one waits for.
            Exception: whatever the call raised.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self.is_completed():
            worker = self._worker
            if worker._owner == threading.get_ident():
                raise WeftError(
                    f"rank {worker._member.rank}: {self._name} waits for its turn behind "
                    f"{worker.doing}, which waits for it: wait outside"
                )
            if worker._forked:
                raise WeftError(
                    f"rank {worker._member.rank}: {self._name} was under way when this process was "
                    "forked: wait for it in the parent"
                )
            try:
                self._done.exception(seconds)
            except TimeoutError:
                raise StillRunning(
                    f"rank {worker._member.rank}: {self._name} is still under way after {seconds} "
                    "s: wait again, or longer"
                ) from None
        return self.result()

    @entry
    def result(self) -> T:
        """The result of a call that has ended.

        Raises:
            WeftError: it has not ended.
            WireError: the result is on an accelerator, and the group has broken since, when a
                stream may still have waited for messages: it may be garbage.
            Exception: whatever the call raised.
        """
        if not self.is_completed():
            raise WeftError(f"{self._name} is still under way: wait() for it first")
        result = self._done.result()
        if self._aside is None:
            return result
        member = self._worker._member
        if self._aside.accelerators and not member.closed:
            member.check()
        return self._aside.joined(result)

    def exception(self) -> BaseException | None:
        """What the call raised, or None: it has not ended, or it ended well."""
        return self._done.exception() if self.is_completed() else None

    def get_future(self) -> torch.futures.Future[T]:
        """A Future of the result, for C++ to read and to chain callbacks on.

        If the call raises, `wait()` of the Future raises a RuntimeError with that text; to get
        the exception itself, wait for the Work.

        Raises:
            RuntimeError: there is no thread more for this process, to complete it.
        """
        # where it has devices, its value is joined by the streams of who reads it
        devices = [] if self._aside is None else self._aside.accelerators
        raw: torch.futures.Future[T] = torch.futures.Future(devices=devices)
        # A Future in which Python set an exception holds it as a value, and C++ that reads it as
        # a tensor crashes. The error of one made by then() is native.
        future: torch.futures.Future[T] = raw.then(lambda done: done.value())
        callbacks = self._worker._callbacks
        callbacks.put(lambda: None)  # its thread starts here: where it fails later, nobody is told
        self._done.add_done_callback(lambda done: callbacks.put(lambda: _complete(raw, self)))
        return future


def _complete(raw: torch.futures.Future[T], work: Work[T]) -> None:
    """Give a Future of torch's what came of a call."""
    error = work.exception()
    if error is None:
        if work._aside is not None:
            work._aside.claim_thread()
        # the event that a Future with devices keeps for its readers is one of this stream's
        with nullcontext() if work._aside is None else work._aside.apart():
            try:
                raw.set_result(work.result())
            except WireError as broken:  # the group, since the call has ended
                error = broken
    if error is not None:  # torch takes no KeyboardInterrupt
        known = error if isinstance(error, Exception) else RuntimeError(_text(error))
        raw.set_exception(known)  # type: ignore[arg-type]  # torch's stub says T


def _text(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_running: weakref.WeakSet[Worker] = weakref.WeakSet()  # those that may have threads


@atexit.register
def _stop_all() -> None:
    for worker in list(_running):  # before the interpreter ends under their threads
        worker.stop(_GRACE)
