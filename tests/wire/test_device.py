"""Tensors where they are: what goes over the caller's group, what the host waits for, who is told.

No accelerator is needed: tensors of the CPU go the way of those on one (`as_device`), a stand-in
group notes what it is asked for, and stand-in streams and events note the order of things.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
import warnings
import weakref
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
import torch.distributed as dist

import weft
from weft import _torch, devices, kernels
from weft.bootstrap.outcome import results
from weft.devices import Aside, as_device, is_capturing
from weft.kernels import reference
from weft.sparse import ALGORITHMS, request
from weft.sparse import run as opening
from weft.sparse.cost import Load
from weft.testing import processes, run, threads
from weft.testing.pace import patient
from weft.testing.threads import on_groups
from weft.wire import device, process_group
from weft.wire.base import wire_for

STAYING = Load(2, 8, 4, 4, 6, 9, 4, 4, 4, staying=True)
NAMES = sorted(name for name, found in ALGORITHMS.items() if found.applies(STAYING) is None)


# what a group is asked for

ASKED = []  # of the stand-in group of this process


class StandIn(dist.ProcessGroup):
    """Forwards to gloo, as NCCL's group would go its own way, and notes what it was asked for."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def __getattribute__(self, name):
        if name in ("allreduce", "allgather", "broadcast", "barrier", "send", "recv", "alltoall"):
            ASKED.append((name, [], []))
        return super().__getattribute__(name)

    def alltoall_base(self, out, mine, came, goes, opts=None):
        assert (out.dtype, out.numel(), mine.numel()) == (torch.uint8, sum(came), sum(goes))
        ASKED.append(("all_to_all_single", list(goes), list(came)))
        return self._gloo.alltoall_base(out, mine, came, goes, opts or dist.AllToAllOptions())

    all_to_all_single = alltoall_base


ROWS, WIDTH, HEIGHT, SIZE = 1000, 32, 3000, 4


def counted(group, path, name):
    """What the group was asked for in one call, and what went over the CPU wire meanwhile."""
    if "standin" not in dist.Backend.backend_list:
        dist.Backend.register_backend("standin", StandIn, devices=["cpu"])
    me = {"rank": group.rank, "world_size": group.size, "init_method": f"file://{path}"}
    dist.init_process_group("cpu:standin", **me)
    mine = torch.randperm(HEIGHT, generator=torch.Generator().manual_seed(group.rank))[:ROWS]
    rows, hosts = weft.Rows(mine, torch.ones(ROWS, WIDTH), HEIGHT), []
    with as_device():
        assert weft.explain(rows, group=dist.group.WORLD).device == "cpu (standin)"
        beside = process_group.of_group(None)
        ASKED.clear()
        post = beside._post
        beside._post = lambda sends, *rest: hosts.extend(sends) or post(sends, *rest)
        found = weft.sparse_all_reduce(rows, algorithm=name, group=beside)
    record = weft.sparse.last_call(beside)
    dist.destroy_process_group()
    on_host = sum(message.nbytes for _, message in hosts)
    return ASKED, on_host, record.sent_bytes, record.bound_bytes, len(found)


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
        # headers and sizes go over the CPU wire: no values, no lists of indices
        assert on_host < (SIZE - 1) * 8192
        total = SIZE * ROWS + (SIZE - 2) * union
        assert bound == round(total / SIZE * (4 * WIDTH + 4))
    carried = sum(sum(map(sum, each)) for each in sent) / SIZE / said[0][3]
    exact = {"gather": (SIZE - 1) * ROWS * (4 * WIDTH + 4) / said[0][3]}
    # within 1 + 1/P of the bound, and some rows between two quantiles more; no value beyond it
    least, most = {"split": (1, 1 + 1 / SIZE + 0.02), "holders": (1, 1.12)}.get(name, (1, 3))
    assert least <= carried <= most and carried == exact.get(name, carried), carried
    assert len(sent[0]) == {"gather": 2, "split": 3, "holders": 3}.get(name, len(sent[0]))


# which way


