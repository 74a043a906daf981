"""The wire over process-group connections: posts, waits, and what they raise.

A wait ends with what was awaited, or with the verdict of the watcher, which shuts the sockets
down; its own limit lies beyond that, so that the watcher has the time to find out who is to blame.
Signals are handled while it waits; one whose handler raises, as Ctrl-C's does, breaks the wire,
since messages may have got stuck half-way.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import WeftError, WireError
from ..kernels import lent
from ..kernels.cpu_talk import Came, Lender, Program, Talk
from . import dense
from .base import Pending, Recv, Send, Wire, as_bytes
from .hosts import digest_of, host_name
from .joined import Joined
from .memory import Lease
from .mover import Lost, Message, Mover
from .pieces import kind_of, packs
from .routine import Routine, Script
from .verdict import Verdict
from .watch import Watch

__all__ = ["ProcessGroupWire"]

_SEEN = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8}  # as NumPy's own
_NOBODY, _NOTHING = bytearray(), memoryview(b"")
_SHORT = 60 << 10  # bytes of a message up to which it is read ahead whole, wherever it begins
_BEYOND = 3.0  # seconds by which the limit of a wait lies beyond its deadline


class ProcessGroupWire(Wire):
    """One rank's end of the wire that `process_group.connect` makes.

    Tensors of every dtype and zero-byte messages travel as they are.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        connections: Joined | None,
        part: Callable[[int, int, str], Wire],
    ) -> None:
        """A wire over `connections`; `part` makes that of some ranks: given rank, size, name."""
        super().__init__(rank, size, timeout, host_name())
        self._connections = connections
        self._part: Callable[[int, int, str], Wire] | None = part
        self._subs = 0
        self._closed = False
        self._broken: tuple[str, int | None] | None = None  # what every use raises: text, culprit
        self._watch: Watch | None = None
        self.near = connections is not None
        if connections is not None:
            call = functools.partial(_call_of, weakref.ref(self))
            self._watch = Watch(rank, timeout, connections.side, connections.cut, call)
            connections.watch = self._watch
            connections.introduce(digest_of(self.host))
            if isinstance(connections.mover, Mover):
                self.memory.arena = connections.mover.arena
            # bye when the wire is dropped, and at exit: of multiprocessing's processes, too
            Finalize(self, connections.close, exitpriority=0)

    @property
    def packs(self) -> bool:
        mover = self._connections.mover if self._connections is not None else None
        return isinstance(mover, Mover) and packs()

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        mover = self._connections.mover if self._connections is not None else None
        return self._posted(mover.lines if mover is not None else {}, sends, recvs, channel)

    def _post_small(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        mover = self._connections.mover if self._connections is not None else None
        if not isinstance(mover, Mover):
            return self._posted(mover.small if mover is not None else {}, sends, recvs, 0)
        posted = self._prepared(sends, recvs)
        told = [(peer, _flat(tensor)) for peer, tensor in sends]
        asked = [(peer, _flat(posted.into(want))) for peer, want in recvs]
        self._begin(posted, mover.post_small, told, asked)
        return posted

    def wait_for_any(self, pendings: Sequence[Pending]) -> None:
        first, mover = pendings[0], self._connections and self._connections.mover
        under_way = [each.orders for each in pendings if isinstance(each, _Posted)]
        if not isinstance(mover, Mover) or len(under_way) < len(pendings):
            super().wait_for_any(pendings)
        elif not any(each.is_through() for each in pendings):
            self._check()
            assert isinstance(first, _Posted)
            first.finish(lambda limit, at: mover.finish_any(under_way, limit, at))

    def advance(self) -> None:
        mover = self._connections.mover if self._connections is not None else None
        if isinstance(mover, Mover):
            try:
                mover.advance()
            except BaseException as error:
                self._interrupted(error)
                raise

    def routine(self, script: Script) -> Routine:
        for peer in (*script.says, *script.expects):
            self._check_peer(peer)
        mover = self._connections.mover if self._connections is not None else None
        short = max(script.lengths.values(), default=0) <= _SHORT
        if not isinstance(mover, Mover) or not short:
            return Routine(self, script)
        return _Routine(mover, self, script)

    def _posted(
        self,
        lines: Mapping[int, Any],
        sends: Sequence[Send],
        recvs: Sequence[Recv],
        channel: int,
    ) -> _Posted:
        posted = self._prepared(sends, recvs)
        if self._connections is not None:
            same: dict[int, memoryview] = {}  # what goes to several is looked at once
            outgoing, incoming = [], []
            for peer, tensor in sends:
                message = same.get(id(tensor))
                if message is None:
                    message = same[id(tensor)] = _bytes(tensor)
                outgoing.append((peer, message, kind_of(tensor)))
            for peer, want in recvs:
                tensor = posted.into(want)
                incoming.append((peer, _bytes(tensor), kind_of(tensor)))
            self._begin(posted, self._connections.mover.post, lines, outgoing, incoming, channel)
        return posted

    def _prepared(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> _Posted:
        """What may be posted."""
        self._check()
        for peer, _ in sends:
            self._check_peer(peer)
        for peer, _ in recvs:
            self._check_peer(peer)
        return _Posted(self, sends, recvs)

    def _check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.size:
            raise WeftError(f"rank {self.rank}: rank {peer} is no peer among {self.size} ranks")

    def _begin(self, posted: _Posted, post: Callable[..., Any], *messages: object) -> None:
        """Hand messages to what moves them."""
        try:
            posted.orders = post(*messages)
        except BaseException as error:
            self._interrupted(error)
            raise

    def lends(self, peer: int) -> bool:
        self._check()
        return self._connections is not None and self._connections.mover.lends(peer)

    def lender(self, peer: int) -> Lender | None:
        mover = self._connections.mover if self._connections is not None else None
        return mover.lender(peer) if isinstance(mover, Mover) else None

    def read(self, peer: int, address: int, into: Tensor) -> bool:
        self._check()
        assert self._connections is not None
        return self._connections.mover.read(peer, address, _bytes(into))

    def read_all(self, reads: Sequence[tuple[int, int, Tensor]]) -> None:
        self._check()
        wanted = [each for each in reads if each[2].numel()]
        lenders = {peer: self.lender(peer) for peer, _, _ in wanted if peer != self.rank}
        known = [
            (lenders.get(peer), address, into)
            for peer, address, into in wanted
            if peer == self.rank or lenders[peer] is not None
        ]
        done = lent.fetch(known) if len(known) == len(wanted) else None
        if done is None:
            super().read_all(wanted)
        elif done < len(wanted):
            peer, _, into = wanted[done]
            self.unread(peer, into)

    def unread(self, peer: int, into: Tensor) -> NoReturn:
        self._fail(_Posted(self, (), [(peer, into)]), "its memory cannot be read any more")

    def dense_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        self._check()
        return dense.all_reduce(self, tensor, op)

    def sub(self, ranks: Sequence[int]) -> Wire | None:
        self._check()
        chosen = self.chosen(ranks)
        self._subs += 1
        if self.rank not in chosen:
            return None
        assert self._part is not None
        name = f"sub{self._subs}:{','.join(map(str, chosen))}"
        return self._part(chosen.index(self.rank), len(chosen), name)

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
        if self._broken is None and self._watch is not None and self._watch.verdict is not None:
            verdict = self._watch.verdict
            where = f" while rank {self.rank} was{self._call()}" if self.doing else ""
            self._break(f"{verdict.text}{where}", verdict.culprit)
        if self._broken is not None:
            raise self._error() from None

    def _fail(self, posted: _Posted, error: str) -> NoReturn:
        """Raise why a wait failed, after the watcher found out."""
        assert self._watch is not None
        what = posted.what()
        if self._closed:
            raise WireError(f"rank {self.rank}: this wire was closed {what}", rank=self.rank)
        verdict = self._watch.explain(posted, error)
        self._break(f"{verdict.text} {what}", verdict.culprit)
        raise self._error() from None

    def _interrupted(self, error: BaseException) -> None:
        """Break the wire: a handler of a signal raised while messages were being moved."""
        if self._watch is not None:
            kind = "SIGINT" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            self._watch.settle(Verdict(self.rank, f"rank {self.rank} was interrupted ({kind})"))
        if self._connections is not None:
            # What was received is the caller's again: nothing more is written there. Whatever was
            # in the middle of something when it was interrupted, that it was is what counts.
            with contextlib.suppress(Exception):
                self._connections.drop()

    def _call(self) -> str:
        """The call that runs, as errors spell it."""
        return f" in {self.doing} (call {self.calls})" if self.doing else ""

    def _error(self) -> WireError:
        """What broke the wire: the same text each time."""
        text, culprit = self._broken or ("", None)
        return WireError(text, rank=self.rank, culprit=culprit)

    def _break(self, text: str, culprit: int | None) -> None:
        self._broken = (f"rank {self.rank}: {text}; start the group again", culprit)
        if self._connections is not None:
            self._connections.drop()


class _Posted(Pending):
    """Sends and receives under way; the receives come first."""

    def __init__(
        self,
        wire: ProcessGroupWire,
        sends: Sequence[Send | Message],
        recvs: Sequence[Recv],
        received: list[Tensor] | None = None,
    ) -> None:
        """What is received is told to `into`, or before."""
        self._wire, self._sends, self._recvs = wire, sends, recvs
        self._done = False
        self._received: list[Tensor] = [] if received is None else received
        self._leases: list[Lease] = []
        self._at = 0  # the message that is waited for
        self.orders: list[Any] = []  # the mover's own

    def wait(self) -> list[Tensor]:
        if not self._done:
            wire = self._wire
            wire._check()
            connections = wire._connections
            if connections is not None and not connections.mover.over(self.orders):
                self.finish(functools.partial(connections.mover.finish, self.orders))
            self._done, self.orders = True, []
        return self._received

    def finish(self, move: Callable[[float, Callable[[int], None]], None]) -> None:
        """Move messages until something is through, with a limit, and told what is waited for."""
        wire, watch = self._wire, self._wire._watch
        assert watch is not None
        watch.begin(self)
        try:
            move(wire.timeout + _BEYOND, self._reach)
        except Lost as error:
            wire._fail(self, str(error))
        except BaseException as error:
            wire._interrupted(error)
            raise
        finally:
            watch.end()

    def arrived(self) -> list[bool]:
        orders = self.orders  # read before `_done`, which is set before they are forgotten
        connections = self._wire._connections
        if self._done or connections is None:
            return [True] * len(self._recvs)
        return connections.mover.arrived(orders[: len(self._recvs)])

    def is_through(self) -> bool:
        connections = self._wire._connections
        return self._done or connections is None or all(connections.mover.arrived(self.orders))

    def _reach(self, number: int) -> None:
        self._at = number

    def into(self, want: Tensor | int) -> Tensor:
        """Where a receive goes: to the tensor given, or to leased memory of so many bytes."""
        if isinstance(want, int):
            self._leases.append(self._wire.memory.lease(want))
            want = self._leases[-1].tensor
        self._received.append(want)
        return want

    def release(self) -> None:
        while self._leases:
            self._leases.pop().release()

    def peer(self) -> int:
        """The rank that is waited for."""
        at = min(self._at, len(self._recvs) + len(self._sends) - 1)
        return (*self._recvs, *self._sends)[at][0]

    def what(self) -> str:
        """What is waited for, for how long and in which call, as a clause of an error."""
        wire, watch = self._wire, self._wire._watch
        rank, peer = wire.rank, self.peer()
        if self._at < len(self._recvs):
            want = self._recvs[self._at][1]
            most = f"up to {want}" if isinstance(want, int) else str(want.nbytes)
            waits = f"awaited {most} bytes from rank {peer}"
        else:
            message = self._sends[self._at - len(self._recvs)][1]
            waits = f"was sending {message.nbytes} bytes to rank {peer}"
        seconds = time.monotonic() - watch.since if watch is not None else 0.0
        return f"while rank {rank} {waits} for {seconds:.2f} s{wire._call()}"


class _Routine(Routine):
    """A routine that machine code carries out, over the lane for small messages.

    It does the common thing: all that is said goes out whole, and what is heard is there in a
    moment, and as expected. Whatever else happens is left to the lines, and to the mover.
    """

    def __init__(self, mover: Mover, wire: ProcessGroupWire, script: Script) -> None:
        super().__init__(wire, script)
        peers = list(dict.fromkeys((*script.says, *script.expects)))
        places, models = self._places(), self._models()
        self._talk = Talk(
            [self._frames.get(peer, _NOBODY) for peer in peers],
            [places.get(peer, _NOTHING) for peer in peers],
            [models.get(peer, b"") for peer in peers],
        )
        self._mover, self._lines = mover, [mover.small[peer] for peer in peers]
        incoming = {peer: _bytes(tensor) for peer, tensor in self._recvs}
        self._incoming = [incoming.get(peer) for peer in peers]

    def follow(self, program: Program) -> None:
        self._talk.follow(program)

    def run(
        self,
        number: int,
        at: tuple[int, int, int] = (0, 0, 0),
        meanwhile: Callable[[], object] | None = None,
    ) -> Came | None:
        wire, talk = self.wire, self._talk
        assert isinstance(wire, ProcessGroupWire)
        wire._check()
        came = self._mover.talk(talk, self._lines, number, at, meanwhile, soon=self._soon)
        if came is None:
            return self._by_lines(number, at, meanwhile) if talk.bound else None
        wire.traffic.add(self._sizes)
        if came is not Came.OTHER:
            return came
        posted = _Posted(wire, self._sends, self._recvs, list(self.heard.values()))
        posted.orders = self._mover.resume(talk, self._lines, self._incoming)
        posted.wait()
        return talk.carry(2, at) if self._as_expected(number) else Came.OTHER

    def _by_lines(
        self, number: int, at: tuple[int, int, int], meanwhile: Callable[[], object] | None
    ) -> Came:
        """`run` while other messages are under way."""
        self._talk.carry(0, at)
        self.start(number)
        self._talk.carry(1, at)
        if meanwhile is not None:
            meanwhile()
        return self._talk.carry(2, at) if self.finish() else Came.OTHER


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    if tensor.dtype in _SEEN and tensor.numel() and not tensor.requires_grad:
        # a third of the time: each call of torch is much, where messages are many and cores busy
        return tensor.numpy().data.cast("B")
    return _flat(tensor).numpy().data


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.uint8 and tensor.dim() == 1 else as_bytes(tensor)


def _call_of(wire: weakref.ref[ProcessGroupWire]) -> tuple[int, str]:
    """The number and the name of the call that a wire is in."""
    alive = wire()
    return (alive.calls, alive.doing) if alive is not None else (0, "")
