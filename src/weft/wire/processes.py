"""The wire between processes, whatever moves its bytes: posts, waits, and what they raise.

An *engine* moves them: `tcp.engine.Engine` over sockets and shared memory, `torchdist.Links` over a
process group or MPI. A wait ends with its message, or with the verdict of the failure detector,
which cuts the engine. The wait's own limit is later than the detector's deadline, so that the
detector has time to find the culprit. Signals are handled during a wait. If a handler raises, as
that of Ctrl-C does, the wire breaks, since a message may be half transferred.
"""

from __future__ import annotations

import abc
import contextlib
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, NoReturn

from torch import Tensor

from ..errors import WireError
from .base import Pending, Recv, Send, Wire, chosen
from .failure import watch
from .failure.detector import Detector
from .failure.verdict import Verdict
from .hosts import host_name
from .memory import Pool
from .shm import Segment

_BEYOND = 3.0  # seconds by which the limit of a wait lies beyond its deadline


class Lost(OSError):
    """A message will not come through: its connection ended, or nothing moved in time."""


class Engine(abc.ABC):
    """What moves the messages of one rank to all others.

    Attributes:
        side: the failure detector's socket to each peer; non-blocking.
        segment: the memory of this rank that peers of its host map, or None.
        accuse: the engine calls it with a peer that sent invalid bytes, and what they were; any
            thread may, whatever locks it holds.
    """

    def __init__(self, side: Mapping[int, socket.socket], segment: Segment | None = None) -> None:
        self.side, self.segment = side, segment
        self.accuse: Callable[[int, str], object] = lambda peer, what: None

    @abc.abstractmethod
    def post(
        self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int, pool: Pool
    ) -> list[Any]:
        """Start sending and receiving; a receive without a tensor of its own uses `pool`.

        Returns:
            For each message, receives first, its connection, and a `tcp.connection.Receive` or
            `Send`.
        """

    @abc.abstractmethod
    def finish(self, messages: Sequence[Any], limit: float, at: Callable[[int], None]) -> None:
        """Move messages until all of these are through.

        Args:
            messages: what `post` returned.
            limit: seconds after which to give up.
            at: called with the number of the message that is waited for.

        Raises:
            Lost: one will not come through, or the limit passed.
        """

    def release(self, receives: Sequence[Any]) -> None:
        """Release memory of these received messages."""
        for _, receive in receives:
            receive.release()

    @abc.abstractmethod
    def cut(self) -> None:
        """End all waits, here and at the peers'; any thread may call it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything. What was sent still arrives. Twice is fine."""

    def stop(self) -> None:
        """Stop writing to the memory of receives."""
        self.cut()

    def abandon(self) -> None:
        """Close sockets in a forked child, so that peers notice the end of the parent."""
        return None


