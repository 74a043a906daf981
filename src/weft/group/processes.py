"""The group of ranks that are processes: posts, waits, and what they raise, over any wire.

A `wire.interface.Wire` moves the bytes, and says what it saw when it cannot; control links run
beside it. A wait ends with its messages, or with the verdict of the failure detector, which has the
deadline and aborts the wire. Signals are handled during a wait. If a handler raises, as that of
Ctrl-C does, the group breaks, since a message may be half transferred.
"""

from __future__ import annotations

import abc
import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..errors import WireError
from ..wire import interface
from ..wire.interface import Failure, WireFailed
from ..wire.machine import host_name
from ..wire.memory import Pool
from .failure.detector import Detector
from .failure.verdict import Verdict
from .group import Group, Pending, Recv, Send, chosen

T = TypeVar("T")


class ProcessWire(Group):
    """One rank's end of the group that `process_group.connect` makes.

    Tensors of every dtype and zero-byte messages travel as they are.

    Attributes:
        wire: what carries tensors of the CPU.
    """

    def __init__(
        self,
        timeout: float,
        wire: interface.Wire,
        detector: Detector | None,
        memory: Pool,
        part: Callable[[tuple[int, ...], str], Group],
        host: str | None = None,
    ) -> None:
        """
        Args:
            timeout: seconds that any one wait may last.
            wire: of the same ranks; the group closes it.
            detector: beside the wire; the group closes it. None: there are no peers.
            memory: where workspaces are leased from, if not from the wire.
            part: makes the group of some ranks, of which this one is one, given these and a name.
            host: the name of this rank's machine; None: that of the machine it runs on.
        """
        super().__init__(wire.rank, wire.size, timeout, host or host_name())
        self.memory = memory
        self.wire = wire
        self.features = wire.features
        self._part: Callable[[tuple[int, ...], str], Group] | None = part
        self._parts_made = 0
        self.closed = False
        self._broken: Verdict | None = None  # what every use raises
        self._detector = detector
        if detector is not None:
            detector.call = weakref.WeakMethod(self._call)
        # bye when the group is dropped, and at exit: of multiprocessing's processes, too
        self._leave = Finalize(self, _leave, (detector, wire), exitpriority=0)

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> Pending:
        self.check_peers(sends, recvs)
        pending = self.use("posted messages", self.wire.post, sends, recvs, channel)
        self.traffic.count(sends)
        return Exchange(self, pending, sends, recvs)

    def use(self, doing: str, wire_call: Callable[..., T], *args: Any) -> T:
        """Call `wire_call(*args)` of a wire of this group, which does not wait for peers.

        Args:
            doing: what this rank does, as a clause of an error: "posted messages".
            wire_call, args: the call.

        Raises:
            WireError: the group is broken, or breaks here.
        """
        self._check()
        try:
            return wire_call(*args)
        except WireFailed as error:
            self._fail(error.failure, doing)
        except BaseException as error:
            self._interrupted(error)
            raise

    def guard(self, wire: interface.Wire) -> None:
        """Abort a wire of these ranks, too, when the group breaks."""
        if self._detector is not None:
            self._detector.guard(wire)

    def lease(self, nbytes: int) -> interface.Lease:
        lease = self.wire.lease(nbytes)
        return self.memory.lease(nbytes) if lease is None else lease

    def make_for_device(self, device: torch.device) -> Group:
        from .device import on_device  # here, since it is written with what stands here

        return on_device(self, device)

    def split(self, ranks: Sequence[int]) -> Group | None:
        self._check()
        distinct = chosen(self, ranks)
        self._parts_made += 1
        if self.rank not in distinct:
            return None
        assert self._part is not None
        name = f"sub{self._parts_made}:{','.join(map(str, distinct))}"
        part = self._part(distinct, name)
        part.name = f"{self.name}/{name}"
        part.global_ranks = tuple(self.global_ranks[rank] for rank in distinct)
        return part

    def abort(self, reason: str) -> None:
        verdict = Verdict(self.rank, f"rank {self.rank} gave up: {reason}")
        if self._detector is not None:
            self._detector.settle(verdict)
        elif not self.closed:
            self._break(verdict)

    def fail(self, peer: int, text: str) -> WireError:
        assert self._detector is not None  # nobody hears himself
        return self._break(self._detector.settle(Verdict(peer, text)))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._part = None  # it holds the store, whose server ends when nobody does
            self._leave()
            super().close()

    def _after_fork(self) -> None:
        super()._after_fork()
        self.wire.close()
        if self._detector is not None:
            self._detector.abandon()

    def _check(self) -> None:
        """Raise what broke the group, if anything did."""
        if self.closed:
            why = "this group is closed; wait for asynchronous calls before weft.shutdown()"
            raise WireError(f"rank {self.rank}: {why}", rank=self.rank)
        if self._broken is None and self._detector is not None and self._detector.verdict:
            where = f" while rank {self.rank} was{self._where()}" if self._call()[1] else ""
            self._break(self._detector.verdict, where)
        if self._broken is not None:
            raise self._broken.error(self.rank) from None

    def set_timeout(self, seconds: float) -> None:
        """Change what any one wait may last, of those that begin from now on."""
        self.timeout = seconds
        if self._detector is not None:
            self._detector.timeout = seconds
            self._detector.links.wake()  # it may sleep for as long as waits lasted before

    def wait_for(self, exchange: UnderWay) -> list[Tensor]:
        """Wait for messages, without a limit: at the deadline the detector aborts the wire.

        Raises:
            WireError: the group is broken, or breaks here.
        """
        self._check()
        detector = self._detector
        if detector is None:  # without peers there is nothing to wait for
            return exchange.pending.wait()
        began = time.monotonic()
        detector.begin(exchange)
        try:
            return exchange.pending.wait()
        except WireFailed as error:
            self._fail(error.failure, exchange.what(), exchange)
        except BaseException as error:
            self._interrupted(error)
            raise
        finally:
            self.traffic.waited += time.monotonic() - began
            detector.end()

    def _fail(self, failure: Failure, doing: str, wait: UnderWay | None = None) -> NoReturn:
        """Raise the error of a use of the wire that failed, with the detector's verdict.

        Args:
            failure: what the wire says.
            doing: what this rank did, as a clause of the error.
            wait: if it waited.
        """
        detector = self._detector
        assert detector is not None  # without peers nothing fails
        seconds = 0.0 if wait is None else time.monotonic() - detector.since
        lasting = "" if wait is None else f" for {seconds:.2f} s"
        what = f" while rank {self.rank} {doing}{lasting}{self._where()}"
        if self.closed:
            raise WireError(f"rank {self.rank}: this group was closed{what}", rank=self.rank)
        if wait is not None and seconds >= self.timeout:
            what += f", past the timeout of {self.timeout:g} s"
        raise self._break(detector.explain(failure, wait), what) from None

    def diagnose(self, where: str) -> WireError | None:
        verdict = None if self._detector is None else self._detector.blame()
        if self._broken is None and verdict is not None:
            self._break(verdict, f" while rank {self.rank} was in {where}")
        return None if self._broken is None else self._broken.error(self.rank)

    def _interrupted(self, error: BaseException) -> None:
        """Break the group: a handler of a signal raised while messages were being moved."""
        kind = "SIGINT" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        verdict = Verdict(self.rank, f"rank {self.rank} was interrupted ({kind})")
        if self._detector is not None:
            self._detector.settle(verdict)
        # The memory of receives is the caller's again, so nothing may write there. An error here
        # is less important than the interruption.
        with contextlib.suppress(Exception):
            self.wire.abort(Failure("aborted", self.rank, verdict.text))

    def _where(self) -> str:
        """The call that runs, as errors spell it."""
        calls, doing = self._call()
        return f" in {doing} (call {calls})" if doing else ""

    def _break(self, verdict: Verdict, where: str = "") -> WireError:
        """Break the group on this rank; the error to raise. `where` is what this rank was doing."""
        self._broken = Verdict(verdict.culprit, f"{verdict.text}{where}")
        self.wire.abort(Failure("aborted", verdict.culprit, verdict.text))
        return self._broken.error(self.rank)


