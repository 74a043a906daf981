"""The worker: one queue for each session, in which calls take their turn.

Calls must reach a group in the same order on every rank. A synchronous call runs in the caller's
own thread when nothing is queued (no hop, no wake-up); an asynchronous one runs on the worker's
thread, and a synchronous one behind it waits for its turn.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from ..base._torch import profiled, profiled_until, without_modes, without_transforms
from ..base.arguments import in_words, limit_of_wait
from ..base.errors import Error, StillRunning, WeftError, WireError, entry
from ..base.latch import LOOK, Latch, deadline_of
from ..base.pace import patient
from ..failure.verdict import REMEMBERED, Entered
from ..records import listeners
from ..records.calls import CallStats
from ..records.traffic import Traffic
from .callbacks import Callbacks
from .server import Server
from .turns import Turn, Turns

T = TypeVar("T")

_GRACE = 1.0  # seconds that calls get to finish at exit, or where the group is broken
_LAST = 1.0  # seconds in which they end after the group was aborted
_SOON = 1e-4  # seconds in which a thread makes a few operations

_log = logging.getLogger("weft")


class Member(Protocol):
    """What a worker knows of whom it works for: a session, as one of its ranks has it.

    Attributes:
        rank: this rank's number.
        name: of the group, for records.
        timeout: seconds that any one wait may last.
        traffic: what this rank sent.
        closed: whether this rank has left.
    """

    rank: int
    name: str
    timeout: float
    traffic: Traffic
    closed: bool

    def check(self) -> None:
        """Raise what broke the group, if anything did."""

    def abort(self, reason: str) -> None:
        """Break the group for all ranks, on account of this one."""


class StreamJob(Protocol):
    """A job that works in a stream of its own: `weft.base.devices.Aside`, which describes it."""

    accelerators: list[int | str | torch.device]

    def claim_thread(self) -> None: ...

    def joined(self, result: Any) -> Any: ...

    def apart(self) -> contextlib.AbstractContextManager[object]: ...


class Worker:
    """The calls of one rank on one group, one at a time, in the order they were made.

    Each call is a range of the profiler: a synchronous one from its turn to its end, an
    asynchronous one from where it is made to its end.

    A job leaves the group as it is if it raises a WireError, the conclusion of all ranks, or a
    WeftError before it has met the others; if SystemExit or KeyboardInterrupt in a caller's
    function is its cause, that is raised in its place. Any other exception, KeyboardInterrupt
    included, means that this rank will not finish a schedule that others are in: the group is
    aborted, so that they raise instead of waiting, and the exception goes on.

    Attributes:
        calls: how many calls were started.
        made: how many calls were started or queued.
        doing: the name of the call that runs, "" between calls.
        now: the record of that call, or None.
        prepares: the name of a call whose arguments are looked at, or "".
        entered: the same call, once this rank has come to it: see `enter`; any thread reads it.
        history: the last calls that this rank has come to; any thread copies it.

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
        """`member` is not kept alive: it is what has this worker."""
        self.rank = member.rank
        self._member = weakref.ref(member)
        self.calls = 0
        self.made = 0
        self.doing = ""
        self.prepares = ""
        self.now: CallStats | None = None
        self.entered: Entered | None = None
        self.history: deque[Entered] = deque(maxlen=REMEMBERED)
        self._counts: dict[tuple[int, ...], int] = {}  # calls entered, by the ranks they are of
        self._stopped = False
        self._lost = False  # a call raised a WireError: the group is broken
        self._is_break_known = False  # and its caller has had that, or has no need to
        # the calls that raised; no WeakSet, which cannot be read while another thread adds
        self._failed: set[weakref.ref[Work[Any]]] = set()
        self.reset()

    def reset(self) -> None:
        """Begin with an empty queue and no threads: also in a forked child, where no thread would
        serve the calls under way."""
        self._turns = Turns()
        self._several = False  # whether the job that runs may make calls itself
        self._jobs = Server(f"weft worker {self.rank}")
        # a callback that waits for another call must not block the thread that runs the calls
        self._callbacks = Callbacks(f"weft callbacks {self.rank}")
        for each in (self._jobs, self._callbacks):
            weakref.finalize(self, each.end, 0.0).atexit = False

    def member(self) -> Member:
        """Whom this works for.

        Raises:
            WeftError: its session is gone.
        """
        member = self._member()
        if member is None:
            raise WeftError(f"rank {self.rank}: this group is gone: keep it while it has calls")
        return member

    @without_transforms
    @without_modes
    def call(self, name: str, job: Callable[[], T]) -> T:
        """Run `job` in this thread, once all calls made before it are done; return its result.

        Raises:
            WeftError: made from inside another call on this group, or after `stop()`.
            Exception: whatever the job raises.
        """
        member = self.member()
        if self._several and self.inside():
            with profiled(name):
                return self._do(member, name, job)
        self._check_outside(name)
        self._check_open(name)
        turn = Turn(name, sys._getframe())
        try:
            try:
                self.made += 1
                self._turns.join(turn)
                self._turns.wait_for(turn, member.check)
                with profiled(name):
                    return self._do(member, name, job)
            finally:
                self._turns.leave(turn)
        except Error as error:
            self._note(error)
            of_caller = _of_caller(error)
            if of_caller is None:
                raise
        except BaseException as error:
            self._turns.leave(turn)  # again: the leaving may be what was interrupted
            member.abort(in_words(error))
            raise
        # The others have the error, of which this is the cause. Raised where that is handled, this
        # would have the error as its context: a cycle, which would keep the group.
        try:
            raise of_caller
        finally:
            del of_caller

    def run(self, name: str, job: Callable[[], T]) -> T:
        """`call`, or, where this thread has the turn of one that makes no calls, a part of that."""
        if self.inside() and not self._several:
            return job()
        return self.call(name, job)

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
        if call is None or call.has_met:
            return False
        number = self._counts.get(ranks, 0) + 1
        self._counts[ranks] = number
        call.has_met = True
        self.entered = Entered(members, number, fields[0][1])
        self.history.append(self.entered)
        return True

    def submit(self, name: str, job: Callable[[], T], *, several: bool = False) -> Work[T]:
        """Queue `job` for the worker's thread, with this thread's context and gradient mode.

        It starts once this has returned. An interrupt in here breaks the group, and it never does.

        Args:
            name: of the call.
            job: what it does; `Work.result` joins the stream of a `StreamJob`.
            several: whether the job makes calls on this group itself, within its own turn. Before
                them it must not meet the others for the call that it is itself (`enter`): a rank
                that is in a call inside it would be taken for one that is past the call around it
                (`failure.verdict`).

        Raises:
            WeftError: made from inside another call on this group, or after `stop()`.
            RuntimeError: there is no thread more for this process, which breaks the group.
        """
        member = self.member()
        self._check_outside(name)
        self._check_open(name)
        _running[self] = None
        context = contextvars.copy_context()
        grad = torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled()

        def as_here() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return context.run(job)

        as_call = functools.partial(self._do, member, name, as_here, several)
        in_stream = cast(StreamJob, job) if hasattr(job, "claim_thread") else None
        work = Work(self, name, as_call, in_stream)
        turn = Turn(name, sys._getframe(), work)
        try:
            self.made += 1
            self._turns.join(turn)
            self._jobs.start()
            self._jobs.put(self._serve)
            self._check_open(name)  # a `stop` meanwhile may not wait for it
        except BaseException as error:
            self._turns.leave(turn)
            work._end_range()
            if not isinstance(error, Error):
                member.abort(f"{name} could not be queued ({in_words(error)})")
            raise
        turn.thread = None  # last, and by no call, after which an interrupt might come
        return work

    def stop(self, grace: float | None = None) -> None:
        """Refuse new calls, wait for the calls that were made, and end the threads.

        If the group is closed before, those calls raise, and nothing is waited for.

        Args:
            grace: seconds to wait before the group is aborted; None: no limit, unless a call raised
                a WireError.
        """
        if self._lost:
            grace = patient(_GRACE)
        self._tell_of_lost()  # before: what calls raise because the group ends is no news
        self._is_break_known = True
        self._stopped = True
        member = self._member()
        if not self._jobs.end(grace):
            if member is not None:
                member.abort(f"its process ends while {self.doing or 'a call'} runs")
            self._jobs.end(_LAST)
        # a user's callback may take any time
        self._callbacks.end(grace or (_LAST if member is None else member.timeout))
        self._tell_of_lost()
        _running.pop(self, None)

    def _tell_of_lost(self) -> None:
        """Have the log say what calls have raised that nobody has waited for."""
        for reference in self._failed.copy():
            work = reference()
            if work is not None and work._error is not None:
                work._tell_if_lost(work._error)

    def _note(self, error: BaseException | None) -> None:
        """Note what a caller is told: of a broken group once is enough."""
        if isinstance(error, WireError):
            self._is_break_known = True

    def inside(self) -> str:
        """The name of the call on this group that this thread is in; "": it is in none."""
        turn = self._turns.of_this_thread()
        return "" if turn is None else self.doing or turn.name

    def is_in_background(self) -> bool:
        """Whether this thread is weft's own, in an asynchronous call."""
        turn = self._turns.of_this_thread()
        return turn is not None and turn.work is not None

    def _check_outside(self, name: str) -> None:
        """Raise WeftError if this thread is in a call of the group."""
        outer = self.inside()
        if outer:
            raise WeftError(
                f"rank {self.rank}: {name} was called from inside {outer}, which still has "
                "the group: call it afterwards, or on another group"
            )

    def _check_open(self, name: str) -> None:
        """Raise WeftError if the group was closed."""
        if self._stopped:
            raise WeftError(f"rank {self.rank}: {name} was called after the group was closed")

    def _do(
        self,
        member: Member,
        name: str,
        job: Callable[[], T],
        several: bool = False,
    ) -> T:
        """Run a job in this thread's turn, and record it as a call.

        Args:
            member: whom it is for.
            name: of the call.
            job: to run.
            several: whether it may make calls itself.
        """
        around = self.doing, self._several, self.now, self.entered  # of the call that it is part of
        call = CallStats(name, member.name, member.rank, self.calls + 1, member.traffic)
        try:
            self.calls += 1
            self.doing = name
            self._several = several
            self.now = call
            self.entered = None
            result = job()
            call.end()
            return result
        except BaseException as error:
            call.end(in_words(error))
            if isinstance(error, WireError):
                self._lost = True
            elif _is_of_one_rank(error, call):
                member.abort(call.error)
            raise
        finally:
            self.doing, self._several, self.now, self.entered = around
            if not self.doing:  # else there is a call around it
                listeners.tell_all(call)

    def _serve(self) -> None:
        """On the thread of jobs: run the first of those in the queue, when its turn comes."""
        turn = self._turns.first_queued()
        if turn is None:  # the caller of one was interrupted
            return
        work: Work[Any] = turn.work
        try:
            self._turns.wait_for(turn, self.member().check)
            if self._is_submitted(turn):
                turn.frame = sys._getframe()
                turn.thread = threading.get_ident()
                if work._aside is not None:
                    work._aside.claim_thread()
                work._value = work._take_job()()
        except BaseException as error:  # kept for whoever waits
            of_caller = _of_caller(error)
            work._error = error if of_caller is None else of_caller
        finally:
            self._turns.leave(turn)
        work._end()
        del turn, work  # the traceback of the error has this frame, and would keep them alive

    def _is_submitted(self, turn: Turn) -> bool:
        """Wait until the call of `submit` that made a turn is over; whether it ended well."""
        while turn.thread is not None and not turn.is_over:
            if not turn.is_alive():
                self._turns.leave(turn)
            time.sleep(_SOON)  # it has a few operations left, and no call that could say so
        return not turn.is_over