class ProcessWire(Wire):
    """One rank's end of the wire that `process_group.connect` makes.

    Tensors of every dtype and zero-byte messages travel as they are.
    """

    def __init__(
        self, rank: int, size: int, timeout: float, engine: Engine, part: Callable[..., Wire]
    ) -> None:
        """A wire over an engine; `part` makes that of some ranks: given rank, size, `name`."""
        super().__init__(rank, size, timeout, host_name())
        self._engine = engine
        self._part: Callable[..., Wire] | None = part
        self._subs = 0
        self.closed = False
        self._broken: Verdict | None = None  # what every use raises
        self._detector: Detector | None = None
        if size > 1:
            call = weakref.WeakMethod(self._call)
            cut, slow = engine.cut, watch.chosen()
            self._detector = Detector(rank, timeout, engine.side, cut, call, slow)
            engine.accuse = self._detector.accuse
        self.memory.segment = engine.segment
        # bye when the wire is dropped, and at exit: of multiprocessing's processes, too
        self._leave = Finalize(self, _leave, (self._detector, engine), exitpriority=0)

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        self._check()
        exchange = _Exchange(self, sends, recvs)
        try:
            exchange.messages = self._engine.post(sends, recvs, channel, self.memory)
        except BaseException as error:
            self._interrupted(error)
            raise
        return exchange

    def sub(self, ranks: Sequence[int]) -> Wire | None:
        self._check()
        distinct = chosen(self, ranks)
        self._subs += 1
        if self.rank not in distinct:
            return None
        assert self._part is not None
        name = f"sub{self._subs}:{','.join(map(str, distinct))}"
        part = self._part(distinct.index(self.rank), len(distinct), name=name)
        part._label = f"{self._label}/{name}"
        part.global_ranks = tuple(self.global_ranks[rank] for rank in distinct)
        return part

    def abort(self, reason: str) -> None:
        verdict = Verdict(self.rank, f"rank {self.rank} gave up: {reason}")
        if self._detector is not None:
            self._detector.settle(verdict)
            self._engine.stop()  # the memory of receives is the caller's again
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
        self._engine.abandon()
        if self._detector is not None:
            self._detector.abandon()

    def _check(self) -> None:
        """Raise what broke the wire, if anything did."""
        if self.closed:
            why = "this wire is closed; wait for asynchronous calls before weft.shutdown()"
            raise WireError(f"rank {self.rank}: {why}", rank=self.rank)
        if self._broken is None and self._detector is not None and self._detector.verdict:
            where = f" while rank {self.rank} was{self._where()}" if self._call()[1] else ""
            self._break(self._detector.verdict, where)
        if self._broken is not None:
            raise self._error(self._broken) from None

    def set_timeout(self, seconds: float) -> None:
        """Change what any one wait may last, of those that begin from now on."""
        self.timeout = seconds
        if self._detector is not None:
            self._detector.timeout = seconds

    def _wait(self, exchange: _Exchange) -> None:
        detector = self._detector
        assert detector is not None
        began = time.monotonic()
        detector.begin(exchange)
        try:
            self._engine.finish(exchange.messages, self.timeout + _BEYOND, exchange.reach)
        except Lost as error:
            self._fail(exchange, detector, str(error))
        except BaseException as error:
            self._interrupted(error)
            raise
        finally:
            self.traffic.waited += time.monotonic() - began
            detector.end()

    def _fail(self, exchange: _Exchange, detector: Detector, error: str) -> NoReturn:
        """Raise the error of a failed wait, with the detector's verdict."""
        seconds = time.monotonic() - detector.since
        what = f" while rank {self.rank} {exchange.what()} for {seconds:.2f} s{self._where()}"
        if self.closed:
            raise WireError(f"rank {self.rank}: this wire was closed{what}", rank=self.rank)
        if seconds >= self.timeout:
            what += f", past the timeout of {self.timeout:g} s"
        raise self._break(detector.explain(exchange, error), what) from None

    def diagnose(self, where: str) -> WireError | None:
        verdict = None if self._detector is None else self._detector.blame()
        if self._broken is None and verdict is not None:
            self._break(verdict, f" while rank {self.rank} was in {where}")
        return None if self._broken is None else self._error(self._broken)

    def _interrupted(self, error: BaseException) -> None:
        """Break the wire: a handler of a signal raised while messages were being moved."""
        if self._detector is not None:
            kind = "SIGINT" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            self._detector.settle(Verdict(self.rank, f"rank {self.rank} was interrupted ({kind})"))
        # The memory of receives is the caller's again, so nothing may write there. An error here
        # is less important than the interruption.
        with contextlib.suppress(Exception):
            self._engine.stop()

    def _where(self) -> str:
        """The call that runs, as errors spell it."""
        calls, doing = self._call()
        return f" in {doing} (call {calls})" if doing else ""

    def _break(self, verdict: Verdict, where: str = "") -> WireError:
        """Break the wire on this rank; the error to raise. `where` is what this rank was doing."""
        self._broken = Verdict(verdict.culprit, f"{verdict.text}{where}")
        self._engine.stop()
        return self._error(self._broken)


class _Exchange(Pending):
    """Sends and receives under way; the receives come first."""

    def __init__(self, wire: ProcessWire, sends: Sequence[Send], recvs: Sequence[Recv]) -> None:
        self._wire, self._sends, self._recvs = wire, sends, recvs
        self._received: list[Tensor] | None = None
        self._at = 0  # the number of the message that is waited for
        self.messages: list[Any] = []  # the engine's, until they are released

    def wait(self) -> list[Tensor]:
        if self._received is None:
            self._wire._check()
            if not self.is_through():
                self._wire._wait(self)
            receives = self.messages[: len(self._recvs)]
            self._received = [receive.tensor for _, receive in receives]
        return self._received

    def awaited(self) -> list[int]:
        ends = zip((*self._recvs, *self._sends), self.messages, strict=False)
        return sorted({peer for (peer, _), (_, message) in ends if not message.done})

    def is_through(self) -> bool:
        return all(message.done for _, message in self.messages)

    def reach(self, number: int) -> None:
        """Note the number of the message that is waited for."""
        self._at = number

    def release(self) -> None:
        receives, self.messages = self.messages[: len(self._recvs)], []
        if receives:
            self._wire._engine.release(receives)

    def peer(self) -> int:
        """The rank that is waited for."""
        at = min(self._at, len(self._recvs) + len(self._sends) - 1)
        return (*self._recvs, *self._sends)[at][0]

    def what(self) -> str:
        """What is waited for, as a clause of an error."""
        peer = self.peer()
        if self._at >= len(self._recvs):
            message = self._sends[self._at - len(self._recvs)][1]
            return f"was sending {message.nbytes} bytes to rank {peer}"
        want = self._recvs[self._at][1]
        most = f"up to {want}" if isinstance(want, int) else str(want.nbytes)
        return f"awaited {most} bytes from rank {peer}"


def _leave(detector: Detector | None, engine: Engine) -> None:
    """Say bye to all and let go of everything."""
    if detector is not None:
        detector.close()
    engine.close()
