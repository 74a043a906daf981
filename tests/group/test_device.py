"""Tensors where they are: what goes over the caller's group, what the host waits for, who is told.

No accelerator is needed: tensors of the CPU go the way of those on one (`as_device`), a stand-in
group notes what it is asked for, and stand-in streams and events note the order of things.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
import torch.distributed as dist

import weft
from checked_rounds import CheckedRounds
from gloo_rounds import GlooRounds, as_device
from weft import kernels
from weft.base import devices
from weft.base.devices import Aside, is_capturing
from weft.base.pace import patient
from weft.base.tensors import as_bytes
from weft.bootstrap.outcome import results
from weft.group import process_group
from weft.group import session as session_module
from weft.group.watcher import Watcher
from weft.group.worker import Worker
from weft.kernels import reference
from weft.sparse import ALGORITHMS, Sizes, choose, request
from weft.testing import processes, run, threads
from weft.testing.threads import on_groups
from weft.wire.interface import Features, WireFailed
from weft.wire.of_devices import backend_for, refusal
from weft.wire.torch_rounds import TorchRounds, rounds_over

CPU = torch.device("cpu")
STAYING = Sizes(2, 8, 4, 4, 9, 4, 4, staying=True)
NAMES = sorted(name for name in ALGORITHMS if choose.serves(STAYING, name))


# what a group is asked for


@contextlib.contextmanager
def noted():
    """What a process group is asked for meanwhile: the call, and the bytes for and of each rank."""
    asked = []

    def noting(name):
        call = getattr(dist, name)

        def made(*given, **options):
            came, goes = given[2:] or ((), ())
            asked.append((name, [*goes], [*came]))
            return call(*given, **options)

        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_to_all_single"):
            patch.setattr(dist, name, noting(name))
        yield asked


ROWS, WIDTH, HEIGHT, SIZE = 1000, 32, 3000, 4


def counted(group, path, name):
    """What the group was asked for in one call, and what went over the CPU's wire meanwhile."""
    me = {"rank": group.rank, "world_size": group.size, "init_method": f"file://{path}"}
    dist.init_process_group("gloo", **me)
    mine = torch.randperm(HEIGHT, generator=torch.Generator().manual_seed(group.rank))[:ROWS]
    rows, hosts = weft.Rows(mine, torch.ones(ROWS, WIDTH), HEIGHT), []
    beside = process_group.of_group(None)
    with as_device(), noted() as asked:
        post, meet = beside.wire.post, beside.wire.meet
        beside.wire.post = lambda sends=(), *rest: hosts.extend(sends) or post(sends, *rest)

        def meet_noted(message, ranks):
            hosts.extend([(peer, memoryview(message)) for peer in ranks if peer != group.rank])
            return meet(message, ranks)

        beside.wire.meet = meet_noted
        found = weft.sparse_all_reduce(rows, algorithm=name, group=beside)
    record = weft.sparse.last_call(beside)
    dist.destroy_process_group()
    on_host = sum(message.nbytes for _, message in hosts)
    return asked, on_host, record.sent_bytes, record.bound_bytes, len(found)


@pytest.mark.parametrize("name", NAMES)
def test_the_group_is_asked_for_exchanges_alone_that_meet_and_carry_all(name, tmp_path):
    said = run(SIZE, counted, tmp_path / "place", name, on="processes")
    assert {what for asked, *_ in said for what, *_ in asked} == {"all_to_all_single"}
    sent = [[goes for _, goes, _ in asked] for asked, *_ in said]
    for rank, (asked, on_host, recorded, bound, union) in enumerate(said):
        # every rank is in all exchanges, and awaits what the others send it
        assert [came for *_, came in asked] == [
            [goes[rank] for goes in each] for each in zip(*sent, strict=True)
        ]
        # the bytes are those recorded, messages filled up to where the next may begin
        filling = sum(map(sum, sent[rank])) + on_host - recorded
        assert 0 <= filling < 16 * len(asked) * 3 * SIZE
        # headers and sizes go over the CPU's wire: no values, no lists of indices
        assert on_host < (SIZE - 1) * 8192
        total = SIZE * ROWS + (SIZE - 2) * union
        assert bound == round(total / SIZE * (4 * WIDTH + 4))
    carried = sum(sum(map(sum, each)) for each in sent) / SIZE / said[0][3]
    exact = {"gather": (SIZE - 1) * ROWS * (4 * WIDTH + 4) / said[0][3]}
    # within 1 + 1/P of the bound, and some rows between two quantiles more
    least, most = {"split": (1, 1 + 1 / SIZE + 0.02)}.get(name, (1, 3))
    assert least <= carried <= most and carried == exact.get(name, carried), carried
    assert len(sent[0]) == {"gather": 1, "split": 3}.get(name, len(sent[0]))


