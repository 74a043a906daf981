"""`weft.testing.check_wire`: each clause finds a wire that breaks it.

A broken wire is a right one with one fault. Most of them stand between a right wire and its user.
Ranks are threads, unless a clause needs processes; there the right wire is the manual's example.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections import deque
from pathlib import Path

import pytest
import torch

from weft.base.errors import WeftError
from weft.base.memory import tensor_of
from weft.testing import (
    check_wire,
    held,
    ranks_as_processes,
    ranks_as_threads,
    wire_clauses,
    wire_processes,
    wires,
)
from weft.testing.wires import NUMBERS
from weft.wire.in_process import room
from weft.wire.in_process.room import Room
from weft.wire.in_process.threads import ThreadWire, thread_wires
from weft.wire.interface import MEETS, Failure, Features, WireFailed, check_meeting
from weft.wire.tcp import wire as tcp

sys.path.append(str(Path(__file__).parent))

import weft_streams


class Between:
    """A wire that does what another does, but for what subclasses change."""

    def __init__(self, inner):
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self.features = inner.features

    def post(self, sends=(), recvs=(), channel=0):
        return self.pending(self.inner.post(sends, recvs, channel))

    def pending(self, inner):
        return inner

    @property
    def near(self):
        return self.inner.near

    def meet(self, message, ranks):
        return self.meeting(self.inner.meet(message, ranks))

    def meeting(self, inner):
        return inner

    def lease(self, nbytes):
        return self.inner.lease(nbytes)

    def abort(self, failure):
        self.inner.abort(failure)

    def failure(self):
        return self.inner.failure()

    def close(self):
        self.inner.close()


class Later:
    """The messages of a post, as another pending has them, but for what subclasses change."""

    def __init__(self, inner, wire=None):
        self.inner = inner
        self.wire = wire

    def wait(self, timeout=None):
        return self.inner.wait(timeout)

    def wait_stream(self):
        return self.inner.wait_stream()

    def done(self):
        return self.inner.done()

    def waiting_for(self):
        return self.inner.waiting_for()

    def release(self):
        self.inner.release()


def between(wire_type):
    """Makes groups of wires that stand before right ones."""
    return lambda size: [wire_type(inner) for inner in thread_wires(size)]


def meeting(room_type):
    """Makes groups of wires whose messages meet in another room."""

    def make(size):
        shared = room_type(size)
        return [ThreadWire(rank, shared) for rank in range(size)]

    return make


def waiting(wait):
    """Makes groups of wires on which a wait does `wait(pending, timeout)`."""

    class Waits(Later):
        def wait(self, timeout=None):
            return wait(self, timeout)

    class Wire(Between):
        def pending(self, inner):
            return Waits(inner, self)

    return between(Wire)


class NoFeatures(Between):
    def __init__(self, inner):
        super().__init__(inner)
        self.features = None


class LastFirst(Between):
    """Of each two posts the second one's messages go first."""

    first = None

    def post(self, sends=(), recvs=(), channel=0):
        pending = super().post((), recvs, channel)
        if self.first is None:
            self.first = sends, (), channel
        else:
            self.inner.post(sends, (), channel)
            self.inner.post(*self.first)
            self.first = None
        return pending


def cuts_channels(bits):
    """Makes groups of wires that send so many bits of a channel along."""

    class Cuts(Between):
        def post(self, sends=(), recvs=(), channel=0):
            return super().post(sends, recvs, channel % (1 << bits))

    return between(Cuts)


class Astray(Room):
    """A message that nobody has asked for goes to another channel's receive of its length."""

    def add(self, end, key):
        if key not in self.unmet:
            key = next((other for other in self.unmet if self.is_like(end, key, other)), key)
        super().add(end, key)

    def is_like(self, end, key, other):
        first = self.unmet[other][0]
        return key[:2] == other[:2] and (first.is_send, first.nbytes) == (
            not end.is_send,
            end.nbytes,
        )


