"""A training goes on from a checkpoint as if there had been none, whatever optimizers keep by then.

Some parameters have had no gradient yet, some are frozen, and are trained again later.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim

import weft
from weft.testing import processes, run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of Adagrad

ROWS = 5  # of 4 ranks the last has none
STEPS = 9

# the steps from which on a part is used or, if it is frozen then, not trained
LATE = 5  # `late` and its head are used
FROZEN, THAWED = 3, 6  # `paused` is frozen in between, `still` until then

FRESH, ALL_AT_ONCE = 0, 4  # steps before which a checkpoint is made


class Model(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        for name in ("used", "late", "paused", "still"):
            self.add_module(name, nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=sparse))
        self.small = nn.Embedding(2, 3, sparse=sparse)
        self.out = nn.Linear(3, 2)
        self.late_out = nn.Linear(3, 2)
        drawn = torch.Generator().manual_seed(0)  # and not the one that all threads share
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-1, 1, generator=drawn)

    def prepare(self, step):
        """Freeze what is not trained in this step."""
        self.paused.weight.requires_grad_(not FROZEN <= step < THAWED)
        self.still.weight.requires_grad_(step >= THAWED)

    def forward(self, ids, step):
        seen = self.used(ids) + self.paused(ids) + self.still(ids) + self.small(ids[:, 0] % 2)
        result = self.out(seen)
        return result + self.late_out(self.late(ids)) if step >= LATE else result

    def tables(self):
        return [part.weight for name, part in self.named_children() if "out" not in name]

    def dense(self):
        return [*self.out.parameters(), *self.late_out.parameters()]


def of_all(kind, **options):
    return lambda model: [kind(model.parameters(), lr=0.1, **options)]


def sparse_adam(model):
    return [optim.SparseAdam(model.tables(), lr=0.1), optim.AdamW(model.dense(), lr=0.1)]


def sgd_and_sparse_adam(model):
    return [optim.SGD(model.dense(), lr=0.1), optim.SparseAdam(model.tables(), lr=0.1)]


# whether gradients of tables are sparse, and the optimizers of a model
OPTIMIZERS = {
    "momentum": (False, of_all(optim.SGD, momentum=0.9, weight_decay=0.1)),
    "damped momentum": (False, of_all(optim.SGD, momentum=0.9, dampening=0.5)),
    "sparse momentum": (True, of_all(optim.SGD, momentum=0.9, dampening=0.5)),
    "Adam": (False, of_all(optim.Adam, weight_decay=0.1, amsgrad=True)),
    "AdamW": (False, of_all(optim.AdamW)),
    "SparseAdam": (True, sparse_adam),
    "Adagrad": (False, of_all(optim.Adagrad, weight_decay=0.1, initial_accumulator_value=0.1)),
    "sparse Adagrad": (True, of_all(optim.Adagrad)),
    "RMSprop": (False, of_all(optim.RMSprop, weight_decay=0.1, momentum=0.5, centered=True)),
    "NAdam": (False, of_all(optim.NAdam, weight_decay=0.1)),
    "Rprop": (False, of_all(optim.Rprop)),
    "ASGD": (False, of_all(optim.ASGD, weight_decay=0.1, t0=2)),
    "SGD": (True, of_all(optim.SGD)),  # which keeps nothing
    "SGD and SparseAdam": (True, sgd_and_sparse_adam),
}


def made(kind, group):
    sparse, optimizers_of = OPTIMIZERS[kind]
    model = Model(sparse).double()
    for name in ("used", "late", "paused", "still"):
        setattr(model, name, weft.nn.shard_embeddings(getattr(model, name), 1, group=group))
    model.prepare(0)
    return model, optimizers_of(model)


def train(model, optimizers, steps, group, rank, size):
    """The loss of each step, over the same words on any number of ranks."""
    losses = []
    for step in steps:
        model.prepare(step)
        ids = torch.randint(ROWS, (6, 2), generator=torch.Generator().manual_seed(step))
        own = ids.tensor_split(size)[rank]
        loss = (model(own, step) - own).square().sum() * size / len(ids)
        for optimizer in optimizers:
            optimizer.zero_grad()
            for settings in optimizer.param_groups:
                settings["lr"] = 0.02 / (1 + step)  # what is new later begins with another one
        loss.backward()
        weft.sync_grads(model, group=group)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(weft.all_reduce(loss.detach(), "avg", group).item())
    return losses


@functools.cache
def undisturbed(kind):
    """The losses of all steps without a checkpoint, in one process."""

    def program(group):
        return train(*made(kind, group), range(STEPS), group, 0, 1)

    return run(1, program)[0]


def save(kind, when, place, members):
    rank, size = dist.get_rank(members), dist.get_world_size(members)
    model, optimizers = made(kind, members)
    losses = train(model, optimizers, range(when), members, rank, size)
    assert losses == pytest.approx(undisturbed(kind)[:when], rel=1e-9), kind
    state = weft.nn.sharded_state(model, optimizers)
    dcp.save(state, checkpoint_id=place, process_group=members)


def load(kind, when, place, members):
    """Load a checkpoint into a new model and new optimizers, and compare the losses."""
    rank, size = dist.get_rank(members), dist.get_world_size(members)
    model, optimizers = made(kind, members)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.prepare(when)
    state = weft.nn.sharded_state(model, optimizers)
    dcp.load(state, checkpoint_id=place, process_group=members)
    weft.nn.load_sharded_state(model, optimizers, state)
    losses = train(model, optimizers, range(when, STEPS), members, rank, size)
    assert losses == pytest.approx(undisturbed(kind)[when:], rel=1e-9), kind


def save_and_load(folder):
    """All kinds of optimizers, by all numbers of ranks."""
    with weft.init() as group:
        groups = {size: dist.new_group(range(size)) for size in (1, 2, 3, 4)}
        kinds = itertools.cycle(OPTIMIZERS)
        numbers = itertools.product(groups, groups)
        cases = [(kind, ALL_AT_ONCE, *each) for kind, each in zip(kinds, numbers, strict=False)]
        # before it keeps anything, and where it does from the beginning
        cases += [(kind, FRESH, 1, 4) for kind in ("Adam", "SparseAdam", "Adagrad")]
        for number, (kind, when, savers, loaders) in enumerate(cases):
            place = f"{folder}/{number}"
            if group.rank < savers:
                save(kind, when, place, groups[savers])
            weft.barrier()
            if group.rank < loaders:
                load(kind, when, place, groups[loaders])
            weft.barrier()


def test_it_goes_on_with_any_number_of_ranks(tmp_path):
    processes(4, save_and_load, tmp_path)