# which wire


def of_config(monkeypatch, config):
    """The group of a process group with these backends."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group, there = threads.group(1)[0], threading.Thread()  # can be referred to weakly
    group.session.process_group = lambda: there
    return group


def test_tensors_go_over_the_group_that_takes_them(monkeypatch, caplog):
    group = of_config(monkeypatch, "cpu:gloo")
    with as_device():
        over = group.on(CPU)
    assert isinstance(over.wire, TorchRounds) and over.route == "cpu (gloo)"
    assert not caplog.records
    group.close()


NOBODY = [
    ("cpu:gloo,cuda:gloo", "cuda", "gloo takes no cuda tensors: `cpu:gloo,cuda:nccl`, or `.cpu()`"),
    ("cpu:weft", "xpu", "weft takes no xpu tensors: `cpu:gloo,xpu:xccl`, or `.cpu()`"),
    (
        "cpu:gloo,cuda:nccl",
        "meta",
        "cpu:gloo,cuda:nccl takes no meta tensors: `a backend for meta`, or `.cpu()`",
    ),
]


@pytest.mark.parametrize(("config", "kind", "text"), NOBODY)
def test_else_nobody_carries_them(monkeypatch, config, kind, text):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert refusal(threading.Thread(), torch.device(kind)) == f"this group's {text}"


REFUSED_CALLS = [
    lambda x, group: weft.sparse_all_reduce((torch.arange(3), x), group=group),
    lambda x, group: weft.sparse_all_reduce([(torch.arange(3), x)] * 2, group=group),
    lambda x, group: weft.all_reduce(x, group=group),
    lambda x, group: weft.all_to_all([x] * group.size, group=group),
    lambda x, group: weft.sync_params(torch.nn.ParameterList([x]), group=group),
    lambda x, group: weft.sync_grads(with_gradient(x), group=group),
    lambda x, group: weft.nn.SumReduce(weft.Partition((group.size, 1), group=group), 0)(x),
]


def with_gradient(x):
    """A module of one parameter, which has a gradient."""
    module = torch.nn.ParameterList([x])
    module[0].grad = torch.ones_like(x)
    return module


def nobody_carries(group):
    """Every call says so on all ranks, and the next one works."""
    x = torch.ones(3, 2)
    told = []
    for refused_call in REFUSED_CALLS:
        with as_device(), pytest.raises(weft.WeftError) as caught:
            refused_call(x, group)
        told.append(str(caught.value))
        refused_call(x, group)
    return told


def test_a_tensor_that_nobody_carries_is_an_error_on_every_rank_and_the_next_call_works():
    text = "these ranks have no process group that takes cpu tensors"
    for rank, told in enumerate(run(3, nobody_carries, on="processes")):
        for said in told:
            assert re.match(f"rank [0{rank}]: {text}", said), said


CARRIED = [("cpu:gloo,cuda:nccl", "cuda", "nccl"), ("cuda:nccl", "cuda", "nccl")]
CARRIED += [("cpu:gloo,xpu:xccl", "xpu", "xccl"), ("cpu:gloo", "cpu", "gloo")]
CARRIED += [("cpu:gloo", "cuda", None), ("cpu:gloo,cuda:gloo", "cuda", None)]
CARRIED += [("cpu:gloo,cuda:nccl", "xpu", None)]


@pytest.mark.parametrize(("config", "kind", "name"), CARRIED)
def test_the_backend_of_a_group_that_takes_tensors_of_the_device(monkeypatch, config, kind, name):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert backend_for(threading.Thread(), torch.device(kind)) == name


def of_a_device(monkeypatch):
    """A group, its wire for a device, and how that is closed, beside the end of the worker."""
    group = threads.group(1)[0]
    wire = GlooRounds(lambda: None, 0, 1, CPU)
    group.session.carry_device(wire, "checked")
    closed = []

    def note(of, name):
        real = getattr(of, name)

        def noted(self, *args):
            closed.append(name)
            return real(self, *args)

        monkeypatch.setattr(of, name, noted)

    note(TorchRounds, "close")
    note(TorchRounds, "drop")
    note(Worker, "stop")
    return group, wire, closed


def test_a_group_that_is_dropped_closes_the_wire_of_its_device_too_and_does_not_wait(monkeypatch):
    group, wire, closed = of_a_device(monkeypatch)
    assert wire.failure() is None
    del group
    gc.collect()
    assert wire.failure() is not None
    assert closed == ["drop"]


def test_calls_have_the_wire_of_a_device_until_a_close_has_ended_them(monkeypatch):
    group, wire, closed = of_a_device(monkeypatch)
    sound = []
    group.worker.submit("last", lambda: sound.append(wire.failure()))
    group.close()
    assert sound == [None]
    assert closed == ["stop", "close"] and wire.failure() is not None


# the order of things in streams


@pytest.fixture
def clock(monkeypatch):
    """Stand-ins for streams and events: `mock_calls` is what they were asked for, in its order."""
    clock = MagicMock()
    events = iter([clock.first, clock.second])
    clock.own.__enter__.return_value = clock.own
    monkeypatch.setattr(torch, "Event", lambda on: next(events))
    monkeypatch.setattr(devices.Streams, "on", lambda streams, device: clock.own)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda on: clock.callers)
    return clock


class Noted(torch.Tensor):
    """A tensor of an accelerator, as far as streams go."""

    is_cpu = False

    def record_stream(self, stream):
        stream.uses(self.tolist())


@pytest.mark.parametrize("later", [False, True])
def test_a_call_comes_behind_its_caller_who_goes_on_behind_it(clock, monkeypatch, later):
    one, two, three = (torch.full((1,), number).as_subclass(Noted) for number in range(3))
    group, result = threads.group(1)[0], [weft.Rows(one, two), (three, "no tensor")]
    cuda, claimed = torch.device("cuda", 1), []
    claim = claimed.append  # before, torch's own thread is one of device 0
    monkeypatch.setattr(torch.accelerator, "set_device_index", claim)
    job = Aside(group.streams, cuda, lambda: clock.job() and result)
    clock.caller_goes_on()
    found = group.worker.submit("call", job).wait() if later else job.run()
    assert found is result and clock.mock_calls == [
        call.first.record(clock.callers),
        call.caller_goes_on(),
        call.own.__enter__(),
        call.own.wait_event(clock.first),
        call.job(),
        call.job().__bool__(),
        call.second.record(clock.own),
        call.own.__exit__(None, None, None),
        call.callers.wait_event(clock.second),
        *(call.callers.uses([number]) for number in range(3)),
    ]
    assert claimed == [cuda] * later  # the worker's thread; that of the caller stays as it is
    group.close()


def test_each_group_computes_in_streams_of_its_own(monkeypatch):
    """Two groups in one stream would wait for each other, where ranks call them in two orders."""
    made = []

    def stream(*given, priority=0):
        if len(given) == 3:
            return given[0]  # the same stream, as another object
        made.append((*given, priority))
        return SimpleNamespace(stream_id=len(made), device_index=0, device_type=0)

    monkeypatch.setattr(torch, "Stream", stream)
    one, two = threads.group(1)[0], threads.group(1)[0]
    cuda, other = torch.device("cuda", 0), torch.device("cuda", 1)
    found = [of.streams.on(device) for of in (one, two, one) for device in (cuda, other)]
    assert found == [1, 2, 3, 4, 1, 2]
    # of a pool that programs do not draw from
    assert made == [(cuda, -1), (other, -1), (cuda, -1), (other, -1)]
    assert one.subset([0]).streams is one.streams


def test_results_are_joined_in_one_stream_of_a_device(monkeypatch):
    made = []

    def stream(*given, priority=0):
        if len(given) == 3:
            return given
        made.append(given)
        return SimpleNamespace(stream_id=len(made), device_index=0, device_type=0)

    monkeypatch.setattr(torch, "Stream", stream)
    monkeypatch.setattr(torch, "Event", MagicMock())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda on: None)
    devices.idle_stream.cache_clear()
    streams, device_ = devices.Streams(), torch.device("cuda", 0)
    found = [Aside(streams, device_, None).apart() for _ in range(3)]
    assert len({id(each) for each in found}) == 3 and set(found) == {(1, 0, 0)}
    devices.idle_stream.cache_clear()


def test_who_has_no_rows_learns_where_they_are(monkeypatch):
    """Its own, which are none, lie on the host."""

    def at_first(group, on):
        answers = iter([group])
        return lambda device: next(answers, None) or on(group, device)

    def body(group):
        rows = torch.tensor([7, 2]), torch.ones(2, 3)
        for options in ({}, {"wire_dtype": torch.bfloat16}):
            if group.rank != 1:
                group.on = at_first(group, type(group).on)
            found = weft.sparse_broadcast(rows if group.rank == 1 else None, 1, group, **options)
            assert all(map(torch.equal, found, rows))

    run(3, body, on="device")
    used = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: used)
    for kind, device_ in ((None, "cpu"), (torch.device("cuda"), "cuda:1")):
        found = MagicMock(return_value=kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
        assert devices.current() == torch.device(device_)


def until(done):
    limit = time.monotonic() + patient(20.0)
    while not done() and time.monotonic() < limit:
        time.sleep(0.005)
        gc.collect()
    return done()


class Watched:
    """Something that a device has yet to do."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def done(self):
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def watching(monkeypatch):
    """Two ranks, the watcher of the first, and the devices of its threads."""
    claimed = []
    earlier = threading.enumerate()
    monkeypatch.setattr(torch.accelerator, "set_device_index", claimed.append)
    groups = threads.group(2, timeout=patient(300.0))  # no test comes near it
    watcher = Watcher(groups[0].session, torch.device("cuda", 1), "a round over nccl")
    yield SimpleNamespace(groups=groups, watcher=watcher, claimed=claimed)
    watcher.end()
    for group in groups:
        group.close()
    watcher = None

    def all_have_ended():
        mine = {*threading.enumerate()} - {*earlier}
        return "weft watcher" not in {thread.name for thread in mine}

    assert until(all_have_ended)