class InTurn(Between):
    """A post is complete only after all posts before it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.posts = []

    def pending(self, inner):
        self.posts.append(inner)
        return Waits(inner, self)


class Waits(Later):
    def wait(self, timeout=None):
        for earlier in self.wire.posts:
            if earlier is self.inner:
                break
            earlier.wait(timeout)
        return self.inner.wait(timeout)


class NothingEmpty(Between):
    def post(self, sends=(), recvs=(), channel=0):
        some = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        takes = [(p, into) for p, into in recvs if not isinstance(into, torch.Tensor) or len(into)]
        return super().post(some, takes[: len(some)], channel)


class BySize(Between):
    """Receives by size, with a limit of its own, and makes of what came what was asked for."""

    def post(self, sends=(), recvs=(), channel=0):
        takes = [(peer, 8 << 20) for peer, _ in recvs]
        pending = Fits(self.inner.post(sends, takes, channel))
        pending.recvs = recvs
        return pending


class Fits(Later):
    def wait(self, timeout=None):
        results = []
        for (_, into), view in zip(self.recvs, self.inner.wait(timeout), strict=True):
            if isinstance(into, int):
                results.append(view[:into])
            else:
                memory = into.view(-1).view(torch.uint8)
                memory[: len(view)] = view[: len(memory)]
                results.append(into)
        return results


class LeftOver(Room):
    """A short message in a long receive leaves room, into which the next one gets lost."""

    def __init__(self, size):
        super().__init__(size)
        self.left = False

    def copy(self, source, target):
        self.left = self.left or (target.is_sized and source.nbytes < target.nbytes)
        super().copy(source, target)

    def add(self, end, key):
        if end.is_send and self.left and key not in self.unmet:
            end.pending.complete()
        else:
            super().add(end, key)


class Few(Between):
    """Takes a thousand posts."""

    count = 0

    def post(self, sends=(), recvs=(), channel=0):
        self.count += 1
        if self.count > 1000:
            self.inner.abort(Failure("broken", self.rank, "too many posts"))
        return super().post(sends, recvs, channel)


class SendsFirst(Between):
    """A long send is waited for before anything is received."""

    def post(self, sends=(), recvs=(), channel=0):
        if any(tensor.nbytes > 1 << 20 for _, tensor in sends):
            self.inner.post(sends, (), channel).wait(1.0)
            sends = ()
        return super().post(sends, recvs, channel)


class DropsEarly(Room):
    """What comes before its receive is lost."""

    def add(self, end, key):
        if end.is_send and key not in self.unmet:
            end.pending.complete()
        else:
            super().add(end, key)


class SendsUnwaited(Between):
    """A send is said to be complete, though its bytes are taken as the next post is made."""

    unsent = (), (), 0

    def post(self, sends=(), recvs=(), channel=0):
        self.inner.post(*self.unsent)
        self.unsent = sends, (), channel
        return super().post((), recvs, channel)


class Lazy(Between):
    """Looks at the tensor when its bytes are sent, in the wait."""

    def post(self, sends=(), recvs=(), channel=0):
        pending = super().post((), recvs, channel)
        return SendsInWait(pending, self, sends, channel)


class SendsInWait(Later):
    def __init__(self, inner, wire, sends, channel):
        super().__init__(inner, wire)
        self.unsent = sends, (), channel

    def wait(self, timeout=None):
        if self.unsent is not None:
            self.wire.inner.post(*self.unsent).wait(timeout)
            self.unsent = None
        return self.inner.wait(timeout)


class OneBuffer(Between):
    """All that is received by size lies in the same memory."""

    def __init__(self, inner):
        super().__init__(inner)
        self.buffer = torch.empty(100_000, dtype=torch.uint8)

    def pending(self, inner):
        return InBuffer(inner, self)


class InBuffer(Later):
    results = None

    def wait(self, timeout=None):
        received = self.inner.wait(timeout)
        if self.results is None:
            self.results = [self.moved(tensor) for tensor in received]
        return self.results

    def moved(self, tensor):
        return self.wire.buffer[: len(tensor)].copy_(tensor)


def aborts_when_late(pending, timeout):
    try:
        return pending.inner.wait(timeout)
    except TimeoutError:
        pending.wire.abort(Failure("broken", pending.wire.rank, "it took too long"))
        raise


def goes_to_the_end(pending, timeout):
    """Ask again, once a wait ran out: behind what was asked for since."""
    try:
        return pending.inner.wait(timeout)
    except TimeoutError:
        with pending.wire.inner.changed:
            for ends in pending.wire.inner.room.unmet.values():
                own = [end for end in ends if end.pending is pending.inner]
                for end in own:
                    ends.remove(end)
                    ends.append(end)
        raise


class Translates(Between):
    def abort(self, failure):
        super().abort(Failure(failure.kind, failure.peer, f"aborted: {failure.text}"))


class WritesOn(Between):
    """Goes on to write after an abort, as soon as the caller does."""

    def post(self, sends=(), recvs=(), channel=0):
        until = time.monotonic() + 60.0
        while self.rank and sends and not self.inner.room.has_failed and time.monotonic() < until:
            time.sleep(0.001)  # nothing comes before the other's abort, however late that is
        self.places = [into for _, into in recvs] or getattr(self, "places", [])
        return super().post(sends, recvs, channel)

    def abort(self, failure):
        super().abort(failure)
        threading.Thread(target=self.write_on, daemon=True).start()

    def write_on(self):
        place, until = self.places[-1], time.monotonic() + 60.0
        while not (place == 7).all() and time.monotonic() < until:
            if self.rank in self.inner.room.gone:  # by an abort after the caller had written
                return  # in torch's code as the process ends it would crash that
            time.sleep(0.01)
        place.fill_(1)


class NoticesEarly(Between):
    """Fails as soon as somebody is gone; in the middle of swaps somebody is."""

    def post(self, sends=(), recvs=(), channel=0):
        until = time.monotonic() + 60.0
        while sends and recvs and not self.inner.room.gone and time.monotonic() < until:
            time.sleep(0.001)
        for peer in self.inner.room.gone:
            self.inner.abort(Failure("lost", peer, "it is gone"))
        return super().post(sends, recvs, channel)


class Reopens(Between):
    """Can be used after a close, though nothing arrives."""

    def post(self, sends=(), recvs=(), channel=0):
        try:
            return super().post(sends, recvs, channel)
        except WireFailed:
            return thread_wires(1)[0].post()


class MovesInWait(Between):
    def post(self, sends=(), recvs=(), channel=0):
        pending = Unsent(None, self)
        pending.given = sends, recvs, channel
        return pending


class Unsent(Later):
    def wait(self, timeout=None):
        if self.inner is None:
            self.inner = self.wire.inner.post(*self.given)
        return self.inner.wait(timeout)

    def done(self):
        return self.inner is not None and self.inner.done()


class NeverDone(Between):
    def pending(self, inner):
        return DoneLast(inner)


class DoneLast(Later):
    def done(self):
        return False


class NamesAll(Between):
    def pending(self, inner):
        return WaitsForAll(inner, self)


class WaitsForAll(Later):
    def waiting_for(self):
        return list(range(1, self.wire.size))


class LeasesAnywhere(Between):
    def lease(self, nbytes):
        return Unaligned(torch.empty(nbytes + 1, dtype=torch.uint8)[1:])


class Unaligned:
    def __init__(self, tensor):
        self.tensor = tensor

    def release(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


class LosesWakeUps(Between):
    def __init__(self, inner):
        super().__init__(inner)
        self.waits = 0

    def pending(self, inner):
        return Sleeps(inner, self)


class Sleeps(Later):
    def wait(self, timeout=None):
        self.wire.waits += 1
        if self.wire.waits == 2000:
            raise TimeoutError
        return self.inner.wait(timeout)


class CancelsDropped(Between):
    def pending(self, inner):
        return Cancels(inner, self)


class Cancels(Later):
    def __del__(self):
        if not self.inner.done():
            self.wire.abort(Failure("broken", self.wire.rank, "a post was dropped"))


class ReceivesWhileKept(Between):
    """A receive whose pending nobody keeps is cancelled."""

    def pending(self, inner):
        return CancelsReceives(inner, self)


class CancelsReceives(Later):
    def __del__(self):
        room = self.wire.inner.room
        with self.wire.inner.changed:
            for key, ends in list(room.unmet.items()):
                others = [end for end in ends if end.is_send or end.pending is not self.inner]
                room.unmet[key] = deque(others)
                if not others:
                    del room.unmet[key]


class LosesOne(Between):
    """Of ten thousand messages one is lost."""

    count = 0

    def post(self, sends=(), recvs=(), channel=0):
        kept = []
        for each in sends:
            self.count += 1
            if self.count % 10_000:
                kept.append(each)
        return super().post(kept, recvs, channel)


class Slow(Between):
    def post(self, sends=(), recvs=(), channel=0):
        if any(tensor.nbytes > 1 << 20 for _, tensor in sends):
            time.sleep(0.2)
        return super().post(sends, recvs, channel)


class SlowToTell(Between):
    def failure(self):
        time.sleep(0.2)
        return super().failure()


LEFT = []
"""Descriptors that wires have left behind."""


@pytest.fixture
def cleared(monkeypatch):
    """What wires leave behind in this process is soon missed, and gone after the test."""
    monkeypatch.setattr(held, "patient", lambda seconds: seconds / 5)
    yield
    for descriptor in LEFT:
        os.close(descriptor)
    LEFT.clear()


class LeavesDescriptors(Between):
    """Each tenth post takes a descriptor, and no close gives it back."""

    count = 0

    def post(self, sends=(), recvs=(), channel=0):
        self.count += 1
        if self.count % 10 == 0:
            LEFT.append(os.open(os.devnull, os.O_RDONLY))
        return super().post(sends, recvs, channel)


class LeavesAThread(Between):
    def __init__(self, inner):
        super().__init__(inner)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class GoesOn(SendsUnwaited):
    """`wait_stream` does not wait, though nothing has come and there is no stream that would."""

    def post(self, sends=(), recvs=(), channel=0):
        pending = Unwaited(super().post(sends, recvs, channel))
        pending.places = [into for _, into in recvs]
        return pending


class Unwaited(Later):
    def wait_stream(self):
        return self.places


class InRounds(Between):
    """Says that it needs rounds, and has what such a wire has, though it needs none."""

    def __init__(self, inner):
        super().__init__(inner)
        self.features = Features(lockstep=True, reduces=frozenset(REDUCES))

    def among(self, ranks):
        return Part(self, ranks)

    def all_reduce(self, tensor, op):
        return Sum(self, tensor, op)

    def drop(self):
        self.close()


REDUCES = [("sum", torch.float32), ("sum", torch.int64), ("max", torch.bfloat16)]


class Part(Between):
    """The wire of some ranks, in the order given."""

    def __init__(self, whole, ranks):
        super().__init__(whole)
        self.rank = ranks.index(whole.rank)
        self.size = len(ranks)
        self.ranks = ranks

    def post(self, sends=(), recvs=(), channel=0):
        sends = [(self.ranks[peer], tensor) for peer, tensor in sends]
        recvs = [(self.ranks[peer], into) for peer, into in recvs]
        return self.inner.post(sends, recvs, channel)


class Sum(Later):
    """Sends the tensor to all, and adds in the order of ranks."""

    def __init__(self, wire, tensor, op):
        self.op = {"sum": torch.add, "max": torch.maximum}[op]
        self.tensor = tensor
        self.parts = [torch.empty_like(tensor) for _ in range(wire.size)]
        self.parts[wire.rank] = tensor.clone()
        others = [rank for rank in range(wire.size) if rank != wire.rank]
        recvs = [(peer, self.parts[peer]) for peer in others]
        super().__init__(wire.post([(peer, tensor) for peer in others], recvs))

    def wait(self, timeout=None):
        self.inner.wait(timeout)
        self.tensor.copy_(self.parts[0])
        for part in self.parts[1:]:
            self.op(self.tensor, part, out=self.tensor)
        return [self.tensor]


class AscendingPart(InRounds):
    def among(self, ranks):
        return Part(self, sorted(ranks))


class ReducesOnOneRank(InRounds):
    def all_reduce(self, tensor, op):
        place = tensor if self.rank == 0 else tensor.clone()
        return Sum(self, place, op)


class Shortens(Between):
    """Loses what is beyond a limit."""

    def post(self, sends=(), recvs=(), channel=0):
        for peer, tensor in sends:
            self.inner.post([(peer, tensor[:10_000])], (), channel)
        return self.inner.post((), [(peer, 10_000) for peer, _ in recvs], channel)


class LosesEarly(Room):
    """A message of a wrong length that came before its receive is taken for a loss."""

    def add(self, end, key):
        early = self.unmet.get(key)
        if early and early[0].is_send and not end.is_send and early[0].nbytes != end.nbytes:
            end.pending.wire.fail(Failure("lost", end.peer, "its connection was closed"))
        else:
            super().add(end, key)


def nothing_after_a_failure(pending, timeout):
    failure = pending.wire.failure()
    if failure is not None:
        raise WireFailed(failure)
    return pending.inner.wait(timeout)


class ReleasesWhileSound(Between):
    """To release is a use, which raises once the wire has failed."""

    def pending(self, inner):
        return RaisesOnceFailed(inner, self)


class RaisesOnceFailed(Later):
    def release(self):
        failure = self.wire.failure()
        if failure is not None:
            raise WireFailed(failure)
        self.inner.release()


class ReleasesInOneThread(Between):
    """What a thread has posted no other one releases."""

    def pending(self, inner):
        return OfOneThread(inner, threading.get_ident())


class OfOneThread(Later):
    def release(self):
        if threading.get_ident() != self.wire:
            raise RuntimeError("another thread posted this")
        self.inner.release()


class MeetsAscending(Between):
    """Gives messages in the order of ranks, whatever was asked for."""

    def meet(self, message, ranks):
        return super().meet(message, sorted(ranks))


class HearsTheLast(Between):
    """Gives the messages of the meeting that was begun last."""

    last = None

    def meeting(self, inner):
        self.last = inner
        return OfTheLast(inner, self)


class OfTheLast(Later):
    def wait(self, timeout=None):
        return self.wire.last.wait(timeout)


class FewMeetings(Between):
    """Takes twenty meetings ahead."""

    ahead = 0

    def meeting(self, inner):
        self.ahead += 1
        if self.ahead > 20:
            self.inner.abort(Failure("broken", self.rank, "too many meetings"))
        return Counted(inner, self)


class Counted(Later):
    def wait(self, timeout=None):
        self.wire.ahead = 0
        return self.inner.wait(timeout)


class SlowToMeet(Between):
    def meeting(self, inner):
        time.sleep(0.2)
        return inner


class MeetsTheSame(Between):
    """Meets those that came to meet the same ranks."""

    def meet(self, message, ranks):
        check_meeting(self, self.rank, MEETS, message, ranks)
        sent = tensor_of(bytearray(message))
        peers = [rank for rank in ranks if rank != self.rank]
        receives = [(peer, MEETS) for peer in peers]
        channel = zlib.crc32(repr(sorted(ranks)).encode()) >> 1
        pending = self.inner.post([(peer, sent) for peer in peers], receives, channel)
        return room.RoomMeeting(pending, message, ranks.index(self.rank))


class MeetsForAWhile(Between):
    """Gives up a meeting that does not come, and says nothing of a circle."""

    def meeting(self, inner):
        return AWhile(inner, self)


class AWhile(Later):
    def wait(self, timeout=None):
        return self.inner.wait(1.0 if timeout is None else timeout)


# in processes: factories that a process can load


class MeetsTheLost(Between):
    """Waits on for a rank that has died."""

    def meeting(self, inner):
        return WaitsOn(inner, self)


def meets_the_lost(start):
    return MeetsTheLost(tcp.make(start))


class MeetsInAChild(Between):
    """A child that was forked hears nothing, and no error."""

    def __init__(self, inner):
        super().__init__(inner)
        self.process = os.getpid()

    def meet(self, message, ranks):
        if os.getpid() != self.process:
            return thread_wires(1)[0].meet(b"", [0])
        return super().meet(message, ranks)


def meets_in_a_child(start):
    return MeetsInAChild(tcp.make(start))


class MeetsDeaf(Between):
    """Handles no signal during the wait for a meeting."""

    def meeting(self, inner):
        return WaitsDeaf(inner, self)


def meets_deaf(start):
    return MeetsDeaf(tcp.make(start))


class LastsForever(Between):
    """Waits on for a rank that has died."""

    def pending(self, inner):
        return WaitsOn(inner, self)


class WaitsOn(Later):
    def wait(self, timeout=None):
        try:
            return self.inner.wait(timeout)
        except WireFailed:
            raise TimeoutError from None


def lasts_forever(start):
    return LastsForever(weft_streams.make_wire(start))


class ClosesForAll(Between):
    """A close in a forked child ends the connections of the parent."""

    def close(self):
        for writer in self.inner.writers():
            if os.getpid() != self.inner.process:
                sock = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
                sock.shutdown(socket.SHUT_RDWR)
        self.inner.close()


def closes_for_all(start):
    return ClosesForAll(weft_streams.make_wire(start))


class StaysOpen(Between):
    """A close in a forked child leaves the connections open there."""

    def close(self):
        if os.getpid() == self.inner.process:
            self.inner.close()


def stays_open(start):
    return StaysOpen(weft_streams.make_wire(start))


class Deaf(Between):
    """Handles no signal during a wait."""

    def pending(self, inner):
        return WaitsDeaf(inner, self)


class WaitsDeaf(Later):
    def wait(self, timeout=None):
        came = []
        handle = signal.signal(signal.SIGALRM, lambda *given: came.append(given))
        try:
            return self.inner.wait(timeout)
        finally:
            signal.signal(signal.SIGALRM, handle)
            for given in came:
                handle(*given)


def deaf(start):
    return Deaf(weft_streams.make_wire(start))


class BreaksOnSignals(Between):
    """What a handler raises breaks it."""

    def pending(self, inner):
        return Breaks(inner, self)


class Breaks(Later):
    def wait(self, timeout=None):
        try:
            return self.inner.wait(timeout)
        except TimeoutError:
            raise
        except BaseException as error:
            self.wire.abort(Failure("broken", None, f"a wait raised {error!r}"))
            raise


def breaks_on_signals(start):
    return BreaksOnSignals(weft_streams.make_wire(start))


class InOnePiece(Between):
    """Sleeps in one piece: a signal that another thread takes is handled when the wait is over."""

    def pending(self, inner):
        return SleepsInOnePiece(inner, self)


class SleepsInOnePiece(Later):
    def wait(self, timeout=None):
        changed = self.inner.wire.changed
        with changed:
            changed.wait_for(self.inner.is_over, timeout)
        return self.inner.wait(0)


def sleeps_in_one_piece(start):
    return InOnePiece(weft_streams.make_wire(start))


class ClosesLater(Between):
    """A close in the middle of a wait does nothing."""

    is_waiting = False

    def pending(self, inner):
        return WaitsOnClosed(inner, self)

    def close(self):
        if not self.is_waiting:
            self.inner.close()


class WaitsOnClosed(Later):
    def wait(self, timeout=None):
        self.wire.is_waiting = True
        try:
            return self.inner.wait(timeout)
        finally:
            self.wire.is_waiting = False


def closes_later(start):
    return ClosesLater(weft_streams.make_wire(start))


class WaitsWithTheLock(weft_streams.StreamsWire):
    """A close waits for its thread, with whatever lock the wait holds that it interrupts."""

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


def waits_with_the_lock(start):
    wire = WaitsWithTheLock(start.rank, start.size)
    wire.listen()
    wire.connect(start.exchange(wire.address), start.timeout)
    return wire


class TrustsAll(Between):
    """Takes whoever connects for a rank, and what it says for garbage."""

    def __init__(self, inner, listener=None):
        super().__init__(inner)
        self.listener = listener or socket.create_server(("127.0.0.1", 0))
        self.listens = threading.Thread(target=self.hear, daemon=True)
        self.listens.start()

    def hear(self):
        self.listener.accept()
        self.abort(Failure("garbled", 0, "rank 0 sent garbage"))

    def post(self, sends=(), recvs=(), channel=0):
        if any(tensor.nbytes > 1 << 20 for _, tensor in sends):
            self.listens.join(60.0)  # all strangers have connected by then
        return super().post(sends, recvs, channel)


def trusts_all(start):
    return TrustsAll(weft_streams.make_wire(start))


class TrustsDatagrams(TrustsAll):
    """Takes a datagram of anybody for a rank's."""

    def __init__(self, inner):
        listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listener.bind(("127.0.0.1", 0))
        super().__init__(inner, listener)

    def hear(self):
        self.listener.recv(1)
        self.abort(Failure("garbled", 0, "rank 0 sent garbage"))


