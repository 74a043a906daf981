"""`overlap_grads`: what it does while backward runs, and what it refuses.

That its sums are those of `sync_grads` is in test_sync_grads.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.testing import spmd

EVERYWHERE = ("threads", "device", "processes", "torch")


@spmd(2, on=("threads", "device"))
def test_reduction_begins_before_backward_ends(group):
    """The last layer's gradients are on their way when the first layer's hook sees this."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen = []
    weft.overlap_grads(module, bucket_bytes=1)
    made = group.worker.made
    module[0].weight.register_hook(lambda gradient: seen.append(group.worker.made - made))
    module(torch.ones(1, 2)).sum().backward()
    weft.sync_grads(module)
    assert seen[0] >= 2


@spmd(2, on=EVERYWHERE)
def test_accumulating_takes_a_pause(group):
    module = nn.Linear(2, 1)
    overlap = weft.overlap_grads(module, average=False)
    batch = torch.ones(1, 2) * (group.rank + 1)
    with overlap.paused():
        module(batch).sum().backward()
    module(batch).sum().backward()
    weft.sync_grads(module, average=False)
    assert module.weight.grad.tolist() == [[6, 6]]


def changes_too_late(group, bucket_bytes):
    module, last = nn.Linear(2, 1), group.size - 1
    weft.overlap_grads(module, average=False, bucket_bytes=bucket_bytes)
    for _ in range(4):
        module(torch.ones(1, 2)).sum().backward()
        if group.rank == last:
            module(torch.ones(1, 2)).sum().backward()
        with pytest.raises(weft.WeftError, match=rf"^rank {last}: the gradient of .* changed"):
            weft.sync_grads(module, average=False)
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        weft.sync_grads(module, average=False)
        assert module.weight.grad.tolist() == [[group.size] * 2]


@spmd(1, 2, 3, on=EVERYWHERE)
def test_a_gradient_that_changes_too_late_is_an_error_on_every_rank(group):
    changes_too_late(group, 1 << 20)


@spmd(
    1, 2, 3, on=("processes",)
)  # threads see that what is being sent changes, and break the group
def test_a_gradient_that_changes_in_a_bucket_of_its_own_is_too(group):
    changes_too_late(group, 1)


@spmd(2, 3, on=EVERYWHERE)
def test_ranks_that_began_more_buckets_meet_again_after_an_error(group):
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    weft.overlap_grads(module, average=False, bucket_bytes=1)
    for bad in (0, group.size - 1):
        if group.rank == bad:  # it has come to the first bucket, the others to the last
            module[3].weight.grad_dtype = None
            module[3].weight.grad = torch.zeros(2, 2, dtype=torch.float64)
        else:
            module(torch.ones(1, 2)).sum().backward()
        with pytest.raises(weft.WeftError, match=rf"rank {bad}: the gradient of '3.weight' is"):
            weft.sync_grads(module, average=False)
        module.zero_grad()
        module[3].weight.grad_dtype = torch.float32
        module(torch.ones(1, 2)).sum().backward()
        weft.sync_grads(module, average=False)
        assert torch.equal(module[3].weight.grad[0], module[3].weight.grad[1])


@spmd(2, on=EVERYWHERE)
def test_overlap_does_not_pass_over_parameters_that_were_replaced(group):
    module = nn.Linear(2, 1)
    overlap = weft.overlap_grads(module)
    module.weight = nn.Parameter(torch.ones(1, 2))
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(weft.WeftError, match=r"other parameters than when overlap_grads was"):
        weft.sync_grads(module)
    overlap.remove()
    weft.overlap_grads(module)
    module(torch.ones(1, 2)).sum().backward()  # accumulates
    weft.sync_grads(module)
    assert module.weight.grad.tolist() == [[2, 2]]


@spmd(1, 2, on=EVERYWHERE)
def test_a_wrapper_of_an_overlapped_module_is_not_reduced_twice(group):
    module = nn.Sequential(nn.Linear(2, 1))
    weft.overlap_grads(module, average=False)
    for wrapper in (nn.Sequential(module), torch.compile(module, backend="eager"), module[0]):
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        weft.sync_grads(wrapper, average=False)
        assert module[0].weight.grad.tolist() == [[group.size] * 2]
    with pytest.raises(weft.WeftError, match="overlap already"):
        weft.overlap_grads(module[0])


@spmd(1, 2, on=EVERYWHERE)
def test_a_module_that_is_overlapped_in_part_is_refused_and_the_next_call_works(group):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    weft.overlap_grads(module[0], average=False)
    module(torch.ones(1, 2)).sum().backward()
    last = group.size - 1
    with pytest.raises(weft.WeftError, match=rf"^rank {last}: the module has some of the param"):
        weft.sync_grads(module if group.rank == last else module[0], average=False)
    module.zero_grad()
    module(torch.ones(1, 2)).sum().backward()
    weft.sync_grads(module[0], average=False)
    weft.sync_grads(module[1], average=False)
    assert module[1].bias.grad.item() == group.size


@spmd(2, on=EVERYWHERE)
def test_what_overlap_refuses(group):
    module = nn.Linear(2, 1)
    overlap = weft.overlap_grads(module)
    with pytest.raises(weft.WeftError, match="overlap already"):
        weft.overlap_grads(module)
    for other in ({"average": False}, {"wire_dtype": torch.bfloat16}):
        with pytest.raises(weft.WeftError, match="another group, average or wire_dtype"):
            weft.sync_grads(module, **other)
    overlap.remove()
    with pytest.raises(weft.WeftError, match=r"'weight' is .* on rank 0, and .* on rank 1"):
        weft.overlap_grads(nn.Linear(2 + group.rank, 1))
    with pytest.raises(weft.WeftError, match="rank 1: bucket_bytes is 0: pass a positive"):
        weft.overlap_grads(module, bucket_bytes=1 - group.rank)
    with pytest.raises(weft.WeftError, match="rank 0: module is a int"):
        weft.overlap_grads(module if group.rank else 3)
