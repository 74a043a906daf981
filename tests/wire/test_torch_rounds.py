"""Tensors in rounds over a process group: the contract, over gloo, and what devices alone have.

No device is needed: stand-ins for streams and events note what is asked of them.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from wire_clauses import ANY_WIRE, clauses, many, rounds
from wire_ranks import on_threads

from gloo_rounds import GlooRounds
from weft.base import _torch
from weft.base.pace import patient
from weft.rendezvous.address import gloo_interfaces
from weft.wire import torch_rounds
from weft.wire.interface import Failure, Features, Reducing, Rounds, WireFailed
from weft.wire.torch_rounds import rounds_over

CPU = torch.device("cpu")
SOON = 20.0  # seconds of waits that end by what the test does


def wires_over_gloo(size):
    store = dist.HashStore()

    def made(rank):
        gloo = _torch.gloo_group(store, rank, size, SOON, gloo_interfaces(store))
        group = _torch.process_group_of(gloo, store, rank, size)
        return GlooRounds(lambda: group, rank, size, CPU)

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(made, range(size)))


def over_gloo(size, body):
    return on_threads(size, body, wires_over_gloo)


def failure_of(use):
    with pytest.raises(WireFailed) as caught:
        use()
    return caught.value.failure


@clauses(ANY_WIRE, without=[many, rounds])  # which are of wires that wake who waits
def test_it_does_what_every_wire_does(size, body):
    over_gloo(size, body)


# rounds over gloo


def test_a_round_carries_all_posts_by_channel_whatever_is_waited_for_first():
    def swaps(wire):
        peer = 1 - wire.rank
        channels = (
            [5, 3, 5, 0] if wire.rank == 0 else [0, 5, 3, 5]
        )  # each side in an order of its own
        posts = {}
        for channel in channels:
            number = torch.tensor([10 * channel + len(posts.get(channel, []))])
            post = wire.post([(peer, number)], [(peer, 8)], channel)
            posts.setdefault(channel, []).append(post)
        last = posts[5][1].wait(SOON)
        assert last[0].view(torch.int64).item() == 51
        for channel, some in posts.items():
            for index, post in enumerate(some):
                assert post.done()
                assert post.wait(0)[0].view(torch.int64).item() == 10 * channel + index

    over_gloo(2, swaps)


def test_memory_of_a_post_is_kept_though_the_caller_gives_its_tensors_other_memory():
    def gives(wire):
        peer = 1 - wire.rank
        sent, place = torch.full((1000,), 7), torch.zeros(1000, dtype=torch.int64)
        memory = place.detach()
        pending = wire.post([(peer, sent)], [(peer, place)])
        sent.data = torch.zeros(1000, dtype=torch.int64)
        place.data = torch.zeros(1000, dtype=torch.int64)
        pending.wait(SOON)
        assert bool((memory == 7).all()) and bool((place == 0).all())

    over_gloo(2, gives)


def test_some_ranks_have_rounds_of_their_own():
    def body(wire):
        if wire.rank == 1:
            return  # it knows nothing of them
        some = wire.among([3, 0, 2])
        assert isinstance(some, Rounds) and not some.features.reduces
        assert (some.rank, some.size) == ({3: 0, 0: 1, 2: 2}[wire.rank], 3)
        for count in (0, 1, 50_000):
            others = [peer for peer in range(3) if peer != some.rank]
            sends = [(peer, torch.full((count,), 10 * some.rank + peer)) for peer in others]
            pending = some.post(sends, [(peer, 8 * count) for peer in others])
            for peer, part in zip(others, pending.wait(SOON), strict=True):
                assert part.view(torch.int64).tolist() == [10 * peer + some.rank] * count
        assert (some.device, some.features.lockstep) == (wire.device, True)
        some.close()
        failure_of(some.post)
        assert wire.failure() is None  # which has its own end
        again = wire.among([0, 2, 3])
        again.post().wait(SOON)  # nobody sends anything
        if again.rank < 2:
            first = again.among([1, 0])  # of those: ranks 2 and 0
            got = first.post([(1 - first.rank, torch.tensor([wire.rank]))], [(1 - first.rank, 8)])
            assert got.wait(SOON)[0].view(torch.int64).item() == 2 - wire.rank
        wire.abort(Failure("aborted", 1, "rank 1 gave up"))
        assert failure_of(again.post) == wire.failure()

    over_gloo(4, body)


def test_pairs_that_wait_for_each_other_go_in_one_order_and_the_lower_rank_sends_first():
    some = [3, 0, 2]
    boxes = {(source, target): queue.SimpleQueue() for source, target in permutations(some, 2)}

    def asked(rank):
        log = []

        def send(tensors, peer, tag):
            log.append(("to", peer))
            boxes[rank, peer].put(tensors[0].clone())
            return SimpleNamespace(wait=lambda: None)

        def recv(tensors, peer, tag):
            log.append(("from", peer))
            come = boxes[peer, rank]
            return SimpleNamespace(wait=lambda: tensors[0].copy_(come.get(timeout=SOON)))

        group = SimpleNamespace(bound_device_id=None, rank=lambda: rank, send=send, recv=recv)
        whole = GlooRounds(lambda: group, rank, 4, CPU)
        part = whole.among(some)
        others = [peer for peer in range(3) if peer != part.rank]
        sends = [(peer, torch.ones(2)) for peer in others]
        part.post(sends, [(peer, 8) for peer in others]).wait(SOON)
        whole.close()
        return log

    with ThreadPoolExecutor(3) as pool:
        logs = dict(zip(some, pool.map(asked, some), strict=True))
    assert logs[0] == [("to", 2), ("from", 2), ("to", 3), ("from", 3)]
    assert logs[2] == [("from", 0), ("to", 0), ("to", 3), ("from", 3)]
    assert logs[3] == [("from", 0), ("to", 0), ("from", 2), ("to", 2)]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_it_sums_over_all_ranks_with_equal_bits(size):
    def body(wire):
        assert isinstance(wire, Reducing)
        draw = torch.Generator().manual_seed(wire.rank)
        found = []
        for op, dtype in sorted(wire.features.reduces, key=str):
            x = (torch.randn(1000, generator=draw) * 10).to(dtype)
            pending = wire.all_reduce(x, op)
            assert pending.wait(SOON)[0] is x
            found.append(x)
            exact = torch.arange(100).remainder(wire.rank + 2).to(dtype)
            wire.all_reduce(exact, op).wait(SOON)
            parts = [torch.arange(100).remainder(rank + 2) for rank in range(wire.size)]
            assert torch.equal(exact, sum(parts).to(dtype))
        return found

    first, *others = over_gloo(size, body)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    assert {x.dtype for x in first} == {*floats, torch.int32, torch.int64}


def test_the_first_failure_stays_and_a_group_that_is_gone_is_lost(streams):
    streams.group = None
    failure = failure_of(streams.wire.post((), [(1, 8)]).wait)
    assert (failure.kind, failure.peer) == ("lost", None) and "it was destroyed" in failure.text
    streams.wire.abort(Failure("aborted", 1, "later"))
    assert streams.wire.failure() == failure
    assert failure_of(streams.wire.post) == failure
    streams.wire.close()


# streams: who waits for whom, and how long memory is held


class Streams:
    """Stand-ins: each thing that streams and events are asked for, in its order."""

    def __init__(self):
        self.log = []
        self.made = 0
        self.priorities = {}
        self.current = self.stream()
        self.threads = {}

    def stream(self, *_, priority=0):
        self.made += 1
        self.priorities[self.made] = priority
        return FakeStream(self, self.made)

    def event(self, device):
        return FakeEvent(self)


class FakeStream:
    def __init__(self, streams, number):
        self.streams, self.number = streams, number
        self.stream_id, self.device_index, self.device_type = self, 0, 0

    def __enter__(self):
        self.before, self.streams.current = self.streams.current, self
        return self

    def __exit__(self, *_):
        self.streams.current = self.before

    def wait_event(self, event):
        self.streams.log.append((self.number, "waits for", event.of))


class FakeEvent:
    def __init__(self, streams):
        self.streams, self.of, self.answers, self.thread = streams, None, [], None

    def record(self, stream):
        self.of = stream.number
        self.streams.log.append((stream.number, "records"))
        if stream.number != 1:
            self.streams.behind = self

    def query(self):
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer


class Group:
    """A process group of two ranks, which fills what is received with ones."""

    bound_device_id = None

    def __init__(self, streams):
        self.streams, self.aborted, self.memory = streams, threading.Event(), []

    def rank(self):
        return 0

    def abort(self):
        self.streams.threads["abort"] = threading.current_thread()
        self.aborted.set()


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()

    def clone(stream_id, *_):
        return stream_id

    def made(*given, **named):
        return clone(*given) if isinstance(given[0], FakeStream) else streams.stream(**named)

    def all_to_all(out, data, incoming, outgoing, *, group):
        streams.log.append((streams.current.number, "exchanges", outgoing, incoming))
        out.fill_(1)
        group.memory += [weakref.ref(out), weakref.ref(data)]

    monkeypatch.setattr(torch, "Stream", made)
    monkeypatch.setattr(torch, "Event", streams.event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams.current)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)

    def all_reduce(total, *, group):
        streams.log.append((streams.current.number, "sums"))
        total.fill_(1)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    streams.group = Group(streams)
    streams.wire = rounds_over(lambda: streams.group, 0, 2, CPU)
    return streams


def begun(streams, place, sums=False):
    """A post whose round is queued, or a sum, and the event behind it."""
    if sums:
        pending = streams.wire.all_reduce(place, "sum")
        streams.group.memory = [weakref.ref(pending.receives[0].part)]
    else:
        pending = streams.wire.post([(1, torch.zeros(3))], [(1, place)])
    with pytest.raises(TimeoutError):
        pending.wait(0.0)
    return pending, streams.behind


def test_a_round_comes_behind_the_caller_who_goes_on_behind_it(streams):
    assert streams.wire.features == Features(
        lockstep=True, streams=True, reduces=streams.wire.features.reduces
    )
    place = torch.zeros(5, dtype=torch.uint8)
    (found,) = streams.wire.post([(1, torch.zeros(3))], [(1, place)]).wait_stream()
    assert found is place and place.tolist() == [1] * 5
    assert streams.log == [
        (1, "records"),
        (2, "waits for", 1),
        (2, "exchanges", [0, 16], [0, 16]),
        (2, "records"),
        (1, "waits for", 2),
    ]


def test_each_wire_has_a_stream_of_its_own_of_another_pool_than_those_of_programs(streams):
    other = rounds_over(lambda: streams.group, 0, 2, CPU)
    part = streams.wire.among([0])
    for wire in (streams.wire, other, part):
        wire.post().wait_stream()
    assert [each[0] for each in streams.log if each[1:] == ("waits for", 1)] == [2, 3, 2]
    assert streams.priorities == {1: 0, 2: -1, 3: -1}


def test_memory_is_held_until_the_event_is_through_and_no_longer(streams):
    pending, behind = begun(streams, 5)
    assert not pending.done() and pending.waiting_for() == [1]
    pending.release()
    del pending
    gc.collect()
    received, sent = streams.group.memory
    assert received() is not None and sent() is not None
    behind.answers = [True]
    streams.wire.post([(1, torch.zeros(3))]).wait_stream()  # the next round looks
    assert received() is None and sent() is None


def test_done_lets_go_of_the_memory_too(streams):
    pending, behind = begun(streams, torch.zeros(2))
    behind.answers = [True]
    assert pending.done()
    received, sent = streams.group.memory
    assert sent() is None and received() is not None  # which the wait has yet to copy
    assert pending.wait(SOON)[0].view(torch.uint8).tolist() == [1] * 8
    assert received() is None


def test_a_released_message_is_read_to_the_end_in_whatever_stream(streams):
    pending, behind = begun(streams, 5)
    behind.answers = [True]
    pending.wait(SOON)
    with streams.stream():
        streams.log.clear()
        pending.release()
    assert streams.log == [(3, "records"), (1, "waits for", 3)]
    streams.log.clear()
    pending.release()
    assert streams.log == []  # in the stream that the memory is of


def test_an_event_that_may_not_be_asked_is_asked_again(streams):
    """While a stream of the program's records a graph."""
    pending, behind = begun(streams, torch.zeros(2))
    refused = "CUDA error: operation not permitted when stream is capturing"
    behind.answers = [RuntimeError(refused), RuntimeError(refused), True]
    assert not pending.done()
    pending.wait(SOON)
    assert streams.wire.failure() is None