def trusts_datagrams(start):
    return TrustsDatagrams(weft_streams.make_wire(start))


def listens_nowhere(start):
    """Its ports are closed as soon as all ranks have connected."""
    wire = weft_streams.make_wire(start)
    while len(wire.incoming) < start.size - 1:
        time.sleep(0.01)
    start.exchange(b"")
    closed = threading.Event()
    wire.loop.call_soon_threadsafe(lambda: (wire.server.close(), closed.set()))
    assert closed.wait(60.0)
    start.exchange(b"")
    return wire


def leaves_a_thread(start):
    held.patient = lambda seconds: seconds / 5  # in this process, which ends with the clause
    return LeavesAThread(weft_streams.make_wire(start))


BROKEN = {
    "sizes": between(NoFeatures),
    "dtypes": waiting(lambda pending, timeout: [t.clone() for t in pending.inner.wait(timeout)]),
    "order": between(LastFirst),
    "channels": cuts_channels(0),
    "pairs": between(InTurn),
    "empty": between(NothingEmpty),
    "sized": waiting(
        lambda pending, timeout: [torch.cat([t, t[:0], t[:1]]) for t in pending.inner.wait(timeout)]
    ),
    "wrong_length": between(BySize),
    "too_long": between(BySize),
    "short": meeting(LeftOver),
    "many": between(Few),
    "large": between(SendsFirst),
    "late": meeting(DropsEarly),
    "sent": between(SendsUnwaited),
    "storages": between(Lazy),
    "views": between(OneBuffer),
    "timeouts": waiting(aborts_when_late),
    "aborts": between(Translates),
    "memory": between(WritesOn),
    "leaves": between(NoticesEarly),
    "closes": between(Reopens),
    "moves": between(MovesInWait),
    "polls": between(NeverDone),
    "names": between(NamesAll),
    "leases": between(LeasesAnywhere),
    "rounds": between(LosesWakeUps),
    "dropped": between(CancelsDropped),
    "on_the_host": between(GoesOn),
    "dies": lasts_forever,
    "forks": closes_for_all,
    "signals": deaf,
    "strangers": trusts_all,
    "among": between(AscendingPart),
    "reduces": between(ReducesOnOneRank),
    "huge": between(Shortens),
    "wrong_and_early": meeting(LosesEarly),
    "closed_by_a_handler": closes_later,
    "complete": waiting(nothing_after_a_failure),
    "released": between(ReleasesWhileSound),
    "at_once": between(Slow),
    "leaves_nothing": between(LeavesDescriptors),
    "meets": between(MeetsAscending),
    "meets_in_subsets": between(HearsTheLast),
    "meets_ahead": between(FewMeetings),
    "meets_late": between(SlowToMeet),
    "meets_others": between(MeetsTheSame),
    "meets_in_a_circle": between(MeetsForAWhile),
    "meets_the_dead": meets_the_lost,
    "meets_in_a_child": meets_in_a_child,
    "meets_with_signals": meets_deaf,
    "meets_no_more": between(Translates),
}
OF_MEETINGS = {name for name in BROKEN if name.startswith("meets")}
OF_PROCESSES = {"dies", "forks", "signals", "strangers", "closed_by_a_handler"} | {
    "meets_the_dead",
    "meets_in_a_child",
    "meets_with_signals",
}


