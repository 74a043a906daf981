"""The wire over connections of its own: posts, waits, and what they raise.

A wait ends with what was awaited, or with the verdict of the failure detector, which shuts the
sockets down; its own limit lies beyond that, so that the detector has the time to find out who is
to blame. Signals are handled while it waits; one whose handler raises, as Ctrl-C's does, breaks the
wire, since messages may have got stuck half-way.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, NoReturn

from torch import Tensor

from ...errors import WeftError, WireError
from .. import dense
from ..base import Pending, Recv, Send, Wire, chosen
from ..failure.detector import Detector
from ..failure.verdict import Verdict
from ..hosts import host_name
from .endpoint import Connections
from .engine import Lost

_BEYOND = 3.0  # seconds by which the limit of a wait lies beyond its deadline


class TcpWire(Wire):
    """One rank's end of the wire that `process_group.connect` makes.

    Tensors of every dtype and zero-byte messages travel as they are.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        connections: Connections | None,
        part: Callable[[int, int, str], Wire],
    ) -> None:
        """A wire over `connections`; `part` makes that of some ranks: given rank, size, name."""
        super().__init__(rank, size, timeout, host_name())
        self._connections = connections
        self._part: Callable[[int, int, str], Wire] | None = part
        self._subs = 0
        self._closed = False
        self._broken: tuple[str, int | None] | None = None  # what every use raises: text, culprit
        self._detector: Detector | None = None
        if connections is not None:
            call = functools.partial(_call_of, weakref.ref(self))
            self._detector = Detector(rank, timeout, connections.side, connections.cut, call)
            connections.detector = self._detector
            self.memory.segment = getattr(connections.engine, "segment", None)
            # bye when the wire is dropped, and at exit: of multiprocessing's processes, too
            Finalize(self, connections.close, exitpriority=0)

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        self._check()
        for peer, _ in (*sends, *recvs):
            if peer == self.rank or not 0 <= peer < self.size:
                raise WeftError(f"rank {self.rank}: rank {peer} is no peer among {self.size} ranks")
        exchange = _Exchange(self, sends, recvs)
        if self._connections is not None:
            try:
                exchange.messages = self._connections.engine.post(
                    sends, recvs, channel, self.memory
                )
            except BaseException as error:
                self._interrupted(error)
                raise
        return exchange

    def dense_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._check()
        return dense.all_reduce(self, tensor, op)

    def sub(self, ranks: Sequence[int]) -> Wire | None:
        self._check()
        distinct = chosen(self, ranks)
        self._subs += 1
        if self.rank not in distinct:
            return None
        assert self._part is not None
        name = f"sub{self._subs}:{','.join(map(str, distinct))}"
        return self._part(distinct.index(self.rank), len(distinct), name)

    def abort(self, reason: str) -> None:
        verdict = Verdict(self.rank, f"rank {self.rank} gave up: {reason}")
        if self._detector is not None:
            self._detector.settle(verdict)
        elif not self._closed:
            self._break(verdict.text, self.rank)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._part = None  # it holds the store, whose server ends when nobody does
        if self._connections is not None:
            self._connections.close()
        if self._worker is not None:
            self._worker.stop()
        self.memory.drain()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _check(self) -> None:
        """Raise what broke the wire, if anything did."""
        if self._closed:
            raise WireError(f"rank {self.rank}: this wire is closed", rank=self.rank)
        if self._broken is None and self._detector is not None:
            verdict = self._detector.verdict
            if verdict is not None:
                where = f" while rank {self.rank} was{self._where()}" if self._call()[1] else ""
                self._break(f"{verdict.text}{where}", verdict.culprit)
        if self._broken is not None:
            raise self._error() from None

    def _fail(self, exchange: _Exchange, error: str) -> NoReturn:
        """Raise why a wait failed, after the detector found out."""
        assert self._detector is not None
        what = exchange.what()
        if self._closed:
            raise WireError(f"rank {self.rank}: this wire was closed {what}", rank=self.rank)
        verdict = self._detector.explain(exchange, error)
        self._break(f"{verdict.text} {what}", verdict.culprit)
        raise self._error() from None

    def _interrupted(self, error: BaseException) -> None:
        """Break the wire: a handler of a signal raised while messages were being moved."""
        if self._detector is not None:
            kind = "SIGINT" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            self._detector.settle(Verdict(self.rank, f"rank {self.rank} was interrupted ({kind})"))
        if self._connections is not None:
            # What was received is the caller's again: nothing more is written there. Whatever was
            # in the middle of something when it was interrupted, that it was is what counts.
            with contextlib.suppress(Exception):
                self._connections.drop()

    def _where(self) -> str:
        """The call that runs, as errors spell it."""
        calls, doing = self._call()
        return f" in {doing} (call {calls})" if doing else ""

    def _error(self) -> WireError:
        """What broke the wire: the same text each time."""
        text, culprit = self._broken or ("", None)
        return WireError(text, rank=self.rank, culprit=culprit)

    def _break(self, text: str, culprit: int | None) -> None:
        self._broken = (f"rank {self.rank}: {text}; start the group again", culprit)
        if self._connections is not None:
            self._connections.drop()


