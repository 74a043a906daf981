"""A wire over asyncio streams, for tests of the contract of wires.

Each rank opens a TCP connection to every other one, on which it sends, and receives on those that
the others have opened. A thread with an event loop reads whatever comes, and keeps it until it is
asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import os
import secrets
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from weft.wire.interface import Failure, Features, Recv, Send, WireFailed
from weft.wire.start import Start

HOST = os.environ.get("STREAMS_HOST", "127.0.0.1")  # where this rank listens
GREETING = struct.Struct("!16sI")  # the token of who listens, the rank of who connects
FRAME = struct.Struct("!IQ")  # a channel, and how many bytes of a message follow
LINGER = 5.0  # seconds in which a close waits until peers have read what was sent to them


def make_wire(start: Start) -> StreamsWire:
    """The factory: all ranks of a group run it at the same time."""
    wire = StreamsWire(start.rank, start.size)
    wire.listen()
    try:
        wire.connect(start.exchange(wire.address), start.timeout)
    except BaseException:
        wire.close()
        raise
    return wire


class Receive:
    """A message that was asked for."""

    def __init__(self, peer: int, into: Tensor | int) -> None:
        self.peer = peer
        self.is_complete = False
        if isinstance(into, int):
            self.limit = into
            self.result = None
        else:
            self.limit = into.nbytes
            self.result = into
            self.memory = bytes_of(into)

    def fill(self, message: bytes) -> bool:
        """Take a message; whether it has a length that was asked for."""
        length = len(message)
        if self.result is None:
            if length > self.limit:
                return False
            self.result = self.memory = torch.empty(length, dtype=torch.uint8)
        elif length != self.limit:
            return False
        self.memory.numpy()[:] = numpy.frombuffer(message, numpy.uint8)
        self.is_complete = True
        return True


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, where they are."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class StreamsWire:
    """One rank's end of a group.

    The caller's threads and that of the event loop share what is here, with `changed` held.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self.features = Features()

        self.changed = threading.Condition()
        self.reason: Failure | None = None
        self.is_closed = False
        self.lost: set[int] = set()  # peers of whom nothing more comes
        # by peer and channel: messages that nobody has asked for, or receives that nothing came for
        self.arrived: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.asked: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)

        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="streams", daemon=True)
        self.outgoing: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.incoming: set[asyncio.StreamWriter] = set()

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> StreamsPending:
        receives = [Receive(peer, into) for peer, into in recvs]
        with self.changed:
            if self.reason is not None:
                raise WireFailed(self.reason)
            for receive in receives:
                self.asked[receive.peer, channel].append(receive)
                self.match(receive.peer, channel)
            for peer, tensor in sends:
                message = bytes_of(tensor).numpy().tobytes()  # a copy: the tensor may change
                self.loop.call_soon_threadsafe(self.write, peer, channel, message)
        return StreamsPending(self, receives)

    def match(self, peer: int, channel: int) -> None:
        """Give what has come to who asked for it, in order; with `changed` held."""
        arrived = self.arrived[peer, channel]
        asked = self.asked[peer, channel]
        while arrived and asked:
            message = arrived.popleft()
            receive = asked.popleft()
            if not receive.fill(message):
                text = f"rank {peer} sent {len(message)} bytes to a receive of {receive.limit}"
                self.fail(Failure("garbled", peer, text))
        self.changed.notify_all()

    def write(self, peer: int, channel: int, message: bytes) -> None:
        """Send a message, in the thread of the loop."""
        _, writer = self.outgoing[peer]
        writer.write(FRAME.pack(channel, len(message)))
        writer.write(message)

    async def read(self, peer: int, reader: asyncio.StreamReader) -> None:
        """Read what a peer sends, until it leaves or dies."""
        try:
            while True:
                channel, length = FRAME.unpack(await reader.readexactly(FRAME.size))
                message = await reader.readexactly(length)
                with self.changed:
                    self.arrived[peer, channel].append(message)
                    self.match(peer, channel)
        except (EOFError, OSError):
            with self.changed:
                self.lost.add(peer)
                self.changed.notify_all()
        except Exception as error:
            self.abort(Failure("broken", None, f"reading failed: {error!r}"))

    def lease(self, nbytes: int) -> None:
        return None

    def abort(self, failure: Failure) -> None:
        with self.changed:
            self.fail(failure)

    def fail(self, failure: Failure) -> None:
        """Fail with this, unless the wire has failed; with `changed` held."""
        if self.reason is None:
            self.reason = failure
            self.asked.clear()  # nobody writes to memory of a post from here on
        self.changed.notify_all()

    def failure(self) -> Failure | None:
        return self.reason

    def listen(self) -> None:
        """Start the thread, and open a port."""
        self.thread.start()
        self.server = self.run(asyncio.start_server(self.greet, HOST, 0))
        self.token = secrets.token_bytes(16)
        port = self.server.sockets[0].getsockname()[1]
        self.address = self.token + f"{HOST} {port}".encode()

    def connect(self, addresses: list[bytes], timeout: float) -> None:
        """Open a connection to all other ranks."""

        async def open_all() -> None:
            async with asyncio.timeout(timeout):
                for peer, address in enumerate(addresses):
                    if peer != self.rank:
                        token = address[:16]
                        host, port = address[16:].decode().split()
                        reader, writer = await asyncio.open_connection(host, int(port))
                        writer.write(GREETING.pack(token, self.rank))
                        self.outgoing[peer] = reader, writer

        self.run(open_all())

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected: a rank, if it knows the token."""
        self.incoming.add(writer)
        with contextlib.suppress(EOFError, OSError):
            token, peer = GREETING.unpack(await reader.readexactly(GREETING.size))
            if hmac.compare_digest(token, self.token):
                await self.read(peer, reader)
        writer.close()
        self.incoming.remove(writer)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the thread of the loop, and wait for it."""
        running = asyncio.run_coroutine_threadsafe(work, self.loop)
        with self.changed:
            while not running.done():
                self.changed.wait(0.01)  # lets go of `changed`, however often this thread holds it
        return running.result()

    def close(self) -> None:
        if os.getpid() != self.process:
            self.forget()
            return
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            linger = 0.0 if self.reason is not None else LINGER
            self.fail(Failure("aborted", None, "the wire is closed"))
        self.run(self.leave(linger))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def leave(self, linger: float) -> None:
        """Have peers read to the end of what was sent, then end all connections."""
        self.server.close()
        for _, writer in self.outgoing.values():
            with contextlib.suppress(OSError):
                writer.write_eof()  # after what is still to be written
        # a peer that has read to the end closes its side, and so ends the read here
        ends = [reader.read() for reader, _ in self.outgoing.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger):
                await asyncio.gather(*ends, return_exceptions=True)
        for writer in self.writers():
            writer.transport.abort()
        while self.incoming:  # each `greet` sees that, and returns
            await asyncio.sleep(0)

    def forget(self) -> None:
        """In a forked child: let go of the parent's sockets, and do nothing to them."""
        sockets = [writer.get_extra_info("socket") for writer in self.writers()]
        nothing = os.open(os.devnull, os.O_RDWR)
        for sock in [*sockets, *self.server.sockets]:
            if sock.fileno() >= 0:
                os.dup2(nothing, sock.fileno())  # the number stays taken: asyncio closes it, too
        os.close(nothing)

    def writers(self) -> list[asyncio.StreamWriter]:
        return [*self.incoming, *(writer for _, writer in self.outgoing.values())]