def test_a_device_that_fails_breaks_the_wire_and_holds_no_memory(streams):
    pending, behind = begun(streams, torch.zeros(2))
    behind.answers = [RuntimeError("CUDA error: an illegal memory access was encountered")]
    assert pending.done()
    failure = failure_of(lambda: pending.wait(SOON))
    assert failure.kind == "broken" and "illegal memory access" in failure.text
    assert streams.group.memory[1]() is None
    assert streams.group.aborted.wait(SOON)


@pytest.mark.parametrize("sums", [False, True], ids=["post", "all_reduce"])
def test_an_abort_ends_waits_and_aborts_the_group_in_a_thread_of_its_own(streams, sums):
    place = torch.zeros(2)
    pending, behind = begun(streams, place, sums)
    failure = Failure("aborted", 1, "rank 1 died")
    threading.Timer(0.1, streams.wire.abort, [failure]).start()
    assert failure_of(lambda: pending.wait(SOON)) == failure
    assert streams.group.aborted.wait(SOON)
    assert streams.threads["abort"].name == "weft abort"
    behind.answers = [True] * 3  # the kernel ends: what it wrote is garbage
    assert failure_of(lambda: pending.wait(SOON)) == failure
    assert failure_of(pending.wait_stream) == failure
    assert place.tolist() == [0, 0] and streams.group.memory[0]() is not None
    pending.release()
    assert streams.group.memory[0]() is None


