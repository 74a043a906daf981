"""Tensors of a device over the wire of the CPU; the CPU stands in for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weft.testing.wires import check_wire, ranks_as_threads
from weft.wire import staged as module
from weft.wire.in_process.threads import thread_wires
from weft.wire.interface import Failure, Features, WireFailed
from weft.wire.staged import Staged

CPU = torch.device("cpu")


class Both(Staged):
    """Closes the wire of the CPU, too, which a group closes itself."""

    def __init__(self, cpu_wire, device):
        super().__init__(cpu_wire, device)
        self.below = cpu_wire

    def close(self):
        super().close()
        self.below.close()


def wires_of(size):
    return [Both(wire, CPU) for wire in thread_wires(size)]


def failure_of(use):
    with pytest.raises(WireFailed) as caught:
        use()
    return caught.value.failure


def test_it_keeps_the_contract(fewer):
    outcomes = check_wire(ranks_as_threads(wires_of))
    assert not any(outcome.error for outcome in outcomes)


def test_the_wire_of_the_cpu_outlives_it():
    first, second = thread_wires(2)
    above = Staged(first, CPU)
    pending = above.post((), [(1, 8)])
    above.abort(Failure("aborted", 1, "rank 1 died"))
    assert failure_of(lambda: pending.wait(10.0)) == Failure("aborted", 1, "rank 1 died")
    above.close()
    sent = first.post([(1, torch.ones(2))])
    assert second.post((), [(0, torch.zeros(2))]).wait(10.0)[0].tolist() == [1, 1]
    sent.wait(10.0)


def test_after_an_abort_nothing_is_copied_to_a_tensor_though_its_message_has_come(monkeypatch):
    first, second = thread_wires(2)
    above, place = Staged(first, CPU), torch.zeros(2)
    failure = Failure("aborted", 1, "rank 1 died")
    post = first.post

    def posted(*given):
        pending = post(*given)
        arrives = pending.wait

        def aborted(timeout):
            above.abort(failure)
            return arrives(timeout)

        monkeypatch.setattr(pending, "wait", aborted)
        return pending

    monkeypatch.setattr(first, "post", posted)
    pending = above.post((), [(1, place)])
    sent = Staged(second, CPU).post([(0, torch.ones(2))])
    assert failure_of(lambda: pending.wait(10.0)) == failure
    sent.wait(10.0)
    assert place.tolist() == [0, 0]


def test_it_fails_with_the_wire_of_the_cpu():
    first, _ = thread_wires(2)
    above = Staged(first, CPU)
    first.abort(Failure("lost", 1, "the connection to rank 1 was reset"))
    assert above.failure() == first.failure()
    assert failure_of(above.post) == first.failure()


def test_the_rate_of_the_wire_of_the_cpu_leaves_out_its_copies():
    first, _ = thread_wires(2)
    first.features = Features(between=100e6)
    assert Staged(first, CPU).features == Features()  # calls say what they reach


def test_its_messages_keep_apart_from_those_of_the_cpu():
    first, second = thread_wires(2)
    apart = Staged(first, CPU).post([(1, torch.tensor([1.0]))])
    own = first.post([(1, torch.tensor([2.0]))])
    assert second.post((), [(0, torch.zeros(1))]).wait(10.0)[0].item() == 2
    assert Staged(second, CPU).post((), [(0, torch.zeros(1))]).wait(10.0)[0].item() == 1
    own.wait(10.0)
    apart.wait(10.0)


def test_what_is_sent_is_there_before_it_is_posted(monkeypatch):
    asked = []
    stream = SimpleNamespace(synchronize=lambda: asked.append("waits"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(
        module, "host_memory", lambda nbytes, _: torch.zeros(nbytes, dtype=torch.uint8)
    )
    first, second = thread_wires(2)
    post = first.post
    monkeypatch.setattr(first, "post", lambda *given: asked.append("posts") or post(*given))
    above = Staged(first, torch.device("cuda", 0))
    pending = above.post([(1, torch.ones(2))])
    assert asked == ["waits", "posts"]
    above.post()  # nothing is sent, and nothing waited for
    assert asked == ["waits", "posts", "posts"]
    Staged(second, CPU).post((), [(0, torch.zeros(2))]).wait(10.0)
    pending.wait(10.0)


def test_memory_is_page_locked_for_a_device_alone(monkeypatch):
    asked = []
    real = torch.empty

    def empty(*args, pin_memory=False, **kwargs):
        asked.append(pin_memory)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    module.host_memory(4, CPU)
    module.host_memory(4, torch.device("cuda", 0))
    assert asked == [False, True]
