"""What weft does beside the caller's stream of a device, in stand-ins for streams and events."""

from __future__ import annotations

import ctypes
import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

import weft
from weft.base import devices
from weft.base.devices import Aside
from weft.call import attempt
from weft.call.attempt import in_own_stream
from weft.testing import threads


@pytest.fixture
def clock(monkeypatch):
    """The order of what streams are asked for."""
    clock = MagicMock()
    events = iter([clock.first, clock.second])
    clock.own.__enter__.return_value = clock.own
    monkeypatch.setattr(torch, "Event", lambda on: next(events))
    monkeypatch.setattr(devices.Streams, "on", lambda streams, device: clock.own)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda on: clock.callers)
    monkeypatch.setattr(devices, "cuda_runtime", lambda: None)
    return clock


class Noted(torch.Tensor):
    """A tensor of an accelerator, as far as streams go."""

    is_cpu = False

    def record_stream(self, stream):
        stream.uses(self.tolist())


def test_an_asynchronous_call_comes_behind_its_caller_who_goes_on_behind_it(clock, monkeypatch):
    one, two, three = (torch.full((1,), number).as_subclass(Noted) for number in range(3))
    group, result = threads.group(1)[0], [weft.Rows(one, two), (three, "no tensor")]
    cuda, claimed = torch.device("cuda", 1), []
    claim = claimed.append  # before, torch's own thread is one of device 0
    monkeypatch.setattr(torch.accelerator, "set_device_index", claim)
    job = Aside(devices.Streams(), cuda, lambda: clock.job() and result, lambda found: [found])
    clock.caller_goes_on()
    work = group.worker.submit("call", job)
    found = work.wait()
    assert found == [result] and work.wait() is found
    assert clock.mock_calls == [
        call.first.record(clock.callers),
        call.caller_goes_on(),
        call.own.__enter__(),
        call.own.wait_event(clock.first),
        call.job(),
        call.job().__bool__(),
        call.second.record(clock.own),
        call.own.synchronize(),  # from here on what it reads may go
        call.own.__exit__(None, None, None),
        call.callers.wait_event(clock.second),
        *(call.callers.uses([number]) for number in range(3)),
        call.second.record(clock.callers),  # who asks next waits for what the first has made
        call.callers.wait_event(clock.second),
        *(call.callers.uses([number]) for number in range(3)),
    ]
    assert claimed == [cuda]  # the worker's thread; that of the caller stays as it is
    group.close()


def test_a_call_that_raises_has_its_stream_come_to_an_end_all_the_same(clock):
    def fails():
        raise KeyError("here")

    with pytest.raises(KeyError):
        Aside(devices.Streams(), torch.device("cuda", 1), fails)()
    assert call.own.synchronize() in clock.mock_calls


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
    monkeypatch.setattr(attempt, "Aside", lambda streams, device, *_: streams.on(device))
    found = [in_own_stream(of, device, None) for of in (one, two, one) for device in (cuda, other)]
    assert found == [1, 2, 3, 4, 1, 2]
    # of a pool that programs do not draw from
    assert made == [(cuda, -1), (other, -1), (cuda, -1), (other, -1)]


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
    streams, device = devices.Streams(), torch.device("cuda", 0)
    found = [Aside(streams, device, None).apart() for _ in range(3)]
    assert len({id(each) for each in found}) == 3 and set(found) == {(1, 0, 0)}
    devices.idle_stream.cache_clear()


def test_threads_of_wefts_end_no_capture_of_a_graph_in_others(monkeypatch):
    modes = []

    def exchange(mode):
        modes.append(ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value)

    runtime = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(devices, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    devices.claim_thread(torch.device("xpu", 0))  # where there is no such thing
    monkeypatch.setattr(torch, "Event", MagicMock())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda on: None)
    Aside(devices.Streams(), torch.device("cuda", 1), None).claim_thread()
    assert modes == [1]


def test_a_library_is_found_where_torch_has_loaded_it():
    assert devices.loaded_library("libno_such_library") is None
    if sys.platform.startswith("linux"):
        of_torch = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        assert os.path.samefile(devices.loaded_library("libtorch_cpu.so"), of_torch)