def test_what_is_watched_is_held_until_it_is_through(watching):
    pending = Watched(False)
    held = weakref.ref(pending)
    watching.watcher.watch_round(pending, [1], None)
    gc.collect()
    assert held() is not None
    pending.answers = [True]
    del pending
    assert until(lambda: held() is None)
    assert watching.claimed == [torch.device("cuda", 1)]  # once, by its thread


def test_threads_of_wefts_end_no_capture_of_a_graph_in_others(watching, monkeypatch):
    modes = []

    def exchange(mode):
        value = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value
        modes.append((threading.current_thread().name, value))

    runtime = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(devices, "cuda_runtime", lambda: runtime)
    watching.watcher.watch_round(Watched(True), [1], None)
    assert until(lambda: modes)
    devices.claim_thread(torch.device("xpu", 0))  # where there is no such thing
    monkeypatch.setattr(torch, "Event", MagicMock())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda on: None)
    cuda = torch.device("cuda", 1)
    Aside(devices.Streams(), cuda, None).claim_thread()
    assert modes == [("weft watcher", 1), (threading.current_thread().name, 1)]


def test_a_library_is_found_where_torch_has_loaded_it():
    assert devices.loaded_library("libno_such_library") is None
    if sys.platform.startswith("linux"):
        assert os.path.samefile(
            devices.loaded_library("libtorch_cpu.so"), torch_library("torch_cpu")
        )


