"""The wire over process-group connections: posts, waits, and what they raise.

A wait is one wait of gloo's. That can be neither polled nor interrupted, and one that expires
closes its connection for good, so gloo's own limit lies beyond ours: it is the watcher that ends
a wait, by shutting the connections down at a verdict. It also ends the main thread's wait at
Ctrl-C, which breaks the wire; a program's own handlers of signals run when the wait is over.
"""

from __future__ import annotations

import functools
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor

from ..errors import WeftError, WireError
from . import dense
from .base import Pending, Recv, Send, Wire, as_bytes
from .express import Order
from .memory import Lease
from .process_group_connections import Connections
from .verdict import Verdict
from .watch import Watch

__all__ = ["ProcessGroupWire"]

_BEYOND = 3.0  # seconds by which gloo's limit lies beyond the deadline of a wait


class ProcessGroupWire(Wire):
    """One rank's end of the wire that `process_group.connect` makes.

    Tensors of every dtype and zero-byte messages travel as they are.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        connections: Connections | None,
        join: Callable[[int, int, str], ProcessGroupWire],
    ) -> None:
        """A wire over `connections`; `join` connects a part of it, given rank, size and name."""
        super().__init__(rank, size, timeout, _host())
        self._connections = connections
        self._join: Callable[[int, int, str], ProcessGroupWire] | None = join
        self._subs = 0
        self._closed = False
        self._broken: tuple[str, int | None] | None = None  # what every use raises: text, culprit
        self._posted: dict[int, _Posted] = {}
        self._limit = timedelta(seconds=timeout + _BEYOND)
        self._watch: Watch | None = None
        if connections is not None:
            call = functools.partial(_call_of, weakref.ref(self))
            self._watch = Watch(rank, timeout, connections.mesh, connections.cut, call)
            connections.watch = self._watch
            # bye when the wire is dropped, and at exit: of multiprocessing's processes, too
            Finalize(self, connections.close, exitpriority=0)

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        self._check()
        self._check_peers(sends, recvs)
        posted = _Posted(self, sends, recvs)
        gloo = self._connections.gloo if self._connections is not None else None
        if gloo is None:
            return posted
        works = posted.works
        self._posted[id(posted)] = posted
        try:
            for peer, want in recvs:
                works.append(gloo.recv([posted.into(want)], peer, channel))
            for peer, tensor in sends:
                works.append(gloo.send([tensor], peer, channel))
        except RuntimeError as error:
            posted.at, text = len(works), str(error)
            del works, gloo
            assert self._watch is not None
            self._watch.begin(posted)
            try:
                self._fail(posted, text)
            finally:
                self._watch.end()
        return posted

    def _post_small(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        self._check()
        self._check_peers(sends, recvs)
        return _Small(self, sends, recvs)

    def dense_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._check()
        return dense.all_reduce(self, tensor, op)

    def sub(self, ranks: Sequence[int]) -> ProcessGroupWire | None:
        self._check()
        chosen = list(ranks)
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(self.size)):
            raise WeftError(f"rank {self.rank}: {chosen} are not distinct ranks of {self.size}")
        self._subs += 1
        if self.rank not in chosen:
            return None
        assert self._join is not None
        name = f"sub{self._subs}:{','.join(map(str, chosen))}"
        return self._join(chosen.index(self.rank), len(chosen), name)

    def abort(self, reason: str) -> None:
        verdict = Verdict(self.rank, f"rank {self.rank} gave up: {reason}")
        if self._watch is not None:
            self._watch.settle(verdict)
        elif not self._closed:
            self._break(verdict.text, self.rank)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._join = None  # it holds the store, whose server ends when nobody does
        connections, watch = self._connections, self._watch
        if connections is not None and watch is not None:
            waits = watch.waiting is not None
            connections.close()
            if waits:  # another thread does, and shall raise
                connections.cut()
        self._let_go()
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
        if self._broken is None and self._watch is not None and self._watch.verdict is not None:
            verdict = self._watch.verdict
            where = f" while rank {self.rank} was{self._call()}" if self.doing else ""
            self._break(f"{verdict.text}{where}", verdict.culprit)
        if self._broken is not None:
            raise self._error() from None

    def _check_peers(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> None:
        for peer, _ in (*sends, *recvs):
            if peer == self.rank or not 0 <= peer < self.size:
                raise WeftError(f"rank {self.rank}: rank {peer} is no peer among {self.size} ranks")

    def _fail(self, posted: _Posted, error: str) -> NoReturn:
        """Raise why a wait failed, after the watcher found out."""
        assert self._watch is not None
        what = posted.what()
        if self._closed:
            raise WireError(f"rank {self.rank}: this wire was closed {what}", rank=self.rank)
        verdict = self._watch.explain(posted, error)
        self._break(f"{verdict.text} {what}", verdict.culprit)
        raise self._error() from None

    def _call(self) -> str:
        """The call that runs, as errors spell it."""
        return f" in {self.doing} (call {self.calls})" if self.doing else ""

    def _error(self) -> WireError:
        """What broke the wire: the same text each time."""
        text, culprit = self._broken or ("", None)
        return WireError(text, rank=self.rank, culprit=culprit)

    def _break(self, text: str, culprit: int | None) -> None:
        self._broken = (f"rank {self.rank}: {text}; start the group again", culprit)
        self._let_go()

    def _let_go(self) -> None:
        """Drop the gloo group, and the works that hold it, so that its connections close."""
        for posted in list(self._posted.values()):
            posted.works = []
        self._posted.clear()
        if self._connections is not None:
            self._connections.drop()


class _Posted(Pending):
    """Sends and receives under way; the receives come first."""

    def __init__(
        self, wire: ProcessGroupWire, sends: Sequence[Send], recvs: Sequence[Recv]
    ) -> None:
        self._wire, self._sends, self._recvs = wire, sends, recvs
        self._done = False
        self.works: list[dist.Work] = []
        self.received: list[Tensor] = []
        self.leases: list[Lease] = []
        self.at = 0  # the work that is waited for

    def wait(self) -> list[Tensor]:
        if self._done:
            return self.received
        wire, watch = self._wire, self._wire._watch
        wire._check()
        if watch is not None and self.posts():
            failed: str | None = None
            try:
                watch.begin(self)
                try:
                    self._finish()
                except (RuntimeError, OSError) as error:
                    failed = str(error)
                if failed is not None:  # out here no exception keeps works, and so connections
                    wire._fail(self, failed)
            finally:
                watch.end()
        self._done, self.works = True, []
        wire._posted.pop(id(self), None)
        return self.received

    def into(self, want: Tensor | int) -> Tensor:
        """Where a receive goes: to the tensor given, or to leased memory of so many bytes."""
        if isinstance(want, int):
            self.leases.append(self._wire.memory.lease(want))
            want = self.leases[-1].tensor
        self.received.append(want)
        return want

    def posts(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self.works)

    def _finish(self) -> None:
        for work in self.works:
            work.wait(self._wire._limit)
            self.at += 1

    def release(self) -> None:
        while self.leases:
            self.leases.pop().release()

    def peer(self) -> int:
        """The rank that is waited for."""
        at = min(self.at, len(self._recvs) + len(self._sends) - 1)
        return (*self._recvs, *self._sends)[at][0]

    def what(self) -> str:
        """What is waited for, for how long and in which call, as a clause of an error."""
        wire, watch = self._wire, self._wire._watch
        rank, peer = wire.rank, self.peer()
        if self.at < len(self._recvs):
            want = self._recvs[self.at][1]
            most = f"up to {want}" if isinstance(want, int) else str(want.nbytes)
            waits = f"awaited {most} bytes from rank {peer}"
        else:
            tensor = self._sends[self.at - len(self._recvs)][1]
            waits = f"was sending {tensor.nbytes} bytes to rank {peer}"
        seconds = time.monotonic() - watch.since if watch is not None else 0.0
        return f"while rank {rank} {waits} for {seconds:.2f} s{wire._call()}"


class _Small(_Posted):
    """Sends and receives on the lane of small messages."""

    def __init__(
        self, wire: ProcessGroupWire, sends: Sequence[Send], recvs: Sequence[Recv]
    ) -> None:
        super().__init__(wire, sends, recvs)
        self._orders: list[tuple[int, Order]] = []
        connections = wire._connections
        if connections is None:
            return
        for _, want in recvs:
            self.into(want)
        self._orders = connections.express.post(
            [(peer, _bytes(tensor)) for peer, tensor in sends],
            [(peer, _bytes(into)) for (peer, _), into in zip(recvs, self.received, strict=True)],
        )

    def posts(self) -> bool:
        return bool(self._orders)

    def _finish(self) -> None:
        connections = self._wire._connections
        assert connections is not None
        connections.express.finish(self._orders, self._wire._limit.total_seconds(), self._reach)

    def _reach(self, number: int) -> None:
        self.at = number


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(as_bytes(tensor).numpy().data).cast("B")


def _call_of(wire: weakref.ref[ProcessGroupWire]) -> tuple[int, str]:
    """The number and the name of the call that a wire is in."""
    alive = wire()
    return (alive.calls, alive.doing) if alive is not None else (0, "")


@functools.cache
def _host() -> str:
    """This machine: containers and network namespaces of one share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return socket.gethostname()