class StreamsPending:
    """The messages of one post; its sends are complete, since they were copied."""

    def __init__(self, wire: StreamsWire, receives: list[Receive]) -> None:
        self.wire = wire
        self.receives = receives

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        wire = self.wire
        with wire.changed:
            # ended by `match` and `read` when something comes, by `fail`, or by the timeout
            until = math.inf if timeout is None else time.monotonic() + timeout
            while not self.is_over():
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                wire.changed.wait(min(left, 0.1))  # in pieces, between which handlers run
            missing = self.missing()
            for peer in missing:
                if peer in wire.lost:
                    wire.fail(Failure("lost", peer, f"the connection to rank {peer} ended"))
            if missing:
                raise WireFailed(wire.reason)
        return [receive.result for receive in self.receives]

    def is_over(self) -> bool:
        missing = self.missing()
        return not missing or self.wire.reason is not None or bool(self.wire.lost & missing)

    def missing(self) -> set[int]:
        """The peers of messages that have not come."""
        return {receive.peer for receive in self.receives if not receive.is_complete}

    def wait_stream(self) -> list[Tensor]:
        return self.wait()

    def done(self) -> bool:
        with self.wire.changed:
            return self.is_over()

    def waiting_for(self) -> list[int]:
        with self.wire.changed:
            return sorted(self.missing())

    def release(self) -> None:
        pass  # what came by size has memory of its own