def test_what_fails_while_it_is_watched_does_not_end_the_watch(watching, caplog):
    items = [Watched(RuntimeError("the device failed")), Watched(False, True)]
    held = [weakref.ref(each) for each in items]
    while items:
        watching.watcher.watch_round(items.pop(0), [1], None)
    assert until(lambda: all(each() is None for each in held))
    why = "a round over nccl could not be watched: RuntimeError('the device failed')"
    assert caplog.messages == [why]
    watching.groups[0].post()  # which is not broken


def test_a_group_breaks_if_a_stream_waits_past_the_deadline(watching):
    watching.groups[0].set_timeout(0.3)
    watching.watcher.watch_round(Watched(False), [1], None)
    why = (
        "a round over nccl was not through after 0.3 s at rank 0, though all answer: a rank may "
        "not have come to it, or the link is too slow"
    )
    for group in watching.groups:  # every rank is told, and nobody is blamed
        assert until(lambda group=group: refuses(group, why))


@pytest.mark.parametrize(
    ("further", "culprit", "why"),
    [
        (0, None, "was not through after 0.3 s at rank 0, though all others answer: a"),
        (1, 1, "left"),
    ],
)
def test_of_those_that_left_a_late_round_is_the_fault_of_who_did_not_come(
    watching, further, culprit, why
):
    first, second = watching.groups
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group: weft.barrier(group=group), watching.groups))
    call = first.worker.history[-1]
    second.close()
    assert until(lambda: 1 in first.session.detector.leavers)
    first.set_timeout(0.3)
    watching.watcher.watch_round(Watched(False), [1], call._replace(number=call.number + further))
    assert until(lambda: refuses(first, why, culprit))