class UnderWay(Pending):
    """Messages under way over a wire of a group.

    Attributes:
        group: over whose wire they are.
        pending: the wire's.
    """

    def __init__(self, group: ProcessWire, pending: interface.Pending) -> None:
        self.group = group
        self.pending = pending
        self._received: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self._received is None:
            self._received = self.receive()
        return self._received

    def receive(self) -> list[Tensor]:
        """Wait for the messages, for the first `wait`; what it returns."""
        return self.group.wait_for(self)

    def is_through(self) -> bool:
        return self.pending.done()

    def release(self) -> None:
        self.pending.release()

    @abc.abstractmethod
    def awaited(self) -> list[int]:
        """All ranks that are waited for."""

    @abc.abstractmethod
    def peer(self) -> int | None:
        """The rank that is waited for; None: there is none."""

    @abc.abstractmethod
    def what(self) -> str:
        """What is waited for, as a clause of an error."""


class Exchange(UnderWay):
    """Sends and receives."""

    def __init__(
        self,
        group: ProcessWire,
        pending: interface.Pending,
        sends: Sequence[Send],
        recvs: Sequence[Recv],
    ) -> None:
        super().__init__(group, pending)
        self._sends = sends
        self._recvs = recvs

    def awaited(self) -> list[int]:
        return self.pending.waiting_for()

    def release(self) -> None:
        try:
            self.pending.release()
        except WireFailed as error:
            self.group._fail(error.failure, "released what it had received")

    def peer(self) -> int | None:
        """The rank that is waited for; None: this post has no messages."""
        return self._first()[0] if self._recvs or self._sends else None

    def what(self) -> str:
        """What is waited for, as a clause of an error."""
        if not self._recvs and not self._sends:
            return "awaited nothing"
        peer, message = self._first()
        if isinstance(message, int):
            return f"awaited up to {message} bytes from rank {peer}"
        if any(message is sent for _, sent in self._sends):
            return f"was sending {message.nbytes} bytes to rank {peer}"
        return f"awaited {message.nbytes} bytes from rank {peer}"

    def _first(self) -> tuple[int, Tensor | int]:
        """The first message that is not complete, with its peer: receives come first."""
        missing = self.pending.waiting_for()
        messages = [*self._recvs, *self._sends]
        return next((each for each in messages if each[0] in missing), messages[-1])


def _leave(detector: Detector | None, wire: interface.Wire) -> None:
    """Say bye to all and let go of everything."""
    try:
        if detector is not None:
            detector.close()
    finally:  # also where a handler of a signal raises meanwhile
        wire.close()
