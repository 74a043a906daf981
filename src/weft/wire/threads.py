"""Ranks as threads of one process: for tests, and for trying things without starting anything.

Nothing is sent anywhere; a message is one copy from the sender's tensor into the receiver's. In
exchange this wire is strict where real transports are silent: memory that a rank must not read
holds garbage, a tensor that is changed while it is being sent is noticed, and so is who writes to
received bytes that are only his to read; ranks that all wait for each other are told so at once,
and the first rank that fails wakes all others.

Source of the idea: gloo's own tests run their ranks as threads over an in-memory store.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import WeftError, WireError
from . import dense
from .base import Pending, Recv, Send, as_bytes
from .in_process import InProcessWire, Shared
from .memory import Lease

_GARBAGE = 0xA5  # what undefined bytes hold: neither 0 nor -1, NaN-free and huge in no dtype

_HOST = bytes(16)  # the name that this process has for its own threads

_Bytes = NDArray[np.uint8]


def group(
    size: int, timeout: float = 5.0, *, hosts: Sequence[str] | None = None, strict: bool = True
) -> list[ThreadWire]:
    """The wires of one group of `size` ranks, to be used by one thread each.

    Args:
        size: how many ranks.
        timeout: seconds that any one wait may last.
        hosts: the name of each rank's machine, for code that treats those of one host alike.
        strict: hold garbage in receives until they are waited for, and notice a tensor that
            changes while it is sent; costs one more copy of each message.

    Raises:
        WeftError: there are no ranks, or not one host for each.

    Example:
        >>> first, second = group(2)
        >>> sent = first.post([(1, torch.tensor([1.0, 2.0]))])
        >>> second.post((), [(0, torch.empty(2))]).wait()
        [tensor([1., 2.])]
        >>> sent.wait()
        []
    """
    if size < 1:
        raise WeftError(f"a group has at least one rank, not {size}")
    if hosts is not None and len(hosts) != size:
        raise WeftError(f"{len(hosts)} hosts for {size} ranks: give one for each")
    return _Group(list(hosts) if hosts else ["threads"] * size, timeout, strict).wires


class ThreadWire(InProcessWire):
    """One rank's end of a group made by `group`."""

    def __init__(self, rank: int, shared: _Group) -> None:
        super().__init__(rank, len(shared.hosts), shared.timeout, shared.hosts[rank])
        self._group: _Group = shared
        self._reductions = 0

    def _post(self, sends: Sequence[Send], recvs: Sequence[Recv], channel: int) -> Pending:
        shared = self._group
        incoming: list[_Message] = []
        results: list[Tensor] = []
        leases: list[Lease] = []
        for peer, buffer in recvs:
            self._check_peer(peer, "receive from")
            if isinstance(buffer, int):
                lease = self.lease(buffer)
                leases.append(lease)
                buffer = lease.tensor
            results.append(buffer)
            incoming.append(_Message(peer, _memory(buffer)))
            if shared.strict:
                incoming[-1].data.fill(_GARBAGE)
        outgoing: list[_Message] = []
        for peer, tensor in sends:
            self._check_peer(peer, "send to")
            outgoing.append(_Message(peer, _memory(tensor)))
            if shared.strict:
                outgoing[-1].before = outgoing[-1].data.copy()

        pending = _Exchange(self, incoming, outgoing, results, leases)
        pairs: list[tuple[_Message, _Message]] = []
        with shared.lock:
            self._check_usable()
            for message in incoming:
                shared.channel(message.peer, self.rank, channel).receive(message, pairs)
            for message in outgoing:
                shared.channel(self.rank, message.peer, channel).send(message, pairs)
            for send, recv in pairs:
                if len(send.data) > len(recv.data):
                    raise self._fail(
                        recv.peer,
                        f"rank {recv.peer} sent {len(send.data)} bytes to rank {send.peer}, which "
                        f"had posted a receive of at most {len(recv.data)}",
                    )
        for send, recv in pairs:  # no lock: others go on while this rank copies
            count = len(send.data)
            np.copyto(recv.data[:count], send.data)
            recv.data[count:] = _GARBAGE
        with shared.lock:
            for send, recv in pairs:
                send.done = recv.done = True
                shared.wake[send.peer].notify_all()
                shared.wake[recv.peer].notify_all()
        return pending

    def dense_all_reduce(self, tensor: Tensor, op: str) -> Pending:
        shared = self._group
        if reason := dense.refuses(op, tensor.dtype):
            raise WeftError(f"rank {self.rank}: {reason}")
        part = tensor.clone()
        if shared.strict:
            _memory(tensor).fill(_GARBAGE)
        with shared.lock:
            self._check_usable()
            reduction = shared.reductions.setdefault(self._reductions, _Reduction(self.size))
            reduction.parts[self.rank] = (part, tensor, op)
            if len(reduction.parts) < self.size:
                self._reductions += 1
                return _Reduced(self, reduction, tensor)
            del shared.reductions[self._reductions]
            self._reductions += 1
        whats = {(tuple(part.shape), part.dtype, op) for part, _, op in reduction.parts.values()}
        if len(whats) > 1:
            said = "; ".join(
                f"rank {rank} {op} of {tuple(part.shape)} {part.dtype}"
                for rank, (part, _, op) in sorted(reduction.parts.items())
            )
            with shared.lock:
                raise self._fail(None, f"the ranks disagree on what to reduce: {said}")
        reduction.finish()
        with shared.lock:
            reduction.done = True
            reduction.parts.clear()
            for condition in shared.wake:
                condition.notify_all()
        return _Reduced(self, reduction, tensor)

    def _leave(self) -> None:
        for condition in self._group.wake:
            condition.notify_all()

    def _await(self, pending: _Exchange | _Reduced) -> None:
        """Wait until nothing of `pending` is under way."""
        shared = self._group
        began = time.monotonic()
        with shared.lock:
            try:
                while not pending.finished():
                    self._check_usable()
                    shared.waiting[self.rank] = pending
                    gone = next((rank for rank in pending.missing() if rank in shared.left), None)
                    if gone is not None:
                        raise self._fail(gone, f"rank {gone} left while {self._waits()}")
                    if shared.deadlocked():
                        raise self._fail(*shared.blame())
                    remaining = began + self.timeout - time.monotonic()
                    if remaining <= 0:
                        raise self._late()
                    shared.wake[self.rank].wait(remaining)
            finally:
                shared.waiting.pop(self.rank, None)

    def _waits(self) -> str:
        return f"rank {self.rank} awaited {self._group.waiting[self.rank].what()}"

    def _late(self) -> WireError:
        """Blame the rank at the end of the chain of those that wait."""
        shared = self._group
        chain = [self.rank]
        while chain[-1] in shared.waiting:
            missing = shared.waiting[chain[-1]].missing()
            if not missing or missing[0] in chain:
                break
            chain.append(missing[0])
        culprit = chain[-1]
        text = f"{self._waits()} for {self.timeout:.1f} s"
        if culprit in shared.waiting:
            return self._fail(None, f"{text}: {shared.story()}")
        busy = shared.wires[culprit]._call()[1]
        where = f"in {busy} and posts nothing" if busy else "outside weft"
        through = f", awaited by rank {chain[-2]}," if len(chain) > 2 else ""
        return self._fail(culprit, f"{text}: rank {culprit}{through} is {where}")