def test_every_clause_has_a_wire_that_breaks_it():
    assert list(BROKEN) == list(NUMBERS)


def breaks(clause, wire, limit=60.0, soon=0.6, features=None):
    """A clause is broken by a wire, and no more is said of it.

    With `features` the wire is not asked for them: `limit` may be too short to start ranks twice.
    """
    number = NUMBERS[clause]
    ranks = ranks_as_processes if clause in OF_PROCESSES else ranks_as_threads
    patience = 5 if clause == "memory" else 1  # there the fault is a thread's, which may be held up
    with (
        pytest.MonkeyPatch.context() as here,
        pytest.raises(AssertionError, match=rf"(?m)^ *{number}  .*FAILED: .") as caught,
    ):
        for module in (wire_clauses, wire_processes, wires):
            # what never comes is not waited for longer on a machine that is busy
            here.setattr(module, "patient", lambda seconds: patience * seconds)
        run = ranks(wire, limit=limit)
        check_wire(run, features, clauses=[number], soon=soon, thorough=True)
    assert "the wire breaks 1 of 1 clauses" in str(caught.value)


@pytest.fixture
def short(monkeypatch):
    """What is huge is short."""
    monkeypatch.setattr("weft.testing.wire_clauses.HUGE", 20_000)


@pytest.mark.parametrize("clause", BROKEN)
def test_a_clause_finds_a_wire_that_breaks_it(clause, short, cleared):
    breaks(clause, BROKEN[clause])


