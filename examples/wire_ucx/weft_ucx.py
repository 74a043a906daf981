"""A wire for weft over UCX, which carries messages by what is best between two ranks.

A message travels with a tag that says who sends it, and on which channel. Nothing is received
before it has come: UCX keeps what came unasked, and tells its length before it gets memory.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import weft_ucp as ucp
from torch import Tensor

from weft.wire import CHANNELS, Failure, Features, Recv, Send, Start, WireFailed

SENDER = 32  # the bits of a tag from here on are the rank of the sender, those below its channel
GREETING = CHANNELS  # in the place of a channel: the first message of a rank
GOODBYE = CHANNELS + 1  # and its last one
LINGER = 5.0  # seconds in which a close waits until peers have received what was sent to them
PAUSE = 5e-5  # seconds before UCX is asked again that cannot tell when it could go on
PATIENCE = 0.5  # seconds in which what is being received may come to its end after a failure


def make_wire(start: Start) -> UcxWire:
    """The factory: all ranks of a group run it at the same time."""
    if start.device.type != "cpu":
        raise ValueError(f"it carries tensors of the CPU, not of {start.device}")
    wire = UcxWire(start)
    try:
        wire.connect(start.exchange(wire.worker.address), start.timeout)
        start.exchange(b"")  # from here on all are connected, and UCX opens no more sockets
        wire.worker.remember_sockets()
    except BaseException:
        wire.close()
        raise
    return wire


class Transfer:
    """A message on its way, and the memory that UCX reads or writes for it."""

    def __init__(self, peer: int, memory: Tensor | None = None) -> None:
        self.peer = peer
        self.memory = memory
        self.is_complete = False


class Receive(Transfer):
    """A message that was asked for."""

    def __init__(self, peer: int, into: Tensor | int) -> None:
        if isinstance(into, int):
            super().__init__(peer)
            self.limit = into
            self.result = None
        else:
            super().__init__(peer, bytes_of(into))
            self.limit = into.nbytes
            self.result = into
        self.lease = None

    def accepts(self, length: int) -> bool:
        """Whether a message of this length was asked for."""
        if self.result is None:
            return length <= self.limit
        return length == self.limit


def are_complete(transfers: list[Transfer]) -> bool:
    return all(each.is_complete for each in transfers)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, where they are."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class UcxWire:
    """One rank's end of a group.

    The caller's threads and the one that moves messages share what is here, and UCX's worker, with
    `changed` held.
    """

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.size = start.size
        self.device = start.device
        self.features = Features()

        self.changed = threading.Condition()
        self.reason: Failure | None = None
        self.patience = 0.0  # until when what is being received may come, once there is a reason
        self.is_closed = False
        self.has_ended = False  # the thread is to end
        self.gone: dict[int, str] = {}  # peers of whom nothing more comes, and why
        # by peer and channel: messages that nobody has asked for, or receives that nothing came for
        self.arrived: dict[tuple[int, int], deque[ucp.Message]] = defaultdict(deque)
        self.asked: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)
        self.under_way: dict[int, Transfer] = {}  # what UCX has begun, by its number
        self.numbers = itertools.count(1)

        self.process = os.getpid()
        self.memory = start.memory
        self.worker = ucp.Worker()
        self.endpoints: dict[int, int] = {}  # by peer, but for those whose connections have failed
        self.thread = threading.Thread(target=self.run, name="ucx", daemon=True)

    def connect(self, addresses: list[bytes], timeout: float) -> None:
        """Connect to all other ranks, and wait until all connections stand."""
        with self.changed:
            for peer, address in enumerate(addresses):
                if peer != self.rank:
                    self.endpoints[peer] = self.worker.connect(address)
            greetings = self.say_to_all(GREETING)
            self.thread.start()
            # ended by `finish`, or by `lose` and `fail`
            self.changed.wait_for(
                lambda: are_complete(greetings) or self.gone or self.reason is not None, timeout
            )
            for each in greetings:
                if not each.is_complete:
                    why = self.gone.get(each.peer, "no answer")
                    raise OSError(f"UCX did not connect to rank {each.peer}: {why}")

    def say_to_all(self, what: int) -> list[Transfer]:
        """Send a message that is complete when its peer has received it; with `changed` held."""
        words = [Transfer(peer) for peer in self.endpoints if peer not in self.gone]
        for each in words:
            say = self.worker.send_until_received
            self.begin(each, say, self.endpoints[each.peer], self.rank << SENDER | what)
        return words

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> UcxPending:
        receives = [Receive(peer, into) for peer, into in recvs]
        transfers: list[Transfer] = [Transfer(peer, bytes_of(tensor)) for peer, tensor in sends]
        tag = self.rank << SENDER | channel
        with self.changed:
            if self.reason is not None:
                raise WireFailed(self.reason)
            for receive in receives:
                self.asked[receive.peer, channel].append(receive)
                self.match(receive.peer, channel)
            for each in transfers:
                if each.peer in self.endpoints:  # else it never is complete, and its peer is gone
                    where = each.memory.data_ptr(), each.memory.nbytes
                    self.begin(each, self.worker.send, self.endpoints[each.peer], tag, *where)
            if self.under_way:
                self.worker.wake()
        return UcxPending(self, transfers, receives)

    def match(self, peer: int, channel: int) -> None:
        """Receive what has come where it was asked for, in order; with `changed` held."""
        arrived = self.arrived[peer, channel]
        asked = self.asked[peer, channel]
        while arrived and asked and self.reason is None:
            length = arrived[0].length
            if not asked[0].accepts(length):
                text = f"rank {peer} sent {length} bytes to a receive of {asked[0].limit}"
                self.fail(Failure("garbled", peer, text))
                return
            message = arrived.popleft()
            receive = asked.popleft()
            if receive.memory is None:
                receive.lease = self.memory.lease(length)
                receive.memory = receive.result = receive.lease.tensor
            address = receive.memory.data_ptr()
            self.begin(receive, self.worker.receive, message, address, length)

    def begin(self, transfer: Transfer, call: Callable[..., int], *arguments: Any) -> None:
        """Begin what a method of the worker begins; with `changed` held."""
        number = next(self.numbers)
        self.under_way[number] = transfer
        status = call(*arguments, number)
        if status != ucp.IN_PROGRESS:
            self.finish(number, status)

    # What the thread does ----------------------------------------------------------------------

    def run(self) -> None:
        """Move messages, until the wire is closed."""
        ready = select.poll()
        ready.register(self.worker.descriptor, select.POLLIN)
        try:
            while True:
                with self.changed:
                    self.advance()
                    if self.has_ended:
                        return
                    self.give_up_receives()
                    is_armed = self.worker.arm()
                    limit = None if self.reason is None else 100
                if is_armed:
                    ready.poll(limit)  # ended by UCX, by `worker.wake`, or after milliseconds
                else:
                    time.sleep(PAUSE)  # such as for a peer to make room in shared memory
        except Exception as error:
            self.abort(Failure("broken", None, f"moving messages failed: {error!r}"))
            self.forget_transfers()

    def forget_transfers(self) -> None:
        """Nothing moves any more, so nothing is under way."""
        with self.changed:
            self.under_way.clear()
            self.changed.notify_all()

    def advance(self) -> None:
        """Do all that can be done now; with `changed` held."""
        has_more = True
        while has_more:
            has_more = self.worker.progress()
            while self.worker.finished:
                self.finish(*self.worker.finished.popleft())
            while self.worker.failed:
                endpoint, status = self.worker.failed.popleft()
                peers = {its: peer for peer, its in self.endpoints.items()}
                if endpoint in peers:
                    self.lose(peers[endpoint], ucp.text_of(status))
            while (message := self.worker.probe()) is not None:
                self.take(message)
        self.changed.notify_all()

    def take(self, message: ucp.Message) -> None:
        """A message has come."""
        peer = message.tag >> SENDER
        channel = message.tag & (1 << SENDER) - 1
        if channel >= CHANNELS:
            self.begin(Transfer(peer), self.worker.receive, message, 0, 0)  # so the peer knows
            if channel == GOODBYE:
                self.gone.setdefault(peer, "it has left")
        else:
            self.arrived[peer, channel].append(message)
            self.match(peer, channel)

    def finish(self, number: int, status: int) -> None:
        """What UCX has begun is complete, or has failed."""
        transfer = self.under_way.pop(number, None)
        if transfer is None:
            return  # it was given up
        if status == ucp.OK:
            transfer.is_complete = True
        else:
            self.lose(transfer.peer, ucp.text_of(status))

    def lose(self, peer: int, why: str) -> None:
        """The connection to a peer has failed."""
        self.gone.setdefault(peer, why)
        endpoint = self.endpoints.pop(peer, None)
        if endpoint is not None:
            self.begin(Transfer(peer), self.worker.disconnect, endpoint)

    # Failing and leaving -----------------------------------------------------------------------

    def lease(self, nbytes: int) -> None:
        return None

    def abort(self, failure: Failure) -> None:
        with self.changed:
            self.fail(failure)

    def fail(self, failure: Failure) -> None:
        """Fail with this, unless the wire has failed; with `changed` held."""
        if self.reason is None:
            self.reason = failure
            self.asked.clear()  # no receive begins from here on
            self.patience = time.monotonic() + PATIENCE
            self.worker.wake()
        self.changed.notify_all()

    def is_quiet(self) -> bool:
        """Whether UCX writes to no memory of a post; with `changed` held."""
        return not self.receiving()

    def receiving(self) -> set[int]:
        """The peers of what is being received."""
        return {each.peer for each in self.under_way.values() if isinstance(each, Receive)}

    def give_up_receives(self) -> None:
        """End what is still being received some time after a failure; with `changed` held."""
        if self.reason is not None and time.monotonic() > self.patience:
            for peer in self.receiving():
                self.lose(peer, "its message did not come to its end")

    def failure(self) -> Failure | None:
        return self.reason

    def close(self) -> None:
        if os.getpid() != self.process:
            self.worker.forget()
            return
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            linger = 0.0 if self.reason is not None else LINGER
            self.fail(Failure("aborted", None, "the wire is closed"))
            goodbyes = self.say_to_all(GOODBYE)
            # one was received, or it crosses that of a peer, who then awaits nothing any more
            self.changed.wait_for(
                lambda: are_complete([each for each in goodbyes if each.peer not in self.gone]),
                linger,
            )
            self.has_ended = True
            self.worker.wake()
        if self.thread.ident is not None:  # else the factory has failed before it began
            self.thread.join()
        with self.changed:
            self.tidy_up()
        self.worker.close()
        self.forget_transfers()

    def tidy_up(self) -> None:
        """Have UCX end what is under way; with `changed` held."""
        for messages in self.arrived.values():
            for message in messages:
                self.begin(Transfer(self.rank), self.worker.receive, message, 0, 0)
        for peer in list(self.endpoints):
            self.lose(peer, "the wire is closed")
        until = time.monotonic() + PATIENCE
        while self.under_way and time.monotonic() < until:
            self.advance()


class UcxPending:
    """The messages of one post."""

    def __init__(self, wire: UcxWire, sends: list[Transfer], receives: list[Receive]) -> None:
        self.wire = wire
        self.transfers = [*sends, *receives]
        self.receives = receives

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        wire = self.wire
        with wire.changed:
            # ended by the other thread, which notifies whenever it has moved something
            until = math.inf if timeout is None else time.monotonic() + timeout
            while not self.is_over():
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                wire.changed.wait(min(left, 0.1))  # in pieces, between which handlers run
            missing = self.missing()
            for peer in sorted(missing & wire.gone.keys()):
                text = f"the connection to rank {peer} ended: {wire.gone[peer]}"
                wire.fail(Failure("lost", peer, text))
            if missing:
                wire.changed.wait_for(wire.is_quiet, LINGER)  # `give_up_receives` sees to that
                raise WireFailed(wire.reason)
        return [receive.result for receive in self.receives]

    def is_over(self) -> bool:
        missing = self.missing()
        return not missing or self.wire.reason is not None or bool(self.wire.gone.keys() & missing)

    def missing(self) -> set[int]:
        """The peers of messages that are not complete."""
        return {each.peer for each in self.transfers if not each.is_complete}

    def wait_stream(self) -> list[Tensor]:
        return self.wait()

    def done(self) -> bool:
        with self.wire.changed:
            return self.is_over()

    def waiting_for(self) -> list[int]:
        with self.wire.changed:
            return sorted(self.missing())

    def release(self) -> None:
        for receive in self.receives:
            if receive.lease is not None:
                receive.lease.release()
