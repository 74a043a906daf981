"""What streams do with memory, as torch's CUDA sanitizer sees it; the CPU stands in for the device.

Stand-in streams and events feed the sanitizer's vector clocks: each operation of torch's, and each
round, is a kernel in the stream that is current. It finds accesses that no wait orders.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.device_interface  # which derives from torch.Event, and comes by itself later
import torch.distributed as dist
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import weft
from weft import kernels
from weft.base import devices
from weft.base.devices import as_device
from weft.base.pace import patient
from weft.bootstrap.outcome import results
from weft.kernels import reference
from weft.sparse import ALGORITHMS, Sizes, choose, run
from weft.testing import threads
from weft.testing.threads import on_groups
from weft.wire import torch_rounds
from weft.wire.torch_rounds import rounds_over

CPU, RANKS = torch.device("cpu"), 2
STAYING = Sizes(2, 8, 4, 4, 9, 4, 4, staying=True)
NAMES = sorted(name for name in ALGORITHMS if choose.serves(STAYING, name))
CALLER, GROUP, WIRE = "caller", "group", "wire"  # whose streams there are


class Machine:
    """The device of each rank, which is a thread; `forgotten`: a wait that none does."""

    def __init__(self, forgotten):
        self.forgotten, self.here = forgotten, threading.local()
        self.numbers, self.kept, self.sent = itertools.count(1), [], {}
        self.meeting = threading.Barrier(RANKS, timeout=patient(60.0))

    def begin(self, rank):
        self.here.rank, self.here.handler, self.here.errors = rank, EventHandler(), []
        self.here.operations, self.here.current = 0, Stream(self, CALLER)

    def launch(self, reads, writes, name):
        self.here.operations += 1
        self.here.errors += self.here.handler._handle_kernel_launch(
            self.here.current.number, reads - writes, writes, set(), name, defaultdict(list)
        )

    def all_to_all(self, out, data, incoming, outgoing, *, group):
        assert self.here.current.kind == WIRE
        self.launch(pointers(data), pointers(out), "all_to_all")
        rank = self.here.rank
        with _disable_current_modes():
            self.sent[rank] = data.split(outgoing)
            self.meeting.wait()
            for peer, place in enumerate(out.split(incoming)):
                place.copy_(self.sent[peer][rank])
            self.meeting.wait()


class Stream:
    def __init__(self, machine, kind):
        self.machine, self.kind, self.number = machine, kind, next(machine.numbers)
        self.stream_id, self.device_index, self.device_type = self, 0, 0

    def __enter__(self):
        here = self.machine.here
        self.before, here.current = here.current, self
        return self

    def __exit__(self, *_):
        self.machine.here.current = self.before

    def wait_event(self, event):
        if (self.kind, event.kind) != self.machine.forgotten:
            self.machine.here.handler._handle_event_wait(id(event), self.number)


class Event:
    def __init__(self, machine):
        self.machine, self.kind = machine, None
        machine.kept.append(self)
        machine.here.handler._handle_event_creation(id(self))

    def record(self, stream):
        self.kind = stream.kind
        self.machine.here.handler._handle_event_record(id(self), stream.number)

    def query(self):
        return True


class Sanitizer(TorchDispatchMode):
    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        if any(each.alias_info and not each.alias_info.is_write for each in schema.returns):
            return result  # a view
        names = [each.name for each in schema.arguments]
        named = [*zip(names, args, strict=False), *(kwargs or {}).items()]
        written = {each.name for each in schema.arguments if each.alias_info is not None}
        reads, writes = set(), set()
        for name, value in named:
            (writes if name in written else reads).update(pointers(value))
        fresh = pointers(result) - reads - writes
        for pointer in fresh:  # the allocator's matter
            self.machine.here.handler.tensors_accessed.create_tensor(pointer, None)
        self.machine.launch(reads, writes | fresh, str(function))
        return result


def pointers(value):
    """The storages of the tensors in a value."""
    tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    strided = [each for each in tensors if each.layout is torch.strided and each.numel()]
    return {each.untyped_storage().data_ptr() for each in strided}


@pytest.fixture
def machine(monkeypatch, request):
    machine = Machine(getattr(request, "param", None))

    def stream(*given, priority=0):
        if len(given) == 3:
            return given[0]  # another object for the same stream
        made_by = sys._getframe(1).f_globals["__name__"]
        return Stream(machine, WIRE if made_by == torch_rounds.__name__ else GROUP)

    def read(numbers, real=reference.read):
        machine.here.handler._handle_stream_synchronization(machine.here.current.number)
        return real(numbers)

    def reduced(group, request, real=run.reduced):
        with Sanitizer(machine):  # the worker has left it
            return real(group, request)

    monkeypatch.setattr(torch, "Stream", stream)
    monkeypatch.setattr(torch, "Event", lambda device: Event(machine))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: machine.here.current)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(devices, "accelerators", lambda device: [device])
    monkeypatch.setattr(dist, "all_to_all_single", machine.all_to_all)
    monkeypatch.setattr(run, "reduced", reduced)
    for module in (reference, kernels):
        monkeypatch.setattr(module, "read", read)
    return machine


def calls(machine, group):
    """Calls between other work of the caller's stream; the races, and how many kernels ran."""
    machine.begin(group.rank)
    process_group = SimpleNamespace(bound_device_id=None)
    rounds = rounds_over(lambda: process_group, group.rank, RANKS, CPU)
    group.session.carry_device(rounds, "threads")
    draw = torch.Generator().manual_seed(group.rank)
    with Sanitizer(machine):
        for name in NAMES:
            ids, values = torch.randint(900, (400,), generator=draw), torch.randn(400, 8)
            values = values * 2  # written in the caller's stream
            found = weft.sparse_all_reduce((ids, values), group=group, algorithm=name)
            found[1].mul_(2)  # written there after the call
            values.add_(1)  # as are the inputs
    return [str(error) for error in machine.here.errors], machine.here.operations


def races(machine):
    with as_device():
        body = functools.partial(calls, machine)
        return results(on_groups(threads.group(RANKS, patient(60.0)), body), "threads")


def test_waits_order_all_accesses(machine):
    for errors, operations in races(machine):
        assert not errors and operations > 100 * len(NAMES)


FORGOTTEN = [(GROUP, CALLER), (CALLER, GROUP), (WIRE, GROUP), (GROUP, WIRE)]


@pytest.mark.parametrize("machine", FORGOTTEN, indirect=True, ids="-waits-for-".join)
def test_each_wait_is_needed(machine):
    assert all(errors for errors, _ in races(machine))