def refuses(group, why, culprit=None):
    try:
        group.post()
    except weft.WireError as error:
        assert why in str(error)
        assert error.culprit == culprit
        return True
    return False


def torch_library(name):
    return os.path.join(os.path.dirname(torch.__file__), "lib", f"lib{name}.so")


class InStreams:
    """A wire of a device, whose rounds do not begin before a peer comes, which none does."""

    def __init__(self, rank, size):
        self.rank, self.size, self.device = rank, size, torch.device("cuda", 1)
        self.features = Features(lockstep=True, streams=True)
        self.ended, self.failed = threading.Event(), None

    def post(self, sends=(), recvs=(), channel=0):
        return self

    def drop(self):
        pass

    def wait_stream(self):
        assert self.ended.wait(patient(60.0))
        raise WireFailed(self.failed)

    def done(self):
        return self.ended.is_set()

    def abort(self, failure):
        self.failed = failure
        self.ended.set()

    def failure(self):
        return self.failed

    def close(self):
        pass


class GoesOn(InStreams):
    """A wire of a device, in whose stream nothing has come by now, and nobody waits for that."""

    def wait_stream(self):
        return []


def in_streams(group, kind=InStreams):
    wire = kind(group.rank, group.size)
    group.session.carry_device(wire, "nccl")
    return group.on(wire.device)


def test_a_round_that_does_not_begin_ends_at_the_deadline(watching):
    """As the first one of NCCL, which makes its communicator when all have come."""
    first, _ = watching.groups
    first.set_timeout(0.3)
    over = in_streams(first)
    began = time.monotonic()
    with pytest.raises(weft.WireError, match=r"a round over nccl was not through after 0\.3 s"):
        over.post([(1, torch.ones(3))]).wait()
    assert time.monotonic() - began < patient(30.0)


def test_a_group_that_breaks_ends_what_streams_wait_for(watching):
    first, second = watching.groups
    over = in_streams(first)
    threading.Timer(0.1, second.abort, ["no memory left"]).start()
    with pytest.raises(weft.WireError, match="rank 1 gave up: no memory left"):
        over.post([(1, torch.ones(3))]).wait()


@pytest.mark.parametrize("read", [False, True])
def test_a_call_raises_if_its_stream_has_gone_on_with_garbage(watching, read):
    first, second = watching.groups
    over = in_streams(first, GoesOn)

    def job():
        over.post([(1, torch.ones(3))]).wait()
        second.abort("no memory left")
        assert until(lambda: first.session.detector.verdict)
        if read:
            raise RuntimeError("cannot allocate as many bytes as were read in garbage")
        return "garbage"

    with pytest.raises(weft.WireError, match="rank 1 gave up: no memory left"):
        first.worker.call("sum", job)
    with pytest.raises(weft.WireError, match="rank 1 gave up: no memory left"):
        first.check()


def test_a_result_is_not_handed_out_once_the_group_has_broken(watching, clock, monkeypatch):
    """Its stream may still have waited for messages."""
    first, second = watching.groups
    job = Aside(first.streams, torch.device("cuda", 1), lambda: torch.ones(3))
    work = first.worker.submit("call", job)
    assert until(work.is_completed)
    assert work.wait().tolist() == [1.0] * 3
    second.abort("no memory left")
    assert until(lambda: first.session.detector.verdict)
    with pytest.raises(weft.WireError, match="rank 1 gave up: no memory left"):
        work.wait()
    future = MagicMock()
    future.done.return_value = False
    monkeypatch.setattr(torch.futures, "Future", lambda *, devices: future)
    monkeypatch.setattr(Aside, "apart", lambda job: contextlib.nullcontext())
    work.get_future()
    assert until(lambda: future.set_result.called)
    future.set_result.assert_called_once_with(None)
    ((value,), _) = future.then.call_args
    with pytest.raises(RuntimeError, match=r"WireError: .*rank 1 gave up: no memory left"):
        value(future)
    first.close()  # after which nothing breaks it
    assert work.wait().tolist() == [1.0] * 3