class _Exchange(Pending):
    """Sends and receives under way; the receives come first."""

    def __init__(self, wire: TcpWire, sends: Sequence[Send], recvs: Sequence[Recv]) -> None:
        self._wire, self._sends, self._recvs = wire, sends, recvs
        self._received: list[Tensor] | None = None
        self._at = 0  # the message that is waited for
        self.messages: list[Any] = []  # the engine's own, until nobody looks at them any more

    def wait(self) -> list[Tensor]:
        if self._received is None:
            wire = self._wire
            wire._check()
            if wire._connections is None:
                self._received = []
            else:
                engine = wire._connections.engine
                if not engine.over(self.messages):
                    self._finish(engine)
                self._received = engine.received(self.messages)
        return self._received

    def _finish(self, engine: Any) -> None:
        wire, detector = self._wire, self._wire._detector
        assert detector is not None
        detector.begin(self)
        try:
            engine.finish(self.messages, wire.timeout + _BEYOND, self._reach)
        except Lost as error:
            wire._fail(self, str(error))
        except BaseException as error:
            wire._interrupted(error)
            raise
        finally:
            detector.end()

    def arrived(self) -> list[bool]:
        connections = self._wire._connections
        if self._received is not None or connections is None:
            return [True] * len(self._recvs)
        return list(connections.engine.arrived(self.messages[: len(self._recvs)]))

    def is_through(self) -> bool:
        connections = self._wire._connections
        if self._received is not None or connections is None:
            return True
        return all(connections.engine.arrived(self.messages))

    def _reach(self, number: int) -> None:
        self._at = number

    def release(self) -> None:
        messages, self.messages = self.messages, []
        if messages and self._wire._connections is not None:
            self._wire._connections.engine.release(messages)

    def peer(self) -> int:
        """The rank that is waited for."""
        at = min(self._at, len(self._recvs) + len(self._sends) - 1)
        return (*self._recvs, *self._sends)[at][0]

    def what(self) -> str:
        """What is waited for, for how long and in which call, as a clause of an error."""
        wire, detector = self._wire, self._wire._detector
        rank, peer = wire.rank, self.peer()
        if self._at < len(self._recvs):
            want = self._recvs[self._at][1]
            most = f"up to {want}" if isinstance(want, int) else str(want.nbytes)
            waits = f"awaited {most} bytes from rank {peer}"
        else:
            message = self._sends[self._at - len(self._recvs)][1]
            waits = f"was sending {message.nbytes} bytes to rank {peer}"
        seconds = time.monotonic() - detector.since if detector is not None else 0.0
        return f"while rank {rank} {waits} for {seconds:.2f} s{wire._where()}"


def _call_of(wire: weakref.ref[TcpWire]) -> tuple[int, str]:
    """The number and the name of the call that a wire is in."""
    alive = wire()
    return alive._call() if alive is not None else (0, "")
