"""A wire for weft over asyncio streams: the one that the manual walks through, "To write a wire".

One thread runs an event loop with a TCP connection to each peer. A frame is a channel, a length and
the message. What comes is read at once and kept until it is asked for, so no channel stands in
another's way, and a peer that writes is never held up.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from weft.wire import Failure, Features, Recv, Send, Start, WireFailed

HOST = os.environ.get("STREAMS_HOST", "127.0.0.1")  # where this rank listens
FRAME = struct.Struct("!IQ")  # channel, and how many bytes of a message follow
GREETING = struct.Struct("!16sI")  # the listener's token, and the rank that connects
LINGER = 5.0  # seconds in which a close waits for peers to read what was sent to them


def make_wire(start: Start) -> StreamsWire:
    """The factory: every rank of the group runs it at the same time."""
    wire = StreamsWire(start)
    try:
        addresses = start.exchange(wire.listen())
        wire.connect(addresses, start.timeout)
    except BaseException:
        wire.close()
        raise
    return wire


class Receive:
    """A message that was asked for."""

    def __init__(self, peer: int, into: Tensor | int) -> None:
        self.peer = peer
        self.limit = into if isinstance(into, int) else None
        self.result = None if isinstance(into, int) else into
        self.memory = None if isinstance(into, int) else bytes_of(into)
        self.is_complete = False

    def fill(self, data: bytes) -> str:
        """Take the message; what is wrong with its length, or nothing."""
        if self.limit is not None and len(data) > self.limit:
            return f"{len(data)} bytes, where at most {self.limit} were asked for"
        if self.memory is not None and len(data) != self.memory.numel():
            return f"{len(data)} bytes, where {self.memory.numel()} were asked for"
        if self.memory is None:
            self.memory = self.result = torch.empty(len(data), dtype=torch.uint8)
        self.memory.numpy()[:] = numpy.frombuffer(data, numpy.uint8)
        self.is_complete = True
        return ""


class StreamsWire:
    """One rank's end. `changed` guards all that the caller's thread and the loop's share."""

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.size = start.size
        self.device = torch.device("cpu")
        self.features = Features()
        self.changed = threading.Condition()
        self.failed: Failure | None = None
        self.lost: set[int] = set()
        self.asked: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)
        self.arrived: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.is_closed = False
        self.process = os.getpid()
        self.token = secrets.token_bytes(16)
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.readers: list[asyncio.Task[None]] = []
        self.all_are_here = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="streams", daemon=True)
        self.thread.start()

    # what a Wire does

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> StreamsPending:
        receives = [Receive(peer, into) for peer, into in recvs]
        with self.changed:
            if self.failed is not None:
                raise WireFailed(self.failed)
            for receive in receives:
                self.asked[receive.peer, channel].append(receive)
                self.match(receive.peer, channel)
            for peer, tensor in sends:
                message = bytes_of(tensor).numpy().tobytes()  # a copy, so the send is complete
                frame = FRAME.pack(channel, len(message))
                self.loop.call_soon_threadsafe(self.write, peer, frame, message)
        return StreamsPending(self, receives)

    def lease(self, nbytes: int) -> None:
        return None

    def abort(self, failure: Failure) -> None:
        with self.changed:
            self.fail(failure)

    def failure(self) -> Failure | None:
        return self.failed

    def close(self) -> None:
        if os.getpid() != self.process:  # a forked child: its parent goes on
            self.let_go()
            return
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            linger = LINGER if self.failed is None else 0.0
            self.fail(Failure("aborted", None, "the wire is closed"))
        asyncio.run_coroutine_threadsafe(self.leave(linger), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    # the state, with `changed` held

    def fail(self, failure: Failure) -> None:
        if self.failed is None:
            self.failed = failure
            self.asked.clear()  # from here on nothing is written to memory of any post
        self.changed.notify_all()

    def match(self, peer: int, channel: int) -> None:
        """Give messages that have come to those that were asked for, in order."""
        arrived = self.arrived[peer, channel]
        asked = self.asked[peer, channel]
        while arrived and asked:
            fault = asked.popleft().fill(arrived.popleft())
            if fault:
                self.fail(Failure("garbled", peer, f"rank {peer} sent {fault}"))

    # connecting

    def listen(self) -> bytes:
        """Open a port; what other ranks need to know of it."""

        async def serve() -> int:
            self.server = await asyncio.start_server(self.greet, HOST, 0)
            return self.server.sockets[0].getsockname()[1]

        port = asyncio.run_coroutine_threadsafe(serve(), self.loop).result()
        return self.token + f"{HOST} {port}".encode()

    def connect(self, addresses: list[bytes], timeout: float) -> None:
        """Connect to the ranks below this one, and wait for those above it."""

        async def meet() -> None:
            for peer, address in enumerate(addresses[: self.rank]):
                host, port = address[16:].decode().split()
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(GREETING.pack(address[:16], self.rank))
                self.add(peer, reader, writer)
            if self.size > 1:
                await asyncio.wait_for(self.all_are_here.wait(), timeout)

        asyncio.run_coroutine_threadsafe(meet(), self.loop).result()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected: a rank above this one, if it knows the token."""
        try:
            token, peer = GREETING.unpack(await reader.readexactly(GREETING.size))
        except (EOFError, OSError, asyncio.CancelledError):  # or it says nothing until the close
            token, peer = b"", -1
        is_rank = self.rank < peer < self.size and peer not in self.writers
        if is_rank and hmac.compare_digest(token, self.token):
            self.add(peer, reader, writer)
        else:
            writer.close()

    def add(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers[peer] = writer
        self.readers.append(self.loop.create_task(self.read(peer, reader)))
        if len(self.writers) == self.size - 1:
            self.all_are_here.set()

    # in the thread of the loop

    def write(self, peer: int, frame: bytes, message: bytes) -> None:
        self.writers[peer].write(frame)  # if the peer is gone this does nothing
        self.writers[peer].write(message)

    async def read(self, peer: int, reader: asyncio.StreamReader) -> None:
        """Read what a peer sends until it ends."""
        try:
            while True:
                frame = await reader.readexactly(FRAME.size)
                channel, length = FRAME.unpack(frame)
                message = await reader.readexactly(length)
                with self.changed:
                    self.arrived[peer, channel].append(message)
                    self.match(peer, channel)
                    self.changed.notify_all()
        except (EOFError, OSError):
            with self.changed:
                self.lost.add(peer)
                self.changed.notify_all()
        except Exception as error:
            self.abort(Failure("broken", None, f"reading failed: {error!r}"))
        self.writers[peer].close()  # so that the peer's close need not wait

    async def leave(self, linger: float) -> None:
        """Let peers read to the end of what was sent, then close the connections."""
        self.server.close()
        for writer in self.writers.values():
            if writer.can_write_eof() and not writer.is_closing():
                writer.write_eof()  # after what is still to be written
        if self.readers:
            await asyncio.wait(self.readers, timeout=linger)
        for writer in self.writers.values():
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def let_go(self) -> None:
        """Close this process's descriptors: no lock, no thread, and nobody is told."""
        sockets = [writer.get_extra_info("socket") for writer in self.writers.values()]
        for sock in [*sockets, *self.server.sockets]:
            if sock.fileno() >= 0:
                os.close(sock.fileno())
        self.writers.clear()


class StreamsPending:
    """The messages of one post. Sends are complete at once, since `post` copies."""

    def __init__(self, wire: StreamsWire, receives: list[Receive]) -> None:
        self.wire = wire
        self.receives = receives

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        wire = self.wire
        with wire.changed:
            # ends with the last message, with a failure, or when a peer that it needs is gone
            if not wire.changed.wait_for(self.is_over, timeout):
                raise TimeoutError
            for peer in self.open():
                if peer in wire.lost:
                    wire.fail(Failure("lost", peer, f"the connection to rank {peer} ended"))
            if self.open():
                raise WireFailed(wire.failed)
        return [receive.result for receive in self.receives]

    def wait_stream(self) -> list[Tensor]:
        return self.wait()

    def done(self) -> bool:
        with self.wire.changed:
            return self.is_over()

    def waiting_for(self) -> list[int]:
        with self.wire.changed:
            return self.open()

    def release(self) -> None:
        pass  # what came by size has memory of its own

    def open(self) -> list[int]:
        """The peers of messages that have not come."""
        return sorted({receive.peer for receive in self.receives if not receive.is_complete})

    def is_over(self) -> bool:
        peers = self.open()
        return not peers or self.wire.failed is not None or not self.wire.lost.isdisjoint(peers)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)