class Work(Generic[T]):
    """An asynchronous call under way, with the face of `torch.distributed.Work`.

    If it fails, and nobody has asked what came of it when it is collected or its group is closed,
    the log says so. Of a broken group it says nothing where another call has raised that, nor of
    what a call raises because the group is closed.
    """

    _error: BaseException | None = None  # what the job raised
    _is_told = False  # somebody has had that, or has no need to

    def __init__(
        self, worker: Worker, name: str, job: Callable[[], T], aside: StreamJob | None
    ) -> None:
        """
        Args:
            worker: that runs it.
            name: of the call.
            job: what is to be run.
            aside: what that runs, if it is in a stream of its own.
        """
        self._worker = worker
        self._jobs = worker._jobs  # which have it in their queue; a forked child has others
        self._name = name
        self._aside = aside
        self._job: Callable[[], T] | None = job  # what is to be run; None: it runs, or has run
        self._value: T | None = None  # what it returned
        self._ended = Latch()
        self._at_end: deque[Callable[[], object]] = deque()  # to call once it has ended
        self._end_range = profiled_until(name)

    def __repr__(self) -> str:
        if not self.is_completed():
            state = "under way"
        elif self._error is None:
            state = "done"
        else:
            state = f"failed: {in_words(self._error)}"
        return f"<Work {self._name}: {state}>"

    def __del__(self) -> None:
        if self._error is not None:
            self._tell_if_lost(self._error)

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_open

    @entry
    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Wait until the call has ended and return its result.

        Args:
            timeout: seconds, or a timedelta; 0 only looks. None waits as long as the group's own
                deadlines allow.

        Raises:
            StillRunning: `timeout` passed first. Nothing is broken: wait again.
            WeftError: called from inside a call on the same group, which this one waits for; or
                `timeout` is no number of seconds. Nothing is broken.
            Exception: whatever the call raised.
        """
        seconds = limit_of_wait(timeout)
        if not self.is_completed():
            worker = self._worker
            outer = worker.inside()
            if outer:
                raise WeftError(
                    f"rank {worker.rank}: {self._name} waits for its turn behind {outer}, which "
                    "waits for it: wait outside"
                )
            self._check_process()
            if not self._ends_within(seconds):
                raise StillRunning(
                    f"rank {worker.rank}: {self._name} is still under way after {seconds} "
                    "s: wait again, or longer"
                )
        return self.result()

    def _check_process(self) -> None:
        """Raise WeftError in a forked child, where a call that was under way never ends."""
        if self._jobs is not self._worker._jobs and not self.is_completed():
            raise WeftError(
                f"rank {self._worker.rank}: {self._name} was under way when this process was "
                "forked: wait for it in the parent"
            )

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
        error = self.exception()
        if error is not None:
            try:
                raise error
            finally:
                del self, error  # whose traceback has this frame
        result = cast(T, self._value)
        if self._aside is None:
            return result
        member = self._worker._member()
        if self._aside.accelerators and member is not None and not member.closed:
            member.check()
        return cast(T, self._aside.joined(result))

    def exception(self) -> BaseException | None:
        """What the call raised, or None: it has not ended, or it ended well."""
        if not self.is_completed():
            return None
        self._is_told = True
        self._worker._note(self._error)
        return self._error

    def get_future(self) -> torch.futures.Future[T]:
        """A Future of the result, for C++ to read and to chain callbacks on.

        If the call raises, `wait()` of the Future raises a RuntimeError with that text; to get
        the exception itself, wait for the Work.

        Raises:
            WeftError: this process was forked from the one that made the call.
            RuntimeError: there is no thread more for this process, which breaks the group.
        """
        self._check_process()
        # where it has devices, its value is joined by the streams of who reads it
        devices = [] if self._aside is None else self._aside.accelerators
        raw: torch.futures.Future[T] = torch.futures.Future(devices=devices)
        errors: list[BaseException] = []

        def value(done: torch.futures.Future[T]) -> T:
            # No exception is set in `done`. C++ would hold it, as a value, which crashes who reads
            # it as a tensor, and its traceback would hold `done`: a cycle that nobody collects.
            if errors:
                raise RuntimeError(in_words(errors[0]))
            return done.value()

        future: torch.futures.Future[T] = raw.then(value)
        callbacks = self._worker._callbacks
        try:
            callbacks.prepare()
        except RuntimeError as error:
            member = self._worker._member()
            if member is not None:  # others go on with what this rank was going to do with it
                member.abort(f"{self._name} can have no Future ({in_words(error)})")
            raise
        self._is_told = True  # the Future has it, as soon as that thread comes to it
        self._at_end.append(lambda: callbacks.run(lambda: _complete(raw, self, errors)))
        if self.is_completed():
            self._call_back()
        return future

    def _ends_within(self, seconds: float | None) -> bool:
        """Wait until it has ended; False: it has not, after so many seconds.

        Raises:
            WireError: it still waits for its turn, and the group is broken, so that may never come.
        """
        until = deadline_of(seconds)
        while not self._ended.wait(max(0.0, min(LOOK, until - time.monotonic()))):
            if time.monotonic() >= until:
                return False
            member = self._worker._member()
            if self._job is not None and member is not None:
                member.check()
        return True

    def _end(self) -> None:
        """Let those go on that wait, once there is a value or an error."""
        self._end_range()
        if self._error is not None:
            failed = self._worker._failed
            failed.add(weakref.ref(self, failed.discard))
        self._ended.open()
        self._call_back()

    def _take_job(self) -> Callable[[], T]:
        """What is to be run, which holds what is the caller's."""
        job = self._job
        self._job = None
        assert job is not None
        return job

    def _call_back(self) -> None:
        """Call what is to be called at the end, each once: more than one thread may come here."""
        while self._at_end:
            with contextlib.suppress(IndexError):
                self._at_end.popleft()()

    def _tell_if_lost(self, error: BaseException) -> None:
        """Have the log say what this has raised, if nobody has been told."""
        worker = self._worker
        if self._is_told or (isinstance(error, WireError) and worker._is_break_known):
            return
        self._is_told = True
        worker._note(error)
        _log.warning(
            "rank %d: %s failed, and nobody waited for it: %s",
            worker.rank,
            self._name,
            in_words(error),
            exc_info=None if isinstance(error, Error) else error,
        )