def test_what_was_through_before_a_failure_stays_good(streams):
    pending, behind = begun(streams, torch.zeros(2))
    behind.answers = [True]
    assert pending.done()
    streams.wire.abort(Failure("aborted", 1, "rank 1 died"))
    assert pending.wait(SOON)[0].view(torch.uint8).tolist() == [1] * 8


def test_a_group_that_cannot_be_aborted_is_told_of(streams, caplog, monkeypatch):
    def fails():
        streams.group.aborted.set()
        raise RuntimeError("abort timed out")

    monkeypatch.setattr(streams.group, "abort", fails, raising=False)
    streams.wire.abort(Failure("aborted", 1, "rank 1 died"))
    assert streams.group.aborted.wait(SOON)
    until = time.monotonic() + patient(SOON)
    while not caplog.messages and time.monotonic() < until:
        time.sleep(0.01)
    assert caplog.messages == ["a process group could not be aborted: abort timed out"]


def test_a_close_waits_for_what_is_under_way_and_does_not_abort_the_group(streams, monkeypatch):
    pending, behind = begun(streams, torch.zeros(2))
    behind.answers = [False, False, True]
    streams.wire.close()
    assert behind.answers == [] and not streams.group.aborted.is_set()
    failure = failure_of(lambda: pending.wait(SOON))
    assert failure == Failure("aborted", None, "rank 0 has closed its wire")
    streams.wire.close()


