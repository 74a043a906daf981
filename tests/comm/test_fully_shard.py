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


def replicated(shards):
    """A mesh of replicas by shards: FSDP2 reduces along the shards, weft along the replicas.

    Three steps, and the gradients of one more.
    """
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replica", "shard"))
    replica = mesh["replica"].get_local_rank()
    sharded = model()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.add_(replica)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh["shard"])
    weft.sync_params(sharded, group=mesh["replica"])
    for step in range(3):
        sharded.zero_grad()
        sharded(batch(replica + step)).square().sum().backward()
        weft.sync_grads(sharded, group=mesh["replica"])
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    sharded.zero_grad()
    sharded(batch(replica)).square().sum().backward()
    if replica == 1:
        sharded[2].bias.grad = None  # as if it had not been used here
    weft.sync_grads(sharded, group=mesh["replica"])
    found = [(p.full_tensor().detach(), p.grad.full_tensor()) for p in sharded.parameters()]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_of_a_sharded_model_are_in_step(shards):
    alone = model()

    def add_gradients(replica, step=0):
        (alone(batch(replica + step)).square().sum() / 2).backward()

    for step in range(3):
        alone.zero_grad()
        for replica in range(2):
            add_gradients(replica, step)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    alone.zero_grad()
    add_gradients(0)
    share = alone[2].bias.grad.clone()
    add_gradients(1)
    alone[2].bias.grad = share
    for found in processes(2 * shards, replicated, shards):
        for parameter, (value, gradient) in zip(alone.parameters(), found, strict=True):
            torch.testing.assert_close(value, parameter.detach())
            torch.testing.assert_close(gradient, parameter.grad)


def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(10, 3, mode="sum", sparse=True), model())


def of_words(rank):
    return torch.tensor([[1, 2, 2], [4 + rank, 1, 9]])


def beside(most):
    """The norm, and the gradients after it was clipped, of a model whose table FSDP2 ignores."""
    with weft.init() as group:
        trained = words()
        table = trained[0]
        fully_shard(trained, ignored_params={table.weight})
        trained(of_words(group.rank)).square().sum().backward()
        with pytest.raises(weft.WeftError, match=r"modules differ: .* of a DTensor on rank 0"):
            weft.sync_grads(trained)  # FSDP2 has reduced the others
        weft.sync_grads(table)
        norm = weft.clip_grad_norm_(trained, most)
        return norm, whole_gradients(trained)


def whole_gradients(model):
    whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    assert whole[0].is_sparse
    return [gradient.to_dense() for gradient in whole]


@pytest.mark.parametrize("most", [0.5, 1e9])
def test_a_replicated_sparse_table_beside_it(most):
    alone = words()
    for rank in range(2):
        (alone(of_words(rank)).square().sum() / 2).backward()
    for parameter in alone.parameters():
        parameter.grad = parameter.grad.to_dense()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), most)
    clipped = [parameter.grad for parameter in alone.parameters()]
    for norm, by_norm in processes(2, beside, most):
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(by_norm, clipped)