def _is_of_one_rank(error: BaseException, call: CallStats) -> bool:
    """Whether the others do not know of what this rank has raised in a call, and wait for it."""
    if isinstance(error, WeftError):
        return call.has_met and not error.is_conclusion
    return True


def _of_caller(error: BaseException) -> BaseException | None:
    """What the caller of a job gets in place of an error, or None: he gets the error.

    It is what he has raised himself and is no Exception, as SystemExit is.
    """
    cause = error.__cause__
    is_of_caller = isinstance(error, Error) and not isinstance(cause, Exception)
    return cause if is_of_caller else None


def _complete(raw: torch.futures.Future[T], work: Work[T], errors: list[BaseException]) -> None:
    """Give a Future of torch's what came of a call: its value, or one of `errors` and None."""
    error = work.exception()
    if error is None:
        try:
            if work._aside is not None:
                work._aside.claim_thread()
            # the event that a Future with devices keeps for its readers is one of this stream's
            with contextlib.nullcontext() if work._aside is None else work._aside.apart():
                raw.set_result(work.result())
            return
        except Exception as broken:  # the group, since the call has ended, or the device
            if raw.done():  # what was chained to it has raised
                raise
            error = broken
    errors.append(error)
    raw.set_result(None)  # type: ignore[arg-type]  # torch's stub says T


# those that may have threads; no WeakSet, which cannot be read while another thread adds
_running: weakref.WeakKeyDictionary[Worker, None] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    for reference in _running.keyrefs():  # before the interpreter ends under their threads
        worker = reference()
        if worker is not None:
            worker.stop(patient(_GRACE))