def beside(monkeypatch, config):
    """A group of a group with these backends."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group, there = threads.group(1)[0], threading.Thread()  # can be referred to weakly
    group.process_group = lambda: there
    return group


WAYS = [("cpu:gloo,cuda:nccl", "cuda", "nccl"), ("cuda:nccl", "cuda", "nccl")]
WAYS += [("cpu:gloo,xpu:xccl", "xpu", "xccl"), ("cpu:gloo", "cpu", "gloo")]
STAGED = [("cpu:gloo", "cuda"), ("cpu:gloo,cuda:gloo", "cuda"), ("cpu:gloo,cuda:nccl", "xpu")]


@pytest.mark.parametrize(("config", "kind", "name"), WAYS)
def test_tensors_go_over_the_group_that_takes_them(monkeypatch, caplog, config, kind, name):
    way = device.way_for(beside(monkeypatch, config), torch.device(kind))
    assert (type(way), way.name) == (device.OverGroup, name) and not caplog.records


@pytest.mark.parametrize(("config", "kind"), STAGED)
def test_else_they_go_through_the_host_which_is_logged_once(monkeypatch, caplog, config, kind):
    group, there = beside(monkeypatch, config), SimpleNamespace(device=torch.device(kind))
    there.is_cpu = False
    over = [wire_for(group, there) for _ in range(3)][-1]
    assert type(over.way) is device.Staged and over.route == f"{kind} (staged through the host)"
    through = "are copied through the host: the group's backends are"
    assert caplog.messages == [f"rank 0: tensors on {kind} {through} {config}"]
    group.close()


def test_of_a_group_for_two_devices_torch_before_2_14_keeps_what_is_written_in_python_alone():
    meeting = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    two = "cpu:weft,cuda:nccl"
    keeps_both = _torch.backend_base() is not None
    if keeps_both and not torch.cuda.is_available():
        # newer torch keeps both, and so asks NCCL, which wants a GPU: in the words of 2.14 or 2.15
        words = "only supported with GPUs|requires at least one CUDA device"
        with pytest.raises((ValueError, RuntimeError), match=words):
            dist.init_process_group(two, **meeting)
        assert not dist.is_initialized()
        return
    dist.init_process_group(two, **meeting)
    try:
        way = device.way_for(process_group.of_group(None), torch.device("cuda:0"))
        assert type(way) is (device.OverGroup if keeps_both else device.Staged)
    finally:
        dist.destroy_process_group()


# a rank that fails in an exchange

RANK = """
import json, os, signal, sys, time, torch, weft
from weft.wire.device import OverGroup
place, how, timeout, victim = sys.argv[1:]
group = weft.init(rendezvous=f"file://{place}", timeout=float(timeout))
exchange, done, rows = OverGroup.exchange, [], (torch.arange(50_000), torch.ones(50_000, 8))
def until(*given):
    done.append(given)
    if len(done) == 8 and group.rank == int(victim):
        print(json.dumps({"at": time.monotonic()}), flush=True)
        os.kill(os.getpid(), getattr(signal, how))
    exchange(*given)
OverGroup.exchange = until
try:
    with weft.devices.as_device():
        while len(done) < 20:
            weft.sparse_all_reduce(rows, algorithm="split")