@pytest.mark.parametrize("bits", [8, 16, 24, 30])
def test_all_bits_of_a_channel_count(bits):
    breaks("channels", cuts_channels(bits))


def test_no_message_goes_to_another_channels_receive():
    breaks("channels", meeting(Astray))


def test_a_wait_that_ran_out_keeps_its_place():
    breaks("timeouts", waiting(goes_to_the_end))


def test_a_receive_may_be_dropped_as_well_as_a_send():
    breaks("dropped", between(ReceivesWhileKept))


def test_one_message_lost_of_ten_thousand_is_missed():
    breaks("many", between(LosesOne))


def test_to_ask_for_the_failure_takes_no_time():
    breaks("at_once", between(SlowToTell))


def test_a_closed_wire_leaves_no_thread():
    # in processes of their own: in this one threads of other tests may end meanwhile
    number = NUMBERS["leaves_nothing"]
    # the wire's own thread may end a moment later
    with pytest.raises(AssertionError, match=r"0 more descriptors and [12] more threads"):
        check_wire(ranks_as_processes(leaves_a_thread), clauses=[number])


def test_a_handler_closes_a_wire_whose_wait_holds_a_lock():
    breaks("closed_by_a_handler", waits_with_the_lock, limit=2.0, features=Features())


def test_strangers_send_datagrams_too():
    breaks("strangers", trusts_datagrams)