def test_a_call_that_ended_well_before_the_group_broke_returns(watching):
    first, second = watching.groups

    def job():
        second.abort("no memory left")
        assert until(lambda: first.session.detector.verdict)
        return "what the host has waited for"

    first.check()
    over = in_streams(first, GoesOn)
    first.worker.call("before", lambda: over.post([(1, torch.ones(3))]).wait())
    assert first.worker.call("sum", job) == "what the host has waited for"


@pytest.mark.parametrize(("queues", "warns"), [("1", True), ("8", False), (None, False)])
def test_streams_that_share_one_queue_are_logged_once(watching, monkeypatch, caplog, queues, warns):
    session_module.warn_of_one_queue.cache_clear()
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    for group in (watching.groups[0], watching.groups[0].subset([0])):
        in_streams(group)
    found = [text for text in caplog.messages if "CUDA_DEVICE_MAX_CONNECTIONS=1" in text]
    assert len(found) == warns
    session_module.warn_of_one_queue.cache_clear()


# what every rank is told


@pytest.mark.parametrize("index", [-1, 2**31 - 1])
@pytest.mark.parametrize("name", NAMES)
def test_who_sends_wrong_indices_is_named(name, index):
    bad = torch.tensor([index], dtype=torch.int32).view(torch.uint8)

    class Garbles(CheckedRounds):
        """Sends other bytes first, to each peer, in one round."""

        rounds = 0

        def begin_round(self):
            if self.rounds == 0:
                peers = set()
                for post in sorted(self.queued, key=lambda post: post.channel):
                    for index, (peer, tensor) in enumerate(post.sends):
                        if tensor.nbytes and peer not in peers:
                            sent = as_bytes(tensor).clone()
                            sent[:4] = bad
                            post.sends[index] = peer, sent
                            peers.add(peer)
            self.rounds += 1
            super().begin_round()

    def body(group):
        kind = Garbles if group.rank == 1 else CheckedRounds
        group.session.carry_device(kind(group.wire), "garbled")
        rows = weft.Rows(some(group.rank, "cpu")[0], torch.ones(400, 8), 900)
        with pytest.raises(weft.WireError, match="rank 1 sent indices that "):
            weft.sparse_all_reduce(rows, algorithm=name)
            weft.barrier()  # where that rank is told, too

    run(3, body, on="device")


def refused(group, wrongly):
    rows = (torch.arange(3), torch.ones(3))
    with wrongly, pytest.raises(weft.WeftError) as caught:
        weft.sparse_all_reduce(rows, group=group)
    assert weft.sparse_all_reduce(rows, group=group)[1].tolist() == [3.0] * 3
    return str(caught.value)


def test_a_graph_that_is_recorded_is_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_capturing(torch.device("cuda")) and not is_capturing(torch.device("cpu"))
    recording = threading.local()
    monkeypatch.setattr(request, "is_capturing", lambda on: getattr(recording, "graph", False))

    @contextlib.contextmanager
    def graph(of_this_rank):
        recording.graph = of_this_rank
        yield
        recording.graph = False

    first, *others = run(3, lambda group: refused(group, graph(group.rank == 1)), on="device")
    assert "rank 1: the stream records a CUDA graph" in first and others == [first] * 2


def mixed(group):
    return refused(group, contextlib.nullcontext() if group.rank == 2 else as_device())


def test_ranks_whose_rows_are_elsewhere_are_told_alike():
    first, *others = run(3, mixed, on="processes")
    assert others == [first] * 2
    assert "rank 0: these ranks have no process group that takes cpu tensors" in first


# how often a host waits, and what needs a GPU

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: tools/gpu-check")
ON = pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=[GPU, pytest.mark.gpu])])


class Meeting:
    """A process group among ranks that are threads, with tensors of one device."""

    bound_device_id, meet, sent = None, threading.Barrier(3), [(), (), ()]

    def __init__(self, rank):
        self._rank = rank

    def all_to_all(self, out, data, incoming, outgoing):
        self.sent[self._rank] = data.split(outgoing)
        self.meet.wait()
        for place, parts in zip(out.split(incoming), self.sent, strict=True):
            place.copy_(parts[self._rank])
        self.meet.wait()