@dataclass(slots=True, eq=False)
class _Message:
    """One end of a message: what is sent to `peer`, or the memory for what comes from it."""

    peer: int
    data: _Bytes
    before: _Bytes | None = None
    matched: bool = False
    done: bool = False


@dataclass(slots=True)
class _Channel:
    """What is not matched yet of one pair of ranks and one channel: all sends or all receives."""

    sends: deque[_Message] = field(default_factory=deque)
    recvs: deque[_Message] = field(default_factory=deque)

    def send(self, message: _Message, pairs: list[tuple[_Message, _Message]]) -> None:
        self.sends.append(message)
        self._match(pairs)

    def receive(self, message: _Message, pairs: list[tuple[_Message, _Message]]) -> None:
        self.recvs.append(message)
        self._match(pairs)

    def _match(self, pairs: list[tuple[_Message, _Message]]) -> None:
        if self.sends and self.recvs:
            send, recv = self.sends.popleft(), self.recvs.popleft()
            send.matched = recv.matched = True
            pairs.append((send, recv))


class _Group(Shared):
    """What the ranks of a group share."""

    wires: list[ThreadWire]

    def __init__(self, hosts: list[str], timeout: float, strict: bool) -> None:
        lock = threading.RLock()
        super().__init__(lock, [threading.Condition(lock) for _ in hosts])
        self.hosts, self.timeout, self.strict = hosts, timeout, strict
        self.channels: dict[tuple[int, int, int], _Channel] = {}
        self.reductions: dict[int, _Reduction] = {}
        self.waiting: dict[int, _Exchange | _Reduced] = {}
        self.wires = [ThreadWire(rank, self) for rank in range(len(hosts))]

    def part(self, ranks: tuple[int, ...]) -> _Group:
        return _Group([self.hosts[rank] for rank in ranks], self.timeout, self.strict)

    def forget(self) -> None:
        self.channels.clear()

    def channel(self, source: int, target: int, number: int) -> _Channel:
        return self.channels.setdefault((source, target, number), _Channel())

    def deadlocked(self) -> bool:
        """Whether nobody can post any more what the waiting ones need."""
        here = [rank for rank in range(len(self.hosts)) if rank not in self.left]
        return all(rank in self.waiting and self.waiting[rank].missing() for rank in here)

    def blame(self) -> tuple[int | None, str]:
        """Who is to blame for a deadlock: a rank that left while it was awaited, or nobody."""
        for rank in sorted(self.waiting):
            gone = next((peer for peer in self.waiting[rank].missing() if peer in self.left), None)
            if gone is not None:
                what = self.waiting[rank].what()
                return gone, f"rank {gone} left while rank {rank} awaited {what}"
        return None, f"all ranks wait for each other: {self.story()}"

    def story(self) -> str:
        return ", ".join(
            f"rank {rank} awaits {pending.what()}" for rank, pending in sorted(self.waiting.items())
        )


