"""A device's tensors over a process group of torch's, in rounds: NCCL, XCCL, UCC.

A send over such a group blocks until its receive comes, so ranks that wait for each other in a
circle hang. Therefore posts are collected until one of them is waited for. Then one round carries
all of them: an operation of the group in which every rank takes part. It is `all_to_all_single`;
among some of the ranks it is a send and a receive of each pair.

A round takes three steps:

1. The current stream copies the messages into one piece of memory, those for a peer one after the
   other, in the order of channels and posts. Each begins at a multiple of 16 bytes.
2. The wire's own stream waits for the current one. The operation is queued there, then an event.
3. At the wait the current stream (`wait_stream`) or the host (`wait`) waits for the event. Then
   what came is copied to the tensors that it is to fill.

So an operation reads and writes memory of the wire's alone, which is held until the event is
through: once a wait has raised, nothing writes to the memory of any post.

Each wire has a stream of its own. What is queued there waits for other ranks, and two groups whose
operations shared a stream would wait for each other, where ranks use the groups in another order.

Nobody compares the lengths of a message and of its receive: NCCL hangs or delivers garbage where
they differ. The ranks do not either, since the host would have to wait for what the others say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.memory import bytes_of
from .interface import Failure, Features, Recv, Send, WireFailed

_log = logging.getLogger("weft")

_GRAIN = 16  # bytes: messages begin at a multiple, enough for any dtype
_PAUSES = (1e-4, 0.01)  # seconds between two looks at an event: the first, and the longest
CLOSING = 5.0  # seconds that a close may take

_SUMMED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
)

_FEATURES = Features(
    lockstep=True,
    streams=True,
    # backends reduce each element in one place, and tell all ranks from there: equal bits
    reduces=frozenset(("sum", dtype) for dtype in _SUMMED),
)


def rounds_over(
    group: Callable[[], Any], rank: int, size: int, device: torch.device
) -> TorchRounds:
    """The wire over a process group.

    Args:
        group: returns the group, or None once it is gone.
        rank, size: of the group.
        device: whose tensors it is to carry.
    """
    return TorchRounds(Operations(group, size, device), range(size), rank)


class TorchRounds:
    """One rank's end of a process group, or of some of its ranks (`among`).

    A `weft.wire.interface.Wire` that is a `Rounds` and, but for some ranks alone, a `Reducing`.
    """

    def __init__(self, operations: Operations, ranks: Sequence[int], rank: int) -> None:
        """
        Args:
            operations: of the group.
            ranks: of the group, in the order in which this wire numbers them.
            rank: this rank's number in the wire.
        """
        self.rank = rank
        self.size = len(ranks)
        self.device = operations.device
        self._operations = operations
        self._ranks = tuple(ranks)
        self._is_whole = self._ranks == tuple(range(operations.size))
        self._owns_operations = True
        self._closed: Failure | None = None
        self._queued: list[RoundPending] = []  # posted since the last round
        self.features = _FEATURES if self._is_whole else replace(_FEATURES, reduces=frozenset())

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> RoundPending:
        self.check()
        pending = RoundPending(self, sends, recvs, channel)
        self._queued.append(pending)
        return pending

    def all_reduce(self, tensor: Tensor, op: str) -> RoundPending:
        """As `Reducing` has it. It begins at once, and belongs to no round."""
        self.check()
        assert (op, tensor.dtype) in self.features.reduces
        pending = RoundPending(self, (), [(self.rank, tensor)], 0)
        total = bytes_of(tensor).clone()
        reduction = partial(_sum, total.view(tensor.dtype))
        pending.operation = self._operations.begin(reduction, total)
        pending.receives[0].part = total
        return pending

    def lease(self, nbytes: int) -> None:
        """Any memory is as good: None."""
        return None

    def among(self, ranks: Sequence[int]) -> TorchRounds:
        of_group = [self._ranks[rank] for rank in ranks]
        part = TorchRounds(self._operations, of_group, list(ranks).index(self.rank))
        part._owns_operations = False
        return part

    def abort(self, failure: Failure) -> None:
        self._operations.fail(failure)

    def failure(self) -> Failure | None:
        return self._operations.failure or self._closed

    def close(self) -> None:
        self._close(waits=True)

    def drop(self) -> None:
        """As `Rounds` has it."""
        self._close(waits=False)

    def _close(self, *, waits: bool) -> None:
        self._closed = Failure("aborted", None, f"rank {self.rank} has closed its wire")
        if self._owns_operations:
            self._operations.close(self._closed, waits=waits)

    def carry(self, pending: RoundPending) -> Operation:
        """The operation that carries a post; it begins here if the post is in no round yet.

        Raises:
            WireFailed: the wire has failed, or fails here.
        """
        if pending.operation is None:
            self.check()
            self._begin_round()
        assert pending.operation is not None
        return pending.operation

    def check(self) -> None:
        """Raise WireFailed if the wire has failed."""
        failure = self.failure()
        if failure is not None:
            raise WireFailed(failure)

    def _begin_round(self) -> None:
        """Carry all that was posted since the last round."""
        # both ends of a pair sort alike, so the n-th message of a channel meets its receive
        posts = sorted(self._queued, key=lambda post: post.channel)
        self._queued = []
        sent, outgoing = self._packed(posts)
        received, incoming = self._laid_out(posts)
        exchange = self._exchange(sent, outgoing, received, incoming)
        operation = self._operations.begin(exchange, sent, received)
        for post in posts:
            post.operation = operation
            post.sends.clear()  # they have been copied

    def _exchange(
        self, sent: Tensor, outgoing: list[int], received: Tensor, incoming: list[int]
    ) -> Enqueue:
        """What queues an exchange of bytes with the ranks of this wire: so many of them by rank."""
        if self._is_whole:
            return partial(_all_to_all, received, sent, incoming, outgoing)
        parts = zip(
            self._ranks,
            torch.split(sent, outgoing),
            torch.split(received, incoming),
            strict=True,
        )
        return partial(_between_pairs, list(parts))

    def _packed(self, posts: Sequence[RoundPending]) -> tuple[Tensor, list[int]]:
        """Copy what posts send into one piece of memory; it, and its bytes for each rank."""
        messages: list[list[Tensor]] = [[] for _ in range(self.size)]
        for post in posts:
            for peer, message in post.sends:
                messages[peer].append(message)
        sizes = [sum(_filled(message.numel()) for message in each) for each in messages]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        at = 0
        for each in messages:
            for message in each:
                memory[at : at + message.numel()] = message
                at += _filled(message.numel())
        return memory, sizes

    def _laid_out(self, posts: Sequence[RoundPending]) -> tuple[Tensor, list[int]]:
        """Make the memory that posts receive into; it, and its bytes for each rank."""
        receives: list[list[_Receive]] = [[] for _ in range(self.size)]
        for post in posts:
            for receive in post.receives:
                receives[receive.peer].append(receive)
        sizes = [sum(_filled(receive.nbytes) for receive in each) for each in receives]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        at = 0
        for each in receives:
            for receive in each:
                receive.part = memory[at : at + receive.nbytes]
                at += _filled(receive.nbytes)
        return memory, sizes


@dataclass(eq=False)
class _Receive:
    """A receive of a post.

    Attributes:
        peer: who sends.
        into: the tensor to fill, or how many bytes come.
        place: the bytes of that tensor; they hold its storage.
        nbytes: how many come.
        part: what came, in the memory of the round, until it is given back.
    """

    peer: int
    into: Tensor | int
    place: Tensor | None
    nbytes: int
    part: Tensor | None = None

    @classmethod
    def of(cls, peer: int, into: Tensor | int) -> _Receive:
        if isinstance(into, int):
            return cls(peer, into, None, into)
        return cls(peer, into, bytes_of(into), into.nbytes)


class RoundPending:
    """The messages of one post; a `weft.wire.interface.DevicePending`.

    Attributes:
        channel: of the post.
        sends: (peer, bytes) of the messages, until a round carries them; they hold their storages.
        receives: in the order asked for.
        operation: what carries them; None: no round yet.
    """

    def __init__(
        self, wire: TorchRounds, sends: Sequence[Send], recvs: Sequence[Recv], channel: int
    ) -> None:
        self.channel = channel
        self.sends = [(peer, bytes_of(tensor)) for peer, tensor in sends]
        self.receives = [_Receive.of(peer, into) for peer, into in recvs]
        self.operation: Operation | None = None
        self._wire = wire
        self._peers = sorted({peer for peer, _ in (*sends, *recvs)})
        self._received: list[Tensor] | None = None

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        operation = self._wire.carry(self)
        if not operation.wait(timeout):
            raise TimeoutError
        if not operation.is_through():
            self._wire.check()
        return self._taken(operation)

    def wait_stream(self) -> list[Tensor]:
        operation = self._wire.carry(self)
        if not operation.is_through():  # else a failure comes too late for it
            self._wire.check()
        operation.wait_stream()
        return self._taken(operation)

    def done(self) -> bool:
        is_through = self.operation is not None and self.operation.is_through()
        return is_through or self._wire.failure() is not None

    def waiting_for(self) -> list[int]:
        is_through = self.operation is not None and self.operation.is_through()
        return [] if is_through else self._peers

    def release(self) -> None:
        self._received = []
        if self.operation is not None:
            self._give_back(self.operation)

    def _taken(self, operation: Operation) -> list[Tensor]:
        """What was received; the first time, it is copied to the tensors that are to be filled."""
        if self._received is None:
            self._received = []
            for receive in self.receives:
                assert receive.part is not None
                if isinstance(receive.into, Tensor):
                    assert receive.place is not None
                    receive.place.copy_(receive.part)
                    self._received.append(receive.into)
                else:
                    self._received.append(receive.part)
            if all(receive.place is not None for receive in self.receives):
                self._give_back(operation)
        return self._received

    def _give_back(self, operation: Operation) -> None:
        """Let go of the memory of the round, which other posts may still use."""
        operation.follow_current_stream()
        for receive in self.receives:
            receive.part = None


# Operations of the group ------------------------------------------------------------------------

Enqueue = Callable[[Any], None]
"""Queues an operation of the group that it is given, in the current stream."""


class Operations:
    """The operations of a process group on one device, in a stream of the wire's own.

    Attributes:
        size: of the group.
        device: of the tensors.
        failure: the first one.
    """

    def __init__(self, group: Callable[[], Any], size: int, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.failure: Failure | None = None
        self._group = group
        self._process = os.getpid()
        self._lock = threading.RLock()
        # of a pool that programs do not draw from: their streams are used again in turn
        self._stream = torch.Stream(device, priority=-1)
        self._under_way: deque[Operation] = deque()
        weakref.finalize(self, _hold, self._under_way).atexit = False

    def begin(self, enqueue: Enqueue, *memory: Tensor) -> Operation:
        """Begin an operation; its memory is held until it is through.

        Raises:
            WireFailed: the group is gone, or has failed.
        """
        try:
            group = self._group()
            if group is None:
                raise RuntimeError("it was destroyed")
            return self._begin(enqueue, group, memory)
        except RuntimeError as error:  # no backend says which rank it is about
            failure = self.fail(Failure("lost", None, f"the process group failed: {error}"))
            raise WireFailed(failure) from error

    def _begin(self, enqueue: Enqueue, group: Any, memory: tuple[Tensor, ...]) -> Operation:
        self._drop_ended()
        current = torch.accelerator.current_stream(self.device)
        before = torch.Event(self.device)
        before.record(current)
        with self._entered() as stream:
            stream.wait_event(before)
            enqueue(group)
            behind = torch.Event(self.device)
            behind.record(stream)
        operation = Operation(self, behind, current, memory)
        self._under_way.append(operation)
        return operation

    def _entered(self) -> torch.Stream:
        """The stream, as an object that nobody else has.

        Entered, an object remembers what was current before: with one object, one thread would
        leave to the stream of another.
        """
        own = self._stream
        return torch.Stream(own.stream_id, own.device_index, own.device_type)

    def fail(self, failure: Failure) -> Failure:
        """Fail with this, unless there is a failure already; the one that counts."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
                self._abort()
            return self.failure

    def _abort(self) -> None:
        """End what is under way. It may take its time, and the one who fails has none."""
        group = self._group()
        if group is not None:
            abort = threading.Thread(
                target=_abort, args=[group, self.device], name="weft abort", daemon=True
            )
            abort.start()

    def close(self, failure: Failure, *, waits: bool) -> None:
        """End all waits, `waits`: once what is under way has ended. Twice is fine.

        A peer may wait for that. Without a wait `_hold` has its memory.
        """
        if os.getpid() != self._process:  # forked, where another thread may have held the lock
            self.failure = self.failure or failure
            return
        with self._lock:
            self.failure = self.failure or failure
        deadline = time.monotonic() + CLOSING
        while waits and time.monotonic() < deadline:
            self._drop_ended()
            if not self._under_way:
                return
            time.sleep(_PAUSES[0])

    def _drop_ended(self) -> None:
        """Forget operations that have ended, and so their memory. They end in their order."""
        # locked: a call that begins an operation and a close may both come here, and who sees that
        # the first one has ended may then pop no other
        with self._lock:
            while self._under_way and self._under_way[0].has_ended():
                self._under_way.popleft()