def all_to_all(out, data, incoming, outgoing, *, group):
    group.all_to_all(out, data, incoming, outgoing)


def some(rank, on):
    ids = torch.randint(900, (400,), generator=torch.Generator().manual_seed(rank))
    return ids.to(on), (torch.arange(3200) % 7).view(400, 8).float().to(on)


@ON
def test_a_host_waits_twice_in_a_call(monkeypatch, on):
    reads, real = [], reference.read

    def counted(numbers):
        reads.append(threading.get_ident())
        return real(numbers)

    for module in (reference, kernels):
        monkeypatch.setattr(module, "read", counted)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)

    def body(group):
        ids, values = some(group.rank, on)
        meeting = Meeting(group.rank)
        kind = rounds_over if on == "cuda" else GlooRounds
        rounds = kind(lambda: meeting, group.rank, 3, ids.device)
        group.session.carry_device(rounds, "threads")
        coo = torch.sparse_coo_tensor(ids[None], values, (900, 8), check_invariants=False)
        rows, half = weft.Rows(ids, values, 900), weft.Rows(ids, values.bfloat16(), 900)
        calls = [((ids, values), {}), (coo, {"op": "avg"}), (rows, {"op": "prod"})]
        calls += [(half, {"op": "max"}), (rows, {"wire_dtype": torch.bfloat16})]
        listener = rows if group.rank == 1 else None
        table = torch.nn.Embedding(900, 8, sparse=True, device=on)
        table(ids).sum().backward()
        others = {
            "list": lambda: weft.sparse_all_reduce([rows, (ids, values), coo], group=group),
            "scatter": lambda: weft.sparse_reduce_scatter(rows, group=group),
            "ranges": lambda: weft.sparse_reduce_scatter(rows, group=group, ranges=[0, 9, 99, 900]),
            "reduce": lambda: weft.sparse_reduce(coo, group=group),
            "all_gather": lambda: weft.sparse_all_gather(rows, group, return_counts=True),
            "broadcast": lambda: weft.sparse_broadcast(listener, 1, group),
            "gradients": lambda: weft.sync_grads(table, group=group),
        }
        found = {}

        def noted(name, made):
            before = reads.count(threading.get_ident())
            made()
            found.setdefault(name, []).append(reads.count(threading.get_ident()) - before)

        for mode in ("warn", "default"):
            Meeting.meet.wait()
            if on == "cuda":
                torch.cuda.set_sync_debug_mode(mode)
            Meeting.meet.wait()
            for name, (given, options) in product(["auto", *NAMES], calls * (mode == "warn")):
                options |= {"group": group, "algorithm": name}
                noted(name, partial(weft.sparse_all_reduce, given, **options))
            for name, each in others.items() if mode == "warn" else ():
                noted(name, each)
        return found

    with warnings.catch_warnings(record=True) as said, as_device():
        warnings.simplefilter("always")
        counts = results(on_groups(threads.group(3, 60.0), body), on)
    moved = {"all_gather": [1], "broadcast": [1]}
    wanted = {name: [2] * (5 if name in ("auto", *NAMES) else 1) for name in counts[0]} | moved
    listens = wanted | {"broadcast": [0]}
    assert counts == [listens, wanted, listens]
    waits = [text for each in said if "called a synchronizing" in (text := str(each.message))]
    assert len(waits) == (len(reads) if on == "cuda" else 0), waits


def one_rank():
    """A sum of NCCL's with itself, in the wire's stream; and a call."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with weft.init(timeout=60) as group:
        ids, values = some(0, "cuda")
        over = group.on(values.device)
        (sums,) = Aside(
            group.streams, values.device, lambda: over.all_reduce(values.clone(), "sum").wait()
        ).run()
        found = weft.sparse_all_reduce((ids, values))
        expected = torch.sparse_coo_tensor(ids[None], values, (900, 8)).coalesce()
        assert torch.equal(sums, values) and torch.equal(found[1], expected.values())
        return over.route


@GPU
@pytest.mark.gpu
def test_nccl_with_one_rank():
    assert processes(1, one_rank) == ["cuda (nccl)"]
