"""Accelerate over weft, on two processes: sparse gradients are carried and clipped."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.testing import processes


class Model(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(50, 4, sparse=sparse)
        self.out = nn.Linear(4, 1)

    def forward(self, ids):
        return self.out(self.table(ids))


def batch(step, rank, size):
    """Words of a step, all of them or a rank's."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(50, (8, 3), generator=generator).tensor_split(size)[rank]


def weights(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def alone(steps):
    """What one process computes that has all words, with dense gradients and no weft."""
    model = Model(sparse=False)
    update = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(steps):
        update.zero_grad()
        model(batch(step, 0, 1)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        update.step()
    return weights(model)


def program():
    made = Accelerator(cpu=True)
    accelerator = weft.trainers.accelerate(made)
    assert accelerator is made and accelerator.weft_state is None
    rank, size = accelerator.process_index, accelerator.num_processes
    trains(accelerator, rank, size)
    accumulates(accelerator, rank)
    is_refused_twice(accelerator)
    clips_shards()
    has_state_of_shards()
    accelerator.end_training()


def trains(accelerator, rank, size):
    model = Model()
    model, update = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    clipped = 0
    for step in range(4):
        update.zero_grad()
        accelerator.backward(model(batch(step, rank, size)).square().mean())
        clipped += accelerator.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        update.step()
    assert len(accelerator.weft_state.calls) == 4 and clipped
    torch.testing.assert_close(weights(model), alone(4))
    only_read = accelerator.prepare_model(Model(), evaluation_mode=True)
    assert not isinstance(only_read, DistributedDataParallel)


def accumulates(accelerator, rank):
    model = accelerator.prepare(Model())
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.tensor([[rank, 5]])).sum())
    assert not accelerator.weft_state.calls
    accelerator.backward(model(torch.tensor([[rank, 5]])).sum())
    assert len(accelerator.weft_state.calls) == 1
    gradient = model.module.table.weight.grad.to_dense()
    assert (gradient.abs().sum(1) > 0).nonzero().flatten().tolist() == [0, 1, 5]


def is_refused_twice(accelerator):
    with pytest.raises(weft.WeftError, match="over weft already"):
        weft.trainers.accelerate(accelerator)


def clips_shards():
    """By the norm of all ranks' rows."""
    accelerator = weft.trainers.accelerate(Accelerator(cpu=True))
    weft.init()
    rank = accelerator.process_index
    model = accelerator.prepare(weft.nn.shard_embeddings(Model(), min_rows=50))
    accelerator.backward(model(batch(0, rank, 2)).square().mean())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
    reference = Model(sparse=False)
    reference(batch(0, 0, 1)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(norm, expected)
    table = model.module.table
    norm = accelerator.clip_grad_norm_([table.weight], 0.001)  # as of one of two optimizers
    expected = nn.utils.clip_grad_norm_([reference.table.weight], 0.001)
    torch.testing.assert_close(norm, expected)
    rows = reference.table.weight.grad[table.first :][: len(table.weight)]
    torch.testing.assert_close(table.weight.grad.to_dense(), rows)


def has_state_of_shards():
    """Of an optimizer that Accelerate has wrapped, and that has made no step."""
    accelerator = weft.trainers.accelerate(Accelerator(cpu=True))
    model = weft.nn.shard_embeddings(Model(), min_rows=50)
    model, update = accelerator.prepare(model, torch.optim.NAdam(model.parameters()))
    kept = weft.nn.sharded_state(model, update)["optimizer"]["state"]
    assert kept["table.weight"]["exp_avg"].shape == (50, 4) and kept["out.bias"]["mu_product"] == 1
    assert not update.state


def test_sparse_gradients_are_carried_and_clipped_by_accelerate():
    processes(2, program)