def check_memory_outlives_the_wire(streams, behind):
    """That of a round, until this has ended, though nobody has the wire or the post any more."""
    received, sent = streams.group.memory
    streams.wire = None
    gc.collect()
    assert received() is not None and sent() is not None
    behind.answers = [True]
    rounds_over(lambda: streams.group, 0, 2, CPU)  # and it is gone at once: then weft looks again
    gc.collect()
    assert received() is None and sent() is None


def test_a_wire_that_is_dropped_waits_for_nothing(streams, monkeypatch):
    """As in a collection of garbage."""
    pending, behind = begun(streams, torch.zeros(2))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("it waits"))
    monkeypatch.setattr(torch_rounds, "time", clock)
    streams.wire.drop()
    assert streams.wire.failure() == Failure("aborted", None, "rank 0 has closed its wire")
    assert not streams.group.aborted.is_set()
    del pending
    check_memory_outlives_the_wire(streams, behind)


def test_a_close_beside_a_call_gives_back_no_memory_that_is_written_to(streams, monkeypatch):
    """Both look at the first round, which has ended; the second one is under way."""
    monkeypatch.setattr(torch_rounds, "CLOSING", 0.01)
    _, first = begun(streams, torch.zeros(2))
    pending, _ = begun(streams, 5)
    received, sent = streams.group.memory[2:4]
    beside = threading.Thread(target=streams.wire.close)

    def has_ended():
        if not beside.ident:
            beside.start()
            beside.join(0.2)  # it would look, too, if nothing held it up
        return True

    first.query = has_ended
    with contextlib.suppress(WireFailed):  # it is closed by then
        streams.wire.post([(1, torch.zeros(3))]).wait_stream()
    beside.join(SOON)
    pending.release()
    del pending
    gc.collect()
    assert received() is not None and sent() is not None


def test_memory_of_two_wires_that_are_dropped_at_once_outlives_both(streams):
    """A collection of garbage may drop the second while weft looks whether the first has ended."""
    pending, first = begun(streams, torch.zeros(2))
    wires = [streams.wire]
    streams.wire = rounds_over(lambda: streams.group, 0, 2, CPU)
    pending, second = begun(streams, torch.zeros(2))
    del pending

    def drops_the_second():
        streams.wire = None
        gc.collect()
        return True

    first.query = drops_the_second
    wires.clear()
    gc.collect()
    del streams.group.memory[:2]
    check_memory_outlives_the_wire(streams, second)


def test_memory_of_what_never_ends_outlives_its_wire(streams, monkeypatch):
    monkeypatch.setattr(torch_rounds, "CLOSING", 0.01)
    pending, behind = begun(streams, torch.zeros(2))
    streams.wire.close()
    del pending
    check_memory_outlives_the_wire(streams, behind)
