"""A sharded table in a model of DistributedDataParallel: backward comes to it in any order.

Buckets are reduced in one order on all ranks. Where between them a rank's backward comes to the
table is autograd's matter, and follows from the graph of that rank's batch.
"""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from cases import in_default_group
from weft.bootstrap.local import launch
from weft.testing import spmd

ROWS, WIDTH = 11, 4
ONE_BY_ONE = 1e-6  # MB of a bucket: each parameter has its own


class Towers(nn.Module):
    """A table and a dense layer, in an order that is the batch's, and a branch that is, too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        generator = torch.Generator().manual_seed(7)  # ranks may be threads
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, words, table_first, branches):
        ones = torch.ones(WIDTH)
        if table_first:
            rows = self.table(words)
            factors = self.dense(ones)
        else:
            factors = self.dense(ones)
            rows = self.table(words)
        if branches:
            factors = factors + self.branch(ones)
        return self.last(rows * factors).pow(2).sum()


def batch_of(rank, step, *, may_branch):
    """A rank's words, and what its forward does."""
    words = torch.tensor([1 + rank, 3, (3 * rank + step) % ROWS])
    table_first = (rank + step) % 2 == 0
    return words, table_first, rank == step % 3 or not may_branch


def check_gradients(found, whole, size, step, *, may_branch):
    """Check gradients, of which this rank has some rows, against those of all batches here."""
    whole.zero_grad()
    for rank in range(size):
        (whole(*batch_of(rank, step, may_branch=may_branch)) / size).backward()
    for name, wanted in whole.named_parameters():
        given = found.get_parameter(name).grad
        if wanted.grad is None:  # nobody has used the branch
            assert given is None or not given.any(), name
            continue
        expected = wanted.grad.to_dense()
        if name == "table.weight":
            expected = expected[found.table.first :][: len(given)]
        torch.testing.assert_close(given.to_dense(), expected)


def models(group=None):
    """A model whose table is cut, and the same as it was."""
    whole = Towers()
    return weft.nn.shard_embeddings(copy.deepcopy(whole), min_rows=ROWS, group=group), whole


def check_training(size, *, may_branch):
    cut, whole = models()
    trained = DistributedDataParallel(
        cut, find_unused_parameters=may_branch, bucket_cap_mb=ONE_BY_ONE
    )
    weft.ddp.register(trained)
    for step in range(4):
        trained.zero_grad()
        trained(*batch_of(dist.get_rank(), step, may_branch=may_branch)).backward()
        check_gradients(cut, whole, size, step, may_branch=may_branch)


@pytest.mark.parametrize(("backend", "wire"), [("gloo", "tcp"), ("weft", "tcp"), ("gloo", "group")])
@pytest.mark.parametrize("may_branch", [False, True])
@spmd(2, 3, on=("processes",))
def test_a_rank_may_come_to_its_table_in_another_order(group, backend, wire, may_branch, tmp_path):
    with in_default_group(group, tmp_path, backend), weft.init(timeout=60, wire=wire):
        check_training(group.size, may_branch=may_branch)


def losing_its_last_rank(where):
    """The last rank dies in backward, before its table or behind it; the others raise that."""
    with weft.init(timeout=60) as group:
        cut, _ = models()
        trained = DistributedDataParallel(cut, bucket_cap_mb=ONE_BY_ONE)
        weft.ddp.register(trained)
        trained(*batch_of(0, 0, may_branch=False)).backward()
        if group.rank == group.size - 1:
            dies = cut.table if where == "the table" else cut.dense
            hooked = dies
            hooked.register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(weft.WireError) as caught:
            # whose backward begins with what its forward came to last
            trained(torch.tensor([1, 2]), where != "the table", True).backward()
        assert caught.value.culprit == group.size - 1
        for lost in (group.check, lambda: cut.table(torch.tensor([1]))):  # both lines are
            with pytest.raises(weft.WireError, match=rf"rank {group.size - 1} died"):
                lost()
        raise caught.value


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("where", ["the table", "a dense layer"])
def test_a_rank_that_dies_is_named_whichever_line_waits_for_it(ranks, where):
    with pytest.raises(weft.WireError) as caught:
        launch(ranks, losing_its_last_rank, [where], env={"OMP_NUM_THREADS": "1"})
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    for rank in range(ranks - 1):
        assert f"WireError: rank {rank}: rank {ranks - 1} died" in told or (
            str(caught.value).startswith(f"rank {rank}: rank {ranks - 1} died")
        )