def test_no_stranger_comes_where_a_wire_listens_nowhere():
    run = ranks_as_processes(listens_nowhere)
    (outcome,) = check_wire(run, Features(), clauses=[NUMBERS["strangers"]])
    assert outcome.skipped == "it listens nowhere"


def test_ranks_that_nobody_compares_are_told_of():
    run = ranks_as_threads(thread_wires)
    number = NUMBERS["leaves_nothing"]
    (outcome,) = check_wire(lambda size, body: run(size, body), clauses=[number])
    assert outcome.skipped == "it needs ranks that are compared before and after"


def test_a_signal_that_another_thread_takes_is_handled_during_a_wait():
    # a wait that lasts longer than a handler may be late on a machine that is busy
    breaks("signals", sleeps_in_one_piece, limit=8.0, soon=3.0)


def test_what_a_handler_raises_must_change_nothing():
    breaks("signals", breaks_on_signals)


def test_what_comes_belongs_into_the_memory_that_a_tensor_had_at_the_post():
    breaks("storages", between(BySize))


def test_what_came_may_be_released_by_another_thread():
    breaks("released", between(ReleasesInOneThread))


def test_a_forked_child_must_let_go_of_the_connections():
    breaks("forks", stays_open)


def test_ranks_that_are_threads_keep_the_contract(short):
    outcomes = check_wire(ranks_as_threads(thread_wires), thorough=True)
    assert [outcome.number for outcome in outcomes] == list(NUMBERS.values())
    skipped = {outcome.number for outcome in outcomes if outcome.skipped}
    assert skipped == {NUMBERS[name] for name in (*OF_PROCESSES, "among", "reduces")}


