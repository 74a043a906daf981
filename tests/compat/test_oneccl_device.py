"""Memory on any device that torch has, as if there were an accelerator here.

What its streams have queued is done before a buffer is read; what goes there has arrived before a
result is handed out.
"""

from __future__ import annotations

import threading

import pytest
import torch

import weft
from weft.compat.oneccl import event, request
from weft.testing import spmd

DEVICE = torch.device("cuda")
UNUSED = [None] * 4
THREAD = threading.local()  # `queued`: on its current stream; `pending`: copies under way


class There(torch.Tensor):
    """Memory of the accelerator's: what is written to it arrives when somebody waits for that."""

    @property
    def device(self):
        return DEVICE

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()

    def copy_(self, source):
        staged = source if source.device == DEVICE else source.clone()
        return self._later(lambda: torch.Tensor.copy_(self, staged))

    def fill_(self, value):
        return self._later(lambda: torch.Tensor.fill_(self, value))

    def _later(self, write):
        THREAD.pending = [*getattr(THREAD, "pending", ()), write]
        return self


def there(tensor):
    return tensor.as_subclass(There)


class Stream:
    """The one that is current on a thread: weft's threads have others than the caller's."""

    def __init__(self, device):
        assert device == DEVICE
        self._queued = getattr(THREAD, "queued", None)

    def synchronize(self):
        if self._queued is not None:
            self._queued()


def synchronize(device):
    assert device == DEVICE
    for write in THREAD.__dict__.pop("pending", ()):
        write()


@pytest.fixture
def accelerator(monkeypatch):
    to = torch.Tensor.to

    def moved(tensor, where, *rest, **named):
        if where != DEVICE:
            return to(tensor, where, *rest, **named)
        return tensor if tensor.device == DEVICE else there(torch.zeros_like(tensor)).copy_(tensor)

    reduce = weft.sparse_all_reduce

    def reduced(rows, *asked):
        """On the host: what the call itself does with an accelerator is tested where it is."""
        indices, values = reduce(tuple(each.cpu() for each in rows), *asked)
        return indices.to(DEVICE), values.to(DEVICE)

    monkeypatch.setattr(weft, "sparse_all_reduce", reduced)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)


def queued(rank):
    """What is sent, which the caller's stream has yet to write."""
    indices, values = torch.full((3,), -1), torch.full((3,), float("nan"))

    def write():
        indices.copy_(torch.tensor([5, 2 + rank, 5]))
        values.copy_(torch.tensor([1.0, 2.0, 4.0]))

    THREAD.queued = write
    return there(indices), 3, there(values), 3


def by_request(sent):
    found, sums = there(torch.zeros(8, dtype=torch.int64)), there(torch.zeros(8))
    counts = there(torch.zeros(1, dtype=torch.int64)), torch.zeros(1, dtype=torch.int64)
    request.sparse_allreduce(
        *sent, found, counts[0], sums, counts[1], "int64", "float32", "sum"
    ).wait()
    return found[: counts[0].item()].tolist(), sums[: counts[1].item()].tolist()


def completion():
    """What a function was called with, once it was; and that function."""
    kept = []

    def complete(indices, count, dtype, values, *rest):
        assert indices.device == values.device == DEVICE
        kept.extend((indices.tolist(), values.tolist()))

    return kept, complete


def by_completion(sent):
    kept, complete = completion()
    attr = event.create_sparse_allreduce_attr(completion_fn=complete)
    event.sparse_allreduce(*sent, *UNUSED, "int64", "float32", "sum", attr=attr).wait()
    return tuple(kept)


def by_allocation(sent):
    kept = []

    def allocate(count, dtype, values, *rest):
        kept.extend((there(torch.zeros(count, dtype=dtype)), there(torch.zeros(values))))
        return kept

    attr = event.create_sparse_allreduce_attr(alloc_fn=allocate)
    event.sparse_allreduce(*sent, *UNUSED, "int64", "float32", "sum", attr=attr).wait()
    return tuple(each.tolist() for each in kept)


@pytest.mark.parametrize("face", [by_request, by_completion, by_allocation])
@spmd(2, on=("threads",))
def test_the_accelerator_is_waited_for_on_the_way_in_and_out(group, accelerator, face):
    assert face(queued(group.rank)) == ([2, 3, 5], [2.0, 2.0, 10.0])