except weft.WireError as error:
    print(json.dumps({"text": str(error), "culprit": error.culprit, "at": time.monotonic()}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("how", "timeout", "late"), [("SIGKILL", 30.0, 0.0), ("SIGSTOP", 3.0, 3.0)]
)
def test_survivors_name_who_fails_in_an_exchange(programs, tmp_path, how, timeout, late, victim):
    given = str(tmp_path / "place"), how, str(timeout), str(victim)
    right = {**os.environ, "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    ranks = [programs(RANK, *given, env={**right, "RANK": str(rank)}) for rank in range(3)]
    lines = {rank: each.communicate() for rank, each in enumerate(ranks) if rank != victim}
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks[victim].pid, signal.SIGKILL)
    began = json.loads(ranks[victim].communicate()[0])["at"]
    why = {"SIGKILL": f"rank {victim} died", "SIGSTOP": f"rank {victim} does not answer"}[how]
    for rank, (out, err) in lines.items():
        assert out, err
        said = json.loads(out)
        assert said["culprit"] == victim, said
        assert said["text"].startswith(f"rank {rank}: ") and why in said["text"]
        assert said["at"] - began < late + patient(1.0), said  # at once, or at the deadline


# the order of things in streams


@pytest.fixture
def clock(monkeypatch):
    """Stand-ins for streams and events: `mock_calls` is what they were asked for, in its order."""
    clock = MagicMock()
    events = iter([clock.first, clock.second])
    clock.own.__enter__.return_value = clock.own
    monkeypatch.setattr(torch, "Event", lambda on: next(events))
    monkeypatch.setattr(devices, "_stream", lambda on: clock.own)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda on: clock.callers)
    return clock


class Noted(torch.Tensor):
    """A tensor of an accelerator, as far as streams go."""

    is_cpu = False

    def record_stream(self, stream):
        stream.uses(self.tolist())


@pytest.mark.parametrize("later", [False, True])
def test_a_call_comes_behind_its_caller_who_goes_on_behind_it(clock, later):
    one, two, three = (torch.full((1,), number).as_subclass(Noted) for number in range(3))
    group, result = threads.group(1)[0], [weft.Rows(one, two), (three, "no tensor")]
    job = Aside(torch.device("cuda"), lambda: clock.job() and result)
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
    group.close()


def test_who_has_no_rows_learns_where_they_are(monkeypatch):
    """Its own, which are none, lie on the host."""

    def of_what_is_there(group, like):
        return group if like is request.NOTHING.values else wire_for(group, like)

    def body(group):
        rows = torch.tensor([7, 2]), torch.ones(2, 3)
        for options in ({}, {"wire_dtype": torch.bfloat16}):
            found = weft.sparse_broadcast(rows if group.rank == 1 else None, 1, group, **options)
            assert all(map(torch.equal, found, rows))

    monkeypatch.setattr(opening, "wire_for", of_what_is_there)
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


@pytest.fixture
def timeout():
    """Of the groups: no test comes near it."""
    return patient(300.0)


@pytest.fixture
def watched(clock, timeout):
    """An exchange that is not through: the ranks, whether it was aborted, its memory, its event."""
    clock.first.query.return_value = False
    groups, aborted, memory = threads.group(2, timeout=timeout), threading.Event(), torch.ones(2)
    watcher = device._Watcher(groups[0], SimpleNamespace(name="nccl", abort=aborted.set))
    watcher.watch(memory)
    assert clock.mock_calls[0] == call.first.record()
    held = weakref.ref(memory)
    del memory
    yield groups, aborted, held, clock.first
    watcher.end()
    assert until(lambda: held() is None and not watcher._thread.is_alive())


def test_an_exchange_keeps_its_memory_until_it_is_through(watched):
    _, aborted, held, event = watched
    gc.collect()
    assert held() is not None
    event.query.return_value = True
    assert until(lambda: held() is None) and not aborted.is_set()


@pytest.mark.parametrize(("broken", "timeout"), [(False, 0.5), (True, 300.0)])
def test_the_group_is_aborted_once_the_wire_beside_it_breaks_or_at_the_deadline(watched, broken):
    groups, aborted, *_ = watched
    why = "rank 1 gave up: no memory left"
    if broken:
        groups[1].abort("no memory left")
    assert aborted.wait(patient(20.0))
    for group in groups:  # every rank is told
        with pytest.raises(weft.WireError, match=why if broken else "over nccl was not through"):
            group.post()


# what every rank is told

SENT = [*product(("all_gather", "broadcast", "reduce", *NAMES), (0,)), ("split", 1)]