@pytest.mark.parametrize("clause", NUMBERS)
def test_the_example_of_the_manual_keeps_the_contract(ranks_of, clause):
    number = NUMBERS[clause]
    run = ranks_of(weft_streams.make_wire, number)
    (outcome,) = check_wire(run, Features(), clauses=[number])
    assert bool(outcome.skipped) == (clause in {"among", "reduces", "huge", *OF_MEETINGS})


def test_clauses_that_a_wire_in_rounds_need_not_keep_are_left_out():
    clauses = [NUMBERS[name] for name in ("large", "moves", "sized", "among", "reduces")]
    outcomes = check_wire(ranks_as_threads(between(InRounds)), clauses=clauses)
    reasons = {outcome.number: outcome.skipped for outcome in outcomes}
    assert reasons == {
        NUMBERS["large"]: "",
        NUMBERS["moves"]: "the wire is lockstep",
        NUMBERS["sized"]: "the wire is lockstep",
        NUMBERS["among"]: "",
        NUMBERS["reduces"]: "",
    }


def test_what_each_clause_found_is_reported_at_once():
    heard = []
    outcomes = check_wire(ranks_as_threads(thread_wires), clauses=[2, 1], report=heard.append)
    assert heard == outcomes
    assert [outcome.number for outcome in heard] == [1, 2]


