"""FSDP, DTensor and checkpoints over `cpu:weft`, on one rank, and on more than there are rows."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from weft.testing import processes

STEPS = 2
BATCH = 42  # of all ranks together


def made():
    """Of six ranks the last has no row of any layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))


def train(model, rank, ranks):
    """The parameters after some steps with clipped gradients; a step has two backwards."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):
            if isinstance(model, dist.fsdp.FSDPModule):
                model.set_requires_gradient_sync(half == 1)
            generator = torch.Generator().manual_seed(2 * step + half)
            batch = torch.rand(BATCH, 3, generator=generator).chunk(ranks)[rank]
            model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def sharded(mesh, again=True):
    model = made()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=again)
    return model


def program(size, wanted, folder):
    dist.init_process_group("cpu:weft")
    mesh = init_device_mesh("cpu", (size,))
    meshes = [mesh]
    if size % 2 == 0:
        names = ("replica", "shard")
        meshes.append(init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names))
    # without a second mesh both with the first one
    for each, again in zip((mesh, meshes[-1]), (True, False), strict=True):
        model = sharded(each, again)
        found = [parameter.full_tensor() for parameter in train(model, dist.get_rank(), size)]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    other = sharded(mesh)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    assert all(map(torch.equal, found, [each.full_tensor() for each in other.parameters()]))

    redistribute(mesh)
    dist.destroy_process_group()


def of_the_first_kind(size):
    """It frees and fills the storages of what goes through the collectives."""
    dist.init_process_group("cpu:weft")
    trained = []
    for whole in (True, False):
        model = made()
        if not whole:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            batch = torch.rand(BATCH, 3, generator=torch.Generator().manual_seed(step))
            model(batch if whole else batch.chunk(size)[dist.get_rank()]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with nullcontext() if whole else FullyShardedDataParallel.summon_full_params(model):
            trained.append([each.detach().flatten().clone() for each in model.parameters()])
    torch.testing.assert_close(torch.cat(trained[1]), torch.cat(trained[0]))
    dist.destroy_process_group()


def redistribute(mesh):
    """From every placement to every other: of fewer rows than ranks, as many, and more."""
    placements = (Shard(0), Shard(1), Replicate())
    for rows, columns in ((1, 3), (7, 8), (17, 5)):
        whole = torch.arange(rows * columns).reshape(rows, columns)
        for source, target in itertools.product(placements, placements):
            placed = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            assert torch.equal(placed.full_tensor(), whole), (rows, source, target)
        for target in placements:
            total = DTensor.from_local(whole, mesh, [Partial()]).redistribute(mesh, [target])
            assert torch.equal(total.full_tensor(), mesh.size() * whole), (rows, target)


@pytest.mark.parametrize("size", [1, 6])
def test_it_trains_as_one_process_does(size, tmp_path):
    processes(size, program, size, train(made(), 0, 1), str(tmp_path))


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_fsdp_trains_so_too(size):
    processes(size, of_the_first_kind, size)
