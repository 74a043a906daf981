"""What has no memory on one rank is an error on every rank, and the next call works.

To read what was freed may end the process, so ranks are processes of their own.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import weft
from weft.testing import spmd

SIDE = 200  # a tensor of SIDE x SIDE does not go along with an opening


def freed(shape, left=0):
    """What FSDP leaves of a parameter between its uses."""
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(left)
    return tensor


def freed_rows(shape, left=0):
    rows = torch.ones(1, *shape[1:])
    indices = torch.zeros(1, 1, dtype=torch.int64)
    tensor = torch.sparse_coo_tensor(indices, rows, shape, check_invariants=False)
    tensor._values().untyped_storage().resize_(left)
    return tensor


def shrunk(shape):
    """What has memory for some of its elements."""
    return freed(shape, left=4)


def shrunk_rows(shape):
    return freed_rows(shape, left=4)


def square(make):
    shape = torch.Size((SIDE, SIDE))
    return torch.ones(shape) if make is None else make(shape)


def with_gradient(make):
    model = nn.Linear(SIDE, SIDE, bias=False)
    model.weight.grad = square(make)
    return model


def forward(make):
    weft.nn.AllGather(weft.Partition(2), 0)(square(make))


def of_parameter(make):
    weft.nn.AllSumReduce(weft.Partition(2), 0)(nn.Parameter(square(make)))


def backward(make):
    gathered = weft.nn.AllGather(weft.Partition(2), 0)(torch.ones(SIDE // 2, SIDE).requires_grad_())
    gathered.backward(square(make))


def clipped(make):
    table = weft.nn.ShardedEmbedding(4, 2)
    weft.clip_grad_norm_([*table.parameters(), *with_gradient(make).parameters()], 1.0)


READS = {
    "forward": forward,
    "parameter": of_parameter,
    "backward": backward,
    "sync_grads": lambda make: weft.sync_grads(with_gradient(make)),
    "clip": clipped,
}

FREED, SHRUNK = "without memory: it was freed, or", "larger than its memory: the storage was made"
KINDS = {
    "freed": (freed, FREED),
    "zeros": (torch._efficientzerotensor, FREED),
    "shrunk": (shrunk, SHRUNK),
    "freed rows": (freed_rows, FREED),
    "shrunk rows": (shrunk_rows, SHRUNK),
}


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        *((call, kind) for call in READS for kind in ("freed", "zeros", "shrunk")),
        *(
            (call, kind)
            for call in ("sync_grads", "clip")
            for kind in ("freed rows", "shrunk rows")
        ),
    ],
)
@spmd(2, on=("processes",))
def test_what_has_no_memory_is_an_error_on_every_rank(group, call, kind):
    READS[call](None)
    make, text = KINDS[kind]
    with pytest.raises(weft.WeftError, match=rf"^rank 1: .* is {text}"):
        READS[call](make if group.rank else None)
    assert weft.all_reduce(torch.ones(1)).item() == group.size


@spmd(2, on=("processes",))
def test_what_was_sent_may_be_freed_and_is_looked_at_anew(group):
    table = weft.nn.ShardedEmbedding(4, 2)
    sends = {
        "all_reduce": weft.all_reduce,
        "all_to_all": lambda sent: weft.all_to_all([sent] * 2),
        "exchange": lambda sent: weft.exchange(sent, [torch.tensor([0])] * 2),
        "table": lambda sent: table(sent[0, :2].long()),
        "sparse": lambda sent: weft.sparse_all_reduce((torch.arange(SIDE), sent)),
    }
    for name, send in sends.items():
        sent = square(None)
        send(sent)
        last = weakref.ref(sent)
        if group.rank:
            sent.untyped_storage().resize_(0)
        if name != "table":
            with pytest.raises(weft.WeftError, match=r"^rank 1: .* without memory"):
                send(sent)
        del sent
        assert last() is None, name


@spmd(2, on=("processes",))
def test_an_index_outside_of_a_gradient_is_an_error_where_others_are_dense(group):
    def outside(shape):
        rows = torch.ones(2, *shape[1:])
        indices = torch.tensor([[0, 10**6]])
        return torch.sparse_coo_tensor(indices, rows, shape, check_invariants=False)

    model = with_gradient(outside if group.rank else None)
    before = model.weight.grad
    with pytest.raises(weft.WeftError, match=r"^rank 1: the gradient of .*: index 1000000 is"):
        weft.sync_grads(model)
    assert model.weight.grad is before
    assert weft.all_reduce(torch.ones(1)).item() == group.size