class _Exchange(Pending):
    """Messages under way."""

    def __init__(
        self,
        wire: ThreadWire,
        incoming: list[_Message],
        outgoing: list[_Message],
        results: list[Tensor],
        leases: list[Lease],
    ) -> None:
        self._wire, self._incoming, self._outgoing = wire, incoming, outgoing
        self._results, self._leases = results, leases
        self._came: list[_Bytes] = []  # what was received in leased memory, for who is strict

    def finished(self) -> bool:
        return all(message.done for message in self._incoming + self._outgoing)

    def missing(self) -> list[int]:
        """The ranks that have not posted their end yet."""
        return [each.peer for each in self._incoming + self._outgoing if not each.matched]

    def what(self) -> str:
        """What is awaited first."""
        for message in self._incoming:
            if not message.done:
                return f"{len(message.data)} bytes from rank {message.peer}"
        left = next((message for message in self._outgoing if not message.done), None)
        return f"rank {left.peer} to take {len(left.data)} bytes" if left else "nothing"

    def arrived(self) -> list[bool]:
        return [message.done for message in self._incoming]

    def is_through(self) -> bool:
        return self.finished()

    def wait(self) -> list[Tensor]:
        self._wire._await(self)
        for message in self._outgoing:
            before, message.before = message.before, None
            if before is not None and not np.array_equal(before, message.data):
                wire = self._wire
                with wire._group.lock:
                    raise wire._fail(
                        wire.rank,
                        f"rank {wire.rank} changed a tensor that it was sending to rank "
                        f"{message.peer}, before it had waited for it",
                    )
        if self._wire._group.strict and not self._came:
            self._came = [_memory(lease.tensor).copy() for lease in self._leases]
        return list(self._results)

    def release(self) -> None:
        wire, came, self._came = self._wire, self._came, []
        for lease, before in zip(self._leases, came, strict=False):
            if not np.array_equal(before, _memory(lease.tensor)):
                with wire._group.lock:
                    raise wire._fail(
                        wire.rank,
                        f"rank {wire.rank} wrote to bytes that it had received, which may be the "
                        "sender's own",
                    )
        while self._leases:
            self._leases.pop().release()


class _Reduction:
    """One dense all-reduce: what each rank brought, and where it wants the result."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: dict[int, tuple[Tensor, Tensor, str]] = {}
        self.done = False

    def finish(self) -> None:
        """Reduce in rank order; half precision rounds once, at the end."""
        first, _, op = self.parts[0]
        total = torch.empty_like(first, memory_format=torch.contiguous_format)
        dense.reduce([self.parts[r][0].flatten().clone() for r in range(self.size)], op, total)
        result = _memory(total)
        for _, target, _ in self.parts.values():
            np.copyto(_memory(target), result)


class _Reduced(Pending):
    """A dense all-reduce under way."""

    def __init__(self, wire: ThreadWire, reduction: _Reduction, tensor: Tensor) -> None:
        self._wire, self._reduction, self._tensor = wire, reduction, tensor

    def finished(self) -> bool:
        return self._reduction.done

    def missing(self) -> list[int]:
        joined = self._reduction.parts
        if self._reduction.done or len(joined) == self._reduction.size:
            return []
        return [rank for rank in range(self._reduction.size) if rank not in joined]

    def what(self) -> str:
        absent = self.missing()
        return f"a reduction that rank {absent[0]} has not joined" if absent else "a reduction"

    def wait(self) -> list[Tensor]:
        self._wire._await(self)
        return [self._tensor]

    def release(self) -> None:
        return None


def _memory(tensor: Tensor) -> _Bytes:
    """The bytes of a tensor as NumPy sees them: writing them is no torch operation."""
    view: _Bytes = as_bytes(tensor.detach()).numpy()
    return view