@pytest.mark.parametrize("index", [-1, 2**31 - 1])
@pytest.mark.parametrize(("name", "number"), SENT)
def test_who_sends_wrong_indices_is_named(name, number, index):
    """In the exchange of that number; of an owner's sums these come in the second."""
    bad = torch.tensor([index], dtype=torch.int32).view(torch.uint8)

    def body(group):
        way, done = group._devices[torch.device("cpu")].way, []
        exchange, rows = (
            way.exchange,
            weft.Rows(some(group.rank, "cpu")[0], torch.ones(400, 8), 900),
        )

        def garbled(out, data, came, goes):
            at = 0
            for size in filter(None, goes if group.rank == 1 and len(done) == number else ()):
                data[at : at + 4] = bad
                at += size
            done.append(at)
            exchange(out, data, came, goes)

        way.exchange = garbled
        calls = {
            "all_gather": lambda: weft.sparse_all_gather(rows),
            "broadcast": lambda: weft.sparse_broadcast(rows, 1),
            "reduce": lambda: weft.sparse_reduce(rows),
        }
        with pytest.raises(weft.WireError, match="rank 1 sent indices that "):
            calls.get(name, lambda: weft.sparse_all_reduce(rows, algorithm=name))()
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
    assert "device" in first and "cpu (staged through the host)" in first


# how often a host waits, and what needs a GPU

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: tools/gpu-check")
ON = pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=[GPU, pytest.mark.gpu])])


class Across(device.Way):
    """Among ranks that are threads with tensors of one device: each copies what it is sent."""

    name, meet, sent = "threads", threading.Barrier(3), [(), (), ()]

    def __init__(self, rank):
        self._rank = rank

    def exchange(self, out, data, came, goes):
        self.sent[self._rank] = data.split(goes)
        self.meet.wait()
        for place, parts in zip(out.split(came), self.sent, strict=True):
            place.copy_(parts[self._rank])
        self.meet.wait()


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

    def body(group):
        ids, values = some(group.rank, on)
        group._devices[ids.device] = device.DeviceWire(group, ids.device, Across(group.rank))
        coo = torch.sparse_coo_tensor(ids[None], values, (900, 8), check_invariants=False)
        out = torch.empty_like(ids).repeat(3), values.repeat(3, 1)
        rows, half = weft.Rows(ids, values, 900), weft.Rows(ids, values.bfloat16(), 900)
        calls = [((ids, values), {}), (coo, {"op": "avg"}), (rows, {"op": "prod", "out": out})]
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
            Across.meet.wait()
            if on == "cuda":
                torch.cuda.set_sync_debug_mode(mode)
            Across.meet.wait()
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
    waits = [str(each.message) for each in said if "synchronizing" in str(each.message)]
    assert len(waits) == (len(reads) if on == "cuda" else 0), waits


def summed(group, on):
    """Whether results on a device are those on the CPU; and their bits."""
    ids, values = some(group.rank, on)
    expected = weft.sparse_all_reduce((ids.cpu(), values.cpu()), group=group)
    with as_device() if on == "cpu" else contextlib.nullcontext():
        for name in ["auto", *NAMES] * 2:
            found = weft.sparse_all_reduce((ids, values), group=group, algorithm=name)
            assert {each.device.type for each in found} == {on}
            assert all(map(torch.equal, (each.cpu() for each in found), expected))


@ON
def test_results_through_the_host_are_those_of_the_cpu(on):
    run(SIZE, summed, on, on="processes")


def one_rank():
    """An exchange of NCCL's with itself, in weft's stream; and a call."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with weft.init(timeout=60) as group:
        ids, values = some(0, "cuda")
        data, over = values.view(torch.uint8).flatten(), wire_for(group, values)
        out, size = torch.empty_like(data), [data.numel()]
        Aside(data.device, lambda: over.way.exchange(out, data, size, size)).run()
        over._watcher.watch(data, out)
        found = weft.sparse_all_reduce((ids, values))
        expected = torch.sparse_coo_tensor(ids[None], values, (900, 8)).coalesce()
        assert torch.equal(out, data) and torch.equal(found[1], expected.values())
        return over.route


@GPU
@pytest.mark.gpu
def test_nccl_with_one_rank():
    assert processes(1, one_rank) == ["cuda (nccl)"]
