"""`sync_grads` and `sync_params` beside FSDP2, where DDP's hook does not reach."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft
from weft.testing import processes


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(rank):
    return torch.linspace(-1, 1, 12).reshape(4, 3) + rank


def program():
    """A mesh of replicas by shards: FSDP2 reduces along the shards, weft along the replicas."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    sharded = model()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.add_(rank)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh["shard"])
    weft.sync_params(sharded, group=mesh["replica"])
    sharded(batch(rank)).square().sum().backward()
    if rank == 1:
        sharded[2].bias.grad = None  # as if it had not been used here
    weft.sync_grads(sharded, group=mesh["replica"])
    found = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
    dist.destroy_process_group()
    return found


def test_replicas_of_a_sharded_model_are_in_step():
    found = processes(2, program)
    wanted = {}
    for rank in range(2):
        alone = model()
        alone(batch(rank)).square().sum().backward()
        for name, parameter in alone.named_parameters():
            share = torch.zeros(2) if (rank, name) == (1, "2.bias") else parameter.grad
            wanted[name] = wanted.get(name, 0) + share / 2
    for each in found:
        for name, gradient in each.items():
            torch.testing.assert_close(gradient, wanted[name])


def overlapping(shards):
    """Three steps, gradients reduced along the replicas while FSDP2's backward goes on."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replica", "shard"))
    replica = mesh["replica"].get_local_rank()
    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh["shard"])
    overlap = weft.overlap_grads(sharded, group=mesh["replica"], bucket_bytes=1)
    begun = []
    for step in range(3):
        sharded.zero_grad()
        sharded(batch(replica + step)).square().sum().backward()
        begun.append(len(overlap._works))
        weft.sync_grads(sharded, group=mesh["replica"])
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    found = {name: p.full_tensor().detach() for name, p in sharded.named_parameters()}
    dist.destroy_process_group()
    return rank, begun, found


@pytest.mark.parametrize("shards", [1, 2])
def test_overlap_beside_fully_shard(shards):
    alone = model()
    for step in range(3):
        alone.zero_grad()
        for replica in range(2):
            (alone(batch(replica + step)).square().sum() / 2).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    for _, begun, found in processes(2 * shards, overlapping, shards):
        assert begun == [4] * 3  # all of them, before backward ended
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach())