def _abort(group: Any, device: torch.device) -> None:
    """Abort a group, in a thread of its own."""
    try:
        torch.accelerator.set_device_index(device)  # else this thread is one of device 0
        group.abort()
    except RuntimeError as error:
        _log.warning("a process group could not be aborted: %s", error)


_held: list[Operation] = []  # operations that may still write to their memory


def _hold(under_way: Iterable[Operation]) -> None:
    """Hold the memory of operations whose wire is gone until they have ended."""
    _held.extend(under_way)
    # by `list`, since `copy` may collect garbage between the length and the items, which comes here
    for operation in list(_held):
        if operation.has_ended():
            with contextlib.suppress(ValueError):  # that has removed it
                _held.remove(operation)


class Operation:
    """An operation in a stream, under way or through."""

    def __init__(
        self,
        operations: Operations,
        behind: torch.Event,
        stream: torch.Stream,
        memory: tuple[Tensor, ...],
    ) -> None:
        """
        Args:
            operations: those of its group.
            behind: an event behind it.
            stream: whose allocator the memory is of.
            memory: what it reads and writes.
        """
        self._operations = weakref.ref(operations)  # which it may outlive
        self._device = operations.device
        self._behind = behind
        self._stream = stream
        self._memory = memory
        self._has_ended = False
        self._is_through = False

    def has_ended(self) -> bool:
        """Whether it touches its memory no more, be it well or aborted."""
        if self._has_ended:
            return True
        try:
            self._has_ended = self._behind.query()
        except RuntimeError as error:
            if "captur" in str(error):  # some stream records a graph, and forbids to ask
                return False
            self._has_ended = True
            operations = self._operations()
            if operations is not None:
                operations.fail(Failure("broken", None, f"the device failed: {error}"))
        if self._has_ended:
            self._memory = ()
        return self._has_ended

    def is_through(self) -> bool:
        """Whether it has ended well; any thread. It never blocks."""
        # asked in this order, since it may have ended by the abort that follows a failure
        if not self._is_through and self.has_ended() and not self._has_failed():
            self._is_through = True
        return self._is_through

    def _has_failed(self) -> bool:
        operations = self._operations()
        return operations is not None and operations.failure is not None

    def wait(self, timeout: float | None) -> bool:
        """Wait on the host until it is through, or the wire has failed; False: not in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause, longest = _PAUSES
        while not self.is_through() and not self._has_failed():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def wait_stream(self) -> None:
        """Have the current stream wait."""
        torch.accelerator.current_stream(self._device).wait_event(self._behind)

    def follow_current_stream(self) -> None:
        """Have its memory used again only behind what is in the current stream by now."""
        current = torch.accelerator.current_stream(self._device)
        if current != self._stream:
            event = torch.Event(self._device)
            event.record(current)
            self._stream.wait_event(event)


def _all_to_all(
    received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int], group: Any
) -> None:
    if len(outgoing) > 1:
        dist.all_to_all_single(received, sent, incoming, outgoing, group=group)


def _sum(tensor: Tensor, group: Any) -> None:
    dist.all_reduce(tensor, group=group)


def _between_pairs(parts: Sequence[tuple[int, Tensor, Tensor]], group: Any) -> None:
    """Send and receive between the pairs of some ranks.

    If the group was made with `init_process_group(device_id=...)`, NCCL has a communicator for it,
    and carries all messages at once. Else torch makes a communicator for each pair of ranks, and
    the two wait for each other there. So each rank serves lower peers first, and of a pair the
    lower rank sends first.

    Args:
        parts: for each peer its rank in the group, what goes there, and what comes from there.
        group: of which they are.
    """
    messages: list[tuple[bool, int, Tensor]] = []  # whether it is sent, the peer, and its memory
    for peer, outgoing, incoming in sorted(parts, key=lambda part: part[0]):
        both = [(True, peer, outgoing), (False, peer, incoming)]
        if group.rank() > peer:
            both.reverse()
        messages += [message for message in both if message[2].numel()]
    works = []
    if group.bound_device_id is None:
        for sends, peer, tensor in messages:
            if sends:
                works.append(group.send([tensor], peer, 0))
            else:
                works.append(group.recv([tensor], peer, 0))
    elif messages:
        operations = [
            dist.P2POp(dist.isend if sends else dist.irecv, tensor, group=group, group_peer=peer)
            for sends, peer, tensor in messages
        ]
        works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()  # the stream does, not the host


def _filled(nbytes: int) -> int:
    """Bytes of a message, rounded up to where the next may begin."""
    return -(-nbytes // _GRAIN) * _GRAIN