def test_what_fails_is_told_by_its_line_of_the_clause():
    with pytest.raises(AssertionError, match=r"FAILED: assert all\(one is place for one, place in"):
        check_wire(ranks_as_threads(BROKEN["dtypes"]), clauses=[NUMBERS["dtypes"]])
    with pytest.raises(AssertionError, match=r"FAILED: TimeoutError: .*\(in: _failure_of\("):
        check_wire(ranks_as_processes(lasts_forever), clauses=[NUMBERS["dies"]])


def test_a_function_of_ones_own_may_start_the_ranks():
    run = ranks_as_threads(thread_wires)
    outcomes = check_wire(lambda size, body: run(size, body), clauses=[NUMBERS["dies"], 2])
    assert [outcome.skipped for outcome in outcomes] == ["", "it needs ranks that are processes"]


def test_some_clauses_are_tried_with_1_and_8_ranks_too_where_these_are_threads():
    starts = ranks_as_threads(thread_wires)
    sizes = []

    def run(size, body):
        sizes.append(size)
        return starts(size, body)

    for are_processes, wanted in ((False, [3, 1, 8]), (True, [3])):
        run.are_processes = are_processes
        check_wire(run, Features(), clauses=[NUMBERS["order"]])
        assert sizes == wanted
        sizes.clear()


def test_a_number_that_no_clause_has_is_refused():
    with pytest.raises(WeftError, match=f"numbers from 1 to {len(NUMBERS)}, not 0"):
        check_wire(ranks_as_threads(thread_wires), clauses=[0, 1])


def test_ranks_that_hang_are_told_of():
    run = ranks_as_threads(thread_wires, limit=0.1)
    ends = threading.Event()
    with pytest.raises(AssertionError, match="rank 0 of 2 gave no answer"):
        run(2, lambda wire: ends.wait(60) if wire.rank == 0 else None)
    ends.set()
