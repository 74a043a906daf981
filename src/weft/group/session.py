"""The session: what ranks share from when they join until they leave, at one of them.

A `Group` is a view of a session: all of its ranks or some. The session has what there is once: the
wire and the verbs, the control links with their failure detector, the verdict, the worker, the
traffic.

A wire moves the bytes, and says what it saw when it cannot. Control links run beside all wires. A
wait ends with its messages, or with the verdict of the failure detector, which has the deadline and
aborts the wires. Signals are handled during a wait. If a handler raises, as that of Ctrl-C does,
the session breaks, since a message may be half transferred. So it does if a wire raises what none
may raise.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, NoReturn, Protocol, TypeVar

import torch.distributed as dist

from ..base._torch import keep
from ..base.arguments import LONGEST
from ..base.errors import WireError
from ..base.memory import Pool
from ..failure.detector import Detector, Wait
from ..failure.verdict import Place, Verdict, in_the_job, on_leaver
from ..records.calls import call_elsewhere
from ..records.traffic import Traffic
from ..wire import interface
from ..wire.interface import Failure, WireFailed
from .wires import Carrier, Wires, is_of_a_signal, verdict_on, verdict_on_exception
from .worker import Worker

T = TypeVar("T")
Join = Callable[[tuple[int, ...], str, "Session"], "Session"]

_log = logging.getLogger("weft")


class Waited(Wait, Protocol[T]):
    """Messages that are waited for."""

    @property
    def receive(self) -> Callable[[], list[T]]:
        """Waits for them at the wire, or in a library, without a limit."""

    def what(self) -> str:
        """What is waited for, as a clause of an error: "awaited 8 bytes from rank 2"."""


class Session:
    """One rank's end of what ranks have joined. They are numbered from 0, and errors say so, too.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
        timeout: seconds that any one wait may last; `set_timeout` changes it.
        hosts: for each rank the name of its host, see `Group.hosts`.
        name: the same on all ranks; "" if nobody gave it one.
        global_ranks: the ranks, by their numbers in the job.
        process_group: returns the process group of torch's that the session stands for, or None.
        traffic: what was sent so far.
        wire: of tensors of the CPU, and of whatever else ranks tell each other.
        memory: where workspaces are leased from, if not from the wire.
        meetings: the wire of openings, if ranks may meet over it; None: they may not.
        is_by_group: whether the process group carries tensors of the CPU, too, and not the wire.
        detector: of failures, beside the wires; None: there are no peers.
        views: of this session, by their ranks: a `Group` each, while anybody has it.
        states: what is kept from one call to the next, also by ranks: `Group.state`.
        closed: whether this rank has left.
        worker: the one queue in which calls take their turn, on whichever groups of the session.
        line: the session of a second line of calls among these ranks, if there is one: `add_line`.
    """

    def __init__(
        self,
        wire: interface.Wire,
        timeout: float,
        hosts: Sequence[str],
        *,
        detector: Detector | None,
        join: Join,
        global_ranks: Sequence[int],
    ) -> None:
        """
        Args:
            wire: of the CPU; it is closed with the session.
            timeout: seconds that any one wait may last.
            hosts: for each rank the name of its host.
            detector: beside the wires; it is closed with the session. None: there are no peers.
            join: joins some of the ranks, of which this one is one, given these, a name, and the
                session that they are in.
            global_ranks: the ranks, by their numbers in the job.
        """
        self.rank = wire.rank
        self.size = wire.size
        self.timeout = timeout
        self.hosts = tuple(hosts)
        self.name = ""
        self.global_ranks = tuple(global_ranks)
        self.process_group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.traffic = Traffic(wire.rank)
        self.wire = wire
        self.memory = Pool()
        self.meetings = wire if isinstance(wire, interface.Meeting) else None
        self.is_by_group = False
        # weakly: they have the session, which then would not end with the last of them
        self.views: weakref.WeakValueDictionary[tuple[int, ...], Any] = (
            weakref.WeakValueDictionary()
        )
        self.states: dict[tuple[int, ...], dict[str, Any]] = {}
        self.closed = False
        self._broken: Verdict | None = None  # what every use raises; None: nobody has met it yet
        self._join: Join | None = join
        self._splits = 0  # how often `split` was called, equally often on all ranks
        self.line: Session | None = None
        self.worker = Worker(self)
        self._wires = Wires(wire.rank, wire)
        self.detector = detector
        if detector is not None:
            detector.progress = weakref.WeakMethod(self._progress)
            detector.history = self.worker.history
            detector.guard(self._wires.abort, self._wires.find_fault)
        # bye when the session is dropped, and at exit: of multiprocessing's processes, too
        self._leave = Finalize(self, _leave, (detector, wire), exitpriority=0)
        _made.add(self)

    def carry(self, verbs: Carrier) -> None:
        """Have a verdict end what these verbs do, and the session's end close them."""
        self._wires.add(verbs)
        if self.detector is not None and self.detector.verdict is not None:  # it is there already
            self._wires.abort(self.detector.verdict)

    def use(self, doing: str, wire_call: Callable[..., T], *args: Any) -> T:
        """Call `wire_call(*args)` of a wire of this session, which does not wait for peers.

        Args:
            doing: what this rank does, as a clause of an error: "posted messages".
            wire_call, args: the call.

        Raises:
            WireError: the session is broken, or breaks here.
        """
        self.check()
        try:
            return wire_call(*args)
        except BaseException as error:
            self.raise_for(error, doing)

    def wait_for(self, wait: Waited[T]) -> list[T]:
        """Wait for messages, without a limit: at the deadline the detector aborts the wires.

        Raises:
            WireError: the session is broken, or breaks here.
        """
        self.check()
        detector = self.detector
        if detector is None:  # without peers there is nothing to wait for
            return wait.receive()
        try:
            detector.begin(wait)
            # ended by the last message; by an abort, once there is a verdict, which there is at the
            # deadline at the latest; or by the handler of a signal that raises
            return wait.receive()
        except BaseException as error:
            self.raise_for(error, wait.what(), wait)
        finally:
            self.traffic.waited += detector.end()

    def release(self, received: interface.Pending) -> None:
        """Give back what a wire had received.

        Raises:
            WireError: the session breaks here.
        """
        try:
            received.release()
        except Exception as error:
            self.raise_for(error, "released what it had received")

    def set_timeout(self, seconds: float) -> None:
        """Change what any one wait may last, of those that begin from now on."""
        self.timeout = min(seconds, LONGEST)
        if self.detector is not None:
            self.detector.timeout = self.timeout
            self.detector.links.wake()  # it may sleep for as long as waits lasted before
        if self.line is not None:
            self.line.set_timeout(seconds)

    def count_split(self) -> None:
        """Number the split that begins: before its ranks are looked at, which one rank may refuse.

        Raises:
            WireError: this session is broken.
        """
        self.check()
        self._splits += 1

    def split(self, ranks: tuple[int, ...]) -> Session:
        """Join some of the ranks, this one among them, by connections of their own.

        Each of them calls it, with the same distinct ranks, after `count_split`, which all call.

        Raises:
            WireError: somebody did not come in time, or died.
        """
        return self._part(ranks, f"sub{self._splits}:{','.join(map(str, ranks))}")

    def _part(self, ranks: tuple[int, ...], name: str) -> Session:
        """A session of some of the ranks, this one among them; collective among these."""
        assert self._join is not None  # else it is closed
        session = self._join(ranks, name, self)
        session.name = f"{self.name}/{name}"
        session.is_by_group = self.is_by_group
        return session

    def check_on(self, ranks: Sequence[int], absent: Callable[[], Sequence[int]]) -> None:
        """Raise where some of its ranks, which are being joined, are known not to come.

        Args:
            ranks: that are being joined.
            absent: finds those that have not come, by their places in `ranks`.

        Raises:
            WireError: one of them has left, or this session is broken, which refuses them.
        """
        assert self.detector is not None  # since there are peers
        leavers = self.detector.leavers
        if any(rank in leavers for rank in ranks):
            for rank in [ranks[each] for each in absent()]:
                if rank in leavers:
                    self._settle(on_leaver(rank, leavers[rank]))
        self.check()

    def add_line(self) -> None:
        """Join the ranks by a second set of connections, unless they are; every rank calls it.

        It is for calls that come in one order on every rank, and fall between the session's other
        calls as they may: what autograd calls while gradients are reduced. The two sessions break,
        and close, together.

        Raises:
            WireError: this session is broken, or breaks here: somebody did not come in time, or
                died, or the store is gone.
            WeftError: some rank may not open as many files; on every rank, and nothing breaks.
        """
        self.check()
        if self.line is not None or self.detector is None:  # without peers nobody waits
            return
        try:
            line = self._part(tuple(range(self.size)), "line")
        except WireError as error:
            self.check()  # it may be what ended the wait
            numbers = in_the_job(self.global_ranks, error.culprit)  # which `fail` adds
            text = str(error).removeprefix(f"rank {self.rank}: ").removesuffix(numbers)
            raise self.fail(error.culprit, text) from error
        assert line.detector is not None
        self.line = line
        line.set_timeout(self.timeout)  # another thread may have changed it meanwhile
        self._break_with(line.detector)
        line._break_with(self.detector)

    def _break_with(self, other: Detector) -> None:
        """Have what breaks this session break that of another detector, too."""
        assert self.detector is not None
        end_waits = functools.partial(_end_waits, self._wires, other)
        self.detector.guard(end_waits, self._wires.find_fault)

    def close(self) -> None:
        """Leave: tell the peers that this is no death, and let go of everything. Twice is fine."""
        if self.closed:
            return
        self.closed = True
        self._join = None  # it holds the store, whose server ends when nobody does
        try:
            self._leave()
        finally:  # also where a handler of a signal raises meanwhile
            if self.line is not None:
                self.line.close()
        self.worker.stop()  # its calls may use verbs until here
        self._wires.close_verbs()
        self.memory.drain()

    def abort(self, reason: str) -> None:
        """Break the session, telling every peer that this rank did it; waits for nobody."""
        verdict = Verdict(self.rank, f"rank {self.rank} gave up: {reason}")
        if self.detector is not None:
            self.detector.settle(verdict)
        elif not self.closed:
            self._break(verdict)

    def fail(self, peer: int | None, text: str) -> WireError:
        """Break the session for all ranks on account of a peer; the error to raise here.

        Args:
            peer: None: nobody is known to be to blame.
            text: what is wrong, as a clause.
        """
        return self._break(self._settle(Verdict(peer, text)))

    def diagnose(self, where: str) -> WireError | None:
        """The error to raise after a call of another library failed, if a peer is to blame.

        Args:
            where: the call, as the end of the clause "while rank 0 was in ...".
        """
        verdict = None if self.detector is None else self.detector.blame()
        if self._broken is None and verdict is not None:
            self._break(verdict, f" while rank {self.rank} was in {where}")
        return None if self._broken is None else self._broken.error(self.rank)

    def raise_for(
        self, error: BaseException, doing: str, wait: Waited[Any] | None = None
    ) -> NoReturn:
        """Break the session for what a use of a wire raised, and raise what the caller gets.

        That is a WireError with a verdict, but for what the handler of a signal raised, as that of
        Ctrl-C does: it leaves as it is.

        Args:
            error: what was raised, and is handled now.
            doing: what this rank did, as a clause of the error.
            wait: if it waited.
        """
        if is_of_a_signal(error):
            self._interrupted(error)
            raise error
        where = self._while(doing, wait)
        if isinstance(error, WireFailed):
            raise self._break(self._verdict_on(error.failure, wait), where) from None
        raise self._break(self._settle(verdict_on_exception(error, self.rank)), where) from error

    def _while(self, doing: str, wait: Waited[Any] | None) -> str:
        """What this rank did as a wire failed, as the end of an error.

        Raises:
            WireError: it has closed the session itself, which is why the wire failed.
        """
        seconds = 0.0
        lasting = ""
        if wait is not None and self.detector is not None:
            seconds = self.detector.seconds_waited()
            lasting = f" for {seconds:.2f} s"
        text = f" while rank {self.rank} {doing}{lasting}{self._where()}"
        if self.closed:
            raise WireError(f"rank {self.rank}: this group was closed{text}", rank=self.rank)
        if seconds >= self.timeout:
            text += f", past the timeout of {self.timeout:g} s"
        return text

    def _verdict_on(self, failure: Failure, wait: Waited[Any] | None) -> Verdict:
        """The verdict behind a failure of a wire, which this may take a second to find."""
        detector = self.detector
        assert detector is not None  # without peers nothing fails
        if failure.kind == "lost":
            return detector.explain(failure.peer, failure.text, wait)
        verdict = verdict_on(failure, self.rank)
        if failure.circle:
            return detector.explain_circle(failure.circle, verdict)
        return detector.settle(verdict)  # of an abort: there is one already, which counts

    def after_fork(self) -> None:
        """In a forked child, where the session cannot be used, and has no threads."""
        keep(self)
        self.worker.reset()
        with contextlib.ExitStack() as stack:  # also where a close raises
            # what the child kept open would hide the death of this process's parent from peers
            stack.callback(self.wire.close)
            if self.detector is not None:
                stack.callback(self.detector.abandon)  # first

    def check(self) -> None:
        """Raise what broke the session, if anything did.

        Raises:
            WireError: the session is broken or closed.
        """
        if self.closed:
            why = "this group is closed; wait for asynchronous calls before weft.shutdown()"
            raise WireError(f"rank {self.rank}: {why}", rank=self.rank)
        if self._broken is None and self.detector is not None and self.detector.verdict:
            where = f" while rank {self.rank} was{self._where()}" if self._progress().doing else ""
            self._break(self.detector.verdict, where)
        if self._broken is not None:
            raise self._broken.error(self.rank) from None

    def _interrupted(self, error: BaseException) -> None:
        """Break the session: the handler of a signal raised in a use of a wire, as that of Ctrl-C.

        A message may be half moved. Where there are peers, `check` finds the verdict at the
        detector from now on.
        """
        kind = "SIGINT" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        verdict = self._settle(Verdict(self.rank, f"rank {self.rank} was interrupted ({kind})"))
        # the memory of receives is the caller's again, so nothing may write there
        self._wires.abort(verdict)

    def _settle(self, verdict: Verdict) -> Verdict:
        """Tell all ranks what broke the session; the verdict that counts, which is the first."""
        return verdict if self.detector is None else self.detector.settle(verdict)

    def _break(self, verdict: Verdict, where: str = "") -> WireError:
        """Break the session here; the error to raise. `where` is what this rank was doing."""
        self._broken = replace(verdict, text=f"{verdict.text}{where}")
        self._wires.abort(verdict)  # the detector's thread may not have come to that yet
        return self._broken.error(self.rank)

    def _where(self) -> str:
        """The call that runs, as errors spell it."""
        progress = self._progress()
        return f" in {progress.doing} (call {progress.calls})" if progress.doing else ""

    def _progress(self) -> Place:
        """How far this rank is in its program; any thread."""
        worker = self.worker
        return Place(
            worker.calls,
            worker.doing,
            None,
            0.0,
            entered=worker.entered,
            elsewhere="" if worker.doing else self._elsewhere(),
            prepares=worker.prepares,
        )

    def _elsewhere(self) -> str:
        """In which call of another group this process is, as a clause; "": in none."""
        call = call_elsewhere(self.name)
        if call is None:
            return ""
        where = f"in call {call.number} ({call.name}) of" if call.number else "joining"
        return f"{where} group {call.group!r}, and in no call of {self.name!r}"


def _end_waits(wires: Wires, of_other: Detector, verdict: Verdict) -> None:
    """End the waits of one of two sessions that break together, and break the other."""
    if of_other.verdict is None:  # first: wires of the one may abort those of the other
        of_other.settle(verdict, is_told=True)
    wires.abort(verdict)


def _leave(detector: Detector | None, wire: interface.Wire) -> None:
    """Say bye to all and let go of the wire."""
    with contextlib.ExitStack() as stack:  # also where a handler of a signal raises meanwhile
        stack.callback(wire.close)
        if detector is not None:
            stack.callback(detector.close)  # first


_made: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    for session in list(_made):
        session.after_fork()


os.register_at_fork(after_in_child=_after_fork)
